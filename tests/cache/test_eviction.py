"""`kvcache.eviction`: policies over weights of queries, and the first and last tokens of a text without end."""

import copy

import numpy as np
import pytest
from support.attention import attend, weigh
from support.repository_model import MODEL
from support.rotation import rotated

import kvcache
from kvcache.eviction import AGAIN, Prompt, Queries, evict, future, kvzip, mean_importance, stream
from kvcache.runner import Llama, Options, new_cache

ROPE = kvcache.Rope([0.5, 0.1])
LENGTH = 100


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def filled(length=LENGTH, **options):
    cache = kvcache.KVCache(2, 2, 4, **{"max_sequences": None, "dtype": "f32", "rope": ROPE} | options)
    with cache.batch(length) as batch:
        for layer in range(2):
            batch.put(layer, random(length, 2, 4, seed=layer), random(length, 2, 4, seed=9 + layer))
    return cache


def noted(every=32, last=32, chunks=(LENGTH,), **options):
    queries, q = Queries(every, last), random(LENGTH, 4, 4, seed=5).astype(np.float16)
    for layer in range(2):
        for begin, end in zip((0, *chunks[:-1]), chunks, strict=True):
            queries.note(layer, q[begin:end].astype(np.float32), np.arange(begin, end), **options)
    return queries, q


def weights_of(cache, layer, q, positions, seq_id=0):
    """Return the weights [KV heads, group * n, rows] of queries."""
    keys, at = cache.gather(layer, seq_id=seq_id)[0], cache.positions(layer=layer, seq_id=seq_id)
    weights, _ = weigh(q, keys.swapaxes(0, 1), at <= np.reshape(positions, (-1, 1)))
    return weights.reshape(2, -1, weights.shape[2])


# --- queries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [(LENGTH,), (40, 41, LENGTH), tuple(range(1, LENGTH + 1))], ids=len)
def test_which_queries_are_kept(chunks):
    queries, q = noted(chunks=chunks, scale=0.25, softcap=None)
    picked, latest = queries.picked(1), queries.latest(1)
    assert picked.positions.tolist() == [16, 48, 80]
    assert latest.positions.tolist() == [*range(LENGTH - 32, LENGTH)]
    assert picked.options == latest.options == {"scale": 0.25}
    np.testing.assert_array_equal(picked.q, q[[16, 48, 80]])
    np.testing.assert_array_equal(latest.q, q[-32:])
    assert queries.picked(7) is queries.latest(7) is queries.picked(0, seq_id=3) is None


def test_queries_beyond_float16():
    queries, q = Queries(every=4), random(8, 4, 4)
    queries.note(0, q, np.arange(8))
    queries.note(0, 1e6 * q, np.arange(8, 16))
    picked = queries.picked(0)
    np.testing.assert_array_equal(picked.q[2:], 1e6 * q[[2, 6]])
    np.testing.assert_allclose(picked.q[:2], q[[2, 6]], rtol=1e-3)


def test_a_sequence_that_goes_back_and_a_fork():
    queries, q = noted(every=10)
    queries.fork(0, 3)
    other = copy.deepcopy(queries)
    queries.note(0, q[:5], np.arange(50, 55))
    assert queries.picked(0).positions.tolist() == [5, 15, 25, 35, 45]
    assert queries.latest(0).positions.tolist() == [*range(50, 55)]  # those before were not kept
    for kept in (queries.picked(0, 3), other.picked(0), other.picked(0, 3)):
        assert kept.positions.tolist() == [*range(5, LENGTH, 10)]
    queries.forget(3)
    assert queries.picked(0, 3) is None
    assert other.picked(0, 3) is not None


def test_a_prompt_has_no_queries_of_tokens_that_were_taken_back():
    cache, (queries, q) = filled(), noted()
    cache.truncate(80)
    prompt = Prompt(cache, 0, queries)
    assert prompt.picked(0).positions.tolist() == [16, 48]
    assert prompt.latest(1).positions.tolist() == [*range(LENGTH - 32, 80)]
    np.testing.assert_array_equal(prompt.latest(1).q, q[LENGTH - 32 : 80])
    cache.truncate(10)
    with pytest.raises(ValueError, match="no queries of sequence 0 were noted in layer 0"):
        Prompt(cache, 0, queries).picked(0)


