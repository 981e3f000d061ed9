"""Test the layers of a cache read from GGUF files: sizes, windows and rotations by hand, and keys that move."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import gguf_files

import kvcache
from kvcache.layer import Layer
from kvcache.models import gguf_tables, shapes
from kvcache.models.shapes import Shape
from kvcache.policy import ChunkedAttention, CrossAttention, FullAttention, SlidingWindow
from kvcache.rope import Rope

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
HEADS, KV_HEADS = "attention.head_count", "attention.head_count_kv"
USUAL = {"block_count": 4, "context_length": 4096, "embedding_length": 512, HEADS: 8, KV_HEADS: 2}
DIM = 64  # of a head, unless the file says another


def read(folder: Path, architecture: str, tensors: Any = (), **fields: Any) -> Shape:
    """Write a file of four layers of 8 query and 2 KV heads, and read its shape."""
    kept = {name: value for name, value in {**USUAL, **fields}.items() if value is not None}
    metadata = {f"{architecture}.{name}": value for name, value in kept.items()}
    return shapes.read(gguf_files.write(folder / "model.gguf", architecture, metadata, tensors))


def windows(shape: Shape) -> list[Any]:
    """Return each layer's window or chunk size; 0 if it sees everything, None if it stores nothing."""
    sizes = {SlidingWindow: "window", ChunkedAttention: "attention_chunk_size"}
    policies = [layer.policy for layer in shape.layers]
    return [policy and getattr(policy, sizes.get(type(policy), ""), 0) for policy in policies]


def rows(layer: Layer) -> tuple[int, int, int]:
    return layer.num_kv_heads, layer.head_dim, layer.v_head_dim


