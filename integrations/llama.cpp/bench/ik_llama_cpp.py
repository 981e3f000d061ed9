"""Contexts of ik_llama.cpp, in a process that waits for its turn: ik_llama.c, compiled against a build of it.

git clone https://github.com/ikawrakow/ik_llama.cpp && cd ik_llama.cpp
cmake -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build --target llama -j
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from llama_cpp_contexts import LlamaError

from kvcache.tools.peers import Peer, PeerKind

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))  # of the core
from compiling import build_program

NAME = "ik_llama.cpp"
CLONE = "git clone https://github.com/ikawrakow/ik_llama.cpp"
BUILD = "cmake -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build --target llama"

MAX_CONTEXTS = 64  # of ik_llama.c


def compiled(folder: Path) -> Path:
    """Compile ik_llama.c against the clone of ik_llama.cpp in a folder, which is built in its folder `build`."""
    if not (folder / "include/llama.h").is_file():
        raise LlamaError(f"--ik {folder}: it has no include/llama.h; give a clone of ik_llama.cpp: {CLONE}")
    libraries = [next((folder / "build").rglob(f"lib{name}.[sd][oy]*"), None) for name in ("llama", "ggml")]
    if None in libraries:
        raise LlamaError(f"--ik {folder}: its folder build has no shared libllama and libggml; run in it: {BUILD}")
    flags = [f"-I{folder}/include", f"-I{folder}/ggml/include", *(str(library) for library in libraries)]
    flags += [f"-Wl,-rpath,{library.resolve().parent}" for library in libraries if library]
    try:
        return build_program(Path(__file__).with_name("ik_llama.c"), flags)
    except subprocess.CalledProcessError as error:
        errors = [line for line in error.stderr.splitlines() if "error" in line or "undefined" in line]
        why = errors[0] if errors else error.stderr
        raise LlamaError(f"--ik {folder}: ik_llama.c does not fit what is there: {why}") from error


class IkModel:
    """A GGUF file in a process of ik_llama.cpp, with the contexts that share its weights.

    Its seconds are of the clock, or of the process's CPU time.
    """

    def __init__(self, folder: Path, path: Path, threads: int, *, cpu_time: bool = False) -> None:
        command = [str(compiled(folder)), str(path), str(threads), *["cpu"] * cpu_time]
        self._peer = Peer(PeerKind(NAME, BUILD, decode=()), command, {})
        self._ids = itertools.count()

    def ask(self, *words: object) -> float:
        try:
            return float(self._peer.ask(*words))
        except RuntimeError as reason:
            raise LlamaError(f"{NAME}, {' '.join(map(str, words))}: {reason}") from reason

    def context(self, dtype: str, n_ctx: int) -> IkContext:
        return IkContext(self, next(self._ids) % MAX_CONTEXTS, dtype, n_ctx)

    def close(self) -> None:
        self._peer.close()


class IkContext:
    """A context of ik_llama.cpp, with the methods of `llama_cpp_contexts.Context`; its type is "K's/V's"."""

    name, own = NAME, ""

    def __init__(self, model: IkModel, key: int, dtype: str, n_ctx: int) -> None:
        self._model, self._key = model, key
        model.ask("open", key, *dtype.split("/"), n_ctx)

    def fill(self, tokens: int) -> bool:
        """Hold this many tokens; return whether that took no prefill."""
        return bool(self._model.ask("fill", self._key, tokens))

    def decode(self, count: int = 1) -> float:
        """Append tokens, and return the seconds that it took."""
        return self._model.ask("decode", self._key, count)

    def check(self) -> None:
        """Do nothing: the process refuses logits that are no numbers."""

    def rewind(self, tokens: int) -> None:
        self._model.ask("rewind", self._key, tokens)

    def close(self) -> None:
        with suppress(LlamaError):  # of a process that has ended, which an earlier error tells
            self._model.ask("close", self._key)
