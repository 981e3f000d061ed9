"""Configurations as model folders have them: sizes, windows, which layers rotate, and what is refused by name."""

import json

import numpy as np
import pytest
from support.published_models import PUBLISHED, SAVED, UNSUPPORTED

import kvcache
from kvcache.models import guard, shapes
from kvcache.models.configuration import read_config
from kvcache.policy import FullAttention
from kvcache.rope import Rope

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*model_type 'new' is not known. compare its layers"),
    pytest.mark.filterwarnings("ignore:.*there is no model_type. compare its layers"),
]
SOME = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}


def stored(layer):
    """Return the elements that a token takes in a layer."""
    return layer.num_kv_heads * (layer.head_dim + (0 if layer.value_in_key else layer.v_head_dim))


@pytest.mark.filterwarnings("ignore:.*not read. layers keep every row")
@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes(name, tmp_path):
    form = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(form.config))
    layers = [layer for layer in shapes.read(tmp_path).layers if layer.policy is not None]
    own = [layer for layer in layers if layer.share is None]
    full = [layer for layer in own if isinstance(layer.policy, FullAttention)]
    sliding = [layer for layer in own if layer not in full]
    names = ("window", "attention_chunk_size", "max_len")
    windows = {getattr(x.policy, name) for x in sliding for name in names if hasattr(x.policy, name)}
    assert (sum(map(stored, full)), sum(map(stored, sliding))) == (form.full, form.windowed)
    assert windows == ({form.window} if form.window else set())
    ropes = [layer.rope.inv_freq for layer in layers if isinstance(layer.rope, Rope)]
    if form.rotating is not None:
        assert len(ropes) == form.rotating
    if form.theta is not None:
        assert ropes[0][1] == pytest.approx(form.theta ** (-1 / len(ropes[0])))


@pytest.mark.parametrize("named", ["BertForMaskedLM", "BertModel"])
def test_encoders_are_refused(named):
    config = {"model_type": "bert", **SOME, "architectures": [named]}
    with pytest.raises(kvcache.NotSupportedError, match=f"{named} is not supported, as an encoder has no KV cache"):
        shapes.read(config)
    shapes.read({**config, "is_decoder": True})
    shapes.read({**config, "architectures": ["BertLMHeadModel"]})


@pytest.mark.parametrize("config", [{"version": "1.0", "model": {"type": "BPE"}}, {"model_type": "mystery"}])
def test_what_is_no_configuration(config):
    with pytest.raises(kvcache.ModelFileError, match="'num_hidden_layers': this is no model's config"):
        shapes.read(config)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_refused_is_refused_by_name(name):
    said, config = UNSUPPORTED[name]
    with pytest.raises(kvcache.NotSupportedError, match=said):
        shapes.read(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_pattern", "GLLL"), ("mixer_types", ["a"]), ("mamba_layers", [1]), ("attn", {"layers": [1]}),
        ("num_recursions", 2), ("attn_dim", 64), ("d_v", 64), ("cla_factor", 2),
        ("full_attention_every", 4), ("global_layers", [0, 3]), ("kv_groups", [2, 2]),
        ("kv_heads_per_layer", [2, 1, 2, 1]), ("kv_reuse_group", [[0, 1]]), ("layer_attention_types", ["a"] * 4),
        ("swa_layers", [1, 2]), ("block_overrides", {"order": []}), ("use_yoco", True), ("mb_per_layer", 2),
        ("attn_window_size", 64), ("loop_window_size", 64), ("mla_kv_lora_dim", 64), ("num_loops", 2),
        ("index_head_dim", 128), ("compress_ratios", [4, 128, 4, 128]), ("window_layers", [1]), ("num_kv_groups", 2),
        ("num_key_heads", 2), ("qk_head_dim", 96), ("key_size", 96), ("num_sink_tokens", 4), ("attention_window", 64),
        ("sliding_window_len", 64), ("_block_types", ["a"]), ("layer_kinds", ["a"]), ("layer_configs", [{}]),
        ("token_mixer_types", ["a"]), ("attention_mask_types", ["a"]), ("attention_dilation", 2), ("num_k_heads", 2),
        ("attention_sink_size", 4), ("num_meta_tokens", 128), ("num_repeats", 2), ("ssm_layer_idx", [1]),
        ("n_core_layer", 4),
    ],
)  # fmt: skip
def test_a_field_that_says_what_layers_are_is_not_passed_over(field, value):
    assert len(shapes.read({"model_type": "new", **SOME}).layers) == 4
    with pytest.raises(kvcache.NotSupportedError, match=rf"{field}.*describe its layers yourself"):
        shapes.read({"model_type": "new", **SOME, field: value})
    assert len(shapes.read({"model_type": "new", **SOME, field: None}).layers) == 4


