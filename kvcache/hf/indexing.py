"""Layers with an indexer (sparse attention), whose keys the cache holds in layers of their own."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch

from kvcache.hf.latents import LatentLayer
from kvcache.hf.layers import Layer


class IndexKeys(Layer):
    """The keys of a layer's indexer: a layer of the `KVCache` that holds keys alone.

    It stands by itself for a layer of the model that reads another layer's rows.
    """

    def pack(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the keys alone."""
        return (k,)

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """Take the new tokens' keys, ``[batch, 1, tokens, dim]``; return a lazy tensor for the keys of all tokens."""
        return self.update(idx_k, idx_k[..., :0])[0]

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Do what `update_index` does, with keys ``[batch, tokens, dim]``."""
        return self.update_index(indexer_key_states.unsqueeze(1)).squeeze(1)


class _Indexed:
    """A layer that has keys of an indexer beside its rows."""

    index_keys: IndexKeys

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """As `IndexKeys.update_index`."""
        return self.index_keys.update_index(idx_k)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """As `IndexKeys.update_indexer`."""
        return self.index_keys.update_indexer(indexer_key_states)


class IndexedLayer(_Indexed, Layer):
    """A layer of keys and values with an indexer."""


class IndexedLatentLayer(_Indexed, LatentLayer):
    """A layer of latent attention with an indexer."""


class Chosen(NamedTuple):
    """The choice of an indexer for each query: columns, or blocks of columns."""

    indices: torch.Tensor  # [batch, queries, n], or [batch, KV heads, queries, n]; a negative one is none
    block: int  # the columns of a block; 1: they are columns

    @classmethod
    def of(cls, module: Any, indices: torch.Tensor | None, block_indices: torch.Tensor | None) -> Self | None:
        """Return what the arguments of an attention say; None: nothing was chosen."""
        if block_indices is not None:
            return cls(block_indices, module.indexer.block_size)
        return None if indices is None else cls(indices, 1)

    def shown(self, num_heads: int, num_columns: int) -> torch.Tensor:
        """Return which columns were chosen, of bool, ``[batch, heads, queries, columns]``; heads may be 1."""
        indices = self.indices if self.indices.dim() == 4 else self.indices.unsqueeze(1)
        num_blocks = -(-num_columns // self.block)
        places = torch.where(indices < 0, num_blocks, indices).long()  # the last place is dropped
        shown = torch.zeros(*indices.shape[:3], num_blocks + 1, dtype=torch.bool).scatter_(-1, places, True)
        shown = shown[..., :num_blocks].repeat_interleave(self.block, -1)[..., :num_columns]
        num_choices = shown.shape[1]
        return shown if num_choices == 1 else shown.repeat_interleave(num_heads // num_choices, 1)
