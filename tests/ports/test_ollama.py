"""Ollama's kvcache, v0.15.4: every row of its table, and what a query sees after whatever was done.

Rows are told apart by their values: the n-th token ever put has the n-th unit vector, and is called n. What is compared
is the set of rows that a query sees, never where these lie.
"""

import copy
import math

import numpy as np
import pytest
from support.coming_from import Table, random_rows, store

from kvcache import (
    CacheFullError,
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    KVCache,
    NotSupportedError,
    RowsGoneError,
    SlidingWindow,
)

table = Table("Ollama")
test_every_row_has_a_test = table.all_claimed()

MOST_TOKENS = 512
NO_LIMIT = math.inf


def moved(layer, keys, delta):
    """A shift function for keys that are their position."""
    return keys + np.float32(delta)


class Runner:
    """A cache whose rows can be told apart; in every layer they are the same."""

    def __init__(self, *policies, capacity=16, max_sequences=1, rope=moved, pool=None):
        self.cache = KVCache(
            len(policies),
            1,
            2,
            capacity,
            v_head_dim=MOST_TOKENS,
            dtype="f32",
            policy=list(policies),
            max_sequences=max_sequences,
            rope=rope,
            capacity=pool,
        )
        self.count = 0

    def forward(self, *tokens, non_causal=None):
        """Run a pass of (sequence, position) tokens; return the rows that each sees, per layer if there are several."""
        n = len(tokens)
        seq_ids, positions = zip(*tokens, strict=True)
        names = self.count + 1 + np.arange(n)
        k = np.repeat(np.float32(positions), 2).reshape(n, 1, 2)
        v = np.eye(MOST_TOKENS, dtype=np.float32)[names][:, None]
        with self.cache.batch(positions=positions, seq_ids=seq_ids) as batch:
            seen = [self._seen(batch, layer, k, v, non_causal) for layer in range(self.cache.num_layers)]
        self.count += n
        self.cache.validate()
        return seen[0] if len(seen) == 1 else seen

    def _seen(self, batch, layer, k, v, non_causal):
        out = batch.attend(layer, np.zeros_like(k), k, v, non_causal=non_causal)  # every row seen has the same weight
        _, values, mask = batch.dense(layer, non_causal=non_causal)
        names = values[0].argmax(-1)
        by_attention = [set(np.flatnonzero(row).tolist()) for row in out[:, 0]]
        assert by_attention == [set(names[row == 0].tolist()) for row in mask]
        return by_attention

    def append(self, seq_id, n):
        """The next n tokens of a sequence."""
        first = self.cache.next_position(seq_id)
        return self.forward(*((seq_id, position) for position in range(first, first + n)))


def swa(window, memory=None, *, max_sequences=1):
    """The policy that shows what a window of Ollama's shows, and keeps what it keeps."""
    memory = window if memory is None else memory
    return SlidingWindow(window + 1, resume_window=(max(memory, window + 1) if max_sequences > 1 else memory) + 1)


# --- what a query sees -------------------------------------------------------------------------------------------


def test_causal():
    runner = Runner(FullAttention())
    assert runner.append(0, 4) == [{1}, {1, 2}, {1, 2, 3}, {1, 2, 3, 4}]
    assert runner.append(0, 1) == [{1, 2, 3, 4, 5}]


def test_sequences_see_only_themselves():
    runner = Runner(FullAttention(), max_sequences=2)
    assert runner.forward((0, 0), (0, 1), (1, 0), (1, 1)) == [{1}, {1, 2}, {3}, {3, 4}]
    assert runner.forward((0, 2), (1, 2)) == [{1, 2, 5}, {3, 4, 6}]
    assert runner.forward((1, 3), (0, 3)) == [{3, 4, 6, 7}, {1, 2, 5, 8}]


def test_a_window_shows_one_more_than_its_name_says():
    runner = Runner(swa(1))
    assert runner.append(0, 4) == [{1}, {1, 2}, {2, 3}, {3, 4}]
    assert runner.append(0, 2) == [{4, 5}, {5, 6}]


def test_a_window_over_batches_of_two_sequences():
    runner = Runner(swa(1, max_sequences=2), max_sequences=2)
    assert runner.append(0, 2) == [{1}, {1, 2}]
    assert runner.append(0, 2) == [{2, 3}, {3, 4}]
    assert runner.append(1, 2) == [{5}, {5, 6}]
    assert runner.append(1, 2) == [{6, 7}, {7, 8}]
    assert runner.append(0, 2) == [{4, 9}, {9, 10}]
    assert runner.forward((1, 4), (0, 6)) == [{8, 11}, {10, 12}]


