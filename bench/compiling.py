"""Compile the C sources of the benchmarks with the system's compiler, and load them."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CORE = sorted(ROOT.glob("src/*/*.c"))
BASE = sorted(ROOT.glob("src/base/*.c"))
INCLUDE = [f"-I{ROOT}/include", f"-I{ROOT}/src"]
# The core as setup.py compiles it: with -O3, kernels of quantised types take 1.1 times as long.
CORE_FLAGS = ["-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-fvisibility=hidden", *INCLUDE]
FLAGS = ["-std=c11", "-O3", "-fPIC", "-shared", "-Wall", "-Wextra"]

Seconds = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="kvcache-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def build(name: str, sources: Sequence[Path], flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile sources into a shared library and load it."""
    library = _folder() / f"{name}.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, *FLAGS, *flags, *map(str, sources), "-lm", "-lpthread", "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def build_program(source: Path, flags: Sequence[str]) -> Path:
    """Compile a source into a program and return its path; the compiler's errors are in CalledProcessError.stderr."""
    program = _folder() / source.stem
    command = [*shlex.split(os.environ.get("CC", "cc")), "-std=c11", "-O2", "-Wall", "-Wextra", str(source), *flags]
    subprocess.run([*command, "-lm", "-o", str(program)], check=True, stderr=subprocess.PIPE, text=True)
    return program


def function(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> ctypes._CFuncPtr:
    """Look up a function of a library and declare its types."""
    found = library[name]
    found.restype, found.argtypes = result, arguments
    return found
