"""Measure how costs grow with what is stored, as exponents: 0 for a constant cost, 1 for one proportional to size."""

import copy
import math

import numpy as np
import pytest

import kvcache
from kvcache.tools.interleave import timed

DIM, BLOCK = 8, 16  # few elements and tokens, because bookkeeping is measured
OWN, OTHER = 1 << 20, (1 << 20) + 1  # the sequence that is read, and one that shares its rows
LONG = 8 * BLOCK  # its tokens


@pytest.fixture
def slope(figures, interleave):
    """Return a function that measures sizes interleaved, and adds a line for the exponent from first to last."""

    def add(name, sizes, measure, wanted="<= 1.2", seconds=0.5):
        found = interleave(*[lambda size=size: measure(size) for size in sizes], seconds=seconds, least=3)
        octaves = math.log(sizes[-1] / sizes[0])
        exponents = [math.log(last / first) / octaves for first, last in zip(found[0], found[-1], strict=True)]
        each = ", ".join(f"{1e6 * np.median(one):,.1f}" for one in found)
        note = f"{each} µs at {', '.join(f'{size:,}' for size in sizes)}"
        figures.samples(f"{name}: exponent", exponents, "", wanted, note)

    return add


def holding(num_layers=1, **options):
    defaults = {"max_sequences": None, "num_threads": 1, "block_size": BLOCK}
    return kvcache.KVCache(num_layers, 1, DIM, None, **defaults | options)


def open_batch(cache, positions, seq_ids):
    """Begin a batch, and put its rows."""
    rows = np.ones((len(positions), 1, DIM), np.float32)
    batch = cache.batch(positions=positions, seq_ids=seq_ids)
    for layer in range(cache.num_layers):
        batch.put(layer, rows, rows)
    return batch


def feed(cache, positions, seq_id):
    open_batch(cache, positions, [seq_id] * len(positions)).commit()


# ---- calls beside what others store


class Beside:
    """A cache with a sequence that is read, beside so many kept blocks, each a prompt of its own, or as many runs."""

    def __init__(self, kind, num_blocks, **limits):
        self.cache = holding(
            2, policy=[kvcache.FullAttention(), kvcache.SlidingWindow(2 * BLOCK, resume_window=4 * BLOCK)], **limits
        )
        self.prefix = kvcache.PrefixCache(self.cache, fingerprint="any", state_bytes=8, max_events=16)
        self.next, self.num_blocks, self.kind = 0, num_blocks, kind
        for _ in range(num_blocks):
            tokens = self.new_tokens()
            seq_id, _ = self.prefix.acquire(tokens)
            feed(self.cache, range(BLOCK), seq_id)
            if kind != "running":
                self.prefix.release(seq_id, tokens)
        feed(self.cache, range(LONG), OWN)

    def new_tokens(self):
        self.next += BLOCK
        return range(self.next - BLOCK, self.next)


def beside(kind, num_blocks):
    """Make the cache; under max_bytes it is full of kept blocks."""
    if kind != "max_bytes":
        return Beside(kind, num_blocks)
    return Beside(kind, num_blocks, max_bytes=Beside(kind, num_blocks).cache.nbytes)


def edit(call):
    """Time an edit of a sequence that shares all rows of another."""

    def run(s):
        s.cache.fork(OWN, OTHER)
        seconds, _ = timed(call, s.cache)
        s.cache.clear(OTHER)
        return seconds

    return run


def read(call):
    return lambda s: timed(call, s.cache)[0]


def share(call):
    def run(s):
        seconds, _ = timed(call, s.cache)
        s.cache.clear(OTHER)
        return seconds

    return run


def request(step):
    """Time one step of a prompt that nobody has had."""

    def run(s):
        found, tokens = {}, s.new_tokens()
        found["acquire"], (seq_id, _) = timed(s.prefix.acquire, tokens)
        found["begin"], batch = timed(s.cache.batch, positions=range(BLOCK), seq_ids=[seq_id] * BLOCK)
        rows = np.ones((BLOCK, 1, DIM), np.float32)
        for layer in range(2):
            batch.put(layer, rows, rows)
        found["commit"], _ = timed(batch.commit)
        found["checkpoint"], _ = timed(s.prefix.checkpoint, seq_id, tokens, bytes(8))
        found["release"], _ = timed(s.prefix.release, seq_id, tokens)
        found["take_events"], _ = timed(s.prefix.take_events)
        found["lookup"], _ = timed(s.prefix.lookup, tokens)
        found["pin"], _ = timed(s.prefix.pin, tokens)
        found["unpin"], _ = timed(s.prefix.unpin, tokens)
        found["forget"], _ = timed(s.prefix.forget, tokens)
        return found[step]

    return run


def in_batch(call):
    """Time a call on an open batch of one token."""

    def run(s):
        batch = open_batch(s.cache, [LONG], [OWN])
        seconds, _ = timed(call, batch)
        batch.abort()
        return seconds

    return run


