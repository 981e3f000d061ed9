"""`Maker` makes the layers of an `HFCache`, each of the class that its rows need."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvcache.hf.decode import Decoder
from kvcache.hf.indexing import IndexedLatentLayer, IndexedLayer, IndexKeys
from kvcache.hf.latents import LatentLayer
from kvcache.hf.layers import CrossLayer, Layer
from kvcache.hf.passes import Passes
from kvcache.hf.policies import Part
from kvcache.hf.pooling import PooledKeys
from kvcache.hf.recurrent import MixedLayer
from kvcache.policy import CrossAttention


class Maker(NamedTuple):
    """Makes layers with these passes and this decoder; `follows_config`: whether a layer's window is the model's."""

    passes: Passes
    decoder: Decoder
    follows_config: bool

    def layers(self, parts: Sequence[Part]) -> list[Any]:
        """Make the layers of a model. In the `KVCache`, layers with an indexer's keys follow all others."""
        count_rows = itertools.count().__next__
        count_indexers = itertools.count(sum(part.policy is not None for part in parts)).__next__
        layers: list[Any] = []
        for part in parts:
            index_keys = None if part.index_beside is None else count_indexers()
            if part.pools:
                count_indexers()  # the layer of what is pooled
            if part.policy is not None:
                states = getattr(part.own, "number_of_states", 0)
                layers.append(self._layer(count_rows(), states, index_keys, part.pools))
            else:
                layers.append(part.own if index_keys is None else self._layer(index_keys))
        return layers

    def copy_of(self, layer: Layer) -> Layer:
        """Make a layer like another cache's, with a copy of its state if it has a state."""
        if isinstance(layer, MixedLayer):
            made = self._layer(layer.index, layer.number_of_states)
            assert isinstance(made, MixedLayer)
            made.copy_state(layer)
            return made
        index_keys = getattr(layer, "index_keys", None)
        if index_keys is None:
            return self._layer(layer.index)
        return self._layer(layer.index, index_keys=index_keys.index, pools=isinstance(index_keys, PooledKeys))

    def _layer(
        self, index: int, number_of_states: int = 0, index_keys: int | None = None, pools: bool = False
    ) -> Layer:
        """Make the layer that stands for a layer of the `KVCache`.

        `index_keys` is the layer of its indexer's keys, and `pools` says whether the indexer pools them.
        """
        own = self.passes.cache.layers[index]
        kind: Callable[..., Any] = CrossLayer if isinstance(own.policy, CrossAttention) else Layer
        if number_of_states:
            kind = partial(MixedLayer, number_of_states)
        elif not own.v_head_dim:
            kind = IndexKeys
        elif own.value_in_key:
            kind = LatentLayer if index_keys is None else IndexedLatentLayer
        elif index_keys is not None:
            kind = IndexedLayer
        made: Any = kind(self.passes, self.decoder, index, self.follows_config)
        if index_keys is not None:
            keys = PooledKeys(self.passes, self.decoder, index_keys, self.follows_config) if pools else None
            made.index_keys = keys or self._layer(index_keys)
        return made  # type: ignore[no-any-return] # each kind makes a Layer
