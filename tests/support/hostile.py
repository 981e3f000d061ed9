"""Small files that were made to harm whoever reads them, and a way to read one in a process of its own."""

import ast
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MB = 1 << 20
SIZE = 10 * 1000 * 1000  # of the files that are to be as large as they may
READ = """
import resource, sys
from kvcache import KVCacheError
from kvcache.models import shapes, tokenizer
from kvcache import runner
from kvcache.tools import cli
import gguf, numpy, tokenizers

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))

tokenizers.Tokenizer.from_buffer(
    b'{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}'
).encode("a")
before, allowed = peak(), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
result = "read"
try:
    {"shape": shapes.read, "tokenizer": tokenizer.load_tokenizer, "llama": runner.Llama.load}[sys.argv[1]](sys.argv[2])
except KVCacheError as error:
    result = f"{type(error).__name__}: {error}"
if peak() - before > allowed:  # of what the imports took already
    result = f"{(peak() - before) >> 20} MiB for: {result}"
print(ascii(result))
"""


def read(kind: str, path: Path, allowed: int = 200 * 1000 * 1000) -> str:
    """Read a file as a shape, tokenizer or model; return "read", the error, or that it took too much memory."""
    command = [sys.executable, "-c", READ, kind, str(path), str(allowed)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stderr == ""
    return str(ast.literal_eval(done.stdout))


# --- JSON --------------------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def config(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps({**CONFIG, **changes}))
    return path


def repeated(text: bytes, size: int = SIZE) -> bytes:
    """Return a JSON list of about `size` bytes that repeats this value."""
    return b"[" + (text + b",") * (size // (len(text) + 1)) + b"0]"


def safetensors(path: Path, header: bytes | dict[str, Any], data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


# --- GGUF --------------------------------------------------------------------------------------------------------


def text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def strings(values: list[bytes]) -> bytes:
    return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(text, values))


def numbers(number: int, letter: str, values: list[Any]) -> bytes:
    return struct.pack(f"<IIQ{len(values)}{letter}", 9, number, len(values), *values)


def gguf(path: Path, entries: dict[str, bytes], tensors: Sequence[bytes] = (), data: int = 0) -> Path:
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries))
    head += b"".join(text(key.encode()) + value for key, value in entries.items()) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 32 + data))
    return path


def string(value: bytes) -> bytes:
    return struct.pack("<I", 8) + text(value)


