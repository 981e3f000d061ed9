"""Values of a store: an altered value is deleted and counted, and its rows are never seen.

The first byte of an input says which cache, store and secret (`SETTINGS`). Changes to the store follow. Each is a byte
for the key; a byte for what becomes of its value (`CHANGES`); an offset and a length of two bytes each; and as many
bytes. Without a
secret, a value may also be forged, checksum and all: its rows are then seen, if they are rows of this cache at all.
"""

import logging
import struct

import numpy as np
from support import values
from support.faulty_stores import Bulk, Faulty
from support.prefixes import BLOCK, feed, make_cache, serve

import kvcache
from kvcache.stores import worker

LONG = 600  # seconds within which a thread gets its turn
SETTINGS = [
    (kind, store, secret) for secret in (None, b"secret") for store in (Faulty, Bulk)
    for kind in ("full", "hybrid", "windows")
]  # fmt: skip
RECORD = struct.Struct("<BBHH")
PROMPT = list(range(6 * BLOCK + 1))
WORDS = [values.MAGIC.decode()]

logging.getLogger("kvcache").addHandler(logging.NullHandler())
worker.LINGER = 0.01  # or thousands of threads would wait for more to do


def make(setting, items):
    """A cache of its own on a store of these items, as another process would have."""
    kind, make_store, secret = setting
    cache, store = make_cache(kind, dtype="f16"), make_store(items=items)
    return cache, store, kvcache.PrefixCache(
        cache, store=store, fingerprint="a model", secret=secret, timeout=LONG
    )  # fmt: skip


def stored(setting):
    """Return what the store has of the prompt, and the digest by which values are packed."""
    cache, store, prefix = make(setting, {})
    serve(prefix, cache, PROMPT)
    assert prefix.close(LONG)
    return store.items_, values.digest_of(prefix)


RIGHT = {setting: stored(setting) for setting in SETTINGS}

# ---- changes, each from the right value, another right one, and the bytes that the input has at an offset


def over(value, at, new):
    return value[:at] + new + value[at + len(new) :]


def forged(key, digest, payload, at, new):
    return values.pack(key, digest, over(payload, at, new))


CHANGES = [
    lambda value, other, at, new: new,
    lambda value, other, at, new: over(value, at, new),
    lambda value, other, at, new: value[:at],
    lambda value, other, at, new: value + new,
    lambda value, other, at, new: other,
    lambda value, other, at, new: [None, 5, "text", {}, [value], np.frombuffer(value, np.uint8), b""][at % 7],
    lambda value, other, at, new: [bytearray, memoryview][at % 2](value),
    lambda value, other, at, new: over(value, at, bytes(a ^ b for a, b in zip(value[at:], new, strict=False))),
]
FORGED = len(CHANGES)


def seeds():
    for i in range(60):
        yield bytes([i % len(SETTINGS)]) + RECORD.pack(2, i % (FORGED + 2), 40 + i, 4) + b"\1\2\3\4"
    for number in range(len(SETTINGS) // 2):
        yield bytes([number]) + RECORD.pack(1, FORGED + 1, 0, 3) + b"\1\0\1" + RECORD.pack(0, FORGED, 70, 2) + b"ab"


def changed(setting, data):
    """Return the values that the store hands out, and whether any value is forged."""
    right, digest = RIGHT[setting]
    items, keys, is_forged = dict(right), list(right), False
    while len(data) >= RECORD.size:
        which, change, at, length = RECORD.unpack(data[: RECORD.size])
        new, data = data[RECORD.size : RECORD.size + length], data[RECORD.size + length :]
        key, other = keys[which % len(keys)], keys[(which + 1 + at) % len(keys)]
        change %= FORGED + 2
        if change < FORGED:
            items[key] = CHANGES[change](right[key], right[other], at, new)
        elif setting[2] is None:
            payload = right[key][values.HEADER_SIZE :] if change == FORGED else b""
            items[key], is_forged = forged(key, digest, payload, at, new), True
    return items, is_forged


def is_right(value, right):
    return isinstance(value, bytes | bytearray | memoryview) and bytes(value) == right


def can_be_value(value, most):
    return isinstance(value, bytes | bytearray | memoryview) and 0 < len(value) <= most


def run(data):
    setting = SETTINGS[data[0] % len(SETTINGS)] if data else SETTINGS[0]
    right, _ = RIGHT[setting]
    items, is_forged = changed(setting, data[1:])
    cache, store, prefix = make(setting, items)
    if is_forged:
        check_forged(cache, prefix)
        return
    assert serve(prefix, cache, PROMPT) <= len(PROMPT)  # compares every row
    assert prefix.flush(LONG)
    assert store.items_ == right  # what was wrong was deleted, and written anew
    # The client refuses what can be no value, as far as it reads.  The core refuses the first value that is wrong.
    most = prefix._client._tenant.most_bytes
    no_values = [key for key in right if not can_be_value(items[key], most)]
    if setting[1] is Faulty:  # keys are read up to the first that is missing
        no_values = no_values[:1]
    wrong = {key for key in no_values if items[key] is not None}
    first = [key for key in right if not is_right(items[key], right[key])][:1]
    wrong.update(key for key in first if items[key] is not None)
    stats = prefix.stats.store
    assert (stats.corrupt, stats.errors) == (len(wrong), 0)
    assert {key for verb, key in store.calls if verb == "delete"} == {*wrong}
    end(cache, prefix)


def check_forged(cache, prefix):
    """Rows that are no rows of this cache are refused; whatever others say, the cache is whole."""
    seq_id, matched = prefix.acquire(PROMPT)
    assert matched % BLOCK == 0
    assert cache.can_resume(matched, seq_id=seq_id)
    cache.validate()
    feed(cache, seq_id, PROMPT, matched, len(PROMPT))
    q = np.ones((1, 1, 2), np.float32)
    with cache.batch(positions=[len(PROMPT)], seq_ids=[seq_id]) as batch:
        for layer in range(cache.num_layers):
            assert batch.attend(layer, q, q, q).shape == q.shape
    prefix.release(seq_id, [*PROMPT, 0])
    cache.validate()
    end(cache, prefix)


def end(cache, prefix):
    prefix.close(LONG)
    cache.close()
