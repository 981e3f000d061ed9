"""The interfaces of kvcache.compat: docs/coming-from.md names each, and the reference shows each name of it."""

import copy
import importlib
import inspect
import pkgutil
import re

import numpy as np
import pytest
from support.coming_from import PAGE

import kvcache.compat

MODULES = [module.name for module in pkgutil.iter_modules(kvcache.compat.__path__) if not module.name.startswith("_")]


def public_names(module):
    """The names that a module exports, and the methods of its classes that no base has."""
    for name in module.__all__:
        thing = getattr(module, name)
        yield name, thing
        if inspect.isclass(thing) and thing.__module__ == module.__name__:
            for method, value in vars(thing).items():
                inherited = any(hasattr(base, method) for base in thing.__bases__)
                if inspect.isroutine(value) and not method.startswith("_") and not inherited:
                    yield f"{name}.{method}", value


@pytest.mark.parametrize("name", MODULES)
def test_an_interface_is_on_the_page_and_in_the_reference(name):
    section = PAGE.read_text().split("## Their own interfaces")[1]
    (said,) = re.findall(rf"^\| `{name}` \| (.*) \|$", section, re.M)
    reference = (PAGE.parent / "api.md").read_text()
    shown = re.search(
        rf"automodule:: kvcache\.compat\.{name}\n   :members:\n(?:   :exclude-members: (.*)\n)?", reference
    )
    excluded = (shown[1] or "").split(", ")
    for path, thing in public_names(importlib.import_module(f"kvcache.compat.{name}")):
        if path in excluded:  # what is not documented in itself
            assert f"`{path}`" in said
        else:
            assert inspect.getdoc(thing), f"the reference does not show {path}, which has no docstring"


def put_into(name, k, v):
    """Give rows of one token, 2 heads of 8, to a cache of each interface; return it."""
    module = importlib.import_module(f"kvcache.compat.{name}")
    if name == "edifice":
        cache = module.KVCache.init(batch_size=1, num_layers=1, num_heads=2, head_dim=8)
        cache.update(0, k.reshape(1, 2, 1, 8), v.reshape(1, 2, 1, 8))
    elif name == "forgellm":
        cache = module.KVCache(1, 2, 8)
        cache.append(0, k, v)
    elif name == "rust_kvcache":
        cache = module.KvCache(1, 2, 8, 4)
        cache.inject_block(0, 0, 1, k, v)
    elif name == "zigllama":
        cache = module.ModelKVCache(1, 2, 8, 4)
        cache.layers[0].append(k[0], v[0])
    else:
        cache = module.new_causal_cache()
        cache.init(1, 2, 8, capacity=4)
        cache.start_forward([0])
        cache.put(k, v)
    return cache


@pytest.mark.parametrize("name", MODULES)
def test_a_copy_is_independent(name):
    cache = put_into(name, *np.ones((2, 1, 2, 8), np.float32))
    if name == "ollama":
        with pytest.raises(kvcache.CacheBusyError):
            copy.copy(cache)
        cache.can_resume(0, 1)  # ends the pass
    if name == "forgellm":
        cache.advance()
    for make in (copy.copy, copy.deepcopy):
        other = make(cache)
        other.cache.clear()
        assert (other.cache.seq_len(), cache.cache.seq_len()) == (0, 1)


@pytest.mark.hf
@pytest.mark.parametrize("name", MODULES)
def test_a_tensor_with_grad(name):
    import torch

    k = torch.ones(1, 2, 8)
    put_into(name, k, k)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=r"k.*: the tensor requires grad, .* give its \.detach\(\)"):
            put_into(name, k.to(dtype).requires_grad_(), k)


@pytest.mark.hf
@pytest.mark.parametrize("name", MODULES)
def test_a_tensor_that_cannot_be_read(name):
    import torch

    k = torch.ones(1, 2, 8)
    for tensor in (torch._neg_view(k), k.to("meta"), torch._efficientzerotensor(k.shape)):
        with pytest.raises((TypeError, ValueError), match=r"^(new_)?k.*: "):
            put_into(name, tensor, k)
