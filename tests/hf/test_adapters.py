"""`Engine` with adapters of PEFT: requests with several of them at once get what ``generate`` gives with each alone."""

import copy
import itertools

import pytest

import kvcache

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from support.hf_pairs import CONFIGS, HYBRID, model_of, random_tokens  # noqa: E402 - torch may be missing

from kvcache.hf import Engine, HFCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers and PEFT

LONG = 60.0  # seconds, after which a test has failed
ROOM = {"max_bytes": 1 << 24}
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 30, "repetition_penalty": 1.1}
LORA = {"r": 4, "target_modules": "all-linear"}
KINDS = {
    "lora": (LORA, {"r": 2, "target_modules": ["q_proj"], "lora_alpha": 64}),
    "dora": ({**LORA, "use_dora": True}, {**LORA, "use_rslora": True, "rank_pattern": {"q_proj": 2}}),
    "whole layers": ({**LORA, "modules_to_save": ["lm_head"]}, {**LORA, "modules_to_save": ["embed_tokens"]}),
    "embeddings": ({"target_modules": ["embed_tokens", "v_proj"]}, LORA),
    "tokens of one": (LORA, {**LORA, "trainable_token_indices": [7, 8]}),
    "single tokens": ({**LORA, "trainable_token_indices": [5, 6, 7]}, {**LORA, "trainable_token_indices": [7, 8]}),
}
FEW = ["gemma3", "qwen3_next"]
MODELS = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.slow)
    for name in [*CONFIGS, *HYBRID]
    if name not in ("jamba", "zamba2")
]
# PEFT wraps no router that returns a tuple, and no projection that Mamba's kernels read themselves.
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = {"llama4": ATTENTION, "falcon_h1": ATTENTION}


def with_adapters(model, configs, seed=1):
    """Return a copy of a model with random adapters, of which none is active."""
    wrapped = None
    torch.manual_seed(seed)  # weights are random before they are moved
    for i, config in enumerate(configs):
        name, config = f"adapter{i}", peft.LoraConfig(**config, task_type="CAUSAL_LM")
        if wrapped is None:
            wrapped = peft.PeftModel(copy.deepcopy(model), config, name)
        else:
            wrapped.add_adapter(name, config)
    for path, weight in wrapped.named_parameters():
        if "adapter" in path:
            weight.data += torch.randn_like(weight) * 0.1
    wrapped.eval()
    wrapped.base_model.disable_adapter_layers()
    return wrapped


def prompts_of(lengths, seed=3):
    return [random_tokens(1, n, seed=seed + i)[0].tolist() for i, n in enumerate(lengths)]


def alone(wrapped, name, prompt, seed=0, **options):
    """Return what ``generate`` gives with one adapter active and transformers' own cache."""
    if name is not None:
        wrapped.base_model.enable_adapter_layers()
        wrapped.set_adapter(name)
    model = wrapped.get_base_model()
    model.set_attn_implementation("eager")
    torch.manual_seed(seed)
    given = {"max_new_tokens": 8, "attention_mask": torch.ones(1, len(prompt), dtype=torch.long), **options}
    text = model.generate(torch.tensor([prompt]), **given)[0].tolist()
    wrapped.base_model.disable_adapter_layers()
    return text


def answer(request):
    return request.result(LONG)[0].tolist()


def tenants_of(engine):
    return {None: None, **{name: engine.tenant(adapter=name) for name in ("adapter0", "adapter1")}}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens(kind):
    """Two adapters and the model itself, mixed in each step, greedily and by chance."""
    configs = KINDS[kind]
    ours, theirs = (with_adapters(model_of("llama"), configs) for _ in range(2))
    prompts, asks = prompts_of([40, 1, 7, 33]), []
    with Engine(ours, "f32", prompt_tokens=16, block_size=4, **ROOM) as engine:
        tenants = tenants_of(engine)
        for i, (prompt, name, options) in enumerate(itertools.product(prompts, tenants, ({}, SAMPLED))):
            request = engine.submit(prompt, tenant=tenants[name], max_new_tokens=8, seed=i, **options)
            asks.append((name, prompt, i, options, request))
        texts = [answer(request) for *_, request in asks]
        turns = [engine.submit([*text, 5], tenant=tenants[name], max_new_tokens=4)
                 for (name, *_), text in zip(asks, texts, strict=True)]  # fmt: skip
        longer = [*map(answer, turns)]
        assert all(turn.num_matched >= len(text) - 2 for turn, text in zip(turns, texts, strict=True))
    assert texts == [alone(theirs, name, prompt, i, **options) for name, prompt, i, options, _ in asks]
    for (name, *_), text, more in zip(asks, texts, longer, strict=True):
        assert more == alone(theirs, name, [*text, 5], max_new_tokens=4)
    first = [text[len(prompts[0]) :] for (_, prompt, _, options, _), text in zip(asks, texts, strict=True)
             if prompt is prompts[0] and not options]  # fmt: skip
    assert first[0] not in first[1:]  # the adapters change something


