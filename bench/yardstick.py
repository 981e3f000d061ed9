"""Measure the best speed at which this machine copies, reads, multiplies and adds (yardstick.c)."""

from __future__ import annotations

import ctypes
import functools
import statistics
from pathlib import Path

import numpy as np
from compiling import BASE, HERE, INCLUDE, Floats, Seconds, build, function

OS_PAGE = 4096
I32, SIZE, POINTER, DOUBLE = ctypes.c_int32, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_double


class Memory:
    """Memory whose OS pages are all touched: small pages, or huge pages if the system has them."""

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
        """View the memory as an array, which is valid as long as this object lives."""
        return np.ctypeslib.as_array((ctypes.c_float * (self.nbytes // 4)).from_address(self.address))


class Machine:
    """The functions of yardstick.c."""

    def __init__(self) -> None:
        library = build("yardstick", [HERE / "yardstick.c", *BASE], INCLUDE)
        self.map = function(library, "ys_map", POINTER, SIZE, I32)
        self.unmap = function(library, "ys_unmap", None, POINTER, SIZE)
        self._copy = function(library, "ys_copy", None, POINTER, POINTER, SIZE, I32, I32, POINTER)
        self._reader = function(library, "ys_reader", ctypes.c_char_p, I32)
        self._read = function(library, "ys_read", None, I32, POINTER, SIZE, I32, I32, POINTER)
        self._read_rows = function(library, "ys_read_rows", None, POINTER, SIZE, SIZE, SIZE, I32, POINTER)
        self._multiply_add = function(library, "ys_multiply_add", DOUBLE, I32, I32, I32, POINTER)

    def copy(self, dst: int, src: int, nbytes: int, threads: int, reps: int = 1) -> Seconds:
        """Time memcpy from one address to another."""
        seconds = np.empty(reps)
        self._copy(dst, src, nbytes, threads, reps, seconds.ctypes.data)
        return seconds

    def readers(self) -> dict[int, str]:
        """Name the reading loops that this machine can run, by their number."""
        names, i = {}, 0
        while (name := self._reader(i)) is not None:
            if name:
                names[i] = name.decode()
            i += 1
        return names

    @staticmethod
    def read_size(nbytes: int, threads: int) -> int:
        """Round up to a size that the reading loops take."""
        unit = OS_PAGE * 4 * threads
        return -(-nbytes // unit) * unit

    def read(self, reader: int, src: int, nbytes: int, threads: int, reps: int = 1) -> Seconds:
        """Time reading nbytes, rounded up to `read_size`."""
        seconds = np.empty(reps)
        self._read(reader, src, self.read_size(nbytes, threads), threads, reps, seconds.ctypes.data)
        return seconds

    def read_rows(self, src: int, num_rows: int, row_bytes: int, stride: int, reps: int = 1) -> Seconds:
        """Time reading rows that are `stride` bytes apart, with one thread."""
        seconds = np.empty(reps)
        self._read_rows(src, num_rows, row_bytes, stride, reps, seconds.ctypes.data)
        return seconds

    def best_readers(self, memory: Memory, nbytes: int, threads: int, rounds: int = 7) -> list[int]:
        """Sort the reading loops by their median time over interleaved pieces of `nbytes`, fastest first."""
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
        """Time f32 multiply-adds: the number in one repetition (0: no such vectors here), and seconds of each."""
        seconds = np.zeros(reps)
        return self._multiply_add(lanes, threads, reps, seconds.ctypes.data), seconds

    @functools.cached_property
    def lanes(self) -> int:
        """The number of floats in the widest vectors of this machine."""
        return next(lanes for lanes in (16, 8, 1) if self.multiply_add(lanes, 1)[0])


@functools.cache
def machine() -> Machine:
    """Compile yardstick.c, once."""
    return Machine()


def huge_bytes() -> int:
    """Count the bytes of this process that lie in huge OS pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))
