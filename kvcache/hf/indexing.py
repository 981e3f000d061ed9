"""Layers with an indexer (sparse attention), whose keys the cache holds in layers of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvcache.hf.choosing import Query
from kvcache.hf.latents import LatentLayer
from kvcache.hf.layers import Layer
from kvcache.hf.passes import ForwardPass
from kvcache.hf.pooling import PooledKeys


class IndexKeys(Layer):
    """The keys of a layer's indexer: a layer of the `KVCache` that holds keys alone.

    It stands by itself for a layer of the model that reads another layer's rows.
    """

    def pack(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return the keys alone."""
        return (k,)

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Take the new tokens' keys, ``[batch, 1, tokens, dim]``; return a lazy tensor for the keys of all tokens."""
        return self.update(idx_k, idx_k[..., :0])[0]

    def choose(self, this_pass: ForwardPass, query: Query, masked: Any) -> dict[str, Any]:
        """Store the new keys, and choose. Return arguments of `Batch.attend`: none if all rows would be chosen."""
        if self.index in this_pass.pending:
            self.passes.put(this_pass, self.index)
        num_rows = this_pass.num_seen + this_pass.num_tokens - min(this_pass.offsets)
        if num_rows <= query.width * query.block:
            return {}
        return {"chosen": query.choose(this_pass, self.index, masked), "chosen_block": query.block}


class HeldKeys:
    """Stands for a cache, and for its layers, where a model's own indexer scores keys that the cache has taken."""

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys
        self.layers = self

    def __getitem__(self, layer_idx: int) -> HeldKeys:
        return self

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Return the keys of all tokens, ``[batch, 1, tokens, dim]``."""
        return self._keys

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Return the keys of all tokens, ``[batch, tokens, dim]``."""
        return self._keys.squeeze(1)


class _NoPositions:
    """The positions of all tokens, which Qwen 4 keeps in a cache: none, as its rows hold what comes of them."""

    def __get__(self, layer: Any, owner: type) -> None:
        return None

    def __set__(self, layer: Any, positions: Tensor) -> None:
        """Keep nothing."""


class _Indexed:
    """A layer that has keys of an indexer beside its rows."""

    index_keys: IndexKeys | PooledKeys
    indexer_position_ids = _NoPositions()

    def update_index(self, idx_k: Tensor) -> Tensor:
        """As `IndexKeys.update_index`."""
        return self.index_keys.update_index(idx_k)


class IndexedLayer(_Indexed, Layer):
    """A layer of keys and values with an indexer."""


class IndexedLatentLayer(_Indexed, LatentLayer):
    """A layer of latent attention with an indexer."""
