"""Test the shapes read from model files, the files that are refused, and that transformers' configurations agree."""

import json

import numpy as np
import pytest

import kvcache
from kvcache.models import reading, shapes
from kvcache.policy import ChunkedAttention, CrossAttention, FullAttention, SlidingWindow
from kvcache.rope import Rope

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def windows(shape):
    """Return each layer's window or chunk size; 0 if it sees everything, None if it stores nothing."""
    sizes = {SlidingWindow: "window", ChunkedAttention: "attention_chunk_size", FullAttention: "__len__"}
    return [policy and getattr(policy, sizes[type(policy)], 0) for policy in (layer.policy for layer in shape.layers)]


def rows_of(layer):
    return layer.num_kv_heads, layer.head_dim, layer.v_head_dim


# ---- what files say


def test_llama():
    shape = shapes.read(LLAMA)
    assert (shape.model_type, len(shape.layers), shape.max_seq_len) == ("llama", 4, 8192)
    assert shape.num_heads[0] == 32
    assert rows_of(shape.layers[0]) == (8, 128, 128)
    assert np.allclose(shape.layers[3].rope.inv_freq, 500000.0 ** (-np.arange(0, 128, 2) / 128))
    assert not shape.layers[3].rope.interleaved
    cache = kvcache.KVCache.from_config(LLAMA, dtype="q8_0", max_seq_len=100)
    assert (cache.num_layers, rows_of(cache.layers[0]), cache.max_seq_len) == (4, (8, 128, 128), 100)
    assert cache.layers[0].k_dtype == "q8_0"


def test_folder_file_and_mapping_are_the_same(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert shapes.read(tmp_path) == shapes.read(str(tmp_path / "config.json")) == shapes.read(LLAMA)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, [4096] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [0] * 4),
        ({"model_type": "qwen2", "sliding_window": 99, "use_sliding_window": False, "max_window_layers": 2}, [0] * 4),
        (
            {"model_type": "qwen2", "sliding_window": 99, "use_sliding_window": True, "max_window_layers": 3},
            [0, 0, 0, 99],
        ),
        ({"model_type": "gemma2", "sliding_window": 16}, [16, 0, 16, 0]),
        ({"model_type": "cohere2", "sliding_window": 16, "sliding_window_pattern": 2}, [16, 0, 16, 0]),
        ({"model_type": "exaone4", "sliding_window": 16, "sliding_window_pattern": "LLG"}, [16, 16, 0, 16]),
        ({"model_type": "llama4_text", "attention_chunk_size": 8}, [8, 8, 8, 0]),
        ({"model_type": "llama4_text", "attention_chunk_size": 8, "no_rope_layers": [1, 0, 1, 1]}, [8, 0, 8, 8]),
        ({"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1}, [None, 0, None, 0]),
        ({"model_type": "bamba", "attn_layer_indices": [2]}, [None, None, 0, None]),
        ({"layer_types": ["conv", "full_attention", "hybrid", "moe"]}, [None, 0, 0, None]),
    ],
    ids=lambda value: value.get("model_type", "") if isinstance(value, dict) else "",
)
def test_windows(config, expected):
    assert windows(shapes.read({**LLAMA, **config})) == expected


