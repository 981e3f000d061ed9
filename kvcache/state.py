"""Saved states: files with all that sequences hold, read and written whole or not at all.

`KVCache.save`, `KVCache.load` and `KVCache.restore` use this module, and ``kvcache inspect`` shows a file. The core
writes and reads the format, which docs/format.md specifies; here are files, secrets, and what a file's tables say.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import mmap
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, SupportsIndex, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvcache import _core
from kvcache.errors import StateFormatError
from kvcache.layer import DTYPES, Layer, Transform
from kvcache.policy import ChunkedAttention, CrossAttention, FullAttention, Policy, SlidingWindow
from kvcache.rope import Rope, RopeLike

if TYPE_CHECKING:
    from kvcache.saveable import Saveable

__all__ = ["SavedSequence", "SavedState", "Tensor", "inspect"]

StrPath: TypeAlias = str | os.PathLike[str]

C = TypeVar("C", bound="Saveable")

OVERRIDES = {"max_seq_len", "max_sequences", "capacity", "max_bytes", "block_size", "num_threads", "strategy"}

VERSION = 1
MAC_BYTES = 32
SENT_BYTES = 8 << 20  # after so many, the disk begins to write; later, fsync would wait for all
MOST_HEADER = 100_000_000  # bytes


@dataclass(frozen=True)
class Tensor:
    """A tensor of a saved state: its name, type and shape, and where its bytes lie in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class SavedSequence:
    """A sequence of a saved state.

    Attributes
    ----------
    seq_id : int
        The sequence's id.
    num_rows : tuple of int
        The number of its rows in each layer.
    next_position : int
        The position of its next token.
    tokens : ndarray of int64
        The tokens that `KVCache.save` was given; none if it was given none.
    """

    seq_id: int
    num_rows: tuple[int, ...]
    next_position: int
    tokens: npt.NDArray[np.int64]


@dataclass(frozen=True)
class SavedState:
    """What a saved state says of itself, without its rows.

    Attributes
    ----------
    version : int
        The version of the format.
    library : str
        The version of the library that wrote the file.
    fingerprint : str
        The name of the model that `KVCache.save` was given; "" if it was given none.
    layers : tuple of Layer
        The layers; a `rope` that is a function is not in the file, and True here.
    block_size, max_seq_len, max_sequences, capacity, max_bytes : int
        The arguments of the cache; 0: no limit, or, of `capacity`, what follows from the two before.
    sequences : tuple of SavedSequence
        The sequences, by rising id.
    tensors : tuple of Tensor
        The tensors of the file.
    nbytes : int
        The size of the file.
    has_mac : bool
        Whether it was saved with a secret.
    """

    version: int
    library: str
    fingerprint: str
    layers: tuple[Layer, ...]
    block_size: int
    max_seq_len: int
    max_sequences: int
    capacity: int
    max_bytes: int
    sequences: tuple[SavedSequence, ...]
    tensors: tuple[Tensor, ...]
    nbytes: int
    has_mac: bool


def inspect(path: StrPath, *, verify: bool = False) -> SavedState:
    """Read what a saved state says of itself.

    Parameters
    ----------
    path : path
        The file.
    verify : bool, default False
        Whether to read all of it, and to compare its checksums.

    Returns
    -------
    SavedState
        Its layers, limits, sequences and tensors.

    Raises
    ------
    StateFormatError
        If it is no saved state, or is damaged; without `verify`, damaged rows go unnoticed.
    OSError
        If the file cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> import kvcache
    >>> from kvcache.state import inspect
    >>> cache = kvcache.KVCache(1, 1, 2, 64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache.save(f"{folder}/empty")
    ...     inspect(f"{folder}/empty", verify=True).layers[0].head_dim
    2
    """
    with _mapped(path) as data:
        if verify:
            _core.verify(data)
        return _read(data)


# ---- reading what a file says


