"""Latent attention (MLA): the cache holds latents, and the attention reads them where they lie.

A model gives the cache latents, and expands them to a key and a value for every head. It multiplies them by a weight
(``kv_b_proj``), and appends to the keys the rotated elements, which all heads share. `Latents` records these operations
instead of computing them, and `Expansion` recognises the record when it reaches the attention. The attention then
multiplies the queries and its result by the weight, not the latents, which gives the same numbers: ``q . (W latent) =
(q W) . latent``. Any other operation, as of a quantised weight or an adapter, computes what was recorded, and the
attention gets dense tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from kvcache.hf import recording
from kvcache.hf.layers import Layer, LayerRows, Rows
from kvcache.hf.lazy import elements_of
from kvcache.hf.recording import is_made, source_of

linear = torch.nn.functional.linear
# Operations that make one tensor of another, and are recorded.
RECORDED = {linear, Tensor.view, Tensor.transpose, Tensor.expand, Tensor.new_empty, Tensor.__getitem__}


class Recording(recording.Recording):
    """A tensor whose operations are recorded if they expand latents."""

    def record(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the record of an operation with this tensor; None: it is to be computed."""
        if args[0] is not self:
            return None
        if func in RECORDED and not kwargs:
            return Recorded.of(func, *args)
        if func is torch.split and isinstance(args[1], list):
            return tuple(_split(self, args[1], **kwargs))
        if func is Tensor.copy_ and isinstance(self, Recorded) and self.write(args[1]):
            return self
        return None


class Latents(Recording, Rows):
    """The latents, or the rotated elements, of `LayerRows`."""


class LatentLayer(Layer):
    """A layer of latent attention. The model gives latents as keys and rotated elements as values; a row has both."""

    tensor_type = Latents

    def pack(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Append the rotated elements to the latents."""
        return (torch.cat((k, v), -1),)

    def unpack(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latents and rotated elements."""
        return v, k[..., v.shape[-1] :]


class Recorded(Recording, recording.Recorded):
    """The result of an operation that was recorded."""

    writes: list[tuple[Any, Tensor]]  # the tensors that were copied into parts of it, and the parts

    @classmethod
    def of(cls, func: Callable[..., Tensor], *args: Any, **options: Any) -> Self:
        """Record an operation."""
        made = super().of(func, *args, **options)
        made.writes = []
        return made

    def write(self, source: Tensor) -> bool:
        """Record that a tensor is copied to this part of a new tensor; return False if it is no such part."""
        whole = self.args[0]
        if self.func is not Tensor.__getitem__ or not isinstance(whole, Recorded) or whole.made is not None:
            return False
        whole.writes.append((self.args[1], source))
        return whole.func is Tensor.new_empty

    def make(self) -> Tensor:
        """Compute what was recorded."""
        made = super().make()
        for place, source in self.writes:
            made[place] = elements_of(source)
        return made


def _split(tensor: Tensor, sizes: list[int], dim: int = 0) -> list[Recorded]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [Recorded.of(Tensor.narrow, tensor, dim, end - n, n) for end, n in zip(ends, sizes, strict=True)]


class Expansion(NamedTuple):
    """The keys and values that a model makes of a layer's latents."""

    rows: LayerRows
    weight: Tensor  # [heads, elements of an unrotated key and of a value, elements of a latent]
    num_unrotated: int  # elements of a key

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> Self | None:
        """Return what keys and values are the record of; None: they were computed, or made otherwise."""
        if not (isinstance(key, Recorded) and isinstance(value, Recorded)):
            return None
        heads = source_of(value, Tensor.narrow)
        product = source_of(source_of(heads, Tensor.transpose, 1, 2), Tensor.view)
        latents = source_of(product, linear)
        if not isinstance(latents, Latents) or source_of(key, Tensor.new_empty) is None or len(key.writes) != 2:
            return None
        weight, *bias = product.args[1:]
        _, dim, n, v_dim = value.args
        (begin, unrotated), (end, rotated) = key.writes
        batch_size, num_heads, num_tokens, width = heads.shape
        elements = source_of(rotated, Tensor.expand, -1, num_heads, -1, -1)
        is_known = (
            bias == [None]
            and (dim, n + v_dim) == (-1, width)
            and (begin, end) == ((..., slice(None, n)), (..., slice(n, None)))
            and source_of(unrotated, Tensor.narrow, -1, 0, n) is heads
            and isinstance(elements, Latents)
            and elements.source is latents.source
            and (latents.part, elements.part) == (0, 1)
            and latents.shape[:3] == (batch_size, 1, num_tokens)
            and key.shape == (batch_size, num_heads, num_tokens, n + elements.shape[3])
            and not any(is_made(x) for x in (key, value, heads, product, unrotated, rotated, latents, elements))
        )
        return cls(latents.source, weight.view(num_heads, width, -1), n) if is_known else None

    def absorb(self, query: Tensor) -> Tensor:
        """Make queries for the cache's rows of queries for the keys, both ``[batch, heads, tokens, elements]``."""
        n = self.num_unrotated
        return torch.cat((query[..., :n] @ self.weight[:, :n], query[..., n:]), -1)

    def expand(self, result: Tensor) -> Tensor:
        """Make the attention's result of a sum of latents; both are ``[batch, tokens, heads, elements]``."""
        to_values = self.weight[:, self.num_unrotated :].transpose(1, 2)
        return (result.transpose(1, 2) @ to_values).transpose(1, 2)
