"""The attention implementation ``"kvcache"``, and the description of a mask that it takes in place of a tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvcache.errors import NotSupportedError

if TYPE_CHECKING:
    from kvcache.hf.layers import Layer

NAME = "kvcache"

# The attribute that holds the `Layer` of keys that `HFCache.store` returns. transformers passes an attention function
# the tensors, but neither the cache nor, where layers share keys, the layer that stored them. Tensors that a model
# computes from such keys lack the attribute, by which `ForwardPass.check_received` notices that it changed them.
ATTRIBUTE = "_kvcache_layer"


def label(keys: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Attach to keys the layer of the cache that they belong to, for `attention`; return the keys."""
    setattr(keys, ATTRIBUTE, layer)
    return keys


@dataclass(frozen=True)
class Mask:
    """The facts that a mask follows from. The kernels need only the padding: they know order and window."""

    padding: torch.Tensor | None  # [batch, tokens so far] of bool, True: a token
    is_plain: bool  # whether order, window and padding alone hide keys
    sees_all: bool  # whether a query sees later keys, as within and over an encoder
    arguments: dict[str, Any]  # arguments of sdpa_mask
    queries: slice | None = None  # the queries that the mask is for; None: all

    def __getitem__(self, index: tuple[slice, slice, slice, slice]) -> Mask:
        """Select some of the queries: the last layers of Gemma 4 compute the last queries only."""
        return replace(self, queries=index[2])

    def dense(self) -> torch.Tensor | None:
        """Make the mask, ``[batch, 1, queries, keys]`` of bool; None: every query sees every key."""
        mask = sdpa_mask(**{**self.arguments, "allow_is_causal_skip": False})
        return mask if mask is None or self.queries is None else mask[:, :, self.queries]


def make_mask(
    *,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **arguments: Any,
) -> Mask:
    """Describe a mask; transformers calls this where other attention implementations make a tensor."""
    padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
    # transformers sets both permissions to False, or sets use_vmap, for a model with mask functions of its own.
    is_plain = (allow_is_causal_skip or allow_is_bidirectional_skip) and not use_vmap
    arguments |= {"allow_is_bidirectional_skip": allow_is_bidirectional_skip, "use_vmap": use_vmap}
    return Mask(padding, is_plain, allow_is_bidirectional_skip, {**arguments, "attention_mask": attention_mask})


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, for transformers: query ``[batch, heads, tokens, dim]``, result ``[batch, tokens, heads, dim]``."""
    layer: Layer | None = getattr(key, ATTRIBUTE, None)
    if layer is not None:  # None: there is no cache, or it is no HFCache
        if options.get("position_bias") is not None:
            raise NotSupportedError("a position bias is added to the scores of this model: use its eager attention")
        is_causal = getattr(module, "is_causal", True) and options.get("is_causal") is not False
        if layer.kernels_know(attention_mask, is_causal) and not options.get("dropout"):
            padding = attention_mask.padding if isinstance(attention_mask, Mask) else None
            sinks = None if s_aux is None else s_aux.detach()
            given = {"scale": scaling, "softcap": softcap, "sinks": sinks}
            return layer.cache.attend(layer, query, key, value, padding, given), None
        key, value = layer.cache.make_dense(layer, key, value)
    if softcap is not None or s_aux is not None:
        raise NotSupportedError("softcap and sinks need an HFCache and a plain mask: use the eager attention without")
    mask = attention_mask.dense() if isinstance(attention_mask, Mask) else attention_mask
    options = {"dropout": 0.0, **options, "is_causal": mask is None and options.get("is_causal")}
    out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
    return out, None
