"""Build ggml and the program that measures it, from the source archive of llama-cpp-python: python bench/build_ggml.py.

This takes a few minutes, and needs CMake and a C++ compiler. bench_attention.py uses the program that it leaves.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.3.36"
HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
PREFIX = CACHE / "kvcache-bench" / f"llama-cpp-python-{VERSION}"
PROGRAM = PREFIX / "bin" / "kvcache-peer-ggml"
OPTIONS = [
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DGGML_OPENMP=ON", "-DBUILD_SHARED_LIBS=ON"),
    *("-DGGML_BUILD_TESTS=OFF", "-DGGML_BUILD_EXAMPLES=OFF"),
]


def _run(*command: str | Path) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True)


def build_library() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = ["--no-binary", ":all:", "--no-deps", f"llama-cpp-python=={VERSION}"]
        _run(sys.executable, "-m", "pip", "download", "-q", *archive, "-d", folder)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as tar:
            tar.extractall(folder, filter="data")
        source = next(folder.glob("*/vendor/llama.cpp/ggml"))
        (source / "ggml.pc.in").touch()  # the archive lacks it
        build = folder / "build"
        _run("cmake", "-S", source, "-B", build, *OPTIONS, f"-DCMAKE_INSTALL_PREFIX={PREFIX}")
        _run("cmake", "--build", build, "-j", str(min(2, os.cpu_count() or 1)))
        _run("cmake", "--install", build)


def library_folder() -> Path | None:
    return next((path.parent for path in PREFIX.glob("lib*/libggml-cpu.so")), None)


def build_program() -> None:
    folder = library_folder()
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-std=c11", "-O3", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", f"-I{PREFIX}/include"]
    libraries = [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lggml-base", "-lggml-cpu", "-lm"]
    _run(os.environ.get("CC", "cc"), *flags, HERE / "ggml.c", *libraries, "-o", PROGRAM)


def program() -> Path | None:
    """Return the program's path, compiled again if it is older than its source; None if ggml was not built."""
    if library_folder() is None:
        return None
    if not PROGRAM.exists() or PROGRAM.stat().st_mtime < (HERE / "ggml.c").stat().st_mtime:
        build_program()
    return PROGRAM


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not shutil.which("cmake"):
        sys.exit("needs CMake: pip install cmake")
    if library_folder() is None:
        build_library()
    build_program()
    print(PROGRAM)
