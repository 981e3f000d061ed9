"""A generation config asks for the cache, so that pipelines and `generate` need no code."""

import subprocess
import sys
import warnings

import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvcache.hf import HFCache, HFEncoderDecoderCache  # noqa: E402 - torch may be missing

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

BASE = {
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PROMPT = torch.arange(3, 20)[None]


@pytest.fixture
def folder(tmp_path):
    """A model saved with a generation config that names the cache."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**BASE))
    model.generation_config.cache_implementation = "kvcache"
    model.generation_config.cache_config = {"dtype": "q8_0"}
    model.save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_generation_config(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="kvcache")
    made = model.generate(PROMPT, max_new_tokens=4, return_dict_in_generate=True)
    assert isinstance(made.past_key_values, HFCache)
    assert "dtype='q8_0'; 2 layers" in repr(made.past_key_values)
    assert made.past_key_values.stats()["calls"] == {"kernel": 8, "dense": 0, "fallback": 0}


def test_an_argument_of_generate(folder):
    """Arguments win over the model's generation config; without a cache none is made."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="kvcache")
    options = {"max_new_tokens": 4, "return_dict_in_generate": True}
    for arguments, words in (
        ({"dtype": "f32"}, "dtype='f32'"),
        ({"dtype": "q4_0", "transform": "hadamard"}, "dtype='q4_0', transform='hadamard'"),
    ):
        made = model.generate(PROMPT, cache_implementation="kvcache", cache_config=arguments, **options)
        assert words in repr(made.past_key_values)
    assert model.generate(PROMPT, use_cache=False, **options).past_key_values is None
    made = model.generate(PROMPT, cache_implementation="dynamic", **options)
    assert isinstance(made.past_key_values, transformers.DynamicCache)


def test_repr_names_each_type():
    config = transformers.LlamaConfig(**BASE)
    assert "dtype='int6'; dtype='int4'; 2 layers" in repr(HFCache(config, dtype=["int6", "int4"]))
    mixed = HFCache.make_kv_cache(config, k_dtype="int6", v_dtype="int4")
    cache = HFCache(config, prefix=kvcache.PrefixCache(mixed, fingerprint="m"))
    assert "k_dtype='int6', v_dtype='int4'; 2 layers" in repr(cache)


def test_a_model_with_an_encoder():
    config = transformers.BartConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        vocab_size=97,
        forced_eos_token_id=None,
    )
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="kvcache").eval()
    options = {"cache_implementation": "kvcache", "cache_config": {"transform": "hadamard"}, "max_new_tokens": 4}
    made = model.generate(PROMPT, return_dict_in_generate=True, **options).past_key_values
    assert isinstance(made, HFEncoderDecoderCache)
    for cache in (made.self_attention_cache, made.cross_attention_cache):
        assert {(layer.k_transform, layer.v_transform) for layer in cache._cache.layers} == {("hadamard", "hadamard")}


def test_the_attention_alone(folder):
    """`generate` then makes transformers' own cache: a warning says so once, and arguments of ours are refused."""
    config = transformers.LlamaConfig(**BASE)
    folder = folder / "plain"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load = transformers.AutoModelForCausalLM.from_pretrained
    want = load(folder).generate(PROMPT, max_new_tokens=4)
    named, set_later = load(folder, attn_implementation="kvcache"), load(folder)
    set_later.set_attn_implementation("kvcache")
    for model in (named, set_later):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for quiet in ({"use_cache": False}, {"cache_implementation": "dynamic"}, {"cache": HFCache(model.config)}):
                model.generate(PROMPT, max_new_tokens=4, **quiet)
            model(PROMPT)
            assert not [one for one in found if "kvcache" in str(one.message)]
            for _ in range(2):
                assert torch.equal(model.generate(PROMPT, max_new_tokens=4), want)
        [told] = [str(one.message) for one in found if "kvcache" in str(one.message)]
        assert "generate makes transformers' own cache" in told
        assert "call kvcache.hf.enable(model), or give cache_implementation='kvcache' or an HFCache" in told
        with pytest.raises(ValueError, match="cache_config is given without cache_implementation='kvcache': give both"):
            model.generate(PROMPT, cache_config={"dtype": "q8_0"}, max_new_tokens=4)


