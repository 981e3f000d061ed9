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
)

from kvcache.hf import HFCache  # noqa: E402 - it imports those

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
