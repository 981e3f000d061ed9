"""Saved states: files with all that sequences hold, read and written whole or not at all.

`KVCache.save`, `KVCache.load` and `KVCache.restore` use this module, and ``kvcache inspect`` shows a file. The core
writes and reads the format, which docs/format.md specifies; here are files, secrets, and what a file's tables say.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import mmap
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, NoReturn, Protocol, SupportsIndex, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvcache import _core
from kvcache.arguments import check_path
from kvcache.errors import NotSupportedError, StateFormatError, shown
from kvcache.layer import DTYPES, FIELDS, Layer, Transform, override
from kvcache.policy import ChunkedAttention, CrossAttention, FullAttention, Policy, SlidingWindow
from kvcache.rope import Rope, RopeLike

__all__ = ["SavedSequence", "SavedState", "Tensor", "inspect", "not_saved"]

StrPath: TypeAlias = str | os.PathLike[str]


class Restorable(Protocol):
    """A cache whose sequences a file can replace."""

    _core: _core.Cache
    _layers: tuple[Layer, ...]


C = TypeVar("C", bound=Restorable)

OVERRIDES = {"max_seq_len", "max_sequences", "capacity", "max_bytes", "block_size", "num_threads", "strategy"}

VERSION = 1
BEGINNING = b'{"__metadata__":{"format":"kvcache",'  # of a header
MAC_BYTES = 32
SENT_BYTES = 8 << 20  # after so many, the disk begins to write; later, fsync would wait for all
MOST_HEADER = 100_000_000  # bytes
NAME_BYTES = 233  # of a name, in that of its temporary file: with 22 more, the 255 that file systems take


def not_saved(layer: int, keys: npt.NDArray[np.float32], delta: int) -> NoReturn:
    """Stand for a rope that is a function, which no file has."""
    raise NotSupportedError(f"keys of layer {layer} cannot be moved: the function that moves them is not in the file")


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
        The layers; a `rope` that is a function is not in the file: `not_saved` stands for it.
    block_size, max_seq_len, max_sequences, capacity, max_bytes : int
        The arguments of the cache; 0: no limit, or, of `capacity`, what follows from the two before.
    sequences : tuple of SavedSequence
        The sequences, by rising id.
    tensors : tuple of Tensor
        The tensors of the file.
    nbytes : int
        The size of the state: of the file, unless another one follows.
    has_mac : bool
        Whether it was saved with a secret.
    following : SavedState or None
        The state behind this one in the file: of an encoder's rows, where ``HFEncoderDecoderCache.save`` wrote it.
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
    following: SavedState | None = None


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
            _verify(data)
        return _read(data)


# ---- reading what a file says


@contextmanager
def _mapped(path: StrPath) -> Iterator[memoryview]:
    """Map a file into memory; errors in its content name it."""
    check_path(path)
    with open(path, "rb") as file:
        try:
            if not os.fstat(file.fileno()).st_size:
                raise StateFormatError("truncated: the file is empty")
            yield memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))  # ends with the last part of it
        except StateFormatError as error:
            raise StateFormatError(f"{os.fspath(path)}: {error}") from None


def _verify(data: memoryview) -> None:
    """Compare a file with its checksums."""
    try:
        saved = _read(data)
        sizes = [saved.nbytes] if saved.following else []
    except StateFormatError:
        sizes = []  # the core says what is wrong
    for size in sizes:
        _core.verify(data[:size])
        data = data[size:]
    _core.verify(data)


def read_states(path: StrPath, wanted: int) -> list[SavedState]:
    """Read what the states of a file say of themselves; raise unless there are so many."""
    with _mapped(path) as data:
        return _states(_read(data), wanted)


def _states(saved: SavedState, wanted: int) -> list[SavedState]:
    if wanted == 2 and saved.following is None:
        raise StateFormatError("has no rows of an encoder: HFCache.load or KVCache.load reads it")
    if wanted == 1 and saved.following is not None:
        raise StateFormatError("has an encoder's rows as well: HFEncoderDecoderCache.load reads it")
    return [saved] if saved.following is None else [saved, saved.following]


def _read(data: memoryview) -> SavedState:
    try:
        saved = _read_tables(data, 0)
        begin = saved.nbytes
        if begin == len(data):
            return saved
        if data[begin + 8 : begin + 8 + len(BEGINNING)] == BEGINNING:
            following = _read_tables(data[begin:], begin)
            saved, begin = replace(saved, following=following), begin + following.nbytes
    except StateFormatError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
        raise StateFormatError("altered: its header or its tables cannot be read") from None
    if begin < len(data):
        raise StateFormatError(f"altered: it has {len(data) - begin} bytes more than its header says")
    return saved


def _header(data: memoryview) -> tuple[dict[str, Any], int]:
    """Return the header, and where the tensors begin."""
    length, start = int.from_bytes(data[:8], "little"), bytes(data[8 : 8 + len(BEGINNING)])
    if length > MOST_HEADER or length + 8 > len(data):
        if not BEGINNING.startswith(start) or (length + 8) % 64:
            raise StateFormatError("no saved state: the file does not begin like one")
        raise StateFormatError(f"truncated: the file has {len(data)} bytes, its header alone {length}")
    try:
        header = json.loads(bytes(data[8 : 8 + length]))
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


def _read_tables(data: memoryview, place: int) -> SavedState:
    """Read a state that begins at byte `place` of its file."""
    header, start = _header(data)
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = (start + int(offset) for offset in entry["data_offsets"])
        if not start <= begin <= end:
            raise ValueError(name)
        if end > len(data):
            raise StateFormatError(f"truncated: tensor {name} does not fit in the file")
        shape = tuple(map(int, entry["shape"]))
        tensors[name] = Tensor(name, str(entry["dtype"]), shape, place + begin, place + end)

    size = max(tensor.end for tensor in tensors.values()) - place

    def table(name: str) -> Any:
        tensor = tensors[name]
        dtype = {"I64": "<i8", "F64": "<f8"}[tensor.dtype]
        return np.frombuffer(bytes(data[tensor.begin - place : tensor.end - place]), dtype).reshape(tensor.shape)

    limits = table("state")[0, 6:11].tolist()
    layers, inv_freq = table("layers"), table("inv_freq")
    return SavedState(
        VERSION,
        str(metadata["library"]),
        str(metadata["fingerprint"]),
        tuple(_layer(row, inv_freq) for row in layers.tolist()),
        limits[0],
        limits[1],
        limits[2],
        limits[3],
        limits[4],
        tuple(_sequences(table, layers[:, 9:11].tolist())),
        tuple(tensors.values()),
        size,
        any(data[size - MAC_BYTES : size]),
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
    ropes: list[RopeLike] = [None, False, None, not_saved]
    ropes[2] = Rope(frequencies, bool(interleaved), first_dim) if rope == 2 else None
    transforms = {number: name for name, number in _core.TRANSFORMS.items()}
    return Layer(
        heads,
        k_dim,
        v_head_dim=v_dim,
        value_in_key=bool(value_in_key),
        k_dtype=DTYPES[k_type],
        v_dtype=DTYPES[v_type],
        k_transform=cast(Transform | None, transforms[k_transform]),
        v_transform=cast(Transform | None, transforms[v_transform]),
        policy=policy,
        share=share - 1 if share else None,
        rope=ropes[rope],
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


def _check_fingerprint(fingerprint: Any) -> None:
    """Raise for what the core, which takes a string of C, could not see."""
    if not isinstance(fingerprint, str):
        raise TypeError(f"fingerprint={fingerprint!r}: a string is needed")
    if not fingerprint.isascii() or "\0" in fingerprint:
        raise ValueError(f"fingerprint={fingerprint!r}: printable ASCII characters are needed")


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
    """Writes a state, with a MAC of all bytes of the file at its end if there is a secret."""

    def __init__(self, file: BinaryIO, mac: hashlib.blake2b | None) -> None:
        self._file = file
        self._mac = mac
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
            self._held = self._mac.digest()
            self._put_held()

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


def check_replaceable(path: StrPath) -> None:
    """Raise OSError if something other than a regular file is at `path`, such as a folder, a device or a FIFO."""
    check_path(path)
    if os.path.exists(path) and not os.path.isfile(path):
        code = errno.EISDIR if os.path.isdir(path) else errno.EEXIST
        raise OSError(code, "is not a regular file, and is not replaced: give the name of one", os.fspath(path))


@contextmanager
def _replacing(path: StrPath) -> Iterator[BinaryIO]:
    """Open a file that takes the place of another, as a whole, once all is written and on the disk.

    It gets the other's mode; where there is none, only its owner may read it, since tokens and rows tell what was said.
    """
    check_replaceable(path)
    target = os.path.realpath(path)  # a link stays one
    folder, name = os.path.split(os.fsdecode(target))
    kept = os.fsencode(name)[:NAME_BYTES].decode(sys.getfilesystemencoding(), "ignore")  # it may be cut in a character
    temporary = os.path.join(folder, f".{kept}.{secrets.token_hex(8)}.tmp")
    try:
        with _written_whole(temporary) as file:
            if os.path.exists(target):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            yield file
            os.fsync(file.fileno())
            file.close()
            os.replace(temporary, target)
        if hasattr(os, "O_DIRECTORY"):
            _sync_folder(folder)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error  # which may name the temporary one


@contextmanager
def _written_whole(path: str) -> Iterator[BinaryIO]:
    """Make a file for its owner alone, and remove it if there is an error."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
        try:
            yield cast(BinaryIO, file)
        except BaseException:
            file.close()
            with suppress(FileNotFoundError):
                os.unlink(path)
            raise


