"""What transformers takes for one layer of the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvcache.hf.attention import Mask
from kvcache.hf.policies import window_of

if TYPE_CHECKING:
    from kvcache.hf.cache import HFCache


class Layer(CacheLayerMixin):
    """What transformers takes for one layer of the cache."""

    is_croppable = True
    is_initialized = True  # rows are taken as they come
    supports_early_init = False
    keys: torch.Tensor | None = None  # nobody asks
    values: torch.Tensor | None = None

    def __init__(self, cache: HFCache, index: int) -> None:
        self.cache, self.index = cache, index  # of the core's layers
        self.window = window_of(cache.policy[index])  # tokens that a query sees at most; 0: all
        self.is_sliding = self.window > 0

    def knows(self, mask: Mask | torch.Tensor | None, is_causal: bool) -> bool:
        """Whether the kernels can attend with this mask."""
        if isinstance(mask, Mask):
            return is_causal and mask.is_plain and not mask.sees_all
        return is_causal and mask is None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens of a layer; return what its attention is given."""
        return self.cache.store(self, key_states, value_states)

    def kept(self, seen: int) -> int:
        """How many of the tokens before have columns in a mask."""
        return min(seen, self.window - 1) if self.window else seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns the mask of a pass has, and the token that the first of them is of."""
        seen = self.cache.get_seq_length()
        return self.kept(seen) + query_length, seen - self.kept(seen)

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first pass."""
        return self.cache.batch_size


class CrossLayer(Layer):
    """The same, of attention over an encoder, whose keys and values are stored once and then asked for, in turns."""

    _values: torch.Tensor | None = None  # that go with the keys asked for last

    def knows(self, mask: Mask | torch.Tensor | None, is_causal: bool) -> bool:
        """Whether the kernels can attend with this mask."""
        return mask.is_plain and mask.sees_all if isinstance(mask, Mask) else mask is None

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override] # where others have an attribute, which nobody sets
        """What the attention is given for keys."""
        keys, self._values = self.cache.fetch(self)
        return keys

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override] # as above
        """What the attention is given for values."""
        values, self._values = self._values, None
        return self.cache.fetch(self)[1] if values is None else values
