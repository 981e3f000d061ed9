"""Weigh a model: the bytes of its weights, and how many of them decoding reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from kvcache.errors import KVCacheError, ModelFileError, plain
from kvcache.layer import FloatDType, to_dtype
from kvcache.models import gguf, parameters
from kvcache.models.configuration import read_config
from kvcache.models.parameters import Parts
from kvcache.models.reading import INDEX, expanded, find_weights, is_gguf

# Types of weights: elements and bytes of a block. ggml's whole numbers are not among them.
WEIGHT_TYPES = {
    **{name.lower(): sizes for name, *sizes in gguf.TENSOR_TYPES.values() if not re.fullmatch(r"I\d+", name)},
    "fp8": [1, 1],
    "int8": [1, 1],
}
# The names of these types in a configuration.
NAMED = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}
# Part of the names of modules that a configuration leaves unpacked, if it packs experts alone.
ATTENTION = "attn"


@dataclass(frozen=True)
class Weights:
    """A model's weights, which take memory beside the cache."""

    nbytes: int | None  # None: they are not counted
    source: str  # where the figure comes from, or why there is none
    num_parameters: int | None = None  # None: not counted
    read: int | None = None  # bytes that are read to decode a token; None: it is not known how many
    experts: int = 0  # bytes of the experts among which tokens choose
    share_used: float = 1.0  # the share of the experts that a token goes through
    multiplied: int | None = None  # parameters that a token is multiplied by, `head` among them; None: not counted
    head: int = 0  # parameters of the output: of a prompt, the last token alone is multiplied by them


