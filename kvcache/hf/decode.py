"""Decoding stored rows to dense tensors, for a model whose own attention reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcache.cache import KVCache


def decode_rows(
    cache: KVCache, layer: int, seq_ids: Sequence[int], num_columns: int, num_new: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode the last rows of several sequences in a layer, whatever type they are stored in.

    Parameters
    ----------
    cache : KVCache
        Where the rows are stored.
    layer : int
        Of the cache.
    seq_ids : sequence of int
        The sequence of each batch index.
    num_columns : int
        How many rows of each; a sequence with fewer has zeros before them, where its padding was.
    num_new : int
        How many columns to leave after them, uninitialised, for the rows of new tokens.
    dtype : torch.dtype
        Of the result.

    Returns
    -------
    tuple of torch.Tensor
        Keys and values, ``[batch, heads, num_columns + num_new, dim]``.
    """
    k, v = (
        torch.empty(len(seq_ids), cache.num_kv_heads[layer], num_columns + num_new, dim[layer], dtype=dtype)
        for dim in (cache.head_dim, cache.v_head_dim)
    )
    for batch_index, seq_id in enumerate(seq_ids):
        stored = cache.seq_len(seq_id, layer=layer)
        begin = max(0, num_columns - stored)
        k[batch_index, :, :begin] = v[batch_index, :, :begin] = 0
        out = k[batch_index, :, begin:num_columns], v[batch_index, :, begin:num_columns]
        cache.gather(layer, seq_id=seq_id, first=stored - num_columns + begin, out=out)
    return k, v
