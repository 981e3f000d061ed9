from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal, Self, SupportsFloat, SupportsIndex, TypeAlias, final

import numpy as np
import numpy.typing as npt

from kvcache.follower import Edit

INT32_MAX: int
INT64_MAX: int
IDS: tuple[int, int]
MAX_THREADS: int
TYPES: dict[str, int]
TRANSFORMS: dict[str | None, int]
POLICIES: dict[str, int]

# num_kv_heads, k_dim, v_dim; k_type, v_type; k_transform, v_transform; value_in_key; share; policy: kind, window,
# num_sink_tokens, attention_chunk_size, resume_window, max_len; rope: inv_freq, interleaved, first_dim
_LayerTuple: TypeAlias = tuple[
    tuple[int, int, int],
    tuple[int, int],
    tuple[int, int],
    bool,
    int,
    tuple[int, int, int, int, int, int],
    tuple[tuple[float, ...], bool, int] | Callable[[int, npt.NDArray[np.float32], int], Any] | Literal[False] | None,
]

class BFloat16Array(np.ndarray[Any, Any]):
    def __dlpack__(self, **options: Any) -> Any: ...

@final
class Hold: ...

@final
class Callbacks:
    def __new__(cls, num_layers: int) -> Self: ...

@final
class Cache:
    def __new__(
        cls,
        layers: list[_LayerTuple],
        max_seq_len: int,
        max_sequences: int,
        capacity: int,
        max_bytes: int,
        block_size: int,
        num_threads: int,
        original: Cache | None = None,
    ) -> Self: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def check_open(self) -> int: ...
    def close(self) -> None: ...
    def seq_len(self, seq_id: SupportsIndex, layer: SupportsIndex | None) -> int: ...
    def position_range(self, seq_id: SupportsIndex, layer: SupportsIndex | None) -> tuple[int, int]: ...
    def next_position(self, seq_id: SupportsIndex) -> int: ...
    def can_resume(self, seq_id: SupportsIndex, position: SupportsIndex) -> bool: ...
    def exact_to(self, seq_id: SupportsIndex) -> int: ...
    def mark_inexact(self, seq_id: SupportsIndex, position: SupportsIndex) -> None: ...
    def sequences(self) -> list[int]: ...
    def positions(self, seq_id: SupportsIndex, layer: SupportsIndex) -> npt.NDArray[np.int32]: ...
    def clear(self, seq_id: SupportsIndex | None, edits: deque[Edit] | None = None) -> None: ...
    def keep(self, seq_id: SupportsIndex, edits: deque[Edit] | None = None) -> None: ...
    def copy_prefix(
        self, src: SupportsIndex, dst: SupportsIndex, length: SupportsIndex, edits: deque[Edit] | None = None
    ) -> None: ...
    def fork(self, src: SupportsIndex, dst: SupportsIndex, edits: deque[Edit] | None = None) -> None: ...
    def share_range(
        self,
        src: SupportsIndex,
        dst: SupportsIndex,
        begin: SupportsIndex,
        end: SupportsIndex | None,
        edits: deque[Edit] | None = None,
    ) -> None: ...
    def remove(
        self,
        seq_id: SupportsIndex,
        begin: SupportsIndex,
        end: SupportsIndex | None,
        shift: bool,
        edits: deque[Edit] | None = None,
    ) -> None: ...
    def truncate(self, seq_id: SupportsIndex, length: SupportsIndex, edits: deque[Edit] | None = None) -> None: ...
    def shift(
        self,
        seq_id: SupportsIndex,
        begin: SupportsIndex,
        end: SupportsIndex | None,
        delta: SupportsIndex,
        edits: deque[Edit] | None = None,
    ) -> None: ...
    def divide(
        self,
        seq_id: SupportsIndex,
        begin: SupportsIndex,
        end: SupportsIndex | None,
        divisor: SupportsIndex,
        edits: deque[Edit] | None = None,
    ) -> None: ...
    def settle(self) -> None: ...
    def reserve(self, num_tokens: SupportsIndex, seq_id: SupportsIndex) -> None: ...
    def room(self, seq_id: SupportsIndex) -> int: ...
    def compact(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def blocks(
        self, layer: SupportsIndex
    ) -> tuple[list[tuple[int, int, int, int, int, bool]], list[tuple[int, int, int, int, int, int, bool]]]: ...
    def nbytes(self) -> int: ...
    def block_size(self) -> int: ...
    def capacity(self) -> int | None: ...
    def capacity_bytes(self) -> int | None: ...
    def utilization(self) -> float: ...
    def validate(self) -> None: ...
    def get(
        self, seq_id: SupportsIndex, layer: SupportsIndex, position: SupportsIndex
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None: ...
    def gather(
        self,
        seq_id: SupportsIndex,
        layer: SupportsIndex,
        first: SupportsIndex,
        dtype: str | None,
        out: object,
        raw: bool,
    ) -> tuple[Any, Any]: ...
    def extract(
        self, seq_id: SupportsIndex, layer: SupportsIndex, begin: SupportsIndex, end: SupportsIndex, raw: bool
    ) -> tuple[Any, Any]: ...
    def inject(
        self,
        seq_id: SupportsIndex,
        layer: SupportsIndex,
        begin: SupportsIndex,
        k: object,
        v: object,
        skip_missing: bool,
        edits: deque[Edit] | None = None,
    ) -> int: ...
    def begin(
        self,
        n: SupportsIndex | None,
        positions: Iterable[SupportsIndex] | None,
        seq_ids: Iterable[SupportsIndex] | None,
        parents: Iterable[SupportsIndex] | None,
        timeout: SupportsFloat | None,
        decide: Callable[[npt.NDArray[np.int32], npt.NDArray[np.int64]], npt.NDArray[np.bool_] | None] | None,
        replaced: Iterable[SupportsIndex] | None,
    ) -> Batch: ...

def rows(
    cache: Cache,
    batch: Batch | None,
    seq_id: SupportsIndex | None,
    layer: SupportsIndex,
    copy: bool | None,
    values: bool,
) -> npt.NDArray[Any]: ...
def spans(
    cache: Cache, batch: Batch | None, seq_id: SupportsIndex | None, layer: SupportsIndex
) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any], int, int, int]]: ...
def retain(
    cache: Cache, src: SupportsIndex, seq_id: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None
) -> None: ...
def retain_new(
    cache: Cache,
    seq_id: SupportsIndex,
    begin: SupportsIndex,
    end: SupportsIndex | None,
    layers: Iterable[SupportsIndex],
) -> None: ...
def attach(cache: Cache, seq_ids: Iterable[SupportsIndex], dst: SupportsIndex, length: SupportsIndex) -> int: ...
def touch(cache: Cache, seq_ids: Iterable[SupportsIndex]) -> None: ...
def pin(cache: Cache, seq_ids: Iterable[SupportsIndex], pinned: bool) -> None: ...
def retained(cache: Cache) -> list[int]: ...
def save(
    cache: Cache,
    write: Callable[[memoryview], object],
    seq_ids: list[int] | None,
    tokens: Iterable[Iterable[SupportsIndex]] | None,
    fingerprint: str,
) -> None: ...
def restore(
    cache: Cache,
    data: Any,
    read: Callable[[memoryview], object] | None,
    size: int,
    fingerprint: str | None,
    seq_ids: Iterable[SupportsIndex] | None,
    to_ids: Iterable[SupportsIndex] | None,
    edits: deque[Edit] | None,
    restored: Iterable[Edit],
) -> None: ...
def verify(data: Any) -> None: ...

