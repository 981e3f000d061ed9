"""Make the entrants that benchmarks interleave: attention of the core, reading, multiply-adds, and peers.

An entrant has a name, and a function that runs its work a number of times. Peers run in processes of their own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import build_ggml
from compiling import Seconds
from driver import BYTES, Driver
from resident_memory import smaps
from yardstick import Machine, Memory, machine

from kvcache.tools import interleave, peers
from kvcache.tools.interleave import Entrant, cache_size
from kvcache.tools.peers import PeerKind, Peers


@dataclass(frozen=True)
class Shape:
    """A call of attention: the last num_tokens of `context` tokens attend over all of them."""

    context: int = 8192
    dtype: str = "f16"
    threads: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    v_dim: int = 0  # 0: head_dim
    v_type: str = ""  # "": dtype
    value_in_key: bool = False
    num_tokens: int = 1
    q_type: str = ""  # of queries and outputs; "": bf16 if keys are, else f32
    in_bytes: bool = False  # whether a prompt is multiplied in bytes

    @property
    def row_bytes(self) -> float:
        """The bytes of the key and the value of one token in one KV head."""
        v = 0 if self.value_in_key else (self.v_dim or self.head_dim) * BYTES[self.v_type or self.dtype]
        return self.head_dim * BYTES[self.dtype] + v

    @property
    def nbytes(self) -> int:
        """The bytes that are stored, and read at least once."""
        return int(self.context * self.num_kv_heads * self.row_bytes)

    @property
    def multiply_adds(self) -> float:
        seen = self.num_tokens * (self.context - (self.num_tokens - 1) / 2)
        return seen * self.num_heads * (self.head_dim + (self.v_dim or self.head_dim))

    @property
    def layers(self) -> int:
        """The number of layers that make up a working set; two for a prompt, which memory does not bound."""
        return layers_of(self.nbytes) if self.num_tokens < 64 else 2

    @property
    def type(self) -> str:
        return f"{self.dtype}/{self.v_type}" if self.v_type else self.dtype


def layers_of(nbytes: float) -> int:
    """Return the number of layers of `nbytes` that make up a working set."""
    return interleave.layers_of(nbytes, working_set_bytes())


working_set = 0  # bytes that a measurement goes round in; 0: four times the last-level cache


def working_set_bytes() -> int:
    return working_set or 4 * cache_size()


def compete(entrants: Sequence[Entrant], seconds: float, threads: int, least: int = 5) -> list[list[float]]:
    """Interleave entrants; return for each entrant the median seconds of its calls in each round."""
    return [
        list(each) for each in zip(*interleave.compete(entrants, seconds, threads=threads, least=least), strict=True)
    ]


# ---- attention of the core


def empty(shape: Shape, max_seq_len: int = 0, layers: int = 0, **options: int) -> Driver:
    """Make a driver of a shape: with its layers, types and threads."""
    return Driver(
        layers or shape.layers, shape.num_kv_heads, shape.head_dim, max_seq_len, shape.dtype, v_dim=shape.v_dim,
        v_type=shape.v_type, value_in_key=shape.value_in_key, num_threads=shape.threads, **options,
    )  # fmt: skip


def filled(shape: Shape, layers: int = 0, **options: int) -> Driver:
    """Fill a driver with the shape's tokens before the batch, after the steps that make huge pages of small ones."""
    layers = layers or shape.layers
    steps = 2 * layers * shape.num_kv_heads  # a step joins the pages of one head's rows
    driver = empty(shape, options.pop("max_seq_len", shape.context + steps), layers, **options)
    driver.append(shape.context)
    for _ in range(2):  # fill the pages, then join them
        driver.steps(steps)
        driver.truncate(shape.context)
    driver.truncate(shape.context - shape.num_tokens)
    return driver


def attending(shape: Shape, driver: Driver, name: str = "") -> Entrant:
    """Attend over the tokens that a driver holds."""

    def run(count: int) -> Seconds:
        return driver.attend(
            shape.num_heads, shape.threads, count, num_tokens=shape.num_tokens, q_type=shape.q_type,
            in_bytes=shape.in_bytes,
        )  # fmt: skip

    return Entrant(name or f"kvcache {shape.dtype}", run, driver.num_layers)


ROOM, ONE_BY_ONE = 64, 32  # tokens for which a cache in use has more space, and its last ones, appended one by one


@contextlib.contextmanager
def in_use(shape: Shape) -> Iterator[Driver]:
    """Fill a new driver as programs do: its blocks have the default size, and space for more tokens."""
    with empty(shape, shape.context + ROOM) as driver:
        stored = shape.context - shape.num_tokens
        steps = min(stored, ONE_BY_ONE)
        if stored > steps:
            driver.append(stored - steps)
        driver.steps(steps)
        yield driver


@contextlib.contextmanager
def core(shape: Shape, name: str = "", layers: int = 0, **options: int) -> Iterator[Entrant]:
    """Attend over a new driver, which is closed at the end."""
    with filled(shape, layers, **options) as driver:
        yield attending(shape, driver, name)


