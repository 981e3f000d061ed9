"""Shapes of caches from configurations, against the caches and the keys of transformers' own models."""

import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.c_sources import load_tool
from support.published_models import PUBLISHED
from support.rotation import rotated

import kvcache
from kvcache.models import classes, shapes
from kvcache.policy import CrossAttention
from kvcache.rope import Rope

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.cache_utils import get_layer_types_and_kwargs  # noqa: E402 - needs transformers
from transformers.configuration_utils import get_head_shapes  # noqa: E402 - needs transformers
from transformers.models.auto import modeling_auto  # noqa: E402 - needs transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402 - needs transformers

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

TASKS = ["CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM"]
DECODERS = sorted(set().union(*(getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS)))
REFUSED = {
    **dict.fromkeys(["dory", "inkling2_loop", "inkling2_loop_text"], "runs some of its layers several times"),
    **dict.fromkeys(["falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"], "has no keys and values"),
    "bamba": "has no keys and values as it is by default",
    "blt": "is made of several decoders",
    "gemma4_assistant": "reads another model's rows",
    "gemma4_unified_assistant": "reads another model's rows",
    "granitemoehybrid": "has no keys and values as it is by default",
    **dict.fromkeys(["qwen4_exp", "qwen4_exp_text"], "has indexers, and does not say by default what they are"),
    "pi0": "is no model of text",
    "reformer": "sorts keys into buckets",
    "unlimited_ocr": "has windows that some tokens never leave",
}
LATENT = "is stored as latents, which are smaller than the heads that transformers makes of them"
DIFFERENT = {
    **dict.fromkeys(["axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k25"], LATENT),
    **dict.fromkeys(["axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm5_next", "glm_moe_dsa"], LATENT),
    **dict.fromkeys(["hy_v4", "hy_v4_vl", "mistral_large4"], LATENT),
    **dict.fromkeys(["kimi_linear", "longcat_flash", "minicpm3", "mistral4", "sarvam_mla", "youtu"], LATENT),
    "deepseek_v4": "has rows of several tokens each beside its windows",
    "falcon": "has one KV head, of which transformers' function for static caches does not know",
    "gpt_neo": "has windows, of which transformers' cache does not know",
    "inkling_mm_model": "has more KV heads in its windows, as above",
    "inkling_text": "has more KV heads in its windows, as above",
    "mimo_v2_flash": "has smaller values than keys, as above",
    "mllama": "has layers that keep rows of an image, which transformers' cache takes for others",
    "pp_formulanet": "has fewer layers in its decoder than in its encoder, which are counted there",
}


def test_documentation_lists_them():
    page = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text()
    listed = re.findall(r"`([^`]+)`", page[page.index("## What is not taken") : page.index("## What runs")])
    assert set(listed) == {*REFUSED, "DIFFERENT", "pytest tests/models/test_shapes_hf.py"}


