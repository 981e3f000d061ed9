"""DeepSeek V3.2, and models whose indexers choose single tokens as it does.

An indexer chooses the rows that each token attends to, by queries and keys of its own. `own` is the method of the model
that is replaced. It runs with another mask than `Plane`, and if a program reads the elements of the `Choice`.
"""

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
    q, k = _rotate(indexer, q, k, position_embeddings, rotate)
    return _choose(own, indexer, cache, hidden_states, attention_mask, q, k)


def choose_interleaved(own: Callable[..., Tensor], indexer: Any, **given: Any) -> Tensor:
    """Do what `choose` does where pairs of elements that are rotated lie side by side."""
    return choose(own, indexer, rotate="apply_rotary_pos_emb_interleave", **given)


def choose_with_last(
    own: Callable[..., Tensor], indexer: Any, *, cache: Any, hidden_states: Tensor, q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor, position_ids: Tensor | None,
) -> Tensor:  # fmt: skip
    """Do what `HYV4Indexer.forward` does, which has the rotated elements at the end."""
    if not isinstance(attention_mask, Plane):
        return own()
    q = indexer.wq_b(q_resid).view(*hidden_states.shape[:2], -1, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(hidden_states).to(indexer.k_norm.weight.dtype)).to(hidden_states.dtype).unsqueeze(2)
    first_dim = indexer.head_dim - indexer.qk_rope_head_dim
    q, k = _rotate(indexer, q, k, position_embeddings, "apply_rotary_pos_emb", first_dim)
    return _choose(own, indexer, cache, hidden_states, attention_mask, q, k)


def choose_by_own(
    own: Callable[..., Tensor], indexer: Any, *, cache: Any, hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor, position_ids: Tensor,
) -> Tensor:  # fmt: skip
    """Do what `MistralLarge4TextIndexer.forward` does, which has queries of its own, and in some layers no rotation."""
    if not isinstance(attention_mask, Plane):
        return own()
    q = indexer.wq_b(indexer.q_input_norm(hidden_states)).view(*hidden_states.shape[:2], -1, indexer.head_dim)
    q = indexer.softmax_scaling(q, position_ids, head_dim_first=False)
    k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    if indexer.use_rope:
        q, k = _rotate(indexer, q, k, position_embeddings, "apply_rotary_pos_emb_interleave")
    return _choose(own, indexer, cache, hidden_states, attention_mask, q, k)


def _rotate(
    indexer: Any, q: Tensor, k: Tensor, position_embeddings: tuple[Tensor, Tensor], rotate: str, first_dim: int = 0
) -> tuple[Tensor, Tensor]:
    """Rotate the elements from `first_dim` on of queries and keys, ``[batch, tokens, heads, dim]``."""
    end = first_dim + indexer.qk_rope_head_dim
    rotated = getattr(inspect.getmodule(type(indexer)), rotate)(
        q[..., first_dim:end], k[..., first_dim:end], *position_embeddings, unsqueeze_dim=2
    )
    made = zip((q, k), rotated, strict=True)
    q, k = (torch.cat((x[..., :first_dim], part, x[..., end:]), -1) for x, part in made)
    return q, k


def _choose(
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