@pytest.mark.parametrize(
    "field",
    [
        "mlp_only_layers", "moe_layer_freq", "first_k_dense_replace", "num_moe_layers", "mtp_layer_types", "topk_group",
        "expert_layer_period", "interleave_moe_layer_step", "vision_feature_layers", "hidden_size_per_layer_input",
        "num_frozen_layers", "train_layers", "recompute_num_layers", "scan_layers", "teacher_layers", "distill_layers",
        "draft_num_layers", "num_target_layers", "fast_head_dim", "context_window",
        "training_window", "eval_interval", "save_every", "log_interval", "sample_interval", "group_by_length",
        "num_trainable_layers", "unfreeze_layers", "pipeline_parallel_layers", "checkpoint_num_layers",
        "num_classifier_layers", "num_pooler_layers", "probe_layers", "num_speculative_layers", "medusa_num_layers",
        "early_exit_layers",
    ],
)  # fmt: skip
def test_fields_of_experts_and_other_parts_are_no_alarm(field):
    assert not guard.says_layers(field)


def test_a_number_of_groups_that_follows_from_the_heads():
    assert len(shapes.read({"model_type": "qwen2", **SOME, "num_key_value_groups": 4}).layers) == 4
    with pytest.raises(kvcache.NotSupportedError, match="num_key_value_groups 2 says what its layers are"):
        shapes.read({"model_type": "qwen2", **SOME, "num_key_value_groups": 2})


@pytest.mark.parametrize("name", ["q_head_dim", "qk_head_dim"])
def test_a_size_of_heads_that_is_the_sum_of_two(name):
    latents = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    config = {"model_type": "kimi_k2", **SOME, **latents}
    assert shapes.read({**config, name: 192}).layers == shapes.read(config).layers
    with pytest.raises(kvcache.NotSupportedError, match=f"{name} 128 says what its layers are"):
        shapes.read({**config, name: 128})


def test_blocks_that_say_their_types():
    form = PUBLISHED["Nemotron 3 Puzzle 75B"].config
    without = {**form, "layers_block_type": None, "num_hidden_layers": 88}
    assert shapes.read(without).layers == shapes.read(form).layers
    with pytest.raises(kvcache.NotSupportedError, match="layer 0 is of type 'new', which no policy stands for"):
        shapes.read({**without, "block_configs": [{"block_type": "new"}] * 88})


def test_layers_of_experts_alone_keep_no_rows():
    """ZAYA1's first files count them, by lists or as every second layer."""
    config = {**SOME, "model_type": "zaya", "cca": True, "head_dim": 64}
    kept = [layer.policy is not None for layer in shapes.read({**config, "zaya_layers": ["a", "a", 16, "a"]}).layers]
    assert kept == [True, True, False, True]
    assert [layer.policy is not None for layer in shapes.read(config).layers] == [True, False] * 2
    with pytest.raises(kvcache.NotSupportedError, match="layer 1 is of type 'b', which no policy stands for"):
        shapes.read({**config, "zaya_layers": ["a", "b", "a", "b"]})


@pytest.mark.parametrize("name", ["full_attn_mod", "global_attn_every_n", "block_group_size", "window_period"])
def test_every_first_layer_is_every_layer(name):
    assert len(shapes.read({"model_type": "new", **SOME, name: 1}).layers) == 4
    with pytest.raises(kvcache.NotSupportedError, match=name):
        shapes.read({"model_type": "new", **SOME, name: 2})