@pytest.mark.parametrize("make_cache", [lambda config: None, lambda config: transformers.DynamicCache(config=config)])
def test_passes_of_the_attention_alone(folder, make_cache):
    load = transformers.AutoModelForCausalLM.from_pretrained
    logits = []
    for attention in ("sdpa", "kvcache"):
        model = load(folder, attn_implementation=attention)
        cache = make_cache(model.config)
        with torch.no_grad():
            parts = [PROMPT] if cache is None else [PROMPT[:, :-1], PROMPT[:, -1:]]
            logits.append(torch.cat([model(part, past_key_values=cache).logits for part in parts], 1))
    torch.testing.assert_close(*logits)


def test_a_static_cache_is_refused_by_name(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="kvcache")
    with pytest.raises(ValueError, match="cache_implementation='static' does not go with the attention 'kvcache'"):
        model.generate(PROMPT, cache_implementation="static", max_new_tokens=4)
    model.set_attn_implementation("sdpa")
    model.generate(PROMPT, cache_implementation="static", max_new_tokens=4)


def test_other_caches_are_refused_by_name(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    cache = kvcache.KVCache(2, 4, 32, 64, max_sequences=None)
    with pytest.raises(TypeError, match=r"given is a KVCache: give an HFCache, made by kvcache\.hf\.HFCache\(model"):
        model.generate(PROMPT, past_key_values=cache, max_new_tokens=2)
    prefix = kvcache.PrefixCache(cache, fingerprint="a model")
    with pytest.raises(
        TypeError, match=r"is a PrefixCache: give an HFCache, made by .*\(model.config, prefix=prefix\)"
    ):
        model.generate(PROMPT, past_key_values=prefix, max_new_tokens=2)
    for other in (True, "int8", {"dtype": "int8"}, [kvcache.hf.HFCache(model.config)]):
        with pytest.raises(TypeError, match=rf"given is a {type(other).__name__}: give an HFCache, made by"):
            model.generate(PROMPT, past_key_values=other, max_new_tokens=2)
    with pytest.raises(TypeError, match="given is the class HFCache: give an HFCache, made by"):
        model.generate(PROMPT, past_key_values=kvcache.hf.HFCache, max_new_tokens=2)
    assert not hasattr(kvcache.hf.HFCache, "_is_user_defined")


def test_a_cache_of_another_kind_of_model_is_refused(folder):
    decoder = transformers.AutoModelForCausalLM.from_pretrained(folder)
    sizes = {"d_model": 32, "vocab_size": 64, "max_position_embeddings": 64}
    sizes |= {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    both = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes)).eval()
    cache = kvcache.hf.HFEncoderDecoderCache(both.config)
    with pytest.raises(TypeError, match=r"a HFEncoderDecoderCache, and the model has no encoder: give an HFCache"):
        decoder.generate(PROMPT, past_key_values=cache, max_new_tokens=2)
    cache = kvcache.hf.HFCache(decoder.config)
    with pytest.raises(TypeError, match=r"a HFCache, and the model has an encoder: give an HFEncoderDecoderCache"):
        both.generate(PROMPT, past_key_values=cache, max_new_tokens=2)
    with pytest.raises(kvcache.NotSupportedError, match="a LlamaConfig has no encoder: use HFCache"):
        kvcache.hf.HFEncoderDecoderCache(decoder.config)


def test_a_wrong_argument_of_the_cache(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="kvcache")
    with pytest.raises(ValueError, match="dtype='f8'"):
        model.generate(PROMPT, cache_implementation="kvcache", cache_config={"dtype": "f8"})


def test_a_cache_config_that_is_no_dict(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(TypeError, match="cache_config='q8_0': give the arguments of HFCache as a dict"):
        model.generate(PROMPT, max_new_tokens=2, cache_config="q8_0")


def test_the_import_registers_the_attention(folder):
    script = """
import sys, transformers
def load(): transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="kvcache")
try: load()
except (ValueError, ImportError): pass
else: sys.exit("it was there before the import")
import kvcache.hf
load()
"""
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
