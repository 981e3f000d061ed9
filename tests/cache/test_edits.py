"""Each call that edits sequences reaches the core with its own arguments: what sequences hold after it, row by row.

tests/world holds what edits mean.
"""

import copy

import numpy as np
import pytest

import kvcache

HEADS, K_DIM, V_DIM = 2, 3, 2
LENGTHS = {0: 8, 3: 5, -7: 3}  # of the sequences that there are


def numbers(seq_id, positions, layer):
    """Return the numbers in the keys of a sequence: no two rows are alike."""
    return [1000 * layer + 100 * abs(seq_id) + position for position in positions]


def rows(told):
    """Keys that say so, and values that say the opposite."""
    k, v = (np.repeat(np.array(told, np.float32), HEADS * dim).reshape(-1, HEADS, dim) for dim in (K_DIM, V_DIM))
    return k, -v


def begin(cache, tokens, **options):
    """Begin a batch of tokens, each a sequence and a position, and put their rows."""
    seq_ids, positions = zip(*tokens, strict=True)
    batch = cache.batch(positions=positions, seq_ids=seq_ids, **options)
    for layer in range(2):
        batch.put(layer, *rows([numbers(seq_id, [at], layer)[0] for seq_id, at in tokens]))
    return batch


def filled():
    cache = kvcache.KVCache(
        2, HEADS, K_DIM, None, v_head_dim=V_DIM, dtype="f32", rope=False, max_sequences=None, block_size=4
    )
    begin(cache, [(seq_id, at) for seq_id, length in LENGTHS.items() for at in range(length)]).commit()
    return cache


def held(cache):
    """Return positions and numbers by sequence and layer; check that all ways to read rows agree."""
    found = {}
    for seq_id in cache.sequences:
        at = cache.positions(seq_id=seq_id).tolist()
        assert (cache.seq_len(seq_id), cache.next_position(seq_id)) == (len(at), max(at) + 1)
        assert (cache.first_position(seq_id), cache.last_position(seq_id)) == (min(at), max(at))
        for layer in range(2):
            gathered = cache.gather(layer, seq_id=seq_id)
            told = gathered[0][0, :, 0].tolist()
            shown = cache.keys(layer, seq_id=seq_id), cache.values(layer, seq_id=seq_id)
            spans = cache.spans(layer, seq_id=seq_id)
            for i, x in enumerate(rows(told)):
                right = np.swapaxes(x, 0, 1)
                for given in (gathered[i], shown[i], np.concatenate([(span.k, span.v)[i] for span in spans], 1)):
                    np.testing.assert_array_equal(given, right)
                for n, position in enumerate(at):
                    np.testing.assert_array_equal(cache.get(layer, position, seq_id=seq_id)[i], right[:, n])
                    one = cache.extract(layer, position, position + 1, seq_id=seq_id)
                    np.testing.assert_array_equal(one[i][:, 0], right[:, n])
            found[seq_id, layer] = at, told
    cache.validate()
    return found


def expected(changed, gone=()):
    """Return what `held` should: `changed` names new positions of a sequence, whose rows these were, and where."""
    of = {s: ([*range(length)], s, [*range(length)]) for s, length in LENGTHS.items() if s not in gone} | changed
    return {(s, layer): (at, numbers(src, was, layer)) for s, (at, src, was) in of.items() for layer in range(2)}


def gap_divided(cache):
    cache.remove(1, 6, shift=False)
    cache.divide(3, 7, 2)