@pytest.mark.parametrize("name", ["num_query_groups", "num_multi_query_heads", "num_heads_kv", "kv_heads"])
def test_kv_heads_by_other_names(name):
    config = {**SOME, "model_type": "new", "num_key_value_heads": None, name: 1}
    assert {layer.num_kv_heads for layer in shapes.read(config).layers} == {1}
    assert {layer.num_kv_heads for layer in shapes.read({**config, "group_query_attention": False}).layers} == {8}


def test_the_width_of_a_decoder_by_fairseqs_name():
    config = {"model_type": "new", "decoder_layers": 2, "decoder_attention_heads": 8, "decoder_embed_dim": 512}
    assert {layer.head_dim for layer in shapes.read(config).layers} == {64}


@pytest.mark.parametrize("none", [None, -1, 0])
@pytest.mark.parametrize("name", ["sliding_window", "sliding_window_size", "attention_window_size", "window_size"])
def test_a_window_that_is_none(name, none):
    layers = shapes.read({**SOME, "model_type": "mistral", "sliding_window": None, name: none}).layers
    assert {layer.policy for layer in layers} == {FullAttention()}


def test_a_list_of_windows_says_which_layers_have_one():
    def windows(given):
        layers = shapes.read({**SOME, "model_type": "new", "sliding_window": given}).layers
        return [getattr(layer.policy, "window", None) for layer in layers]

    assert windows([64, None, 32, None]) == [64, None, 32, None]
    assert windows([None, 64]) == [None, 64, None, 64]  # a pattern that begins again
    with pytest.raises(kvcache.ModelFileError, match="sliding_window must have one entry for each of the 4 layers"):
        windows([None, 64, 64])


def test_layers_of_a_type_that_nobody_knows_are_warned_of():
    with pytest.warns(
        UserWarning, match="model_type 'novel' is not known: compare its layers, and how its keys rotate"
    ):
        shapes.read({"model_type": "novel", **SOME})


def test_keys_of_a_type_that_nobody_knows_are_not_moved():
    with pytest.raises(kvcache.NotSupportedError, match="'new' is not known, so nobody knows which elements"):
        moved({"model_type": "new", **SOME, "rope_theta": 10000.0})


PARAMS = {"dim": 4096, "n_layers": 32, "head_dim": 128, "n_heads": 32, "n_kv_heads": 8, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (PARAMS, "there is no model_type"),
        ({"model_type": "new", "text_config": {**SOME, "rope_theta": 1e4}}, "there is no model_type"),
        (
            {"model_type": "llava", "text_config": {**SOME, "model_type": "new", "rope_theta": 1e4}},
            "model_type 'new' is not known",
        ),
        ({**SOME, "model_type": "bert", "position_embedding_type": "absolute"}, "embeddings of their positions"),
        ({**SOME, "model_type": "mpt", "learned_pos_emb": True, "attn_config": {"alibi": False}}, "embeddings of"),
    ],
)
def test_keys_that_are_not_moved(config, reason):
    layer = shapes.read(config).layers[0]
    with pytest.raises(kvcache.NotSupportedError, match=reason):
        layer.rope(0, np.zeros((1, 1, 8), np.float32), 1)


@pytest.mark.parametrize("part", ["baichuan 13B", "rwkv6qwen2"])
@pytest.mark.parametrize("model_type", ["llava", "internvl"])
def test_a_part_is_read_as_it_is_alone(part, model_type):
    """If the part's type is the configuration's choice; other types have a class of their own for their parts."""
    inner = {**SOME, "model_type": part.split()[0]}
    if part == "rwkv6qwen2":
        with pytest.raises(kvcache.NotSupportedError, match="its state is not keys and values"):
            shapes.read({"model_type": model_type, "text_config": inner})
    else:
        assert shapes.read({"model_type": model_type, "text_config": inner}).layers == shapes.read(inner).layers
        assert shapes.read(inner).layers[0].rope is False


@pytest.mark.parametrize(("theta", "rotating"), [(None, 0), (5e5, 2)])
def test_a_theta_of_null_rotates_nothing(theta, rotating):
    config = {**SOME, "model_type": "olmo_hybrid", "num_hidden_layers": 8, "rope_parameters": {"rope_theta": theta}}
    assert sum(isinstance(layer.rope, Rope) for layer in shapes.read(config).layers) == rotating


