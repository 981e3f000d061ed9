"""The tables of kvcache.compat in docs/coming-from.md: every name, and none left out."""

import importlib
import inspect
import re

import pytest
from support.coming_from import PAGE

SECTION = PAGE.read_text().split("## Their own interfaces")[1]
TABLES = re.findall(r"^\| [^|]+ \| `(\w+)` \| what differs \|\n\|[-|]+\|\n((?:\|.*\n)+)", SECTION, re.M)
MODULES = ["zigllama", "ollama", "rust_kvcache", "forgellm", "edifice"]


def names_in(table):
    """The names in the second column."""
    return {name for row in table.splitlines() for name in re.findall(r"`([\w.]+)`", row.split(" | ")[1])}


def public_names(module):
    """The names that a module exports, and the methods of its classes that no base has."""
    for name in module.__all__:
        thing = getattr(module, name)
        yield name
        if inspect.isclass(thing) and thing.__module__ == module.__name__:
            for method, value in vars(thing).items():
                inherited = any(hasattr(base, method) for base in thing.__bases__)
                if inspect.isroutine(value) and not method.startswith("_") and not inherited:
                    yield f"{name}.{method}"


def test_every_module_has_a_table():
    assert [name for name, _ in TABLES] == MODULES


@pytest.mark.parametrize(("name", "table"), TABLES, ids=MODULES)
def test_a_table_has_every_name(name, table):
    named = names_in(table)
    bases = {path.split(".")[0] for path in named if "." in path}
    assert named | bases == {*public_names(importlib.import_module(f"kvcache.compat.{name}"))}
