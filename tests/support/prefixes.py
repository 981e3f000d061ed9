"""A runner whose rows follow from the tokens before them, so that a row of another prompt is told from one's own."""

import zlib

import numpy as np

import kvcache

POLICIES = {
    "full": [kvcache.FullAttention()] * 2,
    "hybrid": [kvcache.FullAttention(), kvcache.SlidingWindow(20, num_sink_tokens=3), kvcache.ChunkedAttention(32)],
    "windows": [kvcache.SlidingWindow(24), kvcache.SlidingWindow(17, resume_window=40)],
}
BLOCK = 16


def make_cache(kind="full", **arguments):
    policy = POLICIES[kind]
    arguments = {"max_sequences": None, "block_size": BLOCK, "dtype": "f32", **arguments}
    return kvcache.KVCache(len(policy), 1, 2, None, policy=policy, **arguments)


def rows_of(tokens, begin, end, layer):
    """Return the rows of tokens [begin, end): of each, a checksum of all tokens up to it."""
    values, crc = [], zlib.crc32(bytes([layer]))
    for token in tokens[:end]:
        data = token if isinstance(token, bytes) else str(token).encode() + b","
        crc = zlib.crc32(data, crc)
        values.append(crc & 0x7FF)  # an integer that f16 holds
    return np.repeat(np.array(values[begin:], np.float32)[:, None, None], 2, axis=2)


def feed(cache, seq_id, tokens, begin, end, step=None):
    """Feed tokens [begin, end) of a prompt, `step` at a time."""
    while begin < end:
        stop = min(end, begin + (step or end - begin))
        with cache.batch(positions=range(begin, stop), seq_ids=[seq_id] * (stop - begin), timeout=None) as batch:
            for layer in range(cache.num_layers):
                rows = rows_of(tokens, begin, stop, layer)
                batch.put(layer, rows, rows)
        begin = stop


def sees(policy, query, position):
    """Whether a query at one position sees a row at another below it."""
    if isinstance(policy, kvcache.SlidingWindow):
        return position > query - policy.window or position < policy.num_sink_tokens
    if isinstance(policy, kvcache.ChunkedAttention):
        return position // policy.attention_chunk_size == query // policy.attention_chunk_size
    return True


def check_rows(cache, seq_id, tokens, length):
    """Check that a sequence has, of the first `length` tokens, the rows that a query there sees, and no other rows."""
    assert cache.next_position(seq_id) == length
    assert cache.can_resume(length, seq_id=seq_id)
    for layer, policy in enumerate(like.policy for like in cache.layers):
        positions = cache.positions(seq_id=seq_id, layer=layer)
        assert {*range(length)} - {*positions} <= {p for p in range(length) if not sees(policy, length, p)}
        assert len(set(positions.tolist())) == len(positions)
        assert max(positions, default=-1) < max(length, 0)
        k, v = cache.gather(layer, seq_id=seq_id, dtype="f32")
        wanted = rows_of(tokens, 0, length, layer)[positions, 0]
        assert np.array_equal(k[0], wanted)
        assert np.array_equal(v[0], wanted)


def serve(prefix, cache, prompt, generated=(), step=1):
    """Serve a request, and return how many tokens were matched."""
    seq_id, matched = prefix.acquire(prompt)
    tokens = [*prompt, *generated]
    check_rows(cache, seq_id, tokens, matched)
    feed(cache, seq_id, tokens, matched, len(prompt))
    feed(cache, seq_id, tokens, len(prompt), len(tokens), step)
    check_rows(cache, seq_id, tokens, len(tokens))
    prefix.release(seq_id, tokens)
    return matched
