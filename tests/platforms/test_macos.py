"""macOS, by Zig's compiler, which brings the symbols of Apple's C library: built and looked at, but not run."""

import importlib.util
import re
import shutil
import sys

import pytest
from support.compiling import FLAGS, ROOT, compile_core, public_functions, run

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not importlib.util.find_spec("ziglang"), reason="there is no ziglang here"),
]
STRICT = [*FLAGS, "-fvisibility=hidden", "-Wpedantic", "-Wconversion", "-Werror"]
TARGETS = {"aarch64": "11.0", "x86_64": "10.15"}  # the oldest macOS


@pytest.fixture(scope="module", params=TARGETS)
def built(request, tmp_path_factory):
    """The compiler's command for a processor, the core's objects, and a shared library of them."""
    command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{request.param}-macos.{TARGETS[request.param]}"]
    folder = tmp_path_factory.mktemp(request.param)
    objects = compile_core(folder, [*command, *STRICT])
    library = folder / "libkvcache.dylib"
    run(*command, "-dynamiclib", "-install_name", "@rpath/libkvcache.dylib", *objects, "-o", library)
    return command, objects, library, TARGETS[request.param]


def look(*command):
    """Run a tool of LLVM's, under whichever name it has here."""
    names = (f"{command[0]}{version}" for version in ("", *(f"-{n}" for n in range(30, 13, -1))))
    tool = next(filter(shutil.which, names), None)
    if not tool:
        pytest.skip(f"there is no {command[0]} here")
    return run(tool, *command[1:])


def test_the_library_exports_the_interface_alone(built):
    names = look("llvm-nm", "--extern-only", "--defined-only", built[2])
    assert set(re.findall(r" [A-Z] _(\w+)$", names, re.M)) - {"__dso_handle", "_mh_dylib_header"} == public_functions()


def test_the_library_needs_the_system_alone(built):
    _, _, library, oldest = built
    names = re.findall(r"^\t(\S+) \(", look("llvm-otool", "-L", library), re.M)
    assert names == ["@rpath/libkvcache.dylib", "/usr/lib/libSystem.B.dylib"]
    assert re.findall(r"^ *minos (\d+\.\d+)$", look("llvm-otool", "-l", library), re.M) == [oldest]


def test_programs_link(built, tmp_path):
    """README's program, with the library and with the objects; and the examples."""
    command, objects, library, _ = built
    (code,) = re.findall(r"^```c\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    (tmp_path / "main.c").write_text(code)
    run(*command, *STRICT, tmp_path / "main.c", library, "-o", tmp_path / "shared")
    run(*command, *STRICT, tmp_path / "main.c", *objects, "-o", tmp_path / "static")
    run(*command, *STRICT, ROOT / "examples/store.c", *objects, "-o", tmp_path / "store")
    run(*command, *STRICT, *ROOT.glob("examples/c/*.c"), *objects, "-o", tmp_path / "generate")
