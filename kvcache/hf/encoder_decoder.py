"""`HFEncoderDecoderCache`: two `HFCache`, for models with an encoder and a decoder."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

from transformers import PreTrainedConfig
from transformers.cache_utils import EncoderDecoderCache

from kvcache.arguments import spelt
from kvcache.arrays import Precision
from kvcache.errors import NotSupportedError
from kvcache.hf.cache import HFCache
from kvcache.hf.policies import check_config, check_model
from kvcache.hf.state import SaveableBatch, stored_in
from kvcache.layer import DTypeLike, Transform
from kvcache.models.configuration import NAMES
from kvcache.policy import CrossAttention, Policy
from kvcache.state import ENCODER, SavedState


class Updated(dict[int, bool]):
    """Says for each layer whether it has stored the encoder's rows.

    Models set an entry when they store a layer. `get` ignores the entries and asks the cache, because the models' pass
    may fail after they set one.
    """

    def __init__(self, cache: SourceCache) -> None:
        super().__init__()
        self.cache = cache

    def get(self, index: int, default: Any = None) -> Any:
        """Return whether a layer has stored the encoder's rows."""
        return self.cache.get_seq_length(index) > 0


class SourceCache(HFCache):
    """The part of an `HFEncoderDecoderCache` that holds an encoder's rows."""

    _holds_source = True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of the encoder's rows."""
        layer: Any = self.layers[layer_idx]
        return int(layer.get_seq_length())


@spelt
class HFEncoderDecoderCache(SaveableBatch, EncoderDecoderCache):
    """A cache for models of transformers that have an encoder and a decoder: two `HFCache`.

    Parameters
    ----------
    config, dtype, policy, transform, k_dtype, v_dtype, prompts
        The arguments of `HFCache`; the policy is for the decoder's attention over its own tokens.
    max_source_len : int, optional
        The most rows that the encoder makes; by default from `config`.

    Raises
    ------
    NotSupportedError
        As `HFCache` does.
    ValueError
        As `HFCache` does; or if `config` does not say how long a source may be.
    TypeError
        If `config` is not a configuration of transformers.

    Notes
    -----
    The attention ``"kvcache"`` uses dense tensors for models that add a bias by position to the scores (T5).
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: DTypeLike | None = None,
        policy: Policy | Sequence[Policy] | None = None,
        max_source_len: int | None = None,
        transform: Transform | None = None,
        *,
        k_dtype: DTypeLike | None = None,
        v_dtype: DTypeLike | None = None,
        prompts: Precision | None = None,
    ) -> None:
        check_config(config)
        check_model(config)
        decoder = _find_decoder(config)
        if max_source_len is None:
            lengths = (getattr(config, name, None) for name in NAMES["max_source_positions"])
            max_source_len = next((length for length in lengths if length), None)
        if max_source_len is None:
            raise ValueError(
                f"max_source_len=None: a {type(config).__name__} does not say how long a source may be: give the most"
                " tokens of a source to what makes the cache, HFEncoderDecoderCache(config, max_source_len=512),"
                " enable(model, max_source_len=512), or generate's cache_config={'max_source_len': 512}"
            )
        options: dict[str, Any] = {"k_dtype": k_dtype, "v_dtype": v_dtype, "prompts": prompts}
        source = SourceCache(decoder, dtype, CrossAttention(max_source_len), transform, **options)
        super().__init__(HFCache(decoder, dtype, policy, transform, **options), source)
        self.is_updated = Updated(source)

    @classmethod
    def _behind_in(cls, config: PreTrainedConfig) -> str:
        return ENCODER

    @classmethod
    def _made_for(
        cls, config: PreTrainedConfig, policy: Any, prefix: Any, select: Any, prompts: Any, states: Sequence[SavedState]
    ) -> Self:
        if prefix is not None:
            raise NotSupportedError("prefix: rows of a decoder follow from its encoder's as well: leave prefix out")
        if select is not None:
            raise NotSupportedError(f"select={select}: texts behind an encoder are short: leave select out")
        lengths = (layer.policy.max_len for layer in states[1].layers if isinstance(layer.policy, CrossAttention))
        longest = next(lengths, None)
        return cls(config, policy=policy, max_source_len=longest, prompts=prompts, **stored_in(states[0]))

    @property
    def _parts(self) -> list[Any]:
        return [self.self_attention_cache, self.cross_attention_cache]

    def __copy__(self) -> HFEncoderDecoderCache:
        """Return what `copy.deepcopy` does: two caches of the same parts would feed each other's."""
        return copy.deepcopy(self)

    def check_dynamic_cache(self, method: str) -> None:
        """Do nothing: transformers allows some methods for its own caches only, and these have them too."""


def _find_decoder(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration for a cache of a model's decoder alone."""
    part = config.get_text_config(decoder=True)
    is_part = any(getattr(config, name, None) is part for name in config.sub_configs)
    whole = part if is_part else config  # `part` is a copy if encoder and decoder have one configuration
    decoder = whole.get_text_config(decoder=True)
    if decoder.is_encoder_decoder:  # then `decoder` is a copy, which may be changed
        decoder.is_encoder_decoder = False
    num_layers = getattr(decoder, "num_decoder_layers", None)  # T5's name of num_hidden_layers
    if num_layers and num_layers != decoder.num_hidden_layers:
        decoder.num_hidden_layers = num_layers
    return decoder
