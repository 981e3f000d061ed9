"""Read a model's weights as float32, from safetensors or GGUF, under Hugging Face's names.

The package ``gguf``, imported when a file needs it, decodes the blocks of quantised GGUF files. Safetensors are decoded
here, each tensor when it is taken. The package ``safetensors`` either maps the file, so that cutting the file kills the
process, or takes several times the file's size in memory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import ModelFileError, plain, shown
from kvcache.models.gguf import Header, Tensor, read_header
from kvcache.models.reading import INDEX, MAX_AXES, Stamp, find_weights, open_file, read_safetensors_header
from kvcache.models.tokenizer import import_package

F32: TypeAlias = NDArray[np.float32]

# Hugging Face's name: GGUF's name
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
BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of an element, by safetensors' name of the type


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file, decoded when it is taken."""

    shape: tuple[int, ...]
    decode: Callable[[], F32]


class Tensors:
    """The tensors of a folder or a GGUF file; each is taken once, in the shape that the configuration implies.

    Raise `ModelFileError` if a file is missing or damaged, a tensor has an unsupported type, or two tensors overlap.
    Raise ``ImportError`` if a package that reads the file is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._in_folder = os.path.isdir(path)
        self._stored = _from_folder(path) if self._in_folder else _from_gguf(read_header(path))

    def __contains__(self, name: str) -> bool:
        return self._name(name) in self._stored

    def _name(self, name: str) -> str:
        """Return a tensor's name in the file."""
        if self._in_folder:
            return name
        stem, _, kind = name.rpartition(".")
        layer = re.match(r"model\.layers\.(\d+)\.", stem)
        return f"blk.{layer[1]}.{NAMES[stem[layer.end() :]]}.{kind}" if layer else f"{NAMES[stem]}.{kind}"

    def take(self, name: str, *shape: int) -> F32:
        """Decode a tensor and drop its entry; refuse one with NaN or infinity, which would make every logit NaN."""
        name = self._name(name)
        stored = self._stored.pop(name, None)
        if stored is None:
            raise ModelFileError(f"{plain(self.path)} has no tensor {name}")
        if stored.shape != shape:
            raise ModelFileError(
                f"{plain(self.path)}: tensor {name} has the shape {list(stored.shape)}, where {list(shape)} is needed"
            )
        values = stored.decode()
        if not np.isfinite((values.min(), values.max())).all():  # min and max are NaN if any element is
            raise ModelFileError(f"{plain(self.path)}: tensor {name} has an element that is no finite number")
        return values

    def finish(self, *unused: str) -> None:
        """Refuse tensors that were neither taken nor named `unused`.

        A model without one of its biases or norms gives wrong text that looks right.
        """
        names = {self._name(name) for name in unused}
        for name in self._stored:
            if name not in names and not name.endswith(".rotary_emb.inv_freq"):
                raise ModelFileError(f"{plain(self.path)} has a tensor {plain(name)}, which a plain Llama has not")


# --- safetensors -------------------------------------------------------------------------------------------------


def _from_folder(folder: Path) -> dict[str, _Stored]:
    found = {}
    for path in shards(folder):
        found.update(_from_safetensors(path))
    return found


def shards(folder: Path) -> list[Path]:
    """Return a folder's files of weights, sorted; raise `ModelFileError` if its index names others."""
    files = set(find_weights(folder))
    if None in files:
        raise ModelFileError(f"{plain(folder / INDEX)}: weight_map must name files of this folder")
    return sorted(file for file in files if file is not None)


