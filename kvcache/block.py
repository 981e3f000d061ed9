"""Where rows lie: the blocks of a layer, which slots of them each sequence holds, and views of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Block", "Run", "Span"]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive slots of one block that a sequence holds; in `Block.holders`.

    Attributes
    ----------
    slot : int
        The first.
    count : int
        How many there are.
    position : int
        Where the token in the first slot stands in its sequence; the others follow one by one.
    delta : int
        How far these positions are from those that the keys were rotated for.
    in_batch : bool
        Whether the tokens are of the open batch, and no part of the sequence yet.
    """

    slot: int
    count: int
    position: int
    delta: int
    in_batch: bool


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a layer, as it was when `KVCache.blocks` looked.

    Attributes
    ----------
    index : int
        Which of the layer's blocks it is. When blocks are given back, others take their numbers.
    num_slots : int
        Tokens that it has room for.
    filled : int
        Slots below this were handed out; those past it belong to nobody yet.
    live : int
        How many of these somebody holds. The others are wasted until a compaction moves rows together.
    references : int
        How many hold the slot that most hold; above 1, rows are shared.
    resident : int
        Slots handed out since the block's memory was taken: what the operating system has given memory for.
    is_held : bool
        Whether a view keeps the rows as they are, so that no slot is used again before it is gone.
    holders : dict of int to list of Run
        What each sequence holds of it, in order of arrival, by sequence id.
    """

    index: int
    num_slots: int
    filled: int
    live: int
    references: int
    resident: int
    is_held: bool
    holders: dict[int, list[Run]]

    @property
    def is_free(self) -> bool:
        """Whether nobody holds any of it: the memory is kept for reuse."""
        return not self.live and not self.is_held


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Span:
    """Stored rows that follow each other in memory and in position; `KVCache.spans` makes it.

    Attributes
    ----------
    k : numpy.ndarray
        A read-only view, ``[num_kv_heads, rows, head_dim]``, of keys as they were stored.
    v : numpy.ndarray
        A read-only view, ``[num_kv_heads, rows, v_head_dim]``.
    positions : numpy.ndarray
        The position of each row, int32.
    delta : int
        How far these positions are from those that the keys were rotated for.
    """

    k: npt.NDArray[Any]
    v: npt.NDArray[Any]
    positions: npt.NDArray[np.int32]
    delta: int

    def __repr__(self) -> str:
        return f"Span(k {self.k.shape}, v {self.v.shape}, positions from {self.positions[0]}, delta {self.delta})"
