"""`LayerRows`: the keys and values that a layer of the cache gives to the model, in place of tensors with all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from kvcache.hf.lazy import LazyTensor

if TYPE_CHECKING:
    from kvcache.hf.forward_pass import ForwardPass
    from kvcache.hf.layers import Layer


Shape: TypeAlias = tuple[int, int, int, int]


class Rows(LazyTensor):
    """The keys, or the values, of `LayerRows`."""

    source: LayerRows
    part: int  # 0: the keys; 1: the values

    def make(self) -> torch.Tensor:
        """Decode all rows, and store those that are new."""
        return self.source.dense()[self.part]


class LayerRows:
    """All rows of a layer that a forward pass may see: those stored before it, and its new ones.

    The model gets two lazy tensors, `keys` and `values`. If they reach the attention as they are, the kernels store the
    new rows, and attend over all where they lie. If an operation of the model needs their elements, they are decoded.
    """

    def __init__(
        self,
        layer: Layer,
        this_pass: ForwardPass | None,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        shapes: tuple[Shape, Shape],
        dtype: torch.dtype,
    ) -> None:
        self.layer = layer
        self.this_pass = this_pass  # the pass that brought the new rows; None: there are none
        self.new = new  # keys and values, [batch, heads, tokens, dim]
        self.shapes = shapes  # of all rows, [batch, heads, columns, dim]
        self.dtype = dtype
        self.falls_back = False  # whether they reached the attention "kvcache", which has no kernel for the call
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def tensors(self) -> tuple[Rows, Rows]:
        """The lazy tensors."""
        of_shape, (k_shape, v_shape) = self.layer.tensor_type.of_shape, self.shapes
        keys, values = of_shape(k_shape, self.dtype), of_shape(v_shape, self.dtype)
        keys.source = values.source = self
        keys.part, values.part = 0, 1
        return keys, values

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as dense tensors."""
        if self._dense is None:
            self._dense = self.layer.cache.make_dense(self)
        return self._dense


def untouched(key: torch.Tensor, value: torch.Tensor) -> LayerRows | None:
    """Return the rows that two tensors stand for; None: they are no lazy tensors of one layer, or were touched."""
    if type(key) is not Rows or type(value) is not Rows or key.is_made or value.is_made:
        return None
    return key.source if key.source is value.source and (key.part, value.part) == (0, 1) else None
