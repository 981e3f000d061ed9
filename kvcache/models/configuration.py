"""The fields of a model's configuration, under Hugging Face's names whatever the file's format.

`text_decoder` gathers the facts about the text decoder from the content of a ``config.json``, and
`kvcache.models.gguf_models` from a GGUF. `kvcache.models.shapes` derives the layers' shapes from the fields.
"""

from __future__ import annotations

import os
import re
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcache.errors import ModelFileError, plain, shown
from kvcache.models import classes, gguf, gguf_models
from kvcache.models.reading import MAX_NAME, MAX_PARTS, Fields, find_config, is_gguf, read_json

# Every name that configurations use for a fact. The first one present counts: the decoder's come first.
NAMES = {
    "num_hidden_layers": (
        "decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers", "num_hidden_layers", "n_layer",
        "n_layers", "num_layers", "layers", "num_transformer_layers", "n_text_layer",
    ),
    "num_attention_heads": (
        "decoder_attention_heads", "num_decoder_attention_heads", "decoder_num_attention_heads",
        "cca_num_q_heads", "num_attention_heads_per_layer", "num_attention_heads", "n_head", "n_heads", "num_heads",
        "attention_heads", "num_query_heads", "n_text_head",
    ),
    "num_key_value_heads": (
        "decoder_num_key_value_heads", "num_query_groups_list", "num_key_value_heads_per_layer", "num_key_value_heads",
        "num_kv_heads", "n_head_kv", "n_kv_heads", "n_kv_head", "n_local_heads", "kv_n_heads", "num_attention_groups",
        "multi_query_group_num", "num_query_groups", "num_multi_query_heads", "num_kv_attention_heads",
        "num_attention_heads_kv", "num_heads_kv", "kv_heads",
    ),
    "hidden_size": (
        "hidden_size", "d_model", "n_embd", "n_embed", "embed_dim", "emb_dim", "dim", "model_dim", "decoder_embed_dim",
        "n_text_state",
    ),
    "head_dim": (
        "head_dim", "d_kv", "attention_head_dim", "hidden_size_per_head", "kv_channels", "dim_head", "head_size",
        "d_head", "attention_head_size", "size_per_head", "dim_per_head",
    ),
    "cross_num_attention_heads": ("cross_num_attention_heads",),
    "cross_num_key_value_heads": ("cross_num_key_value_heads", "num_cross_attention_key_value_heads"),
    "cross_head_dim": ("cross_head_dim",),
    "max_position_embeddings": (
        "max_target_positions", "max_decoder_position_embeddings", "max_text_positions", "max_position_embeddings",
        "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx", "max_context_length",
        "model_max_length", "n_text_ctx",
    ),
    "max_source_positions": (
        "max_source_positions", "max_encoder_position_embeddings", "max_speech_positions",
        "max_position_embeddings", "n_positions", "n_audio_ctx",
    ),
    "layer_types": ("layer_types", "layers_block_type"),
    "kv_lora_rank": ("kv_lora_rank", "attention_kv_lora_dim"),
    "qk_rope_head_dim": ("qk_rope_head_dim", "attention_qk_rope_dim"),
    "use_rope_layers": ("use_rope_layers", "rope_layout"),
    "rope_theta": (
        "rotary_emb_base", "global_rope_theta", "rope_theta", "rope_base", "rope_freq_constant", "rope_embedding_base",
    ),
    "rope_local_base_freq": ("rope_local_base_freq", "local_rope_theta", "swa_rope_theta", "rope_local_theta"),
    "partial_rotary_factor": (
        "partial_rotary_factors", "rotary_pct", "rope_pct", "partial_rotary_factor", "rope_percent",
        "rotary_emb_fraction",
    ),
    # Windows count the token itself, as llama.cpp has it. transformers' class of MiMo adds 1.
    "sliding_window": ("sliding_window", "sliding_window_size", "attention_window_size", "interleaved_sliding_window"),
}  # fmt: skip
# Fields that say which part of a head is rotated.
PARTIAL = (*NAMES["partial_rotary_factor"], "rotary_dim")
# Names of a window's length; -1 and 0 say that there is no window.
NO_WINDOW = {*NAMES["sliding_window"], "window_size"}
# Fields under which a model of several parts nests the configuration of its text decoder.
PARTS = (
    "text_config", "thinker_config", "decoder", "decoder_config", "generator", "llm_config", "llm_cfg",
    "language_config",
)  # fmt: skip
# Types that add fields of their own to a nested configuration; others have such fields only where a file has no part.
MERGING = ("glmasr", "voxtral", "voxtral_realtime")
ATTENTION = "attn_config"  # an object with fields of the attention, which count where the file has none beside it
OTHER_MODEL = "text_model_id"  # names the model that is the text decoder, as in Ultravox
# Fields that hold the configuration of what the text decoder attends over.
ENCODERS = ("encoder", "encoder_config", "text_encoder")
# The type of a decoder that gets what an encoder made as tokens before its own. So no layer attends over an encoder.
PREFIXED = "musicgen_melody_decoder"
TILES = ("max_num_tiles", "image_size", "patch_size")  # fields of a vision encoder
# Fields of a model of several parts that count before its text decoder's fields, by each of their names.
OF_THE_WHOLE = {
    "dtype": ("dtype", "torch_dtype"),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "quantization_config": ("quantization_config",),
}
# Matches a name that a model may have on Hugging Face's Hub.
HUB = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]*\d[\w.-]*b\b[\w.-]*", re.ASCII | re.IGNORECASE)
ADAPTER = "adapter_config.json"  # describes weights that change another model's, such as LoRA's


