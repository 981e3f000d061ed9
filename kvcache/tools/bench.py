"""Measure this machine: read bandwidth; decoding, prefill and appending by element type; and the same of peers.

`measure` takes about a minute and reports its progress. `decode_rates`, `prompt_rates` and `select_rates` take a second
or two, for predictions. `draw` and `picture` need matplotlib. Nothing is printed or compiled: the installed package is
measured, called from Python. An entrant is something that is timed in rounds, in turn with others
(`kvcache.tools.interleave`). A peer is other people's code. A part is one of PARTS, or SHORT. A working set is as many
bytes as exceed the processor's caches.
"""

from __future__ import annotations

import contextlib
import mmap
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.arguments import INT32_MAX, INT64_MAX, MAX_THREADS, integer
from kvcache.batch import Batch
from kvcache.cache import KVCache
from kvcache.layer import DTYPES, MAX_DIM, MAX_LAYERS, DType, bytes_of_token, count, why_not
from kvcache.runtime import get_num_threads, show_config
from kvcache.selecting import ALWAYS_READ
from kvcache.system import available_memory, readable
from kvcache.tools.interleave import Entrant, cache_size, compete, layers_of, rounds, timed
from kvcache.tools.peers import BYTES, KINDS, Peers, tasks
from kvcache.tools.peers.serve import Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes as _Axes
    from matplotlib.figure import Figure as _Figure