def make(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CONFIG_MAPPING[name]()


def window(policy):
    return getattr(policy, "window", getattr(policy, "attention_chunk_size", None))


def theirs(config):
    """Window, KV heads and head_dim of each layer that has rows of its own; None for the others."""
    text = config.get_text_config(decoder=True)
    kinds, options = get_layer_types_and_kwargs(text)
    heads, dims = (shape if isinstance(shape, list) else [shape] * len(kinds) for shape in get_head_shapes(text))
    stateless = ("linear_attention", "conv", "dummy")
    layers = zip(kinds, options, heads, dims, strict=True)
    return [None if kind in stateless else (given.get("sliding_window"), h, d) for kind, given, h, d in layers]


def ours(shape):
    return [
        None
        if layer.policy is None or layer.share is not None
        else (window(layer.policy), layer.num_kv_heads, d if d == v else (d, v))
        for layer in shape.layers
        for d, v in [(layer.head_dim, layer.v_head_dim)]
        if layer.v_head_dim and not isinstance(layer.policy, CrossAttention)
    ]


@pytest.mark.parametrize("name", DECODERS)
def test_every_configuration_with_a_text_decoder(name, tmp_path):
    if name == "gemma4_assistant":
        pytest.skip("cannot be made without arguments")
    config = make(name)
    if name in REFUSED:
        with pytest.raises((kvcache.NotSupportedError, kvcache.ModelFileError)):
            shapes.read(config)
        return
    shape = shapes.read(config, 100)
    assert (ours(shape) == theirs(config)) == (name not in DIFFERENT)
    config.save_pretrained(tmp_path)
    assert shapes.read(tmp_path, 100) == shape
    if config.is_encoder_decoder and name != "musicgen_melody":  # its decoder has no layers over what the encoder made
        assert sum(isinstance(layer.policy, CrossAttention) for layer in shape.layers) * 2 == len(shape.layers)


FORMS = {name: form.config for name, form in PUBLISHED.items() if form.config.get("model_type") in CONFIG_MAPPING}
READ_OTHERWISE = {
    "JetMoE 8B": "its class does not read num_layers",
    "MiMo V2 Flash": "its class has one more token in windows",
}
# transformers' class refuses these, or makes something else of them
UNREADABLE = {"EXAONE 4.0 32B", "MPT, later form", "ZAYA1 8B, first revision"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(FORMS.keys() - UNREADABLE))
def test_published_forms_are_read_as_by_their_class(name):
    config = CONFIG_MAPPING[FORMS[name]["model_type"]].from_dict(json.loads(json.dumps(FORMS[name])))
    assert (shapes.read(config).layers == shapes.read(FORMS[name]).layers) == (name not in READ_OTHERWISE)


PARTIAL = [(name, part) for name in DECODERS for part in classes.of(name).parts if part != "decoder"]
UNMADE = {"exaone4_5", "fun_asr_nano"}  # transformers makes none of so little


@pytest.mark.parametrize(("name", "part"), [each for each in PARTIAL if each[0] not in UNMADE | {"mllama", *REFUSED}])
def test_a_part_that_leaves_fields_out(name, part, tmp_path):
    for given in ({}, {"model_type": classes.of(name).parts[part]["model_type"]}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name, part: given}))
        assert shapes.read(tmp_path, 100) == shapes.read(transformers.AutoConfig.from_pretrained(tmp_path), 100)


# ---- the keys of real models

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
ALIKE = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}  # as many as query heads
SLIDING = {**SMALL, "head_dim": 16, "sliding_window": 8}
SHARED = {
    **SLIDING,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
}
N_EMBD = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 97}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def scaled(rope_type, **parameters):
    return {**SMALL, "rope_parameters": {"rope_theta": 10000.0, "rope_type": rope_type, "factor": 4.0, **parameters}}


