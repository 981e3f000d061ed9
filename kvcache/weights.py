"""A model's weights in float32, from safetensors or GGUF, under Hugging Face's names.

Blocks of quantised GGUF files are decoded by the ``gguf`` package, safetensors are read by theirs; each is imported
when a file needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import ModelFileError
from kvcache.files import INDEX, find_weights
from kvcache.gguf import Header, Tensor, read_header
from kvcache.tokens import import_package

__all__ = ["F32", "Tensors"]

F32: TypeAlias = NDArray[np.float32]

# Hugging Face's name: GGUF's
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "rope_freqs": "rope_freqs",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class _Stored:
    """A tensor that is decoded when it is taken."""

    shape: tuple[int, ...]
    decode: Callable[[], F32]


class Tensors:
    """The tensors of a folder or a GGUF file; each is taken once, in the shape that the configuration implies.

    Parameters
    ----------
    path : Path
        A folder with ``model.safetensors``, or the shards of its index; or a GGUF file.

    Raises
    ------
    ModelFileError
        If a file is missing or damaged, or a tensor is of a type that is not read.
    ImportError
        If a package is needed to read it, and not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._in_folder = path.is_dir()
        self._stored = _from_folder(path) if self._in_folder else _from_gguf(read_header(path))

    def __contains__(self, name: str) -> bool:
        return self._name(name) in self._stored

    def _name(self, name: str) -> str:
        """What a tensor is called in the file."""
        if self._in_folder:
            return name
        stem, _, kind = name.rpartition(".")
        layer = re.match(r"model\.layers\.(\d+)\.", stem)
        return f"blk.{layer[1]}.{NAMES[stem[layer.end() :]]}.{kind}" if layer else f"{NAMES[stem]}.{kind}"

    def take(self, name: str, *shape: int) -> F32:
        """Decode a tensor and forget it here."""
        name = self._name(name)
        stored = self._stored.pop(name, None)
        if stored is None:
            raise ModelFileError(f"{self.path} has no tensor {name}")
        if stored.shape != shape:
            raise ModelFileError(
                f"{self.path}: tensor {name} has the shape {list(stored.shape)}, where {list(shape)} is needed"
            )
        return stored.decode()

    def finish(self, *unused: str) -> None:
        """Refuse what was not taken: leaving out a bias or a norm gives text that is wrong and looks right."""
        names = {self._name(name) for name in unused}
        for name in self._stored:
            if name not in names and not name.endswith(".rotary_emb.inv_freq"):
                raise ModelFileError(f"{self.path} has a tensor {name}, which a plain Llama has not")


# --- safetensors -------------------------------------------------------------------------------------------------


def _from_folder(folder: Path) -> dict[str, _Stored]:
    found = {}
    for path in _shards(folder):
        found.update(_from_safetensors(path))
    return found


def _shards(folder: Path) -> list[Path]:
    files = set(find_weights(folder))
    if None in files:
        raise ModelFileError(f"{folder / INDEX}: weight_map must name files of this folder")
    return sorted(file for file in files if file is not None)


def _from_safetensors(path: Path) -> dict[str, _Stored]:
    package = import_package("safetensors")
    try:
        entries = package.deserialize(path.read_bytes())
    except FileNotFoundError:
        raise ModelFileError(f"{path.parent} has no {path.name}") from None
    except package.SafetensorError as error:
        raise ModelFileError(f"{path} is not a whole safetensors file: {error}") from None
    for name, entry in entries:
        if entry["dtype"] not in ("F32", "F16", "BF16"):
            raise ModelFileError(
                f"{path}: tensor {name} has the type {entry['dtype']}; F32, F16 and BF16 are supported"
            )
    return {name: _Stored(tuple(entry["shape"]), partial(_to_f32, entry)) for name, entry in entries}


def _to_f32(entry: dict[str, Any]) -> F32:
    """Decode a stored tensor; bf16 is the upper half of an f32, which NumPy has no type for."""
    dtype, data = entry["dtype"], entry["data"]
    if dtype == "BF16":
        flat = (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        flat = np.frombuffer(data, "<f4" if dtype == "F32" else "<f2").astype(np.float32)
    return flat.reshape(entry["shape"])


# --- GGUF --------------------------------------------------------------------------------------------------------


def _from_gguf(header: Header) -> dict[str, _Stored]:
    parts = header.metadata.get("split.count", 1)
    if parts != 1:
        raise ModelFileError(f"{header.path} is a part of a model in {parts} files; only whole ones are read")
    package = import_package("gguf")
    data = np.memmap(header.path, np.uint8, "r")
    return {
        name: _Stored(tensor.shape, partial(_dequantize, package, header, data, tensor))
        for name, tensor in header.tensors.items()
    }


def _dequantize(package: Any, header: Header, data: NDArray[np.uint8], tensor: Tensor) -> F32:
    """Decode a tensor; its blocks lie along the innermost axis."""
    error = ModelFileError(f"{header.path}: tensor {tensor.name} has the type {tensor.type}, which is not supported")
    if tensor.nbytes is None:
        raise error
    raw = data[tensor.offset :][: tensor.nbytes].reshape(*tensor.shape[:-1], -1)
    try:
        values = package.quants.dequantize(raw, package.GGMLQuantizationType[str(tensor.type)])
    except (KeyError, NotImplementedError):
        raise error from None
    return np.array(values, np.float32)  # the file's own bytes may change
