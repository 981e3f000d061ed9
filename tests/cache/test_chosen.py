"""Rows chosen for each token: what `Batch.attend(chosen=...)` takes. refusals.txt has what it refuses.

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
    batch = cache.batch(TOKENS)
    batch.put(0, K, V)
    return batch


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


def test_positions(batch):
    chosen = RNG.integers(0, TOKENS + 3, (TOKENS, WIDTH))
    out = batch.attend(0, Q, chosen=chosen)
    check(out, among(chosen))
    strided = np.zeros((TOKENS, 2 * WIDTH), np.int32)
    strided[:, ::2] = chosen[:, ::-1]
    large = np.concatenate([chosen, [[2**31 - 1, 2**40, -(2**40), -1]] * TOKENS], 1)  # which name no row
    others = chosen.tolist(), np.asfortranarray(chosen), strided[:, ::2], chosen[:, None], large
    for other in (*others, chosen.astype(np.int32), chosen.astype(np.uint8)):
        np.testing.assert_array_equal(batch.attend(0, Q, chosen=other), out)


def test_a_choice_for_each_kv_head_and_blocks(batch):
    chosen = RNG.integers(-1, TOKENS, (TOKENS, 2, WIDTH))
    check(batch.attend(0, Q, chosen=chosen), among(chosen))
    blocks = RNG.integers(-1, 3, (TOKENS, 1))
    named = among(blocks, OWN // 2)
    check(batch.attend(0, Q, chosen=blocks, chosen_block=2), named)
    tail = (OWN[:, None] + 1) // 2 * 2 <= OWN
    check(batch.attend(0, Q, chosen=blocks, chosen_block=2, chosen_tail=True), named | tail)
