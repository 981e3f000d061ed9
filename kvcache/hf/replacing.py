"""Replace methods of models by functions that use an `HFCache`. With any other cache, they do what they did before."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from kvcache.hf.dense import model_of
from kvcache.hf.layers import expand
from kvcache.hf.told import NAMES_OF_CACHE, NEW_NAME, given_cache

# Takes `own`, the module, and the arguments of the method by name, with a cache as `cache`. `own` is the method itself:
# called without arguments it does what the model does, and it takes other arguments in place of some.
Replacement: TypeAlias = Callable[..., Any]
REPLACED: dict[str, dict[str, Replacement]] = {}  # of classes, by the type of model: `kvcache.hf.models` has them


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
            """Call the model's own method with the arguments given, except for `changes`."""
            arguments = given | changes
            if place is not None:
                arguments[place] = arguments.pop(NEW_NAME)
            return method(module, **arguments)

        return replacement(own, module, **given)

    setattr(kind, name, replaced)


def replacements(kind: type[Any]) -> list[tuple[Any, str, Replacement]]:
    """Return the methods to replace in models that have this class of configuration: class, name, and function.

    All attentions with latents have a method `expand_kv`. Models whose methods have other names run their own code.
    """
    model = model_of(kind)
    if model is None:
        return []
    code = inspect.getmodule(model)
    paths = ((path.split("."), replacement) for path, replacement in REPLACED.get(kind.model_type, {}).items())
    known = ((getattr(code, owner, None), name, replacement) for (owner, name), replacement in paths)
    found = [(owner, name, replacement) for owner, name, replacement in known if hasattr(owner, name)]
    attentions = (owner for owner in vars(code).values() if isinstance(owner, type) and "expand_kv" in vars(owner))
    return [*found, *((owner, "expand_kv", expand) for owner in attentions)]


_installing = threading.Lock()  # a method replaced twice would take lazy tensors for those that the model makes


def install(kind: type[Any]) -> None:
    """Replace the methods of models that have this class of configuration."""
    with _installing:
        for owner, name, replacement in replacements(kind):
            replace(owner, name, replacement)
