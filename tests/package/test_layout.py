"""The rules of the layout: which files include, call and import which, and how long functions and files are.

The core has twelve layers, the folders of src/ in the order of LAYERS; a file (x.c and x.h are one) uses its own
layer and those below. An offender stands in one of the sets of what is yet to be mended, and is struck from it as soon
as it is: the test fails until then. What stays for good stands in KEPT, with the reason.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import c_sources, python_sources

import kvcache

MOST_FUNCTION_LINES = 60
MOST_FILE_LINES = 600  # docstrings aside
# Of kvcache/hf, with kvcache/hf/models as one file; a file is one floor above the highest that it imports.
MOST_HF_FILES = 25
MOST_HF_FLOORS = 9

LAYERS = [
    "base",
    "kernels",
    "rows",
    "cache",
    "space",
    "read",
    "edit",
    "prefix",
    "pass",
    "saved",
    "lifetime",
    "attend",
]
KERNELS_FOR_ALL = {"kernels/kernels.h", "kernels/dispatch.h"}  # what other layers may include of kernels/

KEPT: dict[str, str] = {}  # files that may be longer, with the reason

# ---- yet to be mended

LONG_FILES: set[str] = set()
LONG_FUNCTIONS: set[str] = set()
UPWARD_INCLUDES: set[str] = set()
UPWARD_CALLS: set[str] = set()
IN_A_CIRCLE: set[str] = set()
MODULES_IN_A_CIRCLE: set[str] = set()


@pytest.fixture(scope="module")
def sources():
    return c_sources.read_all()


@pytest.fixture(scope="module")
def calls(sources):
    return c_sources.calls_between_units(sources)


def test_names_of_sources_are_unique():
    """A flat folder of objects, as `cc -c src/*/*.c` makes it, has room for one of each name."""
    names = sorted(path.name for path in python_sources.PACKAGE.parent.joinpath("src").glob("*/*.c"))
    assert sorted(set(names)) == names


def compare(found, listed, rule):
    """Fail for offenders that are not listed, and for listed ones that are none any more."""
    found = set(found)
    new, mended = sorted(found - listed), sorted(listed - found)
    assert not new, f"{rule}: {', '.join(new)}"
    assert not mended, f"mended, strike from {Path(__file__).name}: {', '.join(mended)}"


def is_above(other, folder):
    return LAYERS.index(other) > LAYERS.index(folder)


# ---- the core


def test_the_core_is_understood():
    """The rules' helpers find definitions, calls and circles in a text with each kind of them."""
    text = """
#define TWICE(x) \\
    inner(x)
typedef struct pair { int a, b; } pair;
static int inner(int x) { return x; }
int declared(int);
INLINE pair
outer(struct pair p) {
    if (p.declared) other(p.a); /* not called: commented() */
    return (pair){.a = TWICE(1)};
}
const struct table table = {.call = listed};
"""
    functions = {f.name: (f.is_static, f.num_lines) for f in c_sources.functions_of(c_sources.blank(text))}
    assert functions == {"inner": (True, 1), "outer": (True, 5)}
    used = {*c_sources.names_in(c_sources.blank(text), inside_only=True)}
    assert used >= {"other", "listed"}
    assert not used & {"declared", "commented", "call"}
    assert [name for name, _ in c_sources.macros(text)] == ["TWICE"]
    calls = {"a": {"b": {"f"}}, "b": {"c": {"g"}}, "c": {"b": {"h"}}, "d": {}}
    assert c_sources.circles(calls) == {frozenset("bc")}


def test_every_source_has_a_layer(sources):
    assert {source.folder for source in sources} == {*LAYERS}


def test_includes_point_down(sources):
    upward = [
        f"{source.name}: {name}"
        for source in sources
        for name in source.includes
        if "/" in name and is_above(name.split("/")[0], source.folder)
    ]
    compare(upward, UPWARD_INCLUDES, "includes a layer above")


def test_kernels_are_included_through_their_interface(sources):
    wrong = [
        f"{source.name}: {name}"
        for source in sources
        for name in source.includes
        if source.folder != "kernels" and name.startswith("kernels/") and name not in KERNELS_FOR_ALL
    ]
    compare(wrong, set(), "includes what only kernels may")


def test_calls_point_down(calls):
    upward = [
        f"{unit}: {name}"
        for unit, others in calls.items()
        for other, names in others.items()
        for name in names
        if is_above(other.split("/")[0], unit.split("/")[0])
    ]
    compare(upward, UPWARD_CALLS, "calls a layer above")


def test_no_files_call_each_other_in_a_circle(calls):
    circles = c_sources.circles(calls)
    inside = [
        f"{unit} calls {name} of {other}"
        for circle in circles
        for unit in sorted(circle)
        for other in sorted(circle & calls[unit].keys())
        for name in sorted(calls[unit][other])
        if not {unit, other} <= IN_A_CIRCLE
    ]
    compare({unit for circle in circles for unit in circle}, IN_A_CIRCLE, "in a circle (" + "; ".join(inside) + ")")


# ---- lengths, of the core and the package


@pytest.fixture(scope="module")
def lengths(sources):
    """Return for each file its path, its lines, and each function's name and lines."""
    core = [(source.path, source.num_lines, [(f.name, f.num_lines) for f in source.functions]) for source in sources]
    package = [
        path for path in sorted(python_sources.PACKAGE.rglob("*")) if path.suffix in (".py", ".pyx", ".pxi", ".pxd")
    ]
    return [*core, *((path, *python_sources.lengths(path)) for path in package)]


