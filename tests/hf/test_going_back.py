"""Models with recurrent layers go back to where their states are kept: `crop`, and `generate` with another text."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import HYBRID, feeding, prefix_for, prepared, random_tokens  # noqa: E402 - torch may be missing

import kvcache  # noqa: E402 - as above
from kvcache.hf import HFCache, enable  # noqa: E402 - as above
from kvcache.hf.recurrent import MOST_KEPT, Recurrent  # noqa: E402 - as above

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers

QUICK = {"lfm2", "qwen3_next"}  # a convolution alone, linear attention
BY_STEPS = {"jamba"}  # whose layers begin anew in a pass of several tokens
APART = {"zamba2"}  # whose step and scan of several tokens differ by a thousandth
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in HYBRID if name not in BY_STEPS]
LONG = 100  # tokens of a prompt whose last 8 are fed behind kept states
ENDING = 8


class Failure(BaseException):
    """Raised in the middle of a pass."""


def new_cache(model, **options):
    return HFCache(model.config, dtype="f32", **options)


def feed(model, cache, tokens, mask=None):
    """Feed tokens behind what the cache holds; return their logits."""
    seen = cache.get_seq_length()
    end = seen + tokens.shape[1]
    mask = torch.ones(len(tokens), end, dtype=torch.long) if mask is None else mask[:, :end]
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, seen:]
    with torch.no_grad():
        return model(tokens, attention_mask=mask, past_key_values=cache, position_ids=positions).logits


def fed_in(model, cache, *parts, mask=None):
    """Feed parts one after the other; return the logits of the last."""
    return [feed(model, cache, part, mask) for part in parts][-1]


def generate(model, cache, tokens, mask=None, name="past_key_values", **options):
    """Return what is generated, and the lengths of the passes of several tokens."""
    mask = torch.ones_like(tokens) if mask is None else mask
    mask = torch.nn.functional.pad(mask, (0, tokens.shape[1] - mask.shape[1]), value=1)
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, name: cache, **options}
    with feeding(model) as fed:
        return model.generate(tokens, attention_mask=mask, **options), [num for num in fed if num > 1]


def then(text, length, seed):
    """Return a text, and other tokens behind it."""
    return torch.cat([text, random_tokens(len(text), length, seed=seed)], 1)


def feed_failing(model, cache, tokens, layer):
    """Feed tokens in a pass that fails behind a layer."""

    def fail(*_):
        raise Failure

    hook = model.model.layers[layer].register_forward_hook(fail)
    with pytest.raises(Failure):
        feed(model, cache, tokens)
    hook.remove()


# ---- crop


@pytest.mark.parametrize("name", NAMES)
def test_before_each_pass_of_several_tokens(name):
    """From there, other tokens give the logits of a cache that was fed these alone, as often as wanted."""
    model, other = prepared(name), random_tokens(1, 30, seed=9)
    cache, text = new_cache(model), random_tokens(1, 40)
    fed_in(model, cache, text[:, :20], text[:, 20:33], text[:, 33:34], text[:, 34:38], text[:, 38:39])
    for left in (34, 20, 20):
        cache.crop(left - cache.get_seq_length())
        assert cache.get_seq_length() == left
        like = new_cache(model)
        parts = (text[:, :20], text[:, 20:33], text[:, 33:34]) if left == 34 else (text[:, :20],)
        fed_in(model, like, *parts)
        for part in (other[:, :7], other[:, 7:8], other[:, 8:]):
            assert torch.equal(feed(model, cache, part), feed(model, like, part))


@pytest.mark.parametrize("name", NAMES)
def test_elsewhere_it_is_refused(name):
    """The error names the column, and the nearest kept states; nothing has changed."""
    model, text = prepared(name), random_tokens(1, 60)
    cache, like = new_cache(model), new_cache(model)
    for each in (cache, like):
        fed_in(model, each, text[:, :20], text[:, 20:30], text[:, 30:50])
    nearest = {40: "behind 30 tokens", 25: "behind 20 and 30 tokens", 10: "behind 20 tokens"}
    for left, says in nearest.items():
        words = (
            rf"layer \d cannot go back by {50 - left} tokens, to {left}: its .*; the nearest kept states are {says}:"
        )
        with pytest.raises(kvcache.NotSupportedError, match=rf"{words} crop to there, or reset\(\) the cache and feed"):
            cache.crop(left - 50)
    assert torch.equal(feed(model, cache, text[:, 50:]), feed(model, like, text[:, 50:]))
    cache.crop(20 - cache.get_seq_length())
    like.reset()
    feed(model, like, text[:, :20])
    assert torch.equal(feed(model, cache, text[:, 50:]), feed(model, like, text[:, 50:]))


@pytest.mark.parametrize("name", NAMES)
def test_rows_with_padding_that_move(name):
    """Rows that are selected, repeated and reordered take their kept states with them."""
    model, text = prepared(name), random_tokens(3, 40)
    mask = torch.ones_like(text)
    text[1, :5] = mask[1, :5] = text[2, :23] = mask[2, :23] = 0  # a row that begins behind what is kept first
    cache, like = new_cache(model), new_cache(model)
    fed_in(model, cache, text[:, :20], text[:, 20:30], mask=mask)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 1, 2, 0]))
    cache.reorder_cache([0, 0, 2, 1])
    rows = [2, 2, 1, 0]
    text, mask = text[rows], mask[rows]
    cache.crop(-10)
    feed(model, like, text[:, :20], mask)
    for begin, end in ((20, 32), (32, 33)):
        got, want = (feed(model, each, text[:, begin:end], mask) for each in (cache, like))
        shown = mask[:, begin:end].bool()
        torch.testing.assert_close(got[shown], want[shown], rtol=0, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("name", sorted(QUICK))
def test_four_are_kept(name):
    """Behind 53 tokens and 64 they are dropped: without these, the fewest tokens are fed again."""
    model, text = prepared(name), random_tokens(1, 200)
    cache = new_cache(model)
    for begin, end in ((0, 50), (50, 53), (53, 60), (60, 64), (64, 90), (90, 120), (120, 122)):
        feed(model, cache, text[:, begin:end])
    kept = []
    for left in range(121, 0, -1):
        try:
            cache.crop(left - cache.get_seq_length())
        except kvcache.NotSupportedError:
            continue
        kept.append(left)
    assert kept == [120, 90, 60, 50]
    assert len(kept) == MOST_KEPT


@pytest.mark.parametrize("at", [0, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_that_fails(name, at):
    """If it had several tokens, `crop` goes back to before it, or to before an earlier one."""
    model, text = prepared(name), random_tokens(1, 40)
    for left in (30, 20):
        cache, like = new_cache(model), new_cache(model)
        fed_in(model, cache, text[:, :20], text[:, 20:30])
        feed_failing(model, cache, text[:, 30:35], layer=at)
        if at != 3:  # behind which no layer lacks the tokens
            words = r"did not go through all layers.*: the nearest kept states are behind 30 tokens: crop to there"
            with pytest.raises(ValueError, match=words):
                feed(model, cache, text[:, 30:])
        cache.crop(left - cache.get_seq_length())
        fed_in(model, like, text[:, :20], *((text[:, 20:30],) if left == 30 else ()))
        for part in (text[:, left:39], text[:, 39:]):
            assert torch.equal(feed(model, cache, part), feed(model, like, part))


@pytest.mark.parametrize("num_back", [0, 10])
def test_a_pass_that_fails_behind_all_rows(num_back):
    """It does not count: the last recurrent layer lacks its tokens."""
    model, text = prepared("minimax"), random_tokens(1, 40)
    cache, like = new_cache(model), new_cache(model)
    fed_in(model, cache, text[:, :20], text[:, 20:30])
    feed_failing(model, cache, text[:, 30:35], layer=2)
    assert cache.get_seq_length() == 30
    cache.crop(-num_back)
    assert cache.get_seq_length() == 30 - num_back
    fed_in(model, like, *((text[:, :20],) if num_back else (text[:, :20], text[:, 20:30])))
    assert torch.equal(feed(model, cache, text[:, 35:]), feed(model, like, text[:, 35:]))


def test_a_failure_on_the_way_back(monkeypatch):
    """The cache forgets all, because its states are of no column."""
    model, text = prepared("qwen3_next"), random_tokens(1, 40)
    cache = new_cache(model)
    fed_in(model, cache, text[:, :20], text[:, 20:30])
    with monkeypatch.context() as patched:
        patched.setattr(Recurrent, "restore", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.crop(-10)
    assert cache.get_seq_length() == 0
    assert torch.equal(feed(model, cache, text), feed(model, new_cache(model), text))


def test_convolutions_that_are_recorded_go_back_further():
    """They go back by any number of tokens in the last pass, and to kept states before it."""
    model, text, other = prepared("lfm2"), random_tokens(1, 40), random_tokens(1, 10, seed=9)
    cache = new_cache(model)
    cache.activate_past_recording()
    for parts, left in (((text[:, :20], text[:, 20:30]), 26), ((), 20)):
        fed_in(model, cache, *parts) if parts else None
        cache.crop(left - cache.get_seq_length())
        like = new_cache(model)
        feed(model, like, text[:, :left])
        got, want = feed(model, copy.deepcopy(cache), other), feed(model, like, other)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


# ---- generate


@pytest.mark.parametrize("name", NAMES)
def test_an_edited_turn(name):
    """Only the turn is fed again. The text is that of a cache which was never told the other turn."""
    model = prepared(name)
    cache, like = new_cache(model), new_cache(model)
    first, fed = generate(model, cache, random_tokens(2, LONG))
    assert fed == [LONG - ENDING, ENDING]
    generate(model, like, random_tokens(2, LONG))
    for seed in range(3):
        got, fed = generate(model, cache, then(first, 9, seed))
        assert fed == [10]  # the answer's last token was not fed
        want, _ = generate(model, copy.deepcopy(like), then(first, 9, seed))
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_padding(name):
    """One row is shorter than what is fed behind kept states."""
    model, prompt = prepared(name), random_tokens(3, LONG)
    mask = torch.ones_like(prompt)
    for row, leading in ((0, 5), (2, LONG - 4)):
        prompt[row, :leading] = mask[row, :leading] = 0
    cache, fresh = new_cache(model), new_cache(model)
    first, fed = generate(model, cache, prompt, mask)
    assert fed == [LONG - ENDING, ENDING]
    assert torch.equal(first, generate(model, None, prompt, mask)[0]) or name in APART
    for text, wanted in ((prompt, [ENDING]), (then(first, 9, 1), [13 + ENDING]), (then(first, 9, 2), [13 + ENDING])):
        got, fed = generate(model, cache, text, mask)
        assert fed in (wanted, [10])
        want, _ = generate(model, fresh, text, mask)
        assert torch.equal(got, want) or name in APART
        fresh.reset()


def test_what_keeps_no_states_of_a_prompt():
    """A short prompt, results of all tokens, a cache that `generate` makes for a call, and one with a prefix cache."""
    model, prompt = prepared("lfm2"), random_tokens(1, LONG)
    assert generate(model, new_cache(model), prompt[:, :64])[1] == [64]
    assert generate(model, new_cache(model), prompt[:, :65])[1] == [57, 8]
    assert generate(model, new_cache(model), prompt, output_hidden_states=True)[1] == [LONG]
    assert generate(model, new_cache(model), prompt, prefill_chunk_size=70)[1] == [70, LONG - 70]
    enable(model, dtype="f32")
    assert generate(model, None, prompt)[1] == [LONG]
    kvcache.hf.disable(model)
    model = prepared("lfm2")
    prefix = prefix_for(model, state_bytes=HFCache.state_bytes(model))
    cache = HFCache(model.config, prefix=prefix)
    text, fed = generate(model, cache, prompt)
    assert fed == [LONG - 1]
    with pytest.raises(kvcache.NotSupportedError, match=r"cannot go back by 8 tokens, to 99: .*recur|conv.*; reset"):
        cache.crop(-8)
    got, fed = generate(model, cache, then(prompt[:, :99], 9, 1))
    assert fed == [8]  # the prefix cache has the states
    assert torch.equal(got, generate(model, new_cache(model), then(prompt[:, :99], 9, 1))[0])
    assert text.shape == (1, LONG + 8)


@pytest.mark.parametrize("at", [0, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_generate_that_fails(name, at):
    """The next text is fed from before the turn on in which the call failed."""
    model = prepared(name)
    cache, like = new_cache(model), new_cache(model)
    first, _ = generate(model, cache, random_tokens(2, LONG))
    generate(model, like, random_tokens(2, LONG))
    text, num_passes = then(first, 9, 1), 0
    for fails_in in (1, 3):  # in the turn itself, and in a step behind it

        def fail(*_, fails_in=fails_in):
            nonlocal num_passes
            num_passes += 1
            if num_passes == fails_in:
                raise Failure

        num_passes, hook = 0, model.model.layers[at].register_forward_hook(fail)
        with pytest.raises(Failure):
            generate(model, cache, text)
        hook.remove()
        got, fed = generate(model, copy.deepcopy(cache), text)
        assert fed == [10]
        assert torch.equal(got, generate(model, copy.deepcopy(like), text)[0])
