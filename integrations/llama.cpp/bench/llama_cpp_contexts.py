"""Contexts of llama.cpp, each with its own cache or with kvcache, which are filled to a depth at once.

integrations/llama.cpp builds the library. The package llama-cpp-python, whose release belongs to that
library, knows its functions and structs; it is installed without a library of its own:

CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install llama-cpp-python==0.3.36
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from llama_cpp_models import RandomBlocks
from numpy.typing import NDArray

INSTALL = "CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install llama-cpp-python==0.3.36"
WRITER = "integrations/llama.cpp/bench/llama_cpp_models.py"
SWITCH = "LLAMA_KVCACHE"  # the environment variable that is read when a context is created
SELECT_SWITCH = "LLAMA_KVCACHE_SELECT"  # and says how many rows a new token of a long text reads
PROMPTS_SWITCH = "LLAMA_KVCACHE_PROMPTS"  # and names the precision by which prompts are multiplied
USED = re.compile(r"llama_kvcache: (\d+) cells.* up to ([\d.]+) MiB")  # what a context with kvcache logs
REFUSED = "llama_kvcache_create: not used: "  # and why one has llama.cpp's own cache all the same

# A context's cache: its name in tables, whether flash attention is on, and whether it is kvcache.
CACHES = {
    "flash": ("flash attention", True, False),
    "plain": ("without it", False, False),
    "kvcache": ("kvcache", True, True),
}
TYPES = {name: int(gguf.GGMLQuantizationType[name.upper()]) for name in ("f32", "f16", "bf16", "q8_0", "q4_0")}
OWN_TYPES = {"int8": "q8_0", "int6": "q8_0", "int4": "q4_0"}  # of kvcache alone, and what other caches have beside each
BLOCKED = ("q8_0", "q4_0", *OWN_TYPES)  # types of V that llama.cpp's own cache has with flash attention only
TYPE_SWITCHES = ("LLAMA_KVCACHE_TYPE_K", "LLAMA_KVCACHE_TYPE_V")  # environment variables that name such types
COMPLAINTS = 3, 4  # levels of a log: warnings and errors
# Models whose state has the keys of indexers, and whether it has values beside keys.
INDEXED = {"deepseek32": "k", "dots3note": "k", "glm-dsa": "k", "hy_v4": "k", "minimax-m3": "kv"}
# Models whose indexers pool keys, and whether their state has values beside keys. They have one recurrent layer here.
POOLED = {"glm5-next": "k", "qwen4exp": "kv"}
STRIDES = 0x5343564B  # the number that a state of theirs begins with in kvcache
SEEDS = 32  # tokens of a state that is made longer
M_ROPE = 8, 40  # types of RoPE with which a cell of a state has two coordinates and a token, too


@contextmanager
def environment(switches: dict[str, str]) -> Iterator[None]:
    """Set variables of kvcache, in place of all that the user has set, and bring those back."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(SWITCH)}
    os.environ.update(switches)
    try:
        yield
    finally:
        for name in switches:
            os.environ.pop(name)
        os.environ.update(kept)


class LlamaError(RuntimeError):
    """A function of llama.cpp failed; the message ends with what it logged."""


class Library:
    """libllama in a folder, and what it logs. `clock` returns the seconds that calls are timed with."""

    def __init__(self, folder: Path) -> None:
        if any((folder / "bin").glob("libllama.*")):  # the folder that build.sh built in
            folder /= "bin"
        if not any(folder.glob("libllama.*")):
            raise LlamaError(f"{folder} has no libllama: run integrations/llama.cpp/build.sh, or name a folder")
        self.folder, self.clock = folder, time.perf_counter
        os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)
        try:
            self.api: Any = importlib.import_module("llama_cpp.llama_cpp")
        except ModuleNotFoundError as error:
            raise LlamaError(f"no module {error.name}: {INSTALL}") from error
        self.log: list[str] = []
        self._complaints: list[str] = []
        self._callback = self.api.llama_log_callback(self._note)
        self.api.llama_log_set(self._callback, None)
        self.api.llama_backend_init()

    def _note(self, level: int, text: bytes, _data: object) -> None:
        self.log.append(text.decode(errors="replace"))
        if level in COMPLAINTS:
            self._complaints.append(self.log[-1])

    def forget(self) -> None:
        """Clear what was logged."""
        self.log.clear()
        self._complaints.clear()

    def fail(self, what: str) -> None:
        """Raise an error with the last warnings and errors."""
        raise LlamaError(f"{what}\n{''.join(self._complaints[-8:])}".rstrip())


