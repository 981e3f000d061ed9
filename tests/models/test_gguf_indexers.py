"""Test that a GGUF of a model with sparse attention has the layers of the model's config.json."""

import json
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from support import gguf_files

import kvcache
from kvcache.models import shapes
from kvcache.rope import Rope
from kvcache.tools.memory_plan import Memory, make

HEADS, KV_HEADS, RATIOS = "attention.head_count", "attention.head_count_kv", "attention.compress_ratios"
INDEXERS = "attention.indexer."
LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256}
AS_LATENTS = {
    "attention.kv_lora_rank": 512, "attention.key_length": 576, "attention.value_length": 512,
    "attention.key_length_mla": 256, "attention.value_length_mla": 256, "rope.dimension_count": 64, KV_HEADS: 1,
}  # fmt: skip
L, S, X, F, XB = "linear_attention", "sliding_attention", "indexed_attention", "full_attention", "minimax_m3_sparse"


class Model(NamedTuple):
    """A model's configuration, and the metadata that llama.cpp's converter makes of it."""

    config: dict[str, Any]
    metadata: dict[str, Any]
    sizes: tuple[int, int, int, int]  # layers, query heads, width, context
    rows: tuple[int, int, int]  # heads of an indexer, length of its keys, rows or blocks that it chooses

    def whole_config(self) -> dict[str, Any]:
        names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")
        indexer = ("index_n_heads", "index_head_dim", "index_topk")
        return dict(zip(names + indexer, self.sizes + self.rows, strict=True)) | self.config

    def whole_metadata(self) -> dict[str, Any]:
        names = ("block_count", HEADS, "embedding_length", "context_length")
        indexer = (f"{INDEXERS}head_count", f"{INDEXERS}key_length", f"{INDEXERS}top_k")
        return dict(zip(names + indexer, self.sizes + self.rows, strict=True)) | self.metadata


