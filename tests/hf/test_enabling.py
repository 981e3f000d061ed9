"""`kvcache.hf.enable`: attention and cache in one line, and `disable`, which takes them back."""

import copy
import json
import pickle

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, CONFIGS, HYBRID, make, random_tokens, two_sided  # noqa: E402 - torch may be missing

import kvcache  # noqa: E402 - it imports those
import kvcache.hf  # noqa: E402 - it imports those
from kvcache.hf import HFCache, HFEncoderDecoderCache, disable, enable  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}


@pytest.mark.parametrize("before", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_generate_makes_the_cache(name, before):
    model, tokens = make(CONFIGS[name]()), random_tokens(2, 11)
    if before == "sdpa" and not model._supports_sdpa:
        pytest.skip("it has none")
    model.set_attn_implementation(before)
    want = model.generate(tokens, **OPTIONS)
    enable(model, dtype="f32")
    got = model.generate(tokens, **OPTIONS)
    assert torch.equal(got.sequences, want.sequences)
    assert isinstance(got.past_key_values, HFCache)
    assert got.past_key_values.stats()["calls"] == {"kernel": 24, "dense": 0, "fallback": 0}
    disable(model)
    assert model.config._attn_implementation == before
    again = model.generate(tokens, **OPTIONS)
    assert isinstance(again.past_key_values, transformers.DynamicCache)
    assert torch.equal(again.sequences, want.sequences)


def test_arguments_of_no_cache_are_refused():
    """They would be ignored, and a tenant's prompt kept for all."""
    model, tokens = make(CONFIGS["llama"]()), random_tokens(1, 5)
    memory = HFCache.make_kv_cache(model.config)
    prefix = kvcache.PrefixCache(memory, fingerprint="one")
    tenant = prefix.tenant(b"a tenant")
    enable(model, prefix=prefix)
    with pytest.raises(ValueError, match="cache_config is given without cache_implementation='kvcache'"):
        model.generate(tokens, cache_config={"prefix": tenant}, **OPTIONS)
    assert (prefix.stats.requests, tenant.stats.requests) == (0, 0)
    model.generate(tokens, cache_config={"prefix": tenant}, cache_implementation="kvcache", **OPTIONS)
    assert (prefix.stats.requests, tenant.stats.requests) == (0, 1)
    model.generate(tokens, cache=HFCache(model.config), cache_config={"prefix": tenant}, **OPTIONS)  # not asked for
    draft = make(CONFIGS["llama"]())
    enable(draft)
    model.generate(
        tokens,
        cache_config={"prefix": tenant},
        cache_implementation="kvcache",
        assistant_model=draft,
        **OPTIONS,
    )


def test_what_is_asked_for_wins():
    model, tokens = make(CONFIGS["llama"]()), random_tokens(1, 5)
    enable(model, dtype="bf16")
    cache = HFCache(model.config, dtype="f32")
    assert model.generate(tokens, past_key_values=cache, **OPTIONS).past_key_values is cache
    made = model.generate(tokens, cache_implementation="dynamic", **OPTIONS).past_key_values
    assert isinstance(made, transformers.DynamicCache)
    assert model.generate(tokens, use_cache=False, **OPTIONS).past_key_values is None
    config = transformers.GenerationConfig(**OPTIONS)
    assert "dtype='bf16'" in repr(model.generate(tokens, generation_config=config).past_key_values)


def test_a_length_of_sources():
    model, inputs = two_sided("t5")
    with pytest.raises(
        ValueError, match=r"max_source_len=None: a T5Config .*, enable\(model, max_source_len=512\), or"
    ):
        enable(model)
    assert model.config._attn_implementation == "eager"
    enable(model, max_source_len=40)
    assert isinstance(model.generate(**inputs, **OPTIONS).past_key_values, HFEncoderDecoderCache)


def test_wrapped_models_copies_and_files(tmp_path):
    model, tokens = make(CONFIGS["llama"]()), random_tokens(1, 5)
    wrapper = torch.nn.Sequential(model)  # as PEFT and torch.compile wrap models
    memory = HFCache.make_kv_cache(model.config)
    enable(wrapper, prefix=kvcache.PrefixCache(memory, fingerprint="one"))
    for each in (model, copy.deepcopy(model)):
        assert isinstance(each.generate(tokens, **OPTIONS).past_key_values, HFCache)
    model.save_pretrained(tmp_path)
    for path in tmp_path.glob("*.json"):
        assert "kvcache" not in path.read_text(), json.loads(path.read_text())
    disable(wrapper)
    assert isinstance(model.generate(tokens, **OPTIONS).past_key_values, transformers.DynamicCache)


class Pipe(transformers.Pipeline):
    """A pipeline that generates from tokens, without a tokenizer."""

    def _sanitize_parameters(self, **options):
        return {}, options, {}

    def preprocess(self, tokens):
        return {"input_ids": tokens}

    def _forward(self, inputs, **options):
        return self.model.generate(**inputs, **options)

    def postprocess(self, made):
        return made


def test_a_pipeline():
    model, tokens = make(CONFIGS["llama"]()), random_tokens(1, 5)
    pipe = Pipe(model, device="cpu")
    want = pipe(tokens, **OPTIONS)
    enable(pipe, dtype=torch.float32)
    got = pipe(tokens, **OPTIONS)
    assert isinstance(got.past_key_values, HFCache)
    assert "f32" in repr(got.past_key_values)
    assert torch.equal(got.sequences, want.sequences)
    disable(pipe)
    assert isinstance(pipe(tokens, **OPTIONS).past_key_values, transformers.DynamicCache)


@pytest.mark.parametrize("name", ["dtype", "transform"])
def test_the_type_of_a_prefix_cache_is_taken(name):
    model, tokens = make(transformers.LlamaConfig(**BASE | {"head_dim": 32})), random_tokens(1, 5)
    memory = HFCache.make_kv_cache(model.config, dtype="q8_0", transform="hadamard")
    stored = {"dtype": "q8_0", "transform": "hadamard"}
    prefix = kvcache.PrefixCache(memory, fingerprint="one")
    for arguments in ({}, {name: stored[name]}):
        enable(model, prefix=prefix, **arguments)
        assert "dtype='q8_0', transform='hadamard'" in repr(model.generate(tokens, **OPTIONS).past_key_values)
    disable(model)
    other = {"dtype": "f16", "transform": "hadamard"}[name]
    if name == "transform":
        memory = HFCache.make_kv_cache(model.config, dtype="q8_0")
        prefix = kvcache.PrefixCache(memory, fingerprint="one")
    with pytest.raises(ValueError, match=f"^{name}='{other}': layer 0 of the cache of prefix has k_{name}="):
        enable(model, prefix=prefix, **{name: other})
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("arguments", "types"),
    [
        ({"k_dtype": "int6", "v_dtype": "int4"}, ("int6", "int4")),
        ({"dtype": "int4", "k_dtype": "int6"}, ("int6", "int4")),
        ({"v_dtype": "q8_0", "transform": "hadamard"}, ("f16", "q8_0")),
    ],
)
def test_types_of_keys_and_of_values(arguments, types, tmp_path):
    """Each way of making a cache takes the arguments as `KVCache` spells them."""
    model, tokens = make(transformers.LlamaConfig(**BASE | {"head_dim": 32})), random_tokens(1, 5)
    made = []
    enable(model, **arguments)
    made.append(model.generate(tokens, **OPTIONS).past_key_values)
    disable(model)
    asked = {"cache_implementation": "kvcache", "cache_config": arguments}
    made.append(model.generate(tokens, **asked, **OPTIONS).past_key_values)
    made[0].save(tmp_path / "cache")
    made.append(HFCache.load(model.config, tmp_path / "cache"))
    prefix = kvcache.PrefixCache(HFCache.make_kv_cache(model.config, **arguments), fingerprint="one")
    made.append(HFCache(model.config, prefix=prefix, **arguments))
    enable(model, prefix=prefix)
    made.append(pickle.loads(pickle.dumps(model)).generate(tokens, **OPTIONS).past_key_values)
    bart = transformers.BartConfig(d_model=64, encoder_attention_heads=2, decoder_attention_heads=2)
    two = HFEncoderDecoderCache(bart, **arguments)
    made += [two.self_attention_cache, two.cross_attention_cache]
    for cache in made:
        assert {(layer.k_dtype, layer.v_dtype) for layer in cache._cache.layers} == {types}


