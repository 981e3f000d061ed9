"""Adapters of PEFT: named on the command line, asked for by name, allowed by key, and right to the token."""

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file, save_file  # noqa: E402 - they need those
from support.repository_model import MODEL  # noqa: E402
from support.serving import running, served, serving, stream  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from kvcache.server import adapters, command, keys  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # those of PEFT

KEYS = {
    "sk-one": {"name": "one", "quota": 128, "pinned": 256},
    "sk-two": {"name": "two", "adapters": ["v1.5-sql"]},
    "sk-three": {"name": "three", "adapters": []},
}
NAMES = ["a-model", "v1.5-sql", "chat"]
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def save_adapter(folder, seed, model=None, **changes):
    """Save a random adapter of the repository's model, or of another one."""
    wrapped = peft.get_peft_model(model or served.load(MODEL)[0], peft.LoraConfig(**{**LORA, **changes}))
    torch.manual_seed(seed)
    for path, weight in wrapped.named_parameters():
        if "default" in path:  # the adapter's name
            weight.data = torch.randn_like(weight) * 0.08 + (0 if "lora" in path else weight.data)
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {"v1.5-sql": save_adapter(root / "sql", 1), "chat": save_adapter(root / "chat", 2, use_dora=True)}


def with_adapters(folders):
    """Return the repository's model with these adapters, and their names."""
    model, tokenizer = served.load(MODEL)
    return (model, tokenizer), adapters.add_adapters(model, adapters.read_adapters(folders.items(), "a-model"))


@pytest.fixture(scope="module")
def client(folders):
    model, names = with_adapters(folders)
    with serving(model, keys=KEYS, adapters=names) as one:
        yield one


def theirs(folder):
    """Return a function that generates with PEFT's own model, and transformers' own cache."""
    model, tokenizer = served.load(MODEL)
    wrapped = model if folder is None else peft.PeftModel.from_pretrained(model, folder)

    def generate(prompt, seed=0, temperature=0):
        tokens = tokenizer(prompt, return_tensors="pt")
        how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        torch.manual_seed(seed)
        found = wrapped.generate(**tokens, max_new_tokens=24, **how)
        return tokenizer.decode(found[0, tokens.input_ids.shape[1] :])

    return generate


def test_each_request_has_its_adapters_tokens(client, folders):
    """Two adapters and the model itself at once, greedily and by chance, whole and as streams."""
    prompts = [f"{speaker}:\nWhat say you?\n\n" for speaker in ("ROMEO", "JULIET", "NURSE")]
    asks = [
        {"model": name, "prompt": prompt, "max_tokens": 24, "temperature": temperature, "seed": seed}
        for seed, (prompt, temperature, name) in enumerate(itertools.product(prompts, (0, 0.8), NAMES))
    ]
    with ThreadPoolExecutor(16) as pool:
        got = [*pool.map(lambda ask: client.ask("/v1/completions", ask), asks)]
    alone = {name: theirs(folders.get(name)) for name in NAMES}
    want = [alone[ask["model"]](ask["prompt"], ask["seed"], ask["temperature"]) for ask in asks]
    assert [(status, body["model"], body["choices"][0]["text"]) for status, body in got] == [
        (200, ask["model"], text) for ask, text in zip(asks, want, strict=True)
    ]
    assert len({*want[:3]}) == 3  # the adapters change something
    connection, response = client.open("/v1/completions", {**asks[1], "stream": True})
    with contextlib.closing(connection):
        assert "".join(one["choices"][0]["text"] for one in stream(response)) == want[1]
    messages = [{"role": "user", "content": "Who is there?"}]
    _, chat = client.ask("/v1/chat/completions", {"model": "chat", "messages": messages, "max_tokens": 2})
    assert chat["model"] == "chat"
    _, default = client.ask("/v1/completions", {name: asks[0][name] for name in asks[0] if name != "model"})
    assert (default["model"], default["choices"][0]["text"]) == ("a-model", want[0])
    client.wait_until_idle()
    client.cache.validate()


@pytest.mark.parametrize(
    "changes",
    [
        {
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2},
            "target_modules": ["q_proj"],
            "layers_to_transform": [1, 2],
        },
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"trainable_token_indices": [65, 66, 82]},
        {"target_modules": ["embed_tokens", "q_proj"]},
    ],
)
def test_kinds_of_adapters(folders, tmp_path, changes):
    """Beside an adapter that leaves these layers alone."""
    kept = {"chat": folders["chat"], "new": save_adapter(tmp_path, 3, **changes)}
    model, names = with_adapters(kept)
    with serving(model, 4096, None, adapters=names) as client:
        for name in ("new", "chat", "a-model"):
            [choice] = client.complete("ROMEO:\n", model=name, max_tokens=24)["choices"]
            assert choice["text"] == theirs(kept.get(name))("ROMEO:\n")


