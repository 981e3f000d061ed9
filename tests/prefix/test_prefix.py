"""Prompts go on where an earlier one parts from them, with the rows they would have computed."""

import copy
import gc
import hashlib
import math
import os
import random
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.prefixes import BLOCK, as_array, check_rows, common, feed, make_cache, rows_of, serve

import kvcache
from kvcache import _core
from kvcache.prefix.keys import arrays_of

PROMPT = list(range(100))


def make(kind="full", **arguments):
    own = {name: arguments.pop(name) for name in ("salt", "fingerprint", "reuse_min_tokens") if name in arguments}
    cache = make_cache(kind, **arguments)
    return cache, kvcache.PrefixCache(cache, **{"fingerprint": "a model", **own})


@pytest.mark.parametrize("kind", ["full", "hybrid", "windows"])
def test_the_match_is_the_longest(kind):
    """Whatever was served before, and however it ended, the longest common beginning is there, to the token."""
    choose = random.Random(kind)
    cache, prefix = make(kind)
    history = []
    for _ in range(150):
        begin = choose.choice(history)[: choose.randint(1, 120)] if history and choose.random() < 0.8 else []
        prompt = begin + [choose.randrange(40) for _ in range(choose.randint(1, 80))]
        generated = [choose.randrange(40) for _ in range(choose.randint(0, 40))]
        best = max((common(old, prompt[:-1]) for old in history), default=0)
        assert serve(prefix, cache, prompt, generated) == best
        history.append(prompt + generated)
        cache.validate()
    assert cache.sequences == []
    assert prefix.stats.sequences == 0
    assert prefix.stats.hits > 100


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


@pytest.mark.parametrize("kind", ["full", "hybrid", "windows"])
def test_resuming_anywhere(kind):
    """A prompt that parts from an earlier one at any token goes on as a run of its own would."""
    cache, prefix = make(kind)
    serve(prefix, cache, PROMPT, range(100, 130))
    for at in range(1, 130):
        prompt = [*range(at), -1, -2]
        seq_id, matched = prefix.acquire(prompt)
        assert matched == at
        feed(cache, seq_id, prompt, at, at + 2, 1)
        check_rows(cache, seq_id, prompt, at + 2)
        cache.clear(seq_id)
        cache.validate()


def test_one_token_is_left_to_feed():
    cache, prefix = make()
    serve(prefix, cache, PROMPT)
    assert prefix.acquire(PROMPT)[1] == 99
    assert prefix.acquire(PROMPT[:64])[1] == 63
    assert prefix.acquire(PROMPT[:1])[1] == 0


def test_matching_no_more_than_that():
    """For sequences that go in lock step."""
    cache, prefix = make("hybrid")
    serve(prefix, cache, PROMPT)
    for most in (0, 1, 15, 16, 17, 70, 99, 100, 10**12):
        seq_id, matched = prefix.acquire(PROMPT, max_matched=most)
        assert matched == min(most, 99)
        check_rows(cache, seq_id, PROMPT, matched)
        feed(cache, seq_id, PROMPT, matched, 100)
        prefix.release(seq_id, PROMPT)
    with pytest.raises(ValueError, match="max_matched"):
        prefix.acquire(PROMPT, max_matched=-1)


def test_rows_that_do_not_follow_from_the_tokens():
    """From where a runner says so, they are not kept: not when they are fed, nor when they are released."""
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT)
    prefix.note_inexact(seq_id, 70)
    prefix.note_inexact(seq_id, 40)
    prefix.note_inexact(seq_id, 50)
    feed(cache, seq_id, PROMPT, 0, 100)
    assert prefix.acquire(PROMPT)[1] == 32
    prefix.release(seq_id, PROMPT)
    assert prefix.acquire(PROMPT)[1] == 40


def test_a_copy_is_the_same():
    cache, prefix = make()
    assert copy.deepcopy({"prefix": prefix})["prefix"] is copy.copy(prefix) is prefix
    assert prefix.cache is cache


def test_a_running_sequence_is_found():
    """Blocks of a prompt are there as soon as they were computed, not only once it is released."""
    cache, prefix = make("hybrid")
    seq_id, _ = prefix.acquire(PROMPT)
    feed(cache, seq_id, PROMPT, 0, 50)
    assert prefix.acquire(PROMPT[:60])[1] == 48
    feed(cache, seq_id, PROMPT, 50, 100)
    assert prefix.acquire(PROMPT[:90])[1] == 89


def test_tokens_of_any_kind():
    """Integers of any size, arrays of them, and bytes; what is equal is found, what only looks alike is not."""
    cache, prefix = make()
    tokens = [1, -2, 2**63, b"an image", 5, b"5", -(2**200), *range(30)]
    serve(prefix, cache, tokens)
    assert prefix.acquire(tokens)[1] == len(tokens) - 1
    for i in range(7):
        other = [*tokens]
        other[i] = str(tokens[i]).encode() if isinstance(tokens[i], int) else 7
        assert prefix.acquire(other)[1] == i
    serve(prefix, cache, PROMPT)
    for same in (as_array(PROMPT), np.array(PROMPT, np.int32), np.array(PROMPT, np.uint64), tuple(PROMPT), range(100)):
        assert prefix.acquire(same)[1] == 99
    serve(prefix, cache, [-1, 2, 3])
    assert prefix.acquire(np.array([2**64 - 1, 2, 3], np.uint64))[1] == 0


