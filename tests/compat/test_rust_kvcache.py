"""kvcache.compat.rust_kvcache: what KvCache and PagedKvCache promise, sentence by sentence."""

import numpy as np
import pytest
from support.coming_from import random_rows

from kvcache import CacheFullError
from kvcache.compat.rust_kvcache import KvCache, PagedKvCache


def store(cache, pos, k, v, layers=None):
    """Store one token, [heads, dim], head by head."""
    for layer in range(cache.num_layers()) if layers is None else layers:
        for head in range(cache.num_kv_heads()):
            cache.store_key(layer, head, pos, k[head])
            cache.store_value(layer, head, pos, v[head])


def fill(cache, tokens, seed=0):
    k, v = random_rows(tokens, seed=seed)
    for i in range(tokens):
        store(cache, cache.seq_len(), k[i], v[i])
        cache.advance()
    return k, v


@pytest.fixture(params=[KvCache, PagedKvCache, lambda *shape: PagedKvCache.with_page_size(*shape, 4)])
def cache(request):
    return request.param(2, 2, 8, 16)


# --- storing and reading -----------------------------------------------------------------------------------------


def test_a_new_cache(cache):
    assert (cache.num_layers(), cache.num_kv_heads(), cache.head_dim()) == (2, 2, 8)
    assert (cache.seq_len(), cache.max_seq_len(), cache.utilization_ratio()) == (0, 16, 0)


def test_what_is_stored_is_read_before_the_token_is_advanced(cache):
    k, v = fill(cache, 3)
    now_k, now_v = random_rows(1, seed=1)
    store(cache, 3, now_k[0], now_v[0], layers=[1])
    assert cache.seq_len() == 3
    for head in range(2):
        np.testing.assert_array_equal(cache.keys_for(1, head, 4), [*k[:, head], now_k[0, head]])
        np.testing.assert_array_equal(cache.values_for(1, head, 4), [*v[:, head], now_v[0, head]])
        np.testing.assert_array_equal(cache.keys_for(0, head, 4), [*k[:, head], np.zeros(8)])  # not stored there


def test_rows_of_a_head_are_one_contiguous_view():
    cache = KvCache(2, 2, 8, 16)
    fill(cache, 5)
    for keys in (cache.keys_for(1, 1, 5), cache.values_for(0, 0, 4)):
        assert keys.flags.c_contiguous
        assert not keys.flags.owndata
        assert not keys.flags.writeable
    store(cache, 5, *np.ones((2, 2, 8)))
    running = cache.keys_for(1, 1, 6)
    assert running.flags.c_contiguous
    assert np.shares_memory(running, cache.keys_for(1, 1, 5))


@pytest.mark.parametrize("stored", [0, 1, 3])
def test_what_is_shown_is_read_only(stored):
    cache = KvCache(1, 2, 8, 16)
    fill(cache, stored)
    cache.store_key(0, 0, stored, np.ones(8))
    for length in (0, 1, 4, 16):
        assert not cache.keys_for(0, 1, length).flags.writeable
        assert not cache.values_for(0, 1, length).flags.writeable


@pytest.mark.parametrize(
    ("layer", "head", "pos", "size"),
    [(2, 0, 0, 8), (-1, 0, 0, 8), (0, 2, 0, 8), (0, 0, 16, 8), (0, 0, -1, 8), (0, 0, 0, 7)],
)
def test_what_is_out_of_range_is_refused_and_stored_nowhere(cache, layer, head, pos, size):
    for put in (cache.store_key, cache.store_value):
        with pytest.raises((IndexError, ValueError), match=r"(layer|head|pos)=|(key|value): "):
            put(layer, head, pos, np.ones(size))
    assert not any(cache.keys_for(i, j, 16).any() for i in range(2) for j in range(2))
    assert cache.seq_len() == 0


# --- the length --------------------------------------------------------------------------------------------------


def test_advancing_goes_on_by_one_token(cache):
    for length in range(1, 17):
        cache.advance()  # of zeros, if nothing was stored
        assert cache.seq_len() == length
    with pytest.raises(CacheFullError):
        cache.advance()
    assert cache.seq_len() == 16


def test_utilization():
    cache = KvCache(1, 1, 4, 10)
    for _ in range(3):
        cache.advance()
    assert cache.utilization_ratio() == pytest.approx(0.3)


def test_set_seq_len_is_clamped(cache):
    cache.set_seq_len(4)
    assert cache.seq_len() == 4
    cache.set_seq_len(100)
    assert cache.seq_len() == 16


# --- blocks ------------------------------------------------------------------------------------------------------


