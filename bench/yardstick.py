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

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FLAGS = ["-std=c11", "-O3", "-fPIC", "-shared", "-Wall", "-Wextra"]
TYPES = {"f32": 0, "f16": 1, "bf16": 2}
OS_PAGE = 4096

Seconds = npt.NDArray[np.float64]


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
    """Bytes in OS pages as the system gives them, all of them touched."""

    def __init__(self, nbytes: int) -> None:
        self._unmap = machine().unmap
        self.nbytes = nbytes
        self.address = machine().map(nbytes)
        if not self.address:
            raise MemoryError(f"{nbytes} bytes to measure with")

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self._unmap(self.address, self.nbytes)

    def floats(self) -> npt.NDArray[np.float32]:
        """The memory as an array, which is valid as long as this lives."""
        return np.ctypeslib.as_array((ctypes.c_float * (self.nbytes // 4)).from_address(self.address))


class Machine:
    """What it does at best: see yardstick.c."""

    def __init__(self) -> None:
        library = build("yardstick", [HERE / "yardstick.c"])
        self.map = _function(library, "ys_map", _P, _SIZE)
        self.unmap = _function(library, "ys_unmap", None, _P, _SIZE)
        self._copy = _function(library, "ys_copy", None, _P, _P, _SIZE, _I, _I, _P)
        self._reader = _function(library, "ys_reader", ctypes.c_char_p, _I)
        self._read = _function(library, "ys_read", None, _I, _P, _SIZE, _I, _I, _P)
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

    def read(self, reader: int, src: int, nbytes: int, threads: int, reps: int = 1) -> Seconds:
        """Time reading nbytes, rounded up to what the kernels take."""
        seconds, unit = np.empty(reps), OS_PAGE * 4 * threads
        self._read(reader, src, -(-nbytes // unit) * unit, threads, reps, seconds.ctypes.data)
        return seconds

    def best_reader(self, memory: Memory, nbytes: int, threads: int, rounds: int = 7) -> int:
        """Find the kernel with the best median over pieces of nbytes, taken in turn."""
        unit = OS_PAGE * 4 * threads
        pieces = memory.nbytes // (-(-nbytes // unit) * unit)
        names, at = self.readers(), 0
        times: dict[int, list[float]] = {reader: [] for reader in names}
        for _ in range(rounds):
            for reader in names:
                src = memory.address + at % pieces * (-(-nbytes // unit) * unit)
                times[reader].append(self.read(reader, src, nbytes, threads)[0])
                at += 1
        return min(times, key=lambda reader: statistics.median(times[reader]))

    def multiply_add(self, lanes: int, threads: int, reps: int = 1) -> tuple[float, Seconds]:
        """Time f32 multiply-adds; how many one repetition does (0: there are no such vectors), and its seconds."""
        seconds = np.zeros(reps)
        return self._multiply_add(lanes, threads, reps, seconds.ctypes.data), seconds


@functools.cache
def machine() -> Machine:
    """Compile the yardsticks, once."""
    return Machine()


def cache_size() -> int:
    """Bytes of the last-level cache."""
    sizes = [0]
    for size in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = size.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return max(sizes) or 32 << 20


# ---- the bare core


@functools.cache
def _driver_library() -> dict[str, ctypes._CFuncPtr]:
    sources = [HERE / "driver.c", *sorted(ROOT.glob("src/*.c")), *sorted(ROOT.glob("src/kernels/*.c"))]
    library = build("driver", sources, ["-fvisibility=hidden", f"-I{ROOT}/include", f"-I{ROOT}/src"])
    return {
        "error": _function(library, "driver_error", ctypes.c_char_p),
        "new": _function(library, "driver_new", _P, _I, _I, _I, _L, _I, _I, _I, _I),
        "free": _function(library, "driver_free", None, _P),
        "truncate": _function(library, "driver_truncate", _I, _P, _I),
        "rows_moved": _function(library, "driver_rows_moved", _L, _P),
        "append": _function(library, "driver_append", _I, _P, _P, _I),
        "steps": _function(library, "driver_steps", _I, _P, _P, _I, _P, _P, _P),
        "put": _function(library, "driver_put", _I, _P, _P, _L, _I, _P),
        "attend": _function(library, "driver_attend", _I, _P, _P, _P, _P, _I, _I, _I, _P),
    }


class Driver:
    """A cache of equal layers, driven and timed in C: see driver.c."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        dtype: str = "f16",
        *,
        window: int = 0,
        block_size: int = 0,
        num_threads: int = 1,
    ) -> None:
        self._calls = _driver_library()
        self.num_layers = num_layers
        self._rows = np.random.default_rng(0).standard_normal((2, 512, num_kv_heads, head_dim), np.float32)
        shape = num_layers, num_kv_heads, head_dim, max_seq_len
        self._handle = self._calls["new"](*shape, TYPES[dtype], window, block_size, num_threads)
        if not self._handle:
            raise RuntimeError(self._calls["error"]().decode())

    def close(self) -> None:
        self._calls["free"](self._handle)

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(self._calls["error"]().decode())

    def append(self, num_tokens: int) -> None:
        """Append any rows."""
        for done in range(0, num_tokens, 512):
            self._check(self._calls["append"](self._handle, self._rows.ctypes.data, min(512, num_tokens - done)))

    def truncate(self, length: int) -> None:
        self._check(self._calls["truncate"](self._handle, length))

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

    def attend(self, num_heads: int, num_threads: int, reps: int) -> Seconds:
        """Time the attention of one more token, [reps, num_layers]; it is not kept."""
        seconds = np.empty((reps, self.num_layers))
        q = np.random.default_rng(1).standard_normal((num_heads, self._rows.shape[3]), np.float32)
        out = np.empty_like(q)
        addresses = (array.ctypes.data for array in (self._rows, q, out))
        self._check(self._calls["attend"](self._handle, *addresses, num_heads, num_threads, reps, seconds.ctypes.data))
        return seconds
