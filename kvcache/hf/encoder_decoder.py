"""`HFEncoderDecoderCache`: two `HFCache`, for models that have an encoder too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import EncoderDecoderCache

from kvcache.errors import NotSupportedError
from kvcache.hf.cache import HFCache
from kvcache.layer import DType
from kvcache.models.fields import NAMES
from kvcache.policy import CrossAttention, Policy


class Updated(dict[int, bool]):
    """Which layers have what the encoder made. What models write here is not believed: their pass may have failed."""

    def __init__(self, cache: HFCache) -> None:
        super().__init__()
        self.cache = cache

    def get(self, index: int, default: Any = None) -> Any:
        """Whether a layer has what the encoder made."""
        return self.cache.has_source(index)


class HFEncoderDecoderCache(EncoderDecoderCache):
    """A cache for models of transformers that have an encoder and a decoder: two `HFCache`.

    Parameters
    ----------
    config, dtype, policy
        As for `HFCache`; the policy is that of the decoder's attention to itself.
    max_source_len : int, optional
        The most tokens that the encoder may make; by default what `config` says.

    Raises
    ------
    NotSupportedError
        As `HFCache` does.
    ValueError
        As `HFCache` does; or if `config` does not say how long a source may be.
    TypeError
        If `config` is no configuration of transformers.

    Notes
    -----
    Models that add a bias to the scores by position (T5) need their own attention.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: DType = "f16",
        policy: Policy | Sequence[Policy] | None = None,
        max_source_len: int | None = None,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config is {config!r}: give the model's, of transformers")
        if config.model_type.startswith("t5gemma"):
            raise NotSupportedError(f"a {type(config).__name__}'s model makes its own cache for what its encoder made")
        part = config.get_text_config(decoder=True)
        is_part = any(getattr(config, name, None) is part for name in config.sub_configs)
        followed = part if is_part else config  # where both are one, that was a copy
        decoder = followed.get_text_config(decoder=True)
        if decoder.is_encoder_decoder:  # then this is one
            decoder.is_encoder_decoder = False
        if num_layers := getattr(decoder, "num_decoder_layers", None):  # as T5 calls them
            decoder.num_hidden_layers = num_layers
        if max_source_len is None:
            max_source_len = next(
                (n for name in NAMES["max_source_positions"] if (n := getattr(config, name, None))), None
            )
        if max_source_len is None:
            raise ValueError(f"max_source_len=None: a {type(config).__name__} does not say how long a source may be")
        caches = HFCache(decoder, dtype, policy), HFCache(decoder, dtype, CrossAttention(max_source_len))
        for cache in caches:
            cache._config = followed
        super().__init__(*caches)
        self.is_updated = Updated(caches[1])

    def check_dynamic_cache(self, method: str) -> None:
        """Nothing: what transformers wants its own caches for, ours can do."""