def test_the_match_is_the_longest_of_tokens_of_any_kind():
    """A block has tokens of one kind or of several; what it shares with another ends where these differ, and there."""
    choose = random.Random(1)
    cache, prefix = make()
    history = []
    for _ in range(150):
        begin = choose.choice(history)[: choose.randint(1, 60)] if history and choose.random() < 0.9 else []
        prompt = begin + choose.choices([1, 2, 3, 2**70, b"a", b"1"], [9, 9, 9, 1, 1, 1], k=choose.randint(1, 30))
        best = max((common(old, prompt[:-1]) for old in history), default=0)
        assert serve(prefix, cache, prompt) == best
        history.append(prompt)
        cache.validate()
    assert prefix.evict(10**6) > 0
    assert prefix.stats.blocks == 0


def test_integers_that_look_like_a_digest():
    """Whoever chooses tokens may choose such: they are other tokens, and at worst hide a match."""
    cache, prefix = make()
    digest = hashlib.blake2b(b"an image", digest_size=32, person=b"bytes").digest()
    alike = np.frombuffer(digest, "<i8").tolist()
    texts = [[1, b"an image", 2], [1, *alike, 2], [1, *alike, b"an image"], [b"an image", *[5] * 9], [*alike, *[5] * 9]]
    for i, text in enumerate(texts):
        assert serve(prefix, cache, text) <= max((common(old, text[:-1]) for old in texts[:i]), default=0)
    for text in texts:
        assert prefix.acquire(text)[1] == len(text) - 1
    assert prefix.evict(10**6) > 0
    assert prefix.stats.blocks == 0


def test_names_of_blocks_stay():
    """Stores are full of them."""
    cache = make(block_size=4)[0]
    prefix = _core.Prefix(cache._core, b"a tenant", b"a model", 0, 0, 0, False, 0, 0, 0)
    tokens = [1, -2, b"an image", 2**63, 5, 6, 7, 8, b"x", -(2**200), 3, 9, 10]
    assert prefix.missing(*arrays_of(tokens), len(tokens)) == (
        0,
        [
            "0376a1d303ebd12a3ef59d67555381f73b8ebb2cf42b26e1354a794769cfd9fe",
            "9d60ac3289934bd9a1d4dc8491c5b6d6f5c75b89480d077c406aabe781f9c025",
            "e6409a03ad2caf3a9a7573e4b86bf545aad4fe1ee8afa13dd4460934c68d08a8",
        ],
    )


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda text: memoryview(text).cast("b"), list])
def test_text_as_bytes(kind):
    """Where bytes are tokens, a prompt of any length is given as it is; it equals the list of its bytes."""
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


@pytest.mark.parametrize("difference", [{"salt": b"another"}, {"fingerprint": "another"}])
def test_tenants_share_nothing(difference):
    """Another tenant, or another model, on the same cache finds nothing, and takes nothing away."""
    cache, prefix = make()
    other = kvcache.PrefixCache(cache, **{"fingerprint": "a model", **difference})
    serve(prefix, cache, PROMPT)
    assert serve(other, cache, PROMPT) == 0
    assert serve(other, cache, PROMPT) == 99
    other.clear()
    assert serve(other, cache, PROMPT) == 0
    assert serve(prefix, cache, PROMPT) == 99


def test_integers_of_any_size():
    """Some have more digits than Python writes."""
    cache, prefix = make()
    prompt = [2**63, 10**4000, 10**5000, -(10**5000), 10**5000 + 1, 7]
    seq_id, _ = prefix.acquire(prompt)
    feed(cache, seq_id, range(6), 0, 6)
    prefix.release(seq_id, prompt)
    for i, token in enumerate(prompt):
        assert prefix.acquire([*prompt[:i], token + 1, 5], max_matched=i + 1)[1] == i
    assert prefix.acquire(prompt)[1] == 5


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


def test_it_gives_way():
    """What is kept is dropped before a batch would find the cache full, the least recently used first."""
    cache, prefix = make(capacity=10 * BLOCK)
    serve(prefix, cache, PROMPT[:64])
    serve(prefix, cache, [*range(1000, 1064)])
    serve(prefix, cache, PROMPT[:40])  # the first one's beginning is the latest now
    seq_id, _ = prefix.acquire([-1])
    feed(cache, seq_id, [-1] * 95, 0, 95)
    assert prefix.acquire(PROMPT)[1] == 48
    assert prefix.acquire([*range(1000, 1064)])[1] == 16
    with pytest.raises(kvcache.CacheFullError):
        feed(cache, seq_id, [-1] * 500, 95, 200)
    cache.validate()


def test_children_go_before_parents():
    cache, prefix = make(capacity=20 * BLOCK)
    for i in range(4):
        serve(prefix, cache, [*PROMPT[:64], *range(1000 * i, 1000 * i + 60)])
    seq_id, _ = prefix.acquire([-1])
    for end in range(BLOCK, 17 * BLOCK, BLOCK):
        feed(cache, seq_id, [-1] * end, end - BLOCK, end)
        assert prefix.acquire([*PROMPT[:64], -2])[1] == min(64, 20 * BLOCK - end)


def test_pins():
    """What is pinned stays, until it is unpinned as often."""
    cache, prefix = make(capacity=10 * BLOCK)
    serve(prefix, cache, PROMPT)
    assert prefix.pin(PROMPT[:40]) == 40
    assert prefix.pin(PROMPT[:20]) == 20
    assert prefix.pin([-5] * 40) == 0
    assert prefix.evict(1000) == 52
    assert prefix.acquire(PROMPT)[1] == 48
    seq_id, _ = prefix.acquire([-1])
    with pytest.raises(kvcache.CacheFullError):
        feed(cache, seq_id, [-1] * 200, 0, 8 * BLOCK)
    prefix.unpin(PROMPT[:40])
    with pytest.raises(kvcache.CacheFullError):
        feed(cache, seq_id, [-1] * 200, 0, 9 * BLOCK)
    prefix.unpin(PROMPT[:20])
    cache.clear()
    serve(prefix, cache, PROMPT)
    prefix.unpin(PROMPT)
    feed(cache, 77, [-1] * 200, 0, 10 * BLOCK)


