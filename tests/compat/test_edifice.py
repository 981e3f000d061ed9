"""kvcache.compat.edifice: what Edifice.Blocks.KVCache promises, sentence by sentence."""

import itertools

import numpy as np
import pytest
from support.attention import attend

from kvcache import CacheFullError
from kvcache.compat.edifice import KVCache

B, L, H, D = 2, 2, 4, 8


@pytest.fixture
def state():
    return KVCache.init(batch_size=B, num_layers=L, num_heads=H, head_dim=D, max_seq_len=32)


def array(tokens, seed=0):
    return np.random.default_rng(seed).standard_normal((B, H, tokens, D), np.float32)


def update_all(state, tokens, seed=0):
    k, v = array(tokens, seed), array(tokens, seed + 100)
    for layer in range(L):
        state, _, _ = KVCache.update(state, layer, k, v)
    return k, v


# --- init --------------------------------------------------------------------------------------------------------


def test_a_new_state_is_empty_and_says_its_shape():
    state = KVCache.init(batch_size=B, num_layers=6, num_heads=H, head_dim=D)
    assert (state.position, state.num_layers, state.max_seq_len) == (0, 6, 2048)
    assert KVCache.seq_length(state) == 0
    assert repr(state) == "<edifice.KVCache: 3 sequences, 6 layers, 0 of 2048 tokens>".replace("3", str(B))


def test_the_length_is_that_of_every_layer(state):
    state.update(0, array(3), array(3))
    assert [KVCache.seq_length(state, layer) for layer in range(L)] == [3] * L
    with pytest.raises(IndexError, match=f"layer_idx={L}"):
        KVCache.seq_length(state, L)


def test_all_memory_is_there_from_the_beginning(state):
    cache = state.cache
    assert cache.nbytes >= 2 * L * B * H * 32 * D * 4
    blocks = cache.stats()["blocks_opened"]
    for seed in range(32):
        update_all(state, 1, seed)
    assert cache.stats()["blocks_opened"] == blocks


def test_the_length_is_the_one_asked_for(state):
    assert state.max_seq_len == 32
    update_all(state, 32)
    with pytest.raises(CacheFullError):
        state.update(0, array(1), array(1))
    assert state.position == 32


def test_the_type_is_the_one_asked_for():
    state = KVCache.init(batch_size=1, num_layers=1, num_heads=2, head_dim=4, type="f16")
    assert [(layer.k_dtype, layer.v_dtype) for layer in state.cache.layers] == [("f16", "f16")]


# --- update ------------------------------------------------------------------------------------------------------


# --- get, seq_length, reset --------------------------------------------------------------------------------------


def test_an_empty_state_has_one_row_of_zeros(state):
    k, v = KVCache.get(state, 0)
    assert k.shape == v.shape == (B, H, 1, D)
    assert not k.any()
    assert not v.any()


@pytest.mark.parametrize("running", [False, True])
def test_a_reset_empties_and_keeps_the_memory(state, running):
    update_all(state, 3)
    if running:
        state.update(0, array(1), array(1))
    blocks = state.cache.stats()["blocks_opened"]
    assert KVCache.seq_length(KVCache.reset(state)) == 0
    k, _ = update_all(state, 2, seed=9)
    assert state.cache.stats()["blocks_opened"] == blocks
    np.testing.assert_array_equal(state.get(1)[0], k)


@pytest.mark.parametrize("seed", range(10))
def test_anything(state, seed):
    """Updates of random layers, against arrays of zeros and a position."""
    rng = np.random.default_rng(seed)
    rows, first, position = np.zeros((L, B, H, 32, D), np.float32), 0, 0
    updated = set()
    for _ in range(60):
        layer, tokens = int(rng.integers(L)), int(rng.integers(1, 4))
        if layer in updated or not updated:  # a step begins
            first, updated = position, set()
            if position + tokens > 32 or rng.random() < 0.05:
                rows[:], first, position = 0, 0, 0
                state.reset()
            position = first + tokens
        new = rng.standard_normal((B, H, position - first, D)).astype(np.float32)
        rows[layer, :, :, first:position] = new
        _, k, v = state.update(layer, new, -new)
        updated.add(layer)
        np.testing.assert_array_equal(k, rows[layer, :, :, :position])
        np.testing.assert_array_equal(v, -rows[layer, :, :, :position])
        if len(updated) == L:
            updated = set()
        assert state.position == position
        for other in range(L):
            np.testing.assert_array_equal(state.get(other)[0], rows[other, :, :, :position])
        state.cache.validate()


# --- attention ---------------------------------------------------------------------------------------------------


def attention_in_numpy(q, k, v):
    out = [attend(*(x.swapaxes(0, 1) for x in rows)) for rows in zip(q, k, v, strict=True)]
    return np.reshape(out, (B, q.shape[2], H * D))


def test_the_attention_that_is_built_appends_and_attends(state):
    k, v = update_all(state, 4)
    attentions = [KVCache.build_cached_attention(num_heads=H, head_dim=D, layer_idx=layer) for layer in range(L)]
    q, new_k, new_v = (array(3, seed) for seed in (7, 8, 9))
    for attention in attentions:
        out, state = attention(q, new_k, new_v, state)
        assert out.shape == (B, 3, H * D)
        expected = attention_in_numpy(q, np.concatenate([k, new_k], 2), np.concatenate([v, new_v], 2))
        np.testing.assert_allclose(out, expected, atol=1e-5)
    assert KVCache.seq_length(state) == 7