def test_a_block_past_the_end_reads_as_zeros_and_is_left_out_on_the_way_in(cache):
    k, v = fill(cache, 16)
    for block, rows in zip(cache.extract_block(0, 14, 4), (k, v), strict=True):
        np.testing.assert_array_equal(block.reshape(2, 4, 8)[:, :2], rows[14:].swapaxes(0, 1))
        assert not block.reshape(2, 4, 8)[:, 2:].any()
    cache.inject_block(1, 14, 4, *np.ones((2, 2 * 4 * 8)))
    np.testing.assert_array_equal(cache.keys_for(1, 0, 16), [*k[:14, 0], *np.ones((2, 8))])
    cache.inject_block(1, 20, 4, *np.ones((2, 2 * 4 * 8)))
    np.testing.assert_array_equal(cache.values_for(0, 1, 16), v[:, 1])
    assert not any(x.any() for x in cache.extract_block(0, 20, 4))


def test_a_block_may_be_named_by_small_integers():
    """250 + 10 is no uint8."""
    cache = KvCache(1, 2, 8, 300)
    k, v = fill(cache, 260)
    begin, size = np.uint8([250, 10])
    cache.inject_block(0, begin, size, *(2 * rows[250:].swapaxes(0, 1) for rows in (k, v)))
    for block, rows in zip(cache.extract_block(0, begin, size), (k, v), strict=True):
        np.testing.assert_array_equal(block, 2 * rows[250:].swapaxes(0, 1).ravel())


def test_a_block_includes_the_running_token(cache):
    k, _ = fill(cache, 2)
    store(cache, 2, k[0], k[1])
    np.testing.assert_array_equal(
        cache.extract_block(0, 0, 4)[0].reshape(2, 4, 8)[:, :3], np.stack([*k, k[0]]).swapaxes(0, 1)
    )


def test_a_block_of_another_size_is_refused(cache):
    with pytest.raises(ValueError, match=r"values: an array of shape .63,., of 63 numbers, where 64 are needed"):
        cache.inject_block(0, 0, 4, np.ones(64), np.ones(63))
    with pytest.raises(IndexError):
        cache.inject_block(2, 0, 4, *np.ones((2, 64)))
    for call in (cache.extract_block, lambda *place: cache.inject_block(*place, *np.ones((2, 64)))):
        for start_pos, block_size in ((-1, 4), (0, -1), (0, 0)):
            with pytest.raises(ValueError, match=rf"(start_pos=-1|block_size={block_size}): must be at least"):
                call(0, start_pos, block_size)
    assert cache.cache.seq_len() == 0


def test_what_cannot_be_read_or_be_a_length(cache):
    fill(cache, 3)
    with pytest.raises(ValueError, match="n=-1"):
        cache.set_seq_len(-1)
    assert cache.seq_len() == 3
    for layer, head, seq_len, error in ((2, 0, 1, IndexError), (0, -1, 1, IndexError), (0, 0, -1, ValueError)):
        with pytest.raises(error, match=r"=(-1|2): "):
            cache.values_for(layer, head, seq_len)


# --- anything, against arrays ------------------------------------------------------------------------------------


class Arrays:
    """What the original is: arrays of zeros, and a length."""

    def __init__(self):
        self.rows = np.zeros((2, 2, 2, 16, 8), np.float32)  # [keys or values, layer, head, position, element]
        self.length = 0

    def set_seq_len(self, n):
        self.rows[:, :, :, n:] = 0  # the original shows what stood there
        self.length = min(n, 16)

    def inject(self, layer, start, block):
        fit = max(min(4, 16 - start), 0)
        self.rows[:, layer, :, start : start + fit] = block[:, :, :fit]


@pytest.mark.parametrize("seed", range(20))
def test_anything(cache, seed):
    rng, arrays = np.random.default_rng(seed), Arrays()
    for _ in range(80):
        step = rng.choice(
            ["store", "store", "store", "advance", "set", "inject", "clear"], p=[0.2] * 4 + [0.08, 0.1, 0.02]
        )
        layer, head, pos, which = (int(rng.integers(n)) for n in (2, 2, 16, 2))
        if step == "store":
            pos = min(pos, arrays.length + 2)
            arrays.rows[which, layer, head, pos] = row = rng.standard_normal(8)
            (cache.store_key, cache.store_value)[which](layer, head, pos, row)
        elif step == "advance" and arrays.length < 16:
            arrays.length += 1
            cache.advance()
        elif step == "set":
            arrays.set_seq_len(pos)
            cache.set_seq_len(pos)
        elif step == "inject":
            block = rng.standard_normal((2, 2, 4, 8), np.float32)
            arrays.inject(layer, pos, block)
            cache.inject_block(layer, pos, 4, *(x.ravel() for x in block))
        elif step == "clear":
            arrays.set_seq_len(0)
            cache.clear()
        assert cache.seq_len() == arrays.length
        for i in range(2):
            for j in range(2):
                np.testing.assert_array_equal(cache.keys_for(i, j, 16), arrays.rows[0, i, j])
                np.testing.assert_array_equal(cache.values_for(i, j, 16), arrays.rows[1, i, j])
            np.testing.assert_array_equal(
                np.reshape(cache.extract_block(i, pos, 4), (2, 2, 4, 8))[:, :, : 16 - pos],
                arrays.rows[:, i, :, pos : pos + 4],
            )
        cache.cache.validate()