@pytest.mark.parametrize("limit", ["capacity", "max_bytes"])
def test_an_error_of_a_full_cache_says_what_is_pinned(limit):
    """And `unpin` helps."""
    cache, prefix = make()
    serve(prefix, cache, PROMPT)
    cache, prefix = make(**{limit: {"capacity": 8 * BLOCK, "max_bytes": cache.nbytes + 100}[limit]})
    serve(prefix, cache, PROMPT)
    assert prefix.pin(PROMPT) == 100
    for _ in range(2):
        with pytest.raises(kvcache.CacheFullError, match=rf"{limit}.*; 7 retained sequences are pinned: unpin some"):
            feed(cache, 77, [-1] * 80, 0, 80)
    prefix.unpin(PROMPT)
    feed(cache, 77, [-1] * 80, 0, 80)
    with pytest.raises(kvcache.CacheFullError) as found:
        feed(cache, 77, [-1] * 500, 80, 500)
    assert "pinned" not in str(found.value)


def test_evict():
    cache, prefix = make()
    serve(prefix, cache, PROMPT)
    assert prefix.evict(0) == 0
    assert prefix.evict(10) == 20  # the end of the prompt and the block before it
    assert prefix.acquire(PROMPT)[1] == 80
    assert prefix.evict(1000) == 80
    assert (prefix.stats.blocks, cache.stats()["live_slots"]) == (0, 80)  # the sequence just acquired
    cache.validate()


def test_evict_counts_what_it_drops():
    """Blocks that a batch evicted before, and whose names are known yet, are no part of it."""
    cache, prefix = make(capacity=8 * BLOCK)
    serve(prefix, cache, PROMPT[:96])
    serve(prefix, cache, range(1000, 1064))  # takes the place of the last two blocks
    before = cache.stats()["evictable_slots"]
    assert prefix.evict(32) == 32
    assert before - cache.stats()["evictable_slots"] == 32
    assert prefix.evict(10_000) == before - 32 == 96
    assert prefix.stats.blocks == 0


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


def test_dropped_blocks_are_freed_at_once():
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT)
    feed(cache, seq_id, PROMPT, 0, 100)
    cache.clear(seq_id)
    prefix.clear()
    cache.compact()
    before = cache.nbytes
    serve(prefix, cache, PROMPT)
    prefix.clear()
    cache.compact()
    assert cache.nbytes == before


def test_evicted_blocks_are_forgotten():
    """Names of blocks that are long gone take no memory."""
    cache, prefix = make(capacity=8 * BLOCK)
    for i in range(200):
        serve(prefix, cache, [1000 * i + j for j in range(100)])
        if i == 99:
            before = cache.nbytes
    assert cache.nbytes <= before + 1024
    assert serve(prefix, cache, [1000 * 199 + j for j in range(100)]) == 99


@pytest.mark.parametrize("num_common", [10, 16, 20])
def test_an_evicted_block_hides_no_other(num_common):
    """Of blocks that begin alike, one that is there is found beside one that has more in common, and was evicted."""
    cache, prefix = make(capacity=6 * BLOCK)
    prompt = [*PROMPT[:num_common], *[-1] * BLOCK]
    serve(prefix, cache, prompt)
    serve(prefix, cache, PROMPT[:8] + [-2] * 8)
    seq_id, matched = prefix.acquire(PROMPT[:8] + [-2] * 3)
    assert matched == 10
    cache.clear(seq_id)
    serve(prefix, cache, [-3] * 5 * BLOCK)  # in the place of all but the block just used
    assert prefix.acquire(prompt)[1] == 8


# ---- sequences that change while they run


def test_tokens_that_were_taken_back():
    """Rows of tokens that were fed, cut off and fed otherwise are not kept for the others."""
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT)
    feed(cache, seq_id, PROMPT, 0, 100)
    wrong = [*PROMPT, *range(500, 540)]
    feed(cache, seq_id, wrong, 100, 140, 1)
    cache.truncate(130, seq_id=seq_id)
    right = [*wrong[:130], *range(600, 660)]
    feed(cache, seq_id, right, 130, 190, 1)
    prefix.release(seq_id, right)
    for tokens, matched in ((wrong, 130), (right, 189)):
        seq_id, found = prefix.acquire(tokens)
        assert found == matched
        check_rows(cache, seq_id, tokens, found)


@pytest.mark.parametrize("edit", ["remove", "shift", "inject", "copy"])
def test_edits_are_not_kept(edit):
    """Rows that are not what a run of its own computes stay the sequence's own."""
    cache, prefix = make(rope=False)
    seq_id, _ = prefix.acquire(PROMPT[:20])
    feed(cache, seq_id, PROMPT, 0, 20)
    feed(cache, seq_id, PROMPT, 20, 70, 1)
    if edit == "remove":
        cache.remove(30, 40, seq_id=seq_id)
    elif edit == "shift":
        cache.shift(0, None, -3, seq_id=seq_id)
    elif edit == "inject":
        cache.inject(0, 20, *(np.zeros((1, 5, 2), np.float32),) * 2, seq_id=seq_id)
    else:
        feed(cache, 99, [-1] * 70, 0, 70)
        cache.copy_prefix(99, seq_id, 65)
    prefix.release(seq_id, [-9] * cache.next_position(seq_id))
    seq_id, matched = prefix.acquire(PROMPT)
    check_rows(cache, seq_id, PROMPT, matched)
    assert matched <= 20