def tensor(name: bytes, shape: tuple[int, ...], offset: int = 0, number: int = 0) -> bytes:
    """The shape as it stands in the file, innermost first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, offset)


def vocabulary(kind: bytes, tokens: list[bytes], **entries: bytes) -> dict[str, bytes]:
    return {
        "general.architecture": string(b"llama"),
        "tokenizer.ggml.model": string(kind),
        "tokenizer.ggml.tokens": strings(tokens),
        **{f"tokenizer.ggml.{name}": value for name, value in entries.items()},
    }


# --- the files ---------------------------------------------------------------------------------------------------

Made = Callable[[Path], Path]
LARGE: dict[str, tuple[str, Made]] = {}  # name: how it is read, how it is made in a folder


def large(kind: str) -> Callable[[Made], Made]:
    def add(make: Made) -> Made:
        LARGE[make.__name__] = kind, make
        return make

    return add


@large("shape")
def values_as_wide_as_no_model_s(folder: Path) -> Path:
    return config(folder / "config.json", v_head_dim=1 << 20)


@large("shape")
def keys_rotated_more_than_whole(folder: Path) -> Path:
    parameters = {"rope_type": "proportional", "partial_rotary_factor": 1e7}
    return config(folder / "config.json", rope_parameters=parameters)


@large("shape")
def many_keys_for_each_layer(folder: Path) -> Path:
    keys = {f"key {i}": i for i in range(300_000)}
    own = {str(i): {"head_dim": 32} for i in range(1024)}
    return config(folder / "config.json", num_hidden_layers=1024, per_layer_config=own, **keys)


@large("shape")
def many_keys_of_a_rotation(folder: Path) -> Path:
    return config(folder / "config.json", num_hidden_layers=1024, rope_scaling={str(i): i for i in range(300_000)})


@large("shape")
def a_long_list_of_layers(folder: Path) -> Path:
    indices = list(range(1_000_000, 2_000_000))
    return config(folder / "config.json", model_type="bamba", num_hidden_layers=1024, attn_layer_indices=indices)


@large("shape")
def a_long_name(folder: Path) -> Path:
    return config(folder / "config.json", model_type="\U0001f642" * (SIZE // 12))


@large("shape")
def json_of_empty_lists(folder: Path) -> Path:
    (folder / "config.json").write_bytes(b'{"a":' + repeated(b"[]") + b"}")
    return folder


@large("shape")
def json_of_small_objects(folder: Path) -> Path:
    (folder / "config.json").write_bytes(b'{"a":' + repeated(b'{"":0}') + b"}")
    return folder


@large("shape")
def json_of_nested_objects(folder: Path) -> Path:
    deep = b'{"":' * 90 + b"0" + b"}" * 90
    (folder / "config.json").write_bytes(b'{"a":' + repeated(deep) + b"}")
    return folder


@large("shape")
def json_of_as_many_objects_as_are_read(folder: Path) -> Path:
    deep = b'{"":' * 90 + b"0" + b"}" * 90
    (folder / "config.json").write_bytes(b'{"a":' + repeated(deep, 5700 * (len(deep) + 1)) + b"}")
    return folder


@large("shape")
def json_of_characters_and_one_that_is_wide(folder: Path) -> Path:
    (folder / "config.json").write_bytes(b'{"a": "' + b"x" * SIZE + "\U0001f642".encode() + b'"}')
    return folder


@large("shape")
def json_that_is_sparse(folder: Path) -> Path:
    (folder / "config.json").touch()
    os.truncate(folder / "config.json", 1 << 40)
    return folder


@large("llama")
def an_index_of_many_files(folder: Path) -> Path:
    config(folder / "config.json")
    names = {str(i): f"{i}.safetensors" for i in range(300_000)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


@large("llama")
def a_header_of_empty_lists(folder: Path) -> Path:
    config(folder / "config.json")
    safetensors(folder / "model.safetensors", b'{"a":' + repeated(b"[]", 100_000_000 - 20) + b"}")
    return folder


@large("llama")
def a_header_of_tensors_without_elements(folder: Path) -> Path:
    config(folder / "config.json")
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    safetensors(folder / "model.safetensors", {f"{i:x}": entry for i in range(58_000)})
    return folder


@large("llama")
def safetensors_that_are_sparse(folder: Path) -> Path:
    config(folder / "config.json")
    entry = {"dtype": "F16", "shape": [1 << 20, 1 << 19], "data_offsets": [0, 1 << 40]}
    path = safetensors(folder / "model.safetensors", {"model.embed_tokens.weight": entry})
    os.truncate(path, path.stat().st_size + (1 << 40))
    return folder


@large("llama")
def safetensors_that_overlap(folder: Path) -> Path:
    wide = {"hidden_size": 2048, "intermediate_size": 64, "num_hidden_layers": 1000}
    config(folder / "config.json", **wide)
    entry = {"dtype": "F16", "shape": [256, 2048], "data_offsets": [0, 1 << 20]}
    names = [f"model.layers.{i}.x" for i in range(2000)]
    safetensors(folder / "model.safetensors", dict.fromkeys(["model.embed_tokens.weight", *names], entry), bytes(MB))
    return folder


def llama_entries(**changes: int) -> dict[str, bytes]:
    counts = {
        "block_count": 1000,
        "context_length": 512,
        "embedding_length": 128,
        "feed_forward_length": 512,
        "vocab_size": 256,
        "attention.head_count": 2,
        "attention.head_count_kv": 2,
        **changes,
    }
    epsilon = {"llama.attention.layer_norm_rms_epsilon": struct.pack("<If", 6, 1e-5)}
    numbers = {f"llama.{key}": struct.pack("<II", 4, value) for key, value in counts.items()}
    return {"general.architecture": string(b"llama"), **numbers, **epsilon}


@large("llama")
def gguf_that_overlaps(folder: Path) -> Path:
    tensors = [tensor(b"token_embd.weight", (128, 256))]
    for i in range(1000):
        shapes = {"attn_norm": (128,), "ffn_norm": (128,), "ffn_gate": (128, 512), "ffn_up": (128, 512)}
        shapes |= {f"attn_{name}": (128, 128) for name in ("q", "k", "v", "output")} | {"ffn_down": (512, 128)}
        tensors += [tensor(b"blk.%d.%s.weight" % (i, name.encode()), shape) for name, shape in shapes.items()]
    return gguf(folder / "a.gguf", llama_entries(), tensors, 512 * 128 * 4)


@large("shape")
def gguf_of_long_strings(folder: Path) -> Path:
    """Sparse: of the 6 GB that they have, a file system stores some kB."""
    size = (1 << 24) - 100
    path = folder / "a.gguf"
    with path.open("wb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, 0, 400))
        for i in range(400):
            file.write(text(b"%d" % i) + struct.pack("<IQ", 8, size))
            file.seek(size, os.SEEK_CUR)
        file.truncate()
    return path


@large("shape")
def gguf_of_one_wide_string(folder: Path) -> Path:
    return gguf(folder / "a.gguf", {"a": string(b"x" * (SIZE - 100) + "\U0001f642".encode())})


@large("shape")
def gguf_of_short_arrays(folder: Path) -> Path:
    values = numbers(3, "h", list(range(1000, 5000)))
    return gguf(folder / "a.gguf", {str(i): values for i in range(SIZE // len(values))})


@large("shape")
def gguf_of_small_entries(folder: Path) -> Path:
    return gguf(folder / "a.gguf", {f"{i:x}": struct.pack("<Id", 12, i / 3) for i in range(1 << 17)})


@large("shape")
def gguf_of_small_tensors(folder: Path) -> Path:
    return gguf(folder / "a.gguf", {}, [tensor(b"%x" % i, (0, 1, 2, 3)) for i in range(1 << 17)])


@large("shape")
def gguf_of_arrays_in_an_array(folder: Path) -> Path:
    inner = struct.pack("<IQ", 9, 0) * (SIZE // 12)
    return gguf(folder / "a.gguf", {"a": struct.pack("<IIQ", 9, 9, SIZE // 12) + inner})


@large("shape")
def gguf_of_empty_strings_without_end(folder: Path) -> Path:
    gguf(folder / "a.gguf", {"a": struct.pack("<IIQ", 9, 8, 1 << 22)})
    os.truncate(folder / "a.gguf", 1 << 40)
    return folder / "a.gguf"


@large("tokenizer")
def a_vocabulary_of_nested_tokens(folder: Path) -> Path:
    tokens = [bytes([97 + i]) * n for i in range(19) for n in range(1, 1025)]
    scores = numbers(6, "f", [0.0] * len(tokens))
    return gguf(folder / "a.gguf", vocabulary(b"llama", tokens, scores=scores))


@large("tokenizer")
def a_vocabulary_of_long_tokens(folder: Path) -> Path:
    tokens = [b"%06d" % i + b"x" * 1000 for i in range(SIZE // 1020)]
    scores = numbers(6, "f", [0.0] * len(tokens))
    return gguf(folder / "a.gguf", vocabulary(b"llama", tokens, scores=scores))


@large("tokenizer")
def a_vocabulary_of_many_tokens(folder: Path) -> Path:
    tokens = [b"%x" % i for i in range(SIZE // 14)]
    return gguf(folder / "a.gguf", vocabulary(b"gpt2", tokens, merges=strings([])))


@large("tokenizer")
def a_vocabulary_of_many_merges(folder: Path) -> Path:
    tokens = [b"%c%c" % (33 + i % 90, 33 + i // 90) for i in range(8100)]
    merges = [a + b" " + b for a in tokens[:90] for b in tokens]
    return gguf(folder / "a.gguf", vocabulary(b"gpt2", tokens, merges=strings(merges)))


@large("tokenizer")
def a_vocabulary_of_control_tokens(folder: Path) -> Path:
    tokens = [b"%x" % i for i in range(400_000)]
    types = numbers(5, "i", [3] * len(tokens))
    return gguf(folder / "a.gguf", vocabulary(b"gpt2", tokens, token_type=types, merges=strings([])))


def tokenizer(folder: Path, data: bytes) -> Path:
    config(folder / "config.json")
    (folder / "tokenizer.json").write_bytes(data)
    return folder


@large("tokenizer")
def a_tokenizer_of_objects(folder: Path) -> Path:
    return tokenizer(folder, b'{"model":{"type":"BPE","x":' + repeated(b'{"":0}') + b"}}")


@large("tokenizer")
def a_tokenizer_of_lists(folder: Path) -> Path:
    return tokenizer(folder, b'{"model":{"type":"BPE","x":' + repeated(b"[]") + b"}}")


@large("tokenizer")
def a_tokenizer_of_numbers(folder: Path) -> Path:
    return tokenizer(folder, b'{"model":{"type":"BPE","x":' + repeated(b"0", 3_140_000) + b"}}")


@large("tokenizer")
def a_tokenizer_that_is_sparse(folder: Path) -> Path:
    os.truncate(tokenizer(folder, b"{") / "tokenizer.json", 1 << 40)
    return folder