# --- memory ------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_max_seq_len():
    rows = 36 * 8 * 4096 * 128 * 4 * 2
    assert rows <= KvCache(36, 8, 128, 4096).memory_bytes() < rows * 1.01  # cache lines between the heads
    assert KvCache(36, 8, 128, 4096, dtype="f16").memory_bytes() < rows * 0.51


def test_f16_rows_read_as_they_were_rounded():
    cache = KvCache(1, 1, 4, 8, dtype="f16")
    cache.store_key(0, 0, 0, np.array([1, 2.5, 1 / 3, -4]))
    assert cache.keys_for(0, 0, 1).tolist() == [np.array([1, 2.5, 1 / 3, -4], np.float16).tolist()]


def test_pages_are_taken_as_they_are_needed():
    cache = PagedKvCache.with_page_size(1, 1, 4, 1024, 4)
    assert (cache.page_size(), cache.total_pages()) == (4, 0)
    for tokens, pages in ((1, 1), (4, 1), (5, 2), (9, 3)):
        while cache.seq_len() < tokens:
            cache.store_key(0, 0, cache.seq_len(), np.ones(4))
            cache.advance()
        assert cache.total_pages() == pages
        assert cache.utilization_ratio() == tokens / (4 * pages)
    taken = cache.memory_usage_bytes()
    cache.clear()
    assert (cache.total_pages(), cache.seq_len()) == (0, 0)
    assert cache.memory_usage_bytes() < taken


@pytest.mark.parametrize(("page_size", "error"), [(0, ValueError), (-1, ValueError), (None, TypeError)])
def test_a_wrong_page_size_is_named(page_size, error):
    with pytest.raises(error, match=f"^page_size={page_size}: "):
        PagedKvCache.with_page_size(1, 1, 4, 8, page_size)


def test_rows_of_pages_are_copies():
    cache = PagedKvCache(1, 1, 4, 1024)
    cache.store_key(0, 0, 0, np.ones(4))
    keys = cache.keys_for(0, 0, 1)
    cache.clear()  # frees the pages, and would raise while there are views
    assert keys.tolist() == [[1, 1, 1, 1]]


def test_a_length_that_is_no_integer_changes_nothing(cache):
    cache.set_seq_len(3)
    for n in (1.5, "1"):
        with pytest.raises(TypeError, match=f"n={n!r}: an integer is needed"):
            cache.set_seq_len(n)
        assert cache.seq_len() == 3
    for number in ("3", 1.5, None, True):
        for read in (cache.keys_for, cache.values_for):
            with pytest.raises(TypeError, match=r"seq_len=.*: an integer is needed"):
                read(0, 0, number)
        for place in ((number, 2), (0, number)):
            with pytest.raises(TypeError, match=r"(start_pos|block_size)=.*: an integer is needed"):
                cache.extract_block(0, *place)
    for arguments in (("0", 0, 0), (0, 0.5, 0), (0, 0, None)):
        with pytest.raises(TypeError, match=r"(layer|head|pos)=.*: an integer is needed"):
            cache.store_key(*arguments, np.ones(cache.head_dim()))
    assert cache.cache.seq_len() == 3


def test_types_are_those_of_the_original():
    with pytest.raises(ValueError, match="dtype='q8_0': must be 'f32' or 'f16'"):
        KvCache(1, 1, 32, 8, dtype="q8_0")
    with pytest.raises(TypeError, match="max_seq_len=None: an integer is needed"):
        KvCache(1, 1, 32, None)


def test_a_repr_says_how_full_it_is(cache):
    fill(cache, 3)
    assert repr(cache) == f"<rust_kvcache.{type(cache).__name__}: 3 of {cache.max_seq_len()} tokens>"
