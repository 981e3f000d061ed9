"""The fields of a model's configuration, whatever the file's format."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcache.errors import ModelFileError, plain, shown
from kvcache.models import gguf, gguf_models
from kvcache.models.fields import Fields, find_config, is_gguf, read_json, text_decoder

__all__ = ["read_config"]

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
        _advise(source, path)
    if is_gguf(path):
        return gguf_models.read(gguf.read_header(path), plain(path))
    return text_decoder(read_json(path), plain(path))


def _advise(source: str | os.PathLike[str], path: Path) -> None:
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
