"""Every type of model with a text decoder, small and random: logits with `HFCache` against transformers' own cache.

The table of every_model.md says what each type is expected to do. ``python tests/hf/test_every_model.py`` runs them
all, and prints what differs from the table.
"""

import contextlib
import re
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rotation import rotated

import kvcache
from kvcache.models import shapes
from kvcache.rope import Rope

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.modeling_outputs import BaseModelOutput  # noqa: E402 - torch may be missing
from transformers.models.auto import modeling_auto  # noqa: E402 - torch may be missing
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402 - torch may be missing
from transformers.models.minimax.modeling_minimax import MiniMaxCache  # noqa: E402 - torch may be missing

from kvcache.hf import Engine, HFCache, HFEncoderDecoderCache  # noqa: E402 - torch may be missing
from kvcache.hf.dense import OWN, why_decoded  # noqa: E402 - torch may be missing

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers, and that dense tensors are used

PAGE = Path(__file__).with_name("every_model.md")
PROMPT, STEPS, PADDING, SOURCE = 12, 4, 3, 9  # tokens; the windows of the small models are shorter than the prompt
TOLERANCE = 2e-5  # of the largest logit
# One of each kind: a window, MLA, linear attention, layers that share rows, sinks, an encoder, two attentions a layer,
# a state beside attention.
QUICK = ["deepseek_v3", "diffllama", "gemma3_text", "gemma3n_text", "gpt_oss", "llama", "qwen3_next", "whisper"]
QUICK += ["zamba2"]
POSITIONS = ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"]  # derive wrong ones in a pass of one token
NO_MASK = ["cpmant", "xlm"]  # take no mask of more columns than the pass has tokens
OF_BLOCKS = [
    "deepseek_v4",
    "glm5_next",
    "qwen4_exp",
    "qwen4_exp_text",
]  # keep keys of single tokens, where the cache has pooled ones
OF_COLUMNS = ["deepseek_v4", "minimax_m3_vl", "minimax_m3_vl_text"]  # take blocks of columns, which padding moves
SINCE_5_24 = {  # types that transformers 5.23 does not have
    "apertus1p5", "apertus1p5_text", "dory", "exaone", "hy_v4_vl", "inkling2_loop", "inkling2_loop_text", "lara_mini",
    "omniasr", "sarvam_mla", "sarvam_moe",
}  # fmt: skip
OWN_BEFORE_5_24 = {"codegen", "gptj"}  # types that take no other attention in transformers 5.23


# ---- small random models, each from its type's default configuration, shrunk by rule

