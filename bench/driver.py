"""Call the core, compiled from the sources of this checkout, from C, and time it there (driver.c)."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Self

import numpy as np
from compiling import Floats, Library, Seconds

from kvcache import _core
from kvcache.layer import DTYPES, bytes_of_token

TYPES = {dtype: _core.TYPES[dtype] for dtype in DTYPES}  # kvc_type
FLOATS = {dtype: TYPES[dtype] for dtype in ("f32", "f16", "bf16")}
BYTES = {dtype: bytes_of_token(1, 64, 64, dtype, dtype) / 128 for dtype in TYPES}  # bytes of an element


def widen(array: Floats) -> Floats:
    """Read the first half of an array's bytes as bf16, and return it as f32."""
    halves = array.reshape(-1).view(np.uint16)[: array.size]
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(array.shape)


@functools.cache
def _library() -> Library:
    return Library("driver")


class Driver:
    """A cache of equal layers that is called and timed in C (driver.c)."""

    POOL = 512  # tokens of random rows, which repeat when more are appended

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
        block_size: int = 0,
        num_threads: int = 1,
    ) -> None:
        self._c = _library()
        self.num_layers, self.k_dim, self.v_dim = num_layers, head_dim, v_dim or head_dim
        self.num_kv_heads, self.value_in_key = num_kv_heads, value_in_key
        self._q_type = TYPES["bf16" if dtype == "bf16" else "f32"]
        self._rng = np.random.default_rng(0)
        self._rows = np.empty(self.POOL * num_kv_heads * (self.k_dim + self.v_dim), np.float32)
        self._refresh()
        self._passes: dict[tuple[int, ...], tuple[Any, Floats, Floats]] = {}
        self._next_layer = 0
        shape = self._c.struct("driver_shape")(
            max_seq_len, num_layers, num_kv_heads, self.k_dim, self.v_dim, TYPES[dtype],
            TYPES[v_type or dtype], value_in_key, window, block_size, num_threads,
        )  # fmt: skip
        self._handle = ctypes.c_void_p()
        self._c.driver_new(ctypes.byref(shape), ctypes.byref(self._handle))

    def close(self) -> None:
        self._c.driver_free(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refresh(self) -> None:
        self._rng.standard_normal(dtype=np.float32, out=self._rows)

    def append(self, num_tokens: int, *, fresh: bool = False) -> None:
        """Append random rows; with `fresh`, no row is appended twice."""
        for done in range(0, num_tokens, self.POOL):
            if fresh:
                self._refresh()
            count = min(self.POOL, num_tokens - done)
            self._c.driver_append(self._handle, self._rows, count)

    def truncate(self, length: int) -> None:
        self._c.driver_truncate(self._handle, length)

    def drop_every_second(self) -> None:
        """Remove every second token of sequence 0 without moving the others."""
        self._c.driver_drop_every_second(self._handle)

    def steps(self, count: int) -> tuple[Seconds, Seconds, Seconds]:
        """Append tokens one by one; return the seconds of each begin, of each put in one layer, and of each commit."""
        seconds = np.empty((3, count))
        self._c.driver_steps(self._handle, self._rows, count, *seconds)
        return seconds[0], seconds[1], seconds[2]

    def put(self, num_tokens: int, rows: int, step: int) -> Seconds:
        """Time putting f32 rows into each layer, from address `rows`, plus `step` bytes for each layer; then abort."""
        seconds = np.empty(self.num_layers)
        self._c.driver_put(self._handle, rows, step // 4, num_tokens, seconds)
        return seconds

    def _pass(self, *numbers: int) -> tuple[Any, Floats, Floats]:
        """Make a forward pass, its queries and its output; numbers: those of driver_pass.

        The arrays hold f32; where the type has 16 bits, the C side reads and writes the first half of their bytes.
        """
        if numbers not in self._passes:
            tokens, num_heads, _, q_type, _ = numbers
            assert tokens <= self.POOL
            q = np.random.default_rng(1).standard_normal((tokens, num_heads, self.k_dim), np.float32)
            if q_type == TYPES["f16"]:
                q.reshape(-1).view(np.float16)[: q.size] = q.reshape(-1).astype(np.float16)
            if q_type == TYPES["bf16"]:
                q.reshape(-1).view(np.uint16)[: q.size] = q.reshape(-1).view(np.uint16)[1::2].copy()
            out = np.empty((tokens, num_heads, self.v_dim), np.float32)
            addresses = (array.ctypes.data for array in (self._rows, q, out))
            self._passes[numbers] = self._c.struct("driver_pass")(*addresses, *numbers), q, out
        return self._passes[numbers]

    def attend(
        self, num_heads: int, num_threads: int, count: int, *, num_tokens: int = 1, q_type: str = "",
        in_bytes: bool = False,
    ) -> Seconds:  # fmt: skip
        """Time attention of further tokens `count` times, going round the layers; the tokens are not kept.

        Queries and output are of q_type, by default f32, or bf16 if keys are bf16, as in models of that type. With
        in_bytes, prompts are multiplied in bytes.
        """
        seconds = np.empty(count)
        number = TYPES[q_type] if q_type else self._q_type
        forward, _, _ = self._pass(num_tokens, num_heads, num_threads, number, int(in_bytes))
        self._c.driver_attend(self._handle, ctypes.byref(forward), self._next_layer, count, seconds)
        self._next_layer = (self._next_layer + count) % self.num_layers
        return seconds

    def attend_and_show(
        self, num_heads: int, num_threads: int, num_rows: int, q_type: str = "f32"
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Attend for one token in layer 0; return its queries, its output, and the keys and values it saw.

        Keys and values are [heads, num_rows, dim]. Queries and output may be bf16, and are returned as f32.
        """
        forward, q, out = self._pass(1, num_heads, num_threads, TYPES[q_type], 0)
        k = np.empty((self.num_kv_heads, num_rows, self.k_dim), np.float32)
        v = k[:, :, : self.v_dim] if self.value_in_key else np.empty((*k.shape[:2], self.v_dim), np.float32)
        values = None if self.value_in_key else v
        self._c.driver_attend_and_show(self._handle, ctypes.byref(forward), num_rows, k, values)
        if q_type == "bf16":
            q, out = widen(q), widen(out)
        return q[0], out[0], k, v
