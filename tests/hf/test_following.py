"""The cache follows the attention that the model really calls, whichever configuration the cache was made from."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import (  # noqa: E402 - torch may be missing
    CONFIGS,
    LAYERS,
    compare,
    make,
    passes,
    play,
    random_tokens,
    theirs,
    two_sided,
)

from kvcache.hf import HFCache, HFEncoderDecoderCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

DECODED = "the rows of every layer are decoded in each step"


def reloaded(config, folder):
    config.save_pretrained(folder)
    return transformers.AutoConfig.from_pretrained(folder)


COPIES = {
    "the model's own": lambda config, folder: config,
    "a copy": lambda config, folder: copy.deepcopy(config),
    "read from its file": reloaded,
    "one that names another attention": lambda config, folder: transformers.AutoConfig.for_model(
        **config.to_dict(), attn_implementation="eager"
    ),
}


@pytest.mark.parametrize("source", COPIES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_kernels_attend(name, source, tmp_path):
    model, tokens = make(CONFIGS[name]()), random_tokens(2, 13)
    cache = HFCache(COPIES[source](model.config, tmp_path), dtype="f32")
    made = []
    for each, attention in (theirs(model), (cache, "kvcache")):
        made.append(play(model, each, attention, lambda cache: passes(model, cache, tokens, None, [10, 12, 13])))
    compare(*made)
    assert cache.stats()["calls"] == {"kernel": 3 * LAYERS, "dense": 0, "fallback": 0}


FLEX = pytest.param("flex_attention", marks=pytest.mark.full)  # torch compiles it for a minute


@pytest.mark.parametrize("attention", ["sdpa", "eager", FLEX])
@pytest.mark.parametrize("named", ["kvcache", "sdpa"])
def test_another_attention_gets_dense_tensors(attention, named):
    """A configuration that names this package's attention does not make the model call it; one warning is given."""
    model, tokens = make(CONFIGS["llama"]()), random_tokens(2, 13)
    config = copy.deepcopy(model.config)
    config._attn_implementation = named
    cache, made = HFCache(config, dtype="f32"), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each, one in (theirs(model), (cache, attention)):
            made.append(play(model, each, one, lambda cache: passes(model, cache, tokens, None, [10, 12, 13])))
    compare(*made)
    assert cache.stats()["calls"] == {"kernel": 0, "dense": 3 * LAYERS, "fallback": 0}
    assert sum(DECODED in str(one.message) for one in caught) == 1


def test_the_attention_changes_within_a_text():
    model, tokens = make(CONFIGS["mistral"]()), random_tokens(2, 16)
    want = play(model, *theirs(model), lambda cache: passes(model, cache, tokens, None, [10, 12, 14, 16]))
    cache = HFCache(copy.deepcopy(model.config), dtype="f32")

    def scenario(cache):
        attentions = ("kvcache", "sdpa", "eager", "kvcache")
        for attention, part in zip(attentions, tokens.split([10, 2, 2, 2], 1), strict=True):
            model.set_attn_implementation(attention)
            yield from passes(model, cache, part)

    with pytest.warns(UserWarning, match=DECODED):
        got = play(model, cache, "kvcache", scenario)
    compare(got, want)
    assert cache.stats()["calls"] == {"kernel": 2 * LAYERS, "dense": 2 * LAYERS, "fallback": 0}


@pytest.mark.parametrize("attention", ["kvcache", "eager"])
@pytest.mark.parametrize("name", ["whisper", "bart"])
def test_a_model_with_an_encoder(name, attention):
    model, inputs = two_sided(name)
    model.set_attn_implementation(attention)
    cache = HFEncoderDecoderCache(copy.deepcopy(model.config), dtype="f32", max_source_len=40)
    options = {"past_key_values": cache, "max_new_tokens": 4, "do_sample": False}
    transformers.GenerationMixin.generate(model, **inputs, **options)  # not Whisper's own, for long sounds
    kind = {"kvcache": "kernel", "eager": "dense"}[attention]
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        calls = part.stats()["calls"]
        assert calls.pop(kind) >= 3 * LAYERS
        assert not any(calls.values())


def test_generate_warns_once():
    """Each cache and each copy has its own rows, in however many steps it was fed."""
    model = make(CONFIGS["llama"]())
    model.set_attn_implementation("sdpa")
    cache = HFCache(model.config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokens = model.generate(random_tokens(1, 9), past_key_values=cache, max_new_tokens=5, do_sample=False)
        model.generate(tokens, past_key_values=copy.deepcopy(cache), max_new_tokens=5, do_sample=False)
    assert sum(DECODED in str(one.message) for one in caught) == 1


def test_no_warning_where_the_kernels_attend():
    model = make(CONFIGS["gemma3"]())
    model.set_attn_implementation("kvcache")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="kvcache")
        model.generate(random_tokens(1, 9), past_key_values=HFCache(model.config), max_new_tokens=5, do_sample=False)
