"""kvcache.server on a folder of transformers: its tokenizer, its chat template, its generation config."""

import contextlib
import copy
import json
import random
import shutil

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import safetensors.torch as safetensors  # noqa: E402 - transformers needs it
import tokenizers  # noqa: E402 - transformers needs it
from support.serving import KEYS, served, serving, stream  # noqa: E402 - it needs those

from kvcache.server import application, command, text  # noqa: E402

TEMPLATE = """\
{{ bos_token }}{% for one in messages %}{% if one.role == 'system' and not loop.first %}
{{ raise_exception('the system speaks first') }}{% endif %}<|{{ one.role }}|>{{ one.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
SPECIAL = ["<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEXTS = ["Who is there? 😀 Ärger und Größe", "to be, or not to be: 時は金なり", "naïve — «déjà vu» 🎭🎭"]


def make_tokenizer():
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS, tokenizers.trainers.BpeTrainer(vocab_size=290, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="<|end|>", extra_special_tokens=SPECIAL[2:],
        chat_template=TEMPLATE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("a model")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(path)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2, vocab_size=len(tokenizer),
        max_position_embeddings=256, initializer_range=0.3, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=0, eos_token_id=1, do_sample=True, temperature=0.9, top_k=5
    )
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return served.load(folder)


@pytest.fixture(scope="module")
def client(model):
    with serving(model) as one:
        yield one


def generated(model, ids, seed=0, **options):
    """Return what `generate` of transformers appends, with its own cache."""
    one = transformers.LlamaForCausalLM(copy.deepcopy(model[0].config))
    one.load_state_dict(model[0].state_dict())
    one.generation_config = model[0].generation_config
    one.set_attn_implementation("eager")
    torch.manual_seed(seed)
    return one.eval().generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()


def chat(client, messages, **options):
    status, body = client.ask("/v1/chat/completions", {"messages": messages, **options})
    assert status == 200, body
    return body


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is there? 😀"}]


def test_a_chat(client, model):
    """Its prompt comes from the template, and its text is that of `generate`."""
    body = chat(client, MESSAGES, max_tokens=24, temperature=0)
    prompt = "<s><|system|>Be brief.<|end|><|user|>Who is there? 😀<|end|><|assistant|>"
    ids = model[1](prompt, add_special_tokens=False)["input_ids"]
    wanted = generated(model, ids, max_new_tokens=24, do_sample=False)
    assert body["usage"]["prompt_tokens"] == len(ids)
    assert body["usage"]["completion_tokens"] == len(wanted)
    [choice] = body["choices"]
    assert choice["message"]["content"] == model[1].decode(wanted, skip_special_tokens=True)
    assert choice["finish_reason"] == ("stop" if wanted[-1] == 1 else "length")
    developer = [{"role": "developer", "content": "Be brief."}, MESSAGES[1]]
    assert chat(client, developer, max_tokens=24, temperature=0)["choices"] == body["choices"]
    again = chat(client, MESSAGES, max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(ids) - 1


def test_a_completion(client, model):
    """The tokenizer's first token comes before the text; tokens are taken as they are."""
    ids = model[1]("to be")["input_ids"]
    assert ids[0] == 0
    body = client.complete("to be", max_tokens=12)
    assert body["usage"]["prompt_tokens"] == len(ids)
    wanted = generated(model, ids, max_new_tokens=12, do_sample=False)
    assert body["choices"][0]["text"] == model[1].decode(wanted, skip_special_tokens=True)
    assert client.complete(ids, max_tokens=12)["choices"] == body["choices"]


def test_sampling(client, model):
    """What a request leaves out is as the generation config says; top_k is never transformers' own default."""
    ids = model[1]("to be")["input_ids"]
    for given, wanted in [
        ({}, {"temperature": 0.9, "top_p": 1.0, "top_k": 5}),
        ({"temperature": 1.5, "top_p": 0.8}, {"temperature": 1.5, "top_p": 0.8, "top_k": 5}),
    ]:
        status, body = client.ask("/v1/completions", {"prompt": ids, "max_tokens": 12, "seed": 7, **given})
        assert status == 200
        tokens = generated(model, ids, seed=7, max_new_tokens=12, do_sample=True, **wanted)
        assert body["choices"][0]["text"] == model[1].decode(tokens, skip_special_tokens=True)