BIDIRECTIONAL = "use_bidirectional_attention"


@pytest.mark.parametrize(
    ("model_type", "name", "value"),
    [
        ("gemma3_text", BIDIRECTIONAL, True),
        ("gemma4_text", BIDIRECTIONAL, "all"),
        ("gemma4_unified_text", BIDIRECTIONAL, "all"),
        ("mistral", "is_causal", False),
    ],
)
def test_windows_that_reach_to_both_sides_are_refused(model_type, name, value):
    config = {**SOME, "model_type": model_type, "sliding_window": 512, name: value}
    with pytest.raises(kvcache.NotSupportedError, match=f"{name} {value!r} .* windows reach to both sides"):
        shapes.read(config)


@pytest.mark.parametrize(
    ("model_type", "name", "value"),
    [
        ("gemma2", BIDIRECTIONAL, True),
        ("gemma4_text", BIDIRECTIONAL, "vision"),
        ("gemma4_unified_text", BIDIRECTIONAL, "vision"),
        ("mistral", "is_causal", True),
    ],
)
def test_windows_stay_one_sided_where_tokens_see_later_ones_of_an_image_or_prompt_alone(model_type, name, value):
    config = {**SOME, "model_type": model_type, "sliding_window": 512}
    assert shapes.read({**config, name: value}).layers == shapes.read(config).layers


def test_models_without_windows_may_see_both_sides():
    config = {**SOME, "model_type": "qwen2", "sliding_window": 512, "use_sliding_window": False}
    assert shapes.read({**config, "is_causal": False}).layers == shapes.read(config).layers


def test_speech_and_text():
    sizes = {"model_type": "speecht5", "max_speech_positions": 1876, "max_text_positions": 600}
    for name, expected in ("SpeechT5ForSpeechToText", (600, 1876)), ("SpeechT5ForTextToSpeech", (1876, 600)):
        shape = shapes.read({**sizes, "architectures": [name]})
        assert (shape.max_seq_len, shape.layers[-1].policy.max_len) == expected
    frames = {"model_type": "speech_to_text", "max_source_positions": 6000}
    assert shapes.read(frames).layers[-1].policy.max_len == 1500


def test_a_window_of_layers_that_nobody_knows_is_warned_of():
    with pytest.warns(UserWarning, match="model_type 'new' is not known: every layer is taken to have the window 64"):
        shapes.read({**SOME, "model_type": "new", "sliding_window": 64})
    with pytest.warns(UserWarning, match="there is no model_type"):
        shapes.read({**SOME, "sliding_window": 64})
    for told in ({"layer_types": ["sliding_attention"] * 4}, {"use_sliding_window": True}, {"model_type": "mistral"}):
        shapes.read({"model_type": "new", **SOME, "sliding_window": 64, **told})


def test_the_source_of_a_decoder_is_its_encoders():
    decoder = {
        "model_type": "mbart",
        "is_decoder": True,
        "d_model": 512,
        "decoder_layers": 2,
        "decoder_attention_heads": 8,
    }
    whole = {"model_type": "vision-encoder-decoder", "decoder": {**decoder, "max_position_embeddings": 768}}
    text = {"model_type": "bert", "max_position_embeddings": 512}
    assert shapes.read({**whole, "encoder": text}).layers[-1].policy.max_len == 512
    with pytest.raises(kvcache.NotSupportedError, match="give max_source_len"):
        shapes.read({**whole, "encoder": {"model_type": "donut-swin", "image_size": [2560, 1920]}})