ROW, BLOCK_OF_ROWS = np.ones((1, 1, DIM), np.float32), np.ones((1, BLOCK, DIM), np.float32)
STEPS = "acquire", "begin", "commit", "checkpoint", "release", "take_events", "lookup", "pin", "unpin", "forget"
CALLS = {
    "seq_len": read(lambda c: c.seq_len(OWN)),
    "next_position": read(lambda c: c.next_position(OWN)),
    "can_resume": read(lambda c: c.can_resume(LONG, seq_id=OWN)),
    "positions": read(lambda c: c.positions(seq_id=OWN)),
    "nbytes": read(lambda c: c.nbytes),
    "stats": read(lambda c: c.stats()),
    "utilization": read(lambda c: c.utilization),
    "room": read(lambda c: c.room(OWN)),
    "reserve": read(lambda c: c.reserve(1, seq_id=OWN)),
    "spans": read(lambda c: c.spans(0, seq_id=OWN)),
    "gather": read(lambda c: c.gather(0, seq_id=OWN)),
    "extract": read(lambda c: c.extract(0, 0, LONG, seq_id=OWN)),
    "fork": share(lambda c: c.fork(OWN, OTHER)),
    "copy_prefix": share(lambda c: c.copy_prefix(OWN, OTHER, LONG)),
    "share_range": share(lambda c: c.share_range(OWN, OTHER)),
    "clear": edit(lambda c: c.clear(OTHER)),
    "remove": edit(lambda c: c.remove(4, 8, seq_id=OTHER, shift=False)),
    "keep_positions": edit(lambda c: c.keep_positions([0, 2, 4, LONG - 1], seq_id=OTHER)),
    "truncate": edit(lambda c: c.truncate(LONG - 1, seq_id=OTHER)),
    "inject": edit(lambda c: c.inject(0, 0, BLOCK_OF_ROWS, BLOCK_OF_ROWS, seq_id=OTHER)),
    "attend": in_batch(lambda b: b.attend(0, ROW)),
    "dense": in_batch(lambda b: b.dense(0)),
    "abort": in_batch(lambda b: b.abort()),
    **{f"{step} of a prompt": request(step) for step in STEPS},
}


@pytest.mark.parametrize("kind", ["unlimited", "max_bytes", "running"])
def test_calls_beside_what_others_store(slope, kind):
    scenes = {size: beside(kind, size) for size in (500, 10_000)}
    for name, call in CALLS.items():
        slope(f"{name} beside blocks, {kind}", [*scenes], lambda size, call=call: call(scenes[size]), "0", 0.05)


# ---- calls about so many blocks, rows or sequences


def one_by_one(size):
    """Feed each sequence a token, in a batch of its own."""
    cache = holding(policy=kvcache.SlidingWindow(64))
    return timed(lambda: [feed(cache, [0], seq_id) for seq_id in range(size)])[0]


