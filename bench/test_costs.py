"""Measure how costs grow with size, as exponents: 0 for a constant cost, 1 for a cost proportional to size."""

import copy
import math

import numpy as np
import pytest

import kvcache
from kvcache.tools.interleave import timed

DIM = 8  # elements of a row: few, because bookkeeping is measured


@pytest.fixture
def slope(figures, interleave):
    """Return a function that measures sizes interleaved, and adds a line for the exponent from first to last."""

    def add(name, sizes, measure, wanted, seconds=1.0):
        found = interleave(*[lambda size=size: measure(size) for size in sizes], seconds=seconds, least=5)
        octaves = math.log(sizes[-1] / sizes[0])
        exponents = [math.log(last / first) / octaves for first, last in zip(found[0], found[-1], strict=True)]
        each = ", ".join(f"{1e6 * np.median(one):,.1f}" for one in found)
        note = f"{each} µs at {', '.join(f'{size:,}' for size in sizes)}"
        figures.samples(f"{name}: exponent", exponents, "", wanted, note)

    return add


def append(cache, positions, seq_ids):
    rows = np.ones((len(positions), 1, DIM), np.float32)
    with cache.batch(positions=positions, seq_ids=seq_ids) as batch:
        for layer in range(cache.num_layers):
            batch.put(layer, rows, rows)


def holding(num_sequences, tokens=1, **options):
    """Make a cache that holds num_sequences sequences of `tokens` tokens."""
    cache = kvcache.KVCache(1, 1, DIM, None, max_sequences=None, num_threads=1, **options)
    append(cache, [*range(tokens)] * num_sequences, np.repeat(np.arange(num_sequences), tokens))
    return cache


POLICIES = {"full": kvcache.FullAttention(), "sliding": kvcache.SlidingWindow(64)}


@pytest.mark.parametrize("policy", POLICIES)
def test_begin_beside_idle_sequences(slope, policy):
    """Begin a batch with one token of one sequence."""
    sizes = (1000, 4000, 16_000)
    caches = {size: holding(size, policy=POLICIES[policy]) for size in sizes}

    def begin(size):
        seconds, batch = timed(caches[size].batch, positions=[1], seq_ids=[0])
        batch.abort()
        return seconds

    slope(f"begin beside idle sequences, {policy}", sizes, begin, "0")


def test_feeding_sequences_one_by_one(slope):
    """Feed each sequence one token, in a batch of its own."""

    def feed(size):
        cache = kvcache.KVCache(1, 1, DIM, None, max_sequences=None, num_threads=1, policy=POLICIES["sliding"])

        def all_of_them():
            for seq_id in range(size):
                append(cache, [0], [seq_id])

        return timed(all_of_them)[0]

    slope("feeding sequences one by one, sliding", (500, 1000, 4000), feed, "1")


@pytest.mark.parametrize("forks", [64, 1024])
def test_plan_of_forks(figures, interleave, forks):
    """Attend over forks of a sequence with every second token removed; the second layer reuses the first's plan."""
    runs = 1024
    cache = kvcache.KVCache(2, 1, DIM, None, max_sequences=None, num_threads=1, block_size=64)
    append(cache, range(2 * runs), [0] * (2 * runs))
    for position in range(1, 2 * runs, 2):
        cache.remove(position, position + 1, shift=False)
    for seq_id in range(1, forks):
        cache.fork(0, seq_id)
    rows = np.ones((forks, 1, DIM), np.float32)

    def attend():
        batch = cache.batch(positions=[2 * runs] * forks, seq_ids=range(forks))
        for layer in (0, 1):
            batch.put(layer, rows, rows)
        seconds = [timed(batch.attend, layer, rows)[0] for layer in (0, 1)]
        batch.abort()
        return seconds

    (found,) = interleave(attend, seconds=1, least=5)
    both, tasks = zip(*found, strict=True)
    note = f"1: the tasks alone; {1e3 * np.median(both):.1f} ms"
    figures.ratio(
        f"plan and tasks, cost over the tasks alone, {forks:,} forks of {runs:,} one-row runs",
        both,
        tasks,
        "<= 2",
        note,
    )


