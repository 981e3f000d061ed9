"""Mistral Large 4: its indexer has queries of its own, and in some layers no rotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvcache.hf.lazy import Plane
from kvcache.hf.models.deepseek_v32 import choose_tokens, rotate_first


def choose(
    own: Callable[..., Tensor], indexer: Any, *, cache: Any, hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor, position_ids: Tensor,
) -> Tensor:  # fmt: skip
    """Do what `MistralLarge4TextIndexer.forward` does."""
    if not isinstance(attention_mask, Plane):
        return own()
    q = indexer.wq_b(indexer.q_input_norm(hidden_states)).view(*hidden_states.shape[:2], -1, indexer.head_dim)
    q = indexer.softmax_scaling(q, position_ids, head_dim_first=False)
    k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    if indexer.use_rope:
        q, k = rotate_first(indexer, q, k, position_embeddings, "apply_rotary_pos_emb_interleave")
    return choose_tokens(own, indexer, cache, hidden_states, attention_mask, q, k)
