"""The tokens that are running: their rows come layer by layer, and are read before they are part of a sequence.

They are the tokens of the open batch, whose commit makes them part of their sequences.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable
from typing import Any, Literal, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from kvcache import Batch, KVCache

Rows = tuple[npt.NDArray[Any], npt.NDArray[Any]]


def read_array(x: Any, name: str) -> npt.NDArray[np.float32]:
    """Return an array of numbers as f32: lists, arrays of NumPy, and tensors, including bf16.

    Raises
    ------
    TypeError, ValueError
        If it is none, or a tensor that requires grad.
    """
    if getattr(x, "requires_grad", False):
        raise ValueError(f"{name}: the tensor requires grad, which a cache would lose; give its .detach()")
    try:
        # A tensor of PyTorch may be of bf16, for which NumPy has no type.
        return np.asarray(x.float() if hasattr(x, "float") else x, np.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{name}: an array of numbers is needed: {error}") from None


def read_rows(x: npt.ArrayLike, name: str, *shape: int) -> npt.NDArray[np.float32]:
    """Return numbers in a shape, of which the first axis may be -1: any number of them.

    Raises
    ------
    ValueError
        If there are not as many numbers.
    """
    array = read_array(x, name)
    row = math.prod(shape[1:])
    if array.size % row or array.size == 0 or shape[0] not in (-1, array.size // row):
        wanted = f"a multiple of {row} are" if shape[0] < 0 else f"{shape[0] * row} are"
        raise ValueError(f"{name}: an array of shape {array.shape}, of {array.size} numbers, where {wanted} needed")
    return array.reshape(shape)


def to_integer(name: str, value: SupportsIndex, least: int | None = None) -> int:
    """Return an integer of any size. Raise ``TypeError`` for another type, ``ValueError`` if it is below `least`."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={repr(value)[:60]}: an integer is needed, not {type(value).__name__}") from None
    if least is not None and number < least:
        raise ValueError(f"{name}={number}: must be at least {least}")
    return number


def to_integers(name: str, values: Iterable[SupportsIndex]) -> list[int]:
    """Return several integers; raise ``TypeError`` if `values` is no sequence of such."""
    try:
        given = list(values)
    except TypeError:
        raise TypeError(f"{name}={repr(values)[:60]}: a sequence of integers is needed") from None
    return [to_integer(f"{name}[{i}]", value) for i, value in enumerate(given)]


def check_index(name: str, value: SupportsIndex, length: int) -> None:
    """Raise ``IndexError`` unless `value` is at least 0 and below `length`; ``TypeError`` if it is no integer."""
    if not 0 <= to_integer(name, value) < length:
        raise IndexError(f"{name}={value}: must be at least 0 and below {length}")


class Copied:
    """Makes `copy.copy` return an independent cache: two handles on one would change each other's tokens."""

    def __copy__(self) -> Self:
        return copy.deepcopy(self)


class Running:
    """A cache, and the open batch of the next tokens of its sequences 0 to `sequences` - 1, in lock step.

    Arrays are ``[tokens, heads, dim]`` of one sequence, or ``[sequences, heads, tokens, dim]``, as `layout` says.
    """

    def __init__(self, cache: KVCache, sequences: int = 1, *, layout: Literal["THD", "BHTD"] = "THD") -> None:
        self.cache = cache
        self.sequences = sequences
        self.layout = layout
        self.batch: Batch | None = None
        self.layers: set[int] = set()  # those that have the rows of the batch

    @property
    def position(self) -> int:
        """The position of the first running token."""
        return self.cache.next_position()

    @property
    def num_tokens(self) -> int:
        """The running tokens of each sequence."""
        return 0 if self.batch is None else len(self.batch) // self.sequences

    @property
    def is_complete(self) -> bool:
        """Whether every layer has the rows of the running tokens."""
        return len(self.layers) == self.cache.num_layers

    def begin(self, num_tokens: int) -> Batch:
        """Return the open batch. If no batch is open, begin one of `num_tokens` tokens of each sequence."""
        if self.batch is None:
            first = self.cache.next_position()
            positions = np.tile(np.arange(first, first + num_tokens), self.sequences)
            self.batch = self.cache.batch(positions=positions, seq_ids=np.repeat(np.arange(self.sequences), num_tokens))
        return self.batch

    def put(self, layer: int, k: npt.NDArray[Any], v: npt.NDArray[Any], q: npt.NDArray[Any] | None = None) -> Any:
        """Put the running tokens' rows of a layer; a failed call changes nothing.

        With `q` attend, too, and return the result: the tokens of a call all see each other.
        """
        if layer in self.layers:
            missing = sorted(set(range(self.cache.num_layers)) - self.layers)
            advice = f"layers {missing} have none: give those theirs first" if missing else "advance first"
            raise ValueError(f"layer {layer} has its rows of the running tokens already; {advice}")
        num_tokens = self._count_tokens(layer, k)
        out = None
        try:
            batch = self.begin(num_tokens)
            if q is None:
                batch.put(layer, k, v, layout=self.layout)
            else:
                out = batch.attend(layer, q, k, v, layout=self.layout, non_causal=True)
        except BaseException:
            if not self.layers:
                self.discard()
            raise
        self.layers.add(layer)
        return out

    def _count_tokens(self, layer: int, k: npt.NDArray[Any]) -> int:
        """Return the tokens of each sequence in `k`. Raise ``ValueError`` if these are not the running tokens."""
        num_tokens: int = k.shape[self.layout.index("T")]
        if self.layers and num_tokens != self.num_tokens:
            raise ValueError(
                f"layer {layer}: rows of {num_tokens} tokens, where the layers before have {self.num_tokens}; give "
                "every layer the rows of the same tokens"
            )
        return num_tokens

    def rows(self, layer: int) -> Rows:
        """Return all rows of sequence 0 in a layer, ``[heads, n, dim]`` each, including the running tokens' rows.

        They are views where rows lie side by side, else copies.
        """
        if self.batch is not None:
            return self.batch.keys(layer, seq_id=0), self.batch.values(layer, seq_id=0)
        return self.cache.keys(layer), self.cache.values(layer)

    def commit(self) -> None:
        """Make the running tokens part of their sequences.

        Raises
        ------
        ValueError
            If a layer does not have their rows; the batch stays open then.
        """
        if self.batch is not None:
            self.batch.commit()
        self.batch, self.layers = None, set()

    def discard(self) -> None:
        """Forget the running tokens."""
        if self.batch is not None:
            self.batch.abort()
        self.batch, self.layers = None, set()

    def clear(self) -> None:
        """Forget all tokens."""
        self.discard()
        self.cache.clear()

    def close(self) -> None:
        """Free all memory."""
        self.discard()
        self.cache.close()