def test_part_of_a_larger_model_that_leaves_out_what_is_usual():
    shape = shapes.read({"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {}})
    assert (len(shape.layers), shape.num_heads[0], rows_of(shape.layers[0])) == (32, 32, (32, 128, 128))
    part = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    shape = shapes.read({"model_type": "gemma3", "text_config": part})
    assert rows_of(shape.layers[0]) == (4, 256, 256)
    assert windows(shape)[:7] == [1024] * 5 + [0, 1024]
    local, full = shape.layers[0].rope.inv_freq, shape.layers[5].rope.inv_freq
    assert (local[1], full[1]) == pytest.approx((1e4 ** (-2 / 256), 1e6 ** (-2 / 256)))


def test_shared_layers():
    types = ["sliding_attention", "full_attention"] * 2
    given = {**LLAMA, "model_type": "gemma2", "layer_types": types, "sliding_window": 8}
    shape = shapes.read({**given, "num_kv_shared_layers": 2})
    assert tuple(layer.share for layer in shape.layers) == (None, None, 0, 1)
    cache = kvcache.KVCache.from_config(given)
    assert [layer.share for layer in cache.layers] == [None] * 4


def test_latents():
    mla = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    shape = shapes.read({**LLAMA, **mla, "model_type": "deepseek_v3"})
    assert rows_of(shape.layers[0]) == (1, 576, 512)
    assert shape.layers[0].value_in_key
    rope = shape.layers[0].rope
    assert (rope.first_dim, len(rope.inv_freq), rope.interleaved) == (512, 32, False)
    assert all(layer.value_in_key for layer in kvcache.KVCache.from_config({**LLAMA, **mla}).layers)
    assert "int4" in shape.dtypes
    odd = shapes.read({**LLAMA, **mla, "kv_lora_rank": 192})
    assert odd.dtypes == [dtype for dtype in shape.dtypes if dtype not in ("int6", "int4")]
    assert odd.why_not("int4") == "int4 takes a v_head_dim that is a multiple of 256, not 192, in keys of 256"


def test_latents_of_a_file_older_than_their_class_in_transformers():
    mla = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 576, "model_type": "sarvam_mla"}
    scaling = {"factor": 40, "original_max_position_embeddings": 4096, "type": "deepseek_yarn"}
    layer = shapes.read({**LLAMA, **mla, "rope_scaling": scaling}).layers[0]
    assert rows_of(layer) == (1, 576, 512)
    assert layer.rope == shapes.read({**LLAMA, **mla, "rope_scaling": {**scaling, "type": "yarn"}}).layers[0].rope
    assert (layer.rope.first_dim, layer.rope.interleaved) == (512, False)


def test_per_layer_config():
    shape = shapes.read({**LLAMA, "per_layer_config": {"01": {"head_dim": 64, "num_key_value_heads": 4}}})
    assert tuple(layer.head_dim for layer in shape.layers) == (128, 64, 128, 128)
    assert tuple(layer.num_kv_heads for layer in shape.layers) == (8, 4, 8, 8)


@pytest.mark.filterwarnings("ignore:.*there is no model_type")
def test_encoder():
    bart = {"is_encoder_decoder": True, "decoder_layers": 2, "decoder_attention_heads": 4, "d_model": 64}
    shape = shapes.read({**bart, "max_position_embeddings": 100})
    assert tuple(layer.policy for layer in shape.layers) == (FullAttention(),) * 2 + (CrossAttention(100),) * 2
    with pytest.raises(kvcache.NotSupportedError, match="max_source_len"):
        shapes.read(bart)
    cache = kvcache.KVCache.from_config(bart, max_source_len=7)
    assert [layer.policy for layer in cache.layers[2:]] == [CrossAttention(7)] * 2


def test_overrides_go_first():
    cache = kvcache.KVCache.from_config(LLAMA, policy=SlidingWindow(16), rope=None, max_sequences=3, k_dtype="f32")
    assert (cache.layers[0].policy, cache.layers[0].rope, cache.max_sequences) == (SlidingWindow(16), None, 3)
    with pytest.raises(ValueError, match="num_layers=3: the model's cache has 4 layers"):
        kvcache.KVCache.from_config(LLAMA, num_layers=3)
    with pytest.raises(TypeError, match="bogus"):
        kvcache.KVCache.from_config(LLAMA, bogus=1)


def test_layers_without_rows_suit_every_type():
    cache = kvcache.KVCache.from_config({**LLAMA, "layer_types": ["conv", "full_attention"] * 2}, dtype="q4_0")
    assert [layer.policy is None for layer in cache.layers] == [True, False] * 2


# ---- rotations


def test_llama3_frequencies():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    got = shapes.read({**LLAMA, "rope_scaling": scaling}).layers[0].rope.inv_freq
    plain = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    length = 2 * np.pi / plain
    for frequency, before, wave in zip(got, plain, length, strict=True):
        if wave < 8192 / 4:
            assert frequency == pytest.approx(before)
        elif wave > 8192:
            assert frequency == pytest.approx(before / 8)
        else:
            assert before / 8 <= frequency <= before


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "spiral"])
def test_rotations_that_cannot_be_moved_are_refused_by_name(kind):
    config = {**LLAMA, "rope_scaling": {"type": kind, "factor": 4.0}, "hidden_size": 256}
    cache = kvcache.KVCache.from_config(config, max_seq_len=64)
    x = np.ones((4, 8, 8), np.float32)
    with cache.batch(4) as batch:
        for layer in range(4):
            batch.put(layer, x, x)
    for move in (lambda: cache.remove(0, 2), lambda: cache.shift(1, 4, 3)):
        with pytest.raises(kvcache.NotSupportedError, match=kind):
            move()
        assert cache.positions().tolist() == [0, 1, 2, 3]
        cache.validate()
    cache.remove(0, 2, shift=False)
    assert cache.positions().tolist() == [2, 3]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "bloom"}, False),
        ({"model_type": "falcon", "alibi": True}, False),
        ({"model_type": "gpt2", "rope_theta": None}, None),
        ({"position_embedding_type": "nope"}, False),
        ({"rope_theta": None}, kvcache.Rope(1e4 ** (-np.arange(0, 128, 2) / 128))),
    ],
)
def test_models_that_do_not_say_how_they_rotate(config, expected):
    assert [layer.rope for layer in shapes.read({**LLAMA, **config}).layers] == [expected] * 4


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"num_hidden_layers": 4.0}, "num_hidden_layers"),
        ({"num_attention_heads": -1}, "num_attention_heads"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_attention_heads": [4]}, "num_attention_heads"),
        ({"hidden_size": {}}, "hidden_size"),
        ({"hidden_size": 8}, "head_dim"),
        ({"model_type": 7}, "model_type"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number, not 1000"),
        ({"rope_theta": True}, "rope_theta must be a positive number, not True"),
        ({"rope_freqs": [1.0] * 63 + ["x"]}, "rope_freqs"),
        ({"rope_freqs": [1.0]}, "rope_freqs"),
        ({"rope_freqs": [1.0] * 63 + [10**400]}, "rope_freqs must be 64 positive numbers"),
        ({"rope_freqs": [1.0] * 63 + [True]}, "rope_freqs must be 64 positive numbers"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": 3}}, "type"),
        (
            {"model_type": "phi", "partial_rotary_factor": 9.0},
            "partial_rotary_factor must be a positive number of at most 1, not 9.0",
        ),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "mistral", "sliding_window": "wide"}, "sliding_window"),
        ({"no_rope_layers": [1]}, "no_rope_layers"),
        ({"sliding_window": 8, "sliding_window_pattern": 0}, "sliding_window_pattern"),
        (
            {
                "layer_types": ["full_attention", "conv", "hybrid"] * 2,
                "num_hidden_layers": 6,
                "num_kv_shared_layers": 4,
            },
            "layer 2",
        ),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"attn_config": 4}, "attn_config"),
        ({"per_layer_config": [1]}, "per_layer_config"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ],
    ids=str,
)
def test_bad_fields_are_named(change, words):
    with pytest.raises(kvcache.ModelFileError, match=words):
        shapes.read({**LLAMA, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["full_attention"] * 3 + ["indexed_attention"]}, "layer 3.*indexed_attention"),
        ({"layer_types": [["full_attention"]] * 4}, "layer 0"),
        ({"layer_types": ["linear_attention"] * 4}, "keys and values"),
        ({"model_type": "mamba"}, "mamba"),
    ],
    ids=str,
)
def test_what_no_policy_stands_for_is_refused_by_name(change, words):
    with pytest.raises(kvcache.NotSupportedError, match=words):
        shapes.read({**LLAMA, **change})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "JSON object"),
        (b"null", "JSON object"),
        (b"\xff\xfe{", "not JSON"),
        (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "nested"),
        (b'{"num_hidden_layers": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b'{"a": "' + b"x" * reading.MAX_JSON + b'"}', "larger"),
        (b"{}", "num_hidden_layers"),
        (json.dumps({"text_config": {"text_config": {"model_type": [1]}}}).encode(), "model_type"),
    ],
    ids=["empty", "cut", "list", "null", "bytes", "deep", "digits", "large", "nothing", "parts"],
)
def test_hostile_files(tmp_path, data, words):
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(kvcache.ModelFileError, match=words) as error:
        shapes.read(tmp_path)
    assert len(str(error.value)) < 300 + len(str(path))