@pytest.mark.parametrize("kind", MODELS)
def test_models(kind):
    """Windows, experts, recurrent layers."""
    config = {"r": 4, "target_modules": TARGETS.get(kind, "all-linear")}
    ours, theirs = (with_adapters(model_of(kind), (config, config)) for _ in range(2))
    prompts = prompts_of([40, 2, 9])
    with Engine(ours, "f32", prompt_tokens=16, block_size=4, **ROOM) as engine:
        tenants = tenants_of(engine)
        asks = [(name, prompt, engine.submit(prompt, tenant=tenants[name], max_new_tokens=8))
                for prompt, name in itertools.product(prompts, tenants)]  # fmt: skip
        texts = [answer(request) for *_, request in asks]
    assert texts == [alone(theirs, name, prompt) for name, prompt, _ in asks]


def test_an_adapter_that_is_active_already_is_the_models_own():
    """Requests without an adapter get what the model gave before, also behind others; close leaves it so."""
    ours, theirs = (with_adapters(model_of("llama"), KINDS["lora"]) for _ in range(2))
    ours.base_model.enable_adapter_layers()
    ours.set_adapter("adapter1")
    [prompt] = prompts_of([12])
    with Engine(ours, "f32", **ROOM) as engine:
        other = engine.tenant(adapter="adapter0")
        texts = [
            answer(engine.submit(prompt, tenant=tenant, max_new_tokens=8)) for tenant in (None, other, None, other)
        ]
    want = [alone(theirs, name, prompt) for name in ("adapter1", "adapter0")]
    assert texts == want * 2
    assert ours.get_base_model().generate(torch.tensor([prompt]), max_new_tokens=8)[0].tolist() == want[0]
    assert any(weight.requires_grad for weight in ours.parameters())  # who trains it goes on


def test_prompts_of_one_adapter_are_not_found_under_another():
    [prompt] = prompts_of([40])
    with Engine(with_adapters(model_of("llama"), (LORA, LORA)), "f32", block_size=4, **ROOM) as engine:
        names = None, "adapter0", "adapter1"
        tenants = [engine.tenant(salt, adapter=name) for salt in (b"a", b"b") for name in names]
        requests = []
        for tenant in tenants:
            requests.append(engine.submit(prompt, tenant=tenant, max_new_tokens=1))
            answer(requests[-1])
        assert [request.num_matched for request in requests] == [0] * 6
        again = engine.submit(prompt, tenant=tenants[-1], max_new_tokens=1)
        answer(again)
        assert again.num_matched == 39
        assert len({tenant.names(prompt)[0] for tenant in tenants}) == 6


def test_a_prompt_waits_for_none_of_another_adapter():
    """Prompts that come together are computed once for each adapter, and none waits for another's."""
    [system] = prompts_of([200])
    with Engine(
        with_adapters(model_of("llama"), (LORA, LORA)), "f32", prompt_tokens=32, block_size=16, **ROOM
    ) as engine:
        tenants = tenants_of(engine)
        requests = [
            engine.submit([*system, i], tenant=tenants[name], max_new_tokens=1) for i in range(3) for name in tenants
        ]
        for request in requests:
            answer(request)
    assert sum(len(one.prompt) - one.num_matched for one in requests) <= 3 * (201 + 2 * 17)
    assert [one.num_matched for one in requests[:3]] == [0, 0, 0]


