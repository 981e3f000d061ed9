"""`Maker` makes the layers of an `HFCache`, each of the class that its rows need."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvcache.hf.choosing import IndexedLatentLayer, IndexedLayer, IndexKeys
from kvcache.hf.dense import Decoder
from kvcache.hf.layers import CrossLayer, LatentLayer, Layer
from kvcache.hf.passes import Passes
from kvcache.hf.policies import Part
from kvcache.hf.pooling import Pooled, PooledKeys, SharedLayer
from kvcache.hf.recurrent import MixedLayer
from kvcache.policy import CrossAttention


class Maker(NamedTuple):
    """Makes layers with these passes and this decoder; `follows_config`: whether a layer's window is the model's."""

    passes: Passes
    decoder: Decoder
    follows_config: bool

    def layers(self, parts: Sequence[Part]) -> list[Any]:
        """Make the layers of a model. In the `KVCache`, layers beside others, as of an indexer's keys, follow all."""
        count_rows = itertools.count().__next__
        beside = self.passes.num_rows
        layers: list[Any] = []
        for part in parts:
            if part.policy is not None:
                layers.append(self._layer(count_rows(), part, beside))
            else:
                layers.append(self._layer(beside) if part.beside else part.own)
            beside += len(part.beside)
        return layers

    def copy_of(self, layer: Layer) -> Layer:
        """Make a layer like another cache's, with a copy of its state if it has a state."""
        made = self._layer(layer.index, layer.part, layer.beside)
        if isinstance(layer, MixedLayer):
            assert isinstance(made, MixedLayer)
            made.copy_state(layer)
        return made

    def _layer(self, index: int, part: Part = Part(), beside: int = 0) -> Layer:  # noqa: B008 - it is a tuple
        """Make the layer that stands for a layer of the `KVCache`, for a part whose other layers begin at `beside`."""
        own = self.passes.cache.layers[index]
        arguments = self.passes, self.decoder
        kind: Callable[..., Any] = CrossLayer if isinstance(own.policy, CrossAttention) else Layer
        if number_of_states := getattr(part.own, "number_of_states", 0):
            kind = partial(MixedLayer, number_of_states)
        elif part.keys_are_values:
            kind = SharedLayer
        elif not own.v_head_dim:
            kind = IndexKeys
        elif own.value_in_key:
            kind = IndexedLatentLayer if part.beside else LatentLayer
        elif part.beside:
            kind = IndexedLayer
        made: Any = kind(*arguments, index, self.follows_config)
        made.part, made.beside = part, beside
        if len(part.beside) == 1:
            made.index_keys = self._layer(beside)
        for i in range(0, len(part.beside) - 1, 2):  # rows for several tokens, and their inputs
            are_keys = not part.beside[i].v_head_dim
            rows = (PooledKeys if are_keys else Pooled)(*arguments, beside + i, self.follows_config)
            setattr(made, "index_keys" if are_keys else "compressed", rows)
        return made  # type: ignore[no-any-return] # each kind makes a Layer