@pytest.mark.parametrize("name", ["", "adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_is_refused_with_the_name_of_its_model(tmp_path, name):
    fields = {"peft_type": "LORA", "base_model_name_or_path": "a/model", "r": 16}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(kvcache.ModelFileError, match=r"describes an adapter: give the folder of its model, 'a/model'"):
        shapes.read(tmp_path / name)


def test_missing_files(tmp_path):
    with pytest.raises(kvcache.ModelFileError, match=r"has no config\.json"):
        shapes.read(tmp_path)
    with pytest.raises(kvcache.ModelFileError, match="there is no "):
        shapes.read(tmp_path / "nowhere" / "model")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(kvcache.ModelFileError, match=r"config\.json is not a file"):
        shapes.read(tmp_path)
    for source in (None, 3, [LLAMA]):
        with pytest.raises(TypeError, match="config="):
            shapes.read(source)


class Part:
    """A configuration as transformers' classes are."""

    def to_dict(self):
        return {"model_type": "llama", **LLAMA, "num_hidden_layers": 3}


def test_a_part_may_be_an_object():
    assert shapes.read({"model_type": "llava", "text_config": Part()}) == shapes.read(Part())
    for wrong in ("llama", [1], 3, object()):
        with pytest.raises(kvcache.ModelFileError, match="text_config must be an object, not"):
            shapes.read({"model_type": "llava", "text_config": wrong})


def test_a_model_is_not_its_configuration():
    with pytest.raises(TypeError, match="give its config"):
        shapes.read(type("Model", (), {"config": Part()})())


def test_what_a_path_stands_for(tmp_path, monkeypatch):
    original = {"dim": 4096, "n_layers": 2, "n_heads": 32, "n_kv_heads": 8, "norm_eps": 1e-5}
    (tmp_path / "params.json").write_text(json.dumps(original))
    assert [layer.num_kv_heads for layer in shapes.read(tmp_path).layers] == [8, 8]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert shapes.read(tmp_path) == shapes.read(LLAMA)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert shapes.read("~") == shapes.read("~/config.json") == shapes.read(LLAMA)


def test_an_address_is_no_path():
    """The name of a path has one slash less."""
    with pytest.raises(kvcache.ModelFileError, match=r"^https://host/x is an address, and a file or folder of this "):
        shapes.read("https://host/x")


def test_what_would_do_is_said(tmp_path):
    (tmp_path / "b.gguf").touch()
    (tmp_path / "a.gguf").touch()
    with pytest.raises(kvcache.ModelFileError, match=r"has no config\.json: give a GGUF file, such as .*a\.gguf"):
        shapes.read(tmp_path)
    for name in ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"):
        with pytest.raises(
            kvcache.ModelFileError, match=r"kvcache downloads nothing: run `hf download \S+/\S+ --local"
        ):
            kvcache.KVCache.from_config(name)


# ---- safetensors


def write_folder(folder, rows, **config):
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    header = {
        f"model.layers.0.self_attn.{name}_proj.weight": {"dtype": "F16", "shape": [rows, 4096], "data_offsets": [0, 0]}
        for name in "kv"
    }
    data = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)


def test_weights_that_fit_the_configuration(tmp_path):
    write_folder(tmp_path, 1024)
    assert shapes.read(tmp_path) == shapes.read(tmp_path / "model.safetensors") == shapes.read(LLAMA)


def test_weights_of_another_shape(tmp_path):
    write_folder(tmp_path, 4096)
    with pytest.raises(
        kvcache.ModelFileError, match=r"4096 elements for a token, and config\.json says 8 KV heads of 128"
    ):
        shapes.read(tmp_path)
    write_folder(tmp_path, 4096, quantization_config={"load_in_4bit": True})  # packed weights are not checked
    assert shapes.read(tmp_path) == shapes.read(LLAMA)


def test_weights_in_several_files(tmp_path):
    write_folder(tmp_path, 64)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    for file in ("model-1.safetensors", "missing.safetensors", "../model-1.safetensors", 7):
        index = {"weight_map": {"model.layers.0.self_attn.k_proj.weight": file}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        if file == "model-1.safetensors":
            with pytest.raises(kvcache.ModelFileError, match="64 elements"):
                shapes.read(tmp_path)
        else:
            assert len(shapes.read(tmp_path).layers) == 4


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1",
        b"\xff" * 8,
        (2**62).to_bytes(8, "little") + b"{}",
        (9).to_bytes(8, "little") + b"{}",
        b"\2" + b"\0" * 7 + b"[]",
    ],
)
def test_hostile_safetensors(tmp_path, data):
    write_folder(tmp_path, 1024)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(kvcache.ModelFileError, match=r"model\.safetensors"):
        shapes.read(tmp_path)


