"""Rows chosen for each token: what `Batch.attend(chosen=...)` takes and refuses.

Values show which rows are read. tests/c/attend/test_chosen.c holds what is computed.
"""

import numpy as np
import pytest

import kvcache

TOKENS, WIDTH = 6, 5
RNG = np.random.default_rng(7)
K, Q = (RNG.normal(size=(TOKENS, heads, 8)).astype(np.float32) for heads in (2, 4))
V = np.repeat(np.eye(TOKENS, dtype=np.float32)[:, None], 2, axis=1)
OWN = np.arange(TOKENS)


@pytest.fixture
def batch():
    cache = kvcache.KVCache(1, 2, 8, v_head_dim=TOKENS, dtype="f32")
    with cache.batch(TOKENS) as batch:
        batch.put(0, K, V)
        yield batch


def check(out, chosen):
    """Tokens read the rows that `chosen` [tokens, positions], or [tokens, KV heads, positions], says, up to their own.

    A row that is read has a weight.
    """
    chosen = np.broadcast_to(chosen if chosen.ndim == 3 else chosen[:, None], (TOKENS, 2, TOKENS))
    seen = chosen & (OWN[:, None, None] >= OWN)
    np.testing.assert_array_equal(out != 0, seen.repeat(2, axis=1))


def among(entries, names=OWN):
    """Whether an entry of each list is the name of each position."""
    return (entries[..., None] == names).any(-2)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_positions(batch, dtype):
    chosen = RNG.integers(0, TOKENS + 3, (TOKENS, WIDTH)).astype(dtype)
    check(batch.attend(0, Q, chosen=chosen), among(chosen))


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


def test_a_choice_for_each_kv_head_and_blocks(batch):
    chosen = RNG.integers(-1, TOKENS, (TOKENS, 2, WIDTH))
    check(batch.attend(0, Q, chosen=chosen), among(chosen))
    blocks = RNG.integers(-1, 3, (TOKENS, 1))
    named = among(blocks, OWN // 2)
    check(batch.attend(0, Q, chosen=blocks, chosen_block=2), named)
    tail = (OWN[:, None] + 1) // 2 * 2 <= OWN
    check(batch.attend(0, Q, chosen=blocks, chosen_block=2, chosen_tail=True), named | tail)


def test_sequences_in_lock_step(batch):
    chosen = RNG.integers(-1, 3, (TOKENS, WIDTH))
    batch.abort()
    outs = []
    for layout in ("THD", "BHTD"):
        k, v, q = (K, V, Q) if layout == "THD" else (x.reshape(2, 3, -1, x.shape[2]).swapaxes(1, 2) for x in (K, V, Q))
        cache = kvcache.KVCache(1, 2, 8, v_head_dim=TOKENS, dtype="f32", max_sequences=2)
        with cache.batch(positions=[0, 1, 2] * 2, seq_ids=[0] * 3 + [1] * 3) as both:
            outs.append(both.attend(0, q, k, v, chosen=chosen, layout=layout))
    np.testing.assert_array_equal(outs[1].swapaxes(1, 2).reshape(outs[0].shape), outs[0])


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
