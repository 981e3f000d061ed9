"""Saved states: files with all that sequences hold, read and written whole or not at all.

`KVCache.save`, `KVCache.load` and `KVCache.restore` use this module, and ``kvcache inspect`` shows a file. The core
writes and reads the format, which docs/format.md specifies; here are files, secrets, and what a file's tables say.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeAlias, TypeVar, cast

from kvcache import _core
from kvcache.arguments import refusal
from kvcache.errors import StateFormatError, shown
from kvcache.layer import FIELDS, Layer, override
from kvcache.state.files import Reader, StateFile, Writer, begin_mac, open_state, replacing
from kvcache.state.files import StrPath as StrPath
from kvcache.state.files import check_replaceable as check_replaceable
from kvcache.state.saved import ENCODER as ENCODER
from kvcache.state.saved import RECURRENT as RECURRENT
from kvcache.state.saved import (
    SavedSequence,
    SavedState,
    Tensor,
    check_sums,
    inspect,
    not_saved,
    read_state,
    states_of,
)
from kvcache.state.saved import read_states as read_states

if TYPE_CHECKING:
    from kvcache.follower import Edit

__all__ = ["SavedSequence", "SavedState", "Tensor", "inspect", "not_saved"]


class Restorable(Protocol):
    """A cache whose sequences a file can replace."""

    _core: _core.Cache
    _layers: tuple[Layer, ...]

    @property
    def _edits(self) -> deque[Edit] | None: ...


C = TypeVar("C", bound=Restorable)

OVERRIDES = {"max_seq_len", "max_sequences", "capacity", "max_bytes", "block_size", "num_threads", "strategy"}


# ---- writing


def _check_fingerprint(fingerprint: Any) -> None:
    """Raise for what the core, which takes a string of C, could not see."""
    if not isinstance(fingerprint, str):
        raise TypeError(f"fingerprint={fingerprint!r}: a string is needed")
    if not fingerprint.isascii() or "\0" in fingerprint:
        raise ValueError(f"fingerprint={fingerprint!r}: printable ASCII characters are needed")


TokensById: TypeAlias = Mapping[int, Sequence[SupportsIndex]]


def save(
    path: StrPath,
    sources: Sequence[tuple[_core.Cache, Sequence[int] | None, TokensById | None]],
    fingerprint: str,
    secret: bytes | None,
) -> None:
    """Write a file with the state of each cache, with its sequences and their tokens, as `KVCache.save` says."""
    _check_fingerprint(fingerprint)
    mac = None if secret is None else begin_mac(secret)  # raises before there is a file
    with replacing(path) as file:
        for core, seq_ids, tokens in sources:
            ids = None if seq_ids is None else sorted(seq_ids)
            held = None if tokens is None or ids is None else [tokens.get(one, ()) for one in ids]
            writer = Writer(file, mac)
            _core.save(core, writer.write, ids, held, fingerprint)
            writer.finish()


def sequences_to_save(core: _core.Cache, seq_ids: Any, tokens: Any) -> list[int] | None:
    """Return the ids that the arguments of `KVCache.save` name, or None for all. Raise if an id is wrong."""
    if seq_ids is None and tokens is None:
        return None
    if tokens is not None and not isinstance(tokens, Mapping):
        raise TypeError(f"tokens={shown(tokens)}: a mapping of sequences to tokens is needed, such as {{0: [5, 6]}}")
    given = {_core.integer(one, "key of tokens", *_core.IDS) for one in tokens or ()}
    if seq_ids is None:
        ids = {*core.sequences(), *_with_rows(core), *(one for one in given if _holds(core, one))}
    else:
        ids = {*_core.integers(seq_ids, "seq_ids").tolist()}
        for one in sorted(ids - given):
            if not _holds(core, one):
                raise ValueError(f"seq_ids: sequence {one} holds nothing; the cache's are {core.sequences()[:8]}")
    if unknown := given - ids:
        what = "holds nothing" if seq_ids is None else "is not in seq_ids"
        raise ValueError(f"tokens: of sequence {min(unknown)}, which {what}")
    return sorted(ids)


def _with_rows(core: _core.Cache) -> set[int]:
    """Return the ids of the sequences that have rows, of their tokens or an encoder's."""
    runs = (run for layer in range(core.num_layers) for run in core.blocks(layer)[1])
    return {seq_id for _, seq_id, *_ in runs if seq_id is not None}