def test_a_window_with_memory_shows_no_more_but_keeps_more():
    runner = Runner(swa(1, 3))
    assert runner.append(0, 4) == [{1}, {1, 2}, {2, 3}, {3, 4}]
    assert runner.append(0, 2) == [{4, 5}, {5, 6}]
    assert runner.cache.positions().tolist() == [2, 3, 4, 5]
    runner.cache.truncate(3)
    assert runner.append(0, 1) == [{3, 7}]


def test_chunks():
    runner = Runner(ChunkedAttention(2, resume_window=16))
    assert runner.append(0, 4) == [{1}, {1, 2}, {3}, {3, 4}]
    assert runner.append(0, 3) == [{5}, {5, 6}, {7}]
    assert runner.append(0, 2) == [{7, 8}, {9}]
    assert runner.cache.seq_len() == 9  # nothing was evicted
    assert all(runner.cache.can_resume(position) for position in range(10))


def test_chunks_over_sequences():
    runner = Runner(ChunkedAttention(3, resume_window=16), max_sequences=2)
    assert runner.forward((0, 0), (0, 1), (1, 0)) == [{1}, {1, 2}, {3}]
    assert runner.forward((1, 1), (0, 2), (0, 3)) == [{3, 4}, {1, 2, 5}, {6}]
    assert runner.forward((1, 2), (1, 3), (0, 4)) == [{3, 4, 7}, {8}, {6, 9}]


def test_except_lifts_the_future_only():
    runner = Runner(FullAttention(), swa(1), ChunkedAttention(2, resume_window=16), max_sequences=2)
    runner.append(0, 2)
    lifted = np.array([True, False, False, True])
    causal, window, chunks = runner.forward((0, 2), (0, 3), (0, 4), (1, 0), non_causal=lifted)
    assert causal == [{1, 2, 3, 4, 5}, {1, 2, 3, 4}, {1, 2, 3, 4, 5}, {6}]
    assert window == [{2, 3, 4, 5}, {3, 4}, {4, 5}, {6}]
    assert chunks == [{3, 4, 5}, {3, 4}, {5}, {6}]
    assert runner.forward((0, 5))[0] == [{1, 2, 3, 4, 5, 7}]  # the next pass is causal again


def test_a_layer_may_read_anothers_rows():
    k, v = random_rows(3)
    with KVCache(2, 2, 8, 16, dtype="f32", share=[None, 0]) as cache, cache.batch(3) as batch:
        outs = [batch.attend(0, k, k, v), batch.attend(1, k)]
        np.testing.assert_array_equal(*outs)


# --- removing ----------------------------------------------------------------------------------------------------


def test_removing_the_end():
    runner = Runner(FullAttention(), max_sequences=2)
    runner.forward((0, 0), (0, 1), (1, 0), (1, 1))
    runner.cache.truncate(1, seq_id=0)
    assert runner.forward((0, 1), (1, 2)) == [{1, 5}, {3, 4, 6}]


def test_removing_the_beginning_and_the_middle_shifts():
    runner = Runner(FullAttention())
    runner.append(0, 6)
    runner.cache.remove(0, 1)
    assert runner.cache.positions().tolist() == [0, 1, 2, 3, 4]
    runner.cache.remove(1, 3)
    assert runner.cache.gather(0)[0][0, :, 0].tolist() == [0, 1, 2]  # the keys moved along
    assert runner.append(0, 2) == [{2, 5, 6, 7}, {2, 5, 6, 7, 8}]


def test_removing_in_a_window():
    runner = Runner(swa(2, 4))
    runner.append(0, 8)
    runner.cache.remove(4, 6)  # what was at 6 and 7 moves to 4 and 5
    assert runner.append(0, 1) == [{7, 8, 9}]
    assert runner.append(0, 1) == [{8, 9, 10}]


def test_removing_in_chunks():
    runner = Runner(ChunkedAttention(4, resume_window=16))
    runner.append(0, 6)
    runner.cache.remove(1, 3)  # the second chunk's tokens move into the first
    assert runner.append(0, 2) == [{7}, {7, 8}]
    runner.cache.truncate(4)
    runner.cache.remove(3, 4)
    assert runner.append(0, 1) == [{1, 4, 5, 9}]


def test_removing_everything_forgets_the_sequence():
    runner = Runner(swa(1))
    runner.append(0, 8)
    runner.cache.truncate(0)
    assert runner.cache.sequences == []
    assert runner.append(0, 2) == [{9}, {9, 10}]


def test_removing_without_a_shift_function():
    runner = Runner(FullAttention(), rope=None)
    runner.append(0, 4)
    with pytest.raises(NotSupportedError):
        runner.cache.remove(1, 2)
    assert runner.append(0, 1) == [{1, 2, 3, 4, 5}]  # nothing has changed
    runner.cache.remove(3, 9)  # no token is above it: nothing has to move
    assert runner.append(0, 1) == [{1, 2, 3, 6}]


