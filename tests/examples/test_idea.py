"""Test that the idea of the cache, examples/idea.py, does what the cache does."""

import runpy
import subprocess
import sys

import numpy as np
import pytest
from support.compiling import ROOT

import kvcache

IDEA = runpy.run_path(str(ROOT / "examples/idea.py"))
DIM, SEQUENCES, LONGEST = 8, 3, 40


def pick_edit(rng, idea):
    """Return the name and arguments of an edit that a sequence may have, for both."""
    held = [seq_id for seq_id, runs in idea.runs.items() if runs]
    seq_id = int(rng.choice(held))
    begin, length = sorted(int(n) for n in rng.integers(idea.next_position(seq_id), size=2))
    return [
        ("fork", (seq_id, (seq_id + 1) % SEQUENCES), {}),
        ("remove", (begin, length + 1), {"seq_id": seq_id}),
        ("shift", (begin, 1 << 30, length), {"seq_id": seq_id}),
        ("shift", (0, 1 << 30, -begin), {"seq_id": seq_id}),
    ][rng.integers(1 if idea.window < LONGEST else 4)]


def append(rng, idea, cache):
    """Give a sequence tokens, and compare what the last one gets."""
    seq_id, n = int(rng.integers(SEQUENCES)), int(rng.integers(1, 7))
    q, k, v = rng.standard_normal((3, n, DIM)).astype(np.float32)
    if idea.next_position(seq_id) + n > LONGEST:
        return
    with cache.batch(n, seq_ids=[seq_id] * n) as batch:
        batch.put(0, k[:, None], v[:, None])
        out = batch.attend(0, q[:, None])
    idea.append(k, v, seq_id)
    np.testing.assert_allclose(out[-1, 0], idea.attend(q[-1], seq_id), rtol=1e-3, atol=1e-4)


def test_its_docstring():
    subprocess.run([sys.executable, "-m", "doctest", ROOT / "examples/idea.py"], check=True)


def test_edits_with_a_window():
    idea = IDEA["Cache"](2, [0.1], window=3)
    idea.append(np.ones((5, 2)), np.ones((5, 2)))
    for edit in (lambda: idea.remove(1, 4), lambda: idea.shift(0, 5, 2)):
        before = idea.runs[0]
        with pytest.raises(NotImplementedError, match="the window has dropped"):
            edit()
        assert idea.runs[0] == before


@pytest.mark.parametrize("seed", range(4))
def test_random_calls(seed):
    rng, rope = np.random.default_rng(seed), kvcache.Rope(1 / 10 ** np.arange(DIM // 2))
    window = None if seed % 2 else 6
    policy = kvcache.SlidingWindow(window) if window else kvcache.FullAttention()
    cache = kvcache.KVCache(1, 1, DIM, 1000, max_sequences=SEQUENCES, policy=policy, rope=rope, dtype="f32")
    idea = IDEA["Cache"](DIM, rope.inv_freq, **({"window": window} if window else {}))
    for _ in range(150):
        if rng.integers(3) and any(idea.runs.values()):
            name, args, options = pick_edit(rng, idea)
            getattr(idea, name)(*args, **options)
            getattr(cache, name)(*args, **options)
        else:
            append(rng, idea, cache)
        for seq_id, runs in idea.runs.items():
            assert cache.next_position(seq_id) == idea.next_position(seq_id)
            if not runs:
                continue
            k, v, positions = idea.gather(seq_id)
            keys, values = cache.gather(0, seq_id=seq_id)
            np.testing.assert_array_equal(cache.positions(seq_id=seq_id), positions)
            np.testing.assert_array_equal(values[0], v)
            np.testing.assert_allclose(keys[0], k, rtol=1e-4, atol=1e-4)
    assert len(idea.blocks) < 60  # they are used again
