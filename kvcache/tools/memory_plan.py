"""Plan a model's cache: its memory by type and policy, what fits on this machine, and how fast decoding reads it.

`make` computes the plan without allocating a cache, by `Layer.most_bytes`. The speed of decoding follows from the rate
at which this machine reads rows of each type, which `kvcache.tools.bench` measures.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache import system
from kvcache._core import INT32_MAX
from kvcache.layer import DType, Layer, dtypes_for, make_layers
from kvcache.models.shapes import Shape
from kvcache.policy import CrossAttention, FullAttention, Policy, written

__all__ = ["Group", "Memory", "Plan", "Row", "available_memory", "make", "weight_bytes"]

MOST_TOKENS = INT32_MAX - 1
AS_IT_IS = "the model's own"


@dataclass(frozen=True)
class Memory:
    """Free memory, and the weights that it must hold as well."""

    free: int
    source: str  # where the figure comes from: the machine or a cgroup
    weights: int  # bytes of the model's files

    @property
    def left(self) -> int:
        """The bytes that are left for the cache."""
        return max(0, self.free - self.weights)


@dataclass(frozen=True)
class Group:
    """Layers with the same heads, sizes and policy."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    policy: str
    shares: bool  # whether the layers read other layers' rows, and store none
    bytes_per_token: dict[DType, int]
    nbytes: dict[DType, int]  # bytes of all sequences at full length


@dataclass(frozen=True)
class Row:
    """The cost of one element type under one policy."""

    policy: str
    dtype: DType
    bytes_per_token: int  # before anything is evicted
    nbytes: int  # bytes of all sequences at full length
    fits: bool
    longest_context: int | None  # most tokens of each sequence, in the memory that is left; None: no limit
    tokens_per_second: float | None  # attention alone, decoding one sequence of full length; None: not measured


@dataclass(frozen=True)
class Plan:
    """The plan of a model's cache on this machine."""

    model_type: str
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
    rates: Mapping[DType, float] | None = None,
) -> Plan:
    """Plan a model's cache.

    Parameters
    ----------
    shape : Shape
        The model's shape, which `kvcache.models.shapes.read` returns.
    memory : Memory
        The free memory, which `available_memory` returns.
    context : int
        The number of tokens of each sequence.
    sequences : int
        The number of sequences in the cache.
    dtypes : sequence of {"f32", "f16", "bf16", "q8_0", "q4_0"}, optional
        The element types; by default every type that can store the model's heads.
    window : policy, optional
        A policy to plan with as well, in place of `FullAttention`.
    rates : mapping of type to float, optional
        The bytes per second that attention reads, which `kvcache.tools.bench.decode_rates` measures.

    Returns
    -------
    Plan
        The plan, with a row for each policy and type.
    """
    dtypes = dtypes or dtypes_for(*shape.head_dim, *shape.v_head_dim)
    own = {dtype: _layers(shape, dtype, None) for dtype in dtypes}
    plans = {AS_IT_IS: own}
    if window is not None:
        plans[written(window)] = {dtype: _layers(shape, dtype, window) for dtype in dtypes}
    rows = [
        _row(policy, dtype, layers, context, sequences, memory.left, (rates or {}).get(dtype))
        for policy, by_type in plans.items()
        for dtype, layers in by_type.items()
    ]
    groups = _groups(own, context, sequences)
    return Plan(shape.model_type, shape.max_seq_len, context, sequences, memory, groups, rows)


def available_memory(model: Any = None) -> Memory:
    """Return the free memory of the machine and of this process's cgroups, and the bytes of the model's weights.

    Raises
    ------
    ImportError
        If psutil is not installed.
    """
    return Memory(*system.available_memory(), weight_bytes(model))


def weight_bytes(model: Any) -> int:
    """Return the bytes of a GGUF or of a folder's safetensors; 0 for a model without such files."""
    if not isinstance(model, str | Path):
        return 0
    path = Path(model)
    files = path.glob("*.safetensors") if path.is_dir() else [path] if path.suffix == ".gguf" else []
    return sum(file.stat().st_size for file in files)


def _layers(shape: Shape, dtype: DType, instead: Policy | None) -> list[Layer]:
    """Return the model's layers with an element type; `instead` replaces `FullAttention`."""
    arguments = shape.arguments()
    del arguments["max_seq_len"]
    if instead is not None:
        arguments["policy"] = [instead if policy == FullAttention() else policy for policy in shape.policy]
    return make_layers(**arguments, dtype=dtype, k_dtype=None, v_dtype=None)


def _row(
    policy: str, dtype: DType, layers: list[Layer], context: int, sequences: int, memory: int, rate: float | None
) -> Row:
    def nbytes(num_tokens: int) -> int:
        return sequences * sum(layer.most_bytes(num_tokens) for layer in layers)

    # Bytes read per token: shared rows are stored once, and read by each layer that shares them.
    read = sum(layer._replace(share=None).most_bytes(context) for layer in layers)
    return Row(
        policy,
        dtype,
        bytes_per_token=_per_token(layers),
        nbytes=nbytes(context),
        fits=nbytes(context) <= memory,
        longest_context=_longest(nbytes, memory),
        tokens_per_second=None if rate is None else rate / read,
    )


def _per_token(layers: Sequence[Layer]) -> int:
    """Return the bytes of a token's rows, without cross-attention layers."""
    return sum(layer.most_bytes(1) for layer in layers if not isinstance(layer.policy, CrossAttention))


def _longest(nbytes: Callable[[int], int], memory: int) -> int | None:
    """Return the most tokens of a sequence whose bytes, by `nbytes`, fit in the memory; None: any number."""
    if nbytes(MOST_TOKENS) <= memory:
        return None
    return bisect.bisect_right(range(MOST_TOKENS), memory, key=nbytes) - 1 if nbytes(0) <= memory else 0


def _groups(layers: Mapping[DType, list[Layer]], context: int, sequences: int) -> list[Group]:
    """Group equal layers, in the order of the groups' first layers."""
    members: dict[tuple[Any, ...], list[int]] = {}
    for i, layer in enumerate(next(iter(layers.values()))):
        key = layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layer.policy, layer.share is not None
        members.setdefault(key, []).append(i)
    groups = []
    for (num_kv_heads, head_dim, v_head_dim, policy, shares), indices in members.items():
        own = {dtype: [every[i] for i in indices] for dtype, every in layers.items()}
        per_token = {dtype: _per_token(some) for dtype, some in own.items()}
        nbytes = {dtype: sequences * sum(layer.most_bytes(context) for layer in some) for dtype, some in own.items()}
        name = "no attention" if policy is None else written(policy)
        groups.append(Group(len(indices), num_kv_heads, head_dim, v_head_dim, name, shares, per_token, nbytes))
    return groups