def test_a_shift_function_that_fails():
    def fails(layer, keys, delta):
        raise RuntimeError("no")

    runner = Runner(FullAttention(), rope=fails)
    runner.append(0, 4)
    with pytest.raises(RuntimeError, match="no"):
        runner.cache.remove(1, 2)
    assert runner.append(0, 1) == [{1, 2, 3, 4, 5}]


# --- copying -----------------------------------------------------------------------------------------------------


def test_a_copied_prefix():
    runner = Runner(FullAttention(), max_sequences=2)
    runner.append(0, 4)
    runner.cache.copy_prefix(0, 1, 2)
    assert runner.forward((1, 3), (1, 4)) == [{1, 2, 5}, {1, 2, 5, 6}]  # a gap at 2 is nobody's business
    assert runner.append(0, 1) == [{1, 2, 3, 4, 7}]


@pytest.mark.parametrize("changed", [0, 1])
def test_a_copied_prefix_changed_on_either_side(changed):
    runner = Runner(FullAttention(), max_sequences=2)
    runner.append(0, 4)
    runner.cache.copy_prefix(0, 1, 4)
    runner.cache.remove(1, 2, seq_id=changed)  # shared rows may move: the other side keeps its own
    assert runner.cache.gather(0, seq_id=changed)[0][0, :, 0].tolist() == [0, 1, 2]
    assert runner.cache.gather(0, seq_id=1 - changed)[0][0, :, 0].tolist() == [0, 1, 2, 3]
    assert runner.append(changed, 1) == [{1, 3, 4, 5}]
    assert runner.append(1 - changed, 1) == [{1, 2, 3, 4, 6}]


@pytest.mark.parametrize("changed", [0, 1])
def test_a_copied_prefix_removed_on_either_side(changed):
    runner = Runner(FullAttention(), max_sequences=2)
    runner.append(0, 4)
    runner.cache.copy_prefix(0, 1, 3)
    runner.cache.truncate(0, seq_id=changed)
    assert runner.append(1 - changed, 1) == [{1, 2, 3, 4, 5} if changed else {1, 2, 3, 5}]
    assert runner.append(changed, 1) == [{6}]


def test_a_copy_replaces_what_was_there():
    runner = Runner(FullAttention(), max_sequences=2)
    runner.append(0, 3)
    runner.append(1, 5)
    runner.cache.copy_prefix(0, 1, 2)
    assert runner.append(1, 1) == [{1, 2, 9}]
    runner.cache.copy_prefix(7, 1, 2, missing_ok=True)  # nothing is known of 7
    assert runner.append(1, 1) == [{10}]


def test_a_copy_in_a_window_has_what_is_still_there():
    runner = Runner(swa(1, max_sequences=2), max_sequences=2)
    runner.append(0, 4)
    runner.append(0, 1)
    assert runner.cache.positions(seq_id=0).tolist() == [2, 3, 4]
    runner.cache.copy_prefix(0, 1, 4)
    assert runner.cache.positions(seq_id=1).tolist() == [2, 3]
    assert runner.append(1, 1) == [{4, 6}]
    with pytest.raises(RowsGoneError):  # the original attends to less
        runner.cache.truncate(2, seq_id=1)
    runner.cache.truncate(0, seq_id=1)
    assert runner.cache.sequences == [0]
    runner.cache.copy_prefix(0, 1, 4)
    assert not runner.cache.can_resume(3, seq_id=1)
    with pytest.raises(RowsGoneError):
        runner.forward((1, 3))


# --- resuming ----------------------------------------------------------------------------------------------------


def resumable(cache, seq_id=0):
    return [position for position in range(20) if cache.can_resume(position, seq_id=seq_id)]


def test_resuming_without_a_window():
    runner = Runner(FullAttention())
    runner.append(0, 4)
    assert resumable(runner.cache) == [0, 1, 2, 3, 4]


def test_resuming_in_a_window():
    runner = Runner(swa(4))
    runner.append(0, 5)
    assert resumable(runner.cache) == [0, 1, 2, 3, 4, 5]  # nothing has been evicted yet
    runner.append(0, 1)
    assert resumable(runner.cache) == [5, 6]
    with pytest.raises(RowsGoneError):
        runner.forward((0, 4))
    runner.cache.truncate(5)
    assert runner.append(0, 1) == [{2, 3, 4, 5, 7}]


def test_resuming_in_a_window_with_memory():
    runner = Runner(swa(4, 5))
    runner.append(0, 7)
    runner.append(0, 1)
    assert resumable(runner.cache) == [6, 7, 8]
    runner.cache.truncate(6)
    assert runner.append(0, 1) == [{3, 4, 5, 6, 9}]


def test_with_several_sequences_a_window_can_step_back_by_one():
    runner = Runner(swa(4, max_sequences=2), max_sequences=2)
    runner.append(0, 8)
    runner.append(1, 1)  # the batch of another sequence evicts here too
    assert runner.cache.positions(seq_id=0).tolist() == [3, 4, 5, 6, 7]
    assert resumable(runner.cache) == [7, 8]