@pytest.mark.parametrize(
    "convert", [np.float64, np.float16, np.ndarray.tolist, pytest.param("bfloat16", marks=pytest.mark.hf)]
)
def test_numbers_of_any_kind(state, convert):
    """As `kvcache.KVCache` takes them, and those that there are to be converted first."""
    if convert == "bfloat16":
        import torch

        convert = lambda x: torch.from_numpy(x).bfloat16()  # noqa: E731 - it is one of several
    attention = KVCache.build_cached_attention(num_heads=H, head_dim=D, layer_idx=0)
    q, k, v = (np.round(array(3, seed) * 4) / 4 for seed in (7, 8, 9))  # exact in each type
    out, state = attention(convert(q), convert(k), convert(v), state)
    np.testing.assert_allclose(out, attention_in_numpy(q, k, v), atol=1e-5)
    np.testing.assert_array_equal(KVCache.get(state, 0)[0], k)


@pytest.mark.parametrize("wrong", ["a", [[1.0], [2.0, 3.0]]])
def test_what_is_no_array_of_numbers_is_named(state, wrong):
    attention = KVCache.build_cached_attention(num_heads=H, head_dim=D, layer_idx=0)
    for name, place in (("q", 0), ("new_k", 1), ("new_v", 2)):
        arguments = [array(2), array(2), array(2)]
        arguments[place] = wrong
        with pytest.raises((TypeError, ValueError), match=f"^{name}: an array "):
            attention(*arguments, state)
    assert state.position == 0


SHAPES = [(1, 2, 1, 8), (1, 2, 2, 8), (2, 2, 8), (2, 3, 1, 8)]


@pytest.mark.parametrize(("shape", "first"), [*itertools.product(SHAPES, (True, False)), ((2, 2, 2, 8), False)])
def test_a_refused_shape_leaves_the_step_as_it_was(shape, first):
    state = KVCache.init(batch_size=2, num_layers=2, num_heads=2, head_dim=8, max_seq_len=4)
    new = np.ones((2, 2, 1, 8), np.float32)
    if not first:
        state.update(0, new, new)
    with pytest.raises(ValueError, match=r"shape|head|tokens"):
        state.update(1, np.ones(shape, np.float32), np.ones(shape, np.float32))
    if first:
        state.update(0, new, new)
    _, k, _ = state.update(1, new, new)
    assert k.shape == (2, 2, 1, 8)
    assert state.seq_length() == 1
    _, k, _ = state.update(0, new, new)
    assert k.shape == (2, 2, 2, 8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_seq_len", 0), ("max_seq_len", None), ("batch_size", 0), ("num_layers", 0), ("num_heads", 0),
        ("num_heads", 1.5), ("head_dim", 0), ("type", "fp32"), ("type", 4),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(name, value):
    sizes = {"batch_size": 1, "num_layers": 1, "num_heads": 1, "head_dim": 8, "max_seq_len": 4}
    with pytest.raises((ValueError, TypeError), match=f"^{name}={value!r}: "):
        KVCache.init(**{**sizes, name: value})


@pytest.mark.parametrize("shape", [(2, 2, 1, 8), (1, 2, 1, 4), (1, 2, 8), (1, 2, 0, 8), (1, 2, 3, 8)])
def test_a_refused_update_does_not_end_the_step(shape):
    state = KVCache.init(batch_size=1, num_layers=2, num_heads=2, head_dim=8, max_seq_len=3)
    new = np.ones((1, 2, 1, 8), np.float32)
    state.update(0, new, new)
    with pytest.raises((ValueError, CacheFullError)):
        state.update(0, np.ones(shape, np.float32), np.ones(shape, np.float32))
    _, k, _ = state.update(1, new, new)
    assert k[0, 0, :, 0].tolist() == [1]
    assert state.seq_length() == 1


@pytest.mark.parametrize("heads", [4, 3, 8])  # of the attention; those that are stored are 2
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("shape", [(1, 4, 1, 7), (1, 2, 2, 8), (1, 3, 1, 8), (2, 4, 1, 8), (4, 1, 8), (1, 4, 2, 8)])
def test_a_refused_attention_leaves_the_step_as_it_was(shape, tokens, heads):
    if shape == (1, heads, tokens, 8) and heads % 2 == 0:
        return
    new, more = np.ones((2, 1, 2, 1, 8), np.float32), np.ones((2, 1, 2, tokens, 8), np.float32)
    attention = KVCache.build_cached_attention(num_heads=heads, head_dim=8, layer_idx=0)
    for is_running in (False, True):
        state = KVCache.init(batch_size=1, num_layers=2, num_heads=2, head_dim=8, max_seq_len=4)
        if is_running:
            state.update(0, *new)
        with pytest.raises(ValueError, match=r"shape|head|tokens"):
            attention(np.ones(shape), *more, state)
        assert (state.position, state.cache.seq_len()) == (is_running, 0)
        assert state.update(1, *new)[1].tolist() == new[0].tolist()


@pytest.mark.parametrize("layer", [True, 1.0, "1", None, 2, -1])
def test_a_wrong_layer_does_not_end_the_step(layer):
    state = KVCache.init(batch_size=1, num_layers=2, num_heads=2, head_dim=8)
    new = np.ones((2, 1, 2, 1, 8), np.float32)
    state.update(1, *new)
    with pytest.raises((TypeError, IndexError), match=f"layer_idx={layer!r}: "):
        state.update(layer, *new)
    assert (state.position, state.cache.seq_len()) == (1, 0)