def divided(size):
    """Inject rows at all positions of a cache that has two rows at each position."""
    cache = kvcache.KVCache(1, 1, DIM, size, rope=False, num_threads=1)
    feed(cache, range(size), 0)
    cache.divide(0, size, 2)
    rows = np.ones((1, size // 2, DIM), np.float32)
    return timed(cache.inject, 0, 0, rows, rows)[0]


def every_second(size):
    cache = holding(2, dtype="f16", block_size=64)
    feed(cache, range(size), 0)
    return timed(cache.keep_positions, np.arange(1, size, 2))[0]


def crossed(size):
    """Put the encoder's rows of each sequence of a batch one by one."""
    batch = holding(policy=kvcache.CrossAttention(4)).batch(positions=[0] * size, seq_ids=range(size))
    seconds, _ = timed(lambda: [batch.put(0, ROW, ROW, seq_id=seq_id) for seq_id in range(size)])
    batch.abort()
    return seconds


def dense(size):
    """Make dense rows for each sequence by itself."""
    batch = open_batch(holding(), [0] * size, range(size))
    seconds, _ = timed(batch.dense, 0, layout="BHTD")
    batch.abort()
    return seconds


def whole_prompt(size, call):
    """Commit a prompt, whose blocks a prefix keeps, or end its sequence."""
    cache, prompt = holding(), range(BLOCK * size)
    prefix = kvcache.PrefixCache(cache, fingerprint="any")
    seq_id, _ = prefix.acquire([*prompt, 0])
    committing, _ = timed(open_batch(cache, prompt, [seq_id] * len(prompt)).commit)
    clearing, _ = timed(cache.clear, seq_id)
    return committing if call == "commit" else clearing


def fetched(size, quota):
    """Acquire a prompt whose blocks are in a store, and in no cache."""
    store, prompt = {}, range(BLOCK * size)
    for is_known in (False, True):
        cache = holding()
        prefix = kvcache.PrefixCache(cache, fingerprint="any", store=store, timeout=60, quota=quota)
        seconds, (seq_id, matched) = timed(prefix.acquire, [*prompt, 0])
        assert matched == is_known * len(prompt)
        feed(cache, [len(prompt)] if is_known else prompt, seq_id)
        assert prefix.close(60)
    return seconds


def moved(size):
    """Acquire a prompt that goes on as another one does, at other positions."""
    cache = holding(rope=kvcache.Rope(np.ones(DIM // 2)))
    prefix = kvcache.PrefixCache(cache, fingerprint="any", reuse_min_tokens=BLOCK)
    prompt, first = [*range(BLOCK * size)], [-1] * BLOCK
    for tokens in (prompt, first):
        seq_id, _ = prefix.acquire([*tokens, 0])
        feed(cache, range(len(tokens)), seq_id)
        prefix.release(seq_id, tokens)
    seconds, (_, matched) = timed(prefix.acquire, [*first, *prompt[1:], 0])
    assert matched == BLOCK * (size + 1) - 1
    return seconds


def lacking(size):
    """Look up a prompt with a state behind each block, of which windows have lost the rows."""
    cache = holding(2, policy=[kvcache.FullAttention(), kvcache.SlidingWindow(3)])
    prefix = kvcache.PrefixCache(cache, fingerprint="any", state_bytes=1)
    prompt = [*range(BLOCK * size)]
    for end in range(5, len(prompt), BLOCK):
        feed(cache, range(max(0, end - BLOCK), end), 0)
        prefix.checkpoint(0, prompt[:end])
    for end in range(BLOCK, len(prompt) - 11, BLOCK):
        prefix.checkpoint(0, prompt[:end], b"0")
    seconds, found = timed(prefix.lookup, prompt[:-11])
    assert not found
    return seconds


def cleared(size):
    """Clear a prefix while so many sequences go on from the end of a prompt of so many blocks."""
    cache, prompt = holding(block_size=1), [*range(size)]
    prefix = kvcache.PrefixCache(cache, fingerprint="any")
    seq_id, _ = prefix.acquire([*prompt, 0])
    feed(cache, prompt, seq_id)
    for _ in prompt:
        assert prefix.acquire([*prompt, 0])[1] == size
    return timed(prefix.clear)[0]


def forks(size):
    """Plan and attend over forks of a sequence with every second token removed."""
    cache = holding(block_size=64)
    feed(cache, range(2048), 0)
    cache.keep_positions(range(0, 2048, 2))
    for seq_id in range(1, size):
        cache.fork(0, seq_id)
    batch = open_batch(cache, [2048] * size, range(size))
    seconds, _ = timed(batch.attend, 0, np.ones((size, 1, DIM), np.float32))
    batch.abort()
    return seconds


COSTS = {
    "feeding sequences one by one, sliding": (one_by_one, (500, 2000)),
    "inject after divide(2)": (divided, (4000, 16_000)),
    "keep every second position": (every_second, (8192, 131_072)),
    "cross-attention puts of a batch's sequences": (crossed, (512, 8192)),
    "dense of each sequence": (dense, (512, 8192)),
    "commit of a prompt of blocks": (lambda size: whole_prompt(size, "commit"), (500, 8000)),
    "clear of a prompt of blocks": (lambda size: whole_prompt(size, "clear"), (500, 8000)),
    "acquire of blocks in a store": (lambda size: fetched(size, 0), (250, 2000)),
    "acquire of blocks in a store, quota": (lambda size: fetched(size, 1600), (250, 2000)),
    "acquire of blocks that are moved": (moved, (500, 4000)),
    "lookup of blocks with states that lack rows": (lacking, (125, 500)),
    "clear of a prefix of blocks and sequences": (cleared, (250, 1000)),
    "attention over forks of 1,024 runs": (forks, (64, 1024)),
}


@pytest.mark.parametrize("name", COSTS)
def test_calls_by_size(slope, name):
    slope(name, COSTS[name][1], COSTS[name][0])


# ---- deltas


@pytest.mark.parametrize("deltas", [2, 64, 512, 4096])
def test_decoding_over_many_deltas(figures, interleave, deltas):
    """Attend for a token over 4,096 rows of `deltas` deltas, against rows without."""
    rows, heads, dim, layers = 4096, 8, 128, 2
    rope = kvcache.Rope(10_000.0 ** -(np.arange(dim // 2) / (dim // 2)))
    moved = kvcache.KVCache(layers, heads, dim, None, num_threads=1, block_size=64, rope=rope)
    x = np.random.default_rng(0).standard_normal((rows, heads, dim)).astype(np.float32)
    each = rows // deltas
    still = copy.copy(moved)
    for cache, positions in (moved, [i + i // each for i in range(rows)]), (still, range(rows)):
        with cache.batch(positions=positions, seq_ids=[0] * rows) as batch:
            for layer in range(layers):
                batch.put(layer, x, x)
    for gap in range(1, deltas):
        moved.remove(gap * each, gap * each + 1)
    q = np.repeat(x[:1], 4, 1)

    def step(cache):
        batch = cache.batch(1)
        seconds = timed(lambda: [batch.attend(layer, q, x[:1], x[:1]) for layer in range(layers)])[0]
        batch.abort()
        return seconds

    ours, without = interleave(lambda: step(moved), lambda: step(still), seconds=1, least=5)
    note = f"{layers} layers, {1e3 * np.median(ours):.2f} ms"
    figures.ratio(f"a step over rows of {deltas:,} deltas, cost over none", ours, without, "", note)