def test_memory_of_the_whole_capacity_keeps_everything():
    runner = Runner(swa(2, 16))
    for _ in range(8):
        runner.append(0, 2)
    assert resumable(runner.cache) == list(range(17))


def test_resuming_in_mixed_layers_takes_all_of_them():
    runner = Runner(swa(2), FullAttention())
    for _ in range(6):
        runner.append(0, 1)
    assert resumable(runner.cache) == [5, 6]
    with pytest.raises(RowsGoneError):
        runner.cache.truncate(4)
    assert resumable(runner.cache) == [5, 6]
    runner.cache.truncate(5)
    assert runner.append(0, 1) == [[{4, 5, 7}], [{1, 2, 3, 4, 5, 7}]]


# --- a full pool -------------------------------------------------------------------------------------------------


def test_a_full_pool_loses_nothing():
    runner = Runner(FullAttention(), capacity=4)
    runner.append(0, 3)
    with pytest.raises(CacheFullError):
        runner.append(0, 2)
    assert runner.append(0, 1) == [{1, 2, 3, 4}]
    with pytest.raises(CacheFullError):
        runner.append(0, 1)
    runner.cache.remove(1, 3)
    assert runner.append(0, 2) == [{1, 4, 5}, {1, 4, 5, 6}]


def test_one_sequence_may_fill_the_whole_pool():
    runner = Runner(FullAttention(), capacity=None, max_sequences=2, pool=8)
    runner.append(0, 8)
    with pytest.raises(CacheFullError, match="capacity"):
        runner.append(1, 1)
    runner.cache.truncate(7)
    assert runner.append(1, 1) == [{9}]


def test_a_full_window_evicts_nothing_either():
    runner = Runner(swa(2), FullAttention(), capacity=6)
    runner.append(0, 5)
    before = runner.cache.positions(layer=0).tolist()
    with pytest.raises(CacheFullError):
        runner.append(0, 2)
    assert runner.cache.positions(layer=0).tolist() == before
    assert runner.append(0, 1) == [[{4, 5, 6}], [{1, 2, 3, 4, 5, 6}]]


def test_a_prefix_that_is_shared_is_counted_once():
    runner = Runner(FullAttention(), capacity=None, max_sequences=2, pool=5)
    runner.append(0, 4)
    runner.cache.copy_prefix(0, 1, 4)
    assert runner.append(1, 1) == [{1, 2, 3, 4, 5}]
    with pytest.raises(CacheFullError, match="capacity"):
        runner.append(0, 1)


# --- anything, against the description ---------------------------------------------------------------------------


class Described:
    """What the description says of a layer: the (position, name) of each sequence's stored rows, and of all it had.

    A pass drops what a window has left behind as it ends, not as the next one begins.
    """

    def __init__(self, window=NO_LIMIT, memory=NO_LIMIT, chunk=None):
        self.window, self.memory, self.chunk = window, memory, chunk
        self.stored, self.whole = {}, {}

    def next(self, seq):
        return max((p for p, _ in self.stored.get(seq, [])), default=-1) + 1

    def forward(self, tokens, names):
        """What each token sees; None where that is less than it would see of all rows."""
        self.before = copy.deepcopy((self.stored, self.whole))
        for seq, rows in self.stored.items():
            low = min((p for s, p in tokens if s == seq), default=self.next(seq))
            self.stored[seq] = [(p, name) for p, name in rows if p >= low - self.memory]
        for name, (seq, position) in zip(names, tokens, strict=True):
            for table in (self.stored, self.whole):
                table.setdefault(seq, []).append((position, name))
        seen, of_all = ([self._sees(t[s], p) for s, p in tokens] for t in (self.stored, self.whole))
        for seq in {seq for seq, _ in tokens}:
            low = self.next(seq) - 1
            self.stored[seq] = [(p, name) for p, name in self.stored[seq] if p >= low - self.memory]
        return seen if seen == of_all else None

    def _sees(self, rows, position):
        begin = position - position % self.chunk if self.chunk else position - self.window
        return {name for p, name in rows if begin <= p <= position}

    def undo(self):
        self.stored, self.whole = self.before

    def remove(self, seq, begin, end=NO_LIMIT):
        self._edit(seq, seq, lambda p: None if begin <= p < end else p - (end - begin) if p >= end else p)

    def copy_prefix(self, src, dst, length):
        self._edit(src, dst, lambda p: p if p < length else None)

    def _edit(self, src, dst, to):
        for table in (self.stored, self.whole):
            table[dst] = [(to(p), name) for p, name in table.get(src, []) if to(p) is not None]

    def can_resume(self, seq, position):
        first = min((p for p, _ in self.stored[seq]), default=NO_LIMIT)
        return self.memory == NO_LIMIT or max(0, position - self.window) >= first