def test_cross_attention_with_sizes_of_its_own():
    config = {**SOME, "model_type": "new", "is_encoder_decoder": True, "num_cross_attention_key_value_heads": 4}
    assert [layer.num_kv_heads for layer in shapes.read(config, 9).layers] == [2] * 4 + [4] * 4
    config = {"model_type": "dia_decoder", "num_hidden_layers": 1, "cross_head_dim": 96}
    sizes = [(layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in shapes.read(config, 9).layers]
    assert sizes == [(4, 128, 128), (16, 96, 96)]


def test_sparse_layers_that_keep_every_row_are_warned_of():
    with pytest.warns(UserWarning, match="dense_attention_every_n_layers is not read"):
        shape = shapes.read({"model_type": "phi3small", **SOME, "dense_attention_every_n_layers": 2})
    assert sum(map(stored, shape.layers)) == 4 * 2 * 128


def test_a_block_with_sinks_is_refused():
    blocks = [{"attention": {"n_heads_in_group": 4, "window_length": 64, "num_sink_tokens": 4}}] * 4
    with pytest.raises(kvcache.NotSupportedError, match="layer 0, has num_sink_tokens 4"):
        shapes.read({**SOME, "block_configs": blocks})
    blocks = [{"attention": {"n_heads_in_group": 4, "window_length": 64}}] * 4
    assert {layer.policy.window for layer in shapes.read({**SOME, "block_configs": blocks}).layers} == {64}


def test_layers_over_an_image_are_cross_attention():
    config = {"model_type": "mllama", "text_config": {"model_type": "mllama_text_model", "cross_attention_layers": [1]}}
    config["text_config"].update(SOME)
    layers = shapes.read(config, 1601).layers
    assert [getattr(layer.policy, "max_len", 0) for layer in layers] == [0, 1601, 0, 0]
    assert [isinstance(layer.rope, Rope) for layer in layers] == [True, False, True, True]
    config["vision_config"] = {"max_num_tiles": 4, "image_size": 560, "patch_size": 14}
    assert shapes.read(config).layers[1].policy.max_len == 4 * 1601


@pytest.mark.parametrize(("model_type", "rotating"), [("flint", 2), ("kolibri1", 4)])
def test_layers_that_see_everything_and_rotate_nothing(model_type, rotating):
    layers = shapes.read({"model_type": model_type, **SOME, "num_hidden_layers": 5, "sliding_window": 8}).layers
    assert sum(isinstance(layer.rope, Rope) for layer in layers) == rotating


def test_keys_that_rotate_the_other_way():
    ropes = [shapes.read({"model_type": name, **SOME}).layers[0].rope.inv_freq for name in ("nanochat", "llama")]
    assert [-f for f in ropes[0]] == list(ropes[1])


def moved(config):
    """Move the keys of a cache's tokens."""
    cache = kvcache.KVCache.from_config(config)
    with cache.batch(2) as batch:
        for i, layer in enumerate(cache.layers):
            batch.put(i, *[np.ones((2, layer.num_kv_heads, layer.head_dim), np.float32)] * 2)
    cache.remove(0, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_type", "ntk"), ("rope_pos_scale", 2), ("rotary_scaling_factor", 2.0), ("use_ntk_scaling", True),
        ("rotary_emb_interleaved", True), ("position_encoding_2d", True), ("yarn_factor", 4.0), ("mem_rope_dim", 32),
        ("xpos_scale", 512),
    ],
)  # fmt: skip
def test_a_field_that_says_how_keys_rotate_is_not_passed_over(field, value):
    config = {"model_type": "xverse", **SOME, "rope_theta": 10000.0}
    moved(config)
    moved({**config, field: None})
    with pytest.raises(kvcache.NotSupportedError, match=rf"cannot be moved: {field} says how they are rotated"):
        moved({**config, field: value})


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["ntk_alpha", "short_context", "theta_shift"])
def test_a_name_within_a_scaling_is_not_passed_over(place, name):
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    config = {"model_type": "llama", **SOME, place: scaling}
    moved(config)
    said = f"cannot be moved: {place}, {name}, says how they are rotated, and is not read"
    with pytest.raises(kvcache.NotSupportedError, match=said):
        moved({**config, place: {**scaling, name: 2.0}})
    moved({**config, place: {**scaling, name: None}})


