"""The places of rows: blocks, the runs of slots in them that sequences hold, and views of consecutive rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive slots of a block that a sequence holds; an entry of `Block.holders`.

    Attributes
    ----------
    slot : int
        The first slot.
    count : int
        The number of slots.
    position : int
        The position of the row in the first slot; each later slot has the next position, or is a `stride` further.
    delta : int
        How far the tokens have moved since their keys were rotated.
    in_batch : bool
        Whether the tokens belong to the open batch, not yet to the sequence.
    """

    slot: int
    count: int
    position: int
    delta: int
    in_batch: bool


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a layer, at the moment of the call of `KVCache.blocks`.

    Attributes
    ----------
    index : int
        The block's index in the layer. New blocks take the indices of blocks that were given back.
    num_slots : int
        The number of slots, each for one row.
    filled : int
        The number of slots handed out; they come first, and the slots from this index on are unused.
    live : int
        The number of slots that a sequence holds. The other filled slots are wasted until a compaction.
    references : int
        The number of holders of the slot with most holders; above 1, rows are shared.
    resident : int
        The number of slots handed out since the block took its memory, which the operating system has backed.
    is_held : bool
        Whether a view keeps the rows, so that no slot is reused before the view is gone.
    nbytes : int
        The bytes that the block counts for `max_bytes` of the cache, unless it is free: its rows, its header, and a
        share for lists.
    holders : dict of int or None to list of Run
        The runs that each sequence holds in the block, in order of arrival, by sequence id; by None, those of rows that
        prefix caches keep.
    """

    index: int
    num_slots: int
    filled: int
    live: int
    references: int
    resident: int
    is_held: bool
    nbytes: int
    holders: dict[int | None, list[Run]]

    @property
    def is_free(self) -> bool:
        """Whether nothing holds a slot, so that the block's memory is only kept for reuse."""
        return not self.live and not self.is_held


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Span:
    """Stored rows that are consecutive in memory, and of consecutive tokens; `KVCache.spans` makes them.

    Attributes
    ----------
    k : numpy.ndarray
        A read-only view, ``[num_kv_heads, rows, head_dim]``, of the stored keys, not rotated by `delta`.
    v : numpy.ndarray
        A read-only view, ``[num_kv_heads, rows, v_head_dim]``, of the stored values.
    positions : numpy.ndarray
        The position of each row, int32.
    delta : int
        How far the tokens have moved since their keys were rotated.
    """

    k: npt.NDArray[Any]
    v: npt.NDArray[Any]
    positions: npt.NDArray[np.int32]
    delta: int

    def __repr__(self) -> str:
        return f"Span(k {self.k.shape}, v {self.v.shape}, positions from {self.positions[0]}, delta {self.delta})"


def make_spans(found: Iterable[tuple[npt.NDArray[Any], npt.NDArray[Any], int, int, int, int]]) -> list[Span]:
    """Make spans of keys, values, first position, number of rows, positions from row to row, and the delta of each."""
    return [
        Span(k, v, np.arange(first, first + rows * stride, stride, dtype=np.int32), delta)
        for k, v, first, rows, stride, delta in found
    ]