@pytest.mark.parametrize("edit", ["remove", "shift", "divide"])
def test_what_moved_is_not_kept_under_the_tokens_that_are_left(edit):
    """As after the cut of a long conversation: rows behind it were computed with what is gone in sight."""
    cache, prefix = make(rope=False)
    seq_id, _ = prefix.acquire(PROMPT[:20])
    feed(cache, seq_id, PROMPT, 0, 100)
    if edit == "remove":
        cache.remove(30, 40, seq_id=seq_id)
    elif edit == "shift":
        cache.remove(30, 40, seq_id=seq_id, shift=False)
        cache.shift(40, None, -10, seq_id=seq_id)
    else:
        cache.divide(30, None, 2, seq_id=seq_id)
    left = [*PROMPT[:30], *PROMPT[40:]]
    cache.fork(seq_id, copied := prefix.new_sequence())
    for one in (seq_id, copied):
        prefix.release(one, left)
    seq_id, matched = prefix.acquire([*left, -1])
    assert matched == (16 if edit == "divide" else 30)  # a block that was kept before
    check_rows(cache, seq_id, left, matched)


def test_what_was_taken_off_the_end_may_be_kept():
    cache, prefix = make(rope=False)
    seq_id, _ = prefix.acquire(PROMPT)
    feed(cache, seq_id, PROMPT, 0, 100)
    cache.remove(50, seq_id=seq_id)
    feed(cache, seq_id, [*PROMPT[:50], *[7] * 30], 50, 80)
    prefix.release(seq_id, [*PROMPT[:50], *[7] * 30])
    assert prefix.acquire([*PROMPT[:50], *[7] * 40])[1] == 80


def test_a_restored_sequence_is_what_its_file_holds(tmp_path):
    """And not what was fed before."""
    cache, prefix = make()
    feed(cache, 0, PROMPT, 0, 100)
    cache.save(tmp_path / "state", seq_ids=[0])
    cache.clear(0)
    before = [-1] * 100
    seq_id, _ = prefix.acquire(before[:10])
    feed(cache, seq_id, before, 0, 100)
    cache.restore(tmp_path / "state", seq_id=seq_id, saved_id=0)
    prefix.release(seq_id, PROMPT)
    seq_id, matched = prefix.acquire(PROMPT)
    assert matched == 99
    check_rows(cache, seq_id, PROMPT, matched)


@pytest.mark.parametrize("copy", ["fork", "copy_prefix", "share_range"])
def test_copies_of_inexact_rows_are_not_kept(copy):
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT)
    prefix.note_inexact(seq_id, 40)
    feed(cache, seq_id, [-1] * 100, 0, 100)
    copied = prefix.new_sequence()
    getattr(cache, copy)(seq_id, copied, *{"copy_prefix": [90], "share_range": [0, 90]}.get(copy, []))
    prefix.release(copied, [-1] * 90)
    assert prefix.acquire([-1] * 90)[1] == 40
    cache.copy_prefix(seq_id, copied, 30)
    feed(cache, copied, [-1] * 100, 30, 100)
    prefix.release(copied, [-1] * 100)
    assert prefix.acquire([-1] * 100)[1] == 99, "the inexact ones were not copied"


@pytest.mark.parametrize("how", ["fork", "restore"])
def test_what_replaces_inexact_rows_is_kept(tmp_path, how):
    cache, prefix = make(rope=False)
    feed(cache, 0, PROMPT, 0, 100)
    cache.save(tmp_path / "state", seq_ids=[0])
    seq_id, _ = prefix.acquire(PROMPT)
    feed(cache, seq_id, [-1] * 100, 0, 100)
    cache.remove(30, 40, seq_id=seq_id)
    if how == "fork":
        cache.fork(0, seq_id)
    else:
        cache.restore(tmp_path / "state", seq_id=seq_id, saved_id=0)
    prefix.release(seq_id, PROMPT)
    assert prefix.acquire(PROMPT)[1] == 99


# Ways to change rows of sequence 5 of a cache, from position 30 on or more, so that they do not follow from its tokens.
def shifted(cache):
    cache.remove(30, 40, seq_id=5, shift=False)
    cache.shift(40, None, -10, seq_id=5)


def removed(cache):
    cache.remove(30, 40, seq_id=5)


def injected(cache):
    cache.inject(0, 30, *(np.ones((1, 5, 2), np.float32),) * 2, seq_id=5)


def replaced(cache):
    rows = cache.gather(0, seq_id=5)
    with cache.batch(positions=range(100), seq_ids=[5] * 100, replaced=[0, 1]) as batch:
        for layer in range(2):
            batch.put(layer, *rows, layout="HTD")


CHANGES = [shifted, removed, injected, replaced]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_before_there_is_a_prefix_cache(change):
    """They are no secret: the cache knows which rows follow from a sequence's tokens alone."""
    cache = make_cache(rope=False)
    feed(cache, 5, PROMPT, 0, 100)
    change(cache)
    prefix = kvcache.PrefixCache(cache, fingerprint="a model")
    prefix.release(5, PROMPT)
    assert prefix.acquire(PROMPT)[1] <= 30


@pytest.mark.parametrize("change", CHANGES)
def test_changed_rows_are_not_kept(change):
    cache, prefix = make(rope=False)
    seq_id, _ = prefix.acquire([-1] * 100)
    cache.clear(seq_id)
    feed(cache, 5, PROMPT, 0, 100)
    change(cache)
    prefix.release(5, PROMPT)
    assert prefix.acquire(PROMPT)[1] <= 30


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", ["restore", "load", "copy"])
def test_states_and_copies_of_changed_rows_are_not_kept(tmp_path, how, change):
    cache, prefix = make(rope=False)
    feed(cache, 5, PROMPT, 0, 100)
    change(cache)
    cache.save(tmp_path / "state")
    if how == "copy":
        cache = copy.copy(cache)
    elif how == "load":
        cache = kvcache.KVCache.load(tmp_path / "state")
    else:
        cache.clear()
        cache.restore(tmp_path / "state")
    prefix = kvcache.PrefixCache(cache, fingerprint="a model")
    prefix.release(5, PROMPT)
    assert prefix.acquire(PROMPT)[1] <= 30


