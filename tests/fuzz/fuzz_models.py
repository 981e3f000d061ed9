"""Files of models: each reader reads a file, or refuses it in one sentence, at little cost.

The first byte of an input says which file it is (`NAMES`), the second what happens to the file at which read. Three
numbers of two bytes follow: a part of the content, `at` and `length`, is repeated `times` times. Then comes the
content. The other
files of the folder are right.
"""

import contextlib
import json
import os
import resource
import struct
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
from support import hostile

import kvcache
from kvcache import ModelFileError, NotSupportedError, runner
from kvcache.models import (
    configuration,
    fingerprint,
    gguf,
    gguf_tables,
    kinds,
    parameters,
    reading,
    rotation,
    shapes,
    tokenizer,
    weights,
)

NAMES = [
    "config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json", "model.safetensors",
    "model.safetensors without its length", "a.gguf",
]  # fmt: skip
BEFORE = struct.Struct("<BBHHH")
NOTHING, LONGER, HALF, EMPTY, PIPE, FOLDER, ANOTHER, GONE = range(8)  # what happens to the file
MOST_BYTES = 10_000_000  # of a file
MOST_MEMORY, MOST_SECONDS = 200_000_000, 20  # of a file that is refused; two are the promise, on a machine that is idle

CONFIG = {
    **hostile.CONFIG, "num_hidden_layers": 1, "hidden_size": 4, "intermediate_size": 4, "max_position_embeddings": 64,
    "head_dim": 2, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
OF_THE_MODEL = {"model.embed_tokens": (256, 4), "model.norm": (4,), "lm_head": (256, 4)}
OF_A_LAYER = {
    "input_layernorm": (4,), "post_attention_layernorm": (4,), "self_attn.q_proj": (4, 4), "self_attn.k_proj": (2, 4),
    "self_attn.v_proj": (2, 4), "self_attn.o_proj": (4, 4), "mlp.gate_proj": (4, 4), "mlp.up_proj": (4, 4),
    "mlp.down_proj": (4, 4),
}  # fmt: skip
TENSORS = {  # safetensors' name: GGUF's, and the shape
    **{f"{name}.weight": (f"{weights.NAMES[name]}.weight", shape) for name, shape in OF_THE_MODEL.items()},
    **{
        f"model.layers.0.{name}.weight": (f"blk.0.{weights.NAMES[name]}.weight", shape)
        for name, shape in OF_A_LAYER.items()
    },
}

# ---- inputs


def safetensors_header(dtype, size):
    entries, at = {}, 0
    for name, (_, shape) in TENSORS.items():
        nbytes = size * int(np.prod(shape))
        entries[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [at, at + nbytes]}
        at += nbytes
    return json.dumps(entries).encode(), at


def a_gguf(number, **vocabulary):
    """The same model, in F32 or F16, with a vocabulary."""
    entries = hostile.llama_entries(
        block_count=1, context_length=64, embedding_length=4, feed_forward_length=4, vocab_size=256,
        **{"attention.key_length": 2, "attention.value_length": 2, "attention.head_count_kv": 1},
    )  # fmt: skip
    tensors, at = [], 0
    for name, shape in TENSORS.values():
        tensors.append(hostile.tensor(name.encode(), shape[::-1], at, number))
        at += -(-int(np.prod(shape)) * (4, 2)[number] // 32) * 32
    with tempfile.NamedTemporaryFile() as file:
        hostile.gguf(Path(file.name), {**entries, **vocabulary}, tensors, at)
        return file.read().rstrip(b"\0")


def seeds():
    tokens = [b"a", b"b", b"ab", b"<0x00>", "▁".encode()]
    config = {"gpt2": {"merges": hostile.strings([b"a b"])}, "llama": {"scores": hostile.numbers(6, "f", [0.0] * 5)}}
    vocabularies = [hostile.vocabulary(kind.encode(), tokens, **more) for kind, more in config.items()]
    for change in ({}, *CHANGES):
        yield an_input("config.json", json.dumps({**CONFIG, **change}).encode())
    yield an_input("generation_config.json", b'{"eos_token_id": [1, 2]}')
    yield an_input("tokenizer.json", json.dumps(hostile.bpe()).encode())
    yield an_input(
        "model.safetensors.index.json",
        json.dumps({"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}).encode(),
    )
    for dtype, size in (("F32", 4), ("BF16", 2), ("F16", 2)):
        header, _ = safetensors_header(dtype, size)
        yield an_input("model.safetensors without its length", header)
    yield an_input("model.safetensors", struct.pack("<Q", len(header)) + header)
    for number, vocabulary in enumerate(vocabularies):
        yield an_input("a.gguf", whole := a_gguf(number, **vocabulary))
    yield an_input("a.gguf", a_gguf(0, **hostile.vocabulary(b"gpt2", [b"a", b"a"])))
    yield an_input("a.gguf", a_gguf(0, **hostile.vocabulary(b"gpt2", tokens, merges=hostile.strings([b"a b ab"]))))
    for name, content in (("config.json", b'{"a":['), ("tokenizer.json", b'{"model":{"type":"BPE","x":[')):
        yield an_input(name, content + 50 * b"[]," + b"0]}}", at=len(content), length=150, times=0xFFFF)
    for i in range(12):  # at each read in turn
        yield an_input("a.gguf", whole, event=HALF | i << 3)
        yield an_input("model.safetensors without its length", header, event=HALF | i << 3)
        yield an_input("config.json", json.dumps(CONFIG).encode(), event=i % 6 + 1 | i // 6 << 3)
        yield an_input("tokenizer.json", json.dumps(hostile.bpe()).encode(), event=i % 6 + 1 | i // 6 << 3)


CHANGES = [
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    {"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2, "num_hidden_layers": 4},
    {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 2, "head_dim": 8}},
    {"model_type": "llama4_text", "attention_chunk_size": 16, "no_rope_layers": [1, 0], "num_hidden_layers": 2},
    {"model_type": "smollm3", "num_hidden_layers": 4},
    {"model_type": "bamba", "attn_layer_indices": [0]},
    {"model_type": "deepseek_v3", "kv_lora_rank": 8, "qk_rope_head_dim": 4},
    {"model_type": "whisper", "is_encoder_decoder": True, "max_source_positions": 16},
    {"layer_types": ["full_attention"], "num_kv_shared_layers": 0, "per_layer_config": {"0": {"head_dim": 4}}},
    {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}},
]  # fmt: skip

WORDS = sorted(
    {name for names in configuration.NAMES.values() for name in names}
    | {*configuration.PARTS, *gguf_tables.NAMES, *gguf_tables.NAMES.values(), *gguf_tables.WINDOWS, *kinds.LISTS}
    | {*shapes.REFUSED, *kinds.STATELESS, *kinds.FULL, *kinds.SLIDING, *rotation.SCALINGS, *TENSORS, *tokenizer.CUTS}
    | {"attn_layer_period", "attn_layer_offset", "full_attention_interval", "block_types", "use_sliding_window"}
    | {"max_window_layers", "attn_config", "kv_n_heads", "multi_query", "new_decoder_architecture", "rope_freqs"}
    | {"partial_rotary_factor", "rotary_pct", "no_rope_layer_interval", "layer_rope_theta", "rope_interleave"}
    | {"tokenizer.ggml.pre", "tokenizer.ggml.token_type", "tokenizer.ggml.bos_token_id", "general.alignment"}
    | {"tokenizer.ggml.add_bos_token", "tokenizer.ggml.unknown_token_id", "rope_freqs.weight", "split.count"}
    | {"F32", "F16", "BF16", "dtype", "shape", "data_offsets", "__metadata__", "weight_map", "eos_token_id", ".."}
    | {"ByteFallback", "Metaspace", "Replace", "Fuse", "Strip", "Sequence", "decoders", "WordPiece", "Unigram"}
)


def an_input(name, content, event=0, at=0, length=0, times=1):
    return BEFORE.pack(NAMES.index(name), event, at, length, times) + content


def content_of(data):
    """Return the content of an input's file, repeated as it says."""
    *_, at, length, times = BEFORE.unpack(data[: BEFORE.size].ljust(BEFORE.size, b"\0"))
    content = data[BEFORE.size :]
    repeated = content[at : at + length]
    return content[:at] + repeated * min(times, MOST_BYTES // max(len(repeated), 1)) + content[at + length :]


# ---- readers


def read_config(path):
    with kvcache.KVCache.from_config(path, max_source_len=8):
        pass


def read_tokenizer(path):
    found = tokenizer.load_tokenizer(path)
    found.decode(found.encode("abc<0x00> d")[:4])


def read_model(path):
    llama = runner.Llama.load(path)
    with runner.new_cache(llama.config, runner.Options()) as cache, np.errstate(all="ignore"):
        llama.forward([0, llama.config.vocab_size - 1][: llama.config.max_seq_len], cache)


def read_tensors(path):
    """Decode every tensor of a shape that a model may ask for."""
    found = weights.Tensors(path)
    for name, stored in found._stored.items():
        if stored.shape and 0 not in stored.shape:
            assert stored.decode().shape == stored.shape, name


def count_parameters(path):
    parameters.in_gguf(gguf.read_header(path))


READERS = {  # of each file
    "config.json": [read_config, read_model, read_tokenizer],
    "generation_config.json": [read_tokenizer],
    "tokenizer.json": [read_tokenizer],
    "model.safetensors.index.json": [shapes.read, read_model, fingerprint.fingerprint],
    "model.safetensors": [shapes.read, read_model, read_tensors],
    "a.gguf": [read_config, read_model, read_tokenizer, read_tensors, count_parameters, fingerprint.fingerprint],
}


def check_sentence(said):
    assert said.isprintable(), said
    assert len(said) < 1200, said


# ---- what happens to a file while it is read


class Event:
    """Before the n-th read of files from now on, change one."""

    path, kind, left = Path(), NOTHING, 0

    @classmethod
    def arm(cls, path, byte):
        cls.path, cls.kind, cls.left = path, byte & 7, byte >> 3

    @classmethod
    def count(cls):
        cls.left -= 1
        if cls.left == -1 and cls.kind != NOTHING and os.path.isfile(cls.path):
            cls.happen(os.path.getsize(cls.path))

    @classmethod
    def happen(cls, size):
        if cls.kind in (LONGER, HALF, EMPTY):
            os.truncate(cls.path, {LONGER: size + 100, HALF: size // 2, EMPTY: 0}[cls.kind])
            return
        os.unlink(cls.path)
        if cls.kind == PIPE:
            os.mkfifo(cls.path)
        elif cls.kind == FOLDER:
            os.mkdir(cls.path)
        elif cls.kind == ANOTHER:
            cls.path.write_bytes(bytes(size))


def counted(method):
    def call(*arguments):
        Event.count()
        return method(*arguments)

    return call


reading.File.read, reading.File.read_array = counted(reading.File.read), counted(reading.File.read_array)

# ---- a run


class Folder:
    """A folder with the files of a model, which are put right again after each run."""

    def __init__(self):
        self.path = Path(tempfile.mkdtemp(prefix="kvcache-fuzz-"))
        header, size = safetensors_header("F32", 4)
        self.right = {
            "config.json": json.dumps(CONFIG).encode(),
            "tokenizer.json": json.dumps(hostile.bpe()).encode(),
            "model.safetensors": struct.pack("<Q", len(header)) + header + bytes(size),
        }
        for name in self.right:
            self.put_right(name)

    def put_right(self, name):
        path = self.path / name
        with contextlib.suppress(IsADirectoryError, FileNotFoundError):
            path.unlink()
        if path.is_dir():
            path.rmdir()
        if name in self.right:
            path.write_bytes(self.right[name])


folder = Folder()
warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=RuntimeWarning, module="gguf")


def run(data):
    number, event, *_ = data[:2].ljust(2, b"\0")
    name, content = NAMES[number % len(NAMES)], content_of(data)
    if " " in name:
        name, content = name.split()[0], struct.pack("<Q", len(content)) + content
    if name in ("model.safetensors", "a.gguf"):
        content += bytes(-len(content) % 32 + 16_384)  # the tensors' data
    if name == "model.safetensors":
        content = content[: whole_size(content)]
    path = folder.path / name
    try:
        for reader in READERS[name]:
            if reader == READERS[name][0] or event & 7 != NOTHING:
                folder.put_right(name)
                path.write_bytes(content)
                Event.arm(path, event)
            check_cost(reader, path if name == "a.gguf" else folder.path)
    finally:
        Event.arm(path, NOTHING)
        folder.put_right(name)


def whole_size(content):
    """Return the bytes that a safetensors file should have, by its last tensor's end."""
    with contextlib.suppress(Exception):
        length = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + length])
        return 8 + length + int(max(entry["data_offsets"][1] for entry in entries.values()))
    return len(content)


def check_cost(reader, path):
    before, begin = resident(reset=True), time.process_time()
    refusal = refusal_by(reader, path)
    if refusal is not None:
        check_sentence(refusal)
        seconds, memory = time.process_time() - begin, resident() - before
        assert seconds < MOST_SECONDS, f"{seconds:.1f} s for: {refusal}"
        assert memory < MOST_MEMORY, f"{memory >> 20} MiB for: {refusal}"


def refusal_by(reader, path):
    try:
        reader(path)
    except (ModelFileError, NotSupportedError, runner.LlamaError) as error:
        return str(error)
    return None


def resident(reset=False):
    """Return the most memory that this process has had; since now, with `reset`."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