# ---- what each layer stores


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("llama", {}, [0] * 4),
        ("llama", {WINDOW: 99}, [99] * 4),
        ("phi3", {WINDOW: 99}, [99] * 4),
        ("gemma2", {}, [4096, 0] * 2),
        ("gemma2", {WINDOW: 16}, [16, 0] * 2),
        ("gemma3", {}, [0] * 4),
        ("gemma3", {WINDOW: 64, "block_count": 6}, [64] * 5 + [0]),
        ("gemma3", {WINDOW: 64, PATTERN: 2}, [64, 0] * 2),
        ("gemma3", {WINDOW: 64, PATTERN: 0}, [64] * 4),
        ("gemma3n", {WINDOW: 64, "block_count": 5}, [64] * 4 + [0]),
        ("gpt-oss", {WINDOW: 128}, [128, 0] * 2),
        ("gpt-oss", {WINDOW: 128, PATTERN: [False, True, True, False]}, [0, 128, 128, 0]),
        ("cohere2", {WINDOW: 9}, [9, 9, 9, 0]),
        ("cohere2moe", {WINDOW: 9}, [0, 9, 9, 9]),
        ("cohere2moe", {WINDOW: 9, PATTERN: 2}, [0, 9, 0, 9]),
        ("laguna", {WINDOW: 9}, [0, 9, 9, 9]),
        ("smallthinker", {WINDOW: 9}, [0, 9, 9, 9]),
        ("plamo3", {WINDOW: 9, "block_count": 8}, [9] * 7 + [0]),
        ("olmo2", {}, [0] * 4),
        ("mellum", {WINDOW: 9}, [9, 9, 9, 0]),
        ("afmoe", {WINDOW: 9}, [9, 9, 9, 0]),
        ("muse-glimmer", {WINDOW: 9}, [9, 9, 9, 0]),
        ("exaone-moe", {WINDOW: 9}, [9, 9, 9, 0]),
        ("exaone4", {}, [0] * 4),
        ("exaone4", {"block_count": 64}, [4096, 4096, 4096, 0] * 16),
        ("exaone4", {WINDOW: 8, PATTERN: [True, False] * 2}, [8, 0] * 2),
        ("step35", {WINDOW: 8, PATTERN: [False, True] * 2}, [0, 8] * 2),
        ("llama4", {}, [8192] * 3 + [0]),
        ("llama4", {WINDOW: 8192}, [8192] * 3 + [0]),
        ("llama4", {WINDOW: 0}, [0] * 4),
        ("llama4", {"attention.chunk_size": 16}, [16] * 3 + [0]),
        ("deepseek2-ocr", {WINDOW: 128}, [0] * 4),
        ("qwen3", {WINDOW: 8, PATTERN: [True, False, True, True]}, [8, 0, 8, 8]),
        ("jamba", {KV_HEADS: [0, 2, 0, 2]}, [None, 0, None, 0]),
        ("lfm2", {KV_HEADS: [0, 2, 0, 2], WINDOW: 7}, [None, 7, None, 7]),
        ("qwen3next", {}, [None, None, None, 0]),
        ("qwen35", {"full_attention_interval": 2}, [None, 0, None, 0]),
        ("qwen35moe", {"full_attention_interval": 9, "attention.recurrent_layers": [False, True] * 2}, [0, None] * 2),
        ("minimax-01", {"block_count": 8}, [None] * 7 + [0]),
        ("qwen3", {"nextn_predict_layers": 1}, [0] * 3),
        ("qwen3next", {"block_count": 5, "nextn_predict_layers": 1}, [None, None, None, 0]),
        ("glm4moe", {"block_count": 47, "nextn_predict_layers": 1}, [0] * 46),
        ("nanbeige", {"num_loops": 2}, [0] * 8),
        ("granite_swa", {WINDOW: 8, PATTERN: [True, True, False, True]}, [8, 8, 0, 8]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_layers_see(tmp_path: Path, architecture: str, fields: dict[str, Any], expected: list[int | None]) -> None:
    shape = read(tmp_path, architecture, **fields)
    assert windows(shape) == expected
    for layer, window in zip(shape.layers, expected, strict=True):
        assert window is None or rows(layer) == (2, DIM, DIM)
    assert shape.max_seq_len == 4096


def test_sizes_of_windows_and_of_other_layers(tmp_path: Path) -> None:
    """Gemma 4: heads of 512 and 256 elements, a list of KV heads, and layers that read other layers' rows."""
    fields = {"attention.key_length": 512, "attention.value_length": 512, "attention.shared_kv_layers": 2}
    fields |= {"attention.key_length_swa": 256, "attention.value_length_swa": 256, WINDOW: 64, "block_count": 6}
    kv_heads = [4, 4, 1, 4, 4, 1]
    shape = read(tmp_path, "gemma4", **fields, **{PATTERN: [True, True, False] * 2, KV_HEADS: kv_heads})
    assert [rows(layer) for layer in shape.layers] == [(4, 256, 256), (4, 256, 256), (1, 512, 512)] * 2
    assert [layer.share for layer in shape.layers] == [None] * 4 + [3, 2]


@pytest.mark.parametrize("said", [{}, {"attention.shared_kv_layers": 10}, {"attention.shared_kv_layers": 10.0}])
def test_gemma3n_shares_all_rows_but_those_of_the_first_twenty_layers(tmp_path: Path, said: dict[str, Any]) -> None:
    """Published files hold the number of layers that share as a float."""
    shares = [layer.share for layer in read(tmp_path, "gemma3n", **{WINDOW: 64, "block_count": 30}, **said).layers]
    assert shares == [None] * 20 + [18, 18, 18, 18, 19] * 2


def test_heads_of_each_layer(tmp_path: Path) -> None:
    shape = read(tmp_path, "openelm", **{HEADS: [8, 12, 16, 20], KV_HEADS: [2, 3, 4, 5], "attention.key_length": 32})
    assert [rows(layer)[:2] for layer in shape.layers] == [(2, 32), (3, 32), (4, 32), (5, 32)]
    assert shape.num_heads == (8, 12, 16, 20)
    without = read(tmp_path, "llama", **{KV_HEADS: None})
    assert rows(without.layers[0]) == (8, DIM, DIM)


def test_the_length_of_keys_is_the_files(tmp_path: Path) -> None:
    """Also where the class of Hugging Face divides the width among the heads."""
    sizes = {WINDOW: 8, "attention.key_length": 32, "attention.value_length": 32}
    assert {rows(layer) for layer in read(tmp_path, "cohere2", **sizes).layers} == {(2, 32, 32)}
    mixed = {WINDOW: 8, HEADS: [16, 8] * 2}  # the first number of heads divides the width
    assert {rows(layer) for layer in read(tmp_path, "cohere2", **mixed).layers} == {(2, 32, 32)}


def test_values_are_as_long_as_keys_only_where_heads_divide_the_embedding(tmp_path: Path) -> None:
    assert rows(read(tmp_path, "mimo2", **{"attention.key_length": 192}, **MIMO).layers[0]) == (2, 192, 128)


MIMO = {"attention.value_length": 128, WINDOW: 8, PATTERN: [True, False] * 2}


def test_latents(tmp_path: Path) -> None:
    sizes = {"attention.kv_lora_rank": 512, "attention.key_length": 576, "attention.value_length": 512}
    shape = read(tmp_path, "deepseek2", **sizes, **{"rope.dimension_count": 64})
    assert (*rows(shape.layers[0]), shape.layers[0].value_in_key) == (1, 576, 512, True)
    assert isinstance(shape.layers[0].rope, Rope)
    assert (shape.layers[0].rope.first_dim, len(shape.layers[0].rope.inv_freq)) == (512, 32)
    # In an old file key_length is the length of a head; in another, dimension_count is wrong, and llama.cpp ignores it.
    old = read(tmp_path, "deepseek2", **{**sizes, "attention.key_length": 192}, **{"rope.dimension_count": 64})
    assert old.layers == shape.layers
    made = {"attention.key_length_mla": 192, "attention.value_length_mla": 128, KV_HEADS: [1, 1, 0, 1]}
    kimi = read(tmp_path, "kimi-linear", **sizes, **made, **{"rope.dimension_count": 72})
    assert windows(kimi) == [0, 0, None, 0]
    assert rows(kimi.layers[0]) == (1, 576, 512)
    assert kimi.layers[0].rope is False
    with pytest.raises(kvcache.ModelFileError, match=r"attention\.key_length 500 is below attention\.kv_lora_rank, 51"):
        read(tmp_path, "deepseek2", **{**sizes, **made, "attention.key_length": 500, KV_HEADS: 1})


def test_an_encoder_and_its_decoder(tmp_path: Path) -> None:
    shape = read(tmp_path, "t5", **{"decoder_block_count": 2, "context_length": 512})
    assert [layer.policy for layer in shape.layers] == [FullAttention()] * 2 + [CrossAttention(512)] * 2
    assert {layer.rope for layer in shape.layers} == {False}


def test_a_layer_that_chooses_adapters(tmp_path: Path) -> None:
    layers = read(tmp_path, "graniteswitch").layers
    assert [rows(layer) for layer in layers] == [(2, DIM, DIM)] * 4 + [(1, DIM, DIM)]
    assert layers[4].rope is False


def test_a_gguf_is_as_its_config(tmp_path: Path) -> None:
    ours = read(tmp_path, "llama", **{"rope.dimension_count": 64})
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
    theirs = shapes.read({**config, "max_position_embeddings": 4096, "rope_theta": 10000.0, "model_type": "llama"})
    (mine, other) = (shape.layers[0].rope for shape in (ours, theirs))
    assert isinstance(mine, Rope)
    assert isinstance(other, Rope)
    assert mine.interleaved  # the file's rows are in that order
    assert mine.inv_freq == other.inv_freq
    without_rope = [[replace(layer, rope=None) for layer in shape.layers] for shape in (ours, theirs)]
    assert without_rope[0] == without_rope[1]
    assert (ours.num_heads, ours.max_seq_len) == (theirs.num_heads, theirs.max_seq_len)


# ---- how keys are rotated


def plain(base: float = 10000.0, dim: int = DIM) -> NDArray[np.float64]:
    """The frequencies of a rotation of `dim` elements."""
    return base ** (-np.arange(0, dim, 2) / dim)


def check(layer: Layer, expected: NDArray[np.float64] | None) -> None:
    """Check a layer's frequencies; None: it rotates nothing."""
    if expected is None:
        assert layer.rope is False
    else:
        assert isinstance(layer.rope, Rope)
        np.testing.assert_allclose(layer.rope.inv_freq, expected, rtol=1e-6)


def test_keys_with_embedded_positions_are_not_moved(tmp_path: Path) -> None:
    for architecture in ("gpt2", "mpt", "starcoder"):
        with pytest.raises(kvcache.NotSupportedError, match="embeddings of their positions"):
            read(tmp_path, architecture).layers[0].rope(0, np.zeros((1, 1, DIM), np.float32), 1)


BASES = {"rope.freq_base": 1e6, "rope.freq_base_swa": 5e3}
LINEAR = {"rope.freq_base": 1e6, "rope.scaling.factor": 8.0}
LISTED = {WINDOW: 8, PATTERN: [True, False] * 2}


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),  # the frequencies of four layers, or of the first ones
    [
        ("llama", {}, [plain()] * 4),
        ("llama", {"rope.freq_base": 5e5}, [plain(5e5)] * 4),
        ("llama", {"rope.scaling.factor": 4.0}, [plain() / 4] * 4),  # linear, without a type
        ("llama", {"rope.scaling.factor": 0.0}, [plain()] * 4),
        ("llama", {"rope.scale_linear": 4.0}, [plain() / 4] * 4),
        ("llama", {"rope.scale_linear": 4.0, "rope.scaling.factor": 2.0}, [plain() / 2] * 4),
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, [plain() / 2] * 4),
        ("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, [plain()] * 4),
        ("llama", {"rope.scaling.finetuned": False}, [plain()] * 4),
        ("gptneox", {"rope.dimension_count": 16}, [plain(dim=16)] * 4),
        ("qwen3", {"rope.dimension_count": 0}, [None] * 4),
        ("plamo", {"rope.dimension_count": 16}, [plain()] * 4),
        ("deepseek2-ocr", {"rope.dimension_count": 0, "rope.scaling.factor": 4.0}, [plain()] * 4),
        ("cogvlm", {"rope.freq_base": 5e5}, [plain()] * 4),
        *((name, {"rope.freq_base": 1e6}, [None] * 4) for name in ("jamba", "nemotron_h")),
        ("mpt", {"attention.max_alibi_bias": 8.0}, [None] * 4),
        ("baichuan", {}, [plain()] * 4),
        ("baichuan", {"block_count": 40}, [None] * 4),
        ("granite", {}, [plain()] * 4),
        ("granite", {"rope.scaling.finetuned": True}, [plain()] * 4),
        ("granite", {"rope.scaling.finetuned": False}, [None] * 4),
        ("granitehybrid", {"rope.scaling.finetuned": False, KV_HEADS: 2}, [None] * 4),
        ("granite_swa", {**LISTED, **LINEAR}, [plain(1e6) / 8] * 4),
        ("granite_swa", {**LISTED, "attention.rope_pattern": [1, 0, 1, 0]}, [plain(), None] * 2),
        ("smollm3", {}, [plain()] * 3 + [None]),
        ("smallthinker", {}, [plain()] * 4),
        ("smallthinker", {WINDOW: 8}, [None] + [plain()] * 3),
        ("llama4", {}, [plain()] * 3 + [None]),
        ("llama4", {WINDOW: 0}, [plain()] * 4),
        ("afmoe", {}, [plain()] * 3 + [None]),
        ("cohere2", {WINDOW: 8}, [plain()] * 3 + [None]),
        ("cohere2", {WINDOW: 8, PATTERN: 1}, [None] * 4),
        ("cohere2moe", {WINDOW: 8}, [None] + [plain()] * 3),
        ("cohere2moe", {WINDOW: 8, "leading_dense_block_count": 1}, [plain()] * 4),
        ("exaone4", {}, [plain()] * 4),
        ("exaone4", {WINDOW: 8}, [plain()] * 3 + [None]),
        ("exaone-moe", {WINDOW: 8}, [plain()] * 3 + [None]),
        ("maple", LISTED, [plain(), None] * 2),
        ("muse-glimmer", {WINDOW: 8, **LINEAR}, [plain(1e6)] * 3 + [None]),
        # Windows' own bases, and which windows are scaled.
        ("gemma3", {WINDOW: 8, PATTERN: 2, **LINEAR}, [plain(), plain(1e6) / 8] * 2),
        ("gemma3", {WINDOW: 8, PATTERN: 2, **BASES}, [plain(5e3), plain(1e6)] * 2),
        ("gemma3n", {WINDOW: 8, PATTERN: 2, "rope.freq_base": 1e6}, [plain(), plain(1e6)] * 2),
        ("gemma2", {**LINEAR}, [plain(1e6) / 8] * 4),
        ("gemma2", BASES, [plain(5e3), plain(1e6)] * 2),
        ("gpt-oss", {WINDOW: 8, **LINEAR}, [plain(1e6) / 8] * 4),
        ("olmo2", {WINDOW: 8, **LINEAR}, [plain(1e6)] * 3 + [plain(1e6) / 8]),
        ("mellum", {WINDOW: 8, **LINEAR}, [plain(1e6)] * 3 + [plain(1e6) / 8]),
        ("laguna", {WINDOW: 8, **LINEAR}, [plain(1e6) / 8] + [plain(1e6)] * 3),
        ("plamo3", {WINDOW: 8, **LINEAR}, [plain()] * 4),
        ("mimo2", {**LISTED, **LINEAR}, [plain(), plain(1e6) / 8] * 2),
        ("spark2_5", {**LISTED, **LINEAR}, [plain(1e6) / 8] * 4),
        ("lfm2", {WINDOW: 8, **LINEAR}, [plain(1e6) / 8] * 4),
        # The elements that are rotated differ, too.
        ("step35", {**LISTED, "rope.freq_base": 5e6}, [plain(), plain(5e6, 32)] * 2),
        ("step35", {**LISTED, "rope.dimension_count_swa": 16}, [plain(dim=16), plain(dim=32)] * 2),
        ("laguna", {WINDOW: 8, "rope.dimension_count": 32}, [plain(dim=32)] * 4),
        ("laguna", {WINDOW: 8, "rope.dimension_count": 32, "rope.dimension_count_swa": 64}, [plain(dim=32), plain()]),
        ("gemma4", {**LISTED, "attention.key_length_swa": 32}, [plain(dim=32), plain()] * 2),
        (
            "gemma4",
            {**LISTED, "attention.key_length_swa": 32, "rope.dimension_count_swa": 16},
            [plain(dim=16), plain()],
        ),
        ("hunyuan_vl", {"rope.scaling.alpha": 1000.0}, [plain(10000.0 * 1000.0 ** (64 / 62))] * 4),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_frequencies(tmp_path: Path, architecture: str, fields: dict[str, Any], expected: list[Any]) -> None:
    for layer, frequencies in zip(read(tmp_path, architecture, **fields).layers, expected, strict=False):
        check(layer, frequencies)


def yarn(factor: float, context: float, fast: float = 32.0, slow: float = 1.0, mix: float = 1.0) -> list[float]:
    """Compute the frequencies of YaRN one by one, as ggml does."""
    turns = [DIM * np.log(context / (beta * 2 * np.pi)) / (2 * np.log(10000.0)) for beta in (fast, slow)]
    low, high = max(0.0, np.floor(turns[0])), min(DIM - 1.0, np.ceil(turns[1]))
    found = []
    for pair, frequency in enumerate(plain()):
        kept = (1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low)))) * mix
        found.append(frequency / factor * (1 - kept) + frequency * kept)
    return found


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("llama", {"rope.scaling.original_context_length": 1024}, yarn(4, 1024)),
        ("llama", {}, yarn(4, 4096)),
        ("llama", {"rope.scaling.factor": None}, yarn(1, 4096)),
        ("mistral3", {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}, yarn(4, 4096, 16, 2)),
        ("grok", {}, yarn(4, 4096, 8)),
        ("grok", {"rope.scaling.yarn_ext_factor": 0.5}, yarn(4, 4096, 8, mix=0.5)),
        ("grok", {"rope.scaling.yarn_ext_factor": 0.0}, plain() / 4),
        ("grok", {"rope.scaling.yarn_ext_factor": -1.0}, yarn(4, 4096, 8)),
    ],
)
def test_yarn(tmp_path: Path, architecture: str, fields: dict[str, Any], expected: Any) -> None:
    usual = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    check(read(tmp_path, architecture, **{**usual, **fields}).layers[0], np.array(expected))


