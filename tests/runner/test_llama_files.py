"""Models of Llama's family from folders and from GGUF files: each against the other, and against plain NumPy."""

import dataclasses
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from support import gguf_files
from support.attention import attend
from support.rotation import rotated
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvcache import FullAttention, KVCache, ModelFileError, NotSupportedError, Rope, SlidingWindow, runner
from kvcache.layer import DTYPES
from kvcache.models import shapes
from kvcache.models.weights import F32
from kvcache.runner import llama

Weights = dict[str, F32]
HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, LAYERS = 128, 96, 4, 2, 32, 256, 2
EPS = 2.0**-17  # which f32 holds, as GGUF files do
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
}
KINDS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate"} | {
    **{f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"},
    **{f"self_attn.{n}_norm": f"attn_{n}_norm" for n in "qk"},
    **{"self_attn.o_proj": "attn_output", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"},
}
TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, VOCAB, 90)]


def random_weights(model_type: str = "llama", tied: bool = False, seed: int = 1) -> Weights:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> F32:
        return rng.standard_normal((rows, columns), np.float32) * np.float32(1.5 / columns**0.5)

    def vector(n: int, around: float) -> F32:
        return (around + 0.2 * rng.standard_normal(n)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": vector(HIDDEN, 1)}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        for name, rows in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
            weights[f"{p}self_attn.{name}_proj.weight"] = matrix(rows, HIDDEN)
            if model_type == "qwen2":
                weights[f"{p}self_attn.{name}_proj.bias"] = vector(rows, 0)
            if model_type == "qwen3" and name != "v":
                weights[f"{p}self_attn.{name}_norm.weight"] = vector(DIM, 1)
        weights[f"{p}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * DIM)
        weights[f"{p}mlp.gate_proj.weight"], weights[f"{p}mlp.up_proj.weight"] = (
            matrix(INNER, HIDDEN),
            matrix(INNER, HIDDEN),
        )
        weights[f"{p}mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        weights[f"{p}input_layernorm.weight"], weights[f"{p}post_attention_layernorm.weight"] = (
            vector(HIDDEN, 1),
            vector(HIDDEN, 1),
        )
    if not tied:
        weights["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    return weights


def write_folder(folder: Path, weights: Mapping[str, NDArray[Any]], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(dict(weights), folder / "model.safetensors")
    return folder


def name_in_gguf(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{KINDS[part]}.{kind}"
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[stem] + f".{kind}"


def neighbours(rows: F32, head_dim: int) -> F32:
    """The rows of queries and keys in the order that converters to llama.cpp give them."""
    ordered: F32 = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    return ordered


def write_gguf(
    path: Path,
    weights: Weights,
    dtype: str = "F32",
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    head_dim: int = DIM,
    rope_freqs: NDArray[Any] | None = None,
) -> tuple[Path, Weights]:
    """Write a file of these weights; return its path, and the weights as rounded by their type.

    Converters write the scaling of Llama 3 among the weights, as `rope_freqs`.
    """
    config = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "vocab_size": VOCAB,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": EPS,
        "rope.freq_base": 5000.0,
        "rope.dimension_count": head_dim,
    }
    tensors, decoded = [], {}
    for name, weight in weights.items():
        kind = gguf.GGMLQuantizationType[dtype if weight.ndim == 2 else "F32"]
        stored = weight
        if architecture == "llama" and (".q_proj" in name or ".k_proj" in name):
            stored = neighbours(weight, head_dim)
        tensors.append((name_in_gguf(name), gguf.quants.quantize(stored, kind), kind))
        decoded[name] = np.array(gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind))
    if rope_freqs is not None:
        tensors.append(("rope_freqs.weight", rope_freqs.astype(np.float32), None))
    written = {f"{architecture}.{key}": value for key, value in config.items()} | {**(metadata or {})}
    return gguf_files.write(path, architecture, written, tensors), decoded


def logits(model: runner.Llama, tokens: list[int] = TOKENS, **changes: Any) -> F32:
    with runner.new_cache(model.config, runner.Options(**{"dtype": "f32", **changes})) as cache:
        return model.forward(tokens, cache)


def expected(
    weights: Weights, rope: NDArray[np.float64], tokens: list[int] = TOKENS, window: int = 2**31
) -> NDArray[np.float64]:
    """The whole model in float64."""

    def norm(x: NDArray[Any], name: str) -> NDArray[Any]:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weights[name] if name in weights else x

    def heads(x: NDArray[Any], p: str, is_rotated: bool) -> NDArray[Any]:
        rows = x @ weights[f"{p}_proj.weight"].T + weights.get(f"{p}_proj.bias", np.zeros(1))
        rows = norm(rows.reshape(len(x), -1, DIM), f"{p}_norm.weight")
        if is_rotated:
            rows = rotated(rows, np.arange(len(x))[:, None], Rope(rope))
        return rows

    x = weights["model.embed_tokens.weight"].astype(float)[tokens]
    past = np.arange(len(x))[:, None] - np.arange(len(x))
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        y = norm(x, f"{p}input_layernorm.weight")
        q, k, v = (heads(y, f"{p}self_attn.{n}", n != "v") for n in "qkv")
        out = attend(q, k, v, (past >= 0) & (past < window))
        x = x + out.reshape(len(x), -1) @ weights[f"{p}self_attn.o_proj.weight"].T
        y = norm(x, f"{p}post_attention_layernorm.weight")
        gate = y @ weights[f"{p}mlp.gate_proj.weight"].T
        x = (
            x
            + (gate / (1 + np.exp(-gate)) * (y @ weights[f"{p}mlp.up_proj.weight"].T))
            @ weights[f"{p}mlp.down_proj.weight"].T
        )
    output = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return np.asarray(norm(x, "model.norm.weight") @ output.T)


PLAIN = 5000.0 ** -(np.arange(0, DIM, 2) / DIM)


def close(found: F32, wanted: NDArray[Any], atol: float = 2e-4) -> None:
    assert np.abs(wanted).max() > 1
    np.testing.assert_allclose(found, wanted, atol=atol)


# --- weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_every_type(tmp_path: Path, dtype: str, tied: bool) -> None:
    weights = random_weights(tied=tied)
    path, decoded = write_gguf(tmp_path / "model.gguf", weights, dtype)
    folder = write_folder(tmp_path / "folder", decoded, tie_word_embeddings=tied)
    file = runner.Llama.load(path)
    assert file.config == runner.Llama.load(folder).config
    assert file.config.tie_word_embeddings is tied
    found = logits(file)
    np.testing.assert_allclose(found, logits(runner.Llama.load(folder)), atol=1e-5)
    close(found, expected(decoded, PLAIN))
    exact = expected(weights, PLAIN)
    error = np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2))
    bounds = {"F32": (0, 1e-5), "F16": (1e-4, 3e-3), "BF16": (1e-3, 3e-2), "Q8_0": (1e-3, 0.1), "Q4_0": (0.1, 0.9)}
    assert bounds[dtype][0] <= error < bounds[dtype][1]


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_architecture(tmp_path: Path, model_type: str) -> None:
    weights = random_weights(model_type)
    folder = runner.Llama.load(write_folder(tmp_path, weights, model_type=model_type, sliding_window=None))
    architecture = "llama" if model_type == "mistral" else model_type
    file = runner.Llama.load(write_gguf(tmp_path / "model.gguf", weights, architecture=architecture)[0])
    assert file.config == folder.config
    close(logits(folder), expected(weights, PLAIN))
    np.testing.assert_array_equal(logits(file), logits(folder))


def test_a_shift_is_of_the_keys_as_they_are_stored(tmp_path: Path) -> None:
    """The cache rotates queries as the model does, whatever the order of rows in the file."""
    file = runner.Llama.load(write_gguf(tmp_path / "model.gguf", random_weights())[0])
    assert file.config.rope == Rope(PLAIN)
    with runner.new_cache(file.config, runner.Options(dtype="f32", shift=True)) as cache:
        file.forward(TOKENS, cache)
        runner.shift_context(cache, 4)
        moved = file.forward(TOKENS[:5], cache)
        cache.truncate(cache.next_position() - 5)
        np.testing.assert_allclose(file.forward(TOKENS[:5], cache), moved, atol=1e-4)


def test_a_cache_that_rotates_otherwise(tmp_path: Path) -> None:
    """A file's own rotation is of neighbours, and the model computes with halves: moved queries would be wrong."""
    path, _ = write_gguf(tmp_path / "model.gguf", random_weights())
    file = runner.Llama.load(path)
    with KVCache.from_config(path) as cache:
        with pytest.raises(runner.LlamaError, match=r"cache: layer 0 rotates .* give rope=model\.config\.rope"):
            file.forward(TOKENS, cache)
        assert cache.seq_len() == 0
    with KVCache.from_config(path, rope=file.config.rope) as cache:
        file.forward(TOKENS, cache)
    with KVCache.from_config(path, rope=None) as cache:  # nothing can move
        file.forward(TOKENS, cache)


# --- rotation ----------------------------------------------------------------------------------------------------


def llama3(inv_freq: float, factor: float, low: float, high: float, context: int) -> float:
    """Published with Llama 3.1: waves that are long for the old context are stretched, and those between in part."""
    wavelength = 2 * np.pi / inv_freq
    if wavelength < context / high:
        return inv_freq
    if wavelength > context / low:
        return inv_freq / factor
    smooth = (context / wavelength - low) / (high - low)
    return float((1 - smooth) * inv_freq / factor + smooth * inv_freq)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_llama3_scaling(tmp_path: Path) -> None:
    weights = random_weights()
    scaled = np.array([llama3(f, 8.0, 1.0, 4.0, 64) for f in PLAIN])
    assert len({*(PLAIN / scaled).round(3)}) > 3  # some stay, some are divided, some between
    folder = runner.Llama.load(write_folder(tmp_path, weights, rope_scaling={"rope_type": "llama3", **LLAMA3}))
    np.testing.assert_allclose(folder.config.rope.inv_freq, scaled, rtol=1e-12)
    close(logits(folder), expected(weights, scaled))
    path = write_gguf(tmp_path / "model.gguf", weights, rope_freqs=PLAIN / scaled)[0]
    file = runner.Llama.load(path)
    np.testing.assert_allclose(file.config.rope.inv_freq, scaled, rtol=1e-6)
    same = Rope(file.config.rope.inv_freq, interleaved=True)
    assert [layer.rope for layer in shapes.read(path).layers] == [same] * LAYERS
    np.testing.assert_allclose(logits(file), logits(folder), atol=1e-4)


def test_linear_scaling(tmp_path: Path) -> None:
    weights = random_weights()
    folder = runner.Llama.load(write_folder(tmp_path, weights, rope_scaling={"type": "linear", "factor": 4.0}))
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    file = runner.Llama.load(write_gguf(tmp_path / "model.gguf", weights, metadata=scaling)[0])
    np.testing.assert_allclose(file.config.rope.inv_freq, folder.config.rope.inv_freq, rtol=1e-12)
    close(logits(file), expected(weights, PLAIN / 4))


def test_files_older_than_rope_theta(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_weights(), rope_theta=None)
    assert runner.LlamaConfig.read(folder).rope == Rope(10000.0 ** -(np.arange(0, DIM, 2) / DIM))


# --- windows -----------------------------------------------------------------------------------------------------


def test_a_share_of_a_prompt_where_every_layer_has_a_window(tmp_path: Path) -> None:
    """It is refused before the prompt is read."""
    folder = write_folder(tmp_path, random_weights(), model_type="mistral", sliding_window=20)
    config = runner.LlamaConfig.read(folder)
    with pytest.raises(NotSupportedError, match="no layer of the cache keeps the rows of all tokens"):
        runner.new_cache(config, runner.Options(dtype="f32", keep=0.25))


def test_a_model_s_own_window(tmp_path: Path) -> None:
    weights = random_weights()
    model = runner.Llama.load(write_folder(tmp_path, weights, model_type="mistral", sliding_window=20))
    assert model.config.policy == (SlidingWindow(20),) * LAYERS
    close(logits(model), expected(weights, PLAIN, window=20))
    close(logits(model, window=7), expected(weights, PLAIN, window=7))
    close(logits(model, window=70), expected(weights, PLAIN, window=20))
    file = runner.Llama.load(
        write_gguf(tmp_path / "model.gguf", weights, metadata={"llama.attention.sliding_window": 20})[0]
    )
    assert file.config.policy == model.config.policy


def test_layers_with_and_without_a_window(tmp_path: Path) -> None:
    config = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    folder = write_folder(tmp_path, random_weights("qwen2"), **config)
    model = runner.Llama.load(folder)
    assert model.config.policy == (FullAttention(), SlidingWindow(9))
    with runner.new_cache(model.config, runner.Options(window=30, num_sink_tokens=2)) as cache:
        assert "SlidingWindow(window=9, num_sink_tokens=2" in repr(cache)
        assert "SlidingWindow(window=30, num_sink_tokens=2" in repr(cache)


# --- a whole run -------------------------------------------------------------------------------------------------


def byte_level(folder: Path) -> Tokenizer:
    """A tokenizer of 250 bytes as they are written, three of their pairs, and two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("c", "d")]
    found = ["<s>", "</s>", *alphabet[:251], *("".join(pair) for pair in merges)]
    model = Tokenizer(models.BPE({token: i for i, token in enumerate(found)}, merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<s>", "</s>"])
    model.save(str(folder / "tokenizer.json"))
    return model


def run(path: Path, **changes: Any) -> str:
    out = io.StringIO()
    assert runner.run(path, b"abcd ab", runner.Options(**{"max_new_tokens": 40, "quiet": True, **changes}), out) == 0
    return out.getvalue()


def test_a_text_from_a_folder_and_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = random_weights()
    folder = write_folder(tmp_path, weights, eos_token_id=1)
    model = byte_level(folder)
    vocabulary = sorted(model.get_vocab(), key=lambda token: model.get_vocab()[token])
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(vocabulary) - 2),
        "tokenizer.ggml.merges": ["a b", "Ġ a", "c d"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    file = write_gguf(tmp_path / "model.gguf", weights, metadata=metadata)[0]
    texts = [run(path) for path in (folder, file)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("abcd ab")
    assert len(texts[0]) > 20
    assert "eval.txt" not in capsys.readouterr().err
    (tmp_path / "eval.txt").write_text("abcd " * 500)
    table = run(file, quiet=False, compare=True, max_new_tokens=4, dtype="q8_0")
    assert [line.split()[0] for line in table.splitlines()[-len(DTYPES) :]] == list(DTYPES)


@pytest.mark.parametrize("dtype", ["F16", "Q8_0"])
def test_the_model_of_the_examples_as_a_file(tmp_path: Path, dtype: str) -> None:
    source = Path(__file__).parents[2] / "examples" / "model"
    expected = json.loads((source / "expected.json").read_text())
    config = {
        "block_count": 4,
        "context_length": 2048,
        "embedding_length": 256,
        "feed_forward_length": 704,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }
    weights = {name: weight.astype(np.float32) for name, weight in load_file(source / "model.safetensors").items()}
    metadata = {f"llama.{key}": value for key, value in config.items()}
    path = write_gguf(tmp_path / "model.gguf", weights, dtype, metadata=metadata, head_dim=64)[0]
    out = io.StringIO()
    options = runner.Options(dtype="f32", temperature=0, max_new_tokens=250, quiet=True)
    assert runner.run(path, expected["prompt"].encode(), options, out) == 0
    length = len(expected["greedy"]) if dtype == "F16" else 30  # which the coarser weights leave as it is
    assert out.getvalue()[:length] == expected["greedy"][:length]


def test_the_model_ends_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path, random_weights(), max_position_embeddings=64)
    out = io.StringIO()
    runner.run(folder, b"abcd", runner.Options(temperature=0, max_new_tokens=100), out)
    assert "stopped at 64 tokens" in capsys.readouterr().err
    with runner.new_cache((model := runner.Llama.load(folder)).config, runner.Options()) as cache:
        speeds = runner.Speed(), runner.Speed()
        text = list(runner.generate(model, cache, list(b"abcd"), 20, lambda row: int(row.argmax()), *speeds))
    stop = text[12]
    write_folder(tmp_path, random_weights(), max_position_embeddings=64, eos_token_id=stop)
    out = io.StringIO()
    assert runner.run(folder, b"abcd", runner.Options(temperature=0, max_new_tokens=100), out) == 0
    (speeds_line,) = capsys.readouterr().err.splitlines()  # and no notice of a full context
    assert f"; decode {text.index(stop)} tokens, " in speeds_line


def test_progress_of_a_long_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path, random_weights())
    monkeypatch.setattr(llama, "PREFILL_TOKENS", 40)
    calls: list[tuple[int, int]] = []
    options = runner.Options(max_new_tokens=3, quiet=True)
    runner.run(folder, b"x" * 100, options, io.StringIO(), on_prefill=lambda done, of: calls.append((done, of)))
    assert calls == [(0, 100), (40, 100), (80, 100), (100, 100)]


def test_windows_of_a_text_begin_as_texts_do(tmp_path: Path) -> None:
    class WithBos:
        bos, stop = 7, frozenset[int]()

        def encode(self, text: str | bytes) -> list[int]:
            assert isinstance(text, bytes)
            return [7, *text]

        def decode(self, tokens: Any) -> bytes:
            raise NotImplementedError

    path = tmp_path / "eval.txt"
    path.write_bytes(bytes(range(10, 21)))
    assert runner.read_windows(path, WithBos(), 5) == [[7, 10, 11, 12, 13], [7, 14, 15, 16, 17], [7, 18, 19, 20]]
    assert runner.read_windows(path, WithBos(), 1)[0] == [7, 10]
    assert runner.read_windows(tmp_path / "none.txt", WithBos(), 5) == []


# --- what will not do --------------------------------------------------------------------------------------------


def test_tokens_of_another_model(tmp_path: Path) -> None:
    weights = random_weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:60]
    folder = write_folder(tmp_path, weights, vocab_size=60)
    byte_level(folder)
    out = io.StringIO()
    with pytest.raises(runner.LlamaError, match=r"token \d+ is none of the model's 60"):
        runner.run(folder, b"abcd", runner.Options(), out)
    assert out.getvalue() == ""
    model = runner.Llama.load(folder)
    for token in (60, -1):
        with pytest.raises(runner.LlamaError, match=f"token {token} is none of the model's 60"):
            logits(model, [1, token])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "only models whose heads are rotated as a whole, and all alike"),
        ({"v_head_dim": 16}, "its layers differ, or their keys and values do"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
    ],
)
def test_configurations_that_are_not_supported(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_folder(tmp_path, random_weights(), **changes)
    (folder / "model.safetensors").unlink()  # which would not fit either
    with pytest.raises(ModelFileError, match=message):
        runner.Llama.load(folder)


@pytest.mark.parametrize("factors", [np.zeros(DIM // 2), np.full(DIM // 2, np.nan), -np.ones(DIM // 2), np.ones(7)])
def test_bad_rope_freqs(tmp_path: Path, factors: NDArray[Any]) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_weights(), rope_freqs=factors)[0]
    with pytest.raises(ModelFileError, match="rope_freqs must be 16 positive numbers"):
        runner.Llama.load(path)


def test_bad_tensors_of_a_file(tmp_path: Path) -> None:
    path, weights = tmp_path / "model.gguf", random_weights()

    def load(changes: Weights, without: str = "", **rest: Any) -> None:
        found = {name: weight for name, weight in {**weights, **changes}.items() if name != without}
        runner.Llama.load(write_gguf(path, found, **rest)[0])

    with pytest.raises(ModelFileError, match=r"model\.gguf has no tensor blk\.1\.ffn_up\.weight"):
        load({}, without="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelFileError, match=r"output_norm\.weight has the shape \[7\], where \[128\] is needed"):
        load({"model.norm.weight": np.ones(7, np.float32)})
    with pytest.raises(ModelFileError, match=r"has a tensor blk\.0\.attn_output\.bias, which a plain Llama has not"):
        load({"model.layers.0.self_attn.o_proj.bias": np.ones(HIDDEN, np.float32)})
    with pytest.raises(ModelFileError, match=r"has no tensor blk\.0\.attn_k\.bias"):
        load({"model.layers.0.self_attn.q_proj.bias": np.ones(HIDDEN, np.float32)})
    with pytest.raises(ModelFileError, match="is a part of a model in 3 files; only whole ones are read"):
        load({}, metadata={"split.count": 3})
    with pytest.raises(ModelFileError, match="model_type 'falcon' is not supported"):
        load({}, architecture="falcon")


def test_a_type_that_is_not_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_weights())[0]
    data = path.read_bytes()
    entry = b"output_norm.weight" + (1).to_bytes(4, "little") + HIDDEN.to_bytes(8, "little")
    assert entry + bytes(4) in data
    for number, shown in ((26, "I32"), (4711, "4711")):
        path.write_bytes(data.replace(entry + bytes(4), entry + number.to_bytes(4, "little")))
        with pytest.raises(ModelFileError, match=f"output_norm.weight has the type {shown}, which is not supported"):
            runner.Llama.load(path)


def test_a_file_cut_short(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_weights())[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="goes past the end of the file"):
        runner.Llama.load(path)


@pytest.mark.parametrize("package", ["gguf"])
def test_without_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_weights())[0]
    write_folder(tmp_path, random_weights())
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs the package {package}: pip install 'kvcache\[cli\]'"):
        runner.Llama.load(path if package == "gguf" else tmp_path)


def test_configurations_compare(tmp_path: Path) -> None:
    config = runner.LlamaConfig.read(write_folder(tmp_path, random_weights()))
    assert config != dataclasses.replace(config, rope=Rope([1.0]))