def test_dbrx_in_files_and_as_its_class_has_it():
    """transformers' class does not read attn_config's base, and its model rotates by its own."""
    config = {"model_type": "dbrx", "attn_config": {"kv_n_heads": 8, "rope_theta": 500000}}
    config |= {"d_model": 6144, "n_heads": 48, "n_layers": 2}
    for parameters, theta in ((None, 5e5), ({"rope_theta": 10000.0, "rope_type": "default"}, 1e4)):
        rope = shapes.read({**config, "rope_parameters": parameters}).layers[0].rope
        assert rope.inv_freq[1] == pytest.approx(theta ** (-1 / 64))


def test_a_rotation_of_an_unknown_kind():
    config = {"model_type": "xverse", **SOME, "rope_theta": 10000.0, "rope_scaling": {"type": "spiral", "factor": 2.0}}
    with pytest.raises(kvcache.NotSupportedError, match="cannot be moved: their rotation, 'spiral', is not known"):
        moved(config)


@pytest.mark.parametrize("model_type", ["phi3", "phi3_v", "llama"])
def test_an_older_name_of_a_rotation_by_length(model_type):
    factors = {"long_factor": [1.0] * 32, "short_factor": [1.0] * 32}
    config = {"model_type": model_type, **SOME, "rope_theta": 10000.0, "rope_scaling": {"type": "su", **factors}}
    with pytest.raises(kvcache.NotSupportedError, match="'longrope', depends on how long the sequence is"):
        moved(config)


def test_half_of_a_head_of_chatglm_rotates_by_neighbours():
    rope = shapes.read(PUBLISHED["GLM-4 9B, own code"].config).layers[0].rope
    assert (len(rope.inv_freq), rope.interleaved) == (32, True)
    assert rope.inv_freq[1] == pytest.approx((10000.0 * 500) ** (-1 / 32))


def test_what_transformers_saves_of_every_model_is_no_alarm():
    config = {"model_type": "new", **SOME}
    assert shapes.read({**config, **SAVED}).layers == shapes.read(config).layers
    assert not guard.says_layers("num_beam_groups")


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("LlamaForCausalLM", "llama"), ("GPT2LMHeadModel", "gpt2"), ("Qwen2MoeForCausalLM", "qwen2_moe"),
        ("DeepseekV3ForCausalLM", "deepseek_v3"), ("Gemma3ForConditionalGeneration", "gemma3_text"), ("Novel", None),
        ("", None),
    ],
)  # fmt: skip
def test_a_file_without_a_type_has_its_architectures(architecture, model_type):
    assert read_config({**SOME, "architectures": [architecture]}).get("model_type") == model_type


def test_a_type_that_nobody_knows_has_its_architectures():
    config = {**SOME, "model_type": "new"}
    assert read_config({**config, "architectures": ["MistralModel"]}).get("model_type") == "mistral"
    assert read_config({**config, "architectures": ["NewForCausalLM"]}).get("model_type") == "new"
    known = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    assert read_config(known).get("model_type") == "kimi_k2"


@pytest.mark.parametrize("architectures", [[], [1], "LlamaForCausalLM", 5, None, {"a": "b"}, ["Llama" * 99]])
def test_what_is_no_list_of_architectures_says_no_type(architectures):
    assert read_config({**SOME, "architectures": architectures}).get("model_type") is None


def test_a_part_of_own_code_has_the_usual_type_of_its_model():
    for name, part in (("qwen3_asr_text", "qwen3"), ("novel", "novel")):
        config = read_config({"model_type": "qwen3_asr", "text_config": {"model_type": name, **SOME}})
        assert config.get("model_type") == part


def test_an_encoder_with_windows_is_refused():
    with pytest.raises(kvcache.NotSupportedError, match="a modernbert is not supported, as it is an encoder"):
        shapes.read({"model_type": "modernbert", **SOME, "local_attention": 128, "global_attn_every_n_layers": 3})


def test_own_code_that_renames_a_type_has_its_defaults():
    for name, other in (
        ("mimo", "qwen2"),
        ("Keye", "qwen3"),
        ("llava_mistral", "mistral"),
        ("youtu_vl", "youtu"),
        ("GOT", "qwen2"),
    ):
        shape = shapes.read({"model_type": name, "num_hidden_layers": 4})
        assert shape == shapes.read({"model_type": other, "num_hidden_layers": 4})