# --- policies --------------------------------------------------------------------------------------------------------


def test_future():
    cache, (queries, q) = filled(), noted()
    positions = LENGTH + np.arange(3) * 512 // 3
    moved = rotated(q[[16, 48, 80]], (positions - [16, 48, 80])[:, None], ROPE)
    right = []
    for layer in range(2):
        largest = weights_of(cache, layer, moved, positions).max(1)
        right += [*(largest / largest.sum(1, keepdims=True))]
    np.testing.assert_allclose(future(Prompt(cache, 0, queries)), np.mean(right, 0), rtol=1e-4)


def test_future_within_the_context():
    queries, _ = noted()
    cache, wide = filled(max_seq_len=LENGTH + 3), filled()
    near = [wide.weights(0, p.q, p.positions, reduce="max") for p in moved_to(wide, queries, [100, 101, 102])]
    found = Prompt(cache, 0, queries)
    found.layers = (0,)
    np.testing.assert_allclose(future(found), mean_importance(near), rtol=1e-5)


def moved_to(cache, queries, positions):
    prompt = Prompt(cache, 0, queries)
    yield prompt.moved(prompt.picked(0), 0, np.array(positions, np.int32))


def test_kvzip():
    cache, q, keys = filled(), random(LENGTH, 4, 4, seed=5).astype(np.float16), random(LENGTH, 2, 4, seed=6)
    right = [np.zeros((2, LENGTH)) for _ in range(2)]

    def again():
        for begin in range(0, LENGTH, 64):
            part = slice(begin, min(begin + 64, LENGTH))
            queries, at = Queries(every=1, last=0), LENGTH + np.arange(part.stop - begin)
            cache.fork(0, 7)
            with cache.batch(len(at), seq_ids=[7] * len(at)) as batch:
                for layer in range(2):
                    batch.put(layer, keys[part], keys[part])
                    queries.note(layer, q[part], at, seq_id=7, scale=0.5)
            for layer in range(2):
                found = weights_of(cache, layer, q[part], at, seq_id=7)
                right[layer] = np.maximum(right[layer], found.max(1)[:, :LENGTH])
            yield 7, queries
            cache.clear(7)

    found = kvzip(Prompt(cache, 0, again=again))
    scaled = np.concatenate(right) / np.concatenate(right).sum(1, keepdims=True)
    np.testing.assert_allclose(found, scaled.mean(0), rtol=1e-4)


@pytest.mark.parametrize("rope", [False, None])
def test_moving_needs_a_rotation(rope):
    cache, (queries, q) = filled(rope=rope), noted()
    prompt = Prompt(cache, 0, queries)
    if rope is None:
        with pytest.raises(kvcache.NotSupportedError, match="queries of layer 0 cannot be moved"):
            evict(cache, future, queries=queries)
        assert cache.seq_len() == LENGTH
    else:
        np.testing.assert_array_equal(prompt.moved(prompt.picked(0), 0, np.array([200, 201, 202])).q, q[[16, 48, 80]])


@pytest.mark.parametrize("rope", [kvcache.Rope([0.5, 0.1], interleaved=True), kvcache.Rope([0.3], first_dim=2)])
def test_a_moved_query_scores_as_the_rotated_one(rope):
    cache, (queries, _) = filled(rope=rope), noted()
    prompt = Prompt(cache, 0, queries)
    asked = prompt.picked(0)
    moved = prompt.moved(asked, 0, asked.positions + 77)
    cache.shift(0, None, 77)  # the keys move as far, so that nothing changes
    found = cache.weights(0, moved.q, moved.positions)
    np.testing.assert_allclose(found, filled(rope=rope).weights(0, asked.q, asked.positions), rtol=1e-3, atol=1e-6)


# --- evict -----------------------------------------------------------------------------------------------------------


def test_the_first_and_the_last_stay_and_of_equals_the_earlier():
    cache = filled()
    importance = np.zeros(LENGTH)
    importance[[50, 60, 61]] = 1, np.inf, np.nan
    kept = evict(cache, lambda prompt: importance[: prompt.num_rows], 0.4)
    assert kept.tolist() == [*range(6), 50, 60, *range(LENGTH - 32, LENGTH)]
    assert cache.positions().tolist() == kept.tolist()
    assert cache.next_position() == LENGTH
    assert kept.dtype == np.int32
    again = evict(cache, lambda prompt: importance[: prompt.num_rows], 0.1)  # of those that are left; 36 at least
    assert again.tolist() == [*range(4), *range(LENGTH - 32, LENGTH)]