MODELS = {
    "llama": SMALL,
    "llama, linear": scaled("linear"),
    "llama, llama3": scaled("llama3", **LLAMA3),
    "llama, yarn": scaled("yarn", original_max_position_embeddings=128),
    "arcee": SMALL,
    "bloom": N_EMBD,
    "codegen": {**N_EMBD, "rotary_dim": 8},
    "cohere": SMALL,
    "cohere2": SLIDING,
    "ernie4_5": {**SMALL, "head_dim": 16},
    "exaone4": SLIDING,
    "falcon": {**ALIKE, "multi_query": True},
    "gemma2": SLIDING,
    "gemma3_text": {**SLIDING, "num_hidden_layers": 7},
    "gemma3n_text": {**SHARED, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**SHARED, "global_head_dim": 32},
    "glm": {**SMALL, "head_dim": 16},
    "glm4": {**SMALL, "head_dim": 16},
    "gpt_neox": ALIKE,
    "gpt_oss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gptj": {**N_EMBD, "rotary_dim": 8},
    "granite_swa": SLIDING,
    "helium": {**SMALL, "head_dim": 16},
    "lara_mini": {**SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_experts": 4},
    "lfm2": {**SMALL, "layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {
        **SMALL,
        "head_dim": 16,
        "attention_chunk_size": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
    },
    "mistral": SLIDING,
    "modernbert-decoder": {**ALIKE, "global_attn_every_n_layers": 2},
    "olmo3": SLIDING,
    "phi": SMALL,
    "phi3": SMALL,
    "qwen2": SMALL,
    "qwen3": {**SMALL, "head_dim": 32},
    "sarvam_moe": {**SMALL, "head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 8},
    "smollm3": SMALL,
    "stablelm": SMALL,
    "starcoder2": SMALL,
}


@pytest.mark.parametrize("name", MODELS)
def test_keys_are_shaped_and_rotated_as_the_shape_says(name):
    torch.manual_seed(0)
    model_type = name.split(",")[0]
    if model_type not in CONFIG_MAPPING:
        pytest.skip("a later transformers has it")
    config = transformers.AutoConfig.for_model(model_type, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()

    def rows_at(position):
        """Run a single token, so that all layers see the same wherever it stands."""
        cache = transformers.DynamicCache(config=config)
        options = {} if name == "bloom" else {"position_ids": torch.tensor([[position]])}
        with torch.inference_mode():
            model(torch.tensor([[5]]), past_key_values=cache, use_cache=True, **options)
        return [
            (layer.keys, layer.values) for layer in cache.layers if isinstance(getattr(layer, "keys", 0), torch.Tensor)
        ]

    shape = shapes.read(config)
    own = [i for i in range(len(shape.layers)) if shape.layers[i].policy is not None and shape.layers[i].share is None]
    nbytes = 0
    for i, (k, v), (k_moved, _) in zip(own, rows_at(1), rows_at(6), strict=True):
        assert (k.shape, v.shape) == (
            (1, shape.layers[i].num_kv_heads, 1, shape.layers[i].head_dim),
            (1, shape.layers[i].num_kv_heads, 1, shape.layers[i].v_head_dim),
        )
        nbytes += k.nbytes + v.nbytes
        rope = shape.layers[i].rope
        expected = rotated(k.numpy(), 5, rope) if isinstance(rope, Rope) else k.numpy()
        assert rope is not None
        assert np.abs(expected - k_moved.numpy()).max() < 1e-4 * max(1, np.abs(expected).max())
    made = kvcache.KVCache.from_config(config, dtype="f32", max_seq_len=1, capacity=1)
    assert made.capacity_bytes == pytest.approx(nbytes, rel=1)  # rows are padded to cache lines
    assert sum(layer.most_bytes(1) for layer in made.layers) == nbytes


UNREAD = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "olmo2", "granite", "cohere", "falcon", "arcee")
READ = ("glm4", "gpt_neox", "nemotron", "persimmon", "phi", "phi3", "stablelm")


def unrotated(config):
    """Return how many elements of a key of the first layer are the same at another position."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().double()
    with torch.inference_mode():
        made = model(torch.tensor([[5, 6, 5]]), use_cache=True).past_key_values.layers[0].keys[0, 0]
    return int(torch.isclose(made[0], made[2], atol=1e-10, rtol=0).sum())


@pytest.mark.parametrize("field", ["partial_rotary_factor", "rotary_pct", "rotary_dim", "rope_parameters"])
@pytest.mark.parametrize("name", [*UNREAD, *READ])
def test_a_part_of_a_head_rotates_only_where_the_model_reads_it(name, field):
    """Some models ignore a field that others read; the keys of real ones tell."""
    torch.manual_seed(0)
    plain = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    value = {"rotary_dim": 4, "rope_parameters": plain}.get(field, 0.75)
    few = {**SMALL, "num_hidden_layers": 1, "num_key_value_heads": 4, field: value}
    config = transformers.AutoConfig.for_model(name, **few)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = [shapes.read(config), shapes.read({**few, "model_type": name})]
    for shape in read:
        assert shape.layers[0].head_dim - 2 * len(shape.layers[0].rope.inv_freq) == unrotated(config)


def test_a_field_that_the_model_does_not_read_is_warned_of():
    few = {**SMALL, "model_type": "llama", "head_dim": 16}
    for field in ({"rotary_pct": 0.5}, {"sliding_window": 8}, {"attention_chunk_size": 8}, {"rotary_dim": 8}):
        with pytest.warns(UserWarning, match=f"models of type llama do not read {next(iter(field))}"):
            shapes.read({**few, **field})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for field in ({"rotary_pct": 1.0}, {"sliding_window": None}, {"rotary_dim": 16}):
            shapes.read({**few, **field})
        shapes.read({**few, "sliding_window": 8, "use_sliding_window": False})


def test_a_scaling_without_theta_has_the_theta_of_its_class():
    linear = {"type": "linear", "factor": 4.0}
    for name in ("apertus", "cwm", "lfm3", "llama", "ministral3"):
        for scaling in (linear, {"rope_type": "default"}):
            made = CONFIG_MAPPING[name].from_dict({"rope_scaling": dict(scaling)})
            assert shapes.read({"model_type": name, "rope_scaling": scaling}).layers == shapes.read(made).layers
    ignored = {"model_type": "cohere2_moe", "rope_scaling": linear}
    for given in (ignored, CONFIG_MAPPING["cohere2_moe"].from_dict(dict(ignored))):
        assert shapes.read(given).layers == shapes.read(make("cohere2_moe")).layers


WITHOUT_WINDOWS = ("arcee", "bitnet", "cohere", "ernie4_5", "gemma", "glm", "gpt2", "gpt_neox", "llama", "olmo2", "phi")
STRAY = (
    {"sliding_window": 8}, {"attention_chunk_size": 8},
    {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
)  # fmt: skip


@pytest.mark.parametrize("stray", STRAY, ids=["window", "chunk", "layers"])
@pytest.mark.parametrize("name", [*WITHOUT_WINDOWS, "mistral", "starcoder2", "phi3"])
def test_windows_count_where_the_model_has_them(name, stray):
    """The logits of a token say whether it sees a token before its window."""
    if "layer_types" in stray and name not in WITHOUT_WINDOWS:
        pytest.skip("its model has the window in every layer, and warns that another class is meant")
    torch.manual_seed(0)
    few = {**SMALL, "num_hidden_layers": 2, "head_dim": 16, "num_key_value_heads": 4, **stray}
    config = transformers.AutoConfig.for_model(name, **few)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().double()
    tokens = torch.arange(60)[None] % 50 + 3
    others = tokens.clone()
    others[0, 0] += 7
    with torch.inference_mode():
        logits, changed = (model(each, use_cache=False).logits[0, -1] for each in (tokens, others))
    sees_all = not torch.equal(logits, changed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for shape in (shapes.read(config), shapes.read({**few, "model_type": name})):
            assert any((window(layer.policy) or 4096) > 8 for layer in shape.layers) == sees_all


def test_json_as_older_versions_wrote_it(tmp_path):
    config = make("mistral").to_dict()
    theta = config.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": theta}))
    assert shapes.read(tmp_path) == shapes.read(make("mistral"))


# ---- configurations as files have them, against those that transformers makes of them

LISTS = (
    "layer_types", "layers_block_type", "rope_parameters", "per_layer_config", "no_rope_layers", "layer_rope_theta",
    "rope_scaling_layers", "num_attention_heads_per_layer", "attention_layers", "full_attn_idxs", "hybrid_layer_ids",
    "mlp_layer_types", "mlp_only_layers", "activation_sparsity_pattern",
)  # fmt: skip
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}
PATTERN_FIELDS = {
    **dict.fromkeys(("cohere2", "exaone4", "exaone_moe", "gemma3_text"), "sliding_window_pattern"),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "full_attention_interval"),
    **dict.fromkeys(("afmoe", "modernbert-decoder"), "global_attn_every_n_layers"),
    **dict.fromkeys(("jamba", "zamba"), "attn_layer_period"),
    **dict.fromkeys(("llama4_text", "smollm3"), "no_rope_layer_interval"),
    "bailing_hybrid": "layer_group_size",
}
# Types whose class ignores ``rope_theta`` beside its default, and the names that it reads in old files.
OWN_ROTATION = {
    "cosmos3_edge_text": {},
    "gpt_neox": {"rotary_emb_base": 777777.0, "rotary_pct": 0.5},
    "gpt_neox_japanese": {"rotary_emb_base": 777777.0, "rotary_pct": 0.5},
    "mimo_v2_flash": {"rope_theta": 5e6, "swa_rope_theta": 1e4},
    "modernbert-decoder": {"global_rope_theta": 777777.0, "local_rope_theta": 5555.0},
    "moonshine_streaming": {},
    "muse_spark_text": {},
    "xlnet": {},
}


def text_types():
    """Return the types of text decoders that `shapes.read` takes, each with its configuration."""
    found = {}
    for name in DECODERS:
        if name not in {"gemma4_assistant", *REFUSED}:
            text = make(name).get_text_config(decoder=True)
            found.setdefault(text.model_type, text)
    return {name: text for name, text in found.items() if name in CONFIG_MAPPING and name != "granitemoehybrid"}


TEXT_TYPES = text_types()


def turns():
    """Return each type with one scaling, by turns; the others are slow."""
    for i, name in enumerate(sorted(TEXT_TYPES)):
        for j, kind in enumerate(SCALINGS):
            yield pytest.param(name, kind, marks=() if i % len(SCALINGS) == j else pytest.mark.slow)


@pytest.mark.parametrize(("name", "kind"), [*turns()])
def test_old_files_are_read_as_their_classes_read_them(name, kind):
    config = TEXT_TYPES[name].to_dict()
    old = {key: value for key, value in config.items() if key not in (*LISTS, "transformers_version", "architectures")}
    forms = [old, {"model_type": name}]
    if name in OWN_ROTATION:
        forms += [{**old, **OWN_ROTATION[name]}]
    else:
        forms += [{**old, "rope_theta": 777777.0}]
        forms += [{**old, "rope_theta": 777777.0, "rope_scaling": SCALINGS[kind]}]
    if name in PATTERN_FIELDS:
        forms.append({**old, PATTERN_FIELDS[name]: 3})
    for form in forms:
        fields = {key: value for key, value in form.items() if key != "model_type"}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = CONFIG_MAPPING[name].from_dict(json.loads(json.dumps(fields, default=str)))
        except Exception:  # fields that the class itself refuses
            continue
        assert shapes.read(json.loads(json.dumps(form, default=str)), 100).layers == shapes.read(made, 100).layers, form


@pytest.mark.parametrize("embedding", [None, "rope", "nope"])
@pytest.mark.parametrize("field", ["layer_types", "layers_block_type"])
def test_old_files_of_granitemoehybrid_are_read_as_its_class_reads_them(field, embedding):
    """It has no attention unless a file lists it."""
    config = make("granitemoehybrid").to_dict()
    old = {key: value for key, value in config.items() if key not in (*LISTS, "transformers_version", "architectures")}
    old |= {"num_hidden_layers": 4, field: ["mamba", "attention"] * 2, "position_embedding_type": embedding}
    forms = [old, *({**old, "rope_theta": 777777.0, "rope_scaling": scaling} for scaling in SCALINGS.values())]
    for form in forms:
        fields = {key: value for key, value in form.items() if key != "model_type"}
        made = shapes.read(CONFIG_MAPPING["granitemoehybrid"].from_dict(fields)).layers
        assert shapes.read(json.loads(json.dumps(form, default=str))).layers == made
        assert [isinstance(layer.rope, Rope) for layer in made[1::2]].count(True) <= 2 * (embedding == "rope")


def test_the_table_is_what_the_classes_say():
    tool = load_tool("configurations")
    if json.loads(tool.FILE.read_text())["transformers"] != transformers.__version__:
        pytest.skip("another version of transformers made the table")
    assert tool.FILE.read_text() == tool.text()


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in {"gemma4_assistant", *REFUSED}])
def test_no_false_alarm_on_what_transformers_saves(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = json.loads(make(name).to_json_string(use_diff=False))
    shapes.read(saved, 100)
