"""PrefixCache in Python: tokens of any kind, arguments, errors and lifetimes.

An oracle in C says what matches, and with which rows (tests/world). tests/c/prefix tests rare cases.
tests/cache/refusals.txt has what is refused.
"""

import copy
import gc
import hashlib
import math
import re
import time
from pathlib import Path

import numpy as np
import pytest
from support.prefixes import BLOCK, check_rows, feed, make_cache, serve

import kvcache
from kvcache import _core
from kvcache.prefix.keys import arrays_of

PROMPT = list(range(100))


def make(kind="full", **arguments):
    own = {name: arguments.pop(name) for name in ("salt", "fingerprint", "reuse_min_tokens") if name in arguments}
    cache = make_cache(kind, **arguments)
    return cache, kvcache.PrefixCache(cache, **{"fingerprint": "a model", **own})


SMALL = kvcache.SlidingWindow(4)
RESUMING = kvcache.SlidingWindow(4, resume_window=64)


@pytest.mark.parametrize(
    ("policy", "block_size", "average", "most"),
    [(SMALL, 64, 31, 62), (RESUMING, 64, 0, 0), (SMALL, 4, 0, 0), (kvcache.SlidingWindow(64), 64, 0, 0)],
)
def test_windows_that_are_smaller_than_blocks(policy, block_size, average, most):
    """A match ends early where a block fills over several batches, as docs/prefix.md says, and not elsewhere."""
    policies = [kvcache.FullAttention(), policy]
    cache = kvcache.KVCache(2, 1, 2, None, max_sequences=None, block_size=block_size, dtype="f32", policy=policies)
    prefix = kvcache.PrefixCache(cache, fingerprint="a model")
    text, lost = list(range(320)), []
    serve(prefix, cache, text[:1], text[1:])
    for at in range(1, 320):
        seq_id, matched = prefix.acquire([*text[:at], -1])
        check_rows(cache, seq_id, text, matched)
        cache.clear(seq_id)
        lost.append(at - matched)
    assert (round(sum(lost) / len(lost)), max(lost)) == (average, most)


def test_rows_that_do_not_follow_from_the_tokens():
    """Rows behind the point that a runner names are not kept: not when they are fed, nor when they are released."""
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT)
    prefix.note_inexact(seq_id, 40)
    feed(cache, seq_id, PROMPT, 0, 100)
    assert prefix.acquire(PROMPT)[1] == 32
    prefix.release(seq_id, PROMPT)
    assert prefix.acquire(PROMPT)[1] == 40


def test_a_copy_is_the_same():
    cache, prefix = make()
    assert copy.deepcopy({"prefix": prefix})["prefix"] is copy.copy(prefix) is prefix
    assert prefix.cache is cache


def test_tokens_of_any_kind():
    """Integers of any size, arrays of them, and bytes; what is equal is found, what only looks alike is not."""
    cache, prefix = make()
    tokens = [1, -2, 2**63, b"an image", 5, b"5", 10**5000, -(10**5000), *range(30)]  # more digits than Python writes
    seq_id, _ = prefix.acquire(tokens)
    feed(cache, seq_id, range(38), 0, 38)
    prefix.release(seq_id, tokens)
    assert prefix.acquire(tokens)[1] == len(tokens) - 1
    for i in range(8):
        for other in (7, b"7") if isinstance(tokens[i], bytes) else (tokens[i] + 1, b"%d" % (tokens[i] % 100)):
            assert prefix.acquire([*tokens[:i], other, *tokens[i + 1 :]])[1] == i
    serve(prefix, cache, PROMPT)
    for same in (np.array(PROMPT), np.array(PROMPT, np.int32), np.array(PROMPT, np.uint64), tuple(PROMPT), range(100)):
        assert prefix.acquire(same)[1] == 99
    serve(prefix, cache, [-1, 2, 3])
    assert prefix.acquire(np.array([2**64 - 1, 2, 3], np.uint64))[1] == 0


