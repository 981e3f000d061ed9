"""The rates at which a machine reads what decoding needs: measured here, or derived for a machine that is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvcache.layer import DType, FloatDType, Layer
from kvcache.models.shapes import Shape
from kvcache.runtime import get_num_threads
from kvcache.selecting import with_sketches
from kvcache.tools.interleave import timed

if TYPE_CHECKING:
    from kvcache.tools import bench

# Multiply-adds for each element of a row. A server processor computes about as many in int8, or half as many in f16,
# in the time in which memory brings the element.
MOST_PRODUCTS = 20
READING = 0.3  # seconds in which the bandwidth of memory is measured
# Products with weights of WIDTH * WIDTH elements: so many tokens, so often. The first ones wake the library's threads.
WIDTH, TOKENS, PRODUCTS = 1024, 512, 12
NAMES: dict[FloatDType, str] = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # torch's names


class Kind(NamedTuple):
    """What attention does with the rows of a layer, which decides how fast it reads them."""

    num_queries: int  # query heads that read each KV head
    head_dim: int
    v_head_dim: int  # 0: index keys, by which tokens choose rows
    value_in_key: bool

    @classmethod
    def of(cls, layer: Layer, num_heads: int) -> Kind:
        """Return the kind of a layer."""
        return cls(num_heads // layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layer.value_in_key)

    @property
    def is_computing(self) -> bool:
        """Whether computing limits attention, instead of memory: many queries read each latent or index key."""
        stored = self.head_dim + (0 if self.value_in_key else self.v_head_dim)
        return self.num_queries * (self.head_dim + self.v_head_dim) > MOST_PRODUCTS * stored


@dataclass(frozen=True)
class PromptRates:
    """The operations per second at which a machine computes prompts. A multiply-add is two operations."""

    weights: float  # of products with weights
    library: str  # what multiplied weights, and in which type
    attention: Mapping[tuple[Kind, DType], float]

    def scaled(self, num_cores: int) -> PromptRates:
        """Return the rates of so many cores, if these are the rates of one."""
        attention = {key: num_cores * rate for key, rate in self.attention.items()}
        return PromptRates(num_cores * self.weights, self.library, attention)


@dataclass(frozen=True)
class Rates:
    """The bytes per second at which a machine reads what decoding needs."""

    memory: float  # weights and states
    source: str  # where the figures come from
    rows: Mapping[tuple[Kind, DType], float]  # empty: nothing was measured
    selecting: Mapping[DType, bench.SelectRates]
    prompts: PromptRates | None = None  # None: not measured

    def of_rows(self, kind: Kind, dtype: DType) -> float | None:
        """Return the rate at which attention reads rows; None: it is not known, because computing limits it."""
        if self.rows:
            return self.rows[kind, dtype]
        return None if kind.is_computing else self.memory

    def of_sketches(self, dtype: DType) -> float:
        """Return the rate at which attention that selects rows reads sketches."""
        return self.selecting[dtype].sketches if self.rows else self.memory

    def of_selected(self, dtype: DType) -> float:
        """Return the rate at which attention reads rows that it selected."""
        return self.selecting[dtype].rows if self.rows else self.memory


def given(bandwidth: float) -> Rates:
    """Return the rates of a machine of which only the bandwidth of its memory is known."""
    return Rates(bandwidth, "as given; computing attention counts with --cores", {}, {})


def of_cores(bandwidth: float, num_cores: int, measured: Rates) -> Rates:
    """Return the rates of a machine with so many cores, each as fast as the one on which `measured` was measured."""
    from kvcache.tools.bench import SelectRates

    def limited(rate: float) -> float:
        return min(bandwidth, num_cores * rate)

    selecting = {
        dtype: SelectRates(limited(one.sketches), limited(one.rows)) for dtype, one in measured.selecting.items()
    }
    source = f"as given; {num_cores:,} cores, each as fast as one here"
    prompts = measured.prompts and measured.prompts.scaled(num_cores)
    rows = {key: limited(rate) for key, rate in measured.rows.items()}
    return Rates(bandwidth, source, rows, selecting, prompts)


def measure(
    shape: Shape,
    dtypes: Sequence[DType],
    *,
    context: int,
    threads: int | None = None,
    select: int | None = None,
    weights: FloatDType | None = None,
) -> Rates:
    """Measure how fast `threads` threads read memory, and how fast attention reads each kind of layer, in each type.

    With the type of `weights`, also measure how fast prompts are computed.
    """
    from kvcache.tools import bench

    selecting: Mapping[DType, bench.SelectRates] = {}
    if select is not None:
        sketched = replace(shape, layers=tuple(with_sketches(shape.layers, select)))
        selecting = bench.select_rates(largest_layer(sketched, context, threads), select, dtypes)
    kinds: dict[Kind, tuple[int, Layer]] = {}
    for num_heads, layer in zip(shape.num_heads, shape.layers, strict=True):
        kind = Kind.of(layer, num_heads)
        if layer.policy is not None and (kind not in kinds or kinds[kind][1].num_kv_heads < layer.num_kv_heads):
            kinds[kind] = num_heads, layer
    rows: dict[tuple[Kind, DType], float] = {}
    products: dict[tuple[Kind, DType], float] = {}
    for kind, (num_heads, layer) in kinds.items():
        one, share = _of_layer(shape, num_heads, layer, context, threads), 1 / len(kinds)
        rows |= {(kind, dtype): rate for dtype, rate in bench.decode_rates(one, dtypes, share).items()}
        if weights is not None:
            products |= {(kind, dtype): rate for dtype, rate in bench.prompt_rates(one, dtypes, share).items()}
    prompts = None
    if weights is not None:
        prompts = PromptRates(*multiply_rate(weights, threads or get_num_threads()), products)
    memory = bench.read_bandwidth(threads=threads, seconds=READING)
    return Rates(max(memory, *rows.values()), "measured here", rows, selecting, prompts)


def multiply_rate(dtype: FloatDType, threads: int) -> tuple[float, str]:
    """Measure the operations per second of products with weights; also return what multiplied them.

    PyTorch multiplies in the type of the weights: some processors are slower in bf16 than in f32. Without PyTorch,
    NumPy multiplies in f32.
    """
    try:
        import torch
    except ImportError:
        ones = np.ones((WIDTH, WIDTH), np.float32)
        # BLAS has as many threads as it likes: take it that there is one for each core.
        return _products(lambda: ones[:TOKENS] @ ones) * threads / get_num_threads(), "NumPy in f32"
    weights = torch.ones((WIDTH, WIDTH), dtype=getattr(torch, NAMES[dtype]))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            return _products(lambda: torch.nn.functional.linear(weights[:TOKENS], weights)), f"torch in {dtype}"
    finally:
        torch.set_num_threads(before)


def _products(multiply: Callable[[], object]) -> float:
    """Return the operations per second of the fastest of some products."""
    return 2 * TOKENS * WIDTH**2 / min(timed(multiply)[0] for _ in range(PRODUCTS))


def largest_layer(shape: Shape, context: int, threads: int | None) -> bench.Shape:
    """Return the layer that stores most, to measure; a layer with sketches if there is one."""
    with_rows = [pair for pair in zip(shape.num_heads, shape.layers, strict=True) if pair[1].policy is not None]
    num_heads, layer = max(
        with_rows, key=lambda pair: (pair[1].sketch, pair[1].v_head_dim > 0, pair[1].num_kv_heads * pair[1].head_dim)
    )
    return _of_layer(shape, num_heads, layer, context, threads)


def _of_layer(shape: Shape, num_heads: int, layer: Layer, context: int, threads: int | None) -> bench.Shape:
    """Return what the benchmark measures to time such a layer."""
    from kvcache.tools import bench

    return bench.Shape(
        num_layers=sum(layer.policy is not None for layer in shape.layers[: shape.num_layers]),
        num_heads=num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        v_head_dim=layer.v_head_dim,
        value_in_key=layer.value_in_key,
        context=context,
        threads=threads or get_num_threads(),
    )
