"""Models with recurrent layers beside attention (Mamba, gated delta nets, convolutions): as with `DynamicCache`."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import (  # noqa: E402 - torch may be missing
    BASE,
    HYBRID,
    check_same,
    compare,
    make,
    model_of,
    ours,
    play,
    random_tokens,
    theirs,
)

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
APART = {"zamba2"}  # whose step and scan of several tokens differ by a thousandth


def marked(names, *more):
    """Return a parameter for each name. It is slow, except for names in QUICK."""
    return [pytest.param(name, *more, marks=() if name in QUICK else pytest.mark.slow) for name in names]


NAMES = marked(HYBRID)
WITH_WAYS = [each for way in WAYS for each in marked((name for name in HYBRID if (name, way) not in UNORDERED), way)]


def generate(model, cache, tokens, **options):
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, **options}
    return model.generate(tokens, past_key_values=cache, attention_mask=torch.ones_like(tokens), **options)


def prepared(name):
    model = model_of(name)
    model.set_attn_implementation("kvcache")
    return model


def logits(model, cache, tokens):
    """Feed tokens as `generate` does: Bamba takes positions from nowhere else."""
    seen = cache.get_seq_length()
    positions = torch.arange(seen, seen + tokens.shape[1])[None]
    with torch.no_grad():
        return model(tokens, past_key_values=cache, position_ids=positions).logits


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


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_states_are_named(name):
    model = prepared(name)
    cache = HFCache(model.config, dtype="f32")
    assert cache.stats()["state_bytes"] == 0
    sizes = []
    for num_rows in (1, 3):
        generate(model, cache, random_tokens(num_rows, 19))
        sizes.append(cache.stats()["state_bytes"])
        assert cache.nbytes - cache._cache.nbytes == sizes[-1]
        cache.reset()
    assert sizes[1] == 3 * sizes[0] > 0


@pytest.mark.parametrize("name", NAMES)
def test_padding(name):
    tokens = random_tokens(3, 19)
    mask = torch.ones_like(tokens)
    tokens[0, :5] = mask[0, :5] = tokens[2, :18] = mask[2, :18] = 0

    def scenario(cache):
        yield model.generate(tokens, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=8)

    model = model_of(name)
    check_same(model, scenario)


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


@pytest.mark.parametrize("name", marked(name for name in HYBRID if name not in ONE_BY_ONE))
def test_turns_as_with_their_own_cache(name):
    def scenario(cache):
        text = random_tokens(2, 20)
        for turn in range(3):
            text = generate(model, cache, torch.cat([text, random_tokens(2, 7, seed=turn)], 1))
            yield text

    model = model_of(name)
    check_same(model, scenario)


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


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("name", NAMES)
def test_copies(name, way):
    """A copy goes on by itself."""
    model = prepared(name)
    tokens = random_tokens(2, 24)
    cache = HFCache(model.config, dtype="f32")
    logits(model, cache, tokens[:, :20])
    other = way(cache)
    logits(model, cache, tokens[:, :1])  # which is another token than the next
    untouched, _ = HFCache(model.config, dtype="f32"), logits
    logits(model, untouched, tokens[:, :20])
    for i in range(20, 24):
        assert torch.equal(logits(model, other, tokens[:, i : i + 1]), logits(model, untouched, tokens[:, i : i + 1]))
    assert cache.get_seq_length() == 21
    assert other.is_linear == cache.is_linear


@pytest.mark.parametrize("name", NAMES)
def test_rows(name):
    model = prepared(name)
    tokens = random_tokens(3, 21)
    cache, want = HFCache(model.config, dtype="f32"), HFCache(model.config, dtype="f32")
    logits(model, cache, tokens[:, :20])
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 1, 2, 0]))
    cache.reorder_cache([0, 0, 2, 1])
    rows = [2, 2, 1, 0]
    logits(model, want, tokens[rows, :20])
    got = logits(model, cache, tokens[rows, 20:])
    torch.testing.assert_close(got, logits(model, want, tokens[rows, 20:]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_after_a_reset_there_may_be_other_rows(name):
    model = prepared(name)
    cache = HFCache(model.config, dtype="f32")
    for rows in (3, 1, 2):
        tokens = random_tokens(rows, 11)
        assert torch.equal(logits(model, cache, tokens), logits(model, HFCache(model.config, dtype="f32"), tokens))
        assert cache.recurrent.nbytes > 0
        assert cache.nbytes > cache._cache.nbytes
        cache.reset()
        assert cache.recurrent.nbytes == 0


def test_the_layers_are_in_the_models_order():
    kinds = {
        "lfm2": ["LinearAttentionLayer", "Layer"] * 2,
        "falcon_h1": ["MixedLayer"] * 4,
        "zamba2": ["LinearAttentionLayer", "MixedLayer"] * 2,
    }
    for name, wanted in kinds.items():
        cache = HFCache(model_of(name).config)
        assert [type(layer).__name__ for layer in cache.layers] == wanted
        assert cache.is_linear == [kind == "LinearAttentionLayer" for kind in wanted]
        assert not cache.is_compileable


# ---- what cannot go back


@pytest.mark.parametrize("name", NAMES)
def test_crop(name):
    """Refused, and nothing has changed; what takes back nothing, or all, is not."""
    model = prepared(name)
    tokens = random_tokens(1, 21)
    cache, untouched = HFCache(model.config, dtype="f32"), HFCache(model.config, dtype="f32")
    for each in (cache, untouched):
        logits(model, each, tokens[:, :20])
    with pytest.raises(kvcache.NotSupportedError, match=r"layer \d cannot go back by 3 tokens, to 17: its .*; reset"):
        cache.crop(-3)
    cache.crop(0)
    assert torch.equal(logits(model, cache, tokens[:, 20:]), logits(model, untouched, tokens[:, 20:]))
    cache.crop(-100)
    assert cache.get_seq_length() == 0
    assert torch.equal(logits(model, cache, tokens), logits(model, HFCache(model.config, dtype="f32"), tokens))


@pytest.mark.parametrize("name", NAMES)
def test_the_length_within_a_pass(name, monkeypatch):
    """It is the length before the pass: Inkling's attention asks for it, behind a convolution."""
    model, found, tokens = prepared(name), [], random_tokens(1, 22)
    cache = HFCache(model.config, dtype="f32")
    get_state = cache.get_conv_state

    def get_state_and_length(layer_idx, *args, **kwargs):
        state = get_state(layer_idx, *args, **kwargs)
        if layer_idx < len(cache.layers) - 1:  # behind the last part of the last layer the pass counts
            found.append(cache.get_seq_length())
        return state

    logits(model, cache, tokens[:, :20])
    monkeypatch.setattr(cache, "get_conv_state", get_state_and_length)
    for length in (20, 21):
        logits(model, cache, tokens[:, length : length + 1])
        assert {*found} <= {length}, found
        found.clear()


