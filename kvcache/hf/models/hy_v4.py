"""Hunyuan 4: its indexer has rotated elements at the end."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcache.hf.lazy import Plane
from kvcache.hf.models.deepseek_v32 import choose_tokens


def choose(
    own: Callable[..., Tensor], indexer: Any, *, cache: Any, hidden_states: Tensor, q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor, position_ids: Tensor | None,
) -> Tensor:  # fmt: skip
    """Do what `HYV4Indexer.forward` does."""
    if not isinstance(attention_mask, Plane):
        return own()
    q = indexer.wq_b(q_resid).view(*hidden_states.shape[:2], -1, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(hidden_states).to(indexer.k_norm.weight.dtype)).to(hidden_states.dtype).unsqueeze(2)
    sizes = indexer.head_dim - indexer.qk_rope_head_dim, indexer.qk_rope_head_dim
    (q_rest, q), (k_rest, k) = q.split(sizes, -1), k.split(sizes, -1)
    code: Any = inspect.getmodule(type(indexer))
    q, k = code.apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
    q, k = torch.cat((q_rest, q), -1), torch.cat((k_rest, k), -1)
    return choose_tokens(own, indexer, cache, hidden_states, attention_mask, q, k)
