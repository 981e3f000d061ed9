"""Plan a model's cache: its memory by type and policy, what fits on this machine, and how fast decoding reads it.

`make` computes the plan without allocating a cache, by `Layer.most_bytes`. The speed of decoding follows from the rate
at which this machine reads rows of each type, which `kvcache.tools.bench` measures.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache import system
from kvcache.arguments import INT32_MAX
from kvcache.errors import KVCacheError, ModelFileError, NotSupportedError, plain
from kvcache.layer import DType, Layer
from kvcache.models import gguf, parameters
from kvcache.models.configuration import read_config
from kvcache.models.fields import INDEX, find_weights, is_gguf
from kvcache.models.reading import expanded
from kvcache.models.shapes import PREFILL_TOKENS, Shape
from kvcache.policy import CrossAttention, FullAttention, Policy, most_rows, written
from kvcache.selecting import rows_read, with_sketches

if TYPE_CHECKING:
    from kvcache.tools.bench import SelectRates

__all__ = [
    "AS_IT_IS", "WEIGHT_TYPES", "Group", "Memory", "Plan", "Row", "Weights", "available_memory", "make", "variants",
    "weigh",
]  # fmt: skip

MOST_TOKENS = INT32_MAX - 1
AS_IT_IS = "the model's own"


# Types of weights: elements and bytes of a block. ggml's whole numbers are not among them.
WEIGHT_TYPES = {
    **{name.lower(): sizes for name, *sizes in gguf.TENSOR_TYPES.values() if not re.fullmatch(r"I\d+", name)},
    "fp8": [1, 1],
    "int8": [1, 1],
}
# The names of these types in a configuration.
NAMED = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


@dataclass(frozen=True)
class Weights:
    """A model's weights, which take memory beside the cache."""

    nbytes: int | None  # None: they are not counted
    source: str  # where the figure comes from, or why there is none
    num_parameters: int | None = None  # None: not counted


@dataclass(frozen=True)
class Memory:
    """Free memory, and the weights that it must hold as well."""

    free: int
    source: str  # where the figure comes from: the machine or a cgroup
    weights: int | None  # bytes; None: they are not counted
    weights_source: str  # where this figure comes from, or why there is none
    num_parameters: int | None  # None: not counted

    @property
    def left(self) -> int:
        """The bytes that are left for the cache; all that are free if the weights are not counted."""
        return max(0, self.free - (self.weights or 0))


@dataclass(frozen=True)
class Group:
    """Layers of the cache with the same heads, sizes and policy."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    policy: str
    shares: bool  # whether the layers read other layers' rows, and store none
    bytes_per_token: dict[DType, int]
    nbytes: dict[DType, int]  # bytes of all sequences at full length
    beside: bool  # whether the layers lie beside layers of the model: index keys, what is pooled, cross-attention


@dataclass(frozen=True)
class Row:
    """The cost of one element type under one policy, or with selected rows."""

    policy: str  # of `variants`
    dtype: DType
    bytes_per_token: int  # before anything expires
    nbytes: int  # bytes of all sequences at full length
    fits: bool | None  # None: the cache does, and the weights are not counted
    longest_context: int | None  # most tokens of each sequence, in the memory that is left; None: no limit
    tokens_per_second: float | None  # attention alone, decoding one sequence of full length; None: not measured
    prompt_nbytes: int  # more bytes while a prompt runs in pieces of PREFILL_TOKENS: windows hold an open batch, too
    read_nbytes: int  # bytes that attention reads to decode a token of one sequence of full length
    sketch_nbytes: int  # bytes of sketches, which `nbytes` counts, too
    num_selecting: int  # layers that have sketches


@dataclass(frozen=True)
class _Read:
    """The bytes that attention reads to decode a token."""

    rows: int  # of layers that read all rows that they see, or rows that an indexer chooses
    sketches: int
    selected: int  # rows that sketches select


@dataclass(frozen=True)
class Plan:
    """The plan of a model's cache on this machine."""

    model_type: str
    num_layers: int  # of the model; its cache may have more
    model_context: int | None  # context length of the training
    context: int
    sequences: int
    memory: Memory
    groups: list[Group]
    rows: list[Row]