@pytest.mark.parametrize("fed", [2, 20])
def test_convolutions_go_back_in_what_was_recorded(fed):
    model = prepared("lfm2")
    tokens = random_tokens(1, fed + 8)
    cache, want = HFCache(model.config, dtype="f32"), HFCache(model.config, dtype="f32")
    cache.activate_past_recording()
    logits(model, cache, tokens[:, :fed])
    cache.crop(0)
    for back in (4, 0, 2):
        logits(model, cache, random_tokens(1, back, seed=back)) if back else None
        cache.crop(-back)
    got = logits(model, cache, tokens[:, fed:])
    cache.crop(-5)
    logits(model, want, tokens[:, :fed])
    assert torch.equal(got, logits(model, want, tokens[:, fed:]))
    with pytest.raises(kvcache.NotSupportedError, match="its convolution goes back only in the last pass"):
        cache.crop(-2)
    assert cache.get_seq_length() == fed + 3


@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe"])
def test_assisted_decoding(name):
    def scenario(cache):
        tokens = random_tokens(1, 30)
        tokens[:, 20:] = tokens[:, :10]
        yield generate(model, cache, tokens, prompt_lookup_num_tokens=3, max_new_tokens=16)

    model = model_of(name)
    check_same(model, scenario)


@pytest.mark.parametrize("way", ["edited", "shorter", "the same"])
@pytest.mark.parametrize("name", NAMES)
def test_another_text(name, way):
    model = prepared(name)
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, cache, random_tokens(1, 20))
    text = {"edited": torch.cat([text[:, :15], random_tokens(1, 20)], 1), "shorter": text[:, :9], "the same": text}[way]
    assert torch.equal(generate(model, cache, text), generate(model, HFCache(model.config, dtype="f32"), text))


