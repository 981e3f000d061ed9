"""The attention implementation ``"kvcache"``."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvcache.errors import NotSupportedError
from kvcache.hf.latents import Expansion
from kvcache.hf.lazy import elements_of
from kvcache.hf.masks import Mask
from kvcache.hf.rows import untouched

NAME = "kvcache"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, for transformers: query ``[batch, heads, tokens, dim]``, result ``[batch, tokens, heads, dim]``."""
    rows, expansion = untouched(key, value), Expansion.of(key, value)
    if expansion is not None:
        rows = expansion.rows
    is_causal = getattr(module, "is_causal", True) and options.get("is_causal") is not False
    is_special = options.get("dropout") or options.get("position_bias") is not None
    if rows is not None and not is_special and rows.layer.kernels_know(attention_mask, is_causal):
        padding = attention_mask.padding if isinstance(attention_mask, Mask) else None
        sinks = None if s_aux is None else s_aux.detach()
        q = query if expansion is None else expansion.absorb(query)
        out = rows.layer.cache.attend(rows, q, padding, {"scale": scaling, "softcap": softcap, "sinks": sinks})
        if out is not None:
            return out if expansion is None else expansion.expand(out), None
    if softcap is not None or s_aux is not None:
        raise NotSupportedError("softcap and sinks need an HFCache and a plain mask: use the eager attention without")
    key, value, mask = elements_of([key, value, attention_mask])
    num_queries, num_keys = query.shape[2], key.shape[2]
    if (
        mask is None and is_causal and 1 < num_queries < num_keys
    ):  # torch would align the first query with the first key
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    options = {"dropout": 0.0, **options, "is_causal": mask is None and is_causal}
    out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
    return out, None
