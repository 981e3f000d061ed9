"""Write what transformers' configuration classes say beside a model's file: kvcache/models/classes.json.

Each line is one type of model. ``defaults`` are values of fields that a file may leave out. ``names`` gives the class's
name for each other name of a field. ``parts`` are the types of the parts that hold a text decoder; ``fixed`` are parts
whose type a configuration cannot choose. ``partial`` names the fields with which a model rotates a part of its heads.
``limits`` names the kinds of windows that a model has. Both come from the model's code, and are left out where it has
none. Only fields that kvcache.models reads are kept. To write the file anew, run ``python tools/configurations.py``.
Tests compare it with the classes where the same version of transformers is installed.
"""

import argparse
import dataclasses
import importlib
import inspect
import json
import logging
import re
import warnings
from pathlib import Path

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvcache.models.configuration import NAMES, PARTIAL, PARTS

FILE = Path(__file__).resolve().parents[1] / "kvcache/models/classes.json"
TASKS = [
    "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM", "TEXT_TO_WAVEFORM",
]  # fmt: skip
NOT_GENERATED = {"fastspeech2_conformer_with_hifigan", "vits"}  # types that make speech without a cache
FIELDS = {
    *(name for names in NAMES.values() for name in names),
    "alibi", "attention_chunk_size", "attention_k_eq_v", "attention_types", "attn_layer_offset",
    "attn_layer_period", "block_types", "first_k_dense_replace", "global_attn_every_n_layers", "global_head_dim",
    "index_head_dim", "index_kpool", "index_n_heads", "index_topk",
    "is_encoder_decoder", "kv_lora_rank", "layer_group_size", "local_attention", "max_window_layers", "multi_query",
    "new_decoder_architecture", "no_rope_layer_interval", "num_experts_per_tok", "num_global_key_value_heads",
    "num_kv_shared_layers", "original_max_position_embeddings", "position_embedding_type",
    "prefix_dense_sliding_window_pattern", "qk_rope_head_dim", "rope_parameters", "rotary_dim",
    "sliding_window_pattern", "swa_head_dim", "swa_num_attention_heads", "swa_num_key_value_heads",
    "swa_v_head_dim", "use_mem_rope", "use_sliding_window", "v_head_dim", "window_size",
    # The sizes of recurrent states.
    "cca_time0", "cca_time1", "conv1d_width", "conv_L_cache", "conv_kernel", "hc_count", "linear_conv_kernel_dim",
    "linear_head_dim", "linear_key_head_dim", "linear_num_heads", "linear_num_key_heads", "linear_num_value_heads",
    "linear_value_head_dim", "mamba_d_conv", "mamba_d_ssm", "mamba_d_state", "mamba_expand", "mamba_head_dim",
    "mamba_n_groups", "mamba_ngroups", "mamba_num_heads", "n_groups", "ngram_size", "ple_conv_kernel_size",
    "short_conv_kernel_size", "ssm_state_size",
}  # fmt: skip
THETA, LOCAL = 12345.0, 54321.0  # no class's own
PARTS_OF_A_HEAD = 0.25, 0.75  # one of them is no class's own
# Words in a model's code that say that it limits what a query sees, and what they stand for.
LIMITS = {
    "sliding": r"sliding|\blocal\b|window_size|local_attention",
    "chunked": "chunked_attention|chunked_causal_mask|attention_chunk_size",
}


def make(cls, **fields):
    """Make a configuration, or None: a few classes cannot be made without more."""
    try:
        return cls(**fields)
    except Exception:
        return None


def rotation(cls):
    """Return the rotation of a class whose file says nothing, and the theta beside a scaling without one."""
    found = usual_rotation(cls)
    if "rope_parameters" not in found:
        return found
    scaled = make(cls, rope_scaling={"rope_type": "linear", "factor": 2.0})
    theta = (getattr(scaled, "rope_parameters", None) or {}).get("rope_theta")
    usual = found.get("rope_theta", found["rope_parameters"].get("rope_theta"))
    return found if theta in (None, usual) else {**found, "rope_theta": theta}


