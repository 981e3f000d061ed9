"""Contexts of llama.cpp, each with its own cache or with kvcache, which are filled to a depth at once.

integrations/llama.cpp builds the library. The package llama-cpp-python, whose release belongs to that
library, knows its functions and structs; it is installed without a library of its own:

CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install llama-cpp-python==0.3.36
"""

from __future__ import annotations

import ctypes
import importlib
import os
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from llama_cpp_models import RandomBlocks
from numpy.typing import NDArray

INSTALL = "CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install llama-cpp-python==0.3.36"
SWITCH = "LLAMA_KVCACHE"  # the environment variable that is read when a context is created
SELECT_SWITCH = "LLAMA_KVCACHE_SELECT"  # and says how many rows a new token of a long text reads
OWN_CACHE = "llama_kv_cache:"  # what a context with llama.cpp's own cache logs

# A context's cache: its name in tables, whether flash attention is on, and whether it is kvcache.
CACHES = {
    "flash": ("flash attention", True, False),
    "plain": ("without it", False, False),
    "kvcache": ("kvcache", True, True),
}
TYPES = {name: int(gguf.GGMLQuantizationType[name.upper()]) for name in ("f32", "f16", "bf16", "q8_0", "q4_0")}
BLOCKED = ("q8_0", "q4_0")  # types of V that llama.cpp's own cache has with flash attention only
OWN_TYPES = ("int8", "int6", "int4")  # that kvcache alone has
TYPE_SWITCHES = ("LLAMA_KVCACHE_TYPE_K", "LLAMA_KVCACHE_TYPE_V")  # environment variables that name such types
SEEDS = 32  # tokens of a state that is made longer


class LlamaError(RuntimeError):
    """A function of llama.cpp failed; the message ends with what it logged."""


class Library:
    """libllama in a folder, and what it logs. `clock` returns the seconds that calls are timed with."""

    def __init__(self, folder: Path) -> None:
        if not any(folder.glob("libllama.*")):
            raise LlamaError(f"{folder} has no libllama: run integrations/llama.cpp/build.sh, or name a folder")
        self.folder, self.clock = folder, time.perf_counter
        os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)
        try:
            self.api: Any = importlib.import_module("llama_cpp.llama_cpp")
        except ModuleNotFoundError as error:
            raise LlamaError(f"no module {error.name}: {INSTALL}") from error
        self.log: list[str] = []
        self._callback = self.api.llama_log_callback(lambda _level, text, _data: self.log.append(text.decode()))
        self.api.llama_log_set(self._callback, None)
        self.api.llama_backend_init()

    def fail(self, what: str) -> None:
        raise LlamaError(f"{what}\n{''.join(self.log[-8:])}".rstrip())


class Model:
    """A GGUF file, whose weights all contexts share."""

    def __init__(self, library: Library, path: Path) -> None:
        self.library, self.api = library, library.api
        if not path.is_file():
            raise LlamaError(f"{path} does not exist: write it with bench/llama_cpp_models.py")
        library.log.clear()
        self.handle = self.api.llama_model_load_from_file(os.fsencode(path), self.api.llama_model_default_params())
        if not self.handle:
            library.fail(f"{path} cannot be loaded")
        self.num_layers: int = self.api.llama_model_n_layer(self.handle)
        self.window: int = self.api.llama_model_n_swa(self.handle)
        self.vocab_size: int = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.handle))

    def close(self) -> None:
        self.api.llama_model_free(self.handle)