def test_a_retrained_adapter_finds_no_old_rows():
    """The names of blocks depend on weights and configuration, and not on the adapter's name."""
    [prompt], names = prompts_of([40]), []
    same = with_adapters(model_of("llama"), (LORA,)), "adapter0"
    swapped = with_adapters(model_of("llama"), ({"r": 1, "target_modules": ["q_proj"]}, LORA)), "adapter1"
    weights = peft.get_peft_model_state_dict(same[0], adapter_name="adapter0")
    peft.set_peft_model_state_dict(swapped[0], weights, adapter_name="adapter1")
    others = [(with_adapters(model_of("llama"), (LORA,), seed=2), "adapter0")]
    others.append((with_adapters(model_of("llama"), ({**LORA, "lora_alpha": 9},)), "adapter0"))
    for wrapped, name in (same, swapped, *others):
        with Engine(wrapped, "f32", block_size=4, **ROOM) as engine:
            names.append(engine.tenant(b"one", adapter=name).names(prompt)[0])
    assert names[0] == names[1]
    assert len({*names}) == 3


def test_room_that_is_short():
    """Requests of several adapters that do not fit together wait for each other, and get the same tokens."""
    ours, theirs = (with_adapters(model_of("llama"), (LORA, LORA)) for _ in range(2))
    prompts = prompts_of([30, 31, 29, 28])
    with Engine(ours, "f32", block_size=4, capacity=100) as engine:
        tenants = tenants_of(engine)
        asks = [(name, prompt, engine.submit(prompt, tenant=tenants[name], max_new_tokens=20))
                for prompt, name in itertools.product(prompts, tenants)]  # fmt: skip
        texts = [answer(request) for *_, request in asks]
    assert texts == [alone(theirs, name, prompt, max_new_tokens=20) for name, prompt, _ in asks]


def test_an_error_ends_its_own_request():
    def fail(ids, scores):
        raise ZeroDivisionError("a processor's own")

    ours, theirs = (with_adapters(model_of("llama"), (LORA, LORA)) for _ in range(2))
    [prompt] = prompts_of([12])
    with Engine(ours, "f32", **ROOM) as engine:
        tenants = tenants_of(engine)
        wrong = engine.submit(prompt, tenant=tenants["adapter0"], logits_processor=[fail])
        right = {name: engine.submit(prompt, tenant=tenants[name], max_new_tokens=8) for name in tenants}
        with pytest.raises(ZeroDivisionError):
            wrong.result(LONG)
        assert {name: answer(one) for name, one in right.items()} == {
            name: alone(theirs, name, prompt) for name in tenants
        }


def test_wrong_names():
    wrapped = with_adapters(model_of("llama"), (LORA,))
    with Engine(wrapped, "f32", **ROOM) as engine:
        with pytest.raises(ValueError, match=r"adapter='sql': is none of the model's adapters, which are 'adapter0'"):
            engine.tenant(adapter="sql")
        wrapped.merge_adapter(["adapter0"])
        with pytest.raises(ValueError, match=r"adapter='adapter0': an adapter is merged .*: call unmerge_adapter\(\)"):
            engine.tenant(adapter="adapter0")
    none = r"adapter='sql': is none of the model's adapters, which are none"
    with Engine(model_of("llama"), "f32", **ROOM) as engine, pytest.raises(ValueError, match=none):
        engine.tenant(adapter="sql")


def test_a_prefix_of_the_user():
    """Its tenants of an adapter share its cache and its store."""
    wrapped, store = with_adapters(model_of("llama"), (LORA,)), {}
    [prompt], matched = prompts_of([30]), []
    for _ in range(2):
        cache = HFCache.make_kv_cache(wrapped.get_base_model().config, "f32", block_size=4, capacity=4096)
        prefix = kvcache.PrefixCache(cache, fingerprint="a model", store=store)
        with Engine(wrapped, prefix=prefix) as engine:
            tenants = [engine.tenant(b"one", adapter=name) for name in (None, "adapter0")]
            requests = [engine.submit(prompt, tenant=tenant, max_new_tokens=1) for tenant in tenants]
            for request in requests:
                answer(request)
        matched.append([request.num_matched for request in requests])
        assert all(tenant.flush(LONG) for tenant in tenants)
        prefix.close()
    assert matched == [[0, 0], [28, 28]]