KINDS = {  # of layers: how the original is made, and the policy here
    "causal": ({}, FullAttention()),
    "swa": ({"window": 3, "memory": 4}, swa(3, max_sequences=3)),
    "swa of one": ({"window": 1, "memory": 2}, swa(1, max_sequences=3)),
    "swa with memory": ({"window": 2, "memory": 6}, swa(2, 6, max_sequences=3)),
    "chunked": ({"chunk": 4}, ChunkedAttention(4, resume_window=64)),
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "kinds", [[kind] for kind in KINDS] + [["swa", "causal"], ["swa with memory", "causal"], ["chunked", "swa of one"]]
)
def test_anything(kinds, seed):
    """Random passes, steps back, removals and copies of three sequences."""
    layers = [Described(**KINDS[kind][0]) for kind in kinds]
    runner = Runner(*(KINDS[kind][1] for kind in kinds), capacity=64, max_sequences=3)
    rng = np.random.default_rng(seed)

    def length(seq):
        return max(layer.next(seq) for layer in layers)

    def everywhere(edit, *arguments):
        for layer in layers:
            getattr(layer, edit)(*arguments)

    def forward(*sequences):
        tokens = [(s, length(s) + i) for s in sequences for i in range(rng.integers(1, 5))]
        rng.shuffle(tokens)
        names = [runner.count + 1 + i for i in range(len(tokens))]
        expected = [layer.forward(tokens, names) for layer in layers]
        if None not in expected:
            assert runner.forward(*tokens) == (expected if len(layers) > 1 else expected[0])
            return
        with pytest.raises(RowsGoneError):  # the original attends to less
            runner.forward(*tokens)
        everywhere("undo")
        for s in sequences:
            everywhere("remove", s, 0)
            runner.cache.truncate(0, seq_id=s)

    def cut(seq, end, edit, *arguments):
        """Drop what stands from `end` on, or share what stands before; refused if a token at `end` would miss rows."""
        if 0 < end < length(seq) and not all(layer.can_resume(seq, end) for layer in layers):
            with pytest.raises(RowsGoneError):
                edit()
        else:
            everywhere(*arguments)
            edit()

    for _ in range(60):
        seq, other = rng.permutation(3)[:2].tolist()
        begin, end = sorted(rng.integers(0, length(seq) + 1, 2).tolist())
        step = rng.choice(["forward", "forward", "both", "back", "remove", "copy"])
        if step in ("forward", "both") and max(length(seq), length(other)) < 40:
            forward(*(seq, other)[: 1 + (step == "both")])
        elif step == "back":
            cut(seq, end, lambda: runner.cache.truncate(end, seq_id=seq), "remove", seq, end)  # noqa: B023
        elif step == "remove":
            kept = begin if end == length(seq) else length(seq)
            cut(seq, kept, lambda: runner.cache.remove(begin, end, seq_id=seq), "remove", seq, begin, end)  # noqa: B023
        elif step == "copy":
            cut(seq, end, lambda: runner.cache.copy_prefix(seq, other, end), "copy_prefix", seq, other, end)  # noqa: B023
        for s in range(3):
            if not length(s):  # nothing of it is stored anywhere: it is forgotten
                for layer in layers:
                    layer.stored.pop(s, None), layer.whole.pop(s, None)
                assert s not in runner.cache.sequences
            else:
                assert runner.cache.next_position(s) == length(s)
                for p in range(length(s) + 1):
                    assert runner.cache.can_resume(p, seq_id=s) == all(layer.can_resume(s, p) for layer in layers)


# --- encoders and wrapped caches ---------------------------------------------------------------------------------


def encoder_cache():
    return KVCache(2, 2, 8, 16, dtype="f32", policy=[CrossAttention(8), FullAttention()], max_sequences=2)


def encoder_pass(cache, image=None, *, seq_id=0):
    """One token of a sequence, with an image or without; what it gets of the image."""
    k, v = random_rows(1)
    with cache.batch(positions=[cache.next_position(seq_id)], seq_ids=[seq_id]) as batch:
        if image is not None:
            batch.put(0, *image, seq_id=seq_id)
        out = batch.attend(0, np.zeros((1, 2, 8), np.float32))
        batch.put(1, k, v)
    return out[0]


def test_an_encoders_rows_stay_until_they_are_replaced():
    images = [list(random_rows(n, seed=n)) for n in (5, 3)]
    with encoder_cache() as cache:
        for image in images:
            np.testing.assert_allclose(encoder_pass(cache, image), image[1].mean(0), atol=1e-6)
            np.testing.assert_allclose(encoder_pass(cache), image[1].mean(0), atol=1e-6)
        assert (cache.seq_len(0, layer=0), cache.seq_len(0)) == (3, 4)
        cache.truncate(1)
        np.testing.assert_allclose(encoder_pass(cache), images[1][1].mean(0), atol=1e-6)
        cache.clear(0)
        with pytest.raises(ValueError, match="put k and v first"):
            encoder_pass(cache)


