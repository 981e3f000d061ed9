"""Replace methods of models by functions that use an `HFCache`. With any other cache, they do what they did before."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from kvcache.hf.told import NAMES_OF_CACHE, NEW_NAME, given_cache

# Takes `own`, the module, and the arguments of the method by name, with a cache as `cache`. `own` is the method itself:
# called without arguments it does what the model does, and it takes other arguments in place of some.
Replacement: TypeAlias = Callable[..., Any]


@functools.cache
def replace(kind: type[Any], name: str, replacement: Replacement) -> None:
    """Replace a method of a class, once, where it is given an `HFCache`, or has no argument for a cache."""
    method = getattr(kind, name)
    names = [*inspect.signature(method).parameters][1:]
    place = next((name for name in NAMES_OF_CACHE if name in names), None)

    @functools.wraps(method)
    def replaced(module: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if place is not None:
            cache = given_cache(given)
            if not hasattr(cache, "index_keys"):
                return method(module, *args, **kwargs)
            given = {key: value for key, value in given.items() if key not in NAMES_OF_CACHE} | {NEW_NAME: cache}

        def own(**changes: Any) -> Any:
            arguments = given | changes
            if place is not None:
                arguments[place] = arguments.pop(NEW_NAME)
            return method(module, **arguments)

        return replacement(own, module, **given)

    setattr(kind, name, replaced)
