"""Rows chosen for each token: what `Batch.attend(chosen=...)` takes, refuses and computes."""

import numpy as np
import pytest

import kvcache

TOKENS, WIDTH = 6, 5
RNG = np.random.default_rng(7)
K, V = (RNG.normal(size=(TOKENS, 2, 8)).astype(np.float32) for _ in range(2))
Q = RNG.normal(size=(TOKENS, 4, 8)).astype(np.float32)


@pytest.fixture
def batch():
    cache = kvcache.KVCache(num_layers=1, num_kv_heads=2, head_dim=8, max_seq_len=64, dtype="f32")
    with cache.batch(TOKENS) as batch:
        batch.put(0, K, V)
        yield batch


def expected(names):
    """Attend by NumPy; `names(token, kv_head, position)` says whether a position is chosen."""
    out = np.zeros_like(Q)
    for t in range(TOKENS):
        for h in range(4):
            rows = [p for p in range(t + 1) if names(t, h // 2, p)]
            weights = np.exp(K[rows, h // 2] @ Q[t, h] / np.sqrt(8))
            out[t, h] = weights @ V[rows, h // 2] / weights.sum() if rows else 0
    return out


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_positions(batch, dtype):
    chosen = RNG.integers(0, TOKENS + 3, (TOKENS, WIDTH)).astype(dtype)
    out = batch.attend(0, Q, chosen=chosen)
    np.testing.assert_allclose(out, expected(lambda t, _, p: p in chosen[t]), atol=1e-6)


def test_other_spellings(batch):
    chosen = RNG.integers(-2, TOKENS, (TOKENS, WIDTH))
    out = batch.attend(0, Q, chosen=chosen)
    strided = np.zeros((TOKENS, 2 * WIDTH), np.int32)
    strided[:, ::2] = chosen[:, ::-1]
    for other in (chosen.tolist(), np.asfortranarray(chosen), strided[:, ::2], chosen[:, None]):
        np.testing.assert_array_equal(batch.attend(0, Q, chosen=other), out)


def test_entries_beyond_int32_count_for_nothing(batch):
    chosen = np.array([[1, 2**31 - 1, 2**40, -(2**40), 0]] * TOKENS)
    np.testing.assert_array_equal(batch.attend(0, Q, chosen=chosen), batch.attend(0, Q, chosen=[[0, 1]] * TOKENS))


def test_a_choice_for_each_kv_head(batch):
    chosen = RNG.integers(-1, TOKENS, (TOKENS, 2, WIDTH))
    out = batch.attend(0, Q, chosen=chosen)
    np.testing.assert_allclose(out, expected(lambda t, head, p: p in chosen[t, head]), atol=1e-6)


@pytest.mark.parametrize("tail", [False, True])
def test_blocks(batch, tail):
    chosen = RNG.integers(-1, 3, (TOKENS, 1))
    out = batch.attend(0, Q, chosen=chosen, chosen_block=2, chosen_tail=tail)
    wanted = expected(lambda t, _, p: p // 2 in chosen[t] or (tail and p >= (t + 1) // 2 * 2))
    np.testing.assert_allclose(out, wanted, atol=1e-6)


def test_sequences_in_lock_step():
    cache = kvcache.KVCache(
        num_layers=1, num_kv_heads=2, head_dim=8, max_seq_len=64, dtype="f32", max_sequences=2, capacity=128
    )
    chosen = RNG.integers(-1, 3, (TOKENS, WIDTH))
    with cache.batch(positions=[0, 1, 2] * 2, seq_ids=[0] * 3 + [1] * 3) as batch:
        plain = batch.attend(0, Q, K, V, chosen=chosen)
    cache.clear()
    k, v, q = (x.reshape(2, 3, -1, 8).transpose(0, 2, 1, 3) for x in (K, V, Q))
    with cache.batch(positions=[0, 1, 2] * 2, seq_ids=[0] * 3 + [1] * 3) as batch:
        out = batch.attend(0, q, k, v, chosen=chosen, layout="BHTD")
    np.testing.assert_array_equal(out.transpose(0, 2, 1, 3).reshape(Q.shape), plain)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"chosen": np.zeros((TOKENS, 3))}, TypeError, "float64, where integers"),
        ({"chosen": np.zeros((TOKENS - 1, 3), int)}, ValueError, r"\(5, 3\), where \(6, n\)"),
        ({"chosen": np.zeros((TOKENS, 3, 3), int)}, ValueError, r"\(6, 2, n\)"),
        ({"chosen": np.zeros((TOKENS, 0), int)}, ValueError, r"\(6, 0\), where .* n at least 1"),
        ({"chosen": [1, 2]}, ValueError, r"\(2,\)"),
        ({"chosen": [[1, 2], [3]] * 3}, ValueError, "chosen: lists of one length"),
        ({"chosen": []}, ValueError, r"\(0,\)"),
        ({"chosen_block": 2}, ValueError, "chosen_block=2.*must be given"),
        ({"chosen_tail": True}, ValueError, "chosen_tail=True.*must be given"),
        ({"chosen_block": "x"}, TypeError, "chosen_block"),
        ({"chosen": [[1]] * TOKENS, "chosen_block": 0}, ValueError, "chosen_block=0"),
        ({"chosen": [[1]] * TOKENS, "chosen_tail": 2}, TypeError, "chosen_tail=2"),
    ],
)
def test_refusals(batch, options, error, words):
    with pytest.raises(error, match=words):
        batch.attend(0, Q, **options)