@pytest.mark.parametrize("name", ["mistral", "gemma3", "lfm2"])
def test_an_early_exit(name):
    """The draft is the model's first layers. An error in it leaves the model as it was."""

    def fail(input_ids, scores):
        assert model.config.num_hidden_layers == 4
        return scores

    model, text = make((CONFIGS | HYBRID)[name]()), random_tokens(1, 20)
    options = OPTIONS | {"assistant_early_exit": 2}
    want = model.generate(text, **options).sequences
    enable(model, dtype=["f32"] * len(HFCache(model.config).policy))
    assert torch.equal(model.generate(text, **options).sequences, want)
    with pytest.raises(AssertionError):
        model.generate(text, logits_processor=[fail], **options)
    assert model.config.num_hidden_layers == 4


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"dtype": "f8"}, ValueError, "dtype='f8'"),
        ({"policy": 3}, TypeError, "policy"),
        (
            {"policy": kvcache.CrossAttention(64)},
            ValueError,
            r"policy: layer 0 has CrossAttention\(max_len=64\), but attends over its own tokens: give FullAttention",
        ),
        ({"policy": [kvcache.FullAttention()] * 3 + [None]}, ValueError, "policy: layer 3 has None, but attends over"),
        ({"types": "f16"}, TypeError, "types"),
    ],
)
def test_wrong_arguments_change_nothing(arguments, error, words):
    model = make(CONFIGS["llama"]())
    with pytest.raises(error, match=words):
        enable(model, **arguments)
    assert model.config._attn_implementation == "eager"
    assert isinstance(model.generate(random_tokens(1, 5), **OPTIONS).past_key_values, transformers.DynamicCache)


