"""Checkpoints of a recurrent state: a match ends at one, in memory and by way of a store."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.prefixes import feed, make_cache

import kvcache

PROMPT = list(range(100))


def make(**options: Any) -> tuple[kvcache.KVCache, kvcache.PrefixCache]:
    cache = make_cache()
    return cache, kvcache.PrefixCache(cache, fingerprint="a model", state_bytes=100, timeout=60, **options)


def serve(cache: kvcache.KVCache, prefix: kvcache.PrefixCache, positions: list[int]) -> int:
    """Serve the prompt, with a checkpoint at these positions; return how much was matched."""
    seq_id, matched = prefix.acquire(PROMPT)
    state = prefix.state(seq_id)
    assert (state is None) == (matched == 0)
    assert state is None or state.tobytes() == bytes([matched]) * 25
    begin = matched
    for end in positions:
        feed(cache, seq_id, PROMPT, begin, end)
        prefix.checkpoint(seq_id, PROMPT[:end], np.full(25, end, np.uint8))
        begin = end
    feed(cache, seq_id, PROMPT, begin, 100)
    prefix.release(seq_id, PROMPT)
    return matched


def test_a_match_ends_at_a_checkpoint() -> None:
    cache, prefix = make()
    assert serve(cache, prefix, [40, 64, 90]) == 0
    assert prefix.lookup(PROMPT) == 90
    assert prefix.lookup(PROMPT[:80]) == 64
    assert prefix.lookup(PROMPT[:39]) == 0
    assert (prefix.stats.checkpoints, prefix.stats.checkpoint_bytes) == (3, 75)
    assert serve(cache, prefix, [99]) == 90
    assert serve(cache, prefix, []) == 99
    prefix.clear()
    assert prefix.stats.checkpoints == 0


def test_rows_behind_the_last_state() -> None:
    """They say where a prompt parts from those before it, which `acquire` cannot use."""
    cache, prefix = make()
    assert prefix.lookup(PROMPT, rows=True) == 0
    serve(cache, prefix, [40])
    assert prefix.lookup(PROMPT, rows=True) == 100
    other = [*PROMPT[:77], 1000, *PROMPT[78:]]
    assert (prefix.lookup(other), prefix.lookup(other, rows=True)) == (40, 77)
    assert prefix.acquire(other)[1] == 40


def test_no_more_than_the_limit_is_kept() -> None:
    cache, prefix = make(max_checkpoint_bytes=100)
    for first in range(7):
        tokens = [first, *PROMPT]
        seq_id, _ = prefix.acquire(tokens)
        feed(cache, seq_id, PROMPT, 0, 20)
        prefix.checkpoint(seq_id, tokens[:20], bytes(40))
        prefix.release(seq_id, tokens)
    assert (prefix.stats.checkpoints, prefix.stats.checkpoint_bytes) == (2, 80)
    assert prefix.tenant(b"another").stats.checkpoints == 0


def test_a_checkpoint_without_a_state_keeps_blocks() -> None:
    cache = make_cache()
    prefix = kvcache.PrefixCache(cache, fingerprint="a model")
    seq_id = prefix.new_sequence()
    feed(cache, seq_id, PROMPT, 0, 37)
    prefix.checkpoint(seq_id, PROMPT)
    assert prefix.lookup(PROMPT) == 37
    feed(cache, seq_id, PROMPT, 37, 50)
    prefix.release(seq_id, PROMPT)
    assert prefix.lookup(PROMPT) == 50