class _Types(NamedTuple):
    """The types of a model's weights; None: no type of `WEIGHT_TYPES`."""

    experts: str | None
    others: str | None
    note: str = ""  # why they are not known, or what was assumed

    def sizes(self, parts: Parts) -> tuple[int, int, int]:
        """Return the bytes of the experts, of the other parameters, and of the others that no token reads."""
        others = self.others or "f16"
        numbers = parts.experts, parts.total - parts.experts, parts.unread
        dtypes = self.experts or others, others, others
        blocks = (WEIGHT_TYPES[dtype] for dtype in dtypes)
        experts, rest, unread = (-(-n // size) * nbytes for n, (size, nbytes) in zip(numbers, blocks, strict=True))
        return experts, rest, unread


def weigh(model: Any, given: str | int | None = None) -> Weights:
    """Return the size of a model's weights, and how many bytes decoding reads.

    `given` is a type of `WEIGHT_TYPES`, or the number of bytes. All parameters count in that type, unless a
    configuration packs the experts alone, and in that type. By default: the bytes of the model's files if they are
    there, or the bytes that the files' index gives. Otherwise parameters count in the types that the configuration
    names, as `kvcache.models.parameters.count` counts them. Raise `ModelFileError` or `NotSupportedError` if they
    cannot be counted in a type that is given.
    """
    if given == 0:
        return Weights(0, "as given", read=0, multiplied=0)
    path = expanded(model) if isinstance(model, str | Path) else None
    if path is not None and path.is_file() and is_gguf(path):
        return _weigh_gguf(*_gguf_files(path), given)
    types = _own_types(model)
    if isinstance(given, str) and given != types.experts:
        types = _Types(given, given)
    found = None if isinstance(given, str) else _found(path) if given is None else Weights(given, "as given")
    try:
        parts = parameters.parts(model, may_make=found is None or parameters.has_experts(model))
    except KVCacheError as error:
        if isinstance(given, str):  # an index may count them nevertheless
            found = _in_types(types, Parts(parameters.count(model)))
        found = Weights(None, str(error)) if found is None else found
        return found if parameters.has_experts(model) else replace(found, read=found.nbytes)  # else a token reads all
    return _with_read(found or _in_types(types, parts), types, parts)


def multiplied_type(model: Any, given: str | int | None) -> FloatDType:
    """Return the type in which weights are multiplied, by `given` or the configuration. Packed weights have f32."""
    named = given if isinstance(given, str) else read_config(model).get("dtype")
    try:
        return cast(FloatDType, to_dtype(named, "dtype", get_args(FloatDType)))
    except ValueError:
        return "f32"


def _with_read(found: Weights, types: _Types, parts: Parts) -> Weights:
    """Add the bytes that decoding reads, in proportion to what they would be in these types."""
    if found.nbytes is None:
        return found
    experts, others, unread = types.sizes(parts)
    scale = found.nbytes / max(1, experts + others)
    read = round(scale * (others - unread + experts * parts.share_used))
    return replace(
        found,
        read=read,
        experts=round(scale * experts),
        share_used=parts.share_used,
        multiplied=parts.multiplied,
        head=parts.head,
    )


def _in_types(types: _Types, parts: Parts) -> Weights:
    """Count parameters in their types."""
    number = f"{parts.total:,} parameters"
    if types.experts is None or types.others is None:
        return Weights(None, f"{number}{types.note}", parts.total)
    experts, others, _ = types.sizes(parts)
    is_mixed = types.experts != types.others
    stored = f", experts in {types.experts}, others in {types.others}" if is_mixed else f" in {types.others}"
    return Weights(experts + others, f"{number}{stored}{types.note}", parts.total)


def _own_types(model: Any) -> _Types:
    """Return the types in which a configuration says that weights are stored."""
    try:
        config = read_config(model)
        packed = config.part("quantization_config")
        named = config.text("dtype", "").removeprefix("torch.")
        how = None if packed is None else packed.text("quant_method", "its quantization_config")
        unpacked = [] if packed is None else packed.sequence("modules_to_not_convert") or []
    except KVCacheError as error:
        return _Types(None, None, f": {error}")
    plain_type = NAMED.get(named, "bf16" if packed else None)
    if how is not None:
        if how not in WEIGHT_TYPES:
            return _Types(None, None, f", packed by {plain(how)}")
        is_apart = any(ATTENTION in str(name) for name in unpacked)
        return _Types(how, plain_type if is_apart else how)
    if named and plain_type is None:
        return _Types(None, None, f" in {plain(named)}")
    stored = plain_type or "f32"
    return _Types(stored, stored, "" if named else ", as the configuration names no type")


def _found(path: Path | None) -> Weights | None:
    """Return the size of the weights beside a configuration, or of the files that an index names; None: no weights."""
    if path is None:
        return None
    folder = path if path.is_dir() else path.parent
    if beside := _weight_files(folder):
        return _files(beside, len(beside))
    index = parameters.read_index(folder)
    return None if index is None else Weights(index.nbytes, f"as {INDEX} says", index.num_parameters)


def _weigh_gguf(found: Sequence[Path], num_files: int, given: str | int | None) -> Weights:
    """Weigh the files there are of a GGUF that may be split; a type needs all of them."""
    is_whole = len(found) == num_files
    if isinstance(given, str) and not is_whole:
        raise ModelFileError(f"{plain(found[0])}: {len(found)} of the model's {num_files} files are there")
    weights = Weights(given, "as given") if isinstance(given, int) else _files(found, num_files)
    if not is_whole:
        return weights
    headers = [*map(gguf.read_header, found)]
    counted = parameters.parts_in_gguf(headers, in_bytes=False)
    parts = counted if isinstance(given, str) else parameters.parts_in_gguf(headers, in_bytes=True)
    types = _Types(given, given) if isinstance(given, str) else _Types("int8", "int8")  # parts are bytes already
    if not parts.total and given is None:
        return Weights(None, "the file has no tensors")
    known = _with_read(_in_types(types, parts) if isinstance(given, str) else weights, types, parts)
    return replace(known, multiplied=counted.multiplied, head=counted.head)


def _files(files: Sequence[Path], num_files: int) -> Weights:
    if len(files) < num_files:
        return Weights(None, f"{len(files)} of the model's {num_files} files are there")
    return Weights(sum(file.stat().st_size for file in files), "the model's files")


def _gguf_files(path: Path) -> tuple[list[Path], int]:
    """Return the files there are of a GGUF that may be split, and how many there should be."""
    part = re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\.gguf)", path.name)
    if part is None or not int(part[3]):
        return [path], 1
    names = [f"{part[1]}{i:05}{part[2]}" for i in range(1, int(part[3]) + 1)]
    return [path.parent / name for name in names if (path.parent / name).is_file()], len(names)


def _weight_files(folder: Path) -> list[Path]:
    """Return a folder's weights: the safetensors that transformers would read, else others, else PyTorch's; or none."""
    named = find_weights(folder)
    files = [file for file in named if file is not None and file.is_file()]
    if len(named) == len(files):
        return files
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin")) if len(named) == 1 else []