def read_config(source: Any) -> Fields:
    """Gather the fields of a model's text decoder, under Hugging Face's names; ``model_type`` is the decoder's.

    `source` is a folder with a ``config.json``, that file, safetensors beside it, or a GGUF. The content of a
    ``config.json`` is taken as a mapping, as `Fields`, or as a configuration of transformers. Raise
    `ModelFileError` if a file is missing, is of another format, or holds impossible values.
    """
    if isinstance(source, Fields):
        return source
    if isinstance(source, Mapping):
        parts = {name: value.to_dict() for name, value in source.items() if hasattr(value, "to_dict")}
        return text_decoder({**source, **parts}, "config")
    if hasattr(source, "to_dict"):
        return text_decoder(source.to_dict(), type(source).__name__)
    if not isinstance(source, str) and not hasattr(source, "__fspath__"):
        found = "its config" if hasattr(source, "config") else "a path, a mapping, or a configuration of transformers"
        raise TypeError(f"config={shown(source)}: give {found}")
    path = find_config(source)
    adapter = path.with_name(ADAPTER)
    if path == adapter or (not os.path.lexists(path) and os.path.isfile(adapter)):
        base = read_json(adapter).get("base_model_name_or_path")
        raise ModelFileError(f"{plain(adapter)} describes an adapter: give the folder of its model, {shown(base)}")
    if not os.path.lexists(path):
        advise(source, path)
    if is_gguf(path):
        return gguf_models.read(gguf.read_header(path), plain(path))
    return text_decoder(read_json(path), plain(path))


def advise(source: str | os.PathLike[str], path: Path) -> None:
    """Raise `ModelFileError` for a missing `path`, if it is known what would do."""
    name = os.fspath(source)
    if os.path.isdir(path.parent) and path.name == "config.json" and (files := sorted(path.parent.glob("*.gguf"))):
        raise ModelFileError(f"{plain(path.parent)} has no config.json: give a GGUF file, such as {plain(files[0])}")
    if os.path.lexists(name) or path.suffix in (".gguf", ".json", ".safetensors") or not HUB.fullmatch(name):
        return
    repository = name if "/" in name else f"OWNER/{name}"
    raise ModelFileError(
        f"there is no {plain(path)}, and kvcache downloads nothing: run `hf download {repository} --local-dir "
        f"{path.name}` and give that folder; for the sizes of a cache its config.json is enough (--include config.json)"
    )


def text_parts(values: Mapping[str, Any], source: str) -> list[Mapping[str, Any]]:
    """Return a configuration, and those nested in it; the last one is the text decoder's."""
    parts = [Fields(values, source).values]
    while (part := _part(parts[-1], source)) is not None:
        if len(parts) > MAX_PARTS:  # also stops at an object that holds itself
            raise ModelFileError(f"{source}: more than {MAX_PARTS} configurations are nested in each other")
        parts.append(part)
    return parts


def text_decoder(values: Mapping[str, Any], source: str) -> Fields:
    """Find the text decoder's part of a configuration, and give its fields the names of `NAMES`."""
    if classes.architecture(values) == "SpeechT5ForTextToSpeech":  # its encoder gets text, its decoder speech
        names = ("max_speech_positions", "max_text_positions")
        values = {**values, **dict(zip(names, map(values.get, reversed(names)), strict=True))}
    parts = text_parts(values, source)  # from the whole configuration to the decoder's
    fields = _named(parts[-1], source)
    fields["model_types"] = [name for part in parts if isinstance(name := part.get("model_type"), str)]
    fields["beside"] = _beside(parts)
    # A `PREFIXED` decoder gets what its encoder made as tokens.
    fields["is_encoder_decoder"] = fields.get("model_type") != PREFIXED and _has_encoder(parts)
    if fields.get("cross_attention_layers") and (tokens := _image_tokens(parts[0].get("vision_config"))) is not None:
        fields["max_source_positions"] = tokens
    encoder = _encoder(parts, source) if fields["is_encoder_decoder"] else None
    if encoder is not None:
        fields["max_source_positions"] = encoder.get("max_source_positions")
    # Fields that the decoder's part lacks may stand in an outer one. The whole configuration comes first.
    whole = ChainMap(*({name: value for name, value in part.items() if value is not None} for part in parts))
    if "num_hidden_layers" not in fields and isinstance(name := whole.get(OTHER_MODEL), str):
        raise ModelFileError(f"{source}: {OTHER_MODEL}: its text decoder is another model: give {shown(name)}")
    for name, others in OF_THE_WHOLE.items():
        fields[name] = next((whole[other] for other in others if other in whole), None)
    return Fields(fields, source)