@pytest.mark.parametrize("positions", [[*range(30), *range(31, 101)], [*range(30), *range(29, 99)]])
def test_tokens_with_a_gap_or_twice_at_a_position_are_not_kept(positions):
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT)
    with cache.batch(positions=positions, seq_ids=[seq_id] * 100) as batch:
        for layer in range(2):
            batch.put(layer, *[rows_of(PROMPT, 0, 100, layer)] * 2)
    assert prefix.acquire(PROMPT)[1] <= 30
    prefix.release(seq_id, PROMPT)
    assert prefix.acquire(PROMPT)[1] <= 30


def test_tokens_that_saw_others_which_were_not_kept():
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT)
    with cache.batch(positions=[*range(30), *range(29, 99)], seq_ids=[seq_id] * 100) as batch:
        for layer in range(2):
            batch.put(layer, *[rows_of(PROMPT, 0, 100, layer)] * 2)
        batch.commit([*range(29), *range(30, 100)])
    prefix.release(seq_id, PROMPT)
    assert prefix.acquire(PROMPT)[1] == 29


def test_marks_of_a_sequence_that_holds_nothing_yet():
    """They hold for what is fed to it, also if its first batch is aborted, and end with it."""
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT)
    prefix.note_inexact(seq_id, 40)
    cache.batch(3, seq_ids=[seq_id] * 3).abort()
    feed(cache, seq_id, PROMPT, 0, 100)
    prefix.release(seq_id, PROMPT)
    assert prefix.acquire(PROMPT)[1] == 40
    cache.clear()
    prefix.clear()
    seq_id, _ = prefix.acquire(PROMPT)
    prefix.note_inexact(seq_id, 40)
    cache.clear(seq_id)
    feed(cache, seq_id, PROMPT, 0, 100)
    prefix.release(seq_id, PROMPT)
    assert prefix.acquire(PROMPT)[1] == 99


def test_layers_that_are_restored_are_not_kept():
    """Whoever restores them says what they are, and the cache cannot know."""
    policy = [kvcache.FullAttention(), kvcache.SlidingWindow(200)]
    cache = kvcache.KVCache(2, 1, 2, None, policy=policy, max_sequences=None, block_size=BLOCK, rope=False)
    prefix = kvcache.PrefixCache(cache, fingerprint="a model")
    feed(cache, 5, PROMPT, 0, 100)
    cache.remove(30, 40, seq_id=5)
    rows = cache.gather(0, seq_id=5)
    with cache.batch(positions=range(90), seq_ids=[5] * 90, replaced=[0]) as batch:
        batch.put(0, *rows, layout="HTD")
    left = [*PROMPT[:30], *PROMPT[40:]]
    prefix.release(5, left)
    assert prefix.acquire(left)[1] == 0


def test_a_sequence_that_another_prefix_cache_acquired():
    """It ends for both."""
    cache, prefix = make()
    other = kvcache.PrefixCache(cache, fingerprint="another model")
    seq_id, _ = prefix.acquire(PROMPT[:10])
    feed(cache, seq_id, PROMPT, 0, 100)
    other.release(seq_id, PROMPT)
    assert prefix.stats.sequences == 0
    assert other.acquire(PROMPT)[1] == 99
    other.clear()
    prefix.clear()
    assert cache.stats()["retained"] == 0


def test_a_sequence_that_nobody_acquired():
    """Any sequence can be released: what of its windows is there then is kept."""
    cache, prefix = make("hybrid")
    feed(cache, 5, PROMPT, 0, 100, 1)
    prefix.release(5, PROMPT)
    assert cache.sequences == []
    assert prefix.acquire(PROMPT)[1] in range(96, 100)
    assert prefix.acquire([*PROMPT[:50], -1])[1] == 0  # of the windows there, nothing is left


def test_fewer_and_more_tokens_than_were_fed():
    cache, prefix = make()
    feed(cache, 5, PROMPT, 0, 50)
    prefix.release(5, PROMPT)
    assert prefix.acquire(PROMPT)[1] == 50
    feed(cache, 6, [-1] * 50, 0, 50)
    prefix.release(6, [-1] * 20)
    assert prefix.acquire([-1] * 50)[1] == 20


def test_speculated_tokens():
    """Of a tree of guesses, what was kept counts."""
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT[:30])
    feed(cache, seq_id, PROMPT, 0, 30)
    for begin in range(30, 90, 2):  # two right tokens, and a wrong one
        with cache.batch(positions=[begin, begin, begin + 1], seq_ids=[seq_id] * 3, parents=[-1, -1, 1]) as batch:
            for layer in range(2):
                good = rows_of(PROMPT, begin, begin + 2, layer)
                rows = np.concatenate([good[:1] * 0, good])
                batch.put(layer, rows, rows)
            batch.commit(keep=[1, 2])
    prefix.release(seq_id, PROMPT[:90])
    seq_id, matched = prefix.acquire(PROMPT)
    assert matched == 90
    check_rows(cache, seq_id, PROMPT, 90)


# ---- chunks from elsewhere