class Model:
    """A GGUF file, whose weights all contexts share."""

    def __init__(self, library: Library, path: Path) -> None:
        self.library, self.api, self.path = library, library.api, path
        if not path.is_file():
            raise LlamaError(
                f"{path} is no file: name a GGUF, or write one with integrations/llama.cpp/bench/llama_cpp_models.py"
            )
        library.forget()
        self.handle = self.api.llama_model_load_from_file(os.fsencode(path), self.api.llama_model_default_params())
        if not self.handle:
            library.fail(f"{path} cannot be loaded")
        self.num_layers: int = self.api.llama_model_n_layer(self.handle)
        self.window: int = self.api.llama_model_n_swa(self.handle)
        self.max_seq_len: int = self.api.llama_model_n_ctx_train(self.handle)
        self.recurrent: bool = self.api.llama_model_is_hybrid(self.handle)
        text = ctypes.create_string_buffer(64)
        self.api.llama_model_meta_val_str(self.handle, b"general.architecture", text, len(text))
        self.architecture = text.value.decode()
        self.cell_extras = 3 if self.api.llama_model_rope_type(self.handle) in M_ROPE else 0
        self.vocab_size: int = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.handle))

    def close(self) -> None:
        self.api.llama_model_free(self.handle)


class Context:
    """A context for `n_ctx` tokens, with a cache that CACHES names.

    With kvcache, a token selects `select` rows of a long text; with 0 it reads all. Prompts are multiplied by the
    precision `prompts`. `nbytes` is what the rows of a full context take there. If the context does not have kvcache,
    `own` says why; otherwise it is empty. llama.cpp's own cache lacks some types, and has the types that `OWN_TYPES`
    names instead.
    """

    def __init__(
        self, model: Model, cache: str, dtype: str, n_ctx: int, threads: int, *, n_seq_max: int = 1,
        unified: bool = False, select: int = 0, prompts: str = "stored",
    ) -> None:  # fmt: skip
        self.api, self._model, self.tokens = model.api, model, 0
        self.name, flash, ours = CACHES[cache]
        dtype = dtype if ours else OWN_TYPES.get(dtype, dtype)
        parameters = self.api.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max, parameters.kv_unified = n_ctx, n_seq_max, unified
        parameters.n_batch = parameters.n_ubatch = min(n_ctx, 512)
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = int(flash)
        parameters.type_k = parameters.type_v = TYPES.get(dtype, TYPES["f16"])
        switches = {SWITCH: str(int(ours)), SELECT_SWITCH: str(select), PROMPTS_SWITCH: prompts}
        switches |= dict.fromkeys(TYPE_SWITCHES, dtype) if dtype in OWN_TYPES else {}
        model.library.forget()
        with environment(switches):
            self._handle = self.api.llama_init_from_model(model.handle, parameters)
        if not self._handle:
            model.library.fail(f"no context with {self.name}, {dtype}")
        self._memory = self.api.llama_get_memory(self._handle)
        log = model.library.log
        used = [found for found in map(USED.search, log) if found]
        self.nbytes = sum(float(found[2]) for found in used) * 2**20
        self.own = "" if used else self._why_own(log)

    def _why_own(self, log: list[str]) -> str:
        if not self._memory:
            return "the model works without a cache"
        reasons = [line.split(REFUSED)[1].strip() for line in log if REFUSED in line]
        return reasons[0] if reasons else "its log has no reason"

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
        self._model.library.forget()
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
        """Drop what sequence 0 holds from a position on; fill the context again if a recurrent state cannot go back."""
        if not self.api.llama_memory_seq_rm(self._memory, 0, tokens, -1):
            self.fill(tokens)
        self.tokens = tokens

    def share(self, num_sequences: int) -> None:
        """Let sequences hold what sequence 0 holds."""
        for seq_id in range(1, num_sequences):
            self.api.llama_memory_seq_cp(self._memory, 0, seq_id, -1, -1)

    def fill(self, tokens: int) -> bool:
        """Let sequence 0 hold rows of this many tokens; return whether that took no prefill."""
        if self.load_random(tokens):
            return True
        self.rewind(0)
        while self.tokens < tokens:
            self.decode(min(512, tokens - self.tokens))
        return False

    def load_random(self, tokens: int) -> bool:
        """Let sequence 0 hold rows of this many tokens, loaded as a state; return whether such a state can be made.

        It is the state of a few tokens, made longer by random rows. In a type that only kvcache has, the rows of the
        few tokens are repeated instead.
        """
        self.rewind(0)
        if not tokens:
            return True
        self.decode(min(tokens, SEEDS))
        try:
            return self.load(lengthen(self.save(), tokens, self._model), tokens)
        except ValueError:
            return False

    def save(self) -> NDArray[np.uint8]:
        """Return the state of sequence 0."""
        size = self.api.llama_state_seq_get_size(self._handle, 0)
        state = np.empty(size, np.uint8)
        self.api.llama_state_seq_get_data(self._handle, self._bytes(state), size, 0)
        return state

    def load(self, state: NDArray[np.uint8], tokens: int) -> bool:
        """Let sequence 0 hold a state of this many tokens; return whether the context takes it."""
        if not self.api.llama_state_seq_set_data(self._handle, self._bytes(state), state.size, 0):
            return False
        self.tokens = tokens
        return True

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
        if nbytes > self._state.size - self._at:
            raise ValueError("the state has another form")
        self._at += nbytes
        return self._state[self._at - nbytes : self._at]

    def copy(self, form: str) -> Any:
        """Copy a number, and return it."""
        self.parts.append(self.skip(struct.calcsize(form)))
        return struct.unpack(form, self.parts[-1])[0]

    def peek(self, form: str) -> Any:
        """Return the next number, and leave it there."""
        return struct.unpack(form, self._state[self._at : self._at + struct.calcsize(form)])[0]

    def put(self, form: str, number: int) -> None:
        """Put a number in the place of the next one."""
        self.skip(struct.calcsize(form))
        self.parts.append(np.frombuffer(struct.pack(form, number), np.uint8))

    def rest(self) -> NDArray[np.uint8]:
        return self.skip(self._state.size - self._at)


