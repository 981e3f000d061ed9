"""Lazy tensors that record operations of a known kind, and compute what was recorded before any other operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kvcache.hf.lazy import LazyTensor, elements_of


class Recording(LazyTensor):
    """A tensor some of whose operations are recorded; any other operation computes what was recorded."""

    def record(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the record of an operation with this tensor; None: it is to be computed."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record an operation, or compute it."""
        first = next((arg for arg in args[:2] if isinstance(arg, Recording)), None)
        if first is not None and first.made is None:
            made = first.record(func, args, kwargs or {})
            if made is not None:
                return made
        return super().__torch_function__(func, types, args, kwargs)


class Recorded(Recording):
    """The result of an operation that was recorded."""

    func: Callable[..., Tensor]
    args: tuple[Any, ...]
    options: dict[str, Any]  # arguments by name

    @classmethod
    def of(cls, func: Callable[..., Tensor], *args: Any, **options: Any) -> Self:
        """Record an operation."""
        shaped = func(*map(_without_elements, args), **options)
        made = cls.of_shape(shaped.shape, shaped.dtype)
        made.become(func, args, options)
        return made

    def become(self, func: Callable[..., Tensor], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Become the result of an operation."""
        self.func, self.args, self.options = func, args, options

    def make(self) -> Tensor:
        """Compute what was recorded."""
        return self.func(*elements_of(self.args), **self.options)


def _without_elements(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def is_made(tensor: Any) -> bool:
    """Whether a tensor is lazy, and its elements were made."""
    return isinstance(tensor, LazyTensor) and tensor.made is not None


def source_of(tensor: Any, func: Callable[..., Tensor], *args: Any) -> Any:
    """Return what an operation with these arguments made a tensor of; None: something else made it."""
    if isinstance(tensor, Recorded) and tensor.func is func and (not args or tensor.args[1:] == args):
        return tensor.args[0]
    return None