@pytest.mark.parametrize("name", ["use_rope", "use_rotary_pos_emb", "use_rotary_emb", "use_rotary_position_embeddings"])
def test_a_field_that_says_whether_keys_rotate(name):
    for value in (True, False):
        layer = shapes.read({"model_type": "llama", **SOME, name: value}).layers[0]
        assert isinstance(layer.rope, Rope) is value


def test_attention_without_latents_rotates_as_a_llama_does():
    config = PUBLISHED["DeepSeek OCR"].config
    assert not shapes.read(config).layers[0].rope.interleaved
    assert shapes.read(PUBLISHED["DeepSeek V2 Lite"].config).layers[0].rope.interleaved


@pytest.mark.parametrize("model_type", ["hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"])
def test_an_alpha_that_stretches_the_base(model_type):
    config = {"model_type": model_type, **SOME, "head_dim": 64, "rope_theta": 10000.0}
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    theta = 10000.0 * 1000.0 ** (64 / 62)
    rope = shapes.read({**config, "rope_scaling": scaling}).layers[0].rope
    assert rope.inv_freq == pytest.approx(theta ** (-np.arange(32) / 32))
    for other in ({**scaling, "alpha": None}, {"type": "dynamic", "factor": 2.0}):
        with pytest.raises(kvcache.NotSupportedError, match="depends on how long the sequence is"):
            moved({**config, "rope_scaling": other})
    with pytest.raises(kvcache.NotSupportedError, match="rope_scaling, alpha, says how they are rotated"):
        moved({**config, "model_type": "llama", "rope_scaling": scaling})


def test_layers_with_two_attentions_in_files_and_as_their_class_counts_them():
    config = {"model_type": "longcat_flash"}
    for given in ({"num_layers": 28}, {"num_hidden_layers": 56}, {"num_layers": 28, "num_hidden_layers": 56}, {}):
        assert len(shapes.read({**config, **given}).layers) == 56


@pytest.mark.parametrize(
    ("model_type", "most"),
    [("whisper", 1500), ("led", 16384), ("seamless_m4t", 4096), ("speecht5", 4000), ("speech_to_text", 1500)],
)
def test_what_an_encoder_is_given_by_default(model_type, most):
    assert shapes.read({"model_type": model_type}).layers[-1].policy.max_len == most


def test_a_number_of_encoder_layers_is_not_the_decoders():
    config = {"model_type": "bart", "num_hidden_layers": 3}
    assert len(shapes.read(config).layers) == 2 * 12
    assert len(shapes.read({**config, "decoder_layers": 6}).layers) == 2 * 6


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4_unified_text", "diffusion_gemma_text"])
def test_a_last_layer_that_sees_everything_whatever_a_file_lists(model_type):
    listed = {"layer_types": ["sliding_attention"] * 4, "sliding_window": 64}
    layers = shapes.read({"model_type": model_type, **SOME, **listed}).layers
    assert [layer.policy == FullAttention() for layer in layers] == [False] * 3 + [True]


def test_an_older_name_of_layers_with_an_indexer():
    config = PUBLISHED["GLM 5.2, NVFP4"].config
    assert shapes.read(config) == shapes.read({**config, "layer_types": ["indexed_attention"] * 78})


@pytest.mark.parametrize("value", [["a"], {"a": 1}, 5])
def test_texts_that_are_none(value):
    with pytest.raises(kvcache.ModelFileError, match="position_embedding_type must be a string"):
        shapes.read({"model_type": "bert", **SOME, "position_embedding_type": value})
    config = {"model_type": value, "text_config": {"model_type": "llama", **SOME}}
    assert len(shapes.read(config).layers) == 4


def test_a_text_decoder_that_is_another_model():
    config = {"model_type": "ultravox", "text_model_id": "meta-llama/Llama-3.1-8B-Instruct", "hidden_size": 4096}
    with pytest.raises(kvcache.ModelFileError, match="its text decoder is another model: give 'meta-llama/Llama"):
        shapes.read(config)
    assert len(shapes.read({**config, "text_config": {"model_type": "llama", **SOME}}).layers) == 4
