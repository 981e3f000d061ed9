"""`prompts="int8"`: prompts that are attended to in bytes, and what of them a prefix cache and a file keep apart."""

import pickle

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, CONV, MIXED, make, random_tokens, two_sided  # noqa: E402 - torch may be missing

import kvcache  # noqa: E402 - it imports those
from kvcache.hf import HFCache, HFEncoderDecoderCache, enable  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers

FEW, MANY, BLOCK = 8, 460, 16  # tokens that are attended to exactly, or in bytes; and of a block
OPTIONS = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 1}
SHAPE = {"head_dim": 128, "initializer_range": 0.1} | HEADS
MODELS = {
    "llama": lambda: make(transformers.LlamaConfig(**BASE | SHAPE)),
    "windows": lambda: make(transformers.Gemma3TextConfig(**MIXED | SHAPE)),
    "sinks": lambda: make(
        transformers.GptOssConfig(**MIXED | SHAPE, num_local_experts=4, num_experts_per_tok=2)
    ),
    "recurrent": lambda: make(
        transformers.Lfm2Config(**BASE | SHAPE | CONV | {"hidden_size": 1024, "initializer_range": 0.02})
    ),
    "latents": lambda: make(
        transformers.DeepseekV3Config(
            **BASE | {"initializer_range": 0.1, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32},
            q_lora_rank=24, kv_lora_rank=96, qk_nope_head_dim=16, qk_rope_head_dim=32, v_head_dim=12,
            mlp_layer_types=["dense"] * 4,
        )
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def multiplies_bytes(monkeypatch):
    monkeypatch.setenv("KVCACHE_ISA", "scalar")  # as not every processor does


@pytest.fixture
def calls(monkeypatch):
    """Return what each call of `Batch.attend` is given: the tokens of the query, and `precision`."""
    found, attend = [], kvcache.Batch.attend

    def noting(self, layer, q, *args, **kwargs):
        found.append((q.shape[-2], kwargs["precision"]))
        return attend(self, layer, q, *args, **kwargs)

    monkeypatch.setattr(kvcache.Batch, "attend", noting)
    return found


def llama():
    model = MODELS["llama"]()
    model.set_attn_implementation("kvcache")
    return model


def logits_of(model, tokens, mask=None, cache=None, **arguments):
    """Feed a text; return its logits."""
    model.set_attn_implementation("kvcache")
    cache = HFCache(model.config, **arguments) if cache is None else cache
    with torch.no_grad():
        return model(tokens, attention_mask=mask, past_key_values=cache).logits


def off(got, want):
    return ((got - want).norm() / want.norm()).item()


def memory_for(model, **arguments):
    return HFCache.make_kv_cache(model.config, block_size=BLOCK, **arguments)


def matched(prefix, tokens):
    seq_id, count = prefix.acquire(tokens[0].tolist())
    prefix.cache.clear(seq_id)
    return count


@pytest.mark.parametrize("name", MODELS)
def test_prompts_in_bytes(name, calls):
    """They are off about as rows of bytes are, and few tokens are not off at all."""
    model, tokens = MODELS[name](), random_tokens(2, MANY)
    exact, in_bytes = (logits_of(model, tokens, dtype="int8", prompts=way) for way in ("stored", "int8"))
    assert 0.2 < off(in_bytes, exact) / off(logits_of(model, tokens, dtype="f32"), exact) < 2
    few = [logits_of(model, tokens[:, :FEW], dtype="int8", prompts=way) for way in ("stored", "int8")]
    assert torch.equal(*few)
    num = len(calls) // 5
    for i, way in enumerate(("stored", "int8", "stored", "stored", "int8")):
        assert {precision for _, precision in calls[i * num : (i + 1) * num]} == {way}


def test_all_rows_of_a_batch_but_short_ones():
    model, tokens, mask = llama(), random_tokens(2, MANY), torch.ones(2, MANY, dtype=torch.long)
    mask[0, :-FEW] = 0
    exact, in_bytes = (logits_of(model, tokens, mask, dtype="int8", prompts=way) for way in ("stored", "int8"))
    assert torch.equal(exact[0, -FEW:], in_bytes[0, -FEW:])
    assert 1e-3 < off(in_bytes[1], exact[1]) < 0.1


def test_steps_are_exact(tmp_path):
    """Behind the same rows, few tokens have the same bits in both ways, and many do not."""
    model, tokens = llama(), random_tokens(1, MANY)
    cache = HFCache(model.config, dtype="int8", prompts="int8")
    logits_of(model, tokens, cache=cache)
    cache.save(tmp_path / "chat")
    for end in (1, FEW, 2 * FEW):
        loaded = (HFCache.load(model.config, tmp_path / "chat", prompts=way) for way in ("stored", "int8"))
        exact, in_bytes = (logits_of(model, tokens[:, :end], cache=cache) for cache in loaded)
        assert torch.equal(exact, in_bytes) == (end <= FEW)


def test_generate(calls):
    model, tokens = llama(), random_tokens(1, MANY)
    given = {"cache_implementation": "kvcache", "cache_config": {"prompts": "int8"}}
    named = model.generate(tokens, **OPTIONS, **given)
    enable(model, prompts="int8")
    for made in (
        named,
        model.generate(tokens, **OPTIONS),
        pickle.loads(pickle.dumps(model)).generate(tokens, **OPTIONS),
    ):
        assert "; prompts='int8'; " in repr(made.past_key_values)
    assert {precision for _, precision in calls} == {"int8"}
    enable(model)
    calls.clear()
    made = model.generate(tokens, **OPTIONS)
    assert {precision for _, precision in calls} == {"stored"}
    assert "prompts" not in repr(made.past_key_values)


def test_both_sides(calls):
    """The decoder's own tokens, and its attention over what an encoder made."""
    model, inputs = two_sided("bart")
    inputs["decoder_input_ids"] = random_tokens(2, 2 * FEW)
    enable(model, prompts="int8")
    made = model.generate(**inputs, **OPTIONS)
    assert {precision for _, precision in calls} == {"int8"}
    cache = made.past_key_values
    assert "prompts='int8'" in repr(cache.self_attention_cache)
    assert "prompts='int8'" in repr(cache.cross_attention_cache)


# ---- what is kept


def test_prefixes_keep_both_apart():
    """Also on the same memory or store, with the same fingerprint."""
    model, tokens, store = llama(), random_tokens(1, MANY), {}
    found = {}
    for way in ("stored", "int8"):
        prefix = kvcache.PrefixCache(memory_for(model, prompts=way), fingerprint="a model", store=store, timeout=60)
        assert matched(prefix, tokens) == 0
        enable(model, prefix=prefix)  # in the way of its memory
        model.generate(tokens, **OPTIONS | {"return_dict_in_generate": False})
        assert matched(prefix, tokens) == MANY - 1
        assert prefix.close(60)
        found[way] = prefix.identity
    assert found["stored"] != found["int8"]
    for way in found:
        prefix = kvcache.PrefixCache(memory_for(model, prompts=way), fingerprint="a model", store=store, timeout=60)
        assert prefix.identity == prefix.tenant(b"a tenant").identity == found[way]
        assert matched(prefix, tokens) == MANY // BLOCK * BLOCK
    assert len(store) == 2 * (MANY // BLOCK)


@pytest.mark.parametrize(("made", "asked"), [("int8", "stored"), ("stored", "int8")])
def test_a_model_that_reads_otherwise_gets_no_rows(made, asked):
    model = llama()
    prefix = kvcache.PrefixCache(memory_for(model, prompts=made), fingerprint="a model")
    says = f"^prompts='{asked}': the cache of prefix was made with prompts='{made}': leave prompts out, or make"
    for make_cache in (HFCache, lambda config, **arguments: enable(model, **arguments)):
        with pytest.raises(ValueError, match=says):
            make_cache(model.config, prefix=prefix, prompts=asked)
    HFCache(model.config, prefix=prefix, prompts=made)
    assert (f"prompts='{made}'" in repr(HFCache(model.config, prefix=prefix))) == (made == "int8")


def test_a_pickled_model_keeps_the_way_of_its_prefix_cache(calls):
    model = llama()
    enable(model, prefix=kvcache.PrefixCache(memory_for(model, prompts="int8"), fingerprint="a model"))
    pickle.loads(pickle.dumps(model)).generate(random_tokens(1, MANY), **OPTIONS)
    assert {precision for _, precision in calls} == {"int8"}


def test_saved_caches(tmp_path, calls):
    """A file has rows alone: whoever loads it says how further prompts are attended to, and others get none of them."""
    model, tokens = llama(), random_tokens(1, MANY)
    cache = HFCache(model.config, prompts="int8")
    logits_of(model, tokens, cache=cache)
    cache.save(tmp_path / "chat", tokens=tokens)
    calls.clear()
    for way in (None, "int8"):
        logits_of(model, tokens, cache=HFCache.load(model.config, tmp_path / "chat", prompts=way))
    assert [precision for _, precision in calls] == ["stored"] * 4 + ["int8"] * 4
    prefix = kvcache.PrefixCache(memory_for(model), fingerprint="a model")
    HFCache.load(model.config, tmp_path / "chat", prefix=prefix).release(tokens)
    assert matched(prefix, tokens) == 0
    with pytest.raises(ValueError, match=r"^prompts='int8': the cache of prefix"):
        HFCache.load(model.config, tmp_path / "chat", prefix=prefix, prompts="int8")


def test_saved_caches_of_both_sides(tmp_path):
    model, inputs = two_sided("bart")
    enable(model)
    model.generate(**inputs, **OPTIONS).past_key_values.save(tmp_path / "both")
    cache = HFEncoderDecoderCache.load(model.config, tmp_path / "both", prompts="int8")
    assert "prompts='int8'" in repr(cache.self_attention_cache)


# ---- refused


@pytest.mark.parametrize("value", [True, 8, "", "INT8", "f16", b"int8", ["int8"]])
def test_bad_values(value):
    model, (speech, _) = llama(), two_sided("bart")
    says = r"^prompts=.*: must be 'stored', as precise as the rows, or 'int8'$"
    for config, make_cache in (
        (model.config, HFCache),
        (model.config, HFCache.make_kv_cache),
        (speech.config, HFEncoderDecoderCache),
        (model, enable),
    ):
        with pytest.raises(ValueError, match=says):
            make_cache(config, prompts=value)


def test_another_name():
    with pytest.raises(TypeError, match=r"^precision is no argument of HFCache: it is called prompts here$"):
        HFCache(llama().config, precision="int8")
