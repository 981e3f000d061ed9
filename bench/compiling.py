"""Compile the C sources of the benchmarks with the system's compiler, load them, and call them."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CORE = sorted(ROOT.glob("src/*/*.c"))
INCLUDE = [f"-I{ROOT}/include", f"-I{ROOT}/src", f"-I{HERE}"]
# The core as setup.py compiles it: with -O3, kernels of quantised types take 1.1 times as long.
CORE_FLAGS = ["-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic"]
FLAGS = ["-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", *INCLUDE]

Seconds = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]

FUNCTION = re.compile(r"^EXPORT ([\w ]+\W)(\w+)\((.*?)\) \{", re.M | re.S)
NUMBERS = {"int64_t": ctypes.c_int64, "size_t": ctypes.c_size_t, "double": ctypes.c_double}  # others are int or enums


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="kvcache-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _type(declaration: str) -> Any:
    """Return the type of a parameter, a field or a result, of which the declaration may have the name."""
    if "*" in declaration:
        return ctypes.c_char_p if declaration.startswith("const char *") else ctypes.c_void_p
    return NUMBERS.get(declaration.split()[0], ctypes.c_int)


class Library:
    """A source of this folder, compiled with others and loaded: its EXPORTed functions and its structs.

    Their types are read from the source. An array is passed as its address. A function that returns a kvc_status
    returns nothing, or raises RuntimeError with the core's message.
    """

    def __init__(self, name: str, sources: Sequence[Path] = CORE, flags: Sequence[str] = CORE_FLAGS) -> None:
        source, path = HERE / f"{name}.c", _folder() / f"{name}.so"
        compiler = shlex.split(os.environ.get("CC", "cc"))
        files = [str(source), *map(str, sources)]
        subprocess.run([*compiler, *FLAGS, *flags, *files, "-lm", "-lpthread", "-o", str(path)], check=True)
        self._library, self._text = ctypes.CDLL(str(path)), source.read_text()
        self._declared = {name: (result, arguments) for result, name, arguments in FUNCTION.findall(self._text)}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._declared:
            raise AttributeError(name)
        result, parameters = self._declared[name]
        function = self._library[name]
        function.argtypes = [] if parameters == "void" else [_type(each.strip()) for each in parameters.split(",")]
        function.restype = None if result == "void " else _type(result)

        def call(*arguments: Any) -> Any:
            found = function(*(each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments))
            if result != "kvc_status ":
                return found
            if found:
                self._library.kvc_last_error.restype = ctypes.c_char_p
                raise RuntimeError(self._library.kvc_last_error().decode())
            return None

        setattr(self, name, call)
        return call

    def struct(self, name: str) -> type[ctypes.Structure]:
        """Return the class of a struct, whose fields are pointers and numbers."""
        body = re.search(rf"struct {name} \{{(.*?)\}} {name};", self._text, re.S)[1]  # type: ignore[index]
        declared = re.findall(r"(?:const )?(\w+) ([^;]+);", re.sub(r"/\*.*?\*/", "", body, flags=re.S))
        fields = [
            (each.strip(" *\n"), _type(f"{kind} {each}")) for kind, names in declared for each in names.split(",")
        ]
        return type(name, (ctypes.Structure,), {"_fields_": fields})


def build_program(source: Path, flags: Sequence[str]) -> Path:
    """Compile a source into a program and return its path; the compiler's errors are in CalledProcessError.stderr."""
    program = _folder() / source.stem
    command = [*shlex.split(os.environ.get("CC", "cc")), "-std=c11", "-O2", "-Wall", "-Wextra", f"-I{HERE}"]
    command += [str(source), *flags, "-lm", "-o", str(program)]
    subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)
    return program
