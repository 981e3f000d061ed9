"""The adapters that PEFT has put into a model: which one its passes are computed with, and what its weights are."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from kvcache.errors import shown

State = tuple[list[str], bool]  # of a layer: its active adapters, and whether it leaves all of them out


class Adapters:
    """Switches between the adapters of a model. `activate(None)` makes it what it was at first.

    PEFT's own ``set_adapter`` and ``disable_adapters`` also visit every weight, which takes as long as a token of a
    small model does. So the layers' attributes are set here, of which these calls change two that passes depend on.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.names: list[str] = [*getattr(model, "peft_config", ())]
        self._layers = _layers_of(model) if self.names else []  # those that adapters change
        before = [([*layer.active_adapters], layer.disable_adapters) for layer in self._layers]
        self._states: dict[str | None, list[State]] = {None: before}  # of the layers, by active adapter
        self._active: str | None = None  # the adapter that was activated last; None: as at first

    def check(self, name: str) -> None:
        """Raise ValueError unless the model has this adapter, and can switch to it."""
        if name not in self.names:
            has = f"are {', '.join(map(repr, self.names))}" if self.names else "are none"
            raise ValueError(f"adapter={shown(name)}: is none of the model's adapters, which {has}")
        if any(getattr(layer, "merged", False) for layer in self._layers):
            raise ValueError(f"adapter={name!r}: an adapter is merged into the model: call unmerge_adapter() first")

    def activate(self, name: str | None) -> None:
        """Have the passes that follow computed with an adapter alone; None: as at first."""
        if name == self._active:
            return
        if name is not None and name not in self._states:
            self._states[name] = [(_active_in(layer, name), False) for layer in self._layers]
        for layer, (active, is_disabled) in zip(self._layers, self._states[name], strict=True):
            layer._active_adapter, layer._disable_adapters = active, is_disabled
        self._active = name

    def fingerprint(self, name: str) -> bytes:
        """Return a hash of an adapter's weights and configuration, the same under any name."""
        digest = hashlib.blake2b(digest_size=32)
        config = self._model.peft_config[name].to_dict()
        digest.update(json.dumps(config, sort_keys=True, default=_as_json).encode())
        for path, weight in sorted(self._model.state_dict().items()):
            parts = path.split(".")
            if name in parts:
                path = ".".join(part for part in parts if part != name)
                digest.update(f"\0{path} {weight.dtype} {[*weight.shape]}\0".encode())
                digest.update(weight.contiguous().flatten().view(torch.uint8).numpy())
        return digest.digest()


def _layers_of(model: Any) -> list[Any]:
    """Return the layers of a model that adapters change. It has some, so PEFT is there."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def _active_in(layer: Any, name: str) -> list[str]:
    """Return the adapters that are active in a layer if this one is to be."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(layer, AuxiliaryTrainingWrapper):
        has_it = layer.check_set_adapter([name]) is not None
    else:
        has_it = any(name in getattr(layer, weights) for weights in layer.adapter_layer_names)
    return [name] if has_it else []


def _as_json(value: Any) -> Any:
    """Return what stands for a value in JSON; sets have no order."""
    return sorted(value) if isinstance(value, set) else str(value)