def test_reuse():
    """Tokens behind the match that stand elsewhere are moved there, and nothing of that is kept."""
    cache, prefix = make(reuse_min_tokens=20, rope=False)
    serve(prefix, cache, PROMPT)
    prompt = [*PROMPT[:30], *PROMPT[45:90], -1]
    seq_id, matched = prefix.acquire(prompt)
    assert matched == 75
    assert cache.positions(seq_id=seq_id).tolist() == [*range(75)]
    assert prefix.stats.reused == 45
    feed(cache, seq_id, prompt, 75, 76)
    prefix.release(seq_id, prompt)
    cache.validate()
    assert prefix.acquire([*prompt, -2])[1] == 75  # found anew, not kept
    assert prefix.stats.reused == 90
    assert prefix.acquire([*PROMPT[:30], *PROMPT[45:60], -1])[1] == 30  # too few


def test_no_reuse():
    """Not unless it is asked for."""
    cache, prefix = make(rope=False)
    serve(prefix, cache, PROMPT)
    assert prefix.acquire([*PROMPT[:30], *PROMPT[45:90], -1])[1] == 30


@pytest.mark.parametrize(("rope", "layer"), [(None, 0), ([False, None], 1)])
def test_no_reuse_of_keys_that_cannot_be_moved(rope, layer):
    cache = make_cache(rope=rope)
    with pytest.raises(kvcache.NotSupportedError, match=rf"reuse_min_tokens .* layer {layer} .* with rope="):
        kvcache.PrefixCache(cache, fingerprint="a model", reuse_min_tokens=20)
    with pytest.raises(kvcache.NotSupportedError, match=f"layer {layer}"):
        cache.shift(0, None, 1, seq_id=1)  # of the same layer
    assert kvcache.PrefixCache(cache, fingerprint="a model").acquire(PROMPT)[1] == 0


def test_reuse_with_a_layer_that_stores_nothing():
    cache = kvcache.KVCache(
        2, 1, 2, None, policy=[kvcache.FullAttention(), None], rope=[False, None], max_sequences=None, block_size=BLOCK
    )
    kvcache.PrefixCache(cache, fingerprint="a model", reuse_min_tokens=20)


def test_a_chunk_behind_tokens_that_match_nothing():
    """These have to be fed first, and so has what follows them; the other way round it matches."""
    cache, prefix = make(reuse_min_tokens=20, rope=False)
    system, document = PROMPT[:30], list(range(500, 580))
    serve(prefix, cache, [*system, -1, -2, *document])
    seq_id, matched = prefix.acquire([*system, -3, *document, -4])
    assert matched == 30
    cache.clear(seq_id)
    assert prefix.acquire([*system, *document, -3])[1] == 110


def test_no_more_of_a_chunk_than_that():
    cache, prefix = make(reuse_min_tokens=20, rope=False)
    serve(prefix, cache, PROMPT)
    for most in range(50, 75):
        seq_id, matched = prefix.acquire([*PROMPT[:30], *PROMPT[45:90], -1], max_matched=most)
        assert matched == most
        assert cache.positions(seq_id=seq_id).tolist() == [*range(most)]
        cache.clear(seq_id)


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


def test_refused():
    cache, prefix = make()
    with pytest.raises(ValueError, match="tokens is empty"):
        prefix.acquire([])
    text = memoryview(b"text")
    for wrong in ([1, 2.5], ["a"], np.ones((2, 2), int), np.ones(3), text.cast("c"), text.cast("B", (2, 2))):
        with pytest.raises(TypeError, match="token"):
            prefix.acquire(wrong)
    for wrong in (None, 5, "ROMEO:", {1, 2}, {1: 2}, iter([1])):
        for call in (prefix.acquire, prefix.pin, prefix.unpin, lambda tokens: prefix.release(0, tokens)):
            with pytest.raises(TypeError, match=rf"tokens is a {type(wrong).__name__}: a sequence of integers"):
                call(wrong)
    with pytest.raises(TypeError, match="where bytes are tokens, encode it"):
        prefix.acquire("ROMEO:")
    with pytest.raises(TypeError, match="fingerprint=None"):
        kvcache.PrefixCache(cache, fingerprint=None)
    with pytest.raises(ValueError, match="fingerprint is empty: name what computes"):
        kvcache.PrefixCache(cache, fingerprint="")
    for wrong in ("1", None, b"1", [1], True):
        with pytest.raises(TypeError, match=r"timeout=.*: a number is needed, not"):
            kvcache.PrefixCache(cache, fingerprint="a model", timeout=wrong)
    with pytest.raises(TypeError, match="salt is a int"):
        kvcache.PrefixCache(cache, fingerprint="a model", salt=5)
    with pytest.raises(TypeError, match="cache is a dict"):
        kvcache.PrefixCache({}, fingerprint="a model")
    for name, value in (("timeout", -1), ("timeout", math.nan), ("reuse_min_tokens", 0), ("secret", b"x")):
        with pytest.raises(ValueError, match=name):
            kvcache.PrefixCache(cache, fingerprint="a model", **{name: value})
    with pytest.raises(ValueError, match=r"block_size is 4096.*block_size=64"):
        kvcache.PrefixCache(make_cache(block_size=4096), fingerprint="a model")
    for one in (kvcache.KVCache(2, 1, 8, 128), kvcache.KVCache(2, 1, 8, None), make_cache(max_sequences=1)):
        with pytest.raises(ValueError, match=r"max_sequences is 1, .*: make it with max_sequences=None"):
            kvcache.PrefixCache(one, fingerprint="a model")
    with pytest.raises(ValueError, match="LongSequencesOnly"):
        kvcache.PrefixCache(make_cache(strategy=kvcache.LongSequencesOnly(9)), fingerprint="a model")
    with pytest.raises(kvcache.NotSupportedError, match="CrossAttention"):
        kvcache.PrefixCache(kvcache.KVCache(1, 1, 2, 9, policy=kvcache.CrossAttention(9)), fingerprint="a model")


