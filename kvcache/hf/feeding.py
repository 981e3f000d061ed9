"""Take what the layers of a model bring to an `HFCache`, and know how far a pass has come through them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, LinearAttentionLayer

from kvcache import KVCache
from kvcache.errors import NotSupportedError
from kvcache.hf.choosing import IndexKeys
from kvcache.hf.dense import Decoder
from kvcache.hf.layers import Layer
from kvcache.hf.passes import Passes
from kvcache.hf.pooling import PooledKeys, SharedLayer
from kvcache.hf.recurrent import KEYS, ROWS, Recurrent
from kvcache.prefix import PrefixCache

TOLD = "text", "next_positions", "ahead", "has_moved_rows", "follows_from_others"  # by `generate`


class FedBatch(Cache):
    """Takes the tokens that a model feeds, layer by layer; a base of `HFCache`."""

    goes_on_by_one_token = False  # whether recurrent layers begin anew in a pass of several tokens

    text: torch.Tensor | None  # what `generate` told of each sequence: its tokens, or a digest of an encoder's rows
    has_moved_rows: bool  # since `generate` told them
    next_positions: torch.Tensor | None  # of what `generate` makes, [axes, batch, 1]; None: usual ones
    # How far the position behind a column is ahead of the column's own, behind images, [batch, columns]; later columns
    # are like the last. None: unknown, or the model counts once.
    ahead: torch.Tensor | None
    follows_from_others: bool  # whether rows follow from images or the like as well

    _cache: KVCache
    _config: PreTrainedConfig
    _decoder: Decoder
    _passes: Passes
    _placeholders: set[int]  # tokens that stand for an image or sound
    _prefix: PrefixCache | None
    _recurrent: Recurrent

    def _forget_text(self) -> None:
        self.text = self.next_positions = self.ahead = None
        self.has_moved_rows = self.follows_from_others = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new tokens' keys and values of a layer; return the keys and values for the model's attention."""
        layer: Any = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if not isinstance(layer, Layer) or isinstance(layer, IndexKeys):
            raise self._not_as_configured(layer_idx, "keys and values")
        if self.goes_on_by_one_token and key_states.shape[2] > 1 and self.get_seq_length():
            raise NotSupportedError(
                "the model goes on from the state of its recurrent layers by single tokens only: feed them one by one,"
                " or reset() the cache, and feed the whole text at once"
            )
        if self._recurrent.layers:
            self._reach(layer_idx, ROWS)
        new: tuple[torch.Tensor, torch.Tensor] = layer.update(key_states, value_states, *args, **kwargs)
        return new

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Take the new tokens' keys of a layer's indexer, ``[batch, tokens, dim]``; return the keys of all tokens."""
        return self.index_keys(layer_idx).update_index(indexer_key_states.unsqueeze(1)).squeeze(1)

    def index_keys(self, layer_idx: int) -> IndexKeys | PooledKeys:
        """Return the keys of a layer's indexer; note that the pass has come to them."""
        layer: Any = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        keys: IndexKeys | PooledKeys | None = (
            layer if isinstance(layer, IndexKeys) else getattr(layer, "index_keys", None)
        )
        if keys is None:
            raise self._not_as_configured(layer_idx, "keys of an indexer")
        if self._recurrent.layers:
            self._reach(layer_idx, KEYS)
        return keys

    def shared_layer(self, layer_idx: int) -> SharedLayer:
        """Return a layer whose keys are the values, too."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if not isinstance(layer, SharedLayer):
            raise self._not_as_configured(layer_idx, "keys that are values")
        return layer

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state of a recurrent layer's convolution; None before the first pass.

        Each pass begins with this.
        """
        self.recurrent_layer(layer_idx, state_idx)
        state: torch.Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state

    def recurrent_layer(self, layer_idx: int, state_idx: int) -> LinearAttentionLayer:
        """Return a recurrent layer, to whose state a pass has come."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if not isinstance(layer, LinearAttentionLayer):
            raise self._not_as_configured(layer_idx, "a recurrent state")
        self._reach(layer_idx, state_idx)
        return layer

    def _not_as_configured(self, index: int, holds: str) -> ValueError:
        """Return what to raise for a layer of the model, which holds something, and which the config lacks."""
        if index >= len(self.layers):
            return ValueError(
                f"the model has {index + 1} layers or more, the config that this cache was made from has"
                f" {len(self.layers)}: give HFCache model.config"
            )
        return ValueError(
            f"layer {index} of the model has {holds}, that of the config which this cache was made from has not:"
            " give HFCache model.config"
        )

    def _reach(self, layer_idx: int, part: int) -> None:
        """Note that a pass has come to a part of a layer."""
        if self._recurrent.is_begun_by(layer_idx, part):
            self._passes.check_user()
            if self.has_lost_state:
                self._begin_anew()
            self._passes.finish()  # if this pass fails before any rows, the last one is not taken for it
            self._checkpoint()
        self._recurrent.reach(layer_idx, part)

    def _begin_anew(self) -> None:
        """Forget the states that a pass which failed has left; raise if tokens before it are lost with them."""
        is_first = self._passes.last is not None and self._passes.last.brings_sequences
        self._passes.end()
        if self._passes.seq_ids and not is_first:
            seen = self._passes.num_seen
            raise ValueError(
                "a forward pass did not go through all layers, and recurrent layers cannot go back to before it:"
                f" {self._recurrent.ways_back(seen)}"
            )
        self.reset()

    def _checkpoint(self) -> None:
        """Let the prefix cache keep the states behind the last pass, where they help."""
        passes = self._passes
        if passes.prompts is not None:
            passes.prompts.checkpoint(passes.seq_ids, passes.num_seen, passes.num_last, self._recurrent.state_of)

    @property
    def has_lost_state(self) -> bool:
        """Whether some recurrent layers have tokens of a pass that failed in them; ask when none runs."""
        return bool(self._recurrent) and (self._passes.has_dropped or self._recurrent.is_within)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens seen, padding included.

        Tokens of a pass that still runs, or that failed, do not count.
        """
        is_among_rows = self._recurrent.layers and self._recurrent.has_come_to_rows
        return self._passes.num_seen if is_among_rows else self._passes.length

    def finish(self) -> None:
        """Make the last pass part of its sequences, so that the `KVCache` has no open batch, if it is complete."""
        self._passes.finish()

    def check_complete(self) -> None:
        """Raise ValueError if the model has returned from a pass that did not go through every layer."""
        last = self._passes.last
        if last is not None and not last.is_complete:
            raise ValueError(
                f"the model went through {len(last.done)} of {last.num_layers} layers of attention that the config has"
                " which this cache was made from: give HFCache model.config"
            )
        if self._recurrent and self._recurrent.is_within:
            raise ValueError(
                "the model left out recurrent layers that the config has which this cache was made from: give HFCache"
                " model.config"
            )

    def drop_failed(self) -> None:
        """End a pass that failed."""
        last = self._passes.last
        if last is not None and not last.is_complete:
            self._passes.end()

    def check_batch_size(self, batch_size: int) -> None:
        """End a pass that failed; raise ValueError if the cache holds more or fewer rows."""
        self._passes.end()
        self._passes.check_batch_size(batch_size)

    @property
    def batch_size(self) -> int:
        """The number of sequences in the batch; -1 before the end of a first pass."""
        return self._passes.batch_size

    def feed_again(self) -> None:
        """Forget all rows, because the text is fed once more from its beginning; keep what `generate` told of it."""
        told = {name: getattr(self, name) for name in TOLD}
        self.reset()
        self.__dict__.update(told)

    def reset(self) -> None:
        """Forget all tokens."""
        passes = self._passes
        passes.check_user()
        passes.end()
        seq_ids = passes.seq_ids
        try:  # forget first: after an interrupt, no token may count as held whose row is gone
            passes.forget()
            passes.has_dropped = True  # until recurrent layers have forgotten as well
            self._forget_text()
            self._recurrent.reset()
            self._decoder.forget()
            passes.has_dropped = False
        finally:
            for seq_id in seq_ids:
                self._cache.clear(seq_id)