def make(
    shape: Shape,
    memory: Memory,
    *,
    context: int,
    sequences: int = 1,
    dtypes: Sequence[DType] | None = None,
    window: Policy | None = None,
    select: int | None = None,
    rates: Mapping[DType, float] | None = None,
    select_rates: Mapping[DType, SelectRates] | None = None,
) -> Plan:
    """Plan a model's cache on a machine with this `memory`; the plan has a row for each of `variants`, and each type.

    `sequences` of `context` tokens each are to be held, in each of `dtypes`, by default every type that can store the
    model's heads. `window` is a policy to plan with as well, in place of `FullAttention`; with `select`, decoding
    selects about so many rows. `rates` are the bytes per second that attention reads, by type, which
    `kvcache.tools.bench.decode_rates` measures; `bench.select_rates` measures `select_rates`.

    Raise `NotSupportedError` if no layer can select rows.
    """
    by_type = {dtype: variants(shape, dtype, window, select) for dtype in dtypes or shape.dtypes}
    own = {dtype: made[AS_IT_IS] for dtype, made in by_type.items()}
    rows = []
    for policy in next(iter(by_type.values())):
        for dtype, made in by_type.items():
            read = _read(made[policy], shape, context, select)
            speed = _speed(read, (rates or {}).get(dtype), (select_rates or {}).get(dtype))
            rows.append(_row(policy, dtype, made[policy], context, sequences, memory, read, speed))
    groups = _groups(own, shape.num_layers, context, sequences)
    return Plan(shape.model_type, shape.num_layers, shape.max_seq_len, context, sequences, memory, groups, rows)


def variants(shape: Shape, dtype: DType, window: Policy | None, select: int | None) -> dict[str, list[Layer]]:
    """Return the layers to plan with, by name: the model's own, with a window, and with sketches.

    Raise `NotSupportedError` if rows are to be selected, and no layer can.
    """
    own = [replace(layer, k_dtype=dtype, v_dtype=dtype) for layer in shape.layers]
    made = {AS_IT_IS: own}
    if window is not None:
        made[written(window)] = [
            replace(layer, policy=window) if layer.policy == FullAttention() else layer for layer in own
        ]
    if select is not None:
        if any(layer.v_head_dim == 0 for layer in own):
            raise NotSupportedError(f"select={select}: this {plain(shape.model_type)} chooses rows by an indexer")
        made[f"select={select}"] = with_sketches(own, select)
    return made


def available_memory(model: Any = None, weights: str | int | None = None) -> Memory:
    """Return the free memory of the machine and of this process's cgroups, and a model's weights, by `weigh`.

    Without a model the weights are 0. Raise ``ImportError`` if the system has no /proc/meminfo, and psutil is not
    installed.
    """
    found = Weights(0, "there is no model") if model is None else weigh(model, weights)
    return Memory(*system.available_memory(), found.nbytes, found.source, found.num_parameters)


def weigh(model: Any, given: str | int | None = None) -> Weights:
    """Return the size of a model's weights.

    `given` is a type of `WEIGHT_TYPES`, in which every parameter is counted, or the number of bytes. By default: the
    bytes of the model's files if they are there, or the bytes that the files' index gives. Otherwise every parameter
    counts in the type that the configuration names, as `kvcache.models.parameters.count` counts them. Raise
    `ModelFileError` or `NotSupportedError` if parameters cannot be counted.
    """
    if isinstance(given, int):
        return Weights(given, "as given")
    path = expanded(model) if isinstance(model, str | Path) else None
    if given is not None:
        return _in_type(given, _num_parameters(model, path))
    if path is not None and path.is_file() and is_gguf(path):
        return _files(*_gguf_files(path))
    if path is not None:
        files = _weight_files(path if path.is_dir() else path.parent)
        if files:
            return _files(files, len(files))
        index = parameters.read_index(path if path.is_dir() else path.parent)
        if index is not None:
            return Weights(index.nbytes, f"as {INDEX} says", index.num_parameters)
    return _counted(model)


def _num_parameters(model: Any, path: Path | None) -> int:
    if path is not None and path.is_file() and is_gguf(path):
        files, num_files = _gguf_files(path)
        if len(files) < num_files:
            raise ModelFileError(f"{plain(path)}: {len(files)} of the model's {num_files} files are there")
        return sum(parameters.in_gguf(gguf.read_header(file)) for file in files)
    return parameters.count(model)


