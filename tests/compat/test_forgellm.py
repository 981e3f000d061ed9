"""kvcache.compat.forgellm: what forgellm_runtime's cache promises, its unit tests first."""

import numpy as np
import pytest

from kvcache import CacheBusyError
from kvcache.compat.forgellm import KVCache


def rows(tokens, seed=0):
    return np.random.default_rng(seed).standard_normal((2, tokens * 64), np.float32)


def append_everywhere(cache, k, v):
    for layer in range(cache.num_layers()):
        cache.append(layer, k, v)
    cache.advance()


# --- its unit tests ----------------------------------------------------------------------------------------------


def test_with_capacity():
    cache = KVCache.with_capacity(16, 8, 64, 2048)
    assert cache.is_empty()
    assert cache.num_layers() == 16
    assert cache.entry_size() == 512


# --- and what else it promises -----------------------------------------------------------------------------------


def test_what_was_appended_is_read_before_the_token_is_advanced():
    cache = KVCache(2, 4, 16)
    before, now = rows(3), rows(1, seed=1)
    append_everywhere(cache, *before)
    cache.append(0, *now)
    assert cache.k(0).tolist() == [*before[0], *now[0]]
    assert cache.v(0).tolist() == [*before[1], *now[1]]
    assert cache.k(1).tolist() == before[0].tolist()  # layers stay independent
    assert cache.len() == 3


@pytest.mark.parametrize("heads", [1, 2])
def test_what_was_read_is_a_copy(heads):
    cache = KVCache(1, heads, 8)
    data = np.ones(heads * 8)
    cache.append(0, data, data)
    running = cache.k(0)
    cache.advance()
    found = running, cache.k(0), cache.v(0)
    cache.cache.close()  # would raise while there are views
    assert all(x.tolist() == data.tolist() for x in found)


def test_capacity_is_taken_at_once_and_is_no_limit():
    with KVCache.with_capacity(2, 4, 16, 256).cache as cache:
        assert cache.nbytes >= 256 * 2 * 64 * 2 * 4
    cache = KVCache.with_capacity(2, 4, 16, 4)
    append_everywhere(cache, *rows(100))
    assert cache.len() == 100


def test_capacity_lets_no_step_wait_for_memory():
    cache = KVCache.with_capacity(2, 4, 16, 256)
    blocks = cache.cache.stats()["blocks_opened"]
    for _ in range(256):
        append_everywhere(cache, *rows(1))
    assert cache.cache.stats()["blocks_opened"] == blocks


def test_a_clone_is_independent():
    cache = KVCache(2, 4, 16)
    append_everywhere(cache, *rows(3))
    clone = cache.clone()
    append_everywhere(cache, *rows(1, seed=1))
    append_everywhere(clone, *rows(2, seed=2))
    assert (cache.len(), clone.len()) == (4, 5)
    assert clone.k(1).tolist() == [*rows(3)[0], *rows(2, seed=2)[0]]
    cache.append(0, *rows(1))
    with pytest.raises(CacheBusyError):
        cache.clone()


def test_a_layer_that_was_left_out_is_named():
    cache = KVCache(2, 4, 16)
    with pytest.raises(ValueError, match="nothing was appended"):
        cache.advance()
    cache.append(1, *rows(1))
    with pytest.raises(ValueError, match="layer 0"):
        cache.advance()
    with pytest.raises(ValueError, match=r"layer 1 has its rows .*; layers \[0\] have none"):
        cache.append(1, *rows(1))
    cache.append(0, *rows(1))
    with pytest.raises(ValueError, match="advance first"):
        cache.append(1, *rows(1))
    cache.advance()
    assert cache.len() == 1


@pytest.mark.parametrize(("layer", "numbers"), [(2, 64), (-1, 64), (0, 63), (0, 0)])
def test_what_does_not_fit_changes_nothing(layer, numbers):
    cache = KVCache(2, 4, 16)
    with pytest.raises((IndexError, ValueError), match=r"layer=|k_data: "):
        cache.append(layer, np.zeros(numbers, np.float32), np.zeros(numbers, np.float32))
    append_everywhere(cache, *rows(5))
    assert cache.len() == 5


def test_clearing_forgets_the_running_token():
    cache = KVCache(2, 4, 16)
    cache.append(0, *rows(1))
    cache.clear()
    append_everywhere(cache, *rows(2))
    assert cache.len() == 2


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_layers_are_given_as_many_tokens(first, second):
    cache = KVCache(2, 4, 16)
    cache.append(0, *rows(first))
    with pytest.raises(ValueError, match=f"layer 1: rows of {second} tokens, where the layers before have {first}"):
        cache.append(1, *rows(second))
    k, v = rows(first, seed=1)
    cache.append(1, k, v)  # the failed call has put nothing
    cache.advance()
    assert cache.len() == first
    assert cache.k(1).tolist() == k.tolist()


def test_a_wrong_capacity_is_named():
    assert KVCache.with_capacity(1, 2, 8, 0).len() == 0  # a hint, as there
    with pytest.raises(ValueError, match="max_seq_len=-1: must be at least 0"):
        KVCache.with_capacity(1, 2, 8, -1)