def _holds(core: _core.Cache, seq_id: int) -> bool:
    """Return whether a sequence has rows, of its tokens or an encoder's, or had some that have expired."""
    return core.next_position(seq_id) > 0 or any(core.seq_len(seq_id, layer) for layer in range(core.num_layers))


# ---- loading


def _restore(
    cache: Restorable,
    saved: SavedState,
    file: StateFile,
    begin: int,
    fingerprint: str | None,
    mac: hashlib.blake2b | None,
    ids: Mapping[int, int] | None,
) -> None:
    """Restore sequences of a state that begins at a byte of a file; ids: which, and under which id."""
    chosen = None if ids is None else sorted(ids)
    targets = None if ids is None else [ids[one] for one in sorted(ids)]
    held = [one.seq_id for one in saved.sequences] if targets is None else targets
    restored = [(one, None, True) for one in held]
    if fingerprint is not None:
        _check_fingerprint(fingerprint)
    read = Reader(file, begin, begin + saved.nbytes, mac).read
    try:
        _core.restore(cache._core, read, saved.nbytes, fingerprint, chosen, targets, cache._edits, restored)
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
) -> None:
    """Restore sequences, as `KVCache.restore` says."""
    restore_chosen(path, [(cache, lambda saved: _target_of(saved, seq_id, saved_id))], fingerprint, secret)


Choice: TypeAlias = Callable[[SavedState], Mapping[int, int] | None]


def restore_chosen(
    path: StrPath,
    targets: Sequence[tuple[Restorable, Choice]],
    fingerprint: str | None,
    secret: bytes | None,
    behind: str = "",
) -> None:
    """Restore a state to each cache: the sequences that a function chooses, under the ids it returns (None: all).

    `behind` says what the second state is of.
    """
    mac = None if secret is None else begin_mac(secret)
    with open_state(path) as file:
        states = states_of(read_state(file), behind)
        begin = 0
        for (cache, choose), saved in zip(targets, states, strict=True):
            _restore(cache, saved, file, begin, fingerprint, mac, choose(saved))
            begin += saved.nbytes


def load(
    kind: type[C],
    path: StrPath,
    fingerprint: str | None,
    secret: bytes | None,
    rope: Any,
    sketch: Any,
    overrides: dict[str, Any],
) -> C:
    """Make a cache, as `KVCache.load` says."""
    if unknown := set(overrides) - OVERRIDES:
        raise TypeError(refusal(min(unknown), "KVCache.load", {*OVERRIDES, "rope", "sketch", "fingerprint", "secret"}))
    with open_state(path) as file:
        [saved] = states_of(read_state(file))
        try:
            cache = _make(kind, saved, _layers(saved, rope, sketch), overrides)
        except (TypeError, ValueError):
            check_sums(file)  # where the file is damaged, that is why
            raise
        _restore(cache, saved, file, 0, fingerprint, None if secret is None else begin_mac(secret), None)
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


def _layers(state: SavedState, rope: Any, sketch: Any) -> Sequence[Layer]:
    """Return the layers of a saved state with the caller's sketches and rope, or, if that is None, their own."""
    if rope is not None:
        return override(state.layers, {"rope": rope, "sketch": sketch})[0]
    for i, layer in enumerate(state.layers):
        if layer.rope is not_saved:
            raise ValueError(f"rope=None: a function moves the keys of layer {i}, and is not in the file; give it")
    return override(state.layers, {"sketch": sketch})[0]


def _make(kind: type[C], state: SavedState, layers: Sequence[Layer], overrides: dict[str, Any]) -> C:
    """Make a cache with the file's blocks, or smaller ones if `max_bytes` does not hold these, as `kvc_load` does.

    Files may be older than the rule that it must hold them.
    """
    given = {**_limits(state), **overrides}
    sizes = [given.pop("block_size")]
    if "block_size" not in overrides and given["max_bytes"]:
        sizes += [size for size in (64, 32, 16, 8, 4, 2, 1) if size < state.block_size]
    make = cast(Callable[..., C], kind)
    for size in sizes[:-1]:
        with suppress(ValueError):
            return make(layers, block_size=size, **given)
    return make(layers, block_size=sizes[-1], **given)


def _limits(state: SavedState) -> dict[str, int | None]:
    """Return the arguments of `KVCache` beside its layers."""
    names = ("max_seq_len", "max_sequences", "capacity", "max_bytes")
    return {"block_size": state.block_size, **{name: getattr(state, name) or None for name in names}}
