"""Windows, by MinGW and Wine: the DLL that CMake builds, a folder that both systems use.

Python's module is compiled and linked, but not run. Which compilers will do is here, too.

The C tests run there by .ci/full's step "C tests, Windows, under Wine".
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from support.compiling import ENVIRONMENT, ROOT, public_functions, run
from support.windows import CC, need, start_wine, wine

pytestmark = pytest.mark.full

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

# Python's pyconfig.h there, as far as its limited API needs it; and what differs in NumPy's.
PYCONFIG = """
#define HAVE_DECLSPEC_DLL
#define HAVE_SSIZE_T 1
#define HAVE_WCHAR_H 1
#define MS_WINDOWS
#define Py_ENABLE_SHARED 1
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_VOID_P 8
#define SIZEOF_WCHAR_T 2
"""
NUMPY = {"LONG": 4, "LONGDOUBLE": 8, "COMPLEX_LONGDOUBLE": 16, "WCHAR_T": 2, "OFF_T": 4}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The folder in which CMake has built the library, shared and static."""
    need(CC, "cmake")
    start_wine()
    folder = tmp_path_factory.mktemp("windows")
    options = [f"-DKVCACHE_{name}=OFF" for name in ("TESTS", "EXAMPLES")]
    run("cmake", "-S", ROOT, "-B", folder, "-DCMAKE_SYSTEM_NAME=Windows", f"-DCMAKE_C_COMPILER={CC}",
        "-DKVCACHE_WERROR=ON", *options)  # fmt: skip
    run("cmake", "--build", folder)
    return folder


def look(library):
    """Return the names that a library exports, and the libraries that it needs but for Windows' own and that of C."""
    told = run("x86_64-w64-mingw32-objdump", "-p", library)
    exported = re.findall(r"^\s+\[ *\d+\] (?:\+base\[ *\d+\] +[0-9a-f]+ )?(\w+)$", told, re.M)
    needed = {name for name in re.findall(r"DLL Name: (\S+)", told) if not name.startswith("api-ms-win-crt-")}
    return {*exported}, needed - {"KERNEL32.dll", "msvcrt.dll"}


def test_the_library_exports_the_interface_alone(library):
    assert look(library / "libkvcache.dll") == (public_functions(), set())


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


def test_clang_takes_the_core_as_microsofts_compiler(tmp_path):
    """Nothing of GNU C is outside a check for it."""
    need("clang", CC)
    headers = Path(run(CC, "-print-sysroot").strip() or "/usr", "x86_64-w64-mingw32/include")
    run(sys.executable, ROOT / "tools/amalgamate.py", tmp_path)
    (tmp_path / "headers.h").write_text(HEADERS)
    run("clang", "--target=x86_64-pc-windows-msvc", "-fms-compatibility", "-std=c11", "-fsyntax-only", "-Wall",
        "-Wextra", "-Wpedantic", "-Wvla", "-Werror", "-Wno-unused-function", "-isystem", headers,
        "-include", tmp_path / "headers.h", tmp_path / "kvcache.c")  # fmt: skip


SETUP = """
import runpy, sys, sysconfig
import numpy, setuptools
sysconfig.get_config_vars()
sys.platform = "win32"
runpy.run_path("setup.py")
"""


@pytest.mark.parametrize(("compiler", "told"), [
    (["--compiler=msvc"], "--compiler=msvc cannot build kvcache: use mingw32, which is the default."),
    ([], "No gcc was found: put the one of MinGW-w64 on PATH, or set CC to a Clang for it."),
])  # fmt: skip
def test_compilers_that_cannot_build_are_refused(tmp_path, compiler, told):
    environment = ENVIRONMENT | {"CC": "", "PATH": str(tmp_path)}
    command = [sys.executable, "-c", SETUP, "build_ext", *compiler, "--build-temp", tmp_path, "--build-lib", tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (1, [told])


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """The C code of Python's module, beside the headers that it has there."""
    folder = tmp_path_factory.mktemp("module")
    shutil.copytree(sysconfig.get_path("include"), folder / "python")
    (folder / "python/pyconfig.h").write_text(PYCONFIG)
    shutil.copytree(np.get_include(), folder / "numpy")
    config = folder / "numpy/numpy/_numpyconfig.h"
    text = config.read_text().replace("#define NPY_HAVE_ENDIAN_H 1", "")
    for name, size in NUMPY.items():
        text = re.sub(rf"(#define NPY_SIZEOF_{name}) .*", rf"\1 {size}", text)
    config.write_text(text)
    run(sys.executable, "-m", "cython", "-3", ROOT / "kvcache/_core.pyx", "-o", folder / "_core.c")
    return folder / "_core.c"


@pytest.mark.parametrize(
    "compiler", [[CC], [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-windows-gnu"]], ids=["mingw", "zig"]
)
def test_pythons_module_needs_the_limited_api_and_the_library_alone(library, module, tmp_path, compiler):
    if "ziglang" in compiler and not importlib.util.find_spec("ziglang"):
        pytest.skip("there is no ziglang here")
    run(*compiler, "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-type-limits", "-DPy_LIMITED_API=0x030B0000",
        "-DNPY_NO_DEPRECATED_API=NPY_1_7_API_VERSION", f"-I{module.parent}/python", f"-I{module.parent}/numpy",
        f"-I{ROOT}/include", "-c", module, "-o", tmp_path / "_core.o")  # fmt: skip
    names = {*re.findall(r" U (?:__imp_)?(_?Py\w+)$", run("x86_64-w64-mingw32-nm", tmp_path / "_core.o"), re.M)}
    (tmp_path / "python3.def").write_text("\n".join(["LIBRARY python3.dll", "EXPORTS", *names, ""]))
    run("x86_64-w64-mingw32-dlltool", "-d", tmp_path / "python3.def", "-l", tmp_path / "libpython3.a")
    run(*compiler, "-shared", tmp_path / "_core.o", library / "libkvcache.dll.a", f"-L{tmp_path}", "-lpython3",
        "-o", tmp_path / "_core.pyd")  # fmt: skip
    exported, needed = look(tmp_path / "_core.pyd")
    assert "PyInit__core" in exported
    assert needed == {"libkvcache.dll", "python3.dll"}
