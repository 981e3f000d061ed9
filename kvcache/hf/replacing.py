"""Replace methods of models by functions that use an `HFCache`. With any other cache, they do what they did before."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

OLD_NAME = "past_key_values"  # of the argument `cache`, before transformers 5.24

# Takes `own`, the module, and the arguments of the method by name, with a cache as `cache`. `own` is the method itself:
# called without arguments it does what the model does, and it takes other arguments in place of some.
Replacement: TypeAlias = Callable[..., Any]


@functools.cache
def replace(kind: type[Any], name: str, replacement: Replacement) -> None:
    """Replace a method of a class, once, where it is given an `HFCache`, or has no argument for a cache."""
    method = getattr(kind, name)
    names = [*inspect.signature(method).parameters][1:]
    place = next((place for place in ("cache", OLD_NAME) if place in names), None)

    @functools.wraps(method)
    def replaced(module: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if place is not None:
            cache = given.pop("cache", None)
            given["cache"] = cache = given.pop(OLD_NAME, None) if cache is None else cache
            if not hasattr(cache, "index_keys"):
                return method(module, *args, **kwargs)

        def own(**changes: Any) -> Any:
            arguments = given | changes
            if place is not None:
                arguments[place] = arguments.pop("cache")
            return method(module, **arguments)

        return replacement(own, module, **given)

    setattr(kind, name, replaced)
