"""Writers of small model files, byte by byte, so that these may say whatever they should not."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

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


def bpe() -> dict[str, Any]:
    """The state of a right tokenizer, of three tokens."""
    right = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    right.decoder = decoders.ByteLevel()
    state: dict[str, Any] = json.loads(right.to_str())
    return state


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


def tensor(
    name: bytes = b"t", shape: tuple[int, ...] = (4,), offset: int = 0, number: int = 0, axes: int | None = None
) -> bytes:
    """The shape as it stands in the file, innermost first."""
    axes = len(shape) if axes is None else axes
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", axes, *shape, number, offset)


def vocabulary(kind: bytes, tokens: list[bytes], **entries: bytes) -> dict[str, bytes]:
    return {
        "general.architecture": string(b"llama"),
        "tokenizer.ggml.model": string(kind),
        "tokenizer.ggml.tokens": strings(tokens),
        **{f"tokenizer.ggml.{name}": value for name, value in entries.items()},
    }


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


def tokenizer(folder: Path, data: bytes) -> Path:
    config(folder / "config.json")
    (folder / "tokenizer.json").write_bytes(data)
    return folder