def _sync_folder(folder: str) -> None:
    """Put the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


Tokens: TypeAlias = Mapping[int, Sequence[SupportsIndex]]


def save(
    path: StrPath,
    sources: Sequence[tuple[_core.Cache, Sequence[int] | None, Tokens | None]],
    fingerprint: str,
    secret: bytes | None,
) -> None:
    """Write a file with the state of each cache, with its sequences and their tokens, as `KVCache.save` says."""
    _check_fingerprint(fingerprint)
    mac = None if secret is None else _mac(secret)  # raises before there is a file
    with _replacing(path) as file:
        for core, seq_ids, tokens in sources:
            ids = None if seq_ids is None else sorted(seq_ids)
            held = None if tokens is None or ids is None else [tokens.get(one, ()) for one in ids]
            writer = _Writer(file, mac)
            _core.save(core, writer.write, ids, held, fingerprint)
            writer.finish()


def sequences_to_save(core: _core.Cache, seq_ids: Any, tokens: Any) -> list[int] | None:
    """Return the ids that the arguments of `KVCache.save` name, None for all; raise if one of them is wrong."""
    if seq_ids is None and tokens is None:
        return None
    if tokens is not None and not isinstance(tokens, Mapping):
        raise TypeError(f"tokens={shown(tokens)}: a mapping of sequences to tokens is needed, such as {{0: [5, 6]}}")
    given = {_core.integer(one, "key of tokens", *_core.IDS) for one in tokens or ()}
    if seq_ids is None:
        ids = {*core.sequences(), *(one for one in given if _holds(core, one))}
    else:
        ids = {*_core.integers(seq_ids, "seq_ids").tolist()}
        for one in sorted(ids - given):
            if not _holds(core, one):
                raise ValueError(f"seq_ids: sequence {one} holds nothing; the cache's are {core.sequences()[:8]}")
    if unknown := given - ids:
        what = "holds nothing" if seq_ids is None else "is not in seq_ids"
        raise ValueError(f"tokens: of sequence {min(unknown)}, which {what}")
    return sorted(ids)


def _holds(core: _core.Cache, seq_id: int) -> bool:
    """Return whether a sequence has rows, of its tokens or an encoder's, or had some that were evicted."""
    return core.next_position(seq_id) > 0 or any(core.seq_len(seq_id, layer) for layer in range(core.num_layers))