def test_layers_that_rotate_alike_share_it():
    rope = [layer.rope for layer in shapes.read({**LLAMA, "num_hidden_layers": 100}).layers]
    assert all(other is rope[0] for other in rope)


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 4, "hidden_size": 64}


def indexed(**fields):
    """Return the layers with keys of indexers, of GLM-5 or another type."""
    config = {"model_type": "glm_moe_dsa", "num_hidden_layers": 4, "index_head_dim": 128, **LATENT, **fields}
    return [layer for layer in shapes.read(config).layers if not layer.v_head_dim]


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 4),
        ({"indexer_types": ["full", "shared", "full", "shared"]}, 2),
        ({"index_topk_pattern": "FSSS"}, 1),
        ({"index_topk_pattern": ["full", "full", "shared", "full"]}, 3),
        ({"index_topk_freq": 2}, 3),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 3),
        ({"model_type": "hy_v4"}, 2),
        ({"layer_types": ["full_attention"] * 2 + ["indexed_attention"] * 2}, 2),
        ({"model_type": "mistral_large4_text", "kv_source_layers": [0, 0, 2, 0]}, 4),
    ],
)
def test_keys_of_indexers(fields, count):
    layers = indexed(**fields)
    assert [(layer.num_kv_heads, layer.head_dim) for layer in layers] == [(1, 128)] * count


