"""kvcache.compat.forgellm: what forgellm_runtime's cache promises, its unit tests first."""

import numpy as np
import pytest

from kvcache.compat.forgellm import KVCache


def rows(tokens, seed=0):
    return np.random.default_rng(seed).standard_normal((2, tokens * 64), np.float32)


def append_everywhere(cache, k, v):
    for layer in range(cache.num_layers()):
        cache.append(layer, k, v)
    for _ in range(len(k) // cache.entry_size()):
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
    clone = cache.clone()
    clone.append(1, *rows(1))
    clone.advance()
    assert (cache.len(), clone.len(), cache.k(0).size) == (4, 5, 5 * 64)


def test_a_layer_that_was_left_out_is_named():
    cache = KVCache(2, 4, 16)
    with pytest.raises(ValueError, match=r"layers \[0, 1\] have no rows of token 0"):
        cache.advance()
    append_everywhere(cache, *rows(1))
    cache.append(1, *rows(1))
    with pytest.raises(ValueError, match=r"layers \[0\] have no rows of token 1"):
        cache.advance()
    cache.append(0, *rows(1))
    cache.advance()
    with pytest.raises(ValueError, match="of token 2"):
        cache.advance()
    assert cache.len() == 2


@pytest.mark.parametrize("at_once", [True, False])
def test_a_prompt_is_appended_layer_by_layer_then_advanced_token_by_token(at_once):
    cache = KVCache(3, 4, 16)
    k, v = rows(40)
    for layer in range(3):
        for begin in range(0, 40, 40 if at_once else 1):
            end = 40 if at_once else begin + 1
            cache.append(layer, k[begin * 64 : end * 64], v[begin * 64 : end * 64])
        assert cache.k(layer).tolist() == k.tolist()
    for length in range(1, 41):
        cache.advance()
        assert cache.len() == length
    assert all((cache.k(layer).tolist(), cache.v(layer).tolist()) == (k.tolist(), v.tolist()) for layer in range(3))
    with pytest.raises(ValueError, match="of token 40"):
        cache.advance()


def test_one_layer_may_be_ahead_of_another():
    cache = KVCache(2, 4, 16)
    k, v = rows(5)
    cache.append(0, k, v)
    for i in range(5):
        cache.append(1, k[i * 64 : (i + 1) * 64], v[i * 64 : (i + 1) * 64])
        cache.advance()
        assert (cache.len(), cache.k(0).tolist()) == (i + 1, k.tolist())
        assert cache.v(1).tolist() == v[: (i + 1) * 64].tolist()


def test_what_was_given_may_be_written_over():
    cache = KVCache(1, 4, 16)
    k, v = rows(2)
    cache.append(0, k, v)
    k[:] = v[:] = 0
    cache.advance()
    assert (cache.k(0).tolist(), cache.v(0).tolist()) == tuple(rows(2).tolist())


def test_a_repr_says_the_shape_and_the_length():
    cache = KVCache(2, 4, 16)
    append_everywhere(cache, *rows(3))
    assert repr(cache) == "<forgellm.KVCache(2, 4, 16): 3 tokens>"


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


def test_a_token_has_a_key_and_a_value():
    cache = KVCache(2, 4, 16)
    with pytest.raises(ValueError, match="v_data: 128 numbers, where k_data has 64"):
        cache.append(1, rows(1)[0], rows(2)[1])
    assert cache.k(1).size == 0


def test_a_wrong_capacity_is_named():
    assert KVCache.with_capacity(1, 2, 8, 0).len() == 0  # a hint, as there
    with pytest.raises(ValueError, match="max_seq_len=-1: must be at least 0"):
        KVCache.with_capacity(1, 2, 8, -1)