def test_refused_by_a_call():
    """What a call refuses is named, and changes nothing."""
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT)
    feed(cache, seq_id, PROMPT, 0, 100)
    for wrong in ("x", None, 1.5):
        for name, call in {
            "seq_id": lambda wrong: prefix.release(wrong, PROMPT),
            "max_matched": lambda wrong: prefix.acquire(PROMPT, max_matched=wrong),
            "num_tokens": prefix.evict,
            "position": lambda wrong: prefix.note_inexact(seq_id, wrong),
        }.items():
            if (name, wrong) != ("max_matched", None):
                with pytest.raises(TypeError, match=rf"{name}={wrong!r}: an integer is needed"):
                    call(wrong)
        with pytest.raises(TypeError, match=rf"seq_id={wrong!r}: an integer is needed"):
            prefix.note_inexact(wrong, 3)
    for call in (prefix.flush, prefix.close):
        for wrong in ("a", None):
            with pytest.raises(TypeError, match=rf"timeout={wrong!r}: a number is needed"):
                call(wrong)
        for wrong in (-1, math.nan):
            with pytest.raises(ValueError, match=rf"timeout={wrong!r}: must be a number of seconds of at least 0"):
                call(wrong)
    for call in (
        lambda: prefix.note_inexact(seq_id, -3),
        lambda: prefix.note_inexact(999, -3),
        lambda: prefix.evict(-1),
    ):
        with pytest.raises(ValueError, match=r"(position|num_tokens)=-\d: must be at least 0"):
            call()
    prefix.release(seq_id, PROMPT)
    assert prefix.acquire(PROMPT)[1] == 99


def test_ending_a_sequence_twice():
    """As in a ``finally``, where it is not known whether the sequence has ended."""
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


def test_release_while_it_is_in_a_batch():
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT)
    feed(cache, seq_id, PROMPT, 0, 100)
    with cache.batch(positions=[100], seq_ids=[seq_id]) as batch:
        with pytest.raises(kvcache.CacheBusyError):
            prefix.release(seq_id, PROMPT)
        batch.abort()
    prefix.release(seq_id, PROMPT)
    assert prefix.acquire(PROMPT)[1] == 99


def test_an_id_in_the_open_batch_is_not_given_out():
    """A sequence that began in the open batch holds nothing yet, but is somebody's."""
    cache, prefix = make()
    rows = rows_of(PROMPT, 0, 8, 0)
    with cache.batch(positions=[*range(4)] * 2, seq_ids=[0] * 4 + [2] * 4) as batch:
        seq_id, matched = prefix.acquire(PROMPT)
        assert (seq_id, matched, prefix.new_sequence()) == (1, 0, 3)
        for layer in range(cache.num_layers):
            batch.put(layer, rows, rows)
    assert cache.sequences == [0, 2]
    feed(cache, seq_id, PROMPT, 0, 100)
    prefix.release(seq_id, PROMPT)
    assert prefix.acquire(PROMPT)[1] == 99


def test_an_id_may_be_any_integer():
    """What is kept has no id that could be one of a sequence."""
    cache, prefix = make()
    ids = [1 << 62, -(1 << 63), (1 << 63) - 1]
    for seq_id in ids:
        feed(cache, seq_id, PROMPT, 0, 40)
    assert serve(prefix, cache, PROMPT) == 0
    assert serve(prefix, cache, PROMPT) == 99
    for seq_id in ids:
        check_rows(cache, seq_id, PROMPT, 40)
        prefix.release(seq_id, PROMPT)


def test_a_copy_has_no_prefix_cache():
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT)
    feed(cache, seq_id, PROMPT, 0, 50)
    other = copy.copy(cache)
    feed(other, seq_id, PROMPT, 50, 100)
    assert prefix.acquire(PROMPT)[1] == 48
    other.validate()
    assert (other.stats()["retained"], other.stats()["live_slots"]) == (0, 100)
    assert kvcache.PrefixCache(other, fingerprint="a model").acquire(PROMPT)[1] == 0


def test_a_batch_that_cannot_be_committed():
    """Rows of a batch that failed, or was aborted, are not kept."""
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT[:60])
    feed(cache, seq_id, PROMPT, 0, 20)
    batch = cache.batch(positions=range(20, 60), seq_ids=[seq_id] * 40)
    rows = rows_of(PROMPT, 20, 60, 0)
    batch.put(0, rows, rows)
    with pytest.raises(ValueError, match="layer 1"):
        batch.commit()
    assert prefix.acquire(PROMPT)[1] == 16
    assert cache.stats()["retained"] == 1
    rows = rows_of(PROMPT, 20, 60, 1)
    batch.put(1, rows, rows)
    batch.commit()
    batch.commit()
    assert prefix.acquire(PROMPT)[1] == 48
    with pytest.raises(KeyError), cache.batch(positions=range(60, 90), seq_ids=[seq_id] * 30):
        raise KeyError
    feed(cache, seq_id, [*PROMPT[:60], *[7] * 30], 60, 90)
    prefix.release(seq_id, [*PROMPT[:60], *[7] * 30])
    for tokens, matched in ((PROMPT, 60), ([*PROMPT[:60], *[7] * 40], 90)):
        seq_id, found = prefix.acquire(tokens)
        assert found == matched
        check_rows(cache, seq_id, tokens, found)
    cache.validate()


def test_a_batch_that_fails_takes_no_blocks_of_others_with_it():
    cache, prefix = make()
    serve(prefix, cache, PROMPT)
    prefix.pin(PROMPT)
    seq_id, _ = prefix.acquire(PROMPT, max_matched=0)
    with pytest.raises(ValueError, match="was not put"), cache.batch(positions=range(100), seq_ids=[seq_id] * 100):
        pass
    assert prefix.acquire(PROMPT)[1] == 99
    cache.validate()