@pytest.mark.parametrize("at", [0, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_that_fails(name, at):
    """Some states have its tokens, some do not: no pass goes on from there, and `generate` begins anew."""
    model = prepared(name)
    tokens = random_tokens(1, 25)
    cache = HFCache(model.config, dtype="f32")
    logits(model, cache, tokens[:, :20])
    layers = model.model.layers
    hook = layers[at].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model, cache, tokens[:, 20:21])
    hook.remove()
    if at == 3:  # all layers had its token
        assert cache.get_seq_length() == 21
        got = logits(model, cache, tokens[:, 21:22])
        want = logits(model, HFCache(model.config, dtype="f32"), tokens[:, :22])[:, -1:]
        off = 1e-2 if name in APART else 1e-4
        torch.testing.assert_close(got, want, rtol=0, atol=off * float(want.abs().max()))
        return
    lost = r"did not go through all layers.*reset\(\) the cache"
    with pytest.raises(ValueError, match=lost):
        logits(model, cache, tokens[:, 20:21])
    other = copy.deepcopy(cache)
    for each in (cache, other):
        with pytest.raises(ValueError, match=lost):
            logits(model, each, tokens[:, 20:21])
    fresh = HFCache(model.config, dtype="f32")
    assert torch.equal(generate(model, other, tokens), generate(model, fresh, tokens))
    cache.reset()
    fresh.reset()
    assert torch.equal(logits(model, cache, tokens), logits(model, fresh, tokens))


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_first_pass_that_fails(name, at):
    """Nothing was there that would be lost: the cache is as new."""
    model = prepared(name)
    cache, tokens = HFCache(model.config, dtype="f32"), random_tokens(1, 20)
    hook = model.model.layers[at].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model, cache, random_tokens(2, 20))
    hook.remove()
    assert torch.equal(logits(model, cache, tokens), logits(model, HFCache(model.config, dtype="f32"), tokens))


@pytest.mark.parametrize("name", NAMES)
def test_a_generate_that_fails(name):
    model = prepared(name)
    text, cache = random_tokens(1, 20), HFCache(model.config, dtype="f32")
    text = torch.cat([generate(model, cache, text), random_tokens(1, 5)], 1)
    hook = model.model.layers[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, cache, text)
    hook.remove()
    assert torch.equal(generate(model, cache, text), generate(model, HFCache(model.config, dtype="f32"), text))


def test_a_text_that_is_refused_leaves_the_cache():
    model = prepared("qwen3_next")
    text, cache = random_tokens(1, 20), HFCache(model.config, dtype="f32")
    text = generate(model, cache, text)
    with pytest.raises(ValueError, match="the batch has 2 rows"):
        generate(model, cache, random_tokens(2, 30))
    assert cache.get_seq_length() == 27
    assert torch.equal(generate(model, cache, text), generate(model, HFCache(model.config, dtype="f32"), text))


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


# ---- what else there is


def test_enable_and_types():
    model = make(HYBRID["zamba2"]())  # whose heads have 32 elements
    tokens = random_tokens(1, 20)
    want = generate(model, transformers.DynamicCache(config=model.config), tokens)
    kvcache.hf.enable(model, dtype="f32")
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    assert torch.equal(model.generate(tokens, **options), want)
    kvcache.hf.enable(model, dtype="q8_0")
    assert model.generate(tokens, **options).shape == want.shape
    kvcache.hf.disable(model)


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
def test_a_policy(name):
    """A window for the attention leaves recurrent layers alone."""
    model = prepared(name)
    wide, narrow = (HFCache(model.config, "f32", kvcache.SlidingWindow(n, num_sink_tokens=2)) for n in (500, 4))
    tokens = random_tokens(1, 60)
    want = generate(model, HFCache(model.config, "f32"), tokens)
    assert torch.equal(generate(model, wide, tokens), want)
    generate(model, narrow, tokens)
    assert "SlidingWindow(window=4, num_sink_tokens=2), 6 rows of a sequence kept" in repr(narrow)


def test_layers_that_share_rows_have_no_state():
    """They are cut as others are: an edited history is fed from where it differs."""
    config = transformers.Gemma3nTextConfig(
        **BASE, num_kv_shared_layers=2, layer_types=["full_attention"] * 4, vocab_size_per_layer_input=97
    )
    model = make(config)
    model.set_attn_implementation("kvcache")
    cache, fed = HFCache(model.config, dtype="f32"), []
    text = generate(model, cache, random_tokens(1, 30))
    hook = model.register_forward_pre_hook(lambda *given: fed.append(given[2]["input_ids"].shape[1]), with_kwargs=True)
    edited = torch.cat([text[:, :25], random_tokens(1, 9)], 1)
    got = generate(model, cache, edited)
    hook.remove()
    assert fed[0] == 9
    assert torch.equal(got, generate(model, HFCache(model.config, dtype="f32"), edited))


def test_the_state_in_the_model_itself():
    with pytest.raises(kvcache.NotSupportedError, match="keeps the state of its recurrent layers itself"):
        HFCache(transformers.RecurrentGemmaConfig())