def test_where_index_keys_are_rotated():
    assert {layer.rope.first_dim for layer in indexed()} == {0}
    assert {layer.rope.first_dim for layer in indexed(model_type="hy_v4")} == {64}
    rotated = [isinstance(layer.rope, Rope) for layer in indexed(model_type="mistral_large4_text")]
    assert rotated == [True, True, True, False]


def test_indexers_that_pool_keys():
    glm5 = {"model_type": "glm5_next_text", "num_hidden_layers": 8, "qk_rope_head_dim": 0, "index_topk": 64}
    shape = shapes.read({**LATENT, **glm5})
    assert [layer.policy is None for layer in shape.layers[:8]] == [True, True, True, False] * 2
    assert [layer.head_dim for layer in shape.layers[3:8:4]] == [512, 512]
    kinds = [(layer.head_dim, layer.v_head_dim, layer.policy, layer.rope) for layer in shape.layers[8:]]
    pooled = (128, 0, FullAttention(stride=16), False)
    assert kinds == [pooled, (256, 0, SlidingWindow(16), False)] * 2
    assert shape.num_heads[8:] == (32, 1, 32, 1)
    assert shape.chosen[3] == 64 + 15
    qwen4 = {
        "model_type": "qwen4_exp_text", "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128,
        "indexer_budget": 2048, "indexer_compress_ratio": 4, "num_hidden_layers": 8, "head_dim": 256,
        "rope_parameters": {"partial_rotary_factor": 0.25},
        "layer_types": ["linear_attention"] * 7 + ["full_attention"],
    }  # fmt: skip
    shape = shapes.read(qwen4)
    assert shape.chosen[7] == 2048 + 3
    pooled, inputs = shape.layers[8:]
    assert (pooled.head_dim, pooled.policy) == (128, FullAttention(stride=4))
    assert len(pooled.rope.inv_freq) == 32
    assert (inputs.head_dim, inputs.policy, inputs.rope) == (128 + 2 * 64, SlidingWindow(4), None)
    assert shapes.read({**qwen4, "layer_types": ["linear_attention"] * 7 + ["indexed_attention"]}) == shape
    with pytest.raises(kvcache.ModelFileError, match="there is no field 'indexer_head_dim'"):
        shapes.read({**qwen4, "indexer_head_dim": None})
    with pytest.raises(kvcache.ModelFileError, match="index_kpool must be a whole number"):
        shapes.read({**LATENT, **glm5, "index_kpool": 0})