def _in_type(dtype: str, num_parameters: int, note: str = "") -> Weights:
    elements, nbytes = WEIGHT_TYPES[dtype]
    source = f"{num_parameters:,} parameters in {dtype}{note}"
    return Weights(-(-num_parameters // elements) * nbytes, source, num_parameters)


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


def _counted(model: Any) -> Weights:
    """Count the weights from a configuration alone, in the type that it names."""
    try:
        config = read_config(model)
        packed = config.part("quantization_config")
        how = None if packed is None else packed.text("quant_method", "its quantization_config")
        named = config.text("dtype", "").removeprefix("torch.")
        number = parameters.count(model)
    except KVCacheError as error:
        return Weights(None, str(error))
    if how is not None:
        return Weights(None, f"{number:,} parameters, packed by {plain(how)}", number)
    if named and named not in NAMED:
        return Weights(None, f"{number:,} parameters in {plain(named)}", number)
    return _in_type(NAMED.get(named, "f32"), number, "" if named else ", as the configuration names no type")


def _row(
    policy: str,
    dtype: DType,
    layers: list[Layer],
    context: int,
    sequences: int,
    memory: Memory,
    read: _Read,
    speed: float | None,
) -> Row:
    def nbytes(num_tokens: int) -> int:
        return sequences * sum(layer.most_bytes(num_tokens) for layer in layers)

    return Row(
        policy,
        dtype,
        bytes_per_token=_per_token(layers),
        nbytes=nbytes(context),
        fits=_fits(nbytes(context), memory),
        longest_context=_longest(nbytes, memory.left),
        tokens_per_second=speed,
        prompt_nbytes=sum(layer.most_bytes(context, PREFILL_TOKENS) - layer.most_bytes(context) for layer in layers),
        read_nbytes=read.rows + read.sketches + read.selected,
        sketch_nbytes=nbytes(context) - sequences * sum(_plain(layer).most_bytes(context) for layer in layers),
        num_selecting=sum(layer.sketch for layer in layers),
    )


def _plain(layer: Layer) -> Layer:
    """Return a layer without sketches."""
    return replace(layer, sketch=False)


def _read(layers: Sequence[Layer], shape: Shape, context: int, select: int | None) -> _Read:
    """Return the bytes that attention reads at a context.

    Shared rows are stored once, and read by each layer that shares them. If a layer chooses or selects rows, the others
    are not read.
    """
    rows = sketches = selected = 0
    for layer, chosen in zip(layers, shape.chosen, strict=True):
        own = replace(layer, share=None)
        seen = most_rows(layer.policy, context)
        found = rows_read(select, seen) if layer.sketch and select is not None else seen
        if found < seen:
            selected += _plain(own).bytes_per_token * found
            sketches += (own.bytes_per_token - _plain(own).bytes_per_token) * seen
        else:
            rows += _plain(own).most_bytes(context if chosen is None else min(chosen, context))
    return _Read(rows, sketches, selected)


def _speed(read: _Read, rate: float | None, selecting: SelectRates | None) -> float | None:
    """Return the tokens that attention decodes in a second, at rates in bytes per second; None: a rate is missing."""
    if rate is None or (selecting is None and read.selected):
        return None
    seconds = read.rows / rate
    if selecting is not None:
        seconds += read.sketches / selecting.sketches + read.selected / selecting.rows
    return 1 / seconds


def _fits(nbytes: int, memory: Memory) -> bool | None:
    if memory.weights is None and nbytes <= memory.left:
        return None
    return nbytes <= memory.left


def _per_token(layers: Sequence[Layer]) -> int:
    """Return the bytes of a token's rows, with its share of rows for several, without cross-attention layers."""
    own = [layer for layer in layers if not isinstance(layer.policy, CrossAttention)]
    return round(sum(layer.bytes_per_token / getattr(layer.policy, "stride", 1) for layer in own))


def _longest(nbytes: Callable[[int], int], memory: int) -> int | None:
    """Return the most tokens of a sequence whose bytes, by `nbytes`, fit in the memory; None: any number."""
    if nbytes(MOST_TOKENS) <= memory:
        return None
    return bisect.bisect_right(range(MOST_TOKENS), memory, key=nbytes) - 1 if nbytes(0) <= memory else 0


def _groups(layers: Mapping[DType, list[Layer]], num_layers: int, context: int, sequences: int) -> list[Group]:
    """Group equal layers, in the order of the groups' first layers; the first `num_layers` are the model's own."""
    members: dict[tuple[Any, ...], list[int]] = {}
    for i, layer in enumerate(next(iter(layers.values()))):
        beside, shares = i >= num_layers, layer.share is not None
        key = layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layer.policy, shares, beside
        members.setdefault(key, []).append(i)
    groups = []
    for (num_kv_heads, head_dim, v_head_dim, policy, shares, beside), indices in members.items():
        own = {dtype: [every[i] for i in indices] for dtype, every in layers.items()}
        per_token = {dtype: _per_token(some) for dtype, some in own.items()}
        nbytes = {dtype: sequences * sum(layer.most_bytes(context) for layer in some) for dtype, some in own.items()}
        name = "no attention" if policy is None else written(policy)
        groups.append(Group(len(indices), num_kv_heads, head_dim, v_head_dim, name, shares, per_token, nbytes, beside))
    return groups