READING = 1 / 60  # fraction of the whole time in which read bandwidth is measured
PARTS = {"decode": 1 / 12, "prefill": 1 / 12, "append": 1 / 60}  # fractions of the whole time, for this cache's parts
PEER_FRACTION = 0.4  # time of a part with one peer beside this cache, as a fraction of the part's time
# Fractions of the whole time for this cache and for each peer, setting up included, from which progress is estimated.
OURS_IN_ALL, PEER_IN_ALL = 0.3, 0.14
CALL = 2 << 20  # bytes per thread and call: much longer than a call's overhead, much shorter than a time slice
SELECT_TOKENS = 16384  # context of a cache in which selecting is timed
PUT_TOKENS = 512  # tokens of a batch that fills a cache
CHOSEN = 2048  # rows that a token chooses by index keys
ROOM = 64  # tokens for which a cache has space beyond the context: in use, the default block is not full
SHORT, SHORT_DIM = "decode x 64", 64  # the part that decodes with short heads, too, beside heads of 128
PROMPT = 64 * 8192 * 32 * 256  # multiply-adds of a timed prompt, 64 tokens of the default shape; 512 take 8 % less each
PROMPT_ROWS, PROMPT_PART = 2048, 128  # the most rows that a prompt's tokens see, and the most such tokens, in a plan

Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Shape:
    """The attention of a model, over a context; values are by default as long as keys, and threads `get_num_threads`.

    `num_layers` is the model's number of layers; fewer are measured. `value_in_key`: values are the first elements of
    their keys, as in multi-head latent attention. `v_head_dim=0`: an indexer's keys alone, among which tokens choose
    rows. Raises ``ValueError`` or ``TypeError`` if a number is out of range or
    no integer, or `num_heads` is no multiple of `num_kv_heads`.
    """

    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int | None = None
    value_in_key: bool = False
    context: int = 8192
    threads: int = field(default_factory=get_num_threads)

    def __post_init__(self) -> None:
        most = {"num_layers": MAX_LAYERS, "context": INT32_MAX - 1 - ROOM, "threads": MAX_THREADS}
        for name, value in asdict(self).items():
            if name != "value_in_key" and value is not None:
                integer(value, name, 0 if name == "v_head_dim" else 1, most.get(name, MAX_DIM))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads}: must be a multiple of num_kv_heads, {self.num_kv_heads}")

    @property
    def v_dim(self) -> int:
        """The number of elements of a value of one head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    def token_bytes(self, dtype: DType) -> int:
        """Return the bytes of the rows of a token in one layer."""
        return bytes_of_token(self.num_kv_heads, self.head_dim, self.v_dim, dtype, dtype, self.value_in_key)

    def layer_bytes(self, dtype: DType) -> int:
        """Return the bytes of the rows of a layer, with the space that it has beyond the context."""
        return (self.context + ROOM) * self.token_bytes(dtype)

    def why_not(self, dtype: DType) -> str | None:
        """Return the reason why rows of this shape cannot have an element type; None: they can."""
        return why_not(dtype, self.head_dim, self.v_dim, self.value_in_key)


# ---- reading


class _Reader:
    """Reads memory with NumPy's reductions, which release the GIL, in several threads.

    A reduction does not prefetch and reads one stream. On one thread it reaches four fifths of the bandwidth of the
    best loop in bench/yardstick.c. So attention may exceed the bandwidth measured here.
    """

    def __init__(self, nbytes: int, threads: int) -> None:
        self.nbytes = -(-nbytes // (8 * threads)) * 8 * threads
        self._pool = ThreadPoolExecutor(threads)
        memory = mmap.mmap(-1, self.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a system without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        parts = np.split(np.frombuffer(memory, np.int64), threads)
        list(self._pool.map(lambda part: part.fill(1), parts))  # first touch places a part near the thread's core
        self._kernels: list[Callable[[], object]] = [
            lambda: list(self._pool.map(np.bitwise_or.reduce, parts)),
            lambda: list(self._pool.map(np.max, parts)),
            lambda: list(self._pool.map(np.sum, parts)),
        ]

    def choose(self, seconds: float) -> float:
        """Time all reductions and keep the fastest; return its best bytes per second."""
        calls = [lambda kernel=kernel: timed(kernel)[0] for kernel in self._kernels]
        times: list[float] = [min(column) for column in zip(*rounds(*calls, seconds=seconds, least=4), strict=True)]
        self._kernels = [self._kernels[times.index(min(times))]]
        return self.nbytes / min(times)

    def entrant(self) -> Entrant:
        return Entrant("read", lambda count: [timed(self._kernels[0])[0] for _ in range(count)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kernels.clear()  # these functions hold the memory
        self._pool.shutdown()


def read_bandwidth(nbytes: int | None = None, threads: int | None = None, seconds: float = 0.5) -> float:
    """Return the best bytes per second at which `threads` threads read `nbytes` bytes of memory.

    By default `get_num_threads`, and four times the last-level cache; `seconds` is how long it takes.
    """
    if threads is None:
        threads = get_num_threads()
    nbytes = 4 * cache_size() if nbytes is None else integer(nbytes, "nbytes", 1, INT64_MAX)
    with _Reader(nbytes, integer(threads, "threads", 1, MAX_THREADS)) as reader:
        return reader.choose(seconds)


# ---- this cache


class _Filled:
    """A cache of one element type, filled with a shape's context, with enough layers for a working set.

    Queries and new rows are f32, whatever the type. With `sketch`, the layers have sketches.
    """

    def __init__(self, shape: Shape, dtype: DType, working_set: int, sketch: bool = False) -> None:
        self.shape, self.dtype = shape, dtype
        self.nbytes = shape.context * shape.token_bytes(dtype)  # bytes of the rows of one layer
        self.layers = layers_of(shape.layer_bytes(dtype), working_set)
        self._layer = 0
        rng = np.random.default_rng(0)
        self._k = rng.standard_normal((PUT_TOKENS, shape.num_kv_heads, shape.head_dim), np.float32)
        has_values = shape.v_dim and not shape.value_in_key
        self._v = np.resize(self._k[::-1], (*self._k.shape[:2], shape.v_dim)) if has_values else None
        self._cache = KVCache(
            self.layers, shape.num_kv_heads, shape.head_dim, shape.context + ROOM, v_head_dim=shape.v_dim,
            value_in_key=shape.value_in_key, dtype=dtype, num_threads=shape.threads, sketch=sketch,
        )  # fmt: skip
        self._hold(shape.context)

    def _rows(self, num_tokens: int) -> tuple[Floats, Floats | None]:
        return self._k[:num_tokens], None if self._v is None else self._v[:num_tokens]

    def _hold(self, length: int) -> None:
        """Append or drop tokens until `length` are stored."""
        self._cache.truncate(length)
        while (stored := self._cache.seq_len()) < length:
            rows = self._rows(min(PUT_TOKENS, length - stored))
            with self._cache.batch(len(rows[0])) as batch:
                for layer in range(self.layers):
                    batch.put(layer, *rows)

    def attending(self, num_tokens: int, select: int | None = None) -> Entrant:
        """Return an entrant that times attention of the last tokens, storing them included, per layer.

        In layers of index keys alone, the tokens choose rows instead.
        """
        shape, rows = self.shape, self._rows(num_tokens)
        q = np.random.default_rng(1).standard_normal((num_tokens, shape.num_heads, shape.head_dim), np.float32)
        scale = shape.head_dim**-0.5

        def call(batch: Batch) -> None:
            """Attend with the tokens in the layer whose turn it is, or let them choose rows."""
            if shape.v_dim:
                batch.attend(self._layer, q, *rows, scale=scale, select=select)
            else:
                batch.put(self._layer, rows[0])
                batch.choose(self._layer, q, width=min(CHOSEN, shape.context), relu=True)

        def run(count: int) -> list[float]:
            self._hold(shape.context - num_tokens)
            seconds = []
            batch = self._cache.batch(num_tokens)
            try:
                for _ in range(count):
                    start = time.perf_counter()
                    call(batch)
                    seconds.append(time.perf_counter() - start)
                    self._layer = (self._layer + 1) % self.layers
            finally:
                batch.abort()
            return seconds

        return Entrant("kvcache", run, self.layers, kind=self.dtype)

    def appending(self) -> Entrant:
        """Return an entrant that times storing one token, per layer, with its share of the batch's begin and commit."""
        stored, rows = self.shape.context - 1, self._rows(1)

        def once() -> float:
            """Store a token; return the seconds of a layer: its own, and its share of the batch's."""
            start = time.perf_counter()
            batch = self._cache.batch(1)
            begun = time.perf_counter()
            for layer in range(self.layers):
                batch.put(layer, *rows)
            put = time.perf_counter()
            batch.commit()
            end = time.perf_counter()
            self._cache.truncate(stored)
            return (put - begun) / self.layers + (end - put + begun - start) / self.shape.num_layers

        def run(_: int) -> list[float]:
            self._hold(stored)
            return [once() for _ in range(16)]

        return Entrant("kvcache", run, kind=self.dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cache.close()


def decode_rates(shape: Shape, dtypes: Sequence[DType] = DTYPES, seconds: float = 1.0) -> dict[DType, float]:
    """Measure how many bytes of rows per second attention of one token reads from memory, by type.

    Index keys are read to choose rows by them. Divided by the bytes that all layers hold of a sequence, the rates are
    the tokens per second of attention. A long context of the shape is cut short: the rate stays the same. Types that
    its rows cannot have are left out. It takes about `seconds`.
    """
    end = time.perf_counter() + seconds
    known = [dtype for dtype in _check_dtypes(dtypes) if not shape.why_not(dtype)]
    if not known:
        return {}
    # Interleaved types evict each other's rows from the processor's cache: only together must they exceed it.
    share = 4 * cache_size() // len(known)
    with contextlib.ExitStack() as stack:
        ours = []
        for dtype in known:
            tokens = max(1, min(shape.context, min(share, CALL * shape.threads) // shape.token_bytes(dtype)))
            ours.append(stack.enter_context(_Filled(replace(shape, context=tokens), dtype, share)))
        entrants = [one.attending(1) for one in ours]
        left = end - time.perf_counter()
        found = zip(*compete(entrants, left, threads=shape.threads), strict=True)
        return {one.dtype: one.nbytes / statistics.median(times) for one, times in zip(ours, found, strict=True)}


def prompt_rates(shape: Shape, dtypes: Sequence[DType] = DTYPES, seconds: float = 1.0) -> dict[DType, float]:
    """Measure how many operations per second attention of a prompt's tokens does, by type.

    A multiply-add is two operations. A long context of the shape is cut short: the rate stays the same. Types that its
    rows cannot have are left out. It takes about `seconds`.
    """
    end = time.perf_counter() + seconds
    cut = replace(shape, context=min(shape.context, PROMPT_ROWS))
    dims = shape.num_heads * (shape.head_dim + shape.v_dim)
    tokens = min(cut.context, max(16, min(PROMPT_PART, PROMPT // (4 * cut.context * dims))))
    operations = 2 * dims * sum(range(cut.context - tokens + 1, cut.context + 1))
    with contextlib.ExitStack() as stack:
        known = [dtype for dtype in _check_dtypes(dtypes) if not shape.why_not(dtype)]
        entrants = [stack.enter_context(_Filled(cut, dtype, 1)).attending(tokens) for dtype in known]
        left = end - time.perf_counter()
        found = [*zip(*compete(entrants, left, threads=shape.threads, least=2), strict=True)] if known else []
    return {dtype: operations / min(times) for dtype, times in zip(known, found, strict=True)}


@dataclass(frozen=True)
class SelectRates:
    """The bytes per second that attention of one token reads, if it selects rows."""

    sketches: float
    rows: float  # the rows that are selected


def select_rates(
    shape: Shape, select: int, dtypes: Sequence[DType] = DTYPES, seconds: float = 2.0
) -> dict[DType, SelectRates]:
    """Measure the rates of attention that selects `select` rows, by type.

    A call scores the sketches of all rows, and reads the rows that it selects. Calls that select a quarter of the rows
    are timed as well, because the difference is due to rows alone. Contexts are cut short, as in `decode_rates`, and
    types that the rows cannot have are left out. It takes about `seconds`, or longer to fill caches of many types.
    """
    end = time.perf_counter() + seconds
    known = [dtype for dtype in _check_dtypes(dtypes) if not shape.why_not(dtype)]
    cut, few = replace(shape, context=min(shape.context, max(SELECT_TOKENS, 4 * select))), -(-select // 4)
    with contextlib.ExitStack() as stack:
        ours = [stack.enter_context(_Filled(cut, dtype, 1, sketch=True)) for dtype in known]
        entrants = [one.attending(1, select=n) for one in ours for n in (select, few)]
        rounds = [*compete(entrants, end - time.perf_counter(), threads=shape.threads)] if known else []
    found = {}
    for i, dtype in enumerate(known):
        most = statistics.median(times[2 * i] for times in rounds)
        more = statistics.median(times[2 * i] - times[2 * i + 1] for times in rounds)
        row = max(more, 0.1 * most) / max(1, select - few)  # noise may be larger than the difference of two calls
        sketch = max(most - row * (ALWAYS_READ + select), 0.1 * most) / cut.context
        sketch_bytes = shape.num_kv_heads * (shape.head_dim // 4 + 2)
        found[dtype] = SelectRates(sketch_bytes / sketch, shape.token_bytes(dtype) / row)
    return found


def _check_dtypes(dtypes: Sequence[DType]) -> Sequence[DType]:
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"dtypes holds {dtype!r}: a type is one of {', '.join(DTYPES)}")
    return dtypes


# ---- everything


@dataclass(frozen=True)
class Progress:
    """The progress of a measurement: the current step, and the fraction done, from 0 to 1."""

    doing: str
    fraction: float


@dataclass(frozen=True)
class Result:
    """The measurements, as a dict of plain types.

    ``machine`` is the report of `show_config`, ``shape`` the shape, ``bandwidth`` the bytes per second at which memory
    is read, ``left_out`` a list of sentences on what was not measured. ``rows`` has an entry for each part (decode,
    prefill, append; for heads of 128 also ``decode x 64``, the same with heads of 64), name and type. An entry has
    ``seconds`` of one layer and ``tokens_per_second`` of all layers. For decoding it has ``bytes_per_second``,
    ``of_bandwidth``, their fraction of the bandwidth, and ``over_f16``, its speed over that of f16. A peer's entry has
    ``by_ours``, its seconds divided by this cache's. Quotients are medians of quotients within a round.
    """

    record: dict[str, Any]


class _Table:
    """Samples by part, entrant and type, and the table's rows made of them."""

    def __init__(self, shapes: dict[str, Shape], num_tokens: dict[str, int]) -> None:
        self._shapes, self._num_tokens = shapes, num_tokens
        self._samples: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, part: str, entrants: Sequence[Entrant], seconds: Sequence[float], read: float) -> None:
        """Add a round's samples; `read` is the round's seconds per byte of reading memory."""
        ours = {e.kind: s for e, s in zip(entrants, seconds, strict=True) if e.name == "kvcache"}
        for entrant, taken in zip(entrants, seconds, strict=True):
            found = self._samples[part, entrant.name, entrant.kind]
            found["seconds"].append(taken)
            if entrant.name != "kvcache":
                base = ours.get(_base(entrant.kind), ours["f16"])  # every shape can have f16
                found["by_ours"].append(taken / base)
            elif part in ("decode", SHORT):
                found["of_bandwidth"].append(read * self._nbytes(part, entrant.kind) / taken)
                found["over_f16"].append(ours["f16"] / taken)

    def _nbytes(self, part: str, dtype: Any) -> int:
        return self._shapes[part].context * self._shapes[part].token_bytes(dtype)

    def rows(self) -> list[dict[str, Any]]:
        """Make the rows; of a peer's modes, keep the fastest for each type of this cache compared with it."""
        best: dict[tuple[str, str, str], dict[str, Any]] = {}
        for (part, name, kind), found in self._samples.items():
            row: dict[str, Any] = {"part": part, "name": name, "type": kind}
            row |= {what: statistics.median(samples) for what, samples in found.items()}
            row["tokens_per_second"] = self._num_tokens[part] / (self._shapes[part].num_layers * row["seconds"])
            if "of_bandwidth" in row:
                row["bytes_per_second"] = self._nbytes(part, kind) / row["seconds"]
            key = part, name.split(",")[0], kind if name == "kvcache" else _base(kind)
            if key not in best or row["seconds"] < best[key]["seconds"]:
                best[key] = row
        return list(best.values())


def _base(kind: str) -> DType:
    """Return the type of this cache that is compared with a peer's type."""
    return "f16" if BYTES[kind] == 2 else "q8_0"


class _Run:
    """A measurement: its peers, its time, and its table."""

    def __init__(self, shape: Shape, seconds: float, peers: bool) -> None:
        self.shape, self.seconds = shape, seconds
        self.left_out = [reason for dtype in DTYPES if (reason := shape.why_not(dtype))]
        if peers and (shape.value_in_key or shape.v_dim != shape.head_dim):
            self.left_out.append("peers are asked for nothing but values beside keys, of the same head_dim")
            peers = False
        self.peers = Peers(KINDS if peers else {}, self.left_out.append)
        # A prefill of about PROMPT multiplications, and no more tokens than are appended at once.
        prompt = PROMPT // (shape.context * shape.num_heads * (shape.head_dim + shape.v_dim))
        self.num_tokens = dict.fromkeys(PARTS, 1) | {"prefill": min(shape.context, PUT_TOKENS, max(64, prompt))}
        self.shapes = dict.fromkeys(PARTS, shape)
        if shape.head_dim == shape.v_dim == 2 * SHORT_DIM and not shape.value_in_key:
            self.shapes[SHORT] = replace(shape, head_dim=SHORT_DIM, v_head_dim=None)
            self.num_tokens[SHORT] = 1
        self.working_set = self._working_set()
        self.table = _Table(self.shapes, self.num_tokens)
        self._start = time.perf_counter()

    def _working_set(self) -> int:
        """Return how many bytes of rows each type has; raise MemoryError if the machine cannot hold the context."""
        sizes = [self.shape.layer_bytes(dtype) for dtype in DTYPES if not self.shape.why_not(dtype)]
        free, source = available_memory()
        if sum(sizes) > free:
            raise MemoryError(
                f"context={self.shape.context}: a layer in each of {count(len(sizes), 'type')} takes"
                f" {readable(sum(sizes))} together, and {readable(free)} are free ({source})"
            )
        return min(4 * cache_size(), free // (2 * len(sizes)))

    def progress(self, doing: str) -> Progress:
        expected = self.seconds * (OURS_IN_ALL + PEER_IN_ALL * len(self.peers.kinds))
        return Progress(doing, min(0.99, self.elapsed() / max(1e-9, expected)))

    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def tasks(self, key: str, part: str) -> Iterator[tuple[str, Task]]:
        """Yield a peer's tasks for a part: its offers with 8 and 16 bits per element."""
        shape, offers = self.shape, getattr(self.peers.kinds[key], part)
        for task in tasks(
            (offer for offer in offers if 1 <= BYTES[offer[1]] <= 2), threads=shape.threads, num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, context=shape.context,
            num_tokens=self.num_tokens[part], working_set=self.working_set,
        ):  # fmt: skip
            yield key, task

    def fill(self, stack: contextlib.ExitStack, part: str) -> Generator[Progress, None, list[_Filled]]:
        """Fill a cache of each type for a part, and return them; the stack closes them."""
        shape, filled = self.shapes[part], []
        for dtype in (one for one in DTYPES if not shape.why_not(one)):
            yield self.progress(f"filling a cache, {dtype}")
            filled.append(stack.enter_context(_Filled(shape, dtype, self.working_set)))
        return filled

    def compare(
        self, part: str, reader: _Reader, ours: Sequence[_Filled], theirs: Sequence[Entrant] = ()
    ) -> Iterator[Progress]:
        """Measure caches and peers interleaved, and add the samples to the table."""
        entrants = [one.appending() if part == "append" else one.attending(self.num_tokens[part]) for one in ours]
        entrants += theirs
        seconds = self.seconds * PARTS["decode" if part == SHORT else part] * (PEER_FRACTION if theirs else 1)
        for taken in compete([reader.entrant(), *entrants], seconds, threads=self.shape.threads, least=3):
            self.table.add(part, entrants, taken[1:], taken[0] / reader.nbytes)
            yield self.progress(f"{part}, {entrants[-1].name if theirs else 'kvcache'}")


def measure(shape: Shape | None = None, *, seconds: float = 60.0, peers: bool = True) -> Iterator[Progress | Result]:
    """Measure this machine: read bandwidth; decoding, prefill and appending by element type; and the same of peers.

    Yields any number of `Progress`, then one `Result`. Close the generator to stop early: memory is freed, and the
    peers' processes end.

    Measurements are interleaved, so that other load slows all alike. Each peer runs in a process of its own, with types
    of 16 and 8 bits if it has them, interleaved with this cache's f16 and q8_0. Rows are read from memory: the layers
    together hold four times the last-level cache, or less where memory is short, in blocks of the default size. It
    takes about `seconds`: at least three rounds of each measurement are made, and peers for which no time remains are
    left out.
    """
    shape = Shape() if shape is None else shape
    run = _Run(shape, seconds, peers)
    with contextlib.ExitStack() as stack:
        yield run.progress("reading memory")
        reader = stack.enter_context(_Reader(4 * cache_size(), shape.threads))
        bandwidth = reader.choose(READING * seconds)
        if SHORT in run.shapes:
            with contextlib.ExitStack() as short:
                ours = yield from run.fill(short, SHORT)
                yield from run.compare(SHORT, reader, ours)
        ours = yield from run.fill(stack, "decode")
        for part in PARTS:
            yield from run.compare(part, reader, ours)
        pair = [one for one in ours if one.dtype in ("f16", "q8_0")]
        for key, kind in run.peers.kinds.items():
            if run.elapsed() > seconds:
                run.left_out.append(f"{kind.name}: no time was left")
                continue
            with run.peers:
                for part in PARTS:
                    yield run.progress(f"setting up {kind.name}")
                    if theirs := run.peers.set_up(run.tasks(key, part)):
                        yield from run.compare(part, reader, pair, theirs)
    yield Result(
        {
            "machine": show_config("dicts"),
            "shape": asdict(shape),
            "bandwidth": bandwidth,
            "rows": run.table.rows(),
            "left_out": run.left_out,
        }
    )


# ---- pictures

OURS, OTHERS = "#0072B2", "#E69F00"  # of Okabe and Ito's palette, which the colour-blind can tell apart


def draw(record: dict[str, Any], ax: _Axes, part: str = "decode") -> None:
    """Draw the tokens per second of a record's part (decode, prefill or append) as bars, by type and peer."""
    rows = [row for row in record["rows"] if row["part"] == part]
    rows.sort(key=lambda row: (row["name"] != "kvcache", -row["tokens_per_second"]))
    speeds = [row["tokens_per_second"] for row in rows]
    bars = ax.barh(
        [f"{row['name'].split(',')[0]}  {row['type']}" for row in rows],
        speeds,
        color=[OURS if row["name"] == "kvcache" else OTHERS for row in rows],
    )
    ax.bar_label(bars, [f"{speed:,.3g}" if speed < 1000 else f"{speed:,.0f}" for speed in speeds], padding=3)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.25 * max(speeds))  # leaves space for the number behind a bar
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    ax.xaxis.set_visible(False)
    ax.set_title(f"{part}, tokens/s", loc="left")


def picture(record: dict[str, Any]) -> _Figure:
    """Draw all parts side by side; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    for ax, part in zip(figure.subplots(1, len(PARTS)), PARTS, strict=True):
        draw(record, ax, part)
    shape = Shape(**record["shape"])
    figure.suptitle(
        f"Attention of {shape.num_layers} layers over {shape.context:,} tokens, {shape.num_heads} query and "
        f"{shape.num_kv_heads} KV heads x {shape.head_dim}, {count(shape.threads, 'thread')}"
    )
    return figure
