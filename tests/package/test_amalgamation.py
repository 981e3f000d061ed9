"""The core as one source: complete, the same every time, and without a warning."""

import re
import subprocess
import sys

import pytest
from support.compiling import ROOT, compiler, run

import kvcache

SCRIPT = ROOT / "tools/amalgamate.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("amalgamation")
    run(sys.executable, SCRIPT, folder)
    return folder


def test_it_is_two_files_that_include_none_of_ours(folder):
    assert {path.name for path in folder.iterdir()} == {"kvcache.c", "kvcache.h"}
    for path in folder.iterdir():
        text = path.read_text()
        assert not re.search(r'^#include "', text, re.M)
        assert text.startswith(f"/* kvcache {kvcache.__version__}: ")
        assert (ROOT / "LICENSE").read_text().splitlines()[0] in text


@pytest.mark.slow
def test_it_is_the_same_every_time(folder, tmp_path):
    run(sys.executable, SCRIPT, tmp_path)
    for name in ("kvcache.c", "kvcache.h"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], pytest.param(["-std=c11"], marks=pytest.mark.full)], ids=["bare", "c11"])
def test_it_compiles_without_a_warning(folder, flags):
    """Without code, which takes long where it is optimised."""
    run(*compiler(), *flags, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", folder / "kvcache.c")


@pytest.mark.slow
def test_a_program_with_it_lacks_nothing(folder, tmp_path):
    """Names that are put together by macros are not lost where parts are given names of their own."""
    main, program = tmp_path / "main.c", tmp_path / "main"
    main.write_text("#include <kvcache.h>\nint main(void) { return !kvc_isa()[0]; }\n")
    run(*compiler(), "-O0", f"-I{folder}", main, folder / "kvcache.c", "-o", program, "-lm", "-lpthread")
    run(program)


def test_a_folder_is_asked_for():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage: amalgamate.py [-h] FOLDER" in done.stderr


def test_help_writes_no_folder(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0
    assert "usage: amalgamate.py [-h] FOLDER" in done.stdout
    assert not [*tmp_path.iterdir()]
