"""`KVCache` with the methods that the benchmarks call."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvcache.benchmarks import Case
from kvcache.cache import KVCache
from kvcache.layer import DTYPES, DType, suits
from kvcache.policy import FullAttention, SlidingWindow


class Ours:
    """A `KVCache` behind the methods of `kvcache.benchmarks.Implementation`."""

    def __init__(self, case: Case) -> None:
        dtype = cast(DType, case.dtype)
        if dtype not in DTYPES:
            raise NotImplementedError(f"its types are {', '.join(DTYPES)}, not {dtype}")
        if not suits(dtype, case.head_dim):
            raise NotImplementedError(f"{dtype} takes a head_dim that is a multiple of 32, not {case.head_dim}")
        self._cache = KVCache(
            case.num_layers, case.num_kv_heads, case.head_dim, None if case.window else case.max_seq_len, dtype=dtype,
            policy=SlidingWindow(case.window) if case.window else FullAttention(), rope=False,
            max_sequences=case.max_sequences, num_threads=case.threads,
        )  # fmt: skip

    def begin(self, num_tokens: int, seq_id: int = 0) -> None:
        """Begin a batch."""
        if seq_id == 0:
            self._batch = self._cache.batch(num_tokens)
        else:
            at = self._cache.next_position(seq_id)
            self._batch = self._cache.batch(positions=range(at, at + num_tokens), seq_ids=[seq_id] * num_tokens)

    def put(self, layer: int, k: npt.NDArray[np.float32], v: npt.NDArray[np.float32]) -> None:
        """Store rows."""
        self._batch.put(layer, k, v)

    def attend(self, layer: int, q: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Attend over the stored rows."""
        return self._batch.attend(layer, q)

    def commit(self) -> None:
        """End the batch."""
        self._batch.commit()

    def fork(self, src: int, dst: int) -> None:
        """Share a sequence's rows with another."""
        self._cache.fork(src, dst)

    def remove(self, begin: int, end: int) -> None:
        """Remove tokens."""
        self._cache.remove(begin, end)

    def compact(self) -> None:
        """Close the holes that removed tokens left."""
        self._cache.compact()

    def gather(self, layer: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Copy rows out."""
        return self._cache.gather(layer)
