"""The attention implementation ``"kvcache"``."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvcache.errors import NotSupportedError
from kvcache.hf.latents import Expansion
from kvcache.hf.lazy import elements_of
from kvcache.hf.masks import Mask
from kvcache.hf.rows import untouched

NAME = "kvcache"
UNKNOWN = {"sinks", "block_indices"}  # what a few models pass to their own attention only
SPECIAL = {"dropout", "position_bias", *UNKNOWN}  # what the kernels have no argument for


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
    rows, expansion = untouched(key, value), None
    if rows is None and (expansion := Expansion.of(key, value)) is not None:
        rows = expansion.rows
    is_causal = getattr(module, "is_causal", True) and options.get("is_causal") is not False
    given = SPECIAL & options.keys()
    is_special = bool(given) and any(options[name] is not None for name in given if name != "dropout" or options[name])
    if rows is not None and not is_special and rows.layer.kernels_know(attention_mask, is_causal):
        padding = attention_mask.padding if isinstance(attention_mask, Mask) else None
        sinks = None if s_aux is None else s_aux.detach()
        q = query if expansion is None else expansion.absorb(query)
        out = rows.layer.cache.attend(rows, q, padding, {"scale": scaling, "softcap": softcap, "sinks": sinks})
        if out is not None:
            return out if expansion is None else expansion.expand(out), None
    if unknown := [name for name in UNKNOWN & options.keys() if options[name] is not None]:
        raise NotSupportedError(f"the attention {NAME!r} has no argument {unknown[0]}: set the model's own, 'eager'")
    if rows is not None:
        rows.falls_back = True
    key, value, mask = elements_of([key, value, attention_mask])
    if rows is not None and rows.new is not None:
        rows.layer.cache.check_mask(rows, mask, query.shape[2])
    num_queries, num_keys = query.shape[2], key.shape[2]
    has_sdpa = softcap is None and s_aux is None
    if mask is None and is_causal and num_queries > 1 and not (has_sdpa and num_queries == num_keys):
        # torch would align the first query with the first key
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    if has_sdpa:
        options = {"dropout": 0.0, **options, "is_causal": mask is None and is_causal}
        out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
        return out, None
    if is_special:
        raise NotSupportedError("dropout or a bias by position, with softcap or sinks: use the model's eager attention")
    return attend_dense(query, key, value, mask, scaling, softcap, s_aux), None


def flex_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
) -> Any:
    """Attend as transformers' ``"flex_attention"``, which torch compiles whole: it cannot decode rows on the way."""
    return flex_attention_forward(module, query, *elements_of([key, value]), *args, **options)


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with softcap or sinks, which torch's attention lacks; the mask is of bool, or is added to the scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, torch.finfo(scores.dtype).min)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:  # logits of keys without values
        scores = torch.cat([scores, sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v).transpose(1, 2).contiguous()