def lengthen(state: NDArray[np.uint8], tokens: int, model: Model) -> NDArray[np.uint8]:
    """Return the state of a sequence with rows at positions 0 to `tokens`, made from the state of a few tokens.

    llama_kv_cache::state_write_meta and state_write_data have the format. There is one cache of all layers; or a cache
    of the layers without a window, and a cache of the layers with one, which holds only the last tokens. If tokens
    choose rows, a cache of the indexers' keys follows the first. The state of recurrent layers comes last, and stays
    as it is.
    """
    reader, blocks = _Reader(state), RandomBlocks(0)
    reader.parts.append(reader.skip(8))  # the magic number, and the sequence
    if model.architecture == "deepseek4":
        _lengthen_compressed(reader, blocks, tokens)
        return np.concatenate(reader.parts)
    if model.architecture in POOLED:
        _lengthen_pooled(reader, blocks, tokens, model)
        return np.concatenate(reader.parts)
    counts = [tokens] * (1 + (model.architecture in INDEXED)) + [min(tokens, model.window)] * bool(model.window)
    for count in counts:
        if reader:
            parts = INDEXED.get(model.architecture, "kv")
            _lengthen_cache(reader, blocks, range(tokens - count, tokens), model.cell_extras, parts)
    if model.recurrent:
        reader.copy("<I")  # cells: one
        reader.put("<i", tokens - 1)
        reader.parts.append(reader.rest())
    if reader:
        raise ValueError("the state has another form")
    return np.concatenate(reader.parts)


def _lengthen_pooled(reader: _Reader, blocks: RandomBlocks, tokens: int, model: Model) -> None:
    """Do it for a model whose indexers pool keys.

    llama.cpp's own cache has what the indexers pool in a cache behind the recurrent state. kvcache has all layers
    before it, as llama-kvcache-state-strides.cpp says.
    """
    is_own = reader.peek("<I") != STRIDES
    if is_own:
        _lengthen_cache(reader, blocks, range(tokens), model.cell_extras, POOLED[model.architecture])
    else:
        _lengthen_strides(reader, blocks, tokens)
    reader.copy("<I")  # cells: one
    reader.put("<i", tokens - 1)
    reader.parts.append(reader.skip(12))  # sequences: none; not transposed; layers
    for _ in "rs":
        reader.copy("<i")
        reader.parts.append(reader.skip(reader.copy("<Q")))
    if is_own:
        _lengthen_cache(reader, blocks, range(tokens), 0, "k")
    if reader:
        raise ValueError("the state has another form")


