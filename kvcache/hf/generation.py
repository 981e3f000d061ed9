"""Let ``generate`` make a cache of this package where ``cache_implementation="kvcache"`` asks for one."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin
from transformers.generation import configuration_utils

from kvcache.hf.attention import NAME
from kvcache.hf.cache import HFCache
from kvcache.hf.encoder_decoder import HFEncoderDecoderCache

STATIC = configuration_utils.ALL_STATIC_CACHE_IMPLEMENTATIONS
prepare_cache = GenerationMixin._prepare_cache_for_generation


def register() -> None:
    """Add ``"kvcache"`` to the implementations that a generation config may name, and that ``generate`` makes.

    transformers has no registry of caches: its list of names and the method that makes a cache are replaced.
    """
    if NAME not in configuration_utils.ALL_CACHE_IMPLEMENTATIONS:
        names: Any = configuration_utils
        names.ALL_CACHE_IMPLEMENTATIONS += (NAME,)
        kind: Any = GenerationMixin
        kind._prepare_cache_for_generation = _prepare_cache


def _prepare_cache(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Make the cache that a generation config names, of the arguments in its `cache_config`."""
    wanted = generation_config.cache_implementation
    if wanted in STATIC and self.config.get_text_config(decoder=True)._attn_implementation == NAME:
        raise ValueError(
            f"cache_implementation={wanted!r} does not go with the attention {NAME!r}: say"
            f" cache_implementation={NAME!r}, or pass an HFCache as past_key_values"
        )
    is_given = model_kwargs.get("past_key_values") is not None
    if wanted == NAME and not is_given and generation_config.use_cache is not False:
        kind = HFEncoderDecoderCache if self.config.is_encoder_decoder else HFCache
        model_kwargs["past_key_values"] = kind(self.config, **(generation_config.cache_config or {}))
        return None
    return prepare_cache(self, generation_config, model_kwargs, *args, **kwargs)
