"""Measure the best speed at which this machine copies, reads, multiplies and adds (yardstick.c)."""

from __future__ import annotations

import ctypes
import functools
import statistics

import numpy as np
from compiling import ROOT, Floats, Library, Seconds

OS_PAGE = 4096


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
        self._c = Library("yardstick", sorted(ROOT.glob("src/base/*.c")), [])
        self.map, self.unmap = self._c.ys_map, self._c.ys_unmap

    def copy(self, dst: int, src: int, nbytes: int, threads: int, reps: int = 1) -> Seconds:
        """Time memcpy from one address to another."""
        seconds = np.empty(reps)
        self._c.ys_copy(dst, src, nbytes, threads, reps, seconds)
        return seconds

    def readers(self) -> dict[int, str]:
        """Name the reading loops that this machine can run, by their number."""
        names, i = {}, 0
        while (name := self._c.ys_reader(i)) is not None:
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
        self._c.ys_read(reader, src, self.read_size(nbytes, threads), threads, reps, seconds)
        return seconds

    def read_rows(self, src: int, num_rows: int, row_bytes: int, stride: int, reps: int = 1) -> Seconds:
        """Time reading rows that are `stride` bytes apart, with one thread."""
        seconds = np.empty(reps)
        self._c.ys_read_rows(src, num_rows, row_bytes, stride, reps, seconds)
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
        return self._c.ys_multiply_add(lanes, threads, reps, seconds), seconds

    def multiply_bytes(self, threads: int, reps: int = 1) -> tuple[float, Seconds]:
        """Time products of bytes: the number in one repetition (0: no such instruction here), and seconds of each."""
        seconds = np.zeros(reps)
        return self._c.ys_multiply_bytes(threads, reps, seconds), seconds

    @functools.cached_property
    def lanes(self) -> int:
        """The number of floats in the widest vectors of this machine."""
        return next(lanes for lanes in (16, 8, 1) if self.multiply_add(lanes, 1)[0])


@functools.cache
def machine() -> Machine:
    """Compile yardstick.c, once."""
    return Machine()
