"""Which modules of the package import which, and the names that modules had before they moved."""

import ast
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvcache
from kvcache._moved import MOVED

PACKAGE = Path(kvcache.__file__).parent
UPPER = ("models", "runner", "tools", "hf", "plot", "benchmarks")


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


def imports_of(path):
    """The dotted names that a source file imports, wherever in it; those of kvcache with what is taken from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written from kvcache"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers_of(folder, *modules):
    """The files of a folder that import any of these modules, or of what is in them."""
    names = tuple(f"{module}." for module in modules)
    return {
        str(path.relative_to(PACKAGE))
        for path in folder.rglob("*.py")
        if any(f"{name}.".startswith(names) for name in imports_of(path))
    }


# ---- layers


def test_the_package_loads_no_reader_runner_or_tool():
    print_loaded = "import sys, kvcache; print(*(name for name in sys.modules if name.startswith('kvcache.')))"
    loaded = {name.split(".")[1] for name in run("-c", print_loaded).stdout.split()}
    assert "cache" in loaded
    assert not loaded & {*UPPER}


def test_readers_import_neither_runner_nor_tools():
    assert not importers_of(PACKAGE / "models", *(f"kvcache.{name}" for name in UPPER if name != "models"))


def test_the_runner_imports_no_tools():
    assert not importers_of(PACKAGE / "runner", "kvcache.tools", "kvcache.hf", "kvcache.plot", "kvcache.benchmarks")


def test_torch_stays_where_it_is_needed():
    peers = {f"tools/peers/{name}.py" for name in ("torch", "transformers", "vllm")}
    users = importers_of(PACKAGE, "torch", "transformers")
    assert {path for path in users if not path.startswith("hf/")} == peers


# ---- former names


@pytest.mark.parametrize("former", MOVED)
def test_a_former_name_is_the_same_module(former):
    present = f"kvcache.{MOVED[former]}"
    sys.modules.pop(f"kvcache.{former}", None)
    with pytest.warns(DeprecationWarning, match=f"^kvcache.{former} is now {present};") as caught:
        module = importlib.import_module(f"kvcache.{former}")
    assert module is sys.modules[present]
    assert getattr(kvcache, former) is module
    assert len(caught) == 1


def test_every_module_that_moved_is_there():
    found = {module.name for module in pkgutil.walk_packages(kvcache.__path__, "kvcache.")}
    assert {f"kvcache.{present}" for present in MOVED.values()} <= found
    assert not {f"kvcache.{former}" for former in MOVED} & found


def test_modules_of_a_package_that_moved():
    code = "import kvcache.peers.serve; print(kvcache.peers.serve is kvcache.tools.peers.serve)"
    assert run("-W", "ignore", "-c", code).stdout == "True\n"


@pytest.mark.parametrize(
    "statement", ["import kvcache.shapes", "from kvcache.shapes import read", "from kvcache import shapes"]
)
def test_the_warning_names_the_line_of_the_import(tmp_path, statement):
    (tmp_path / "program.py").write_text(f"import kvcache\n{statement}\n")
    done = run("-W", "always", tmp_path / "program.py")
    (warning, _) = done.stderr.splitlines()
    assert warning.startswith(
        f"{tmp_path / 'program.py'}:2: DeprecationWarning: kvcache.shapes is now kvcache.models.shapes"
    )


def test_a_former_name_can_be_run():
    pytest.importorskip("typer")
    done = run("-m", "kvcache.cli", "--version")
    assert done.stdout == f"{kvcache.__version__}\n"
    assert "DeprecationWarning: kvcache.cli is now kvcache.tools.cli;" in done.stderr


def test_an_unknown_name_stays_unknown():
    assert importlib.util.find_spec("kvcache.nothing") is None
    with pytest.raises(ModuleNotFoundError, match=r"kvcache\.nothing"):
        importlib.import_module("kvcache.nothing")