def test_windows_that_yarn_leaves_alone(tmp_path: Path) -> None:
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    for name, expected in {"mellum": plain(), "gemma3": plain(), "gpt-oss": np.array(yarn(4, 4096))}.items():
        layers = read(tmp_path, name, **scaling, **{WINDOW: 8, PATTERN: 2}).layers
        check(layers[0], expected)
        check(layers[1], np.array(yarn(4, 4096)))


def test_factors_of_each_pair(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, DIM // 2, dtype=np.float32)
    tensors = [("rope_freqs.weight", factors, None)]
    for layer in read(tmp_path, "llama", tensors).layers:
        check(layer, plain() / factors)
    windowed, full = read(tmp_path, "gemma4", tensors, **LISTED).layers[:2]
    check(windowed, plain())
    check(full, plain() / factors)
    windowed, full = read(tmp_path, "step35", tensors, **LISTED).layers[:2]
    check(windowed, plain())
    check(full, plain(dim=32) / factors[:16])
    with pytest.raises(kvcache.ModelFileError, match="rope_freqs must be 16 positive numbers"):
        read(tmp_path, "llama", tensors, **{"rope.dimension_count": 32})


@pytest.mark.parametrize(
    ("fields", "tensors", "name"),
    [
        ({"rope.scaling.type": "longrope"}, [], "longrope"),
        ({}, ["rope_factors_long.weight", "rope_factors_short.weight"], "longrope"),
        ({"rope.scaling.type": "spiral"}, [], "spiral"),
    ],
)
def test_rotations_that_depend_on_the_length(
    tmp_path: Path, fields: dict[str, Any], tensors: list[str], name: str
) -> None:
    written = [(tensor, np.ones(DIM // 2, np.float32), None) for tensor in tensors]
    shape = read(tmp_path, "phi3", written, **fields)
    assert all(callable(layer.rope) and f"'{name}'" in getattr(layer.rope, "reason", "") for layer in shape.layers)


@pytest.mark.parametrize(
    ("architecture", "fields", "interleaved"),
    [
        *((name, {}, False) for name in ("plamo", "orion", "deepseek2-ocr", "qwen2vl", "qwen3vl", "glm4moe")),
        *((name, {}, True) for name in ("glm4", "granitehybrid", "bailingmoe", "plm", "mistral4", "llada")),
        *((name, {}, True) for name in ("maincoder", "nanbeige", "llama-embed", "hy_v4", "eagle3")),
        ("cohere2moe", {WINDOW: 8}, True),
        ("glm4", {"rope.dimension_sections": [0, 0, 0, 0]}, True),
        ("glm4", {"rope.dimension_sections": [8, 12, 12, 0]}, False),
        ("bailingmoe3", {"rope.dimension_sections": [8, 12, 12]}, False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pairs(tmp_path: Path, architecture: str, fields: dict[str, Any], interleaved: bool) -> None:
    rope = read(tmp_path, architecture, **fields).layers[1].rope
    assert isinstance(rope, Rope)
    assert rope.interleaved is interleaved


def test_every_architecture_has_one_kind_of_pairs() -> None:
    kinds = [gguf_tables.HALVES, gguf_tables.NEIGHBOURS, gguf_tables.UNROTATED]
    assert sum(map(len, kinds)) == len(set.union(*kinds))


# ---- keys that move


def turned(
    keys: NDArray[Any], positions: NDArray[Any], frequencies: NDArray[Any] | None, pairs: str, first: int
) -> NDArray[Any]:
    """Rotate keys [tokens, heads, dim] pair by pair, in float64."""
    out = np.array(keys, np.float64)
    for i, frequency in enumerate([] if frequencies is None else frequencies):
        n = len(frequencies)  # type: ignore[arg-type]  # not None, as there is one
        a, b = (2 * i, 2 * i + 1) if pairs == "neighbours" else (i, i + n)
        x, y = keys[..., first + a].astype(np.float64), keys[..., first + b].astype(np.float64)
        angle = positions[:, None] * frequency
        out[..., first + a] = x * np.cos(angle) - y * np.sin(angle)
        out[..., first + b] = x * np.sin(angle) + y * np.cos(angle)
    return out


MLA = {"attention.kv_lora_rank": 64, "attention.key_length": 96, "attention.value_length": 64}
MLA |= {"attention.key_length_mla": 64, "attention.value_length_mla": 64, "rope.dimension_count": 32}


@pytest.mark.parametrize(
    ("architecture", "fields", "pairs", "expected", "first"),
    [
        ("orion", {}, "halves", [plain()] * 4, 0),
        ("plamo", {}, "halves", [plain()] * 4, 0),
        ("glm4", {"rope.dimension_count": 32}, "neighbours", [plain(dim=32)] * 4, 0),
        ("maincoder", {"rope.scaling.factor": 2.0}, "neighbours", [plain() / 2] * 4, 0),
        ("cohere2moe", {WINDOW: 16}, "neighbours", [None] + [plain()] * 3, 0),
        ("gemma3", {WINDOW: 16, PATTERN: 2, **LINEAR}, "halves", [plain(), plain(1e6) / 8] * 2, 0),
        ("step35", {**LISTED, WINDOW: 16, "rope.freq_base": 5e6}, "halves", [plain(), plain(5e6, 32)] * 2, 0),
        ("granite", {"rope.scaling.finetuned": False}, "neighbours", [None] * 4, 0),
        ("nemotron_h", {}, "halves", [None] * 4, 0),
        ("mistral4", MLA, "neighbours", [plain(dim=32)] * 4, 64),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keys_that_move_are_as_keys_rotated_anew(
    tmp_path: Path, architecture: str, fields: dict[str, Any], pairs: str, expected: list[Any], first: int
) -> None:
    read(tmp_path, architecture, **fields)
    cache = kvcache.KVCache.from_config(tmp_path / "model.gguf", dtype="f32", max_seq_len=32)
    rng = np.random.default_rng(1)
    raw = [rng.standard_normal((9, layer.num_kv_heads, layer.head_dim)) for layer in cache.layers]
    values = [rng.standard_normal((9, layer.num_kv_heads, layer.v_head_dim)) for layer in cache.layers]
    with cache.batch(9) as batch:
        for i, keys in enumerate(raw):
            stored = turned(keys, np.arange(9), expected[i], pairs, first).astype(np.float32)
            v = None if cache.layers[i].value_in_key else values[i].astype(np.float32)
            batch.put(i, stored, v)
    cache.remove(2, 5)
    for i, keys in enumerate(raw):
        found = np.swapaxes(cache.gather(i)[0], 0, 1)
        kept = turned(keys[[0, 1, 5, 6, 7, 8]], np.arange(6), expected[i], pairs, first)
        np.testing.assert_allclose(found, kept, atol=2e-5)


# ---- what is refused


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("mllama", {}, "architecture 'mllama' is unknown.*give the model's config.json, or the sizes of the layers"),
        ("qwen3", {WINDOW: 8}, "names a window, but not which layers of a qwen3 have it"),
        ("mimo2", {WINDOW: 8}, "names a window, but not which layers of a mimo2 have it"),
        ("modern-bert", {WINDOW: 8}, "windows reach to both sides"),
        ("gemma-embedding", {WINDOW: 8}, "windows reach to both sides"),
        *((name, {}, "state is not keys and values") for name in ("mamba", "mamba2", "rwkv6", "arwkv7")),
        *((name, {}, f"a {name} is not supported, as it is an encoder") for name in ("t5encoder", "bert", "eurobert")),
        ("gptj", {}, "llama.cpp has no loader"),
        ("gemma4-assistant", {}, "another model's rows"),
        ("deepseek2", {"attention.indexer.top_k": 2048}, "keys of an indexer"),
        ("dflash", {"hyper_connection.count": 4}, "keys without values"),
        # Fields that say what layers are: of another architecture, and of another program.
        ("qwen3", {"full_attention_interval": 4}, "what 'full_attention_interval' says about the layers of a qwen3"),
        ("llama", {"attention.recurrent_layers": [True] * 4}, "what 'attention.recurrent_layers' says"),
        ("llama", {"num_loops": 2}, "what 'num_loops' says"),
        ("granitehybrid", {"attention.layer_indices": [1]}, "what 'attention.layer_indices' says"),
        ("llama", {"attention.chunk_size": 64}, "what 'attention.chunk_size' says"),
        ("llama", {"attention.compress_ratios": [4] * 4}, "what 'attention.compress_ratios' says"),
        ("llama", {"attention.cross_attention_layers": [1]}, "what 'attention.cross_attention_layers' says"),
        ("qwen3", {"rope.local.freq_scale": 0.5}, "what 'rope.local.freq_scale' says"),
        ("jamba", {KV_HEADS: 0}, "no layer of this jamba has keys and values"),
    ],
)
def test_what_no_policy_stands_for(tmp_path: Path, architecture: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(kvcache.NotSupportedError, match=words):
        read(tmp_path, architecture, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_count": None}, "block_count"),
        ({"nextn_predict_layers": 4}, "nextn_predict_layers must be a whole number from 0 to 3, not 4"),
        ({HEADS: [8, 8, 8]}, "attention.head_count must have one entry for each of the 4 layers, not 3"),
        ({KV_HEADS: [2, 2, 2, -1]}, "layer 3: attention.head_count_kv must be a whole number from 0 to 1024, not -1"),
        ({KV_HEADS: [2.0] * 4}, "layer 0: attention.head_count_kv"),
        ({KV_HEADS: [2] * 5000}, "attention.head_count_kv must be a whole number from 0 to 1024, not Skipped"),
        ({KV_HEADS: 3}, "8 attention heads are not a multiple of 3"),
        ({WINDOW: 8, PATTERN: [True]}, "sliding_window_pattern must have one entry for each of the 4 layers"),
        ({PATTERN: [True] * 4}, "names layers with a window, and attention.sliding_window is missing"),
        ({WINDOW: 1.5}, "attention.sliding_window must be a whole number"),
        ({WINDOW: 8, PATTERN: "LLG"}, "sliding_window_pattern must be a whole number"),
        ({"attention.key_length": 0}, "attention.key_length"),
        ({"embedding_length": None}, "there is no field 'attention.key_length'"),
        ({"rope.dimension_count": 66}, "rotary_dim must be a whole number from 2 to 64, not 66"),
        ({"rope.freq_base": -1.0}, "rope.freq_base must be a positive number, not -1.0"),
        ({"rope.scaling.factor": -1.0}, "factor must be a positive number, not -1.0"),
        ({"rope.scaling.type": 3}, "rope.scaling.type must be a string"),
        ({"attention.rope_pattern": [True]}, "attention.rope_pattern must have one entry for each of the 4 layers"),
    ],
    ids=str,
)
def test_bad_fields_are_named(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(kvcache.ModelFileError, match=words):
        read(tmp_path, "llama", **fields)


def test_fields_about_something_else(tmp_path: Path) -> None:
    fields = {"expert_group_count": 1, "leading_dense_block_count": 1, "rope.freq_base_swa": 5e3, "foo": 1}
    assert read(tmp_path, "glm4moe", **fields) == read(tmp_path, "glm4moe")


IMAGES = {"vision.block_count": 27, "vision.window_size": 112, "mm.tokens_per_image": 256}


@pytest.mark.parametrize(
    ("architecture", "fields", "same", "as_llama_cpp"),
    [
        ("gptoss", {WINDOW: 128, "rope.scaling.factor": 32.0}, "gpt-oss", {"rope.scaling.type": "yarn"}),
        ("qwen25vl", {**IMAGES, "rope.mrope_section": [16, 24, 24]}, "qwen2vl", {}),
        ("olmo3", {WINDOW: 9, PATTERN: [True, True, True, False]}, "olmo2", {}),
        ("glmocr", {**IMAGES, "rope.mrope_section": [8, 12, 12]}, "glm4", {"rope.dimension_sections": [8, 12, 12]}),
        ("deepseekocr", {**IMAGES, "sam.block_size": None}, "deepseek2-ocr", {}),
        ("nemotron_h_omni", {**IMAGES, "audio.block_count": 24, KV_HEADS: [0, 2, 0, 2]}, "nemotron_h", {}),
        ("mistral3", {**IMAGES, "vision.rope.freq_base": 1e4, "rope.freq_base": 1e9}, "mistral3", {}),
        ("llama4", {**IMAGES, "attention.chunk_size": 8192}, "llama4", {}),
        (
            "gemma3",
            {WINDOW: 8, "rope.global.freq_base": 1e6, "rope.local.freq_base": 2e4},
            "gemma3",
            {"rope.freq_base": 1e6, "rope.freq_base_swa": 2e4},
        ),
        (
            "gemma3",
            {WINDOW: 8, **IMAGES},
            "gemma3",
            {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        ),
        ("gemma3n", {WINDOW: 8, "rope.freq_base_local": 2e4, "head_dim": 64}, "gemma3n", {"rope.freq_base_swa": 2e4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_of_ollama(
    tmp_path: Path, architecture: str, fields: dict[str, Any], same: str, as_llama_cpp: dict[str, Any]
) -> None:
    """They have names of their own, and the keys of an encoder beside the decoder's."""
    plain = {name: fields[name] for name in USUAL.keys() | {WINDOW, PATTERN} if name in fields}
    plain |= {name: fields[name] for name in ("rope.freq_base", "rope.scaling.factor") if name in fields}
    assert read(tmp_path, architecture, **fields) == read(tmp_path, same, **{**plain, **as_llama_cpp})


def test_llama_cpps_own_name_counts_first(tmp_path: Path) -> None:
    fields = {WINDOW: 8, "rope.freq_base_swa": 5e4}
    assert read(tmp_path, "gemma3", **fields, **{"rope.local.freq_base": 1e4}) == read(tmp_path, "gemma3", **fields)


@pytest.mark.parametrize(
    ("general", "words"),
    [
        ({"general.type": "adapter"}, "is an adapter, which changes a model's weights: give the model's own file"),
        ({"adapter.type": "lora"}, "is an adapter"),
        ({"general.type": "imatrix"}, "is statistics for a quantisation"),
        ({"split.no": 1, "split.count": 3}, "is a later part of a model: give the first, whose name has 00001-of-"),
    ],
)
def test_files_without_a_model(tmp_path: Path, general: dict[str, Any], words: str) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", "llama", general)
    with pytest.raises(kvcache.ModelFileError, match=words):
        shapes.read(path)


def test_the_first_part_of_a_model_has_its_layers(tmp_path: Path) -> None:
    metadata = {f"llama.{name}": value for name, value in USUAL.items()}
    path = gguf_files.write(tmp_path / "model.gguf", "llama", {**metadata, "split.no": 0, "split.count": 3})
    assert len(shapes.read(path).layers) == 4


def test_windows_that_a_file_must_have(tmp_path: Path) -> None:
    for name, rule in gguf_tables.WINDOWS.items():
        if rule.size is None:
            with pytest.raises(kvcache.ModelFileError, match=r"there is no field 'attention\.sliding_window'"):
                read(tmp_path, name)