def test_the_share_is_exact():
    assert len(evict(filled(700), zeros, 0.07)) == 49


def test_the_last_stay_beside_infinite_importance():
    cache = filled()
    kept = evict(cache, lambda prompt: np.full(prompt.num_rows, np.inf), 0.4)
    assert kept.tolist() == [*range(8), *range(LENGTH - 32, LENGTH)]
    assert cache.next_position() == LENGTH


def test_layers_with_windows_have_no_say():
    policies = [kvcache.SlidingWindow(8), kvcache.FullAttention()]
    cache, (queries, _) = filled(policy=policies), noted()
    assert Prompt(cache).layers == (1,)
    assert len(evict(cache, future, 0.5, queries=queries)) == 50
    with pytest.raises(kvcache.NotSupportedError, match="no layer of the cache keeps the rows of all tokens"):
        evict(filled(policy=policies[0]), future, queries=queries)


def test_layers_with_a_row_for_every_nth_token_have_no_say():
    layers = [kvcache.Layer(2, 4, policy=kvcache.FullAttention(stride=n), rope=ROPE) for n in (4, 1)]
    cache, rows = kvcache.KVCache(layers), random(LENGTH, 2, 4)
    with cache.batch(LENGTH) as batch:
        batch.put(0, rows[3::4], rows[3::4])
        batch.put(1, rows, rows)
    assert Prompt(cache).layers == (1,)
    kept = evict(cache, lambda prompt: prompt.positions % 2, 0.5)
    assert cache.positions(layer=0).tolist() == [p for p in kept if p % 4 == 3]


@pytest.mark.parametrize("keep", [1, 1.0, 0.999])
def test_nothing_to_drop(keep):
    cache = filled(36)
    assert evict(cache, None, keep).tolist() == [*range(36)]  # the policy is not asked


def zeros(prompt):
    return np.zeros(prompt.num_rows)


def note(q, positions, **options):
    Queries().note(0, random(*q), positions, **options)


LACKING = "no queries of sequence 0 were noted in layer 0"
WINDOWS = kvcache.SlidingWindow(8, num_sink_tokens=4), kvcache.SlidingWindow(16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: Queries(every=-1), "every=-1"),
        (lambda _: Queries(last=-1), "last=-1"),
        (lambda _: note((9, 16), np.arange(9)), r"q of shape \(9, 16\) and positions of shape \(9,\)"),
        (lambda _: note((9, 4, 4), np.arange(8)), r"q of shape \(9, 4, 4\) and positions of shape \(8,\)"),
        (lambda _: note((0, 4, 4), np.arange(0)), "n at least 1"),
        (lambda _: note((3, 4, 4), np.array([0, 2, 1])), r"positions=\[0, 2, 1\]: must be integers that ascend"),
        (lambda _: note((3, 4, 4), np.arange(3.0)), r"positions=\[0.0, 1.0, 2.0\]: must be integers"),
        (lambda _: note((3, 4, 4), [0, 1, 2]), "positions: a NumPy array is needed, not list"),
        (lambda _: note((1, 4, 4), np.arange(1), window=3), "window"),
        *(
            (lambda cache, keep=keep: evict(cache, zeros, keep), "keep=")
            for keep in (0, -0.5, 1.01, np.nan, "25%", None)
        ),
        *(
            (lambda cache, wrong=wrong: evict(cache, lambda prompt: wrong), f"a number for each of the {LENGTH} tokens")
            for wrong in (np.zeros(3), np.zeros((LENGTH, 1)), ["a"] * LENGTH, None)
        ),
        (lambda cache: evict(cache, "future"), "policy='future': a function of a `Prompt` is needed, such as `future`"),
        (lambda cache: evict(cache, kvzip, again=lambda: iter(())), "weights: those of one layer or more are needed"),
        (lambda cache: evict(cache, kvzip), "fed once more"),
        (lambda cache: evict(cache, future), f"{LACKING}.* a prefix cache holds"),
        (lambda cache: evict(cache, future, queries=Queries()), LACKING),
        (lambda cache: stream(cache, 0), "window=0"),
        (lambda _: stream(with_window(WINDOWS[0]), 10), "layer 1 keeps sink tokens of its own"),
        (lambda _: stream(with_window(WINDOWS[1]), 15), "window=15: must be at least 16, as layer 1 sees so many"),
        (lambda _: stream(filled(rope=None), 10), "cannot move up: layer 0 needs a `Rope`"),
        # A function's keys would be rounded at each call.
        (lambda _: stream(filled(rope=lambda layer, keys, delta: keys), 10), "cannot move up: layer 0 needs a `Rope`"),
    ],
)
def test_refused(call, message):
    cache = filled()
    with pytest.raises((TypeError, ValueError, kvcache.NotSupportedError), match=message):
        call(cache)
    assert cache.seq_len() == LENGTH