MODELS = {
    "deepseek32": Model(
        {"model_type": "deepseek_v32", **LATENTS, "rope_theta": 1e4, "num_nextn_predict_layers": 1, "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        }},
        {**AS_LATENTS, "rope.freq_base": 1e4, "block_count": 62, "nextn_predict_layers": 1,
         "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 4096,
         "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
        (61, 128, 7168, 163840), (64, 128, 2048),
    ),
    "deepseek4": Model(
        {"model_type": "deepseek_v4", "head_dim": 512, "num_key_value_heads": 1, "sliding_window": 128,
         "qk_rope_head_dim": 64, "compress_ratios": [0, 128, 4, 128, 4, 0], "num_hash_layers": 3, "o_groups": 8},
        {"attention.key_length": 512, "attention.value_length": 512, KV_HEADS: 1, "attention.sliding_window": 128,
         "rope.dimension_count": 64, RATIOS: [0, 128, 4, 128, 4, 0], "hash_layer_count": 3,
         "attention.compress_rope_freq_base": 160000.0, "attention.output_group_count": 8},
        (6, 64, 4096, 1 << 20), (64, 128, 512),
    ),
    "dots3note": Model(
        {"model_type": "dots3_note_text", **LATENTS, "layer_types": [X, X, S, S, S, X], "sliding_window": 512,
         "swa_num_attention_heads": 64, "swa_num_key_value_heads": 64, "swa_kv_lora_rank": 1024, "swa_head_dim": 256,
         "swa_qk_nope_head_dim": 192, "swa_qk_rope_head_dim": 64, "swa_v_head_dim": 128,
         "rope_parameters": {S: {"rope_type": "default", "rope_theta": 5e4},
                             X: {"rope_type": "default", "rope_theta": 8e7}}},
        {**AS_LATENTS, HEADS: [128, 128, 64, 64, 64, 128], "attention.sliding_window": 512,
         "attention.sliding_window_pattern": [False, False, True, True, True, False], "rope.freq_base": 8e7,
         "rope.freq_base_swa": 5e4, "attention.kv_lora_rank_swa": 1024, "attention.key_length_swa": 1088,
         "attention.value_length_swa": 1024, "attention.key_length_mla_swa": 256,
         "attention.value_length_mla_swa": 128, f"{INDEXERS}types": [True, True, False, False, False, True]},
        (6, 128, 5120, 524288), (64, 128, 2048),
    ),
    "glm-dsa": Model(
        {"model_type": "glm_moe_dsa", **LATENTS, "rope_theta": 1e6, "first_k_dense_replace": 3},
        {**AS_LATENTS, "rope.freq_base": 1e6, "leading_dense_block_count": 3},
        (78, 64, 6144, 202752), (32, 128, 2048),
    ),
    "glm-dsa, shared": Model(
        {"model_type": "glm_moe_dsa", **LATENTS, "rope_theta": 1e6, "indexer_types": ["full", "shared", "full"]},
        {**AS_LATENTS, "rope.freq_base": 1e6, f"{INDEXERS}types": [True, False, True]},
        (3, 64, 6144, 1 << 20), (32, 128, 2048),
    ),
    "glm-dsa, shared by default": Model(
        {"model_type": "glm_moe_dsa", **LATENTS, "rope_theta": 1e6, "index_topk_freq": 4, "index_skip_topk_offset": 3},
        {**AS_LATENTS, "rope.freq_base": 1e6},
        (12, 64, 6144, 1 << 20), (32, 128, 2048),
    ),
    "glm5-next": Model(
        {"model_type": "glm5_next_text", **LATENTS, "qk_rope_head_dim": 0, "layer_types": [L, X, L, X, X],
         "indexer_types": ["full", "full", "full", "shared", "full"], "index_kpool": 16, "mla_use_nope": True},
        {**AS_LATENTS, "attention.key_length": 512, "rope.dimension_count": 0, KV_HEADS: [0, 1, 0, 1, 1],
         f"{INDEXERS}types": [True, True, True, False, True], f"{INDEXERS}kpool": 16,
         f"{INDEXERS}kpool_select_tail": True, "kda.head_dim": 128, "ssm.conv_kernel": 4},
        (5, 64, 4096, 1 << 20), (32, 128, 2048),
    ),
    "hy_v4": Model(
        {"model_type": "hy_v4", **LATENTS, "rope_theta": 1e4, "indexer_types": ["full", "full", "shared", "shared"]},
        {**AS_LATENTS, "rope.freq_base": 1e4, f"{INDEXERS}types": [True, True, False, False]},
        (4, 32, 2816, 262144), (16, 128, 2048),
    ),
    "minimax-m3": Model(
        {"model_type": "minimax_m3_vl_text", "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 5e6,
         "partial_rotary_factor": 0.5, "sparse_attention_config": {
             "sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_topk_blocks": 16, "sparse_block_size": 128,
             "sparse_attention_freq": [0, 0, 0, 1, 1]}},
        {KV_HEADS: 4, "attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 64,
         "rope.freq_base": 5e6, "leading_dense_block_count": 3, f"{INDEXERS}block_size": 128,
         f"{INDEXERS}local_blocks": 1},
        (5, 64, 6144, 524288), (4, 128, 16),
    ),
    "qwen4exp": Model(
        {"model_type": "qwen4_exp_text", "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
         "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048,
         "indexer_compress_ratio": 4, "layer_types": [L, L, L, F] * 2, "rope_parameters": {
             "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
             "mrope_section": [11, 11, 10], "mrope_interleaved": True}},
        {KV_HEADS: 2, "attention.key_length": 256, "attention.value_length": 256, "full_attention_interval": 4,
         "attention.recurrent_layers": [True, True, True, False] * 2, RATIOS: [0, 0, 0, 4] * 2,
         "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0], "rope.freq_base": 1e7},
        (8, 16, 2048, 262144), (16, 128, 2048),
    ),
}  # fmt: skip


def read(folder, name, **more):
    architecture = name.partition(",")[0]
    metadata = {**MODELS[name].whole_metadata(), **more}
    named = {f"{architecture}.{key}": value for key, value in metadata.items() if value is not None}
    return shapes.read(gguf_files.write(folder / "model.gguf", architecture, named))


def without_order(layer):
    """Return a layer without the order of the elements that rotate together, which is another in a GGUF."""
    return replace(layer, rope=replace(layer.rope, interleaved=False)) if isinstance(layer.rope, Rope) else layer


@pytest.mark.filterwarnings("ignore:.*sparse_attention_config is not read")
@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_has_the_layers_of_its_configuration(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name].whole_config()))
    theirs, ours = shapes.read(tmp_path), read(tmp_path, name)
    assert [*map(without_order, ours.layers)] == [*map(without_order, theirs.layers)]
    assert replace(ours, layers=()) == replace(theirs, layers=())
    assert any(layer.v_head_dim == 0 for layer in ours.layers)
    memory = Memory(1 << 40, "here", 0, "none", None)
    plans = [make(shape, memory, context=8192, dtypes=["f16"]) for shape in (ours, theirs)]
    assert plans[0].rows == plans[1].rows


@pytest.mark.parametrize(
    ("name", "rows", "keys"),
    [
        ("deepseek32", True, False),
        ("dots3note", True, False),
        ("glm-dsa", True, True),
        ("hy_v4", True, True),
        ("minimax-m3", False, False),
        ("qwen4exp", False, False),
    ],
)
def test_which_elements_of_a_key_rotate_together(tmp_path, name, rows, keys):
    """Pairs are neighbours in the rows of some architectures, and halves in the keys of their indexers."""
    layers = [layer for layer in read(tmp_path, name).layers if isinstance(layer.rope, Rope)]
    assert {layer.rope.interleaved for layer in layers if layer.v_head_dim} == {rows}
    assert {layer.rope.interleaved for layer in layers if not layer.v_head_dim} == {keys}


def test_files_without_an_indexer(tmp_path):
    """Hunyuan 4 has models without one; Qwen 4 has layers without one."""
    without = {f"{INDEXERS}{key}": None for key in ("head_count", "key_length", "top_k", "types")}
    assert [layer.v_head_dim for layer in read(tmp_path, "hy_v4", **without).layers] == [512] * 4
    ratios = [0] * 7 + [4]
    assert [layer.v_head_dim for layer in read(tmp_path, "qwen4exp", **{RATIOS: ratios}).layers[8:]] == [0, 0]
    assert len(read(tmp_path, "qwen4exp", **{RATIOS: None}).layers) == 8


def test_one_number_for_all_layers(tmp_path):
    assert read(tmp_path, "qwen4exp", **{RATIOS: 4}) == read(tmp_path, "qwen4exp")
    assert len(read(tmp_path, "deepseek4", **{RATIOS: 128}).layers) == 6 * 3
    types = f"{INDEXERS}types"
    assert read(tmp_path, "glm-dsa", **{types: True}) == read(tmp_path, "glm-dsa")


def test_layers_that_only_draft_tokens(tmp_path):
    """Older files of DeepSeek V4 count such layers, and do not have them."""
    assert read(tmp_path, "deepseek4", nextn_predict_layers=1) == read(tmp_path, "deepseek4")


@pytest.mark.parametrize(
    ("name", "fields", "error", "words"),
    [
        ("deepseek4", {RATIOS: None}, kvcache.ModelFileError, "there is no field 'attention.compress_ratios'"),
        ("deepseek4", {RATIOS: [0, 4]}, kvcache.ModelFileError, "must have one entry for each of the 6 layers, not 2"),
        (
            "deepseek4", {RATIOS: [0, 7, 4, 4, 4, 4]}, kvcache.NotSupportedError,
            "layer 1: attention.compress_ratios 7 is not supported, only 0 or 4 or 128 is",
        ),
        ("qwen4exp", {RATIOS: [4, 4, 4, 8] * 2}, kvcache.NotSupportedError, r"attention.compress_ratios has \[4, 8\]"),
        ("hy_v4", {f"{INDEXERS}types": None}, kvcache.ModelFileError, "there is no field 'attention.indexer.types'"),
        ("dots3note", {f"{INDEXERS}types": None}, kvcache.ModelFileError, "no field 'attention.indexer.types'"),
        ("glm-dsa", {f"{INDEXERS}types": [True]}, kvcache.ModelFileError, "for each of the 78 layers, not 1"),
        ("deepseek32", {f"{INDEXERS}top_k": None}, kvcache.ModelFileError, "no field 'attention.indexer.top_k'"),
        ("glm5-next", {f"{INDEXERS}kpool": 0}, kvcache.ModelFileError, "attention.indexer.kpool must be a whole"),
        ("minimax-m3", {f"{INDEXERS}block_size": None}, kvcache.ModelFileError, "attention.indexer.block_size"),
    ],
)  # fmt: skip
def test_files_that_do_not_say_what_their_indexers_are(tmp_path, name, fields, error, words):
    with pytest.raises(error, match=words):
        read(tmp_path, name, **fields)
