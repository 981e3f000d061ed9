"""The description in a saved state: its layers, limits, sequences and tensors.

A state begins with a header, JSON that names its tensors. Some tensors are tables of integers: docs/format.md has their
columns. A group is layers with the same policy. A run is rows of a sequence side by side: [.., number, position, ..]. A
file may have two states: the second, behind the first, has the rows of an encoder or recurrent states.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt

from kvcache import _core
from kvcache.errors import NotSupportedError, StateFormatError
from kvcache.layer import DTYPES, Layer, Transform
from kvcache.policy import ChunkedAttention, CrossAttention, FullAttention, Policy, SlidingWindow
from kvcache.rope import Rope, RopeLike
from kvcache.state.files import MAC_BYTES, Reader, StateFile, StrPath, open_state

VERSION = 1  # the newest of the format
# Versions of the list of a batch's rows (docs/format.md). The second also has positions behind images.
BATCH_VERSION, BATCH_OF_IMAGES = 1, 2
BEGINNING = b'{"__metadata__":{"format":"kvcache",'  # of a header
MOST_HEADER = 100_000_000  # bytes
MOST_FIXED, MOST_OF_LAYER = 4096, 1280  # bytes of a header: of metadata and tables, and of the tensors of each layer
STATE_BYTES, LAYER_BYTES = 128, 192  # of the first table, and of a layer in the second
READ_BYTES = LAYER_BYTES << 12  # of layers that are looked at together
# What a second state of a file can be, and what reads such a file.
ENCODER, RECURRENT = "rows of an encoder", "recurrent states"
READERS = {
    "": "HFCache.load or KVCache.load reads it",
    ENCODER: "HFEncoderDecoderCache.load reads it",
    RECURRENT: "HFCache.load reads it, with the config of a model with recurrent layers",
}


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
    next_position : int
        The position of its next token.
    tokens : ndarray of int64
        The tokens that `KVCache.save` was given; none if it was given none.
    """

    seq_id: int
    next_position: int
    tokens: npt.NDArray[np.int64]
    _rows_of_groups: tuple[int, ...] = field(repr=False)
    _groups: tuple[int, ...] = field(repr=False)  # of all layers; of all sequences the same object

    @property
    def num_rows(self) -> tuple[int, ...]:
        """The number of its rows in each layer."""
        return tuple(self._rows_of_groups[group] for group in self._groups)


@dataclass(frozen=True)
class SavedState:
    """The description in a saved state, without its rows.

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
        The state behind this one in the file: of an encoder's rows, where ``HFEncoderDecoderCache.save`` wrote it, or
        of recurrent states, where ``HFCache.save`` did.
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

    @property
    def behind(self) -> str:
        """The kind of the state that follows this one: ENCODER or RECURRENT; "" if none follows."""
        if self.following is None:
            return ""
        return (
            ENCODER if any(isinstance(layer.policy, CrossAttention) for layer in self.following.layers) else RECURRENT
        )


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
    >>> from kvcache.state import inspect
    >>> cache = kvcache.KVCache(1, 1, 2, 64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache.save(f"{folder}/empty")
    ...     inspect(f"{folder}/empty", verify=True).layers[0].head_dim
    2
    """
    with open_state(path) as file:
        if verify:
            check_sums(file)
        return read_state(file)


# ---- reading the tables


def batch_of(saved: SavedState) -> tuple[int, int, list[int], list[list[int]]] | None:
    """Return the batch that a file of `kvcache.hf` holds; None: it holds none.

    It is the id of the sequence without rows that says so, the columns seen, and the sequence of each row. The last
    part is how far positions are ahead behind each column of each row. It is empty if the file does not say it.
    """
    marker = next((one for one in saved.sequences if not any(one.num_rows) and len(one.tokens) >= 2), None)
    if marker is None:
        return None
    lengths = {one.seq_id: one.next_position for one in saved.sequences if one is not marker}
    version, seen = marker.tokens[:2].tolist()
    rows, ahead = (part.tolist() for part in np.split(marker.tokens[2:], [len(lengths)]))
    if sorted(rows) != sorted(lengths) or seen < max(lengths.values(), default=0):
        return None
    if (version, len(ahead)) not in ((BATCH_VERSION, 0), (BATCH_OF_IMAGES, len(rows) * seen)):
        return None
    return marker.seq_id, seen, rows, [ahead[i : i + seen] for i in range(0, len(ahead), max(1, seen))]


