"""The fields of a model's configuration, whatever the file's format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvcache.errors import ModelFileError, plain, shown
from kvcache.models import gguf, gguf_models
from kvcache.models.fields import Fields, find_config, is_gguf, read_json, text_decoder

__all__ = ["read_config"]

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
        return text_decoder(source, "config")
    if hasattr(source, "to_dict"):
        return text_decoder(source.to_dict(), type(source).__name__)
    if not isinstance(source, str) and not hasattr(source, "__fspath__"):
        raise TypeError(f"config={shown(source)}: give a path, a mapping, or a configuration of transformers")
    path = find_config(source)
    adapter = path.with_name(ADAPTER)
    if path == adapter or (not os.path.lexists(path) and os.path.isfile(adapter)):
        base = read_json(adapter).get("base_model_name_or_path")
        raise ModelFileError(f"{plain(adapter)} describes an adapter: give the folder of its model, {shown(base)}")
    if is_gguf(path):
        return gguf_models.read(gguf.read_header(path), plain(path))
    return text_decoder(read_json(path), plain(path))