def test_inject_after_divide(slope):
    """Inject rows at all positions of a cache that has two rows at each position."""

    def inject(size):
        cache = kvcache.KVCache(1, 1, DIM, size, rope=False, num_threads=1)
        append(cache, range(size), [0] * size)
        cache.divide(0, size, 2)
        rows = np.ones((1, size // 2, DIM), np.float32)
        return timed(cache.inject, 0, 0, rows, rows)[0]

    slope("inject after divide(2)", (4000, 8000, 16_000), inject, "1")


@pytest.mark.parametrize("dims", [(1, 32), (8, 128)], ids=str)
def test_keeping_every_second_position(slope, dims):
    """Keep every second position of a sequence, of many layers in one group; 10 ms are wanted for the longest."""
    sizes = (8192, 32_768, 131_072)
    kept = {size: np.arange(1, size, 2) for size in sizes}
    cache = kvcache.KVCache(2, *dims, 2 * sizes[-1], max_sequences=2, dtype="int4", block_size=64, num_threads=1)
    rows = np.ones((8192, *dims), np.float32)

    def keep(size):
        for _ in range(0, size, len(rows)):
            with cache.batch(len(rows)) as batch:
                for layer in range(2):
                    batch.put(layer, rows, rows)
        seconds, _ = timed(cache.keep_positions, kept[size])
        cache.clear()
        return seconds

    slope(f"keep every second position, {dims[0]} heads of {dims[1]}", sizes, keep, "1")


def test_cross_attention_puts(slope):
    """Put the encoder's rows of each sequence of a batch one by one."""

    def put(size):
        cache = kvcache.KVCache(1, 1, DIM, None, max_sequences=None, num_threads=1, policy=kvcache.CrossAttention(4))
        rows = np.ones((1, 1, DIM), np.float32)
        batch = cache.batch(positions=[0] * size, seq_ids=range(size))

        def all_of_them():
            for seq_id in range(size):
                batch.put(0, rows, rows, seq_id=seq_id)

        seconds, _ = timed(all_of_them)
        batch.abort()
        return seconds

    slope("cross-attention puts of a batch's sequences", (512, 2048, 8192), put, "1")


def test_dense_of_many_sequences(figures, interleave):
    """Make one dense mask over all sequences, which is quadratic, against filling such a mask."""
    size = 2048
    cache = kvcache.KVCache(1, 1, DIM, None, max_sequences=None, num_threads=1)
    rows = np.ones((size, 1, DIM), np.float32)
    batch = cache.batch(positions=[0] * size, seq_ids=range(size))
    batch.put(0, rows, rows)
    dense, mask = interleave(
        lambda: timed(batch.dense, 0)[0], lambda: timed(np.full, (size, size), -np.inf, np.float32)[0], least=5
    )
    batch.abort()
    figures.ratio(
        f"dense of {size:,} sequences, cost over filling a mask", dense, mask, "", f"{1e3 * np.median(dense):.1f} ms"
    )


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


def test_dense_of_each_sequence(slope):
    """Make dense rows for each sequence by itself, which is linear."""
    sizes = (512, 2048, 8192)
    caches = {size: holding(size) for size in sizes}

    def dense(size):
        batch = caches[size].batch(positions=[1] * size, seq_ids=np.arange(size))
        seconds, _ = timed(batch.dense, 0, layout="BHTD")
        batch.abort()
        return seconds

    slope("dense of each sequence", sizes, dense, "<= 1.2")


@pytest.mark.parametrize("call", ["commit", "clear"])
def test_long_prompts(slope, call):
    """Commit a whole prompt, whose blocks a prefix keeps, or end its sequence."""

    def end(size):
        cache = kvcache.KVCache(1, 1, DIM, None, max_sequences=None, num_threads=1, block_size=16)
        prompt = range(16 * size)
        prefix = kvcache.PrefixCache(cache, fingerprint="any")
        seq_id, _ = prefix.acquire([*prompt, 0])
        batch = cache.batch(positions=prompt, seq_ids=[seq_id] * len(prompt))
        rows = np.zeros((len(prompt), 1, DIM), np.float32)
        batch.put(0, rows, rows)
        committing = timed(batch.commit)[0]
        clearing = timed(cache.clear, seq_id)[0]
        return committing if call == "commit" else clearing

    slope(f"{call} of a prompt of so many blocks", (500, 2000, 8000), end, "<= 1.2")


@pytest.mark.parametrize("quota", [0, 1600])
def test_fetching_long_prompts(slope, quota):
    """Acquire a prompt whose blocks are in a store, and in no cache."""
    sizes, store = (500, 2000, 8000), {}

    def begin():
        cache = kvcache.KVCache(1, 1, DIM, None, max_sequences=None, num_threads=1, block_size=16)
        return cache, kvcache.PrefixCache(cache, fingerprint="any", store=store, timeout=60, quota=quota)

    cache, prefix = begin()
    seq_id, _ = prefix.acquire([*range(16 * sizes[-1]), 0])
    append(cache, range(16 * sizes[-1]), [seq_id] * 16 * sizes[-1])
    assert prefix.close(60)

    def fetch(size):
        seconds, (_, matched) = timed(begin()[1].acquire, [*range(16 * size), 0])
        assert matched == 16 * size
        return seconds

    slope(f"acquire of a prompt of so many blocks in a store, quota {quota}", sizes, fetch, "<= 1.2")


def test_moving_long_prompts(slope):
    """Acquire a prompt that goes on as another one does, at other positions."""

    def move(size):
        rope = kvcache.Rope(np.ones(DIM // 2))
        cache = kvcache.KVCache(1, 1, DIM, None, max_sequences=None, num_threads=1, block_size=16, rope=rope)
        prefix = kvcache.PrefixCache(cache, fingerprint="any", reuse_min_tokens=16)
        prompt, first = [*range(16 * size)], [-1] * 16
        for tokens in (prompt, first):
            seq_id, _ = prefix.acquire([*tokens, 0])
            append(cache, range(len(tokens)), [seq_id] * len(tokens))
            prefix.release(seq_id, tokens)
        seconds, (_, matched) = timed(prefix.acquire, [*first, *prompt[1:], 0])
        assert matched == 16 * (size + 1) - 1
        return seconds

    slope("acquire of a prompt of so many blocks that are moved", (500, 2000, 8000), move, "<= 1.2")


def test_states_that_lack_rows(slope):
    """Look up a prompt with a state behind each block, of which windows have lost the rows."""

    def look_up(size):
        policy = [kvcache.FullAttention(), kvcache.SlidingWindow(3)]
        cache = kvcache.KVCache(2, 1, DIM, None, policy=policy, max_sequences=None, num_threads=1, block_size=16)
        prefix = kvcache.PrefixCache(cache, fingerprint="any", state_bytes=1)
        prompt = [*range(16 * size)]
        for end in range(5, len(prompt), 16):
            append(cache, range(max(0, end - 16), end), [0] * min(16, end))
            prefix.checkpoint(0, prompt[:end])
        for end in range(16, len(prompt) - 11, 16):
            prefix.checkpoint(0, prompt[:end], b"0")
        seconds, found = timed(prefix.lookup, prompt[:-11])
        assert not found
        return seconds

    slope("lookup of a prompt of so many blocks with states that lack rows", (125, 250, 500), look_up, "<= 1.2")


def test_clearing_beside_long_prompts(slope):
    """Clear a prefix while so many sequences go on from the end of a prompt of so many blocks."""

    def clear(size):
        cache = kvcache.KVCache(1, 1, DIM, None, max_sequences=None, num_threads=1, block_size=1)
        prefix = kvcache.PrefixCache(cache, fingerprint="any")
        prompt = [*range(size)]
        seq_id, _ = prefix.acquire([*prompt, 0])
        append(cache, prompt, [seq_id] * size)
        for _ in prompt:
            assert prefix.acquire([*prompt, 0])[1] == size
        return timed(prefix.clear)[0]

    slope("clear of a prefix of so many blocks and sequences", (250, 500, 1000), clear, "<= 1.3")
