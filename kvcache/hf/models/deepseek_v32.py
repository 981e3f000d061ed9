"""DeepSeek V3.2, and models whose indexers choose single tokens as it does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcache.hf.choosing import Choice, HeldKeys, IndexKeys, Query
from kvcache.hf.lazy import Plane


def choose(
    own: Callable[..., Tensor], indexer: Any, *, cache: Any, hidden_states: Tensor, q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor, position_ids: Tensor | None = None,
    rotate: str = "apply_rotary_pos_emb",
) -> Tensor:  # fmt: skip
    """Do what `DeepseekV32Indexer.forward` does, or an indexer with another function that rotates."""
    if not isinstance(attention_mask, Plane):
        return own()
    heads = *hidden_states.shape[:2], -1, indexer.head_dim
    q, k = indexer.wq_b(q_resid).view(heads), indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    q, k = rotate_first(indexer, q, k, position_embeddings, rotate)
    return choose_tokens(own, indexer, cache, hidden_states, attention_mask, q, k)


def choose_interleaved(own: Callable[..., Tensor], indexer: Any, **given: Any) -> Tensor:
    """Do the same where pairs of elements that are rotated lie side by side."""
    return choose(own, indexer, rotate="apply_rotary_pos_emb_interleave", **given)


def rotate_first(
    indexer: Any, q: Tensor, k: Tensor, position_embeddings: tuple[Tensor, Tensor], rotate: str
) -> tuple[Tensor, Tensor]:
    """Rotate the first elements of queries and keys, ``[batch, tokens, heads, dim]``."""
    sizes = indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim
    (q, q_rest), (k, k_rest) = q.split(sizes, -1), k.split(sizes, -1)
    q, k = getattr(inspect.getmodule(type(indexer)), rotate)(q, k, *position_embeddings, unsqueeze_dim=2)
    return torch.cat((q, q_rest), -1), torch.cat((k, k_rest), -1)


def choose_tokens(
    own: Callable[..., Tensor], indexer: Any, cache: Any, hidden_states: Tensor, plane: Plane, q: Tensor, k: Tensor
) -> Tensor:
    """Take an indexer's new keys, ``[batch, tokens, 1, dim]``. Return what its queries choose."""
    keys: IndexKeys = cache.index_keys(indexer.layer_idx)
    held = keys.update_index(k.transpose(1, 2))
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    rule = {"relu": True, "scale": indexer.softmax_scale}
    query = Query(q, weights * indexer.n_heads**-0.5, indexer.index_topk, 1, rule)
    return Choice.of(
        (*plane.shape[:2], min(query.width, plane.shape[-1])),
        torch.int32,
        lambda: own(cache=HeldKeys(held)),
        lambda this_pass, masked: keys.choose(this_pass, query, masked),
        plane.mask,
    )