def test_an_encoders_rows_go_with_an_aborted_batch():
    image = list(random_rows(5))
    with encoder_cache() as cache:
        batch = cache.batch(1)
        batch.put(0, *image, seq_id=0)
        batch.abort()
        assert cache.seq_len(0, layer=0) == 0


def test_wrapped_caches_fail_together():
    runner = Runner(swa(1), FullAttention(), capacity=4)
    runner.append(0, 3)
    with pytest.raises(CacheFullError):  # the second has no room: the first has evicted nothing
        runner.append(0, 2)
    assert resumable(runner.cache) == [2, 3]
    assert runner.append(0, 1) == [[{3, 4}], [{1, 2, 3, 4}]]


# --- the table ---------------------------------------------------------------------------------------------------

MODEL = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "capacity": 16, "max_sequences": 2, "shift": moved}


@pytest.fixture
def cache():
    with KVCache(2, 2, 8, 16, dtype="f32", max_sequences=2, rope=moved) as cache:
        yield cache


@table.row("NewCausalCache(shift)")
def test_new_causal_cache(run):
    with run(**MODEL) as cache:
        store(cache, 16)
        cache.remove(1, 3)
        assert cache.policy == (FullAttention(), FullAttention())
        assert cache.seq_len() == 14


@table.row("NewSWACache(windowSize, shift)")
def test_new_swa_cache(run):
    with run(**MODEL, windowSize=4) as cache:
        assert cache.policy[0] == SlidingWindow(5)


@table.row("NewSWAMemCache(windowSize, memorySize, shift)")
def test_new_swa_mem_cache(run):
    with run(**MODEL, windowSize=4, memorySize=7) as cache:
        assert cache.policy[0] == swa(4, 7)


@table.row("NewChunkedAttentionCache(chunkSize, shift)")
def test_new_chunked_cache(run):
    with run(**MODEL, chunkSize=4) as cache:
        assert cache.policy[0] == ChunkedAttention(4, resume_window=16)
        for _ in range(16):
            store(cache, 1)
        assert cache.seq_len() == 16


@table.row("NewEncoderCache()")
def test_new_encoder_cache(run):
    k, v = random_rows(8)
    with run(**MODEL, max_len=8) as cache, cache.batch(1) as batch:
        for layer in range(2):
            batch.put(layer, k, v)
            assert batch.dense(layer, layout="THD")[0].tobytes() == k.tobytes()


@table.row("NewWrapperCache(swa, causal)")
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_new_wrapper_cache(run, num_layers):
    with run(**MODEL | {"num_layers": num_layers}, swa=swa(3), causal=FullAttention()) as cache:
        assert cache.policy == ((swa(3), FullAttention()) * 3)[:num_layers]


@table.row("Init(backend, dtype, maxSequences, capacity, maxBatch)")
def test_init(run):
    with run(**MODEL, dtype="f16", maxSequences=3) as cache:
        assert (cache.max_seq_len, cache.max_sequences, cache.k_dtype[0]) == (16, 3, "f16")


@table.row("SetConfig(config)")
def test_set_config(run, cache):
    k, v = store(cache, 3)
    with cache.batch(1) as batch:
        for layer in range(2):
            batch.put(layer, *random_rows(1))
        keys, values, mask = run(batch=batch, layer=0)
    np.testing.assert_array_equal(keys[:, :3], k.swapaxes(0, 1))
    np.testing.assert_array_equal(values[:, :3], v.swapaxes(0, 1))
    assert mask.tolist() == [[0, 0, 0, 0]]


@table.row("Close()")
def test_close(run, cache):
    run(cache=cache)
    with pytest.raises(ValueError, match="closed"):
        cache.seq_len()


@table.row("StartForward(ctx, batch, false)")
def test_start_forward(run, cache):
    with run(cache=cache, positions=[0, 1, 0], seqs=[4, 4, 5]) as batch:
        for layer in range(2):
            batch.put(layer, *random_rows(3))
    assert (cache.seq_len(4), cache.seq_len(5)) == (2, 1)


@table.row("StartForward(ctx, batch, true)")
def test_start_forward_to_reserve(run, cache):
    before = cache.nbytes
    run(cache=cache, num_tokens=16)
    assert cache.nbytes > before
    assert cache.sequences == []
    blocks = cache.stats()["blocks_opened"]
    store(cache, 16)
    assert cache.stats()["blocks_opened"] == blocks