def _from_safetensors(path: Path) -> dict[str, _Stored]:
    """Return the tensors of a file by name; refuse a file that is cut off, or has bytes of none."""
    with open_file(path) as file:
        entries, begin = read_safetensors_header(file)
        places = {name: _place(name, entry, path) for name, entry in entries.items()}
        end = begin
        for name, (_, _, offset, nbytes) in sorted(places.items(), key=lambda place: place[1][2:]):
            if begin + offset != end:  # the format allows neither gaps nor overlaps
                what = "overlaps another" if begin + offset < end else "follows bytes that are of none"
                raise file.error(f"is not a whole safetensors file: tensor {plain(name)} {what}")
            end += nbytes
        if end != file.size:
            raise file.error(f"is not a whole safetensors file: it ends at byte {file.size:,}, its tensors at {end:,}")
    return {
        name: _Stored(shape, partial(_to_f32, path, file.stamp, dtype, shape, begin + offset, nbytes))
        for name, (dtype, shape, offset, nbytes) in places.items()
    }


def _place(name: str, entry: Any, path: Path) -> tuple[str, tuple[int, ...], int, int]:
    """Return a tensor's type, shape, offset from the end of the header, and bytes."""
    values = entry if isinstance(entry, dict) else {}
    dtype = values.get("dtype")
    if not isinstance(dtype, str) or dtype not in BYTES:
        known = plain(dtype) if isinstance(dtype, str) else shown(dtype)
        raise ModelFileError(
            f"{plain(path)}: tensor {plain(name)} has the type {known}; F32, F16 and BF16 are supported"
        )
    shape, offsets = _counts(values.get("shape")), _counts(values.get("data_offsets"))
    if shape is not None and offsets is not None and len(offsets) == 2:
        nbytes = BYTES[dtype] * math.prod(shape)
        if offsets[1] - offsets[0] == nbytes:
            return dtype, shape, offsets[0], nbytes
    raise ModelFileError(
        f"{plain(path)} is not a whole safetensors file: tensor {plain(name)} of shape {shown(values.get('shape'))} "
        f"cannot have data_offsets {shown(values.get('data_offsets'))}"
    )


def _counts(values: Any) -> tuple[int, ...] | None:
    """Return at most `MAX_AXES` whole numbers below 2^63 as a tuple; None for anything else."""
    if not isinstance(values, list) or len(values) > MAX_AXES:
        return None
    return tuple(values) if all(type(value) is int and 0 <= value < 2**63 for value in values) else None


def _to_f32(path: Path, stamp: Stamp, dtype: str, shape: tuple[int, ...], offset: int, nbytes: int) -> F32:
    """Read and decode a tensor; NumPy has no bf16, which is the upper half of an f32."""
    with open_file(path, stamp) as file:
        data = file.read_array(offset, nbytes)
    if dtype == "BF16":
        flat = (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        flat = data.view("<f4" if dtype == "F32" else "<f2").astype(np.float32, copy=False)
    return flat.reshape(shape)


# --- GGUF --------------------------------------------------------------------------------------------------------


def _from_gguf(header: Header) -> dict[str, _Stored]:
    """Return the tensors of a GGUF file by name, for the package gguf to decode."""
    parts = header.metadata.get("split.count", 1)
    if parts != 1:
        raise ModelFileError(
            f"{plain(header.path)} is a part of a model in {shown(parts)} files; only whole ones are read"
        )
    package = import_package("gguf")
    return {
        name: _Stored(tensor.shape, partial(_dequantize, package, header, tensor))
        for name, tensor in header.tensors.items()
    }


def _dequantize(package: Any, header: Header, tensor: Tensor) -> F32:
    """Read and decode a tensor; its blocks lie along the innermost axis."""
    error = ModelFileError(
        f"{plain(header.path)}: tensor {plain(tensor.name)} has the type {tensor.type}, which is not supported"
    )
    if tensor.nbytes is None:
        raise error
    with open_file(header.path, header.stamp) as file:
        raw = file.read_array(tensor.offset, tensor.nbytes).reshape(*tensor.shape[:-1], -1)
    try:
        values = package.quants.dequantize(raw, package.GGMLQuantizationType[str(tensor.type)])
    except (KeyError, NotImplementedError):
        raise error from None
    return np.asarray(values, np.float32)