def test_names(client):
    """A key sees the models that it may ask for, and no others."""
    for key, names in (("sk-one", NAMES), ("sk-two", NAMES[:2]), ("sk-three", NAMES[:1])):
        _, listed = client.ask("/v1/models", key=key)
        assert [one["id"] for one in listed["data"]] == names
        for name in [*NAMES, "adapter0", "sql"]:
            told, asked = client.ask(f"/v1/models/{name}", key=key), client.ask(
                "/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1}, key=key
            )  # fmt: skip
            assert told[0] == asked[0] == (200 if name in names else 404)
            if name not in names:
                error = {"message": f"model: there is {' or '.join(map(repr, names))} alone", "param": "model"}
                assert told[1]["error"] == asked[1]["error"] == {
                    **error, "type": "invalid_request_error", "code": "model_not_found",
                }  # fmt: skip


def test_a_prompt_is_known_to_its_adapter_alone(client):
    prompt = "A long beginning, which is the same for all. " * 4
    for _ in range(2):
        found = [client.complete(prompt, model=name, max_tokens=1)["usage"] for name in NAMES]
    assert [one["prompt_tokens_details"]["cached_tokens"] for one in found] == [len(prompt) - 1] * 3
    foreign = client.complete(prompt, key="sk-two", model="v1.5-sql", max_tokens=1)["usage"]
    assert foreign["prompt_tokens_details"]["cached_tokens"] == 0
    for name in NAMES:
        assert client.metric(f'kvcache_prefix_hits_total{{model="{name}",tenant="one"}}') >= 1


def test_pins_of_an_adapter(client):
    """They count for the key's limit together."""
    prompt = "A prompt that is to stay, whatever others ask for. " * 3
    before = client.metric("kvcache_server_pinned_tokens")
    for name in ("v1.5-sql", "chat"):
        client.complete(prompt, model=name, max_tokens=1, prompt_cache_retention="24h")
    assert 0 < client.metric("kvcache_server_pinned_tokens") - before < 2 * len(prompt)
    client.engine.prefix.cache.validate()


def test_a_restart_with_a_retrained_adapter(tmp_path):
    """What a store has of an adapter is found again under any name, unless the weights have changed."""
    folder, cached = save_adapter(tmp_path / "sql", 1), []
    prompt = "A long beginning, which is the same. " * 8
    for name in ("sql", "query", "sql"):
        if len(cached) == 2:
            save_adapter(folder, 2)
        model, names = with_adapters({name: folder})
        prefix = served.kept_prompts(model[0], MODEL, f"dir:{tmp_path}/prompts", capacity=4096, dtype="f32")
        with serving(model, 4096, None, adapters=names, prefix=prefix) as client:
            found = [client.complete(prompt, model=one, max_tokens=8)["usage"] for one in (name, "a-model")]
            cached.append([one["prompt_tokens_details"]["cached_tokens"] for one in found])
            for tenant in client.server.server.tenants:
                assert all(one.flush(60) for one in tenant.prefixes.values())
    assert cached[0] == [0, 0]
    assert min(cached[1]) > len(prompt) // 2
    assert cached[2] == [0, cached[1][1]]


def test_the_command(folders):
    given = [f"--adapter={name}={folder}" for name, folder in folders.items()]
    with running("--name", "a-model", *given) as (_, client, said):
        assert said[0].startswith("a-model, v1.5-sql, chat on http://")
        assert client.complete("ROMEO:\n", model="chat", max_tokens=2)["model"] == "chat"


# ---- what is refused at the start


def edited(folder, to, **changes):
    """Copy an adapter's folder, with other fields in its configuration."""
    shutil.copytree(folder, to)
    config = json.loads((to / adapters.CONFIG).read_text())
    (to / adapters.CONFIG).write_text(json.dumps(config | changes))
    return to


def without_weights(folder):
    (folder / adapters.WEIGHTS).unlink()
    return folder


def pickled(folder):
    torch.save(load_file(folder / adapters.WEIGHTS), folder / adapters.PICKLED)
    return without_weights(folder)


def broken(folder):
    (folder / adapters.WEIGHTS).write_bytes(b"no weights")
    return folder


def with_weights(folder, change):
    weights = load_file(folder / adapters.WEIGHTS)
    change(weights)
    save_file(weights, folder / adapters.WEIGHTS)
    return folder


