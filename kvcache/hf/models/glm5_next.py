"""GLM-5.3 Flash: its indexer pools the keys of several tokens by gates, and hands the choice over as a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcache.hf.choosing import PooledKeys, Query
from kvcache.hf.lazy import ChosenMask


def choose(
    own: Callable[..., Tensor], indexer: Any, *, cache: Any, hidden_states: Tensor, q_resid: Tensor,
    attention_mask: Tensor,
) -> Tensor:  # fmt: skip
    """Return the blocks of rows that each token attends to, as `Glm5NextTextIndexer.forward`, `own`, would."""
    keys: PooledKeys = cache.index_keys(indexer.layer_idx)
    q = indexer.wq_b(q_resid).view(*hidden_states.shape[:2], -1, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(hidden_states))
    gate = torch.nn.functional.linear(hidden_states, indexer.index_kpool_compress_gate)
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float() * indexer.n_heads**-0.5

    def pool(blocks: Tensor) -> Tensor:
        """Make a key of each block: the mean of its tokens' keys, weighted by their gates."""
        k, gate = blocks.chunk(2, -1)
        shares = (gate.float() + indexer.index_kpool_compress_ape.float()).softmax(1)
        return (shares.to(k.dtype) * k).sum(1)

    padding = None
    if not attention_mask.all():  # of this pass alone: sequence i began with offsets[i] tokens of padding
        passes = keys.passes
        past = torch.arange(passes.num_seen) >= torch.tensor(passes.offsets or [0])[:, None]
        padding = torch.cat((past.expand(len(attention_mask), -1), attention_mask), 1)
    block = indexer.index_kpool
    query = Query(q, weights, indexer.index_topk // block, block, {"relu": True})
    return keys.choose(torch.cat((k, gate), -1), padding, pool, query, indexer.index_kpool_always_select_tail)


def make_mask(
    own: Callable[..., Any], attention: Any, *, topk_indices: Tensor, kv_length: int, **rest: Any
) -> Any:  # fmt: skip
    """Make the mask for the attention: for the attention "kvcache", a mask that holds the choice."""
    if attention.config._attn_implementation in (None, "eager", "sdpa"):
        return own()
    return ChosenMask.of(topk_indices, kv_length)