def in_cache(shape: Shape, tokens: int = 128) -> Entrant:
    """Attend with one thread over rows that stay in the processor core's cache; time it per stored token."""
    return _in_cache(replace(shape, context=max(tokens, 2 * shape.num_tokens), threads=1))


@functools.cache
def _in_cache(small: Shape) -> Entrant:
    driver = filled(small, layers=1)

    def run(_: int) -> list[float]:
        return [driver.attend(small.num_heads, 1, 20, num_tokens=small.num_tokens).min() / small.context]

    return Entrant("from cache, a token", run)


# ---- yardsticks


def over_pieces(name: str, memory: Memory, piece: int, read: Callable[[int], float]) -> Entrant:
    """Time `read` at the address of each piece of the memory in turn, cyclically."""
    pieces = memory.nbytes // piece
    numbers = itertools.cycle(range(pieces))

    def run(count: int) -> list[float]:
        return [read(memory.address + i * piece) for i in itertools.islice(numbers, count)]

    return Entrant(name, run, pieces)


def reading(nbytes: int, threads: int, huge: bool) -> list[Entrant]:
    """Read nbytes by the two fastest reading loops, going round a working set."""
    m = machine()
    piece = m.read_size(nbytes, threads)
    memory = Memory(piece * layers_of(nbytes), huge)

    def reader(kernel: int) -> Entrant:
        name = f"{m.readers()[kernel]}, {'huge' if huge else '4 KiB'} pages"
        return over_pieces(name, memory, piece, lambda address: m.read(kernel, address, nbytes, threads)[0])

    rounds = max(3, min(7, int(2e9 / piece / len(m.readers()))))
    return [reader(kernel) for kernel in m.best_readers(memory, nbytes, threads, rounds)[:2]]


def reading_rows(shape: Shape, memory: Memory, step: int) -> Entrant:
    """Read every `step`th of consecutive keys, one for each token of the shape, with one thread."""
    row_bytes = int(shape.head_dim * BYTES[shape.dtype])
    stride = row_bytes * step

    def read(address: int) -> float:
        return machine().read_rows(address, shape.context, row_bytes, stride)[0]

    return over_pieces(f"rows {stride} bytes apart", memory, shape.context * stride, read)


def multiplying(threads: int) -> Entrant:
    """Multiply and add with all lanes of all threads; time it per multiply-add."""
    m: Machine = machine()

    def run(_: int) -> list[float]:
        count, seconds = m.multiply_add(m.lanes, threads, 20)
        return [seconds.min() / count]

    return Entrant("multiply-add", run)


def multiplying_bytes(threads: int) -> list[Entrant]:
    """Multiply bytes and add them, four to a lane; time it per product. Empty on machines without the instruction."""
    m: Machine = machine()
    if not m.multiply_bytes(1)[0]:
        return []

    def run(_: int) -> list[float]:
        count, seconds = m.multiply_bytes(threads, 20)
        return [seconds.min() / count]

    return [Entrant("products of bytes", run)]


@contextlib.contextmanager
def own_pages() -> Iterator[Callable[[int], bool]]:
    """Yield a function that says whether most of the `nbytes` bytes filled since then lie in huge OS pages."""
    before = smaps()["AnonHugePages"]
    yield lambda nbytes: smaps()["AnonHugePages"] - before > nbytes / 2


# ---- peers

Offers: TypeAlias = Sequence[tuple[str, peers.Offer]]


class Ggml(PeerKind):
    """The peer ggml, whose program is written in C."""

    def command(self) -> list[str]:
        program = build_ggml.program()
        return [str(program)] if program else []


KINDS: dict[str, PeerKind] = {
    "ggml": Ggml(
        "ggml",
        "python bench/build_ggml.py",
        decode=(
            *(("flash", "f32"), ("flash", "f16"), ("flash", "q8_0"), ("flash", "q4_0")),
            *(("matmul", "f32"), ("matmul", "f16")),
        ),
    ),
    **{
        key: replace(kind, install=kind.install.replace("pip install", "pip install -c bench/constraints.txt"))
        for key, kind in peers.KINDS.items()
    },
}


def decoding(*types: str) -> Offers:
    """List the decoding offers of peers for these types, each with the peer's key."""
    return [(key, offer) for key, kind in KINDS.items() for offer in kind.decode if offer[1] in types]


# Offers to compare with f32, with types of 16 bits, and with quantised types.
SINGLES = decoding("f32")
SIXTEEN_BITS = decoding("f16", "bf16")
QUANTISED = decoding(*(kind for kind, size in peers.BYTES.items() if size < 2))


def set_up(installed: Peers, offers: Offers, shape: Shape) -> list[Entrant]:
    """Make entrants of the offers whose peers are installed and support the shape."""
    keys = [key for key, _ in offers]
    asked = peers.tasks(
        (offer for _, offer in offers), threads=shape.threads, num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, context=shape.context, num_tokens=shape.num_tokens,
        working_set=working_set_bytes(),
    )  # fmt: skip
    return installed.set_up(zip(keys, asked, strict=True))