# ---- loading


class _Reader:
    """Reads a state whose MAC is to be right; `mac` has seen what is before it in the file."""

    def __init__(self, data: memoryview, mac: hashlib.blake2b) -> None:
        self._data = data
        self._mac = mac
        self._at = 0

    def read(self, to: memoryview) -> None:
        end = self._at + len(to)
        to[:] = self._data[self._at : end]
        self._at = end
        if end == len(self._data) and not any(to):
            raise StateFormatError("has no MAC: it was saved without a secret")
        if end == len(self._data) and not hmac.compare_digest(self._mac.digest(), bytes(to)):
            raise StateFormatError("its MAC is another one: it was altered, or saved with another secret")
        self._mac.update(to)


def _restore(
    cache: Restorable,
    saved: SavedState,
    data: memoryview,
    fingerprint: str | None,
    mac: hashlib.blake2b | None,
    ids: Mapping[int, int] | None,
) -> None:
    """Restore sequences of a mapped state; ids: which, and under which id."""
    chosen = None if ids is None else sorted(ids)
    targets = None if ids is None else [ids[one] for one in sorted(ids)]
    if fingerprint is not None:
        _check_fingerprint(fingerprint)
    whole, read = (data, None) if mac is None else (None, _Reader(data, mac).read)
    try:
        _core.restore(cache._core, whole, read, len(data), fingerprint, chosen, targets)
    except StateFormatError as error:
        if "of another shape" in str(error) and (difference := _find_difference(saved.layers, cache._layers)):
            raise StateFormatError(f"of another shape: {difference}") from None
        raise


