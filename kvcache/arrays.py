"""Types for annotations: the arrays that methods take, and their layouts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from kvcache.layer import FloatDType, to_dtype

Layout: TypeAlias = Literal["THD", "HTD", "BHTD"]
Precision: TypeAlias = Literal["stored", "int8"]
Flags: TypeAlias = bool | Sequence[bool] | npt.NDArray[np.bool_]
Ranges: TypeAlias = Sequence[Sequence[int]] | npt.NDArray[np.integer[Any]]


def to_precision(value: Any, name: str) -> Precision:
    """Return how prompts are attended to; raise ``ValueError`` that says `name` if a value says no way."""
    if isinstance(value, str) and value in get_args(Precision):
        return cast(Precision, value)
    raise ValueError(f"{name}={value!r}: must be 'stored', as precise as the rows, or 'int8'")


class SupportsDLPack(Protocol):
    """An array of a library with DLPack, such as NumPy or PyTorch."""

    def __dlpack__(self) -> Any: ...


class SupportsArray(Protocol):
    """An object that converts itself to a NumPy array."""

    def __array__(self) -> npt.NDArray[Any]: ...


AnyArray: TypeAlias = npt.NDArray[Any] | SupportsDLPack | SupportsArray
Entries: TypeAlias = AnyArray | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]


def check_float_dtype(value: Any, name: str) -> FloatDType:
    """Return the name of a type that rows can be converted to; else raise ``ValueError``, which says `name`."""
    return cast(FloatDType, to_dtype(value, name, get_args(FloatDType)))


def as_library_of(dtype: Any, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return new arrays as PyTorch's tensors, over the same memory, if `dtype` is a type of PyTorch."""
    if type(dtype).__module__ != "torch":
        return arrays
    torch: Any = sys.modules["torch"]  # whoever has its type has loaded it
    return tuple(
        None if array is None else torch.from_numpy(array) if array.dtype.kind in "fb" else torch.from_dlpack(array)
        for array in arrays
    )
