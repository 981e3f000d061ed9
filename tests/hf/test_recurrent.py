"""Models with recurrent layers beside attention (Mamba, gated delta nets, convolutions): as with `DynamicCache`."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import HYBRID, compare, logits, model_of, ours, play, prepared, random_tokens, theirs  # noqa: E402 - torch may be missing

import kvcache  # noqa: E402 - it imports those
import kvcache.hf  # noqa: E402 - it imports those
from kvcache.hf import HFCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers, and that dense tensors are used

WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 3},
}
ONE_BY_ONE = {"jamba"}  # whose layers begin anew in a pass of several tokens
QUICK = {"falcon_h1", "lfm2", "qwen3_next"}  # a state beside attention, a convolution alone, linear attention
UNORDERED = {("minimax", "beams")}  # transformers' own cache of the model reorders no states


def marked(names, *more):
    """Return a parameter for each name. It is slow, except for names in QUICK."""
    return [pytest.param(name, *more, marks=() if name in QUICK else pytest.mark.slow) for name in names]


NAMES = marked(HYBRID)
WITH_WAYS = [each for way in WAYS for each in marked((name for name in HYBRID if (name, way) not in UNORDERED), way)]


def generate(model, cache, tokens, **options):
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, **options}
    return model.generate(tokens, past_key_values=cache, attention_mask=torch.ones_like(tokens), **options)


@pytest.mark.parametrize(("name", "way"), WITH_WAYS)
def test_generate(name, way):
    def scenario(cache):
        yield generate(model, cache, random_tokens(2, 19), **WAYS[way])

    model = model_of(name)
    want = play(model, *theirs(model), scenario)
    for attention in ("kvcache", "sdpa"):
        cache, _ = ours(model)
        compare(play(model, cache, attention, scenario), want)
        calls = cache.stats()["calls"]
        assert not calls["fallback"] + calls["dense" if attention == "kvcache" else "kernel"]


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_turns_of_a_model_that_begins_anew(name):
    """In a pass of several tokens; the cache does, too."""
    model = prepared(name)
    cache, text = HFCache(model.config, dtype="f32"), random_tokens(1, 20)
    for turn in range(3):
        text = torch.cat([text, random_tokens(1, 7, seed=turn)], 1)
        want = generate(model, HFCache(model.config, dtype="f32"), text)
        seen = cache.get_seq_length()
        text = generate(model, cache, text)
        assert torch.equal(text, want)
        assert cache.get_seq_length() == text.shape[1] - 1 > seen


def test_a_model_that_goes_on_by_single_tokens():
    model = prepared("jamba")
    cache, tokens = HFCache(model.config, dtype="f32"), random_tokens(1, 20)
    want = logits(model, HFCache(model.config, dtype="f32"), tokens)[:, -2:]
    logits(model, cache, tokens[:, :18])
    got = torch.cat([logits(model, cache, tokens[:, i : i + 1]) for i in (18, 19)], 1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))
    with pytest.raises(kvcache.NotSupportedError, match=r"single tokens only: feed them one by one, or reset\(\)"):
        logits(model, cache, tokens[:, :2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 4])
def test_other_rows_are_refused_before_a_layer_has_them(name, length):
    model, tokens = prepared(name), random_tokens(2, 19)
    cache, like = HFCache(model.config, dtype="f32"), HFCache(model.config, dtype="f32")
    for each in (cache, like):
        logits(model, each, tokens[:, :18])
    for rows, says in (([0], "1 row"), ([0, 1, 0], "3 rows")):
        with pytest.raises(ValueError, match=f"has {says}: .* filled with 2; reset it, or call batch_select_indices"):
            logits(model, cache, tokens[rows, :length])
    assert torch.equal(logits(model, cache, tokens[:, 18:]), logits(model, like, tokens[:, 18:]))


@pytest.mark.parametrize(
    ("config_of", "model", "words"),
    [
        ("lfm2", "llama", "layer 0 of the model has keys and values, that of the config which this cache was made"),
        ("llama", "lfm2", "layer 0 of the model has a recurrent state, that of the config which this cache was made"),
        ("falcon_h1", "llama", "the model left out recurrent layers that the config has which this cache"),
    ],
)
def test_a_cache_of_another_models_config(config_of, model, words):
    with pytest.raises(ValueError, match=f"{words}.*: give HFCache model.config"):
        generate(prepared(model), HFCache(model_of(config_of).config), random_tokens(1, 20))


def test_the_state_in_the_model_itself():
    with pytest.raises(kvcache.NotSupportedError, match="keeps the state of its recurrent layers itself"):
        HFCache(transformers.RecurrentGemmaConfig())