def usual_rotation(cls):
    """Return the rotation of a class whose file says nothing, in fields that a file could have."""
    config = make(cls)
    given = getattr(config, "rope_parameters", None)
    if not given:
        return {}
    other = make(cls, rope_theta=THETA, rope_local_base_freq=LOCAL, local_rope_theta=LOCAL, global_rope_theta=THETA)
    changed = given if other is None else other.rope_parameters
    if any(isinstance(value, dict) for value in given.values()):
        full, sliding = (given.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
        if (changed.get("full_attention") or {}).get("rope_theta") != THETA:
            return {"rope_parameters": given}
        local = {"rope_local_base_freq": sliding["rope_theta"]} if "rope_theta" in sliding else {}
        return {"rope_theta": full["rope_theta"], **local}
    found = {name: given[name] for name in ("rope_theta", "partial_rotary_factor") if given.get(name) is not None}
    rest = {name: value for name, value in given.items() if name not in found}
    if rest.pop("rope_type", "default") == "default" and not rest.keys() - {"type", "mrope_section"}:
        return found
    if changed.get("rope_theta") == THETA:
        given = {name: value for name, value in given.items() if name != "rope_theta"}
        return {"rope_theta": found["rope_theta"], "rope_parameters": given}
    return {"rope_parameters": given}


def defaults(cls):
    """Return the values of a class's own fields, as they are before it derives others from them."""
    found = {}
    for field in dataclasses.fields(cls):
        known = isinstance(field.default, bool | int | float | str | list | tuple)
        if field.name in FIELDS and known and (field.default or field.name == "use_sliding_window"):
            found[field.name] = field.default
    for name in ("num_hidden_layers", "layer_types", "layers_block_type"):
        if isinstance(getattr(cls, name, None), property):
            found.pop(name, None)
    found.update(rotation(cls))
    return found


def parts(cls):
    """Return the type of each part that may hold a text decoder, and the fields that it is made with."""
    return {
        name: {
            "model_type": spec.model_type,
            **{k: v for k, v in spec.init_kwargs.items() if k in FIELDS and (v is not None or k == "sliding_window")},
        }
        for name, spec in getattr(cls, "sub_configs_defaults", {}).items()
        if name in PARTS
    }


def fixed(cls, parts):
    """Return the parts that have one class, and its type; a configuration names the type of the others."""
    return {
        name: part["model_type"] for name, part in parts.items() if cls.sub_configs[name] is not transformers.AutoConfig
    }


def code(cls):
    """Return the module of a class's model, or None: it has none of its own."""
    try:
        return importlib.import_module(cls.__module__.replace(".configuration_", ".modeling_"))
    except ModuleNotFoundError:
        return None


def partial(cls, module):
    """Return the fields on which the size of a model's rotation depends; None: it makes no table of it."""
    found = [
        made
        for name, made in inspect.getmembers(module, inspect.isclass)
        if name.endswith("RotaryEmbedding")
        and not re.search("Vision|Audio", name)
        and "config" in inspect.signature(made.__init__).parameters
    ]
    own = cls.__name__.removesuffix("Config") + "RotaryEmbedding"
    found = [made for made in found if made.__name__ == own] or found
    scaling = (getattr(make(cls), "rope_parameters", None) or {}).get("rope_type", "default")
    plain = {"rope_type": "default", "rope_theta": THETA}
    beside = {} if scaling == "default" else {"rope_parameters": plain}

    def sizes(**fields):
        try:
            return [[buffer.shape for buffer in made(cls(**{**beside, **fields})).buffers()] for made in found]
        except Exception:
            return None

    usual = sizes()
    if not usual:
        return None
    given = [{name: 8 if name == "rotary_dim" else part} for name in PARTIAL for part in PARTS_OF_A_HEAD]
    given += [{"rope_parameters": {**plain, "partial_rotary_factor": part}} for part in PARTS_OF_A_HEAD]
    return list(dict.fromkeys(name for fields in given for name in fields if sizes(**fields) != usual))


def limits(module):
    """Return what a model's code has words for."""
    text = inspect.getsource(module)
    return [name for name, words in LIMITS.items() if re.search(words, text)]


def table():
    """Return every type's line."""
    found = {}
    todo = set().union(*(getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS)) - NOT_GENERATED
    while todo:
        name = todo.pop()
        if name in found or name not in CONFIG_MAPPING:
            continue
        cls = CONFIG_MAPPING[name]
        names = {new: stored for new, stored in cls.attribute_map.items() if {new, stored} & FIELDS}
        lines = {"defaults": defaults(cls), "names": names, "parts": parts(cls)}
        lines["fixed"] = fixed(cls, lines["parts"])
        found[name] = {kind: dict(sorted(values.items())) for kind, values in lines.items() if values}
        module = code(cls)
        if module is not None and not lines["parts"]:
            read = partial(cls, module)
            found[name] |= {"limits": limits(module)} | ({} if read is None else {"partial": read})
        todo |= {part["model_type"] for part in lines["parts"].values()}
    return dict(sorted(found.items()))


def text():
    """Return the file's content: a line for each type."""
    lines = [f" {json.dumps(name)}: {json.dumps(line, sort_keys=True)}" for name, line in table().items()]
    head = f' "transformers": {json.dumps(transformers.__version__)}'
    return "{\n" + ",\n".join([head, *lines]) + "\n}\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    FILE.write_text(text())