def test_files_are_short(lengths):
    long = {path.name: lines for path, lines, _ in lengths if lines > MOST_FILE_LINES}
    compare(long, LONG_FILES | KEPT.keys(), f"more than {MOST_FILE_LINES} lines")


def test_functions_are_short(lengths):
    long = [name for _, _, functions in lengths for name, lines in functions if lines > MOST_FUNCTION_LINES]
    compare(long, LONG_FUNCTIONS, f"more than {MOST_FUNCTION_LINES} lines")


# ---- the package


def test_imports_are_understood(tmp_path, monkeypatch):
    """The rules' helpers find imports in functions and for types, and tell a module from a name or its package."""
    monkeypatch.setattr(python_sources, "ROOT", tmp_path)
    files = {
        "__init__.py": "from kvcache.one import name",
        "_core.pyx": "from kvcache.errors import (\n    KVCacheError)\n",
        "errors.py": "class KVCacheError(Exception): pass",
        "one.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvcache.part import deep\n",
        "part/__init__.py": "import os\n",
        "part/deep.py": "def f(x):\n    from kvcache import _core, one\n    x._core, x.__class__, x._replace()\n",
        "above.py": "from .part.deep import f\nfrom . import one\n",
    }
    for name, text in files.items():
        (tmp_path / "kvcache" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "kvcache" / name).write_text(text)
    used = python_sources.imports_between_modules(tmp_path / "kvcache")
    assert {module.removeprefix("kvcache."): sorted(others) for module, others in used.items()} == {
        "kvcache": ["kvcache.one"],
        "_core": ["kvcache.errors"],
        "errors": [],
        "one": ["kvcache.part.deep"],
        "part": [],
        "part.deep": ["kvcache._core", "kvcache.one"],
        "above": ["kvcache.one", "kvcache.part.deep"],
    }
    assert c_sources.circles(used) == {frozenset({"kvcache.one", "kvcache.part.deep"})}
    assert [*python_sources.private_names(tmp_path / "kvcache/part/deep.py")] == ["_core", "x._core"]


def test_no_modules_import_each_other_in_a_circle():
    used = python_sources.imports_between_modules()
    circles = c_sources.circles(used)
    inside = [f"{module} imports {other}" for circle in circles for module in circle for other in circle & used[module]]
    members = {module for circle in circles for module in circle}
    compare(members, MODULES_IN_A_CIRCLE, "in a circle (" + "; ".join(sorted(inside)) + ")")


def floors(used):
    """The floor of each module, of what each imports; no circle may be among them."""

    def floor(module):
        return 1 + max(map(floor, used[module] & used.keys()), default=0)

    return {module: floor(module) for module in used}


def test_a_reader_of_what_serves_transformers_climbs_few_floors():
    assert floors({"a": {"b", "c"}, "b": {"c", "os"}, "c": set()}) == {"a": 3, "b": 2, "c": 1}
    folder, used = python_sources.PACKAGE / "hf", python_sources.imports_between_modules()
    found = floors({name: used[name] for name in used if (name + ".").startswith("kvcache.hf.")})
    files = {path for path in folder.iterdir() if path.suffix == ".py" or path.name == "models"}
    assert (len(files), max(found.values())) == (MOST_HF_FILES, MOST_HF_FLOORS)


def imported(folder):
    """The modules that the files of a part of the package import, each with the file's path."""
    for path in sorted((python_sources.PACKAGE / folder).rglob("*.py")):
        for module in python_sources.imports(path):
            yield module, path.relative_to(python_sources.PACKAGE).as_posix()


def test_import_loads_the_cache_alone():
    code = "import sys, kvcache; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    parts = ("benchmarks", "compat", "models", "runner", "tools", "hf", "plot", "prefix", "stores")
    assert "kvcache.cache" in loaded
    assert not [
        name for name in loaded if name.split(".")[:1] == ["kvcache"] and name.split(".")[1:2] in ([p] for p in parts)
    ]


def test_models_import_neither_runner_nor_tools():
    wrong = [
        (module, path) for module, path in imported("models") if module.startswith(("kvcache.runner", "kvcache.tools"))
    ]
    assert not wrong


@pytest.mark.parametrize("part", ["benchmarks", "models", "plot.py", "runner", "tools"])
def test_what_stands_on_the_cache_uses_public_names(part):
    path = python_sources.PACKAGE / part
    files = [path] if path.is_file() else path.rglob("*.py")
    used = {name for file in files for name in python_sources.private_names(file)}
    assert used <= {"torch.ops._C", "os._exit"}  # how torch calls vLLM, and how a child ends


def test_torch_is_imported_for_hugging_face_its_server_peers_and_to_plan():
    users = {path for module, path in imported(".") if module.split(".")[0] == "torch"} - {
        "models/parameters.py", "tools/rates.py",
    }  # fmt: skip
    assert "hf/cache.py" in users
    assert not [path for path in users if not {"hf", "peers", "server"} & {*path.split("/")}]


def test_what_needs_torch_is_found():
    """.ci/run takes modules with `torch = ` at the margin, and of others the tests marked `hf`."""
    files = python_sources.PACKAGE.parent.glob("tests/*/test_*.py")
    assert not [path for path in files if re.search(r"^ .*importorskip\(.torch\W", path.read_text(), re.M)]


def test_interfaces_of_other_caches_use_what_kvcache_exports():
    exported = {"kvcache", *(f"kvcache.{name}" for name in kvcache.__all__)}
    used = {module for module, _ in imported("compat") if module.split(".")[0] == "kvcache"}
    assert not {module for module in used - exported if not module.startswith("kvcache.compat")}
