"""Write models for llama.cpp as GGUF files: random weights in the shape of real models, and the repository's own.

cd integrations/llama.cpp
python bench/llama_cpp_models.py --output models                      # all, and the repository's
python bench/llama_cpp_models.py --output models --shape llama-1b

Random weights are Q4_0 and the same whenever they are written. They are blocks of one quantised pattern, again and
again: matrix products cost what they cost with a real model's weights, and a gigabyte is written in seconds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from kvcache.models.weights import NAMES, Tensors

REPOSITORY = Path(__file__).resolve().parents[3] / "examples/model"
Q4_0 = gguf.GGMLQuantizationType.Q4_0
PATTERN = 65_537  # blocks; a prime, so that no two rows of a matrix begin with the same one
DELTA_DIM = 128  # of a head of a gated delta net
SPACE = "\u2581"  # what a SentencePiece vocabulary writes for a space


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; a window of 0 tokens is full attention in every layer, another in five of six.

    If `conv_size` is not 0, two of three layers convolve that many tokens instead of attending. If there are
    `delta_heads`, too, three of four layers are gated delta nets of so many heads.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = 32_000
    window: int = 0
    max_seq_len: int = 131_072
    rope_theta: float = 500_000.0
    conv_size: int = 0
    delta_heads: int = 0

    def attends(self, layer: int) -> bool:
        every = 4 if self.delta_heads else 3
        return not self.conv_size or layer % every == every - 1


SHAPES = {
    "llama-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64),  # Llama 3.2 1B
    "gemma-1b": Shape("gemma3", 26, 1152, 6912, 4, 1, 256, window=512, rope_theta=1e6),  # Gemma 3 1B
    "lfm-1b": Shape("lfm2", 16, 2048, 8192, 32, 8, 64, conv_size=3, rope_theta=1e6),  # LFM2 1.2B
    "qwen3.5-0.8b": Shape(
        "qwen35", 24, 1024, 3584, 8, 2, 256, 248_320, rope_theta=1e7, conv_size=4, delta_heads=16
    ),  # Qwen3.5 0.8B
    "tiny": Shape("llama", 16, 64, 64, 2, 1, 64, vocab_size=320),  # a step is calls, and next to no arithmetic
}


# ---- metadata


def add_sizes(writer: gguf.GGUFWriter, shape: Shape, epsilon: float = 1e-6) -> None:
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_seq_len)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.inner_size)
    writer.add_head_count(shape.num_heads)
    kv_heads = [shape.num_kv_heads * shape.attends(layer) for layer in range(shape.num_layers)]
    writer.add_head_count_kv(kv_heads if shape.architecture == "lfm2" else shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_rope_dimension_count(shape.head_dim // 4 if shape.delta_heads else shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.delta_heads:
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(shape.conv_size)
        writer.add_ssm_inner_size(DELTA_DIM * shape.delta_heads)
        writer.add_ssm_state_size(DELTA_DIM)
        writer.add_ssm_time_step_rank(shape.delta_heads)
        writer.add_ssm_group_count(shape.delta_heads)
    elif shape.conv_size:
        writer.add_shortconv_l_cache(shape.conv_size)


def add_vocabulary(writer: gguf.GGUFWriter, tokens: Sequence[str], types: Sequence[gguf.TokenType]) -> None:
    """Add a SentencePiece vocabulary without merges: text becomes characters that it knows, and bytes."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(tokens))
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(list(types))
    writer.add_add_space_prefix(False)
    writer.add_add_eos_token(False)


def random_vocabulary(size: int) -> tuple[list[str], list[gguf.TokenType]]:
    """Return the special tokens, the bytes, and numbers as the rest."""
    kind = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256]
    numbers = range(len(tokens), size)
    return tokens + [f"{SPACE}{number}" for number in numbers], types + [kind.NORMAL] * len(numbers)


def byte_vocabulary() -> tuple[list[str], list[gguf.TokenType]]:
    """Return a vocabulary whose tokens are bytes; llama.cpp looks a space up as a character, the others as bytes."""
    kind = gguf.TokenType
    tokens, types = [f"<0x{byte:02X}>" for byte in range(256)], [kind.BYTE] * 256
    tokens[ord(" ")], types[ord(" ")] = SPACE, kind.NORMAL
    return tokens, types


# ---- weights


