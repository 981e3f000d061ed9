"""The interfaces of kvcache.compat: docs/coming-from.md names each, and the reference shows each name of it."""

import importlib
import inspect
import pkgutil
import re

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
