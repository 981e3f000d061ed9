"""Adapters of PEFT (LoRA) that the command line names: their folders are checked, and put into the model."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache.errors import described, shown
from kvcache.models.reading import read_json

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# Fields of a configuration that may have any value. Fields of other methods than LoRA, which change more than products
# with weights, may not be set, nor may fields of later versions.
FIELDS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config",
    "modules_to_save", "peft_type", "peft_version", "r", "rank_pattern", "revision", "target_modules", "task_type",
    "trainable_token_indices", "use_dora", "use_rslora",
}  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder, which was checked as far as it can be without the model."""

    name: str  # that clients give
    folder: Path
    config: Any  # PEFT's

    def __str__(self) -> str:
        return f"--adapter {self.name}={self.folder}"


def read_adapters(folders: Iterable[tuple[str, Path]], model: str) -> list[Adapter]:
    """Read the configurations of adapters; raise ValueError for folders that are not served.

    `model` is the name of their model.
    """
    folders = [*folders]
    if not folders:
        return []
    try:
        import peft
    except ModuleNotFoundError:
        raise ImportError("--adapter: there is no module peft; run: pip install 'kvcache[serve]'") from None
    names, found, default = {model}, [], peft.LoraConfig()
    for name, folder in folders:
        option = f"--adapter {name}={folder}"
        if name in names:
            raise ValueError(f"{option}: the name is taken, by the model or another adapter")
        names.add(name)
        _check_files(option, folder)
        fields = read_json(folder / CONFIG)
        if fields.get("peft_type") != "LORA":
            raise ValueError(f"{option}: its peft_type is {shown(fields.get('peft_type'))}: LORA alone is served")
        if fields.get("task_type") not in (None, "CAUSAL_LM"):
            raise ValueError(f"{option}: its task_type is {shown(fields['task_type'])}: CAUSAL_LM is needed")
        for field in sorted(fields.keys() - FIELDS):
            if fields[field] and fields[field] != getattr(default, field, None):
                raise ValueError(f"{option}: its configuration has {shown(field)}, which is not served")
        try:
            config = peft.LoraConfig.from_pretrained(str(folder))
        except Exception as error:  # of fields with wrong values
            raise ValueError(f"{option}: its {CONFIG} is wrong: {described(error)}") from None
        found.append(Adapter(name, folder, config))
    return found


def _check_files(option: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{option}: there is no such folder")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{option}: it has no {CONFIG}, which PEFT's save_pretrained writes")
    if (folder / WEIGHTS).is_file():
        return
    if (folder / PICKLED).is_file():
        raise ValueError(f"{option}: its weights are pickled, which may run code: save them as {WEIGHTS}")
    raise ValueError(f"{option}: it has no {WEIGHTS}")


def add_adapters(model: Any, adapters: Iterable[Adapter]) -> dict[str, str]:
    """Put adapters into a model. None is active then. Return their names in the model, by those that clients give.

    Raise ValueError if one does not fit.
    """
    names: dict[str, str] = {}
    wrapped = None
    own = [(path, weight, _mark(weight)) for path, weight in _weights_of(model)]
    for adapter in adapters:
        names[adapter.name] = name = f"adapter{len(names)}"  # PEFT takes no dots
        try:
            with warnings.catch_warnings(action="ignore"):
                wrapped = _with_adapter(model, wrapped, name, adapter.config)
                found = wrapped.load_adapter(str(adapter.folder), name, torch_device="cpu")
        except Exception as error:  # PEFT's, of many kinds
            raise ValueError(f"{adapter}: it does not fit the model: {described(error)}") from None
        if wrong := [*found.missing_keys, *found.unexpected_keys]:
            raise ValueError(f"{adapter}: it does not fit the model: it lacks {wrong[0]}, or the model does")
        if changed := [path for path, weight, mark in own if mark != _mark(weight)]:
            raise ValueError(f"{adapter}: it changes weights of the model itself, such as {changed[0]}")
    if wrapped is not None:
        wrapped.base_model.disable_adapter_layers()
    return names


def _with_adapter(model: Any, wrapped: Any, name: str, config: Any) -> Any:
    """Return PEFT's model with an adapter that has no weights yet."""
    import peft

    if wrapped is None:
        return peft.PeftModel(model, config, name)
    wrapped.add_adapter(name, config)
    return wrapped


def _weights_of(model: Any) -> Iterable[tuple[str, Any]]:
    return itertools.chain(model.named_parameters(), model.named_buffers())


def _mark(weight: Any) -> tuple[int, int]:
    """Return what changes when somebody writes to a tensor: torch counts that, unless it gets other memory."""
    return weight._version, weight.data_ptr()
