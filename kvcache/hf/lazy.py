"""`LazyTensor`: a tensor whose elements are made when an operation first needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

# Questions that a lazy tensor answers without its elements.
METADATA = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "is_cpu", "is_cuda", "is_meta", "requires_grad")
    ),
    torch.Tensor.__len__,
    torch.Tensor.dim,
    torch.Tensor.get_device,
    torch.Tensor.is_floating_point,
    torch.Tensor.numel,
    torch.Tensor.size,
}


class LazyTensor(torch.Tensor):
    """A tensor of known shape and type. Any operation on it makes its elements, and works on these.

    Subclasses define `make`. The elements are made once; operations in place change them for later operations. The
    lazy tensor itself has no memory that could be read in their place.
    """

    made: torch.Tensor | None = None  # the elements, once an operation needed them

    @classmethod
    def of_shape(cls, shape: Sequence[int], dtype: torch.dtype) -> Self:
        """Return a lazy tensor."""
        return cls._make_wrapper_subclass(cls, shape, dtype=dtype)

    def make(self) -> torch.Tensor:
        """Make the elements."""
        raise NotImplementedError

    def elements(self) -> torch.Tensor:
        """Return the elements, as a tensor that is not lazy."""
        if self.made is None:
            self.made = self.make()
        return self.made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with the elements in the place of lazy tensors."""
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return call_with_elements(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # the base has a function, not a class method
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Do the same for operations that no function of torch called, as in `torch.func` and TorchScript."""
        return call_with_elements(func, args, kwargs)


def call_with_elements(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Call a function with the elements in the place of lazy tensors."""
    return func(*elements_of(args), **{name: elements_of(value) for name, value in (kwargs or {}).items()})


def elements_of(value: Any) -> Any:
    """Return a value with each lazy tensor in it replaced by its elements; look into lists and tuples."""
    if isinstance(value, LazyTensor):
        return value.elements()
    if type(value) in (list, tuple):
        return type(value)(map(elements_of, value))
    return value