@table.row("SetLayer(layer)")
def test_set_layer(run, cache):
    rows = [list(random_rows(1, seed=layer)) for layer in range(2)]
    with cache.batch(1) as batch:
        for layer, (k, v) in enumerate(rows):
            run(batch=batch, layer=layer, k=k, v=v)
    assert [cache.keys(layer).ravel().tolist() for layer in range(2)] == [k.ravel().tolist() for k, _ in rows]


@table.row("Put(ctx, key, value)")
def test_put(run, cache):
    k, v = random_rows(3)
    with cache.batch(3) as batch:
        for layer in range(2):
            run(batch=batch, layer=layer, k=k, v=v)
    np.testing.assert_array_equal(cache.values(1), v.swapaxes(0, 1))


@table.row("Get(ctx)")
def test_get(run, cache):
    k, v = random_rows(3)
    with cache.batch(positions=[2, 0, 1], seq_ids=[0, 0, 0]) as batch:
        for layer in range(2):
            batch.put(layer, k, v)
        keys, values, mask = run(batch=batch, layer=1)
    np.testing.assert_array_equal(keys, k[[1, 2, 0]].astype(np.float16))
    np.testing.assert_array_equal(values, v[[1, 2, 0]].astype(np.float16))
    assert (mask == 0).tolist() == [[True, True, True], [True, False, False], [True, True, False]]


@table.row("SetCausal(ctx, CausalOptions{Except: indices})")
def test_set_causal(run, cache):
    with cache.batch(3) as batch:
        for layer in range(2):
            batch.put(layer, *random_rows(3))
        _, _, mask = run(batch=batch, layer=0, indices=[0])
    assert (mask == 0).tolist() == [[True, True, True], [True, True, False], [True, True, True]]


@table.row("CopyPrefix(srcSeq, dstSeq, len)")
def test_copy_prefix(run, cache):
    k, _ = store(cache, 5)
    run(cache=cache, srcSeq=0, dstSeq=1, len=3)
    np.testing.assert_array_equal(cache.gather(0, seq_id=1)[0], k[:3].swapaxes(0, 1))
    with pytest.raises(ValueError, match="must differ"):
        run(cache=cache, srcSeq=0, dstSeq=0, len=3)
    assert cache.seq_len(0) == 5


@table.row("CanResume(seq, pos)")
def test_can_resume(run, cache):
    store(cache, 5)
    assert [run(cache=cache, seq=0, pos=position) for position in (0, 5, 6)] == [True, True, False]
    assert [run(cache=cache, seq=7, pos=position) for position in (0, 1)] == [True, False]


@table.row("Remove(seq, beginIndex, endIndex)")
def test_remove(run, cache):
    k, v = store(cache, 5)
    run(cache=cache, seq=0, beginIndex=1, endIndex=3)
    kept = v[[0, 3, 4]].swapaxes(0, 1)
    np.testing.assert_array_equal(cache.gather(0)[1], kept)
    np.testing.assert_allclose(
        cache.gather(0)[0], k[[0, 3, 4]].swapaxes(0, 1) + np.float32([0, -2, -2])[:, None], atol=1e-6
    )
    run(cache=cache, seq=7, beginIndex=1, endIndex=3)  # unknown


@table.row("Remove(seq, beginIndex, math.MaxInt32)")
def test_remove_the_rest(run, cache):
    store(cache, 5)
    run(cache=cache, seq=0, beginIndex=2)
    assert cache.positions().tolist() == [0, 1]


@table.row("EncoderCache.Put(ctx, key, value)")
def test_encoder_put(run):
    k, v = random_rows(5)
    with encoder_cache() as cache:
        with cache.batch(positions=[0], seq_ids=[1]) as batch:
            run(batch=batch, layer=0, k=k, v=v, seq=1)
            batch.put(1, *random_rows(1))
        np.testing.assert_array_equal(cache.gather(0, seq_id=1)[0], k.swapaxes(0, 1))


