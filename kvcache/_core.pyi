from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal, Self, SupportsFloat, SupportsIndex, TypeAlias, TypeVar, final

import numpy as np
import numpy.typing as npt

from kvcache.follower import Edit

_T = TypeVar("_T")

INT32_MAX: int
INT64_MAX: int
IDS: tuple[int, int]
MAX_THREADS: int
TYPES: dict[str, int]
TRANSFORMS: dict[str | None, int]
POLICIES: dict[str, int]

# num_kv_heads, k_dim, v_dim; k_type, v_type; k_transform, v_transform; value_in_key; share; policy: kind, window,
# num_sink_tokens, attention_chunk_size, resume_window, max_len, stride; rope: inv_freq, interleaved, first_dim
_LayerTuple: TypeAlias = tuple[
    tuple[int, int, int],
    tuple[int, int],
    tuple[int, int],
    bool,
    int,
    int,
    tuple[int, int, int, int, int, int, int],
    tuple[tuple[float, ...], bool, int] | Callable[[int, npt.NDArray[np.float32], int], Any] | Literal[False] | None,
]

class BFloat16Array(np.ndarray[Any, Any]):
    def __dlpack__(self, **options: Any) -> Any: ...

_Ids: TypeAlias = npt.NDArray[np.int64]
_Digests: TypeAlias = npt.NDArray[np.uint8] | None

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
    def keep_positions(
        self,
        seq_id: SupportsIndex,
        positions: Iterable[SupportsIndex],
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
    def reserve(self, num_tokens: SupportsIndex, seq_id: SupportsIndex) -> None: ...
    def room(self, seq_id: SupportsIndex) -> int: ...
    def compact(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def blocks(
        self, layer: SupportsIndex
    ) -> tuple[
        list[tuple[int, int, int, int, int, bool, int]], list[tuple[int, int | None, int, int, int, int, bool]]
    ]: ...
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
def weigh_rows(
    cache: Cache,
    layer: SupportsIndex,
    q: object,
    positions: Iterable[SupportsIndex] | None,
    seq_id: SupportsIndex,
    reduce: str,
    rotate: bool,
    scale: SupportsFloat | None,
    softcap: SupportsFloat | None,
    sinks: object,
) -> npt.NDArray[np.float32]: ...
def spans(
    cache: Cache, batch: Batch | None, seq_id: SupportsIndex | None, layer: SupportsIndex
) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any], int, int, int, int]]: ...

@final
class FolderStore:
    def __new__(cls, path: bytes, max_bytes: int) -> Self: ...
    def read(self, name: bytes, most: int) -> bytes | None: ...
    def size(self, name: bytes) -> int: ...
    def write(self, name: bytes, value: memoryview) -> None: ...
    def remove(self, name: bytes) -> None: ...

@final
class Prefix:
    def __new__(
        cls,
        cache: Cache,
        salt: bytes,
        identity: bytes,
        secret: bytes | None,
        quota: int,
        ttl_ms: int,
        reuse_min_tokens: int,
        collects_new: bool,
        state_bytes: int,
        max_checkpoint_bytes: int,
        max_events: int,
    ) -> Self: ...
    @property
    def user(self) -> int: ...
    def acquire(self, ids: _Ids, digests: _Digests, max_matched: int) -> tuple[int, int]: ...
    def release(self, seq_id: SupportsIndex, ids: _Ids, digests: _Digests) -> None: ...
    def checkpoint(self, seq_id: SupportsIndex, ids: _Ids, digests: _Digests, state: memoryview) -> None: ...
    def state(self, seq_id: SupportsIndex) -> memoryview | None: ...
    def lookup(self, ids: _Ids, digests: _Digests) -> tuple[int, int]: ...
    def pin(self, ids: _Ids, digests: _Digests) -> int: ...
    def unpin(self, ids: _Ids, digests: _Digests) -> None: ...
    def evict(self, num_tokens: SupportsIndex) -> int: ...
    def clear(self) -> None: ...
    def forget(self, ids: _Ids, digests: _Digests, found: deque[npt.NDArray[np.uint8]]) -> int: ...
    def end_forgets(self) -> None: ...
    def names(self, ids: _Ids, digests: _Digests) -> list[str]: ...
    def take_events(self) -> tuple[list[tuple[int, int, str]], int]: ...
    def fetch(
        self, ids: _Ids, digests: _Digests, max_matched: int, names: bytes, values: list[bytes]
    ) -> tuple[int, int, str | None]: ...
    def stats(self) -> dict[str, int]: ...

def identity(cache: Cache, fingerprint: bytes) -> bytes: ...
def new_sequence(cache: Cache) -> int: ...
def take_new_blocks(cache: Cache, found: deque[tuple[int, str, int]]) -> None: ...
def pack_block(cache: Cache, block_id: int, name: bytes, stored: bytes | None) -> bytes | None: ...
def save(
    cache: Cache,
    write: Callable[[memoryview], object],
    seq_ids: list[int] | None,
    tokens: Iterable[Iterable[SupportsIndex]] | None,
    fingerprint: str,
) -> None: ...
def restore(
    cache: Cache,
    read: Callable[[memoryview], object],
    size: int,
    fingerprint: str | None,
    seq_ids: Iterable[SupportsIndex] | None,
    to_ids: Iterable[SupportsIndex] | None,
    edits: deque[Edit] | None,
    restored: Iterable[Edit],
) -> None: ...
def verify(read: Callable[[memoryview], object], size: int) -> None: ...

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
        chosen: object,
        chosen_block: SupportsIndex,
        chosen_tail: bool,
        select: SupportsIndex | None,
        precision: str,
        prior: object,
        layout: str,
        out: object,
        return_lse: bool,
    ) -> Any: ...
    def choose(
        self,
        layer: SupportsIndex,
        q: object,
        first: SupportsIndex,
        width: SupportsIndex,
        options: dict[str, Any],
        layout: str,
        return_scores: bool,
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

def enter_batch(batch: _T) -> _T: ...
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