class Context:
    """A context for `n_ctx` tokens, with a cache that CACHES names.

    With kvcache, a token selects `select` rows of a long text; with 0 it reads all. If the context has llama.cpp's own
    cache all the same, `own` says why; otherwise it is empty.
    """

    def __init__(
        self, model: Model, cache: str, dtype: str, n_ctx: int, threads: int, *, n_seq_max: int = 1,
        unified: bool = False, select: int = 0,
    ) -> None:  # fmt: skip
        self.api, self._model, self.tokens = model.api, model, 0
        self.name, flash, ours = CACHES[cache]
        parameters = self.api.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max, parameters.kv_unified = n_ctx, n_seq_max, unified
        parameters.n_batch = parameters.n_ubatch = min(n_ctx, 512)
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = int(flash)
        parameters.type_k = parameters.type_v = TYPES.get(dtype, TYPES["f16"])
        switches = {SWITCH: str(int(ours)), SELECT_SWITCH: str(select)}
        switches |= dict.fromkeys(TYPE_SWITCHES, dtype) if dtype in OWN_TYPES else {}
        os.environ.update(switches)
        log = model.library.log
        log.clear()
        self._handle = self.api.llama_init_from_model(model.handle, parameters)
        for name in switches:
            os.environ.pop(name)
        if not self._handle:
            model.library.fail(f"no context with {self.name}, {dtype}")
        reasons = [line.strip() for line in log if "kvcache" in line] or ["its log has no reason"]
        self.own = reasons[0] if any(OWN_CACHE in line for line in log) else ""
        self._memory = self.api.llama_get_memory(self._handle)

    def close(self) -> None:
        self.api.llama_free(self._handle)

    def decode(self, count: int = 1) -> float:
        """Append tokens to sequence 0, and return the seconds that it took."""
        first = np.arange(self.tokens, self.tokens + count) % (self._model.vocab_size - 1) + 1
        tokens = (self.api.llama_token * count)(*first.tolist())
        return self._run(self.api.llama_batch_get_one(tokens, count), count)

    def decode_each(self, num_sequences: int) -> float:
        """Append one token to each of the first sequences."""
        batch = self.api.llama_batch_init(num_sequences, 0, 1)
        batch.n_tokens = num_sequences
        for i in range(num_sequences):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 1, self.tokens, 1, 1
            batch.seq_id[i][0] = i
        seconds = self._run(batch, 1)
        self.api.llama_batch_free(batch)
        return seconds

    def _run(self, batch: Any, count: int) -> float:
        self._model.library.log.clear()
        clock = self._model.library.clock
        start = clock()
        status = self.api.llama_decode(self._handle, batch)
        self.api.llama_synchronize(self._handle)
        seconds = clock() - start
        if status:
            self._model.library.fail(f"{self.name}: llama_decode returned {status}")
        self.tokens += count
        return seconds

    def check(self) -> NDArray[np.float32]:
        """Return the last token's logits; refuse logits that are not finite."""
        logits = np.ctypeslib.as_array(self.api.llama_get_logits_ith(self._handle, -1), (self._model.vocab_size,))
        if not np.isfinite(logits).all():
            raise LlamaError(f"{self.name}: logits are not finite")
        return logits.copy()

    def positions(self) -> tuple[int, int]:
        """Return the first and the last position of sequence 0."""
        ends = self.api.llama_memory_seq_pos_min, self.api.llama_memory_seq_pos_max
        return ends[0](self._memory, 0), ends[1](self._memory, 0)

    def rewind(self, tokens: int) -> None:
        """Drop what sequence 0 holds from a position on."""
        self.api.llama_memory_seq_rm(self._memory, 0, tokens, -1)
        self.tokens = tokens

    def share(self, num_sequences: int) -> None:
        """Let sequences hold what sequence 0 holds."""
        for seq_id in range(1, num_sequences):
            self.api.llama_memory_seq_cp(self._memory, 0, seq_id, -1, -1)

    def fill(self, tokens: int) -> bool:
        """Let sequence 0 hold rows of this many tokens; return whether that took no prefill.

        The rows are loaded as a state: the state of a few tokens, made longer by random rows. In a type that only
        kvcache has, the rows of the few tokens are repeated instead.
        """
        self.rewind(0)
        if not tokens:
            return True
        self.decode(min(tokens, SEEDS))
        size = self.api.llama_state_seq_get_size(self._handle, 0)
        state = np.empty(size, np.uint8)
        self.api.llama_state_seq_get_data(self._handle, self._bytes(state), size, 0)
        longer = lengthen(state, tokens, self._model.window)
        if self.api.llama_state_seq_set_data(self._handle, self._bytes(longer), longer.size, 0):
            self.tokens = tokens
            return True
        self.rewind(0)
        while self.tokens < tokens:
            self.decode(min(512, tokens - self.tokens))
        return False

    def _bytes(self, array: NDArray[np.uint8]) -> Any:
        return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


# ---- states


class _Reader:
    """Reads a state from its beginning, and keeps what is copied from it or put in its place."""

    def __init__(self, state: NDArray[np.uint8]) -> None:
        self._state, self._at, self.parts = state, 0, list[NDArray[np.uint8]]()

    def __bool__(self) -> bool:
        return self._at < self._state.size

    def skip(self, nbytes: int) -> NDArray[np.uint8]:
        self._at += nbytes
        return self._state[self._at - nbytes : self._at]

    def copy(self, form: str) -> Any:
        """Copy a number, and return it."""
        self.parts.append(self.skip(struct.calcsize(form)))
        return struct.unpack(form, self.parts[-1])[0]


def lengthen(state: NDArray[np.uint8], tokens: int, window: int) -> NDArray[np.uint8]:
    """Return the state of a sequence with rows at positions 0 to `tokens`, made from the state of a few tokens.

    llama_kv_cache::state_write_meta and state_write_data have the format. There is one cache of all layers; or a cache
    of the layers without a window, and a cache of the layers with one, which holds only the last tokens.
    """
    reader, blocks = _Reader(state), RandomBlocks(0)
    reader.parts.append(reader.skip(8))  # the magic number, and the sequence
    count = tokens
    while reader:
        for _ in range(reader.copy("<I")):  # streams
            few = reader.copy("<I")  # cells
            if not few:
                continue
            reader.parts[-1] = np.frombuffer(struct.pack("<I", count), np.uint8)
            reader.skip(12 * few)
            cells = np.empty((count, 3), "<i4")
            cells[:] = 0, 1, 0  # the position, the number of sequences, the sequence
            cells[:, 0] = np.arange(tokens - count, tokens)
            reader.parts.append(cells.view(np.uint8).ravel())
            _lengthen_rows(reader, blocks, few, count)
        count = min(tokens, window) if window else tokens
    return np.concatenate(reader.parts)


def _lengthen_rows(reader: _Reader, blocks: RandomBlocks, few: int, count: int) -> None:
    """Put rows of `count` tokens in place of a few tokens' rows, of K in every layer, then of V."""
    transposed, num_layers = reader.copy("<I"), reader.copy("<I")
    for part in "kv":
        for _ in range(num_layers):
            kind = reader.copy("<i")
            by_element = part == "v" and transposed
            nbytes = reader.copy("<I") * reader.copy("<I") if by_element else reader.copy("<Q")
            rows = reader.skip(nbytes * few)
            if kind in TYPES.values():
                rows = blocks.take(gguf.GGMLQuantizationType(kind), nbytes * count)
            reader.parts.append(np.resize(rows, nbytes * count))