def test_a_generation_config_that_is_greedy_and_short(client, model, monkeypatch):
    """Unless the request says otherwise."""
    monkeypatch.setattr(model[0].generation_config, "do_sample", False)
    monkeypatch.setattr(model[0].generation_config, "max_new_tokens", 5)
    greedy = client.complete("to be", max_tokens=5)
    for body in ({}, {"top_p": 0.9}):
        _, found = client.ask("/v1/completions", {"prompt": "to be", **body})
        assert found["choices"] == greedy["choices"]
    assert chat(client, MESSAGES, ignore_eos=True)["usage"]["completion_tokens"] == 5
    assert client.complete("to be", min_tokens=9, ignore_eos=True)["usage"]["completion_tokens"] == 9
    assert client.complete("to be", max_tokens=-1, ignore_eos=True)["usage"]["total_tokens"] == 256
    drawn = [client.complete("to be", temperature=1.5, seed=seed)["choices"][0]["text"] for seed in range(4)]
    assert len({*drawn}) > 1


def test_a_tiny_temperature_takes_the_most_likely_token(client):
    tiny = client.complete("to be", max_tokens=8, temperature=1e-40)
    assert tiny["choices"] == client.complete("to be", max_tokens=8)["choices"]


def test_the_end_of_a_text_is_the_models(client, model, monkeypatch):
    """An answer to a chat may take the rest of the context, unless it comes to the token that ends it."""
    monkeypatch.setattr(model[0].generation_config, "eos_token_id", None)
    body = chat(client, MESSAGES, temperature=0)
    assert body["usage"]["total_tokens"] == 256
    after = body["choices"][0]["message"]["content"]
    ids = model[1].apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    token = generated(model, ids, max_new_tokens=5, do_sample=False)[-1]
    monkeypatch.setattr(model[0].generation_config, "eos_token_id", token)
    body = chat(client, MESSAGES, temperature=0)
    assert body["choices"][0]["finish_reason"] == "stop"
    assert after.startswith(body["choices"][0]["message"]["content"])
    assert body["usage"]["completion_tokens"] <= 5


def test_stop_strings_of_the_model(model, monkeypatch):
    """Its generation config may have some, as for `generate`."""
    ids = model[1]("to be")["input_ids"]
    stop = model[1].decode(generated(model, ids, max_new_tokens=12, do_sample=False)[4:6])
    monkeypatch.setattr(model[0].generation_config, "stop_strings", [stop])
    wanted = generated(model, ids, max_new_tokens=12, do_sample=False, tokenizer=model[1])
    with serving(model) as client:
        body = client.complete("to be", max_tokens=12)
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (len(wanted), "stop")
    assert len(wanted) < 12
    assert body["choices"][0]["text"] == model[1].decode(wanted, skip_special_tokens=True)


def test_what_cannot_change_the_text_is_ignored(client):
    given = {"max_tokens": 4}
    more = {
        "metadata": {"a": "b"}, "user": "me", "store": True, "service_tier": "flex", "tools": [], "n": 1,
        "frequency_penalty": 0.0,
    }  # fmt: skip
    assert client.complete("to be", **given, **more)["choices"] == client.complete("to be", **given)["choices"]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([*MESSAGES, MESSAGES[0]], "messages: the model's chat template refuses them: the system speaks first"),
        ([{"role": "critic", "content": "1"}], "must have a role, one of system, developer, user, assistant, tool"),
        ([{**MESSAGES[1], "tool_calls": [{}]}], "each of tool_calls must have a function with a name"),
    ],
)
def test_chats_that_the_template_refuses(client, messages, said):
    status, body = client.ask("/v1/chat/completions", {"messages": messages})
    assert (status, body["error"]["param"]) == (400, "messages")
    assert said in body["error"]["message"]


@pytest.mark.parametrize("template", ["{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{% for one in %}"])
def test_a_template_that_fails(client, model, monkeypatch, template):
    monkeypatch.setattr(model[1], "chat_template", template)
    status, body = client.ask("/v1/chat/completions", {"messages": MESSAGES})
    assert (status, body["error"]["param"]) == (400, "messages")
    assert "chat template refuses them: " in body["error"]["message"]


def test_a_token_that_the_model_does_not_have(model):
    tokenizer = copy.deepcopy(model[1])
    tokenizer.add_tokens(["<|new|>"])
    with serving((model[0], tokenizer)) as client:
        for path, body in [
            ("completions", {"prompt": "to <|new|>"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "<|new|>"}]}),
        ]:
            status, found = client.ask(f"/v1/{path}", body)
            [name] = body
            assert (status, found["error"]["param"]) == (400, name)
            assert found["error"]["message"] == f"{name}: has '<|new|>', a token that the model does not have"


def test_tools_that_must_not_be_called(client):
    """A chat template without tools is asked for none."""
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert chat(client, MESSAGES, tools=tools, tool_choice="none", max_tokens=1)
    assert client.ask("/v1/chat/completions", {"messages": MESSAGES, "tools": tools})[0] == 400


