"""Defaults, names and parts that a model's file leaves to the configuration class of transformers.

``classes.json`` has them; tools/configurations.py writes it. `MORE` has values that a class derives. It also has values
from the code beside a model's files, if transformers has no class for the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kvcache.models.reading import MAX_NAME

FILE = Path(__file__).with_name("classes.json")


class Class(NamedTuple):
    """The class of a type of model.

    Attributes
    ----------
    defaults : dict
        The values of fields that a file may leave out.
    names : dict
        Names that files give to a field, and the class's name of it.
    parts : dict
        Fields that hold the configuration of a part with a text decoder, and what that part has by default.
    fixed : dict
        Those of `parts` that are always of that type, whatever the configuration says.
    partial : list of str or None
        The fields that may make its model rotate a part of each head; ``"rope_parameters"`` stands for a
        ``partial_rotary_factor`` in it. None: nobody knows.
    limits : list of str or None
        What its model limits a query's sight by, ``"sliding"`` and ``"chunked"``; None: nobody knows.
    """

    defaults: dict[str, Any]
    names: dict[str, str]
    parts: dict[str, dict[str, Any]]
    fixed: dict[str, str]
    partial: list[str] | None
    limits: list[str] | None


UNKNOWN = Class({}, {}, {}, {}, None, None)
# Values that classes.json lacks, or that differ from it, by type of model. None: the field has no default.
MORE: dict[str, dict[str, Any]] = {
    "chatglm": {"partial_rotary_factor": 0.5},
    "dbrx": {"kv_n_heads": 1},
    "dots3_note_text": {
        "rope_parameters": None,  # which its class makes of rope_theta
        "rope_theta": 8e7,
        "sliding_window": 512,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 64,
        "swa_kv_lora_rank": 1024,
        "swa_head_dim": 256,
        "swa_qk_nope_head_dim": 192,
        "swa_qk_rope_head_dim": 64,
    },
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "hrm_text": {"H_cycles": 2, "L_cycles": 3},
    "longcat_flash": {"num_layers": None, "num_hidden_layers": 56},
    "minimax_m3_vl_text": {"rotary_dim": None},  # which its model does not read
    "mllama_text_model": {"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]},
    "musicgen": {"is_encoder_decoder": True},
    "nemotron_h": {"num_hidden_layers": 4},
    "mimo_v2_flash": {
        "rope_parameters": None,
        "rope_theta": 5e6,
        "rope_local_base_freq": 1e4,
        "partial_rotary_factor": 0.334,
    },
    **{key: {"global_head_dim": 512} for key in ("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text")},
}
# Types without a class in transformers whose published files were compared with the models' own code.
COMPARED = {
    "PanguEmbedded", "PanguProMoE", "RefinedWeb", "RefinedWebModel", "Yi", "afm", "apriel_h", "aquila",
    "arctic", "baichuan", "baichuan_m1", "bailing_moe", "bailing_moe_linear", "bailing_moe_v2", "btlm",
    "codeshell", "cogvlm", "crystalcoder", "deci", "deepseek", "ernie4_5_moe_vl", "glm_2022", "grinmoe",
    "grok-1", "hf_olmo", "hunyuan", "hymba", "internlm", "internlm2", "internlmxcomposer2", "jet_nemotron",
    "kimi_k2", "kimi_k3", "llada", "llama_original", "minicpm", "minicpmv", "minimax_m1", "minimax_text_01",
    "mixformer-sequential", "molmo", "moss", "nemotron-nas", "openelm", "orion", "pangu_ultra_moe",
    "parler_tts_decoder", "phi-msft", "phi3_v", "phi3small", "phi4mm", "plamo", "plamo2", "plamo3", "qwen",
    "skywork", "smallthinker", "solar", "stablelm_epoch", "step3_text", "stripedhyena", "xverse", "yuan", "zaya_2025",
}  # fmt: skip
# Fields that only files of one type have, where a file does not say its type. Meta and Mistral have their own format.
TELLING = {
    ("initial_context_length",): "gpt_oss",
    ("dim", "n_layers", "n_heads", "norm_eps"): "llama_original",
}
# The ending of an architecture's name.
TASK = re.compile("(ForCausalLM|LMHeadModel|ForConditionalGeneration|ForImageTextToText|Model)$")
# Types whose own code adds nothing to the cache of another type's models, by the name that their files have.
ALIKE = {
    **{f"{kind}{name}": name for kind in ("llava_", "cambrian_", "bunny-") for name in ("gemma", "mistral", "phi")},
    **{f"{kind}{name}": name for kind in ("llava_", "cambrian_", "bunny-") for name in ("llama", "phi3", "qwen2")},
    **dict.fromkeys(("llava_qwen", "cambrian_qwen", "bunny-qwen1.5", "videochat_flash_qwen"), "qwen2"),
    **dict.fromkeys(("Dream", "Fast_dLLM_Qwen", "dots_ocr", "mimo", "minicpmo"), "qwen2"),
    **dict.fromkeys(("Keye", "sdar"), "qwen3"),
    **dict.fromkeys(("apriel", "mobilellm", "omni_speech_llama", "telechat3"), "llama"),
    **dict.fromkeys(("youtu_llm", "youtu_vl"), "youtu"),
    "Emu3": "llama",
    "GOT": "qwen2",
    "bunny-stablelm": "stablelm",
    "dots_vlm": "deepseek_v3",
    "longcat_flash_ngram": "longcat_flash",
    "mimo_v2": "mimo_v2_flash",
    "minimax_m3": "minimax_m3_vl_text",
    "phi4-siglip": "phi3",
    "nemotron_h_puzzle": "nemotron_h",
    "progen": "codegen",
    "qwen3_8_flash_next": "qwen4_exp",
    "qwen3_8_flash_next_text": "qwen4_exp_text",
    "sdar_moe": "qwen3_moe",
}
# Types whose name an older model's files bear: fields that only these have, and what the older type is called here.
OLDER = {"glm": ({"block_position_encoding"}, "glm_2022"), "zaya": ({"cca", "zaya_layers"}, "zaya_2025")}


@lru_cache(maxsize=1)
def _table() -> dict[str, Class]:
    """Read ``classes.json``."""
    lines = json.loads(FILE.read_text(encoding="utf-8"))
    del lines["transformers"]
    found = {name: UNKNOWN._replace(**line) for name, line in lines.items()}
    for name, values in MORE.items():
        known = found.get(name, UNKNOWN)
        merged = {field: value for field, value in (known.defaults | values).items() if value is not None}
        found[name] = known._replace(defaults=merged)
    return found


def type_of(given: Mapping[str, Any]) -> Any:
    """Return the type of model that a file names, or that a field or an architecture implies; None if none does.

    It is the type as this reader knows it: another type's name for models of code that only renames that type. That is
    also the type of an architecture of transformers, if a file names a type that nobody knows.
    """
    told = (name for fields, name in TELLING.items() if given.keys() >= {*fields})
    implied = _names().get(_plain(TASK.sub("", architecture(given))))
    name = given.get("model_type") or next(told, None) or implied
    if not isinstance(name, str):
        return name
    fields, older = OLDER.get(name, (set[str](), ""))
    if fields & given.keys():
        return older
    name = ALIKE.get(name, name)
    return name if implied is None or name in COMPARED or name in _table() else implied


def architecture(given: Mapping[str, Any]) -> str:
    """Return the first architecture that a file names; an empty string if it names none, or no name."""
    names = given.get("architectures")
    first = names[0] if isinstance(names, list | tuple) and names else None
    return first if isinstance(first, str) and len(first) <= MAX_NAME else ""


@lru_cache(maxsize=1)
def _names() -> dict[str, str]:
    return {_plain(name): name for name in _table()}


def _plain(name: str) -> str:
    """Return a name's letters and digits, which types and architectures share."""
    return "".join(filter(str.isalnum, name.lower()))


def of(model_type: Any) -> Class:
    """Return the class of a type of model; `UNKNOWN` for a type that is not in the table."""
    return _table().get(model_type, UNKNOWN) if isinstance(model_type, str) else UNKNOWN
