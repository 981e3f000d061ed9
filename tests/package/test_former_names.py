"""Modules under their former names, which kvcache._moved lists."""

import importlib
import importlib.util
import pkgutil
import subprocess
import sys

import pytest

import kvcache
from kvcache._moved import MOVED


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


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