def test_a_message_as_clients_give_it_back(client):
    """With the fields of an answer that are null."""
    message = {"role": "assistant", "content": "I", "refusal": None, "tool_calls": None}
    assert chat(client, [MESSAGES[1], message, MESSAGES[1]], max_tokens=1)


def test_a_model_without_a_chat_template(client, model, monkeypatch):
    monkeypatch.setattr(model[1], "chat_template", None)
    status, body = client.ask("/v1/chat/completions", {"messages": MESSAGES})
    assert (status, body["error"]["message"]) == (400, "messages: the model has no chat template: use /v1/completions")


def test_an_answer_that_goes_on_begins_with_its_blank(client, model, monkeypatch):
    """Also where a decoder drops the blank with which a text begins, as Llama 2's does."""
    strips = [tokenizers.decoders.ByteLevel(), tokenizers.decoders.Strip(" ", 1, 0)]
    monkeypatch.setattr(model[1].backend_tokenizer, "decoder", tokenizers.decoders.Sequence(strips))
    blank = model[1].convert_tokens_to_ids("\u0120")
    given = {"logit_bias": {str(blank): 100}, "temperature": 0, "max_tokens": 2}
    assert client.complete("to be", **given)["choices"][0]["text"] == "  "
    assert client.complete("to be", echo=True, **given)["choices"][0]["text"] == "to be  "
    [choice] = client.complete("to be", stop=[" "], **given)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    begun = [MESSAGES[1], {"role": "assistant", "content": "I am"}]
    for messages, goes_on, wanted in [(begun, True, "  "), (MESSAGES, False, " ")]:
        [choice] = chat(client, messages, continue_final_message=goes_on, **given)["choices"]
        assert choice["message"]["content"] == wanted


def test_a_stream_of_a_tokenizer(client, model):
    """Its pieces are whole characters, and make the text of the whole answer."""
    given = {"messages": MESSAGES, "max_tokens": 60, "temperature": 2, "seed": 3}
    whole = client.ask("/v1/chat/completions", given)[1]["choices"][0]["message"]["content"]
    connection, response = client.open("/v1/chat/completions", {**given, "stream": True})
    with contextlib.closing(connection):
        pieces = [one["choices"][0]["delta"].get("content", "") for one in stream(response)]
    assert "".join(pieces) == whole


def test_options_of_the_engine(model):
    warning = pytest.warns(UserWarning, match="select=64 changes nothing")
    with warning, serving(model, keys=None, select=64, prompts="int8") as client:
        assert client.complete("to be", max_tokens=4)["usage"]["completion_tokens"] == 4


# ---- text, token by token


@pytest.mark.parametrize("make", [make_tokenizer, text.byte_tokenizer])
def test_text_is_that_of_all_tokens(make):
    """Whole characters at a time, special tokens left out; what is no text is shown as decoding it shows it."""
    tokenizer, choose = make(), random.Random(1)
    for _ in range(200):
        ids = [choose.randrange(len(tokenizer)) for _ in range(choose.randrange(8))]
        ids += tokenizer(choose.choice(TEXTS), add_special_tokens=False)["input_ids"]
        ids += [choose.randrange(len(tokenizer)) for _ in range(choose.randrange(8))]
        shown = text.Text(tokenizer, ())
        assert "".join(shown.add(token)[0] for token in ids) + shown.end()[0] == tokenizer.decode(
            ids, skip_special_tokens=True
        )
    for one in TEXTS:
        shown = text.Text(tokenizer, ())
        pieces = [shown.add(token)[0] for token in tokenizer(one, add_special_tokens=False)["input_ids"]]
        assert "".join(pieces) == one
        assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("make", [make_tokenizer, text.byte_tokenizer])
def test_text_ends_at_the_first_stop_sequence(make):
    """Nothing of it is shown before, however tokens and characters lie."""
    tokenizer, choose = make(), random.Random(2)
    for _ in range(300):
        one = "".join(choose.choices("ab😀ä", k=12))
        stops = ["".join(choose.choices("ab😀ä", k=choose.randrange(1, 4))) for _ in range(choose.randrange(1, 4))]
        shown, pieces, has_stopped = text.Text(tokenizer, stops), [], False
        for token in tokenizer(one, add_special_tokens=False)["input_ids"]:
            piece, has_stopped = shown.add(token)
            pieces.append(piece)
            if has_stopped:
                break
        ends = [(one.find(stop) + len(stop), one.find(stop)) for stop in stops if stop in one]
        assert has_stopped == bool(ends)
        assert "".join(pieces) + ("" if ends else shown.end()[0]) == (one[: min(ends)[1]] if ends else one)