def _lengthen_compressed(reader: _Reader, blocks: RandomBlocks, tokens: int) -> None:
    """Do it for DeepSeek V4, with a window of 128 tokens, and rows that stand for 4 tokens or for 128.

    llama.cpp's own cache has cells without layers, the window, the rows of either kind, and the keys of indexers, as
    llama_kv_cache_dsv4::state_write says. Tokens that are not compressed yet stay as they are.
    """
    if reader.peek("<I") == STRIDES:
        _lengthen_strides(reader, blocks, tokens)
    else:
        reader.parts.append(reader.skip(12))  # the magic number, the version, and the mode
        for window in (tokens, min(tokens, 128)):
            _lengthen_cache(reader, blocks, range(tokens - window, tokens), 0, "k")
        for stride in (4, 128, 4):
            reader.copy("<I")  # version
            few = reader.copy("<I")
            reader.parts[-1] = np.frombuffer(struct.pack("<I", tokens // stride), np.uint8)
            reader.copy("<I")  # streams: one
            for _ in range(reader.copy("<I")):  # layers
                reader.copy("<I")
                kind = reader.copy("<i")
                reader.copy("<Q")  # elements
                reader.put("<Q", tokens // stride)
                nbytes = reader.copy("<Q")
                reader.skip(nbytes * few)
                reader.parts.append(blocks.take(gguf.GGMLQuantizationType(kind), nbytes * (tokens // stride)))
        reader.parts.append(reader.rest())
    if reader:
        raise ValueError("the state has another form")


def _lengthen_strides(reader: _Reader, blocks: RandomBlocks, tokens: int) -> None:
    """Put rows of `tokens` tokens in place of a few tokens' rows, in layers with strides and windows."""
    reader.copy("<I")
    layers = [[reader.copy("<I") for _ in range(6)] for _ in range(reader.copy("<I"))]
    reader.parts.append(reader.skip(8))  # sequences: one; its number
    few = reader.skip(4).view("<u4")[0]
    reader.parts.append(np.frombuffer(struct.pack("<I", tokens), np.uint8))
    for window in dict.fromkeys([0, *(layer[1] for layer in layers)]):
        for stride, _, *sizes in (layer for layer in layers if layer[1] == window):
            for kind, nbytes in (sizes[:2], sizes[2:]):
                before, after = (min(n, window or n) // stride for n in (int(few), tokens))
                rows = reader.skip(nbytes * before)
                if kind in TYPES.values():
                    rows = blocks.take(gguf.GGMLQuantizationType(kind), nbytes * after)
                reader.parts.append(np.resize(rows, nbytes * after))


def _lengthen_cache(reader: _Reader, blocks: RandomBlocks, positions: range, cell_extras: int, parts: str) -> None:
    """Put cells and rows at these positions in place of a few tokens'."""
    for _ in range(reader.copy("<I")):  # streams
        few = reader.copy("<I")  # cells
        if not few:
            continue
        reader.parts[-1] = np.frombuffer(struct.pack("<I", len(positions)), np.uint8)
        cells = np.empty((len(positions), 3 + cell_extras), "<i4")
        reader.skip(cells.strides[0] * few)
        cells[:] = np.asarray(positions)[:, None]
        cells[:, 1], cells[:, -1] = 1, 0  # the number of sequences, and the sequence
        reader.parts.append(cells.view(np.uint8).ravel())
        _lengthen_rows(reader, blocks, few, len(positions), parts)


def _lengthen_rows(reader: _Reader, blocks: RandomBlocks, few: int, count: int, parts: str) -> None:
    """Put rows of `count` tokens in place of a few tokens' rows, of K in every layer, then of V, unless K has it."""
    transposed, num_layers = reader.copy("<I"), reader.copy("<I")
    for part in parts:
        for _ in range(num_layers if reader else 0):
            kind = reader.copy("<i")
            by_element = part == "v" and transposed
            nbytes = reader.copy("<I") * reader.copy("<I") if by_element else reader.copy("<Q")
            rows = reader.skip(nbytes * few)
            if kind in TYPES.values():
                rows = blocks.take(gguf.GGMLQuantizationType(kind), nbytes * count)
            reader.parts.append(np.resize(rows, nbytes * count))
