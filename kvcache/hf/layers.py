"""The layers of an `HFCache` as transformers sees them. They hold no rows: the cache does, for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvcache.hf.attention import Mask
from kvcache.hf.policies import window_of

if TYPE_CHECKING:
    from kvcache.hf.cache import HFCache


class Layer(CacheLayerMixin):
    """One layer of attention of a model over its own tokens."""

    is_croppable = True
    is_initialized = True  # the KVCache takes rows from the start
    supports_early_init = False
    keys: torch.Tensor | None = None  # transformers reads these two of a cross-attention layer only
    values: torch.Tensor | None = None

    def __init__(self, cache: HFCache, index: int) -> None:
        self.cache, self.index = cache, index  # index: among the layers of the KVCache
        self.window = window_of(cache.policy[index])  # the most tokens that a query sees; 0: all
        self.is_sliding = self.window > 0

    def kernels_know(self, mask: Mask | torch.Tensor | None, is_causal: bool) -> bool:
        """Whether the kernels can attend with this mask."""
        if isinstance(mask, Mask):
            return is_causal and mask.is_plain and not mask.sees_all
        return is_causal and mask is None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new tokens' keys and values; return what the model passes to its attention."""
        return self.cache.store(self, key_states, value_states)

    def past_columns(self, seen: int) -> int:
        """How many of the `seen` tokens before a pass have columns in its mask."""
        return min(seen, self.window - 1) if self.window else seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns in the mask of a pass, and the token that the first column is for."""
        seen = self.cache.get_seq_length()
        return self.past_columns(seen) + query_length, seen - self.past_columns(seen)

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    @property
    def batch_size(self) -> int:
        """Sequences in the batch; -1 before the first pass."""
        return self.cache.batch_size


class CrossLayer(Layer):
    """One layer of attention over an encoder. Its rows are stored in the first pass, and only read from then on."""

    _values: torch.Tensor | None = None  # fetched with the keys: transformers asks for keys, then for values

    def kernels_know(self, mask: Mask | torch.Tensor | None, is_causal: bool) -> bool:
        """Whether the kernels can attend with this mask."""
        return mask.is_plain and mask.sees_all if isinstance(mask, Mask) else mask is None

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override] # the base has an attribute, which nothing sets
        """The keys that the model passes to its attention."""
        keys, self._values = self.cache.fetch(self)
        return keys

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override] # as above
        """The values that go with the keys asked for last."""
        values, self._values = self._values, None
        return self.cache.fetch(self)[1] if values is None else values
