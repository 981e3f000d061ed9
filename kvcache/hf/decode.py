"""Decode stored rows to dense tensors, for a model with an attention of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcache.cache import KVCache


def decode_rows(
    cache: KVCache, layer: int, seq_ids: Sequence[int], num_columns: int, num_new: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode the last rows of several sequences in a layer, from whatever type they are stored in.

    Parameters
    ----------
    cache : KVCache
        The cache that stores the rows.
    layer : int
        The layer's index in the cache.
    seq_ids : sequence of int
        The sequence of each batch index.
    num_columns : int
        The number of rows of each sequence; a sequence with fewer gets zeros before them, where its padding was.
    num_new : int
        The number of columns to leave after these rows, uninitialised, for the rows of new tokens.
    dtype : torch.dtype
        The result's element type.

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
