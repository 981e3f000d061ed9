"""Latent attention (MLA): the cache holds latents, and the attention reads them where they lie.

A model gives the cache latents, and expands them to a key and a value for every head. It multiplies them by a weight
(``kv_b_proj``), and appends to the keys the rotated elements, which all heads share. `expand` replaces that method by
one that returns lazy tensors, in which the attention finds the `Expansion`. The attention then multiplies the queries
and its result by the weight, not the latents, which gives the same numbers: ``q . (W latent) = (q W) . latent``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcache.hf.layers import Layer, LayerRows, Rows
from kvcache.hf.lazy import LazyTensor


class Latents(Rows):
    """The latents, or the rotated elements, of `LayerRows`."""


class LatentLayer(Layer):
    """A layer of latent attention. The model gives latents as keys and rotated elements as values; a row has both."""

    tensor_type = Latents

    def pack(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Append the rotated elements to the latents."""
        return (torch.cat((k, v), -1),)

    def unpack(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents and rotated elements."""
        return v, k[..., v.shape[-1] :]


class Expanded(LazyTensor):
    """The keys, or the values, that a model makes of latents."""

    expansion: Expansion
    part: int  # 0: the keys; 1: the values

    def make(self) -> Tensor:
        """Expand the latents as the model does."""
        return self.expansion.own()[self.part]


class Expansion(NamedTuple):
    """The keys and values that a model makes of a layer's latents."""

    rows: LayerRows
    weight: Tensor  # [heads, elements of an unrotated key and of a value, elements of a latent]
    num_unrotated: int  # elements of a key
    own: Callable[[], tuple[Tensor, Tensor]]  # makes them

    @staticmethod
    def of(key: Tensor, value: Tensor) -> Expansion | None:
        """Return what keys and values are; None: they were made, or are others."""
        if not isinstance(key, Expanded) or not isinstance(value, Expanded):
            return None
        is_lazy = key.made is None and value.made is None
        is_pair = key.expansion is value.expansion and (key.part, value.part) == (0, 1)
        return key.expansion if is_lazy and is_pair else None

    def absorb(self, query: Tensor) -> Tensor:
        """Make queries for the cache's rows of queries for the keys, both ``[batch, heads, tokens, elements]``."""
        n = self.num_unrotated
        return torch.cat((query[..., :n] @ self.weight[:, :n], query[..., n:]), -1)

    def expand(self, result: Tensor) -> Tensor:
        """Make the attention's result of a sum of latents; both are ``[batch, tokens, heads, elements]``."""
        to_values = self.weight[:, self.num_unrotated :].transpose(1, 2)
        return (result.transpose(1, 2) @ to_values).transpose(1, 2)


def expand(
    own: Callable[[], tuple[Tensor, Tensor]], attention: Any, *, kv_nope: Tensor, k_rot: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Do what the method `expand_kv` of an attention does, later if it must."""
    projection = attention.kv_b_proj
    if not (isinstance(kv_nope, Latents) and isinstance(k_rot, Latents) and _is_plain(projection)):
        return own()
    if kv_nope.made is not None or k_rot.made is not None:
        return own()
    n, v_dim = attention.qk_nope_head_dim, attention.v_head_dim
    weight = projection.weight.view(-1, n + v_dim, kv_nope.shape[3])
    expansion = Expansion(kv_nope.source, weight, n, functools.cache(own))
    shape = len(kv_nope), len(weight), kv_nope.shape[2]
    key = Expanded.of_shape((*shape, n + k_rot.shape[3]), kv_nope.dtype)
    value = Expanded.of_shape((*shape, v_dim), kv_nope.dtype)
    key.expansion = value.expansion = expansion
    key.part, value.part = 0, 1
    return key, value


def _is_plain(projection: Any) -> bool:
    """Whether a module multiplies by its weight, and does nothing else."""
    return (
        type(projection) is torch.nn.Linear
        and projection.bias is None
        and type(projection.weight) is torch.nn.Parameter
        and not (projection._forward_hooks or projection._forward_pre_hooks)
        and "forward" not in vars(projection)
    )
