"""Rotary position embedding: the description of how a model rotates keys by their positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, SupportsFloat, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache._core import INT32_MAX, check_tensor, integer
from kvcache.arguments import spelt


@spelt
@dataclass(frozen=True, init=False, repr=False)
class Rope:
    """Rotary position embedding [1]_: pair `i` of a key's elements is rotated by ``position * inv_freq[i]`` radians.

    With it, the cache can move tokens without touching their keys: it rotates the queries back by the same distance.

    Parameters
    ----------
    inv_freq : array_like of float
        The radians per position of each of `n` pairs, with the model's scaling.
    interleaved : bool, default False
        Which elements form pair `i`. False: ``first_dim + i`` and ``first_dim + n + i``, as in Hugging Face's Llama and
        GPT-NeoX. True: ``first_dim + 2 * i`` and ``first_dim + 2 * i + 1``, as in GPT-J and the paper.
    first_dim : int, default 0
        The first of the ``2 * n`` rotated elements of a key; the others are not rotated.

    Raises
    ------
    ValueError
        If there is no frequency or one is not finite, there is more than one axis, or `first_dim` is negative.
    TypeError
        If an argument has the wrong type.

    Notes
    -----
    The rotation of keys at a position, in NumPy:

    >>> def rotate(keys, position, rope):  # keys: [..., head_dim]
    ...     n, first, step = len(rope.inv_freq), rope.first_dim, 2 if rope.interleaved else 1
    ...     a = first + step * np.arange(n)
    ...     b = a + (1 if rope.interleaved else n)
    ...     angle = position * np.array(rope.inv_freq)
    ...     rotated = keys.copy()
    ...     rotated[..., a] = keys[..., a] * np.cos(angle) - keys[..., b] * np.sin(angle)
    ...     rotated[..., b] = keys[..., b] * np.cos(angle) + keys[..., a] * np.sin(angle)
    ...     return rotated

    References
    ----------
    .. [1] Jianlin Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864, 2021.

    Examples
    --------
    The frequencies of Llama 2, whose heads have 128 elements:

    >>> rope = Rope(10_000.0 ** (-np.arange(0, 128, 2) / 128))
    >>> rope
    Rope(64 frequencies from 1 to 0.000115478, interleaved=False, first_dim=0)

    A rotation by 90 degrees per position:

    >>> rotate(np.array([1.0, 0.0]), 1, Rope([np.pi / 2])).round(3)
    array([0., 1.])
    """

    inv_freq: tuple[float, ...]
    interleaved: bool
    first_dim: int

    def __init__(
        self,
        inv_freq: npt.NDArray[Any] | Iterable[SupportsFloat],
        interleaved: bool = False,
        first_dim: SupportsIndex = 0,
    ) -> None:
        if not isinstance(interleaved, bool | np.bool_):
            raise TypeError(f"interleaved={interleaved!r}: must be True or False")
        object.__setattr__(self, "inv_freq", _frequencies(inv_freq))
        object.__setattr__(self, "interleaved", bool(interleaved))
        object.__setattr__(self, "first_dim", integer(first_dim, "first_dim", 0, INT32_MAX))

    def __repr__(self) -> str:
        n, first, last = len(self.inv_freq), self.inv_freq[0], self.inv_freq[-1]
        numbers = f"{n} frequencies from {first:g} to {last:g}" if n > 1 else f"1 frequency of {first:g}"
        return f"Rope({numbers}, interleaved={self.interleaved}, first_dim={self.first_dim})"


# Takes (layer, keys, delta), returns the keys moved by delta positions; keys are f32 [num_kv_heads, n, head_dim].
RopeFunction: TypeAlias = Callable[[int, npt.NDArray[np.float32], int], Any]
RopeLike: TypeAlias = Rope | RopeFunction | Literal[False] | None


def _frequencies(inv_freq: Any) -> tuple[float, ...]:
    check_tensor(inv_freq, "inv_freq")
    try:
        array = np.asarray(inv_freq if hasattr(inv_freq, "__array__") else list(inv_freq))
    except Exception as error:
        raise TypeError(f"inv_freq: an array of numbers is needed, not {type(inv_freq).__name__} ({error})") from None
    if array.ndim != 1 or not array.size:
        raise ValueError(f"inv_freq: an array of shape {array.shape}, where one axis of at least one number is needed")
    if array.dtype.kind in "iuf":
        numbers = [float(x) for x in array.tolist()]
    elif array.dtype.kind == "O":
        numbers = _numbers(array.tolist())
    else:
        raise TypeError(f"inv_freq: elements of type {array.dtype}, where floating-point numbers are needed")
    for i, number in enumerate(numbers):
        if not isfinite(number):
            raise ValueError(f"inv_freq[{i}]={number}: must be finite")
    return tuple(numbers)


def _numbers(values: list[Any]) -> list[float]:
    """Convert numbers that NumPy has no type for, such as fractions."""
    try:
        return [float(x) for x in values]
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"inv_freq: numbers are needed ({error})") from None