def test_text_that_ends_in_part_of_a_character():
    """A stop sequence is found there too."""
    for data, stop, wanted in [
        (b"ab \x80", " ", ("ab", True)),
        (b"ab\x80", "\ufffd", ("ab", True)),
        ("ab\ufffd".encode(), "b\ufffd", ("a", True)),
        (b"ab", "bc", ("ab", False)),
    ]:
        shown = text.Text(text.byte_tokenizer(), (stop,))
        pieces = []
        for token in data:
            piece, is_stopped = shown.add(token)
            pieces.append(piece)
            if is_stopped:
                break
        else:
            piece, is_stopped = shown.end()
            pieces.append(piece)
        assert ("".join(pieces), is_stopped) == wanted


def test_bytes_that_are_no_characters():
    """They are shown at last, and each token decodes a few others alone."""
    shown = text.Text(text.byte_tokenizer(), ())
    pieces = [shown.add(0x80)[0] for _ in range(1000)]
    assert len("".join(pieces)) > 900
    assert max(map(len, pieces)) <= 64
    assert "".join(pieces) + shown.end()[0] == 1000 * "\ufffd"


# ---- folders


def quantised(data):
    scale = {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}
    return safetensors.save(safetensors.load(data) | scale, {"format": "pt"})


def test_the_command_serves_a_folder(folder, tmp_path):
    (tmp_path / "keys").write_text(json.dumps(KEYS))
    options = command.Options(folder, keys=tmp_path / "keys", dtype="int8")
    made = command.make(options)
    with made.engine:
        assert made.served.name == folder.name
        assert made.served.context == 256
        assert {one.name for one in made.tenants} == {"one", "two"}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("model.safetensors", lambda data: data[:5000], "no model that can be loaded: SafetensorError"),
        (
            "model.safetensors",
            quantised,
            "has quantised weights that transformers cannot read: .*up_proj.weight_scale ",
        ),
        ("tokenizer.json", lambda _: b"{}", "no tokenizer that can be loaded: KeyError"),
        ("config.json", lambda data: data.replace(b'"num_hidden_layers": 4', b'"num_hidden_layers": 5'), "layers.4"),
        ("config.json", lambda data: data.replace(b'"vocab_size"', b'"vocab_size": 99, "v"'), "model.embed_tokens"),
        ("config.json", lambda _: b'{"model_type": "clip_vision_model"}', "cannot be served: clip_vision_model: trans"),
        (
            "config.json",
            lambda _: b'{"model_type": "llava"}',
            "cannot be served: llava: transformers has no",
        ),
        ("config.json", lambda _: b'{"model_type": "bart"}', "cannot be served: bart has an encoder and a decoder"),
    ],
)
def test_a_folder_that_cannot_be_served(folder, tmp_path, name, change, said):
    """Nothing is served with random weights."""
    for file in folder.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(change(data) if file.name == name else data)
    with pytest.raises(ValueError, match=said) as caught:
        served.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path} ")


def test_a_model_whose_prompts_cannot_be_kept(folder, tmp_path):
    """No advice is of an argument that the command does not have."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    rotation = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config = json.loads((tmp_path / "config.json").read_text()) | {"rope_parameters": rotation}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r" cannot be served: .* another text cannot use them$"):
        command.make(command.Options(tmp_path))


@pytest.mark.parametrize("wrong", [{"num_beams": 4}, {"temperature": "hot"}])
def test_a_generation_config_that_serves_nobody(model, monkeypatch, wrong):
    for field, value in wrong.items():
        monkeypatch.setattr(model[0].generation_config, field, value)
    runs = served.Served("a-model", *model, capacity=512)
    with runs.engine, pytest.raises(ValueError, match="a-model: no request can be served: "):
        application.Server(runs, None)


def test_a_model_that_was_trained_without_a_cache(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for file in (tmp_path / "config.json", tmp_path / "generation_config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"use_cache": False}))
    with serving(served.load(tmp_path)) as client:
        assert client.complete("to be", max_tokens=4)["usage"]["completion_tokens"] == 4


def test_a_tokenizer_of_older_files(tmp_path):
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=256)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(text.BYTES))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    _, tokenizer = served.load(tmp_path)
    assert type(tokenizer).__name__.startswith("GPT2Tokenizer")


def test_a_folder_without_a_tokenizer(folder, tmp_path):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    with pytest.raises(ValueError, match=r"has no tokenizer, and \d+ tokens, which cannot be bytes"):
        served.load(tmp_path)
