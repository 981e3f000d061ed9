"""Windows, by MinGW and Wine: the DLL that CMake builds, a folder that both systems use, and what Microsoft's C takes.

The C tests run there by .ci/full's step "C tests, Windows, under Wine".
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.compiling import ENVIRONMENT, ROOT, public_functions, run

pytestmark = pytest.mark.full
CC = "x86_64-w64-mingw32-gcc"

# The system's headers, for a compiler that is taken for Microsoft's: MinGW's want another.
HEADERS = """
#define __GNUC__ 12
#define __GNUC_MINOR__ 0
#include <ctype.h>
#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <limits.h>
#include <malloc.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define __MINGW_IMPORT extern
#include <time.h>
#include <windows.h>
#undef __GNUC__
#undef __attribute__
"""


def need(*commands):
    for command in commands:
        if not shutil.which(command):
            pytest.skip(f"there is no {command} here")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The folder in which CMake has built the library, shared and static."""
    need(CC, "wine", "cmake")
    folder = tmp_path_factory.mktemp("windows")
    options = [f"-DKVCACHE_{name}=OFF" for name in ("TESTS", "EXAMPLES", "OPENMP")]
    run("cmake", "-S", ROOT, "-B", folder, "-DCMAKE_SYSTEM_NAME=Windows", f"-DCMAKE_C_COMPILER={CC}",
        "-DKVCACHE_WERROR=ON", *options)  # fmt: skip
    run("cmake", "--build", folder)
    return folder


def wine(folder, *command):
    """Run a program in a folder, in which it finds libraries; return what it prints."""
    done = subprocess.run(["wine", *command], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_library_exports_the_interface_alone(library):
    told = run("x86_64-w64-mingw32-objdump", "-p", library / "libkvcache.dll")
    assert set(re.findall(r"^\s+\[ *\d+\] (?:\+base\[ *\d+\] +[0-9a-f]+ )?(\w+)$", told, re.M)) == public_functions()
    assert set(re.findall(r"DLL Name: (\S+)", told)) == {"KERNEL32.dll", "msvcrt.dll"}


@pytest.mark.parametrize("flags", [["-DKVC_SHARED", "-lkvcache"], ["-l:libkvcache.a"]], ids=["shared", "static"])
def test_a_program_runs(library, tmp_path, flags):
    (code,) = re.findall(r"^```c\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    (tmp_path / "main.c").write_text(code)
    run(CC, "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include", tmp_path / "main.c",
        "-o", library / "main.exe", f"-L{library}", *flags, "-static-libgcc", "-Wl,-Bstatic", "-lpthread")  # fmt: skip
    assert wine(library, "main.exe")


def test_both_systems_use_one_folder(library, build, tmp_path):
    source, folder = ROOT / "examples/store.c", tmp_path / "prefixes"
    program, text = build(source), "To be, or not to be, that is the question: "
    run(CC, "-std=c11", f"-I{ROOT}/include", source, "-o", library / "store.exe", f"-L{library}",
        "-l:libkvcache.a", "-static")  # fmt: skip
    assert re.findall(r"\d+", wine(library, "store.exe", folder, text)) == ["0", "43", "0", "2"]
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert re.findall(r"\d+", run(program, folder, text)) == ["32", "43", "32", "0"]
    assert re.findall(r"\d+", wine(library, "store.exe", folder, text)) == ["32", "43", "32", "0"]
    assert files == {path.name: path.read_bytes() for path in folder.iterdir()}
    run(program, tmp_path / "own", text)
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "own").iterdir()}


def test_the_core_is_what_microsofts_compiler_takes(tmp_path):
    """As far as Clang shows it: nothing of GNU C but behind a check."""
    need("clang", CC)
    headers = Path(run(CC, "-print-sysroot").strip() or "/usr", "x86_64-w64-mingw32/include")
    run(sys.executable, ROOT / "tools/amalgamate.py", tmp_path)
    (tmp_path / "headers.h").write_text(HEADERS)
    run("clang", "--target=x86_64-pc-windows-msvc", "-fms-compatibility", "-std=c11", "-fsyntax-only", "-Wall",
        "-Wextra", "-Werror", "-Wno-unused-function", "-isystem", headers, "-include", tmp_path / "headers.h",
        tmp_path / "kvcache.c")  # fmt: skip
