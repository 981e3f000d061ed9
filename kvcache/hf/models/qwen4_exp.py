"""Qwen 4: its indexer pools the keys of several tokens, and hands the choice over as a mask."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcache.errors import NotSupportedError
from kvcache.hf.choosing import PooledKeys, Query
from kvcache.hf.lazy import ChosenMask, Mask


def choose(
    own: Callable[..., Tensor], indexer: Any, *, cache: Any, hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor,
) -> Tensor:  # fmt: skip
    """Do what `Qwen4ExpTextQSAIndexer.forward` does: return a mask that shows the columns which it chooses."""
    keys: PooledKeys = cache.index_keys(indexer.layer_idx)
    num_tokens, dim = hidden_states.shape[1], indexer.index_head_dim
    code: Any = inspect.getmodule(type(indexer))
    cos, sin = (part[:, -num_tokens:] for part in position_embeddings)
    q, raw = indexer.index_qk_proj(hidden_states).split((indexer.index_n_heads * dim, dim), -1)
    q = indexer.q_layernorm(q.reshape(*q.shape[:2], -1, dim))

    def pool(blocks: Tensor) -> Tensor:
        """Make a key of each block: the mean of its tokens' keys, rotated as the first token."""
        raw, cos, sin = blocks.split((dim, *[(blocks.shape[-1] - dim) // 2] * 2), -1)
        pooled = indexer.k_layernorm(raw.float().mean(1).to(raw.dtype)).unsqueeze(1)
        rotated: Tensor = code.apply_rotary_pos_emb(pooled, cos=cos[:, 0], sin=sin[:, 0])
        return rotated.squeeze(1)

    q = code.apply_rotary_pos_emb(q, cos=cos, sin=sin, unsqueeze_dim=2)
    padding = attention_mask.padding if isinstance(attention_mask, Mask) else _padding_in(attention_mask)
    query = Query(q, None, indexer.block_topk, indexer.compress_ratio, {"relu": True})
    whole = cos.expand(len(raw), -1, -1), sin.expand(len(raw), -1, -1)
    choice = keys.choose(torch.cat((raw, *whole), -1), padding, pool, query, has_tail=True)
    return ChosenMask.of(choice, attention_mask.shape[-1])


def _padding_in(mask: Tensor) -> Tensor:
    """Return which tokens the elements of a mask show; raise NotSupportedError if some tokens see others of them."""
    shown = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    padding, (num_queries, num_columns) = shown[:, -1], shown.shape[1:]
    causal = torch.ones(num_queries, num_columns, dtype=torch.bool).tril(num_columns - num_queries)
    if not torch.equal(shown, causal & padding[:, None]):
        raise NotSupportedError(
            "attention_mask hides other tokens from some tokens than from the last one: the model's indexer counts"
            " blocks of what each token sees, this cache those of the whole row"
        )
    return padding
