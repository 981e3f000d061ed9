"""The layers of an `HFCache`, for transformers. They hold no rows: the cache holds the rows of all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvcache.hf.latents import Latents
from kvcache.hf.masks import Mask
from kvcache.hf.policies import window_of
from kvcache.hf.rows import Rows
from kvcache.policy import ChunkedAttention, SlidingWindow

if TYPE_CHECKING:
    from kvcache.hf.cache import HFCache


class Layer(CacheLayerMixin):
    """One layer of a model's attention over its own tokens."""

    is_croppable = True
    supports_early_init = True
    tensor_type: type[Rows] = Rows  # what stands for its rows

    def __init__(self, cache: HFCache, index: int) -> None:
        self.cache, self.index = cache, index  # index: the layer's in the KVCache
        policy = cache.policy[index]
        self.window = window_of(policy)  # the most tokens that a query sees; 0: all
        self.is_sliding = self.window > 0
        self.is_chunked = isinstance(policy, ChunkedAttention)
        self.num_sink_tokens = policy.num_sink_tokens if isinstance(policy, SlidingWindow) else 0

    @property
    def is_initialized(self) -> bool:  # type: ignore[override] # the base has an attribute, which nothing sets
        """Whether the cache holds tokens."""
        return self.cache.get_seq_length() > 0

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override] # as above
        """The stored keys, decoded, ``[batch, heads, tokens, dim]``; None: there are none."""
        rows = self.cache.dense_rows(self)
        return None if rows is None else rows[0]

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override] # as above
        """The stored values, decoded, ``[batch, heads, tokens, dim]``; None: there are none."""
        rows = self.cache.dense_rows(self)
        return None if rows is None else rows[1]

    def kernels_know(self, mask: torch.Tensor | None, is_causal: bool) -> bool:
        """Whether the kernels can attend with this mask; without one, a module says itself whether it is causal."""
        if isinstance(mask, Mask):
            is_plain = mask.is_plain and not mask.sees_all and not mask.is_made
            return is_plain and (mask.window == self.window or not self.cache.follows_config)
        return is_causal and mask is None

    def pack(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Make rows as the cache takes them of the keys and values that the model gives."""
        return k, v

    def unpack(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Make keys and values as the model takes them of rows."""
        return k, v

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: there is nothing to initialise."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new tokens' keys and values; return the keys and values that the model passes to its attention."""
        return self.cache.store(self, key_states, value_states)

    def past_columns(self, seen: int) -> int:
        """Return how many of the `seen` tokens before a pass have columns in the pass's mask."""
        return min(seen, self.window - 1) if self.window else seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns in the mask of a pass, and the index of the first column's token."""
        seen = self.cache.get_seq_length()
        return self.past_columns(seen) + query_length, seen - self.past_columns(seen)

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, padding included."""
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    @property
    def batch_size(self) -> int:
        """The number of sequences in the batch; -1 before the first pass."""
        return self.cache.batch_size


class LatentLayer(Layer):
    """One layer of latent attention. The model gives latents as keys and rotated elements as values; a row has both."""

    tensor_type = Latents

    def pack(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Append the rotated elements to the latents."""
        return (torch.cat((k, v), -1),)

    def unpack(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latents and rotated elements."""
        return v, k[..., v.shape[-1] :]


class CrossLayer(Layer):
    """One layer of attention over an encoder. Its rows are stored in the first pass, and only read from then on."""

    _values: torch.Tensor | None = None  # values fetched with the keys: transformers reads `keys`, then `values`

    def kernels_know(self, mask: torch.Tensor | None, is_causal: bool) -> bool:
        """Whether the kernels can attend with this mask."""
        if isinstance(mask, Mask):
            return mask.is_plain and mask.sees_all and not mask.is_made
        return mask is None

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override] # the base has an attribute, which nothing sets
        """The keys that the model passes to its attention."""
        keys, self._values = self.cache.fetch(self)
        return keys

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override] # as above
        """The values for the keys that were read last."""
        values, self._values = self._values, None
        return self.cache.fetch(self)[1] if values is None else values