V4 = {
    "model_type": "deepseek_v4", "num_hidden_layers": 4, "num_attention_heads": 64, "head_dim": 512, "index_topk": 512,
    "index_n_heads": 64, "index_head_dim": 128, "sliding_window": 128, "o_groups": 8, "num_key_value_heads": 1,
}  # fmt: skip


def test_rows_of_several_tokens_beside_windows():
    shape = shapes.read(V4)
    assert {(layer.head_dim, layer.value_in_key, layer.policy) for layer in shape.layers[:4]} == {
        (512, True, SlidingWindow(128))
    }
    kinds = [(layer.head_dim, layer.v_head_dim, layer.policy) for layer in shape.layers[4:]]
    heavy = [(512, 512, FullAttention(stride=128)), (1024, 0, SlidingWindow(128))]
    sparse = [(512, 512, FullAttention(stride=4)), (2048, 0, SlidingWindow(8))]
    sparse += [(128, 0, FullAttention(stride=4)), (512, 0, SlidingWindow(8))]
    assert kinds == heavy * 3 + sparse
    assert shape.num_heads == (*[64] * 4, *[64, 1] * 4, 64, 1)
    assert shape.chosen == (*[None] * 10, 2048, *[None] * 3)
    assert sum(layer.bytes_per_token for layer in shape.layers if layer.policy == FullAttention(stride=4)) == 4 * 320
    listed = ["heavily_compressed_attention"] * 3 + ["compressed_sparse_attention"]
    assert shapes.read({**V4, "layer_types": listed}) == shape
    assert shapes.read({**V4, "compress_ratios": [128, 128, 128, 4, 0]}) == shape
    assert shapes.read({**V4, "num_hash_layers": 3}) == shape
    assert len(shapes.read({**V4, "compress_ratios": [0, 0, 0, 4]}).layers) == 4 + 4
    rates = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 64}
    for given in ({"compress_rates": rates}, {"compress_rate_csa": 8, "compress_rate_hca": 64}):
        strides = [getattr(layer.policy, "stride", 1) for layer in shapes.read({**V4, **given}).layers[4:]]
        assert strides == [64, 1] * 3 + [8, 1] * 2
    with pytest.raises(kvcache.NotSupportedError, match="which no policy stands for"):
        shapes.read({**V4, "compress_ratios": [128, 128, 7, 4]})
    with pytest.raises(kvcache.NotSupportedError, match="they are the values, too"):
        shape.layers[0].rope(0, np.zeros((1, 512), np.float32), 1)


def test_rows_of_another_layer_beside_keys_of_ones_own():
    config = {"model_type": "mistral_large4_text", "num_hidden_layers": 4, **LATENT, "kv_source_layers": [0, 0, 2, 3]}
    shape = shapes.read(config)
    assert [layer.share for layer in shape.layers] == [None, 0, None, None] + [None] * 4
    assert [layer.head_dim for layer in shape.layers] == [576, 576, 576, 512] + [128] * 4


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"indexer_types": ["full", "some", "full", "full"]}, "indexer_types must have full or shared"),
        ({"indexer_types": [["full"]] * 4}, "indexer_types must have full or shared"),
        ({"index_topk_pattern": "FS"}, "indexer_types must have full or shared"),
        ({"indexer_types": ["full"]}, "indexer_types must have one entry"),
        ({"kv_source_layers": [0, 2, 2, 3]}, "kv_source_layers: layer 1 must read its own rows"),
        ({"kv_source_layers": [0, 0, 1, 3]}, "kv_source_layers: layer 2 must read its own rows"),
        ({"kv_source_layers": [0, "0", 2, 3]}, "kv_source_layers: layer 1 must read its own rows"),
        ({"index_head_dim": 32}, "index_head_dim 32 is less than the 64 elements that are rotated"),
        ({"index_head_dim": "128"}, "index_head_dim must be a whole number"),
    ],
)
def test_indexers_that_cannot_be(fields, said):
    with pytest.raises(kvcache.ModelFileError, match=said):
        indexed(**fields)