@final
class Slots: ...

@final
class Batch:
    @property
    def cache(self) -> Cache: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def positions(self) -> npt.NDArray[np.int32]: ...
    @property
    def ended(self) -> bool: ...
    def get_seq_ids(self) -> npt.NDArray[np.int64]: ...
    def put(
        self,
        layer: SupportsIndex,
        k: object,
        v: object,
        first: SupportsIndex,
        seq_id: SupportsIndex | None,
        layout: str,
    ) -> None: ...
    def slots(self, layer: SupportsIndex, first: SupportsIndex) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...
    def written(self, layer: SupportsIndex, first: SupportsIndex, num_tokens: SupportsIndex) -> None: ...
    def attend(
        self,
        layer: SupportsIndex,
        q: object,
        k: object,
        v: object,
        first: SupportsIndex,
        scale: SupportsFloat | None,
        softcap: SupportsFloat | None,
        sinks: object,
        alibi: object,
        non_causal: object,
        masked: object,
        layout: str,
        out: object,
        return_lse: bool,
    ) -> Any: ...
    def dense(
        self,
        layer: SupportsIndex,
        non_causal: object,
        masked: object,
        dtype: str | None,
        layout: str,
        mask: str | None,
        out: object,
    ) -> tuple[Any, Any, Any]: ...
    def commit(
        self, keep: Iterable[SupportsIndex] | None, edits: deque[Edit] | None = None, restored: Iterable[Edit] = ()
    ) -> bool: ...
    def abort(self) -> None: ...

def exit_batch(
    batch: Any, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
) -> None: ...
def flag(value: bool, name: str) -> bool: ...
def integer(value: SupportsIndex, name: str, low: int, high: int) -> int: ...
def integers(values: Iterable[SupportsIndex], name: str) -> npt.NDArray[np.int64]: ...
def check_tensor(x: object, name: str) -> None: ...
def bytes_of_row(type: int, dim: int) -> int: ...
def version() -> int: ...
def build_info() -> str: ...
def isa() -> str | None: ...
def get_num_threads() -> int: ...
def set_num_threads(num_threads: SupportsIndex | None) -> None: ...
def threading_layer() -> str | None: ...
def set_threading_layer(name: str | None) -> None: ...
def openmp_library() -> str: ...