def check_sums(file: StateFile) -> None:
    """Compare a file with its checksums."""
    ends = [file.size]
    with suppress(StateFormatError):  # the core says what is wrong
        saved = read_state(file)
        ends = [saved.nbytes, file.size] if saved.following else ends
    for begin, end in pairwise([0, *ends]):
        _core.verify(Reader(file, begin, end).read, end - begin)


def read_states(path: StrPath, behind: str) -> list[SavedState]:
    """Read what the states of a file say of themselves, as `states_of` returns them."""
    with open_state(path) as file:
        return states_of(read_state(file), behind)


def states_of(saved: SavedState, behind: str = "") -> list[SavedState]:
    """Return a state and the state that follows it; raise unless that is of what `behind` says."""
    if saved.behind != behind:
        what = f"has {saved.behind} as well" if saved.behind else f"has no {behind}"
        raise StateFormatError(f"{what}: {READERS[saved.behind]}")
    return [saved] if saved.following is None else [saved, saved.following]


def read_state(file: StateFile) -> SavedState:
    """Read what a file says of itself."""
    try:
        saved = _read_tables(file, 0)
        begin = saved.nbytes
        if begin == file.size:
            return saved
        if file.read(begin + 8, len(BEGINNING)) == BEGINNING:
            following = _read_tables(file, begin)
            saved, begin = replace(saved, following=following), begin + following.nbytes
    except StateFormatError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
        raise StateFormatError("altered: its header or its tables cannot be read") from None
    if begin < file.size:
        raise StateFormatError(f"altered: it has {file.size - begin} bytes more than its header says")
    return saved