def of_another_model(to, **changes):
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 4} | changes
    return save_adapter(to, 1, LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)))


NORM, FIRST = "base_model.model.model.norm.weight", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda old, new: new, "there is no such folder"),
        (lambda old, new: new.mkdir() or new, "it has no adapter_config.json, which PEFT's save_pretrained writes"),
        (lambda old, new: without_weights(edited(old, new)), "it has no adapter_model.safetensors"),
        (
            lambda old, new: pickled(edited(old, new)),
            "its weights are pickled, which may run code: save them as adapter_model.safetensors",
        ),
        (lambda old, new: edited(old, new, peft_type="IA3"), "its peft_type is 'IA3': LORA alone is served"),
        (lambda old, new: edited(old, new, task_type="SEQ_CLS"), "its task_type is 'SEQ_CLS': CAUSAL_LM is needed"),
        (lambda old, new: edited(old, new, bias="all"), "its configuration has 'bias', which is not served"),
        (
            lambda old, new: edited(old, new, alora_invocation_tokens=[1]),
            "its configuration has 'alora_invocation_tokens', which is not served",
        ),
        (lambda old, new: edited(old, new, of_later=[1]), "its configuration has 'of_later', which is not served"),
        (lambda old, new: edited(old, new, layers_pattern="a"), "its adapter_config.json is wrong: ValueError: .*"),
        (lambda old, new: broken(edited(old, new)), "it does not fit the model: SafetensorError: .*"),
        (lambda old, new: edited(old, new, r=3), "it does not fit the model: RuntimeError: .*"),
        (lambda old, new: edited(old, new, target_modules=["c_attn"]), "it does not fit the model: .*c_attn.*"),
        (lambda old, new: of_another_model(new), "it does not fit the model: RuntimeError: .*"),
        (
            lambda old, new: of_another_model(new, hidden_size=256, num_hidden_layers=5),
            "it does not fit the model: .*",
        ),
        (
            lambda old, new: with_weights(edited(old, new), lambda weights: weights.pop(FIRST)),
            "it does not fit the model: it lacks .*layers.0.self_attn.q_proj.lora_A.*, or the model does",
        ),
        (
            lambda old, new: with_weights(edited(old, new), lambda weights: weights.update({NORM: torch.ones(256)})),
            "it changes weights of the model itself, such as model.norm.weight",
        ),
        (
            lambda old, new: edited(old, new, init_lora_weights="pissa"),
            r"it changes weights of the model itself, such as model.layers.0.*",
        ),
    ],
)
def test_bad_folders(folders, tmp_path, make, message):
    """Each is refused in a sentence, the model's weights included, which other requests share."""
    folder = make(folders["v1.5-sql"], tmp_path / "new")
    options = command.Options(MODEL, adapters=(("good", folders["chat"]), ("bad", folder)))
    with pytest.raises(ValueError, match=f"^--adapter bad={folder}: {message}$"):
        command.make(options)


def test_an_adapter_that_cannot_be_loaded_twice(folders):
    for names in (["a", "a"], ["model"]):
        options = command.Options(MODEL, adapters=tuple((name, folders["chat"]) for name in names))
        with pytest.raises(ValueError, match=f"^--adapter {names[0]}=.*: the name is taken, by the model or another "):
            command.make(options)


def test_an_adapter_is_no_model(folders, tmp_path):
    """transformers would load it with the model, unasked, and pickled weights as well."""
    both = tmp_path / "both"
    shutil.copytree(MODEL, both)
    shutil.copy(folders["chat"] / adapters.CONFIG, both)
    for folder in (folders["chat"], both):
        with pytest.raises(ValueError, match=r"describes an adapter: give the folder of its model, and --adapter"):
            served.load(folder)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("sql", "adapters of one must be a list of names"),
        ([1], "adapters of one must be a list of names"),
        (["sql", "chat"], "adapters of one has 'chat', which no --adapter names"),
    ],
)
def test_wrong_names_in_a_file_of_keys(tmp_path, names, message):
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"sk-one": {"name": "one", "adapters": names}}))
    with pytest.raises(ValueError, match=f"{message}$"):
        keys.read_keys(file, ["sql"])


def test_a_folder_without_a_name():
    full = [sys.executable, "-m", "kvcache", "serve", str(MODEL), "--adapter", "sql"]
    said = subprocess.run(full, capture_output=True, text=True, check=False)
    assert said.returncode == 2
    assert "'sql' is no NAME=FOLDER" in said.stderr
