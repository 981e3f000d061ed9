"""The rates at which a machine reads what decoding needs: measured here, or derived for a machine that is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from kvcache.layer import DType, Layer
from kvcache.models.shapes import Shape
from kvcache.runtime import get_num_threads
from kvcache.selecting import with_sketches

if TYPE_CHECKING:
    from kvcache.tools import bench

# Multiply-adds for each element of a row. A server processor computes about as many in int8, or half as many in f16,
# in the time in which memory brings the element.
MOST_PRODUCTS = 20
READING = 0.3  # seconds in which the bandwidth of memory is measured


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
class Rates:
    """The bytes per second at which a machine reads what decoding needs."""

    memory: float  # weights and states
    source: str  # where the figures come from
    rows: Mapping[tuple[Kind, DType], float]  # empty: nothing was measured
    selecting: Mapping[DType, bench.SelectRates]

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
    return Rates(bandwidth, source, {key: limited(rate) for key, rate in measured.rows.items()}, selecting)


def measure(
    shape: Shape, dtypes: Sequence[DType], *, context: int, threads: int | None = None, select: int | None = None
) -> Rates:
    """Measure how fast `threads` threads read memory, and how fast attention reads each kind of layer, in each type."""
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
    for kind, (num_heads, layer) in kinds.items():
        one = _of_layer(shape, num_heads, layer, context, threads)
        rows |= {(kind, dtype): rate for dtype, rate in bench.decode_rates(one, dtypes, 1 / len(kinds)).items()}
    memory = bench.read_bandwidth(threads=threads, seconds=READING)
    return Rates(max(memory, *rows.values()), "measured here", rows, selecting)


def largest_layer(shape: Shape, context: int, threads: int | None) -> bench.Shape:
    """Return the layer that stores most, to measure; a layer with sketches if there is one."""
    with_rows = [pair for pair in zip(shape.num_heads, shape.layers, strict=True) if pair[1].policy is not None]
    num_heads, layer = max(
        with_rows, key=lambda pair: (pair[1].sketch, pair[1].v_head_dim > 0, pair[1].num_kv_heads * pair[1].head_dim)
    )
    return _of_layer(shape, num_heads, layer, context, threads)


def _of_layer(shape: Shape, num_heads: int, layer: Layer, context: int, threads: int | None) -> bench.Shape:
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