def test_names_of_blocks_stay():
    """Stores are full of them."""
    cache = make(block_size=4)[0]
    prefix = _core.Prefix(cache._core, b"a tenant", b"a model", None, 0, 0, 0, False, 0, 0, 0)
    tokens = [1, -2, b"an image", 2**63, 5, 6, 7, 8, b"x", -(2**200), 3, 9, 10]
    assert prefix.names(*arrays_of(tokens)) == [
        "0376a1d303ebd12a3ef59d67555381f73b8ebb2cf42b26e1354a794769cfd9fe",
        "9d60ac3289934bd9a1d4dc8491c5b6d6f5c75b89480d077c406aabe781f9c025",
        "e6409a03ad2caf3a9a7573e4b86bf545aad4fe1ee8afa13dd4460934c68d08a8",
    ]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda text: memoryview(text).cast("b"), list])
def test_text_as_bytes(kind):
    """If bytes are tokens, a prompt of any length may be bytes; it equals the list of its bytes."""
    text = b"First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak."
    cache, prefix = make()
    seq_id, matched = prefix.acquire(kind(text[:8]))
    assert (matched, prefix.stats.tokens) == (0, 8)
    cache.clear(seq_id)
    seq_id, _ = prefix.acquire(kind(text))
    feed(cache, seq_id, text, 0, 70)
    prefix.release(seq_id, kind(text))
    for same in (text, bytearray(text), memoryview(text), list(text), np.frombuffer(text, np.uint8)):
        assert prefix.acquire(same)[1] == 70
    assert prefix.pin(kind(text)) == 70
    prefix.unpin(kind(text))
    assert prefix.acquire(b"First Servant")[1] == 6


def test_equal_prefix_caches_have_equal_keys():
    """Keys are the same in every process: of the model, the shape, the types and the policies."""

    def key(*kind, fingerprint="a model", **options):
        return kvcache.PrefixCache(make(*kind, **options)[0], fingerprint=fingerprint).identity

    keys = {key(fingerprint=f) for f in ("a", "b", "a\0b", "\udc80") for _ in range(2)}
    keys |= {key(kind) for kind in ("full", "hybrid", "windows")}
    keys |= {key(dtype=dtype) for dtype in ("f16", "bf16")}
    keys |= {key(block_size=size) for size in (8, 32)}
    keys |= {key(rope=rope) for rope in (False, kvcache.Rope([1.0]), kvcache.Rope([0.5]))}
    assert len(keys) == 14
    assert hashlib.blake2b(key()).hexdigest()[:32] == "f583b1714c13f70cb9be6927beb768b8"


# ---- memory


def test_nothing_is_left_behind():
    """Once a prefix cache is gone, or cleared, nobody holds its rows."""
    cache, prefix = make()
    serve(prefix, cache, PROMPT)
    seq_id, _ = prefix.acquire([-1, -2, -3])
    feed(cache, seq_id, [-1] * 40, 0, 40)
    prefix.clear()
    assert cache.stats()["retained"] == 0
    serve(prefix, cache, PROMPT)
    cache.clear(seq_id)
    del prefix
    gc.collect()
    assert cache.stats()["retained"] == 0
    assert cache.stats()["live_slots"] == 0
    cache.validate()


# ---- chunks from elsewhere


def test_reuse():
    """Tokens behind the match that stand elsewhere are moved there, and nothing of that is kept."""
    cache, prefix = make(reuse_min_tokens=20, rope=False)
    serve(prefix, cache, PROMPT)
    prompt = [*PROMPT[:30], *PROMPT[45:90], -1]
    assert prefix.acquire(prompt, max_matched=60)[1] == 60
    assert prefix.acquire(prompt)[1] == 75
    assert prefix.stats.reused == 30 + 45
    assert prefix.acquire([*PROMPT[:30], *PROMPT[45:60], -1])[1] == 30  # too few
    tenant = prefix.tenant(b"a tenant")  # has the same arguments
    serve(tenant, cache, PROMPT)
    assert tenant.acquire(prompt)[1] == 75


