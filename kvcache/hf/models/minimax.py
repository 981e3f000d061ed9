"""`MiniMaxHFCache`: an `HFCache` that MiniMax takes for a cache of its own class, and calls by that class's methods."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from kvcache.hf.cache import KINDS, HFCache


class MiniMaxHFCache(HFCache, MiniMaxCache):
    """A cache for MiniMax. Its recurrent layers keep the states of the lightning attention."""

    def __len__(self) -> int:
        """Return the number of layers."""
        return Cache.__len__(self)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Return the state of a layer's lightning attention; None before the first pass."""
        layer: Any = self.recurrent_layer(layer_idx, 0)
        state: torch.Tensor | None = layer.recurrent_states[0]
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Keep the state of a layer's lightning attention behind the tokens of this pass."""
        self.update_recurrent_state(linear_cache, layer_idx)


def register_minimax() -> None:
    """Have `HFCache` make this cache for MiniMax."""
    KINDS["minimax"] = MiniMaxHFCache