VOCAB = 97
MOST_PARAMETERS = 13_000_000
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_chunk_size": 64}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXERS = ["full", "full", "shared", "full"]  # a layer may use the choice of the one before
WINDOWS = {  # what layers with a window have otherwise
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 48, "head_dim": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
DOTS3 = {
    "layer_types": ["indexed_attention"] * 2 + ["sliding_attention"] * 2, "per_layer_config": {2: WINDOWS, 3: WINDOWS},
    "head_dim": 24, "rope_parameters": None,
}  # fmt: skip
ADAPTERS = [("vision", "adapter_in_dim"), ("vision", "adapter_out_dim"), ("audio", "adapter_out_dim")]
ADAPTERS += [("audio", "adapter_input_size")]
BLOCKS = {"layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3, "index_n_heads": 2, "index_head_dim": 16}
THREE = {**ROPE, "mrope_section": [4, 2, 2]}  # the pairs of a head that each of three positions rotates
QSA = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
QSA |= {"indexer_compress_ratio": 4, "rope_parameters": THREE}
# Fields that the rules below get wrong, by model type; a dot leads into a nested configuration.
CHANGES: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_offset": 80, "vision_config.codebook_size": 4, "vision_config.base_channels": 32}
    | {"audio_token_offset": 84, "audio_config.codebook_size": 4, "audio_config.codebook_dim": 64},
    "aria": {"projector_patch_to_query_dict": {4: 2}},
    "bailing_hybrid": {"num_expert_group": 1, "num_experts_per_token": 2},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "chameleon": {"vocabulary_map": {"<image>": 95}, "vq_config.base_channels": 32, "vq_config.latent_channels": 32}
    | {"vq_config.channel_multiplier": [1]},
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "ctrl": {"dff": 96},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", *["sparse"] * 3], "text_config.num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}}
    | {"index_topk": 3, "o_groups": 2, "o_lora_rank": 16},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {f"text_config.{field}": value for field, value in DOTS3.items()}
    | {f"{part}_config.{name}": 64 for part, name in ADAPTERS},
    "dots3_note_text": DOTS3,
    "ernie4_5_vl_moe": {"text_config.rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "florence2": {"vision_config.embed_dim": [32, 32, 32, 64], "vision_config.num_heads": [2] * 4}
    | {"vision_config.num_groups": [2] * 4, "vision_config.depths": [1] * 4},
    "fsmt": {"src_vocab_size": 97, "tgt_vocab_size": 97},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "glm46v": {"text_config.rope_parameters": THREE},
    "glm4v": {"text_config.rope_parameters": THREE},
    "glm4v_moe": {"text_config.rope_parameters": {**THREE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "glm_ocr": {"text_config.rope_parameters": THREE},
    "glmga": {"text_config.rope_parameters": THREE},
    "glm5_next": {"text_config.index_kpool": 4},
    "glm_moe_dsa": {"indexer_types": INDEXERS},
    "granite4_vision": {"deepstack_layer_map": [[0, 1]], "downsample_rate": "1/2"},
    "granitemoehybrid": {**MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "hunyuan_vl": {"text_config.head_dim": 16, "text_config.rope_parameters": {**ROPE, "mrope_section": [2, 2, 2, 2]}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "janus": {"vq_config.base_channels": 32, "vq_config.latent_channels": 32, "vq_config.channel_multiplier": [1]},
    "kimi_linear": {"num_experts": 4, "num_experts_per_token": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2, "num_layers": 2},
    "minimax_m3_vl": {f"text_config.{field}": value for field, value in BLOCKS.items()},
    "minimax_m3_vl_text": BLOCKS,
    "ministral": {"head_dim": 16},
    "mistral_large4": {"text_config.indexer_types": INDEXERS, "text_config.kv_source_layers": [0, 1, 2, 1]}
    | {"text_config.no_rope_layers": [1, 1, 0, 1]},
    "molmo2": {"adapter_config.vision_feature_layer": [3, 2]},
    "moonshine": {"decoder_num_key_value_heads": 4, "encoder_num_key_value_heads": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_glimmer": {"projector_hidden_size": 64},
    "muse_spark": {"projector_hidden_size": 64, "audio_config.hidden_sizes": [8, 16, 32, 64]}
    | {"audio_config.depths": [1] * 4, "text_config.moe_hidden_size": 32},
    "nemotron": {"num_key_value_heads": 2},
    "nllb-moe": {"decoder_sparse_step": 2},  # the router reads the mask, before other layers attend with it
    "paddleocr_vl": {"text_config.rope_parameters": THREE},
    "prophetnet": {"num_encoder_layers": 4},
    "qwen4_exp": {f"text_config.{field}": value for field, value in QSA.items()},
    "qwen4_exp_text": QSA,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 90, "text_config.rope_parameters": THREE},
    "qwen2_5_vl": {"text_config.rope_parameters": THREE},
    "qwen2_vl": {"text_config.rope_parameters": THREE},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 90},
    "roc_bert": {"shape_vocab_size": 97, "pronunciation_vocab_size": 97},
    "speecht5": {"conv_dim": [64] * 7},
    "step3p7": {"text_config.sliding_window": 8}
    | {"text_config.layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"text_config.rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 128}
    | {"attention_head_dim": 32},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "mamba_headdim": 16}
    | {"attention_hidden_size": 128, "attention_head_dim": 32},
    "xmod": {"default_language": "en_XX"},
}
TASKS = {
    "Seq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM",
    "SpeechSeq2Seq": "SPEECH_SEQ_2_SEQ",
    "CausalLM": "CAUSAL_LM",
    "ImageTextToText": "IMAGE_TEXT_TO_TEXT",
    "MultimodalLM": "MULTIMODAL_LM",
}
TYPES: dict[str, str] = {}  # model type -> the task of the Auto class that makes it
for task, names in TASKS.items():
    for name in getattr(modeling_auto, f"MODEL_FOR_{names}_MAPPING_NAMES"):
        TYPES.setdefault(name, task)

# The most that a field may be, by its name: a value, and the fields.
LIMITS = {
    64: """hidden_size d_model n_embd embed_dim emb_dim dim embedding_size word_embed_proj_dim dim_model
        projection_dim cross_hidden_size hidden_size_global encoder_hidden_size decoder_hidden_size text_hidden_size
        vision_hidden_size audio_hidden_size out_hidden_size lru_width output_dim input_dim encoder_d_model proj_size
        text_embed_dim hidden_dim mm_hidden_size""",
    96: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_ff dim_ff ffn_hidden_size d_inner
        intermediate_size_mlp dense_intermediate_size mlp_hidden_size mlp_dim attention_intermediate_size""",
    32: """kv_lora_rank share_expert_dim moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
        moe_shared_expert_intermediate_size shared_intermediate_size expert_intermediate_size moe_latent_size""",
    24: "q_lora_rank qk_head_dim",
    16: """head_dim kv_channels d_kv attention_head_dim global_head_dim linear_key_head_dim linear_value_head_dim
        cross_head_dim linear_head_dim mamba_head_dim mamba_d_head swa_head_dim qk_nope_head_dim dim_head""",
    12: "v_head_dim",
    8: """qk_rope_head_dim rotary_dim index_head_dim index_topk hidden_size_per_layer_input mamba_d_state
        ssm_state_size state_size num_mel_bins laurel_rank sliding_window attention_window_size attention_chunk_size
        sliding_window_size local_attention window_size""",
    4: """num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers decoder_num_hidden_layers
        num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads
        decoder_num_attention_heads encoder_num_attention_heads num_decoder_attention_heads
        num_encoder_attention_heads cross_num_attention_heads linear_num_value_heads linear_num_heads mamba_n_heads
        mamba_num_heads n_routed_experts num_experts num_local_experts moe_num_experts n_experts index_block_size""",
    2: """encoder_layers num_encoder_layers encoder_num_hidden_layers depth linear_num_key_heads num_experts_per_tok
        num_experts_per_token moe_topk moe_k top_k_experts experts_per_token top_k num_ngroups index_topk_blocks""",
    1: "n_group topk_group n_groups mamba_n_groups num_groups",
    128: "max_position_embeddings n_positions max_target_positions max_source_positions n_ctx max_seq_len",
    VOCAB: "vocab_size decoder_vocab_size vocab_size_per_layer_input",
}
FIELDS = {name: limit for limit, names in LIMITS.items() for name in names.split()}
KV_HEADS = re.compile("(.*_)?num_key_value_heads|num_kv_heads|n_head_kv|kv_n_heads|multi_query_group_num")


def _kv_heads(value: int, values: dict[str, Any]) -> int:
    """Keep one KV head, or as many as there are query heads; else two."""
    heads = next((values[name] for name in ("num_attention_heads", "n_head", "num_heads") if values.get(name)), None)
    return 1 if value == 1 else 4 if value == heads else 2


def shrink(values: dict[str, Any]) -> dict[str, Any]:
    """Shrink a configuration, as a dictionary, and the configurations that it nests; None and 0 stay as they are."""
    length = next((values[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if values.get(n)), 0)
    layers = _choose_layers(values, length)
    small = {}
    for name, value in values.items():
        if name == "per_layer_config" and value:
            given = {int(i): layer for i, layer in value.items()}
            small[name] = {n: shrink(given[i]) for n, i in enumerate(layers) if i in given}
        elif isinstance(value, dict) and name not in ("rope_parameters", "rope_scaling"):
            small[name] = shrink(value)
        elif isinstance(value, list) and length and len(value) == length:
            small[name] = [value[i] for i in layers]
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            if KV_HEADS.fullmatch(str(name)):
                small[name] = _kv_heads(value, values)
            elif re.search(r"_token(_id|_index)?$", str(name)):
                small[name] = value if value < VOCAB else VOCAB - 1 - value % 8
            else:
                small[name] = min(value, FIELDS.get(name, value))
        else:
            small[name] = value
    if values.get("qk_rope_head_dim") and values.get("head_dim") == values["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]
    if isinstance(values.get("rope_parameters"), dict):
        small["rope_parameters"] = _shrink_sections(values["rope_parameters"], small)
    return small


def _shrink_sections(rope: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Divide a head's rotated pairs by three, where the elements of a head are divided among three positions."""
    if not rope.get("mrope_section"):
        return rope
    dim = small.get("head_dim") or small["hidden_size"] // small["num_attention_heads"]
    pairs = int(dim * (rope.get("partial_rotary_factor") or 1)) // 2
    return {**rope, "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}


def _choose_layers(values: dict[str, Any], length: int) -> list[int]:
    """Choose four layers, or all: layers that differ in any list with an entry for each layer, then the first ones."""
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == length]
    first: dict[str, int] = {}
    for i in range(length):
        first.setdefault(repr([value[i] for value in lists]), i)
    chosen = [*first.values()][:4]
    chosen += [i for i in range(length) if i not in chosen][: max(0, 4 - len(chosen))]
    return sorted(chosen)


def small_model(name: str, **changes: Any) -> Any:
    """Make a small model of a type, with random weights; `changes` has further fields."""
    values = {**shrink(CONFIG_MAPPING[name]().to_dict()), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if TYPES[name] == "CausalLM" and "is_decoder" in values:
        values["is_decoder"] = True
    for path, value in {**CHANGES.get(name, {}), **changes}.items():
        *parents, last = path.split(".")
        part = values
        for parent in parents:
            part = part[parent]
        part[last] = value
    for key in ("model_type", "transformers_version", "architectures"):
        values.pop(key, None)
    config = CONFIG_MAPPING[name](**values)
    auto = getattr(transformers, f"AutoModelFor{TYPES[name]}")
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(0)
    return auto.from_config(config, attn_implementation="eager").eval()


def test_choices_leave_tokens_out():
    """An indexer chooses fewer tokens than a prompt has, with so many heads that few scores are equal."""
    found = set()
    for name in names_of("kernels", "dense"):
        values = shrink(CONFIG_MAPPING[name]().to_dict()) | {"model_type": name}
        text = values.get("text_config") or values
        if text.get("index_topk"):
            assert text["index_topk"] < PROMPT
            assert text["index_n_heads"] >= 16
            found.add(name)
        if text.get("index_topk_blocks"):
            assert text["index_topk_blocks"] * text["index_block_size"] < PROMPT
            found.add(name)
    assert len(found) >= 9


# ---- what is expected of each


@cache
def table():
    """Return the table's rows: what each type of model does with the attention "kvcache", and with its own."""
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (kernels, plain) for kernels, plain, names in rows[1:] for name in names.split(", ")}


class Source(BaseModelOutput):
    """The output of an encoder, with the attributes that some decoders look for."""

    attention_mask = None
    router_logits = None


def randomise(model):
    """Draw larger weights than models begin with, so that a logit depends on what is attended to."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and "A_log" not in name and "dt" not in name:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)


def logits(model, past, *, change=0):
    """Logits of a prompt, whose first row is padded, and of further tokens; `change` changes a token of the prompt."""
    name = model.config.model_type
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(2, 80, (2, PROMPT + STEPS), generator=generator)
    tokens[:, 5] += change
    mask = torch.ones_like(tokens)
    padding = 0 if name in (*NO_MASK, *OF_COLUMNS) else PADDING
    tokens[0, :padding] = mask[0, :padding] = 0
    prefix, given = "", {}
    if model.config.is_encoder_decoder:
        prefix = "decoder_"
        given["encoder_outputs"] = Source(last_hidden_state=torch.randn(2, SOURCE, 64, generator=generator))
        if model.main_input_name == "input_ids":
            given["attention_mask"] = torch.ones(2, SOURCE, dtype=torch.long)
            given["attention_mask"][1, -2:] = 0
    results = []
    for begin, end in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + STEPS))]:
        given[f"{prefix}input_ids"] = tokens[:, begin:end]
        if name not in NO_MASK:
            given[f"{prefix}attention_mask"] = mask[:, :end]
        if name in POSITIONS:
            given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:end]
        with torch.no_grad():
            made = model(**given, past_key_values=past, use_cache=True).logits.flatten(2)
        results += [made[0, 0 if begin else padding :], made[1]]
    return torch.cat(results)


def their_cache(model):
    if model.config.model_type == "minimax":
        return MiniMaxCache()
    if not model.config.is_encoder_decoder:
        return transformers.DynamicCache(config=model.config)
    config = model.config.get_text_config(decoder=True)
    return transformers.EncoderDecoderCache(*(transformers.DynamicCache(config=config) for _ in range(2)))


def our_cache(config):
    if config.is_encoder_decoder:
        return HFEncoderDecoderCache(config, dtype="f32", max_source_len=SOURCE)
    return HFCache(config, dtype="f32")


def calls(ours):
    parts = (ours.self_attention_cache, ours.cross_attention_cache) if hasattr(ours, "is_updated") else (ours,)
    counts = [part.stats()["calls"] for part in parts]
    return {kind: sum(count[kind] for count in counts) for kind in counts[0]}


def attention_of(model):
    return model.config.get_text_config(decoder=True)._attn_implementation


def check(model, want):
    """Compare logits with a new cache to those wanted; return how the layers were attended over."""
    ours = our_cache(model.config)
    got = logits(model, ours)
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    assert ours.get_seq_length() == PROMPT + STEPS
    return {kind for kind, count in calls(ours).items() if count}


def outcome(name, **changes):
    """Return what a type of model does with the attention "kvcache", and with its own; raise if logits are off."""
    model = small_model(name, **changes)
    randomise(model)
    wants = {}
    for attention in ("eager", "sdpa"):
        with contextlib.suppress(ValueError):  # of a model without "sdpa"
            model.set_attn_implementation(attention)
        if attention_of(model) == attention:
            wants[attention] = logits(model, their_cache(model))
            assert check(model, wants[attention]) == {"dense"}
    changed = logits(model, their_cache(model), change=1)
    want = wants[attention_of(model)]
    off = (changed - want)[-2 * STEPS :].abs().max()
    assert off > 100 * TOLERANCE * want.abs().max(), "this comparison cannot tell right from wrong"
    model.set_attn_implementation("kvcache")
    kinds = check(model, want)
    assert (OWN in why_decoded(model.config)[0]) == (attention_of(model) != "kvcache")
    if attention_of(model) != "kvcache":
        assert kinds == {"dense"}
        return "its own attention", "yes"
    return "kernels" if kinds == {"kernel"} else "dense tensors", "yes"


def marked(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def names_of(*beginnings):
    return [name for name, (kernels, _) in table().items() if kernels.startswith(beginnings) and name in TYPES]


def test_the_table_is_complete():
    assert {*TYPES} in ({*table()}, {*table()} - SINCE_5_24)
    assert {*QUICK} <= {*table()}


@pytest.mark.parametrize("name", marked(names_of("kernels", "dense", "its own")))
def test_logits(name):
    expected = table()[name]
    if name in OWN_BEFORE_5_24 and SINCE_5_24.isdisjoint(TYPES):
        expected = ("its own attention", "yes")
    assert outcome(name) == expected


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("falcon", {"multi_query": False}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
        ("gpt_bigcode", {"multi_query": False, "num_key_value_heads": 4}),
        ("t5", {"d_kv": 24}),
    ],
)
def test_logits_of_variants(name, changes):
    assert outcome(name, **changes) == table()[name]


REASONS = {  # beginnings of rows of the page's second table, and what the error says
    "the model computes": "computes with rows",
    "it brings": " brings ",
    "it takes no": "takes no position_ids",
    "`generate`": "logits are others",
    "its recurrent": "by single tokens only",
    "its tokens": "tokens see later ones",
}


def refused_by_engine():
    """Return what the error says for each type of model whose texts cannot share a pass."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    found = {name: why for reason, names in rows for name in names.split(", ") for begin, why in REASONS.items()
             if reason.startswith(begin)}  # fmt: skip
    assert {*found.values()} == {*REASONS.values()}
    return found


@pytest.mark.parametrize(
    "name",
    [
        name if name == "gemma3n_text" else pytest.param(name, marks=pytest.mark.slow)  # test_engine.py has others
        for name in names_of("kernels", "dense", "its own")
    ],
)
def test_texts_share_passes(name):
    """Texts of an `Engine` get the tokens that ``generate`` alone gives them, or the model is refused at once."""
    model = small_model(name)
    if model.config.is_encoder_decoder:
        with pytest.raises(kvcache.NotSupportedError, match="has an encoder too"):
            Engine(model, "f32", max_bytes=1 << 25)
        return
    randomise(model)
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(1)
    first, second, third = (torch.randint(3, 80, (n,), generator=generator).tolist() for n in (21, 7, 41))
    prompts = [first, first[:20] + second, second[:1], third]
    if name in refused_by_engine():
        with pytest.raises(kvcache.NotSupportedError, match=refused_by_engine()[name]):
            Engine(model, "f32", max_bytes=1 << 25)
        return
    with Engine(model, "f32", max_bytes=1 << 25, prompt_tokens=16, block_size=16) as engine:
        texts = [request.result() for request in [engine.submit(prompt, max_new_tokens=8) for prompt in prompts]]
    for prompt, text in zip(prompts, texts, strict=True):
        given = torch.tensor([prompt])
        options = {"past_key_values": HFCache(model.config, "f32"), "attention_mask": torch.ones_like(given)}
        assert torch.equal(text, model.generate(given, max_new_tokens=8, **options))


def keys_at(model, position):
    """Return what each layer stores of one token that stands at a position: latents as one row."""
    past = their_cache(model)
    given, name = {"input_ids": torch.tensor([[5]])}, "position_ids"
    if model.config.is_encoder_decoder:
        encoder = Source(last_hidden_state=torch.ones(1, SOURCE, 64))
        given, name = {"decoder_input_ids": given["input_ids"], "encoder_outputs": encoder}, "decoder_position_ids"
    with torch.no_grad():
        model(**given, **{name: torch.tensor([[position]])}, past_key_values=past, use_cache=True)
    layers = getattr(past, "self_attention_cache", past).layers
    rows = [(layer.keys, layer.values) for layer in layers if torch.is_tensor(getattr(layer, "keys", None))]
    indexed = [getattr(layer, name, None) for layer in layers for name in ("indexer_keys", "idx_keys")]
    return rows + [(keys, None) for keys in indexed if keys is not None]


def own_layers(config):
    """Return the layers of a shape that store rows of the decoder's tokens."""
    layers = shapes.read(config, SOURCE).layers
    if config.is_encoder_decoder:
        layers = layers[: len(layers) // 2]
    return [layer for layer in layers if layer.policy is not None and layer.share is None]


ROTATING_DECODERS = ["moonshine", "moonshine_streaming"]  # types with an encoder whose decoders rotate keys


def rotating():
    """Return the types without an encoder, and the types with an encoder whose decoders rotate keys."""
    names = names_of("kernels", "dense", "its own")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        configs = {name: CONFIG_MAPPING[name]() for name in names}
    return [name for name in names if not configs[name].is_encoder_decoder or name in ROTATING_DECODERS]


@pytest.mark.parametrize("name", marked(rotating()))
def test_keys_move_as_the_shape_says(name):
    """Keys at position 1, rotated by 5 as the shape says, equal the same token's keys at position 6."""
    model = small_model(name)
    randomise(model)
    for part in model.modules():
        if hasattr(part, "local_blocks"):  # the block of a position that stands alone does not exist
            part.local_blocks = 0
    layers = own_layers(model.config)
    if name in OF_BLOCKS:
        layers = [layer for layer in layers if layer.v_head_dim]
    for layer, one, other in zip(layers, keys_at(model, 1), keys_at(model, 6), strict=name not in OF_BLOCKS):
        rows = [torch.cat(each, -1) if layer.value_in_key else each[0] for each in (one, other)]
        before, after = (row.float().numpy() for row in rows)
        if isinstance(layer.rope, Rope):
            before = rotated(before, 5, layer.rope)
        elif layer.rope is not False:
            continue  # the shape does not say it, and moving these keys is refused
        assert np.abs(before - after).max() < 1e-4 * max(1, np.abs(before).max())


@pytest.mark.parametrize("name", names_of("refused"))
def test_refused_when_the_cache_is_made(name):
    """The types are refused with their default configurations; the table has the reason."""
    with pytest.raises(kvcache.NotSupportedError) as error:
        our_cache(CONFIG_MAPPING[name]())
    assert table()[name] == (f"refused: {str(error.value).rpartition(': ')[2]}", "refused")


def row_of(name):
    """Return the row of the table that a type of model belongs in."""
    try:
        our_cache(CONFIG_MAPPING[name]())
    except kvcache.NotSupportedError as error:
        if "no layer with" not in str(error):
            return f"refused: {str(error).rpartition(': ')[2]}", "refused"
    except Exception:
        pass
    try:
        return outcome(name)
    except Exception as error:
        return f"not tried: {type(error).__name__} {error}", ""


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    for name in sys.argv[1:] or TYPES:
        got, listed = row_of(name), table().get(name)
        if got != listed:
            print(f"{name}: {got}, listed as {listed}", flush=True)