EDITS = {
    "fork": (lambda c: c.fork(3, -7), {-7: ([*range(5)], 3, [*range(5)])}, []),
    "copy_prefix": (lambda c: c.copy_prefix(0, 9, 2), {9: ([0, 1], 0, [0, 1])}, []),
    "share_range": (lambda c: c.share_range(0, 9, 2, 5), {9: ([2, 3, 4], 0, [2, 3, 4])}, []),
    "share_range to the end": (lambda c: c.share_range(0, 9, 6), {9: ([6, 7], 0, [6, 7])}, []),
    "keep": (lambda c: c.keep(3), {}, [0, -7]),
    "clear": (lambda c: c.clear(-7), {}, [-7]),
    "clear all": (lambda c: c.clear(), {}, [0, 3, -7]),
    "truncate": (lambda c: c.truncate(2, seq_id=3), {3: ([0, 1], 3, [0, 1])}, []),
    "remove": (lambda c: c.remove(2, 5), {0: ([0, 1, 2, 3, 4], 0, [0, 1, 5, 6, 7])}, []),
    "remove without a shift": (lambda c: c.remove(1, 3, seq_id=3, shift=False), {3: ([0, 3, 4], 3, [0, 3, 4])}, []),
    "keep_positions": (lambda c: c.keep_positions([7, 0, 3, 7]), {0: ([0, 3, 7], 0, [0, 3, 7])}, []),
    "keep_positions, none": (lambda c: c.keep_positions([], seq_id=3), {}, [3]),
    "shift": (lambda c: c.shift(3, 6, 10), {0: ([0, 1, 2, 13, 14, 15, 6, 7], 0, [*range(8)])}, []),
    "shift to the end": (lambda c: c.shift(1, None, 2, seq_id=3), {3: ([0, 3, 4, 5, 6], 3, [*range(5)])}, []),
    "divide": (gap_divided, {0: ([0, 3, 7], 0, [0, 6, 7])}, []),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits(name):
    edit, changed, gone = EDITS[name]
    cache = filled()
    before, other = held(cache), copy.copy(cache)
    with begin(cache, list(LENGTHS.items())) as batch:
        with pytest.raises(kvcache.CacheBusyError):
            edit(cache)
        batch.abort()
    assert held(cache) == before
    edit(cache)
    assert held(cache) == expected(changed, gone)
    assert held(other) == before


def test_inject():
    cache = filled()
    before, new = held(cache), [np.swapaxes(x, 0, 1) for x in rows([7, 8, 9])]
    assert cache.inject(1, 1, *new, seq_id=3) == 3
    injected = before | {(3, 1): ([*range(5)], [1300, 7, 8, 9, 1304])}
    assert held(cache) == injected
    with pytest.raises(IndexError, match=r"nothing at 2 of 3 positions in layer 1: 5 to 6; .* skip_missing"):
        cache.inject(1, 4, *new, seq_id=3)
    assert held(cache) == injected
    assert cache.inject(1, 4, *new, seq_id=3, skip_missing=True) == 1
    assert held(cache) == before | {(3, 1): ([*range(5)], [1300, 7, 8, 9, 7])}


def test_trees():
    """A token sees the guess that it continues, and no other. Kept tokens stay."""
    cache = filled()
    with begin(cache, [(3, 5), (3, 5), (3, 6), (0, 8)], parents=[-1, -1, 1, -1]) as batch:
        *_, mask = batch.dense(0)
        assert (mask == 0).sum(1).tolist() == [6, 6, 7, 9]
        batch.commit([3, 1, 2])
    assert held(cache) == expected({3: ([*range(7)], 3, [*range(7)]), 0: ([*range(9)], 0, [*range(9)])})
    counted = {"batches": 2, "aborted": 0, "tokens": 19, "live_slots": 19}
    assert {name: cache.stats()[name] for name in counted} == counted


def test_upkeep():
    """`reserve` takes memory, and a view hinders calls that move rows."""
    cache = filled()
    cache.reserve(100, seq_id=3)
    taken = sum(block.num_slots for block in cache.blocks())
    assert taken >= 112
    assert [cache.can_resume(position, seq_id=3) for position in (5, 6)] == [True, False]
    before, view = held(cache), cache.keys(0, seq_id=-7, copy=False)
    with pytest.raises(BufferError):
        cache.compact()
    del view
    cache.compact()
    assert held(cache) == before
    assert sum(block.num_slots for block in cache.blocks()) < taken