@contextmanager
def _mapped(path: StrPath) -> Iterator[mmap.mmap]:
    """Map a file into memory; errors in its content name it."""
    with open(path, "rb") as file:
        try:
            if not os.fstat(file.fileno()).st_size:
                raise StateFormatError("truncated: the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield data
        except StateFormatError as error:
            raise StateFormatError(f"{os.fspath(path)}: {error}") from None


def _read(data: mmap.mmap) -> SavedState:
    try:
        return _read_tables(data)
    except StateFormatError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise StateFormatError(f"altered: its tables cannot be read ({type(error).__name__})") from None


def _header(data: mmap.mmap) -> tuple[dict[str, Any], int]:
    """Return the header, and where the tensors begin."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or (length <= MOST_HEADER and length + 8 > len(data)):
        raise StateFormatError(f"truncated: the file has {len(data)} bytes, its header alone {length}")
    if length > MOST_HEADER:
        raise StateFormatError(f"no saved state: its header would have {length} bytes")
    try:
        header = json.loads(data[8 : 8 + length])
        metadata = header.pop("__metadata__")
        is_state = metadata["format"] == "kvcache"
        version = int(metadata["version"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_state = False
    if not is_state:
        raise StateFormatError("no saved state: the file does not begin like one")
    if version != VERSION:
        raise StateFormatError(f"of a newer format: version {version}; this library reads version {VERSION}")
    return {"__metadata__": metadata, **header}, 8 + length


def _read_tables(data: mmap.mmap) -> SavedState:
    header, start = _header(data)
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = (start + int(offset) for offset in entry["data_offsets"])
        if not start <= begin <= end:
            raise ValueError(name)
        if end > len(data):
            raise StateFormatError(f"truncated: tensor {name} does not fit in the file")
        tensors[name] = Tensor(name, str(entry["dtype"]), tuple(map(int, entry["shape"])), begin, end)

    def table(name: str) -> Any:
        tensor = tensors[name]
        dtype = {"I64": "<i8", "F64": "<f8"}[tensor.dtype]
        return np.frombuffer(data[tensor.begin : tensor.end], dtype).reshape(tensor.shape)

    limits = table("state")[0, 6:11].tolist()
    layers = table("layers")
    return SavedState(
        VERSION,
        str(metadata["library"]),
        str(metadata["fingerprint"]),
        tuple(_layer(row, table("inv_freq")) for row in layers.tolist()),
        limits[0],
        limits[1],
        limits[2],
        limits[3],
        limits[4],
        tuple(_sequences(table, layers[:, 9:11].tolist())),
        tuple(tensors.values()),
        len(data),
        any(data[-MAC_BYTES:]),
    )


def _layer(row: list[int], inv_freq: npt.NDArray[np.float64]) -> Layer:
    heads, k_dim, v_dim, k_type, v_type, k_transform, v_transform, value_in_key, share = row[:9]
    kind, window, sinks, resume, chunk, max_len, rope, interleaved, first_dim, num_freqs, first = row[10:21]
    policies: dict[str, Any] = {
        "full": lambda: FullAttention(),
        "sliding": lambda: SlidingWindow(window, sinks, None if resume in (0, window) else resume),
        "chunked": lambda: ChunkedAttention(chunk, resume or None),
        "cross": lambda: CrossAttention(max_len),
        "none": lambda: None,
    }
    policy: Policy | None = policies[{number: name for name, number in _core.POLICIES.items()}[kind]]()
    frequencies = inv_freq[first : first + num_freqs]
    ropes: list[Any] = [None, False, None, True]
    ropes[2] = Rope(frequencies, bool(interleaved), first_dim) if rope == 2 else None
    transforms = {number: name for name, number in _core.TRANSFORMS.items()}
    return Layer(
        heads,
        k_dim,
        v_dim,
        DTYPES[k_type],
        DTYPES[v_type],
        policy,
        bool(value_in_key),
        cast(RopeLike, ropes[rope]),
        cast(Transform | None, transforms[k_transform]),
        cast(Transform | None, transforms[v_transform]),
        share - 1 if share else None,
    )


def _sequences(table: Any, groups: list[list[int]]) -> Iterator[SavedSequence]:
    """Read the sequences; groups: the group of each layer, and the kind of its policy."""
    cross = {group for group, kind in groups if kind == _core.POLICIES["cross"]}  # whose rows are not tokens'
    holdings, runs, tokens = table("holdings"), table("runs"), table("tokens")
    first = at = 0
    for (seq_id, num_tokens), holding in zip(table("sequences").tolist(), holdings, strict=True):
        num_rows, following = [], 0
        for group, (num_runs, _, lost_end, _, _) in enumerate(holding.tolist()):
            its = runs[first : first + num_runs]
            num_rows.append(int(its[:, 1].sum()))
            if group not in cross:
                following = max(following, lost_end, *(its[:, 1] + its[:, 2]).tolist())
            first += num_runs
        yield SavedSequence(
            seq_id, tuple(num_rows[group] for group, _ in groups), following, tokens[at : at + num_tokens].copy()
        )
        at += num_tokens


# ---- secrets


def _mac(secret: Any) -> hashlib.blake2b:
    """Begin a MAC."""
    if not isinstance(secret, bytes | bytearray | memoryview):
        raise TypeError(f"secret: bytes are needed, not {type(secret).__name__}")
    if not 1 <= len(bytes(secret)) <= 64:
        raise ValueError(f"secret of {len(bytes(secret))} bytes: it must have from 1 to 64")
    return hashlib.blake2b(digest_size=MAC_BYTES, key=bytes(secret), person=b"kvcache-state-1")


# ---- writing


class _Writer:
    """Writes a file, with a MAC at its end if there is a secret."""

    def __init__(self, file: BinaryIO, secret: Any) -> None:
        self._file = file
        self._mac = None if secret is None else _mac(secret)
        self._held = b""  # 32 bytes that may be the last: they are replaced by the MAC
        self._written = self._sent = file.tell()  # bytes; sent: the system was told to write them to the disk

    def write(self, data: bytes | memoryview) -> None:
        if self._mac is None:
            self._put(data)
            return
        self._put_held()
        if len(data) == MAC_BYTES:
            self._held = bytes(data)
        else:
            self._mac.update(data)
            self._put(data)

    def finish(self) -> None:
        if self._mac is not None:
            self._put(self._mac.digest())

    def _put_held(self) -> None:
        if self._held and self._mac is not None:
            self._mac.update(self._held)
            self._put(self._held)
            self._held = b""

    def _put(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        self._written += len(data)
        if self._written - self._sent >= SENT_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), self._sent, self._written - self._sent, os.POSIX_FADV_DONTNEED)
            self._sent = self._written


@contextmanager
def _replacing(path: StrPath) -> Iterator[BinaryIO]:
    """Open a file that takes the place of another, as a whole, once all is written and on the disk."""
    target = os.path.realpath(path)  # a link stays one
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(temporary, flags, 0o666), "wb", buffering=0) as file:
        try:
            yield cast(BinaryIO, file)
            os.fsync(file.fileno())
            file.close()
            os.replace(temporary, target)
        except BaseException:
            file.close()
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def save(
    core: _core.Cache,
    path: StrPath,
    seq_ids: Iterable[SupportsIndex] | None,
    tokens: Mapping[int, Sequence[SupportsIndex]] | None,
    fingerprint: str,
    secret: bytes | None,
) -> None:
    """Write a file, as `KVCache.save` says."""
    if not isinstance(fingerprint, str):
        raise TypeError(f"fingerprint={fingerprint!r}: a string is needed")
    if seq_ids is None and tokens is not None:
        seq_ids = {*core.sequences(), *tokens}
    ids = None if seq_ids is None else sorted({_core.integer(one, "seq_ids", *_IDS) for one in seq_ids})
    given: Mapping[int, Any] = {} if tokens is None else tokens
    if unknown := set(given) - set(ids or []):
        raise ValueError(f"tokens: of sequence {min(unknown)}, which is not in seq_ids")
    flat = None if tokens is None else [token for one in ids or [] for token in given.get(one, ())]
    counts = None if tokens is None else [len(given.get(one, ())) for one in ids or []]
    if secret is not None:
        _mac(secret)  # raises before there is a file
    with _replacing(path) as file:
        writer = _Writer(file, secret)
        _core.save(core, writer.write, ids, flat, counts, fingerprint)
        writer.finish()


_IDS = (-(1 << 63), (1 << 63) - 1)


# ---- loading


class _Reader:
    """Reads a file whose MAC is to be right."""

    def __init__(self, data: mmap.mmap, secret: Any) -> None:
        self._data = data
        self._mac = _mac(secret)
        self._at = 0

    def read(self, to: memoryview) -> None:
        end = self._at + len(to)
        to[:] = self._data[self._at : end]
        self._at = end
        if end < len(self._data):
            self._mac.update(to)
        elif not any(to):
            raise StateFormatError("has no MAC: it was saved without a secret")
        elif not hmac.compare_digest(self._mac.digest(), bytes(to)):
            raise StateFormatError("its MAC is another one: it was altered, or saved with another secret")


def _restore(
    core: _core.Cache,
    data: mmap.mmap,
    fingerprint: str | None,
    secret: bytes | None,
    ids: Mapping[int, int] | None,
) -> None:
    """Restore sequences of a mapped file; ids: which, and under which id."""
    chosen = None if ids is None else sorted(ids)
    targets = None if ids is None else [ids[one] for one in sorted(ids)]
    if fingerprint is not None and not isinstance(fingerprint, str):
        raise TypeError(f"fingerprint={fingerprint!r}: a string is needed")
    if secret is None:
        _core.restore(core, data, None, len(data), fingerprint, chosen, targets)
    else:
        _core.restore(core, None, _Reader(data, secret).read, len(data), fingerprint, chosen, targets)


def restore(
    core: _core.Cache, path: StrPath, seq_id: Any, saved_id: Any, fingerprint: str | None, secret: bytes | None
) -> set[int]:
    """Restore sequences, as `KVCache.restore` says; return their ids."""
    there: list[int] = []

    def choose(saved: SavedState) -> Mapping[int, int] | None:
        there.extend(sequence.seq_id for sequence in saved.sequences)
        return _target_of(saved, seq_id, saved_id)

    ids = restore_chosen(core, path, choose, fingerprint, secret)
    return set(there) if ids is None else set(ids.values())


def restore_chosen(
    core: _core.Cache,
    path: StrPath,
    choose: Callable[[SavedState], Mapping[int, int] | None],
    fingerprint: str | None,
    secret: bytes | None,
) -> Mapping[int, int] | None:
    """Restore the sequences that a function chooses, under the ids that it returns; None: all, under their own."""
    with _mapped(path) as data:
        ids = choose(_read(data))
        _restore(core, data, fingerprint, secret, ids)
    return ids


def load(
    kind: type[C], path: StrPath, fingerprint: str | None, secret: bytes | None, rope: Any, overrides: dict[str, Any]
) -> C:
    """Make a cache, as `KVCache.load` says."""
    if unknown := set(overrides) - OVERRIDES:
        raise TypeError(f"{min(unknown)}: only {', '.join(sorted(OVERRIDES))} and rope can be given here")
    with _mapped(path) as data:
        saved = _read(data)
        try:
            cache: C = cast(Any, kind)(**{**_arguments(saved, rope), **overrides})
        except (TypeError, ValueError):
            _core.verify(data)  # where the file is damaged, that is why
            raise
        _restore(cache._core, data, fingerprint, secret, None)
    return cache


def _target_of(state: SavedState, seq_id: Any, saved_id: Any) -> dict[int, int] | None:
    """Return which sequence of a file is to be restored, and under which id; None: all, under their own."""
    if seq_id is None and saved_id is None:
        return None
    there = [sequence.seq_id for sequence in state.sequences]
    target = None if seq_id is None else _core.integer(seq_id, "seq_id", *_IDS)
    if saved_id is not None:
        source = _core.integer(saved_id, "saved_id", *_IDS)
    elif target is not None and target in there:
        source = target
    elif len(there) == 1:
        source = there[0]
    else:
        raise ValueError(f"seq_id={target}: the file has {len(there)} sequences, and none of this id; give saved_id")
    if source not in there:
        raise ValueError(f"saved_id={source}: the file has no such sequence, it has {there[:8]}")
    return {source: source if target is None else target}


def _arguments(state: SavedState, rope: Any) -> dict[str, Any]:
    """Return the arguments of `KVCache` that make a cache for a saved state; rope: the caller's, or None."""
    layers = state.layers
    names = {"num_kv_heads": 0, "head_dim": 1, "v_head_dim": 2, "k_dtype": 3, "v_dtype": 4, "policy": 5}
    values: dict[str, Any] = {name: [layer[i] for layer in layers] for name, i in names.items()}
    values["value_in_key"] = [layer.value_in_key for layer in layers]
    values["k_transform"] = [layer.k_transform for layer in layers]
    values["v_transform"] = [layer.v_transform for layer in layers]
    values["share"] = [layer.share for layer in layers]
    values["rope"] = [layer.rope for layer in layers] if rope is None else rope
    for i, layer in enumerate(layers):
        if rope is None and cast(Any, layer.rope) is True:
            raise ValueError(f"rope=None: a function moves the keys of layer {i}, and is not in the file; give it")
    values |= {
        "num_layers": len(layers),
        "block_size": state.block_size,
        "max_seq_len": state.max_seq_len or None,
        "max_sequences": state.max_sequences or None,
        "capacity": state.capacity or None,
        "max_bytes": state.max_bytes or None,
    }
    return values
