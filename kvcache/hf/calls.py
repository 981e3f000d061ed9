"""Tell a cache where each call of a model begins and ends, and which tokens it feeds.

A cache with a prefix cache keeps the rows of these tokens alone. A cache whose layers read other layers' rows needs its
batch until the call ends.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcache.hf.cache import HFCache
from kvcache.hf.encoder_decoder import HFEncoderDecoderCache
from kvcache.hf.told import CACHE, NEW_NAME, name_cache
from kvcache.warning import warn

call: Any = PreTrainedModel.__call__
# The cache of the call that runs. A model calls parts that are models, too: these are fed what the first call makes.
_running: ContextVar[HFCache | None] = ContextVar("_running", default=None)


def register_calls() -> None:
    """Have each model of transformers tell its cache which tokens it is fed.

    The cache itself sees only keys and values. transformers has no hook for the calls of all models: their method is
    replaced.
    """
    if PreTrainedModel.__call__ is call:
        kind: Any = PreTrainedModel
        kind.__call__ = _call


@functools.wraps(call)
def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a model, and tell its cache of the call, unless a call around this one did."""
    if CACHE != NEW_NAME and isinstance(kwargs.get(NEW_NAME), (HFCache, HFEncoderDecoderCache)):
        name_cache(kwargs)
    token = None
    for cache in (*args, *kwargs.values()):
        if isinstance(cache, HFCache) and cache.follows_calls:
            token = _begin(cache, self, args, kwargs)
            break
    if token is None:
        return call(self, *args, **kwargs)
    has_failed = True
    try:
        result = call(self, *args, **kwargs)
        has_failed = False
    finally:
        _end(cache, token, has_failed)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator] # it has no types
def _begin(
    cache: HFCache, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Token[HFCache | None] | None:
    """Tell a cache what a call feeds, and return what `_end` takes; None: a call around this one has told it.

    In training, rows follow from chance as well (dropout): then the cache is told nothing, and keeps no prompts.
    """
    inputs, is_part = dict(zip(_names_of(type(model).forward), args, strict=False)) | kwargs, _running.get() is cache
    if model.training and not is_part and (cache.takes_prompt or cache.is_acquired):
        warn("kvcache: the prefix cache keeps nothing of a model in training mode: call model.eval() first")
    cache.tell({} if model.training else inputs, is_part)
    return None if is_part else _running.set(cache)


@torch.compiler.disable  # type: ignore[untyped-decorator] # it has no types
def _end(cache: HFCache, token: Token[HFCache | None], has_failed: bool) -> None:
    """End what `_begin` began."""
    _running.reset(token)
    cache.tell_end(has_failed)


@functools.cache
def _names_of(forward: Callable[..., Any]) -> list[str]:
    """Return the names of a method's arguments, in order."""
    return [*inspect.signature(forward).parameters][1:]