def test_what_is_no_model():
    with pytest.raises(TypeError, match="model is a LlamaConfig: give a model or a pipeline"):
        enable(CONFIGS["llama"]())
    with pytest.raises(TypeError, match="model is a LlamaModel, which generates no text"):
        enable(transformers.LlamaModel(CONFIGS["llama"]()))
    with pytest.raises(kvcache.NotSupportedError, match="the model is on meta"):
        enable(make(CONFIGS["llama"]()).to("meta"))
    model = make(CONFIGS["llama"]()).double()
    with pytest.raises(kvcache.NotSupportedError, match=r"the model is of type torch.float64: .* model\.to\(torch\.fl"):
        enable(model)
    assert model.config._attn_implementation == "eager"
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=9, state_size=4)
    )
    with pytest.raises(kvcache.NotSupportedError, match="MambaConfig is not served"):
        enable(mamba)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"cache_dtype": "q8_0"}, "cache_dtype is no argument of HFCache: it is called dtype here"),
        ({"sliding_window": 64}, r"sliding_window is no argument of HFCache: give policy=SlidingWindow\(\.\.\.\)"),
        ({"polcy": None}, "polcy is no argument of HFCache: did you mean policy"),
    ],
)
def test_arguments_by_other_names(arguments, says):
    model = make(CONFIGS["llama"]())
    for call in (lambda: HFCache(model.config, **arguments), lambda: enable(model, **arguments)):
        with pytest.raises(TypeError, match=says):
            call()
    with pytest.raises(ValueError, match=r"^transform='hadamrd': must be 'hadamard' or None"):
        HFCache(model.config, transform="hadamrd")
    with pytest.raises(TypeError, match=r"^load\(config, path\) is given no path"):
        HFCache.load("chat")
    with pytest.raises(
        TypeError, match="max_length is no argument of HFEncoderDecoderCache: it is called max_source_len"
    ):
        HFEncoderDecoderCache(model.config, max_length=9)
