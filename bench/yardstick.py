"""Compiles the yardsticks, and the core with a driver, by the system's compiler, and loads them."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shlex
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvcache.tools import peers

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FLAGS = ["-std=c11", "-O3", "-fPIC", "-shared", "-Wall", "-Wextra"]
FLOATS = {"f32": 0, "f16": 1, "bf16": 2}  # kvc_type
TYPES = FLOATS | {"q8_0": 3, "q4_0": 4}
BYTES = {dtype: peers.BYTES[dtype] for dtype in TYPES}  # of an element
OS_PAGE = 4096

Seconds = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]


# ---- compiling


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="kvcache-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def build(name: str, sources: Sequence[Path], flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile sources into a shared library and load it; with OpenMP where the compiler has it."""
    library = _folder() / f"{name}.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, *FLAGS, *flags, *map(str, sources), "-lm", "-lpthread", "-o", str(library)]
    if subprocess.run([*command, "-fopenmp"], capture_output=True).returncode:
        subprocess.run([*command, "-Wno-unknown-pragmas"], check=True)
    return ctypes.CDLL(str(library))


def _function(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> ctypes._CFuncPtr:
    function = library[name]
    function.restype, function.argtypes = result, arguments
    return function


_I, _L, _SIZE, _P, _D = ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_double


# ---- the machine


class Memory:
    """Bytes, all of them touched; in OS pages as the system gives them or, where it can, in huge ones."""

    def __init__(self, nbytes: int, huge: bool = False) -> None:
        self._unmap = machine().unmap
        self.nbytes = nbytes
        self.address = machine().map(nbytes, huge)
        if not self.address:
            raise MemoryError(f"{nbytes} bytes to measure with")

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self._unmap(self.address, self.nbytes)

    def floats(self) -> Floats:
        """The memory as an array, which is valid as long as this lives."""
        return np.ctypeslib.as_array((ctypes.c_float * (self.nbytes // 4)).from_address(self.address))


class Machine:
    """What it does at best: see yardstick.c."""

    def __init__(self) -> None:
        library = build("yardstick", [HERE / "yardstick.c"])
        self.map = _function(library, "ys_map", _P, _SIZE, _I)
        self.unmap = _function(library, "ys_unmap", None, _P, _SIZE)
        self._copy = _function(library, "ys_copy", None, _P, _P, _SIZE, _I, _I, _P)
        self._reader = _function(library, "ys_reader", ctypes.c_char_p, _I)
        self._read = _function(library, "ys_read", None, _I, _P, _SIZE, _I, _I, _P)
        self._read_rows = _function(library, "ys_read_rows", None, _P, _SIZE, _SIZE, _SIZE, _I, _P)
        self._multiply_add = _function(library, "ys_multiply_add", _D, _I, _I, _I, _P)

    def copy(self, dst: int, src: int, nbytes: int, threads: int, reps: int = 1) -> Seconds:
        """Time memcpy from one address to another."""
        seconds = np.empty(reps)
        self._copy(dst, src, nbytes, threads, reps, seconds.ctypes.data)
        return seconds

    def readers(self) -> dict[int, str]:
        """Names of the kernels that read, of those this machine can run."""
        names, i = {}, 0
        while (name := self._reader(i)) is not None:
            if name:
                names[i] = name.decode()
            i += 1
        return names

    @staticmethod
    def read_size(nbytes: int, threads: int) -> int:
        """Round up to what the kernels take."""
        unit = OS_PAGE * 4 * threads
        return -(-nbytes // unit) * unit

    def read(self, reader: int, src: int, nbytes: int, threads: int, reps: int = 1) -> Seconds:
        """Time reading nbytes, rounded up to what the kernels take."""
        seconds = np.empty(reps)
        self._read(reader, src, self.read_size(nbytes, threads), threads, reps, seconds.ctypes.data)
        return seconds

    def read_rows(self, src: int, num_rows: int, row_bytes: int, stride: int, reps: int = 1) -> Seconds:
        """Time reading rows that are `stride` bytes apart, on one thread."""
        seconds = np.empty(reps)
        self._read_rows(src, num_rows, row_bytes, stride, reps, seconds.ctypes.data)
        return seconds

    def best_readers(self, memory: Memory, nbytes: int, threads: int, rounds: int = 7) -> list[int]:
        """Kernels by rising median over pieces of nbytes, taken in turn."""
        piece = self.read_size(nbytes, threads)
        pieces = max(1, memory.nbytes // piece)
        at = 0
        times: dict[int, list[float]] = {reader: [] for reader in self.readers()}
        for _ in range(rounds):
            for reader, seconds in times.items():
                seconds.append(self.read(reader, memory.address + at % pieces * piece, nbytes, threads)[0])
                at += 1
        return sorted(times, key=lambda reader: statistics.median(times[reader]))

    def multiply_add(self, lanes: int, threads: int, reps: int = 1) -> tuple[float, Seconds]:
        """Time f32 multiply-adds; how many one repetition does (0: there are no such vectors), and its seconds."""
        seconds = np.zeros(reps)
        return self._multiply_add(lanes, threads, reps, seconds.ctypes.data), seconds

    @functools.cached_property
    def lanes(self) -> int:
        """Floats in the widest vectors there are."""
        return next(lanes for lanes in (16, 8, 1) if self.multiply_add(lanes, 1)[0])


@functools.cache
def machine() -> Machine:
    """Compile the yardsticks, once."""
    return Machine()


def huge_bytes() -> int:
    """Bytes of this process that lie in huge OS pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


# ---- the bare core


def widened(array: Floats) -> Floats:
    """As f32, what the first half of an array's bytes holds as bf16."""
    halves = array.reshape(-1).view(np.uint16)[: array.size]
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(array.shape)


class DriverShape(ctypes.Structure):
    """What driver.c calls driver_shape."""

    _fields_: ClassVar = [
        ("max_seq_len", _L),
        ("max_sequences", _L),
        *((name, _I) for name in ("num_layers", "num_kv_heads", "k_dim", "v_dim", "k_type", "v_type", "value_in_key")),
        *((name, _I) for name in ("window", "num_sink_tokens", "block_size", "num_threads")),
    ]


class DriverPass(ctypes.Structure):
    """What driver.c calls driver_pass."""

    _fields_: ClassVar = [
        *((name, _P) for name in ("rows", "q", "out")),
        *((name, _I) for name in ("num_tokens", "num_seqs", "num_heads", "num_threads", "q_type")),
    ]


@functools.cache
def _driver_library() -> dict[str, ctypes._CFuncPtr]:
    sources = [HERE / "driver.c", *sorted(ROOT.glob("src/*/*.c"))]
    library = build("driver", sources, ["-fvisibility=hidden", f"-I{ROOT}/include", f"-I{ROOT}/src"])
    return {
        "error": _function(library, "driver_error", ctypes.c_char_p),
        "new": _function(library, "driver_new", _P, ctypes.POINTER(DriverShape)),
        "free": _function(library, "driver_free", None, _P),
        "truncate": _function(library, "driver_truncate", _I, _P, _I),
        "fork": _function(library, "driver_fork", _I, _P, _L, _L),
        "drop_every_second": _function(library, "driver_drop_every_second", _I, _P),
        "rows_moved": _function(library, "driver_rows_moved", _L, _P),
        "append": _function(library, "driver_append", _I, _P, _L, _P, _I),
        "steps": _function(library, "driver_steps", _I, _P, _P, _I, _P, _P, _P),
        "put": _function(library, "driver_put", _I, _P, _P, _L, _I, _P),
        "attend": _function(library, "driver_attend", _I, _P, ctypes.POINTER(DriverPass), _I, _I, _P),
        "attend_and_show": _function(library, "driver_attend_and_show", _I, _P, ctypes.POINTER(DriverPass), _L, _P, _P),
    }


class Driver:
    """A cache of equal layers, driven and timed in C: see driver.c."""

    POOL = 512  # tokens whose rows are at hand; more are these again

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        dtype: str = "f16",
        *,
        v_dim: int = 0,
        v_type: str = "",
        value_in_key: bool = False,
        window: int = 0,
        num_sink_tokens: int = 0,
        block_size: int = 0,
        max_sequences: int = 1,
        num_threads: int = 1,
    ) -> None:
        self._calls = _driver_library()
        self.num_layers, self.k_dim, self.v_dim = num_layers, head_dim, v_dim or head_dim
        self.num_kv_heads, self.value_in_key = num_kv_heads, value_in_key
        self._q_type = TYPES["bf16" if dtype == "bf16" else "f32"]
        self._rng = np.random.default_rng(0)
        self._rows = np.empty(self.POOL * num_kv_heads * (self.k_dim + self.v_dim), np.float32)
        self._refresh()
        self._passes: dict[tuple[int, ...], tuple[DriverPass, Floats, Floats]] = {}
        self._next_layer = 0
        shape = DriverShape(
            max_seq_len, max_sequences, num_layers, num_kv_heads, self.k_dim, self.v_dim, TYPES[dtype],
            TYPES[v_type or dtype], value_in_key, window, num_sink_tokens, block_size, num_threads,
        )  # fmt: skip
        self._handle = self._calls["new"](ctypes.byref(shape))
        if not self._handle:
            raise RuntimeError(self._calls["error"]().decode())

    def close(self) -> None:
        self._calls["free"](self._handle)

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(self._calls["error"]().decode())

    def _refresh(self) -> None:
        self._rng.standard_normal(dtype=np.float32, out=self._rows)

    def append(self, num_tokens: int, seq_id: int = 0, *, fresh: bool = False) -> None:
        """Append random rows; with `fresh`, none of them twice."""
        for done in range(0, num_tokens, self.POOL):
            if fresh:
                self._refresh()
            count = min(self.POOL, num_tokens - done)
            self._check(self._calls["append"](self._handle, seq_id, self._rows.ctypes.data, count))

    def truncate(self, length: int) -> None:
        self._check(self._calls["truncate"](self._handle, length))

    def fork(self, src: int, dst: int) -> None:
        self._check(self._calls["fork"](self._handle, src, dst))

    def drop_every_second(self) -> None:
        """Drop every second token of sequence 0; what stays does not move."""
        self._check(self._calls["drop_every_second"](self._handle))

    def rows_moved(self) -> int:
        return self._calls["rows_moved"](self._handle)

    def steps(self, count: int) -> tuple[Seconds, Seconds, Seconds]:
        """Append tokens one by one; the seconds of begin, of one put and of commit of each."""
        seconds = np.empty((3, count))
        self._check(
            self._calls["steps"](self._handle, self._rows.ctypes.data, count, *(s.ctypes.data for s in seconds))
        )
        return seconds[0], seconds[1], seconds[2]

    def put(self, num_tokens: int, rows: int, step: int) -> Seconds:
        """Time the put of each layer, of f32 rows at an address, `step` bytes further for each layer; then abort."""
        seconds = np.empty(self.num_layers)
        self._check(self._calls["put"](self._handle, rows, step // 4, num_tokens, seconds.ctypes.data))
        return seconds

    def _pass(self, *numbers: int) -> tuple[DriverPass, Floats, Floats]:
        """A forward pass of so many tokens, sequences, query heads and threads, of a type, with its queries and output.

        The arrays hold f32; where the type is bf16, the C side reads and writes the first half of their bytes.
        """
        if numbers not in self._passes:
            num_tokens, num_seqs, num_heads, _, q_type = numbers
            tokens = num_tokens * num_seqs
            assert tokens <= self.POOL
            q = np.random.default_rng(1).standard_normal((tokens, num_heads, self.k_dim), np.float32)
            if q_type == TYPES["bf16"]:
                q.reshape(-1).view(np.uint16)[: q.size] = q.reshape(-1).view(np.uint16)[1::2].copy()
            out = np.empty((tokens, num_heads, self.v_dim), np.float32)
            addresses = (array.ctypes.data for array in (self._rows, q, out))
            self._passes[numbers] = DriverPass(*addresses, *numbers), q, out
        return self._passes[numbers]

    def attend(
        self, num_heads: int, num_threads: int, count: int, *, num_tokens: int = 1, num_seqs: int = 1
    ) -> Seconds:
        """Time attention of more tokens, which are not kept, `count` times: each in the layer after the last one's.

        Queries and output are f32; where keys are bf16, so are they, as in models of that type.
        """
        seconds = np.empty(count)
        forward, _, _ = self._pass(num_tokens, num_seqs, num_heads, num_threads, self._q_type)
        self._check(
            self._calls["attend"](self._handle, ctypes.byref(forward), self._next_layer, count, seconds.ctypes.data)
        )
        self._next_layer = (self._next_layer + count) % self.num_layers
        return seconds

    def attend_and_show(
        self, num_heads: int, num_threads: int, num_rows: int, q_type: str = "f32"
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """One token in layer 0: its queries, its output, and the keys and values [heads, num_rows, dim] it saw.

        Queries and output are f32 or bf16, and shown as f32.
        """
        forward, q, out = self._pass(1, 1, num_heads, num_threads, TYPES[q_type])
        k = np.empty((self.num_kv_heads, num_rows, self.k_dim), np.float32)
        v = k[:, :, : self.v_dim] if self.value_in_key else np.empty((*k.shape[:2], self.v_dim), np.float32)
        self._check(
            self._calls["attend_and_show"](
                self._handle,
                ctypes.byref(forward),
                num_rows,
                k.ctypes.data,
                None if self.value_in_key else v.ctypes.data,
            )
        )
        if q_type == "bf16":
            q, out = widened(q), widened(out)
        return q[0], out[0], k, v