def _beside(parts: list[Mapping[str, Any]]) -> list[str]:
    """Return the fields about windows in outer parts of unknown types that the last part, the decoder's, has otherwise.

    It is not known whether they are about the decoder.
    """
    found, names = list[str](), (*NAMES["layer_types"], *NAMES["sliding_window"])
    for part in parts[:-1]:
        if classes.of(part.get("model_type")) is classes.UNKNOWN:
            found += [name for name in names if part.get(name) not in (None, -1, 0, parts[-1].get(name))]
    return found


def _has_encoder(parts: list[Mapping[str, Any]]) -> bool:
    """Return whether a part, or the defaults of its class, says that the decoder attends over an encoder's tokens."""
    name = "is_encoder_decoder"
    for part in parts:
        default = classes.of(part.get("model_type")).defaults.get(name)
        if part.get(name, default) is True:
            return True
    return False


def _encoder(parts: list[Mapping[str, Any]], source: str) -> dict[str, Any] | None:
    """Return the fields of the encoder that the first of the parts has, by the names of `NAMES`; None: none has one."""
    found = next((part[name] for part in parts for name in ENCODERS if isinstance(part.get(name), Mapping)), None)
    return None if found is None else _named(_part(found, source) or found, source)


def _image_tokens(vision: Any) -> int | None:
    """Return the tokens of an image, for layers that attend over one: a tile's patches and one more, for each tile."""
    sizes: list[Any] = [vision.get(name) if isinstance(vision, Mapping) else None for name in TILES]
    if not all(isinstance(size, int) and 0 < size < 1 << 16 for size in sizes):
        return None
    tiles, image, patch = sizes
    return int(tiles * ((image // patch) ** 2 + 1))


def _part(values: Mapping[str, Any], source: str) -> Mapping[str, Any] | None:
    """Return the nested configuration that leads to the text decoder; None if `values` is the decoder's itself.

    Older files of some models have the decoder's fields beside the others'.
    """
    model_type = classes.type_of(Fields(values, source).values)
    known, fixed = classes.of(model_type).parts, classes.of(model_type).fixed
    for name in PARTS:
        nested = values.get(name)
        if nested is not None and name in known and not isinstance(nested, Mapping):
            raise ModelFileError(f"{source}: {name} must be an object, not {shown(nested)}")
        if isinstance(nested, Mapping):
            made = known.get(name, {})
            if model_type not in MERGING:  # the class of the part has its own defaults
                made = {field: value for field, value in made.items() if field == "model_type"}
            part = {**made, **Fields(nested, source).values}
            if classes.of(classes.type_of(part)) is not classes.UNKNOWN:
                return part
            is_own = str(part.get("model_type")).startswith(f"{model_type}_")  # own code's name for the usual part
            usual = known[name]["model_type"] if is_own and name in known else fixed.get(name)
            return part if usual is None else {**part, "model_type": usual}
    flat = next((known[name] for name in PARTS if name in known), None)
    return None if flat is None else {**flat, **values, "model_type": flat["model_type"]}


def _named(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Give a configuration's fields the names of `NAMES`, and add the defaults of its class; leave out null."""
    attention = Fields(given, source).part(ATTENTION)
    if (longest := max([len(name) for name in given if isinstance(name, str)], default=0)) > MAX_NAME:
        raise ModelFileError(f"{source}: a field's name has {longest:,} characters; {MAX_NAME} are the most")
    given = {**({} if attention is None else attention.values), **given, "model_type": classes.type_of(given)}
    known = classes.of(given["model_type"])
    given, unread = _read_by(known, given)
    stored = {new: value for name, value in given.items() if (new := known.names.get(name, name)) not in given}
    stored |= {name: value for name, value in given.items() if name not in stored and name not in known.names}
    fields = {name: value for name, value in stored.items() if value is not None}
    fields = {name: value for name, value in fields.items() if name not in NO_WINDOW or value not in (-1, 0)}
    # A field that is null has no default, except a field of the rotation.
    said = {name for name, value in stored.items() if value is not None or not name.startswith("rope_")}
    own = dict(fields)
    for name, others in NAMES.items():
        found = own.get(next(filter(own.__contains__, others), ""))
        if found is None and said.isdisjoint(others):
            found = known.defaults.get(next(filter(known.defaults.__contains__, others), ""))
        if found is not None:
            fields[name] = found
    aliases = set().union(*NAMES.values())
    fields["unread"] = unread
    return {name: value for name, value in known.defaults.items() if name not in said | aliases} | fields


def _read_by(known: classes.Class, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part a configuration's fields into what a class reads, and the fields about rotated parts that it does not read.

    The parameters of a rotation may hold such a field, too.
    """
    read, unread = dict(given), dict[str, Any]()
    if known.partial is None:
        return read, unread
    unread = {name: read.pop(name) for name in PARTIAL if name in read and name not in known.partial}
    for name in ("rope_parameters", "rope_scaling"):
        nested = read.get(name)
        if "rope_parameters" not in known.partial and isinstance(nested, Mapping):
            unread |= {own: value for own, value in nested.items() if own in PARTIAL}
            read[name] = {own: value for own, value in nested.items() if own not in PARTIAL}
    return read, unread