def delta_net(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the matrices of a gated delta net, by their names."""
    hidden, heads, inner = shape.hidden_size, shape.delta_heads, DELTA_DIM * shape.delta_heads
    return {
        "attn_qkv": (3 * inner, hidden), "attn_gate": (inner, hidden), "ssm_conv1d": (3 * inner, shape.conv_size),
        "ssm_beta": (heads, hidden), "ssm_alpha": (heads, hidden), "ssm_out": (hidden, inner),
    }  # fmt: skip


def convolution(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the matrices of a layer that convolves, by their names."""
    hidden = shape.hidden_size
    return {
        "shortconv.conv": (hidden, shape.conv_size), "shortconv.in_proj": (3 * hidden, hidden),
        "shortconv.out_proj": (hidden, hidden),
    }  # fmt: skip


def attention(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the matrices of a layer that attends, by their names; beside delta nets it has a gate."""
    q, kv, hidden = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.hidden_size
    with_gate = 2 * q if shape.delta_heads else q
    return {"attn_q": (with_gate, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q)}


def matrices(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the rows and columns of a layer's matrices, by their names."""
    kind = attention if shape.attends(layer) else delta_net if shape.delta_heads else convolution
    hidden, inner = shape.hidden_size, shape.inner_size
    return kind(shape) | {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}


def vectors(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the lengths of a layer's norms and other vectors, by their names."""
    names = ["attn_norm", "post_attention_norm" if shape.delta_heads else "ffn_norm"]
    if shape.architecture == "gemma3":
        names += ["post_attention_norm", "post_ffw_norm"]
    found = dict.fromkeys(names, (shape.hidden_size,))
    if shape.architecture in ("gemma3", "lfm2", "qwen35") and shape.attends(layer):
        found |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (shape.head_dim,))
    elif shape.delta_heads:
        found |= {"ssm_norm": (DELTA_DIM,), "ssm_a": (shape.delta_heads,), "ssm_dt.bias": (shape.delta_heads,)}
    return found


class RandomBlocks:
    """Makes random normals, as bytes of any type that gguf quantises to."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._patterns: dict[tuple[int, float], NDArray[np.uint8]] = {}

    def take(self, kind: gguf.GGMLQuantizationType, nbytes: int, scale: float = 1.0) -> NDArray[np.uint8]:
        """Return this many bytes of blocks, beginning at a random block of the pattern."""
        pattern = self._patterns.get((kind, scale))
        if pattern is None:
            normals = self._rng.standard_normal((PATTERN, 32), np.float32) * np.float32(scale)
            pattern = gguf.quants.quantize(normals, kind).view(np.uint8).reshape(PATTERN, -1)
            self._patterns[kind, scale] = pattern
        return np.resize(np.roll(pattern, self._rng.integers(PATTERN), 0), nbytes)


def parts(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the sizes of all tensors, by their names without ".weight"; the output is the embedding."""
    found: dict[str, tuple[int, ...]] = {"token_embd": (shape.vocab_size, shape.hidden_size)}
    found["token_embd_norm" if shape.architecture == "lfm2" else "output_norm"] = (shape.hidden_size,)
    for layer in range(shape.num_layers):
        sizes = vectors(shape, layer) | matrices(shape, layer)
        found |= {f"blk.{layer}.{name}": size for name, size in sizes.items()}
    return found


def add_tensor(writer: gguf.GGUFWriter, blocks: RandomBlocks, name: str, size: tuple[int, ...]) -> None:
    """Add a matrix of Q4_0, or a vector, a bias or a convolution of f32; products with normed rows are about 1."""
    full = name if name.endswith((".bias", "ssm_a")) else f"{name}.weight"
    if len(size) == 1:
        sign = 0.0 if "bias" in name or "base" in name else -1.0 if name.endswith("ssm_a") else 1.0
        writer.add_tensor(full, np.full(size, sign, np.float32))
    elif size[-1] % 32 or "compressor_ape" in name:
        writer.add_tensor(full, np.full(size, size[-1] ** -0.5, np.float32))
    else:
        weight = blocks.take(Q4_0, math.prod(size) // 32 * 18, size[-1] ** -0.5)
        writer.add_tensor(full, weight.reshape(*size[:-1], size[-1] // 32 * 18), raw_dtype=Q4_0)


def write_random(path: Path, shape: Shape, seed: int = 0) -> None:
    """Write a model of random weights."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    add_sizes(writer, shape)
    add_vocabulary(writer, *random_vocabulary(shape.vocab_size))
    blocks = RandomBlocks(seed)
    for name, size in parts(shape).items():
        add_tensor(writer, blocks, name, size)
    finish(writer)


def write_repository(path: Path) -> None:
    """Write the model of examples/model in f32; its tokens are the same: bytes."""
    config = json.loads((REPOSITORY / "config.json").read_text())
    shape = Shape(
        "llama", config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"],
        config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"], config["vocab_size"],
        max_seq_len=config["max_position_embeddings"], rope_theta=config["rope_parameters"]["rope_theta"],
    )  # fmt: skip
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    add_sizes(writer, shape, config["rms_norm_eps"])
    add_vocabulary(writer, *byte_vocabulary())
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_add_bos_token(False)
    tensors = Tensors(REPOSITORY)
    theirs = {name: other for other, name in NAMES.items()}
    for name, size in parts(shape).items():
        *layer, kind = name.split(".")
        weight = tensors.take(f"{'model.layers.' + layer[1] + '.' if layer else ''}{theirs[kind]}.weight", *size)
        if kind in ("attn_q", "attn_k"):  # llama.cpp rotates neighbours, Hugging Face the halves of a head
            weight = weight.reshape(-1, 2, shape.head_dim // 2, size[1]).swapaxes(1, 2).reshape(size)
        writer.add_tensor(f"{name}.weight", weight)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(name: str, folder: Path) -> Path:
    """Write a model into a folder, whole or not at all, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / f"{name}.gguf", folder / f"{name}.gguf.part"
    if name == "repository":
        write_repository(part)
    else:
        write_random(part, SHAPES[name])
    return part.replace(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="made if it is missing")
    names = [*SHAPES, "repository"]
    parser.add_argument("--shape", choices=names, nargs="+", default=names, help="default: all")
    options = parser.parse_args(arguments)
    for name in options.shape:
        path = write(name, options.output)
        print(f"{path}: {path.stat().st_size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