def test_an_error_while_a_chunk_is_moved_leaves_nothing_behind():
    def rotate(layer, keys, delta):
        raise KeyboardInterrupt

    cache, prefix = make(reuse_min_tokens=20, rope=rotate)
    serve(prefix, cache, PROMPT)
    with pytest.raises(KeyboardInterrupt):
        prefix.acquire([*PROMPT[:30], *PROMPT[45:90], -1])
    assert cache.sequences == []
    assert prefix.stats.sequences == 0
    cache.validate()


# ---- bad input


def test_bytes_with_gaps_are_a_token():
    _, prefix = make()
    assert prefix.names([memoryview(b"a-b-")[::2]] * BLOCK) == prefix.names([b"ab"] * BLOCK)


def test_ending_a_sequence_twice():
    """A ``finally`` may release a sequence without knowing whether it has ended."""
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT)
    feed(cache, seq_id, PROMPT, 0, 100)
    for _ in range(2):
        prefix.release(seq_id, PROMPT)
    prefix.release(-5, PROMPT)
    prefix.note_inexact(seq_id, 3)
    seq_id, matched = prefix.acquire(PROMPT)
    assert matched == 99
    cache.clear(seq_id)
    prefix.release(seq_id, PROMPT)
    assert prefix.stats.sequences == 0
    cache.validate()


def test_the_page_s_runner_ends_a_sequence_that_cannot_be_fed():
    """`serve` of docs/prefix.md, as it stands there; what was fed of the prompt is kept."""
    page = (Path(__file__).resolve().parents[2] / "docs/prefix.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", page, re.S)[1], names)
    feed_as_shown = names["feed"]

    def fail_at_the_answer(seq_id, begin, tokens):
        feed_as_shown(seq_id, begin, tokens)
        if begin:
            raise KeyError

    names["feed"] = fail_at_the_answer
    with pytest.raises(KeyError):
        names["serve"](PROMPT, [1, 2, 3])
    assert names["prefix"].stats.sequences == 0
    assert names["cache"].sequences == []
    with pytest.raises(KeyError):
        names["serve"](PROMPT, [1])
    assert names["prefix"].stats.matched == 99


def test_a_closed_cache():
    cache, prefix = make()
    serve(prefix, cache, PROMPT)
    cache.close()
    calls = (lambda: prefix.acquire([1]), lambda: prefix.release(0, [1]), lambda: prefix.pin([1]), prefix.clear)
    for call in (*calls, lambda: kvcache.PrefixCache(cache, fingerprint="a model")):
        with pytest.raises(ValueError, match="the cache is closed"):
            call()
    assert prefix.flush(math.inf)
    assert prefix.close()
    assert prefix.stats.requests == 1


def test_tenants():
    """They share the cache and nothing else, and keep what is within their quota when others need the room."""
    cache, prefix = make(capacity=20 * BLOCK)
    kept = prefix.tenant(b"one", quota=4 * BLOCK)
    free = prefix.tenant(b"another", secret=None)
    for one in (prefix, kept, free):
        assert serve(one, cache, PROMPT[:64]) == 0
        assert one.lookup(PROMPT) == 64
    for i in range(20):
        serve(prefix, cache, list(range(1000 * i + 5000, 1000 * i + 5100)))
    assert (kept.lookup(PROMPT), free.lookup(PROMPT)) == (64, 0)
    assert serve(kept, cache, PROMPT) == 64
    cache.validate()


def test_blocks_end_by_time():
    cache, prefix = make()
    short = prefix.tenant(b"short", ttl=0.001)
    serve(short, cache, PROMPT)
    time.sleep(0.05)
    assert short.lookup(PROMPT) == 0
    assert short.stats.blocks == 0


def test_what_was_not_fed_may_be_anything():
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT)
    feed(cache, seq_id, PROMPT, 0, 40)
    prefix.release(seq_id, [*PROMPT[:40], None, "x", 1.5])
    prefix.release(seq_id, [None])
    assert prefix.acquire(PROMPT)[1] == 40