# --- the model of the repository -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return Llama.load(MODEL)


def test_queries_are_not_moved_beyond_the_context(model):
    with new_cache(model.config, Options(keep=0.25)) as cache:
        assert (cache.max_seq_len, cache.max_sequences) == (model.config.max_seq_len, 1)
    with new_cache(model.config, Options(keep=0.25, evict_by="kvzip")) as cache:
        assert (cache.max_seq_len, cache.max_sequences) == (model.config.max_seq_len + AGAIN, 2)


# --- a text without end ----------------------------------------------------------------------------------------------


def test_stream_closes_the_gap():
    cache = kvcache.KVCache(1, 2, 4, dtype="f32", rope=ROPE)
    keys, values, q = (random(120, heads, 4, seed=3 + heads) for heads in (2, 2, 4))
    for at in range(120):
        assert stream(cache, 19) == (at >= 24)
        with cache.batch(1) as batch:
            assert batch.positions.tolist() == [at]
            out = batch.attend(0, q[at : at + 1], keys[at : at + 1], values[at : at + 1])
    window = np.arange(120 - 20, 120)
    assert cache.positions().tolist() == [*range(120 - 24, 120)]
    rows = np.concatenate([rotated(keys[:4], 96, ROPE), keys[window]])
    right = attend(q[-1:], rows, np.concatenate([values[:4], values[window]]))
    np.testing.assert_allclose(out, right, rtol=1e-4)


def test_stream_after_a_move_that_failed(monkeypatch):
    cache = filled()
    with monkeypatch.context() as patch:
        patch.setattr(kvcache.KVCache, "shift", fail)
        with pytest.raises(MemoryError):
            stream(cache, 10)
    assert stream(cache, 10) == 0
    assert cache.positions().tolist() == [*range(LENGTH - 14, LENGTH)]


def fail(*args, **options):
    raise MemoryError


def with_window(policy, length=LENGTH, **options):
    return filled(length, policy=[kvcache.FullAttention(), policy], **options)


@pytest.mark.parametrize("policy", [kvcache.SlidingWindow(16), kvcache.ChunkedAttention(16)])
def test_stream_where_a_layer_has_lost_the_first_tokens(policy):
    cache = with_window(policy)
    for _ in range(40):  # in front of the last 16, the first tokens are out of the layer's sight
        stream(cache, 16)
        with cache.batch(1) as batch:
            for layer in range(2):
                batch.attend(layer, random(1, 4, 4), random(1, 2, 4), random(1, 2, 4))
    assert cache.seq_len() == 21


def test_stream_where_a_window_holds_the_first_tokens():
    assert stream(with_window(kvcache.SlidingWindow(LENGTH)), 15) == LENGTH - 19
    assert stream(with_window(kvcache.SlidingWindow(16)), 15, num_sink_tokens=0) == LENGTH - 15


def test_stream_beside_an_encoder():
    cache = kvcache.KVCache(2, 2, 4, rope=[ROPE, None], policy=[kvcache.FullAttention(), kvcache.CrossAttention(5)])
    rows = random(LENGTH, 2, 4)
    with cache.batch(LENGTH) as batch:
        batch.put(0, rows, rows)
        batch.put(1, rows[:5], rows[:5])
    assert stream(cache, 10) == LENGTH - 14


def test_stream_without_a_rotation():
    assert stream(filled(rope=False), 10) == LENGTH - 14
    assert stream(filled(rope=None), 10, num_sink_tokens=0) == LENGTH - 10
    assert stream(kvcache.KVCache(1, 2, 4, rope=ROPE), 10) == 0
