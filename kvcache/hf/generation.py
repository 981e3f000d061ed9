"""Let ``generate`` make a cache where ``cache_implementation="kvcache"`` asks for one.

Also let it hand its prompt to an `HFCache` that has a prefix cache.
"""

from __future__ import annotations

import functools
import warnings
from contextvars import ContextVar
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation import configuration_utils

from kvcache.hf.attention import NAME
from kvcache.hf.cache import HFCache
from kvcache.hf.encoder_decoder import HFEncoderDecoderCache

STATIC = configuration_utils.ALL_STATIC_CACHE_IMPLEMENTATIONS
generate = GenerationMixin.generate
prefill: Any = GenerationMixin._prefill
prepare_cache = GenerationMixin._prepare_cache_for_generation
# Caches with a prefix cache that were made for the `generate` that runs.
_made: ContextVar[list[HFCache] | None] = ContextVar("_made", default=None)


def register() -> None:
    """Add ``"kvcache"`` to the implementations that a generation config may name, and that ``generate`` makes.

    transformers has no registry of caches: its list of names and the methods that make and fill a cache are replaced.
    """
    if NAME not in configuration_utils.ALL_CACHE_IMPLEMENTATIONS:
        names: Any = configuration_utils
        names.ALL_CACHE_IMPLEMENTATIONS += (NAME,)
        kind: Any = GenerationMixin
        kind._prepare_cache_for_generation = _prepare_cache
        kind._prefill, kind.generate = _prefill, _generate


def _prepare_cache(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Make the cache that a generation config names, of the arguments in its `cache_config`."""
    wanted = generation_config.cache_implementation
    if wanted in STATIC and self.config.get_text_config(decoder=True)._attn_implementation == NAME:
        raise ValueError(
            f"cache_implementation={wanted!r} does not go with the attention {NAME!r}: say"
            f" cache_implementation={NAME!r}, or pass an HFCache as past_key_values"
        )
    given = model_kwargs.get("past_key_values")
    is_given = given is not None
    if generation_config.use_cache is False:
        _note_no_cache(self, wanted, given)
    if wanted == NAME and not is_given and generation_config.use_cache is not False:
        kind = HFEncoderDecoderCache if self.config.is_encoder_decoder else HFCache
        cache = kind(self.config, **(generation_config.cache_config or {}))
        model_kwargs["past_key_values"] = cache
        made = _made.get()
        if made is not None and isinstance(cache, HFCache) and cache.takes_prompt:
            made.append(cache)
        return None
    return prepare_cache(self, generation_config, model_kwargs, *args, **kwargs)


def _note_no_cache(model: Any, wanted: str | None, given: Any) -> None:
    """Raise for a cache that is given although `use_cache` is False, warn of one that the model's own config rules out.

    Without `use_cache`, the whole text is fed in every step, and a cache would store it each time anew.
    """
    if isinstance(given, (HFCache, HFEncoderDecoderCache)):
        raise ValueError(
            f"use_cache=False, which may come from the {type(model.config).__name__}, feeds the whole text in every"
            " step: give use_cache=True beside past_key_values"
        )
    if wanted == NAME and model.generation_config.use_cache is False:
        warnings.warn(
            f"kvcache: no cache is made, because the model's generation config says use_cache=False"
            f" ({type(model.config).__name__}): give use_cache=True beside cache_implementation={NAME!r}",
            stacklevel=3,
        )


def _prefill(
    self: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Take the beginning of the prompts from the cache's prefix cache, and feed the rest."""
    cache = model_kwargs.get("past_key_values")
    if isinstance(cache, HFCache) and cache.takes_prompt and _follows_from_tokens(input_ids, model_kwargs):
        cache.acquire(input_ids, model_kwargs.get("attention_mask"))
    return prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs)


def _follows_from_tokens(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether a prompt's keys and values follow from its tokens and padding: no images, no embeddings."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    others = (value for name, value in model_kwargs.items() if name not in ("attention_mask", "position_ids"))
    has_others = any(isinstance(value, (torch.Tensor, list, tuple, dict)) for value in others)
    if (
        has_others
        or input_ids.ndim != 2
        or (mask is not None and (mask.shape != input_ids.shape or not mask.any(1).all()))
    ):
        return False
    if positions is None:
        return mask is None or bool(mask.all())
    shown = torch.ones_like(input_ids) if mask is None else mask.long()
    wanted = (shown.cumsum(1) - 1).masked_fill(shown == 0, 0)
    return positions.ndim == 2 and positions.shape[1] == wanted.shape[1] and bool((positions == wanted).all())


@functools.wraps(generate)
def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate, and give the rows of caches that were made here, and that nobody else has, to their prefix caches."""
    made: list[HFCache] = []
    token = _made.set(made)
    try:
        result = generate(self, *args, **kwargs)
        for cache in made:
            if getattr(result, "past_key_values", None) is not cache:
                tokens: Any = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", ())
                is_known = len(tokens) == cache.batch_size and not kwargs.get("custom_generate")
                cache.release(tokens if is_known else None)
        return result
    except BaseException:
        for cache in made:
            cache.reset()
        raise
    finally:
        _made.reset(token)