def _find_difference(saved: Sequence[Layer], own: Sequence[Layer]) -> str | None:
    """Return in which argument the layers of a file and of a cache differ first, and both values, for a message."""
    if len(saved) != len(own):
        return None
    for i, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
        if theirs.policy is None and ours.policy is None:
            continue
        for name in FIELDS:
            there, here = (_shown(getattr(layer, name)) for layer in (theirs, ours))
            if there != here:
                return f"{name} of layer {i} is {there} in the file, and {here} in the cache"
    return None


def _shown(value: Any) -> str:
    """Return how a value of a layer is written; no two functions differ."""
    return "a function" if callable(value) else repr(value)


def restore(
    cache: Restorable, path: StrPath, seq_id: Any, saved_id: Any, fingerprint: str | None, secret: bytes | None
) -> set[int]:
    """Restore sequences, as `KVCache.restore` says; return their ids."""
    there: list[int] = []

    def choose(saved: SavedState) -> Mapping[int, int] | None:
        there.extend(sequence.seq_id for sequence in saved.sequences)
        return _target_of(saved, seq_id, saved_id)

    [ids] = restore_chosen(path, [(cache, choose)], fingerprint, secret)
    return set(there) if ids is None else set(ids.values())


Choice: TypeAlias = Callable[[SavedState], Mapping[int, int] | None]


def restore_chosen(
    path: StrPath, targets: Sequence[tuple[Restorable, Choice]], fingerprint: str | None, secret: bytes | None
) -> list[Mapping[int, int] | None]:
    """Restore a state to each cache: the sequences that a function chooses, under the ids it returns (None: all)."""
    mac, restored = None if secret is None else _mac(secret), []
    with _mapped(path) as data:
        states = _states(_read(data), len(targets))
        for (cache, choose), saved in zip(targets, states, strict=True):
            ids = choose(saved)
            _restore(cache, saved, data[: saved.nbytes], fingerprint, mac, ids)
            restored.append(ids)
            data = data[saved.nbytes :]
    return restored


def load(
    kind: type[C], path: StrPath, fingerprint: str | None, secret: bytes | None, rope: Any, overrides: dict[str, Any]
) -> C:
    """Make a cache, as `KVCache.load` says."""
    if unknown := set(overrides) - OVERRIDES:
        raise TypeError(f"{min(unknown)}: only {', '.join(sorted(OVERRIDES))} and rope can be given here")
    with _mapped(path) as data:
        [saved] = _states(_read(data), 1)
        try:
            cache: C = cast(Any, kind)(_layers(saved, rope), **{**_limits(saved), **overrides})
        except (TypeError, ValueError):
            _verify(data)  # where the file is damaged, that is why
            raise
        _restore(cache, saved, data, fingerprint, None if secret is None else _mac(secret), None)
    return cache


def _target_of(state: SavedState, seq_id: Any, saved_id: Any) -> dict[int, int] | None:
    """Return which sequence of a file is to be restored, and under which id; None: all, under their own."""
    if seq_id is None and saved_id is None:
        return None
    there = [sequence.seq_id for sequence in state.sequences]
    target = None if seq_id is None else _core.integer(seq_id, "seq_id", *_core.IDS)
    if saved_id is not None:
        source = _core.integer(saved_id, "saved_id", *_core.IDS)
    elif target is not None and target in there:
        source = target
    elif len(there) == 1:
        source = there[0]
    else:
        raise ValueError(f"seq_id={target}: the file has {len(there)} sequences, and none of this id; give saved_id")
    if source not in there:
        raise ValueError(f"saved_id={source}: the file has no such sequence, it has {there[:8]}")
    return {source: source if target is None else target}


def _layers(state: SavedState, rope: Any) -> Sequence[Layer]:
    """Return the layers of a saved state with the caller's rope, or, if that is None, their own."""
    if rope is not None:
        return override(state.layers, {"rope": rope})[0]
    for i, layer in enumerate(state.layers):
        if layer.rope is not_saved:
            raise ValueError(f"rope=None: a function moves the keys of layer {i}, and is not in the file; give it")
    return state.layers


def _limits(state: SavedState) -> dict[str, int | None]:
    """Return the arguments of `KVCache` beside its layers."""
    names = ("max_seq_len", "max_sequences", "capacity", "max_bytes")
    return {"block_size": state.block_size, **{name: getattr(state, name) or None for name in names}}
