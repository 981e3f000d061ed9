"""Tensors whose elements are made when an operation first needs them, and masks, which are such tensors.

An attention that knows a lazy tensor reads its fields in place of elements. So `made` is None as long as no operation
has used it, and the kernels may take its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from kvcache.layer import count

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


EVERYTHING = slice(None)
PLANES = [(EVERYTHING, 0), (EVERYTHING, 0, EVERYTHING, EVERYTHING)]  # indices that select the only head


class Plane(LazyTensor):
    """A mask without the axis of heads, ``[batch, queries, keys]``, as indexers take it. The mask stays as it is."""

    mask: Mask

    def make(self) -> torch.Tensor:
        """Make elements of its own: the mask makes none."""
        return self.mask.make()[:, 0]


def is_shown(mask: torch.Tensor) -> torch.Tensor:
    """Return which elements of a mask show a key. In one that is added to scores, others are near the least number."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


class Mask(LazyTensor):
    """A mask, ``[batch, 1, queries, keys]``. The kernels need only its padding: they know order and window.

    Its elements are of bool, True where a query sees a key; for a model that adds masks to scores, they are numbers.
    """

    padding: torch.Tensor | None  # [batch, tokens so far] of bool, True: a token
    is_plain: bool  # whether order, window and padding alone hide keys
    sees_all: bool  # whether a query sees later keys, as within and over an encoder
    arguments: dict[str, Any]  # arguments of sdpa_mask
    queries: slice  # the queries that the mask is for
    window: int  # the most tokens that a query sees, or the length of a chunk; 0: all

    @classmethod
    def of(
        cls, padding: torch.Tensor | None, is_plain: bool, sees_all: bool, arguments: dict[str, Any], queries: slice
    ) -> Self:
        """Return a mask with these attributes."""
        num_queries = len(range(arguments["q_length"])[queries])
        dtype = arguments["dtype"] if adds_masks(arguments.get("config")) else torch.bool
        mask = cls.of_shape((arguments["batch_size"], 1, num_queries, arguments["kv_length"]), dtype)
        mask.padding, mask.is_plain, mask.sees_all = padding, is_plain, sees_all
        mask.arguments, mask.queries = arguments, queries
        mask.window = arguments.get("local_size") or 0
        return mask

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Select queries, as the last layers of Gemma 4 do, the only head, as indexers do, or any elements."""
        if self.made is None and index in PLANES:
            plane = Plane.of_shape((self.shape[0], *self.shape[2:]), self.dtype)
            plane.mask = self
            return plane
        if self.made is None and isinstance(index, tuple) and len(index) == 4 and all(type(i) is slice for i in index):
            batch, heads, queries, keys = index
            all_keys = keys.indices(self.shape[3]) == (0, self.shape[3], 1)
            if batch == heads == EVERYTHING and all_keys and queries.step is None:
                begin, end, _ = queries.indices(self.shape[2])
                first = self.queries.indices(self.arguments["q_length"])[0]
                selected = slice(first + begin, first + max(begin, end))
                return self.of(self.padding, self.is_plain, self.sees_all, self.arguments, selected)
        return self.elements()[index]

    def __and__(self, other: Any) -> torch.Tensor:
        """Hide more: what an indexer did not choose, or any elements."""
        if self.made is None and isinstance(other, ChosenMask) and other.is_choice_alone:
            return ChosenMask.of(other.columns, self.shape[3], self)
        made: torch.Tensor = self.elements() & other
        return made

    def make(self) -> torch.Tensor:
        """Make the mask as transformers does for torch's attention, or for the model's own."""
        make = sdpa_mask if self.dtype == torch.bool else eager_mask
        mask = make(**{**self.arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        assert mask is not None  # it is None only where one of these is allowed
        return mask[:, :, self.queries]


class ChosenMask(LazyTensor):
    """A mask of bool that shows the columns which an indexer chose, ``[batch, 1, queries, columns]``."""

    columns: torch.Tensor  # the columns that each query chose, [batch, queries, n]; a negative one is none
    mask: Mask | None  # what else hides columns; None: nothing

    @classmethod
    def of(cls, columns: torch.Tensor, num_columns: int, mask: Mask | None = None) -> Self:
        """Return a mask with these attributes."""
        made = cls.of_shape((columns.shape[0], 1, columns.shape[1], num_columns), torch.bool)
        made.columns, made.mask = columns, mask
        return made

    @property
    def is_choice_alone(self) -> bool:
        """Whether nothing but the choice hides columns, and the elements are not made yet."""
        return self.mask is None and self.made is None

    def make(self) -> torch.Tensor:
        """Show what was chosen, unless the other mask hides it."""
        shown = shown_by(elements_of(self.columns).unsqueeze(1), self.shape[3])
        return shown if self.mask is None else shown & self.mask.elements()


def shown_by(indices: torch.Tensor, num_columns: int, block: int = 1) -> torch.Tensor:
    """Return which columns, or blocks of columns, are listed: ``[batch, heads, queries, columns]`` of bool.

    `indices` are ``[batch, heads, queries, n]``. Negative ones stand for none.
    """
    num_blocks = -(-num_columns // block)
    places = torch.where(indices < 0, num_blocks, indices).long()  # the last place is dropped
    shown = torch.zeros(*indices.shape[:3], num_blocks + 1, dtype=torch.bool).scatter_(-1, places, True)
    return shown[..., :num_blocks].repeat_interleave(block, -1)[..., :num_columns]


def adds_masks(config: PreTrainedConfig | None) -> bool:
    """Whether a model, or its part with this configuration, adds masks to scores: it does not know torch's attention.

    A model of this kind may compute the scores itself, whichever attention is chosen. Added to scores, a mask of bool
    would hide nothing.
    """
    kinds: Any
    for kinds in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        kind = kinds.get(type(config), None)  # a class, or several
        if kind is not None:
            return not (kind[0] if isinstance(kind, tuple) else kind)._supports_sdpa
    return False  # the model is not one of transformers


def make_mask(
    *,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **arguments: Any,
) -> Mask:
    """Describe a mask; transformers calls this where other attention implementations make a tensor."""
    padding = attention_mask
    if padding is not None:  # columns that a mask does not have are hidden
        has_columns = padding.shape[-1] >= arguments["kv_length"] + arguments.get("kv_offset", 0)
        padding = None if has_columns and bool(padding.all()) else padding
    batch_size = arguments["batch_size"]
    if padding is not None and padding.ndim == 2 and len(padding) != batch_size:
        raise ValueError(
            f"attention_mask has {count(len(padding), 'row')}, and the batch {batch_size}: give it a row for each text"
        )
    # transformers sets both permissions to False, or sets use_vmap, for a model with mask functions of its own. Models
    # with an indexer forbid to skip the mask as well, and leave the function as it is.
    is_causal = arguments.get("mask_function") is causal_mask_function
    is_plain = (allow_is_causal_skip or allow_is_bidirectional_skip or is_causal) and not use_vmap
    arguments |= {"attention_mask": attention_mask, "use_vmap": use_vmap}
    return Mask.of(padding, is_plain, allow_is_bidirectional_skip, arguments, EVERYTHING)