def test_a_batch_that_fails_leaves_the_beginning_of_its_block():
    cache, prefix = make()
    serve(prefix, cache, PROMPT[:11])
    seq_id, matched = prefix.acquire(PROMPT)
    with pytest.raises(ValueError, match="was not put"), cache.batch(positions=range(11, 40), seq_ids=[seq_id] * 29):
        pass
    assert matched == prefix.acquire(PROMPT)[1] == 11
    feed(cache, seq_id, PROMPT, 11, 40)
    assert prefix.stats.blocks == 2  # of the full blocks, the first of which has taken the place of the beginning
    cache.validate()


def test_the_speed_of_prompts(monkeypatch):
    """Neither steps of many sequences at once nor waiting for another's batch count."""
    cache, _ = make()
    prefix = kvcache.PrefixCache(cache, fingerprint="a model", store={})
    feed(cache, 0, PROMPT, 0, 100)
    rate = prefix._watch.tokens_per_second
    assert rate > 0
    for position in range(100, 105):
        with cache.batch(positions=[position] * 32, seq_ids=range(32)) as batch:
            for layer in range(2):
                batch.put(layer, *(np.zeros((32, 1, 2), np.float32),) * 2)
    assert prefix._watch.tokens_per_second == rate
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    batch = cache.batch(positions=[105], seq_ids=[0])
    waiting = threading.Thread(target=feed, args=(cache, 99, PROMPT, 0, 100))
    waiting.start()
    time.sleep(0.2)  # so that it waits
    now = 1000.0
    batch.abort()
    waiting.join()
    assert prefix._watch.tokens_per_second == rate


def test_windows_that_were_evicted_are_kept_anew():
    """Of a block whose window's rows are gone, those that are computed again are kept."""
    cache, prefix = make("hybrid")
    serve(prefix, cache, PROMPT)
    most = cache.nbytes
    cache, prefix = make("hybrid", max_bytes=most + 3000)
    seq_id, _ = prefix.acquire(PROMPT)
    feed(cache, seq_id, PROMPT, 0, 100)
    tokens = [*PROMPT, *[-1] * 400]
    end = 100
    while prefix.lookup([*PROMPT[:40], -2]) == 40:
        feed(cache, seq_id, tokens, end, end + 1)
        end += 1
    cache.clear(seq_id)
    assert serve(prefix, cache, [*PROMPT[:40], -2]) < 40
    assert serve(prefix, cache, [*PROMPT[:40], -3]) == 40


def test_a_child_goes_on():
    """After a fork the child has what the parent had, whatever other threads were at."""
    cache, prefix = make()
    serve(prefix, cache, PROMPT)
    stop = threading.Event()

    def work(number):
        while not stop.is_set():
            serve(prefix, cache, [number, *PROMPT])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if not child:
                os._exit(0 if prefix.acquire(PROMPT)[1] == 99 else 1)  # another thread's batch may be open for ever
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quota": -1}, "quota=-1: must be at least 0"),
        ({"ttl": 0}, "ttl=0: must be a number of seconds above 0"),
        ({"ttl": math.nan}, "ttl=nan: must be a number of seconds above 0"),
        ({"secret": b"x"}, "secret is given without a store"),
    ],
)
def test_what_a_tenant_may_be(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()[1].tenant(b"a", **arguments)


@pytest.mark.parametrize("way", ["fed", "cleared", "evicted"])
def test_windows_have_lost_the_first_blocks(way):
    """What a sequence has left at its end is kept, behind blocks of which nothing is there."""
    cache, prefix = make("windows")
    if way == "fed":
        seq_id = prefix.new_sequence()
    else:
        seq_id, _ = prefix.acquire(PROMPT[:70])
    feed(cache, seq_id, PROMPT, 0, 70)
    if way == "cleared":
        prefix.clear()
    elif way == "evicted":
        prefix.evict(1000)
    feed(cache, seq_id, PROMPT, 70, 90)
    assert cache.can_resume(90, seq_id=seq_id)
    prefix.release(seq_id, PROMPT[:90])
    seq_id, matched = prefix.acquire(PROMPT)
    assert matched == 90
    check_rows(cache, seq_id, PROMPT, 90)
    cache.validate()


def test_what_was_not_fed_may_be_anything():
    cache, prefix = make()
    seq_id, _ = prefix.acquire(PROMPT)
    feed(cache, seq_id, PROMPT, 0, 40)
    prefix.release(seq_id, [*PROMPT[:40], None, "x", 1.5])
    prefix.release(seq_id, [None])
    assert prefix.acquire(PROMPT)[1] == 40


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("tokens", [64, 100, 128, 160, 200, 256])
def test_a_match_keeps_no_prompt_from_fitting(layers, tokens):
    """One that fits an empty cache also fits one in which a part of it is found, wherever the two part."""

    def new(max_bytes=None):
        return kvcache.KVCache(layers, 1, 64, None, max_sequences=None, dtype="f32", max_bytes=max_bytes)

    def put(cache, seq_id, begin):
        x = np.zeros((tokens - begin, 1, 64), np.float32)
        with cache.batch(positions=range(begin, tokens), seq_ids=[seq_id] * (tokens - begin)) as batch:
            for layer in range(layers):
                batch.put(layer, x, x)

    alone = new()
    put(alone, 0, 0)
    for common_tokens in range(5, tokens, 13):
        cache = new(alone.nbytes + 4000)  # bookkeeping on top
        prefix = kvcache.PrefixCache(cache, fingerprint="a model")
        first = list(range(tokens))
        for prompt in (first, first[:common_tokens] + [1000] * (tokens - common_tokens)):
            seq_id, matched = prefix.acquire(prompt)
            put(cache, seq_id, matched)
            prefix.release(seq_id, prompt)
        assert matched == common_tokens
        cache.validate()
