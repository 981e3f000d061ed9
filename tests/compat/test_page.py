"""The tables of kvcache.compat in docs/coming-from.md: every name, with its arguments, and none left out."""

import importlib
import inspect
import re

import pytest
from support.coming_from import PAGE

SECTION = PAGE.read_text().split("## Their own interfaces")[1]
TABLES = re.findall(r"^\| [^|]+ \| `(\w+)` \| what differs \|\n\|[-|]+\|\n((?:\|.*\n)+)", SECTION, re.M)
MODULES = ["zigllama", "ollama", "rust_kvcache", "forgellm", "edifice"]


def names_in(table):
    """Each name in the second column, with its arguments; None where it has no brackets."""
    cells = [row.split(" | ")[1] for row in table.splitlines()]
    found = [match for cell in cells for match in re.findall(r"`([\w.]+)(\(([^)]*)\))?`", cell)]
    return {name: [each for each in arguments.split(", ") if each] if call else None for name, call, arguments in found}


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
def test_a_table_has_every_name_and_its_arguments(name, table):
    module = importlib.import_module(f"kvcache.compat.{name}")
    named = names_in(table)
    methods = {path for path in named if "." in path}
    bases = {path.split(".")[0] for path in methods}
    assert named.keys() | bases == {*public_names(module)}
    for path, arguments in named.items():
        thing = module
        for part in path.split("."):
            thing = getattr(thing, part)
        if arguments is not None:
            parameters = [each for each in inspect.signature(thing).parameters.values() if each.name != "self"]
            stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
            assert arguments == [stars.get(each.kind, "") + each.name for each in parameters], path
