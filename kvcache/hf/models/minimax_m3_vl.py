"""MiniMax M3: each KV head chooses blocks of tokens by the best key of a block, and takes the last blocks anyway."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcache.hf.choosing import Choice, HeldKeys, IndexKeys, Query
from kvcache.hf.dense import NAME
from kvcache.hf.passes import ForwardPass


def choose(
    own: Callable[..., Tensor], indexer: Any, *, cache: Any, hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor], position_ids: Tensor,
) -> Tensor:  # fmt: skip
    """Do what `MiniMaxM3VLIndexer.forward` does."""
    if indexer.config._attn_implementation != NAME:
        return own()
    heads = *hidden_states.shape[:2], -1, indexer.head_dim
    q = indexer.q_norm(indexer.q_proj(hidden_states).view(heads)).transpose(1, 2)
    k = indexer.k_norm(indexer.k_proj(hidden_states).view(heads)).transpose(1, 2)
    code: Any = inspect.getmodule(type(indexer))
    q, k = code.apply_rotary_pos_emb(q, k, *(part[..., : indexer.head_dim] for part in position_embeddings))
    keys: IndexKeys = cache.index_keys(indexer.layer_idx)
    held = keys.update_index(k)
    width = min(indexer.topk_blocks, -(-held.shape[2] // indexer.block_size))
    rule = {"scale": 1.0, "num_choices": indexer.num_heads, "num_local": indexer.local_blocks}
    query = Query(q.transpose(1, 2), None, width, indexer.block_size, rule)

    def options(this_pass: ForwardPass, masked: Any) -> dict[str, Any] | None:
        """The model scores blocks before its mask hides columns."""
        return keys.choose(this_pass, query, None) if _counts_alike(this_pass, position_ids) else None

    return Choice.of((*q.shape[:3], width), torch.int64, lambda: own(cache=HeldKeys(held)), options)


def _counts_alike(this_pass: ForwardPass, position_ids: Tensor) -> bool:
    """Whether the model's positions are columns, or positions of the cache, which begin at a row's first token."""
    columns = torch.arange(this_pass.num_tokens) + this_pass.num_seen
    offsets = torch.tensor(this_pass.offsets)[:, None]
    is_padding = columns < offsets
    return any(bool(((position_ids == places) | is_padding).all()) for places in (columns - offsets, columns))