def _header(file: StateFile, place: int) -> tuple[dict[str, Any], int]:
    """Return the header of the state that begins at byte `place`, and where its tensors begin."""
    length, start = int.from_bytes(file.read(place, 8), "little"), file.read(place + 8, len(BEGINNING))
    if length > MOST_HEADER or (length + 8) % 64 or not BEGINNING.startswith(start):
        raise StateFormatError("no saved state: the file does not begin like one")
    begin = place + 8 + length
    if begin > file.size:
        raise StateFormatError(f"truncated: the file has {file.size - place} bytes, its header alone {length}")
    if length > MOST_FIXED:
        _check_length(file, begin, length)
    text = file.read(place + 8, length)
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__")
        version = int(metadata["version"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise StateFormatError("no saved state: the file does not begin like one") from None
    if not 1 <= version <= VERSION:
        raise StateFormatError(f"of a newer format: version {version}; this library reads versions up to {VERSION}")
    return {"__metadata__": metadata, **header}, begin


def _check_length(file: StateFile, begin: int, length: int) -> None:
    """Raise if a header is longer than the layers need: reading it could take many times its length in memory.

    begin: offset of the tensors.  The first two are the tables of the state and of its layers.
    """
    num_layers = int.from_bytes(file.read(begin, 8), "little")
    begin, end = begin + STATE_BYTES, begin + STATE_BYTES + num_layers * LAYER_BYTES
    if end > file.size:
        raise StateFormatError(f"truncated or altered: {num_layers} layers do not fit in {file.size} bytes")
    with_rows = 0
    for at in range(begin, end, READ_BYTES):
        layers = np.frombuffer(file.read(at, min(READ_BYTES, end - at)), "<i8")
        with_rows += int(np.count_nonzero(layers[:: LAYER_BYTES // 8]))  # by their num_kv_heads
    if length > MOST_FIXED + with_rows * MOST_OF_LAYER:
        raise StateFormatError(f"altered: a header of {length} bytes is too long for {with_rows} layers")


def _read_tables(file: StateFile, place: int) -> SavedState:
    """Read a state that begins at byte `place` of its file."""
    header, start = _header(file, place)
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = (start + int(offset) for offset in entry["data_offsets"])
        if not start <= begin <= end:
            raise ValueError(name)
        if end > file.size:
            raise StateFormatError(f"truncated: tensor {name} does not fit in the file")
        shape = tuple(map(int, entry["shape"]))
        tensors[name] = Tensor(name, str(entry["dtype"]), shape, begin, end)

    size = max(tensor.end for tensor in tensors.values()) - place

    def table(name: str, *row: int) -> Any:
        """Read a tensor as an array of rows of this shape."""
        tensor = tensors[name]
        dtype = {"I64": "<i8", "F64": "<f8"}[tensor.dtype]
        rows = np.frombuffer(file.read(tensor.begin, tensor.end - tensor.begin), dtype).reshape(-1, *row)
        if rows.shape != tensor.shape:  # which may claim any number of rows of nothing
            raise ValueError(name)
        return rows

    block_size, max_seq_len, max_sequences, capacity, max_bytes = table("state", STATE_BYTES // 8)[0, 6:11].tolist()
    layers, inv_freq = table("layers", LAYER_BYTES // 8), table("inv_freq")
    own = tuple(_layers_of(layers.tolist(), inv_freq))
    sequences = tuple(_sequences(table, layers[:, 9:11].tolist()))
    version, library, fingerprint = int(metadata["version"]), str(metadata["library"]), str(metadata["fingerprint"])
    has_mac = any(file.read(place + size - MAC_BYTES, MAC_BYTES))
    return SavedState(
        version, library, fingerprint, own, block_size, max_seq_len, max_sequences, capacity, max_bytes, sequences,
        tuple(tensors.values()), size, has_mac,
    )  # fmt: skip


def _layers_of(rows: list[list[int]], inv_freq: npt.NDArray[np.float64]) -> Iterator[Layer]:
    """Read the layers. Layers of one rope get the same object, and no two ropes have frequencies in common."""
    named = [tuple(row[16:21]) for row in rows]  # by the kind, interleaved, first_dim, num_freqs and their place
    frequencies = {rope: inv_freq[rope[4] : rope[4] + rope[3]] for rope in named if rope[0] == 2}
    if sum(map(len, frequencies.values())) > len(inv_freq):
        raise ValueError("inv_freq")
    ropes = {rope: Rope(its, bool(rope[1]), rope[2]) for rope, its in frequencies.items()}
    for row, rope in zip(rows, named, strict=True):
        yield _layer(row, ropes.get(rope))


def _layer(row: list[int], rotation: Rope | None) -> Layer:
    """Make a layer of a row of the table of layers."""
    heads, k_dim, v_dim, k_type, v_type, k_transform, v_transform, value_in_key, share = row[:9]
    kind, window, sinks, resume, chunk, max_len, rope = row[10:17]
    policies: dict[str, Any] = {
        "full": lambda: FullAttention(row[21] or 1),
        "sliding": lambda: SlidingWindow(window, sinks, None if resume in (0, window) else resume),
        "chunked": lambda: ChunkedAttention(chunk, resume or None),
        "cross": lambda: CrossAttention(max_len),
        "none": lambda: None,
    }
    policy: Policy | None = policies[{number: name for name, number in _core.POLICIES.items()}[kind]]()
    ropes: list[RopeLike] = [None, False, rotation, not_saved]
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
    num_groups = len(table("group_rows"))
    sequences, holdings = table("sequences", 2), table("holdings", num_groups, 5)
    runs, tokens = table("runs", 4), table("tokens")
    if (sequences[:, 1] < 0).any() or (holdings[:, :, 0] < 0).any():  # some runs and tokens would be those of many
        raise ValueError("sequences")
    of_layers = tuple(group for group, _ in groups)
    if not all(0 <= group < num_groups for group in of_layers):
        raise ValueError("layers")
    cross = {group for group, kind in groups if kind == _core.POLICIES["cross"]}  # whose rows are not tokens'
    first = at = 0
    for (seq_id, num_tokens), holding in zip(sequences.tolist(), holdings, strict=True):
        num_rows, following = [], 0
        for group, (num_runs, _, lost_end, _, _) in enumerate(holding.tolist()):
            its = runs[first : first + num_runs]
            num_rows.append(int(its[:, 1].sum()))
            if group not in cross:
                following = max(following, lost_end, *(its[:, 1] + its[:, 2]).tolist())
            first += num_runs
        its_tokens = tokens[at : at + num_tokens].copy()
        yield SavedSequence(seq_id, following, its_tokens, tuple(num_rows), of_layers)
        at += num_tokens