@pytest.mark.parametrize(
    "shape", [(6, 2, 8), (3, 2, 2, 8), (1, 6, 2, 8), (1, 3, 2, 2, 8), (1, 1, 3, 2, 2, 8), (6, 16), (2, 8), (2, 16)]
)
def test_encoder_rows_come_back_bit_for_bit(shape):
    k, v = (rows.reshape(shape) for rows in random_rows(math.prod(shape) // 16))
    k.flat[:4] = np.inf, -0.0, 1e-45, np.nan
    with encoder_cache() as cache, cache.batch(1) as batch:
        batch.put(0, k, v)
        batch.put(1, *random_rows(1))
        for found, put in zip(batch.dense(0, layout="THD"), (k, v), strict=False):
            assert found.tobytes() == put.tobytes()
        both = np.concatenate([v, k], axis=-1)[..., ::-1, :]  # of any strides
        batch.put(0, both[..., shape[-1] :], both[..., : shape[-1]])
        keys, values, _ = batch.dense(0, layout="THD")
        assert keys.tobytes() == k[..., ::-1, :].tobytes()
        assert values.tobytes() == v[..., ::-1, :].tobytes()


@pytest.mark.parametrize("take", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(6, 16), (3, 2, 2, 8), (1, 3, 2, 2, 8)])
def test_encoder_rows_of_tensors(shape, take):
    torch = pytest.importorskip("torch")
    k = torch.arange(6 * 16).reshape(6, 2, 8).to(getattr(torch, take)).transpose(0, 1).contiguous().transpose(0, 1)
    with encoder_cache() as cache, cache.batch(1) as batch:
        batch.put(0, k.reshape(shape), k.reshape(shape))
        batch.put(1, *random_rows(1))
        np.testing.assert_array_equal(batch.dense(0, layout="THD")[0], k.float())


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3, 2, 8), (6, 2, 8)),
        ((2, 3, 2, 8), (3, 2, 2, 8)),
        ((6, 16), (6, 2, 8)),
        *((shape, shape) for shape in [(2, 3, 4, 8), (16,), (6, 17), (4, 8), (1, 1, 6, 2, 9), (2, 0, 2, 8)]),
    ],
)
def test_encoder_rows_of_shapes_that_do_not_match(shapes):
    with encoder_cache() as cache, cache.batch(1) as batch:
        with pytest.raises(ValueError, match=r"k|v"):
            batch.put(0, *(np.zeros(shape, np.float32) for shape in shapes))
        with pytest.raises((TypeError, ValueError), match=r"[kv]: an array|k and v"):
            batch.put(0, np.zeros(shapes[0], np.float32), [[1.0]])
        with pytest.raises(ValueError, match=r"axes"):  # of tokens
            batch.put(1, *(np.zeros((1, 1, 2, 8), np.float32) for _ in range(2)))
        batch.abort()


@table.row("EncoderCache.Get(ctx)")
def test_encoder_get(run):
    image = list(random_rows(5))
    with encoder_cache() as cache:
        encoder_pass(cache, image)
        with cache.batch(2) as batch:
            out = run(batch=batch, layer=0, q=np.zeros((2, 2, 8), np.float32))
            batch.put(1, *random_rows(2))
    np.testing.assert_allclose(out, np.stack([image[1].mean(0)] * 2), atol=1e-6)


@table.row("EncoderCache.EncoderCached()")
def test_encoder_cached(run):
    with encoder_cache() as cache:
        assert not run(cache=cache, seq=0, layer=0)
        encoder_pass(cache, list(random_rows(5)))
        assert run(cache=cache, seq=0, layer=0)


@table.row("EncoderCache.Remove(seq, beginIndex, endIndex)")
def test_encoder_remove(run):
    with encoder_cache() as cache:
        encoder_pass(cache, list(random_rows(5)))
        assert cache.seq_len(0, layer=0) == 5
        run(cache=cache, seq=0)
        assert cache.seq_len(0, layer=0) == 0


@table.row("EncoderCache.CopyPrefix(srcSeq, dstSeq, len)")
def test_encoder_copy_prefix(run):
    image = list(random_rows(5))
    with encoder_cache() as cache:
        encoder_pass(cache, image)
        run(cache=cache, srcSeq=0, dstSeq=1, len=1)
        cache.clear(0)
        np.testing.assert_allclose(encoder_pass(cache, seq_id=1), image[1].mean(0), atol=1e-6)


@table.row("EncoderCache.CanResume(seq, pos)")
def test_encoder_can_resume(run):
    with encoder_cache() as cache:
        for _ in range(3):
            encoder_pass(cache, list(random_rows(5)))
        assert all(run(cache=cache, seq=0, pos=position) for position in range(4))


@table.row("WrapperCache.SetLayerType(layerType)")
def test_set_layer_type(run):
    with KVCache(2, 2, 8, 16, dtype="f32", policy=[SlidingWindow(2), FullAttention()]) as cache:
        for _ in range(4):
            with cache.batch(1) as batch:
                for layer in range(2):
                    k, v = random_rows(1)
                    run(batch=batch, layer=layer, k=k, v=v)
        assert [cache.seq_len(layer=layer) for layer in range(2)] == [2, 4]


@table.row("WrapperCache.UnderlyingCache()")
def test_underlying_cache(run):
    with KVCache(2, 2, 8, 16, policy=[SlidingWindow(2), FullAttention()]) as cache:
        assert run(cache=cache, layer=1) == FullAttention()


@table.row("ErrKvCacheFull")
def test_err_full(run, cache):
    with pytest.raises(run()):
        cache.batch(17)


@table.row("ErrNotSupported")
def test_err_not_supported(run):
    with KVCache(2, 2, 8, 16) as cache:
        store(cache, 3)
        with pytest.raises(run()):
            cache.remove(0, 1)
        with pytest.raises(NotImplementedError):
            cache.remove(0, 1)
