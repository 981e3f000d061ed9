"""Count the instructions that a kernel cannot do without: for one row of `dim` elements, by kind (mixes.py).

The counts are those of the algorithms that src/kernels/ describes, with nothing lost to bookkeeping: rows lie one after
the other, loops are unrolled, addresses are immediate offsets. Where several ways are known, a function returns one mix
for each, and the fastest is the floor, whether the kernels go that way or not. With L lanes, a vector has L floats,
2 L integers of 16 bits (words) or 4 L bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from mixes import Mix, Vectors

QUERIES = 4  # query rows that a kernel works on at once (template.h); more take several passes ...
WIDE_QUERIES = 8  # ... but of rows of 16-bit floats, in vectors of 16 lanes, and of quantised ones with VNNI
TILE = 64  # rows of a tile, over which sums stay in registers
BLOCK = 32  # elements of a quantised block, which share a scale
LINE = 64
GROUP_LOADS = 4  # rows of a group whose 16 bytes start a vector by a plain load; others are inserted

FLOATS = {"f32": 4, "f16": 2, "bf16": 2}  # bytes of an element


@dataclass(frozen=True)
class Quantised:
    """How 32 elements are stored: bytes that are unpacked to 32 bytes, after a scale, unless a row has one."""

    packed: int  # bytes that hold elements: 32, or 16 with two in a byte, and 8 more for two bits of each
    nbytes: int  # of the block
    has_min: bool = False  # an f16 beside the scale, which is added
    has_fifth_bits: bool = False  # in four bytes of their own
    tables: int = 0  # of 16 bytes, in which elements are looked up
    has_row_scale: bool = False  # 2 bytes, beside the row

    def scaled(self, dim: int) -> float:
        """Count what has a scale of its own."""
        return 1 if self.has_row_scale else dim / BLOCK


QUANTISED = {
    "q8_0": Quantised(32, 34),
    "q4_0": Quantised(16, 18),
    "q4_1": Quantised(16, 20, has_min=True),
    "q5_0": Quantised(16, 22, has_fifth_bits=True),
    "q5_1": Quantised(16, 24, has_min=True, has_fifth_bits=True),
    "iq4_nl": Quantised(16, 18, tables=1),
    "int8": Quantised(32, 32, has_row_scale=True),
    "int6": Quantised(24, 24, tables=4, has_row_scale=True),
    "int4": Quantised(16, 16, tables=1, has_row_scale=True),
}


def row_bytes(dtype: str, dim: int) -> float:
    if dtype in FLOATS:
        return FLOATS[dtype] * dim
    return QUANTISED[dtype].nbytes * dim / BLOCK + 2 * QUANTISED[dtype].has_row_scale


def passes(dtype: str, queries: int, v: Vectors) -> list[int]:
    """Return how many queries each pass of a kernel works on."""
    is_wide = v.lanes == 16 and (dtype in ("f16", "bf16") or (dtype in QUANTISED and "quads" in v.asm))
    num_wide, rest = divmod(queries, WIDE_QUERIES) if is_wide else (0, queries)
    if is_wide and dtype in FLOATS and rest:
        return [WIDE_QUERIES] * num_wide + [rest]
    return [WIDE_QUERIES] * num_wide + [min(QUERIES, rest - first) for first in range(0, rest, QUERIES)]


def times(mix: dict[str, float], by: float) -> Mix:
    return Counter({kind: count * by for kind, count in mix.items() if count * by})


def total(*mixes: Mix) -> Mix:
    return sum(mixes, Counter())


# ---- rows of floats


def conversion(dtype: str, num: float) -> Mix:
    """Loading num vectors of a row as f32; of bf16, even elements are shifted and odd ones masked."""
    if dtype == "f16":
        return times({"from f16": 1}, num)
    return times({"load": 1} if dtype == "f32" else {"load": 0.5, "shift": 0.5, "logic": 0.5}, num)


def sums_over_lanes(q: int, v: Vectors, lanes: int) -> Mix:
    """Adding up so many lanes of q sums, in a tree: two shuffles and an addition make one vector of two."""
    pair = {"add pairs": 1.0} if "add pairs" in v.asm else {"shuffle": 2.0, "add": 1.0}
    return times(pair, q * (lanes - 1) / v.lanes)


def score_floats(dtype: str, dim: int, q: int, v: Vectors) -> list[Mix]:
    """A product of each vector with each query's; queries are loaded once for a block of rows.

    With 16 lanes, a vector may have elements of two rows, half of f32's by a shuffle, which leaves 8 lanes to add up.
    """
    num, rows = dim / v.lanes, min(8, v.accumulators // q)
    products, end = times({"product": 1, "load": 1 / rows}, num * q), times({"store": 1}, q / v.lanes)
    rest = total(sums_over_lanes(q, v, v.lanes), end)
    found = [total(conversion(dtype, num), products, rest)]
    if v.lanes == 16:
        pairing = {"f32": {"shuffle": 1.0}, "f16": {"insert": 1.0}, "bf16": {"insert": 0.5}}[dtype]
        in_order = times({"shuffle": 1}, q / v.lanes)
        halves = total(sums_over_lanes(q, v, v.lanes // 2), in_order, end)
        found.append(total(conversion(dtype, num), times(pairing, num), products, halves))
    if dtype == "bf16" and "bf16 pairs" in v.asm:  # with queries of bf16, as a model of that type has
        pairs = {"bf16 pairs": q, "load": 1 + q / rows}
        found.append(total(times(pairs, num / 2), rest))
    return found


def accumulate_floats(dtype: str, dim: int, q: int, v: Vectors) -> list[Mix]:
    """A product of each vector with each query's weight, which is broadcast once for a block of columns."""
    num, width = dim / v.lanes, min(8 if v.lanes == 16 else 4, v.accumulators // q)
    sums = times({"load": 1, "product": 1, "store": 1}, num * q / TILE)
    products = {"product": num * q, "broadcast": q * num / min(width, num)}
    return [total(conversion(dtype, num), times(products, 1), sums)]


# ---- quantised rows


def scales(kind: Quantised, blocks: float, v: Vectors) -> Mix:
    """Collecting the scales of L rows in a vector, for each block: L loads, all but one into a lane."""
    halves = 2 if kind.has_min else 1
    each = {"load": 1, "insert": v.lanes - 1, "from f16": halves, "shuffle": 1, "shift": halves - 1}
    if kind.has_row_scale:  # they stand side by side
        each = {"load": 1, "from f16": 1}
    return times(each, blocks / v.lanes)


def unpacking(kind: Quantised, dim: int, v: Vectors, *, to_words: bool) -> Mix:
    """Bytes of elements, unsigned for products of bytes, from what is stored; or words, each byte's halves apart."""
    packed, unpacked = kind.packed * dim / BLOCK / (4 * v.lanes), dim / (4 * v.lanes)
    # Changes the sign bit of bytes; or takes low and high halves.
    found = times({"logic": 1} if kind.packed == BLOCK else {"logic": 2, "shift": 1}, packed)
    if kind.has_fifth_bits:
        found = total(found, times({"shuffle": 1, "logic": 2}, unpacked))  # a byte for eight bits, test one, add it
    # Each table is a shuffle; each but the first is chosen by a bit that is tested.
    found = total(found, times({"shuffle": kind.tables, "logic": max(0, kind.tables - 1)}, unpacked))
    return total(found, times({"logic": 1, "shift": 1}, unpacked)) if to_words else found


def products(dim: int, q: int, v: Vectors) -> list[tuple[Mix, bool]]:
    """Products of elements with integers of 16 bits, and whether elements are words: in pairs of words, or in quads of
    bytes, once with the high bytes of the other integers and once with the low ones."""
    pairs = times({"pairs": 1}, dim / (2 * v.lanes) * q), True
    quads = times({"quads": 2}, dim / (4 * v.lanes) * q), False
    return [pairs, quads] if "quads" in v.asm else [pairs]


def score_quantised(dtype: str, dim: int, q: int, v: Vectors) -> list[Mix]:
    """Transposes 16 bytes of L rows at a time, so that a lane is a row: 8 shuffles make 4 vectors of 4."""
    kind, groups = QUANTISED[dtype], 2 if v.accumulators >= 16 and q <= QUERIES else 1
    blocks = kind.scaled(dim)
    pieces = kind.packed * dim / BLOCK / 16
    transposing = times({"load": GROUP_LOADS, "insert": v.lanes - GROUP_LOADS, "shuffle": 8}, pieces / v.lanes)
    queries = times({"broadcast": 1}, dim / 2 * q / (groups * v.lanes))
    found = []
    for mix, to_words in products(dim, q, v):
        # A block's sums start at what the change to unsigned adds, become floats, and are multiplied by the scales.
        block = {"broadcast": 1 / groups, "from int": 1, "product": 2 if kind.has_min else 1}
        if not to_words:
            block |= {"shift": 1, "logic": 1}  # high and low sums
        each = times(block, blocks * q / v.lanes)
        end = times({"product": 1, "store": 1}, q / v.lanes)
        elements = unpacking(kind, dim, v, to_words=to_words)
        found.append(total(mix, transposing, elements, queries, scales(kind, blocks, v), each, end))
    return found


def accumulate_quantised(dtype: str, dim: int, q: int, v: Vectors) -> list[Mix]:
    """Interleaves 2 rows of words or 4 of bytes, and multiplies them by weights that are rounded once for a tile."""
    kind, blocks = QUANTISED[dtype], QUANTISED[dtype].scaled(dim)
    packed = kind.packed * dim / BLOCK / (4 * v.lanes)  # vectors of stored bytes
    pieces = packed if kind.has_row_scale else max(blocks, packed)  # a block's are loaded, or inserted beside another's
    found = []
    for mix, to_words in products(dim, q, v):
        loads = {"load": packed, "insert": pieces - packed}
        # Bytes are interleaved by rows and, as words, widened; or interleaved twice.
        shuffles = {"shuffle": packed + dim / (2 * v.lanes) if to_words else 2 * packed}
        # Largest product, whose sign AVX-512 drops on the way, rounding and packing, of L rows' weights for a block.
        weights = {"load": 2, "product": 2, "add": 1, "from int": 1, "shuffle": 1, "store": 0.5}
        if v.lanes < 16:
            weights["logic"] = 1
        if not to_words:
            weights |= {"shift": 1, "logic": 2}
        if kind.has_min:
            weights["product"] += 1
        largest = times(sums_over_lanes(blocks * q, v, v.lanes), 1 / TILE)
        sums = {"load": 1, "from int": 1, "product": 2, "store": 1}
        # A query's weights of 2 rows or, as high and low bytes, of 4.
        broadcasts = {"broadcast": q * dim / (4 * v.lanes)}
        rows = total(times(loads | shuffles | broadcasts, 1), unpacking(kind, dim, v, to_words=False))
        once = total(times(weights, blocks * q / v.lanes), largest, times(sums, dim / v.lanes * q / TILE))
        found.append(total(mix, rows, scales(kind, blocks, v), once))
    return found


# ---- kernels


def with_prefetch(mix: Mix, dtype: str, dim: int) -> Mix:
    """Adds what asks for the row that is read next."""
    return total(mix, times({"prefetch": 1}, row_bytes(dtype, dim) / LINE))


def in_passes(
    one_pass: Callable[[str, int, int, Vectors], list[Mix]], dtype: str, dim: int, queries: int, v: Vectors
) -> list[Mix]:
    ways = zip(*[one_pass(dtype, dim, q, v) for q in passes(dtype, queries, v)], strict=True)
    return [with_prefetch(total(*way), dtype, dim) for way in ways]


def score(dtype: str, dim: int, queries: int, v: Vectors) -> list[Mix]:
    return in_passes(score_floats if dtype in FLOATS else score_quantised, dtype, dim, queries, v)


def accumulate(dtype: str, dim: int, queries: int, v: Vectors) -> list[Mix]:
    return in_passes(accumulate_floats if dtype in FLOATS else accumulate_quantised, dtype, dim, queries, v)


def softmax(dtype: str, dim: int, queries: int, v: Vectors) -> list[Mix]:
    """The largest score, and an exponential of each (softmax.h); a tile adds one vector of them, for the scores before.

    A mask keeps, or clears, what is too small to be a power of 2.
    """
    exponential = {"product": 10, "add": 1, "shift": 1, "compare": 1}
    each = times(total(Counter(exponential), Counter({"load": 2, "add": 3, "store": 1})), queries / v.lanes)
    before = times(exponential, math.ceil(queries / v.lanes) / TILE)
    return [total(each, before, times(sums_over_lanes(2 * queries, v, v.lanes), 1 / TILE))]


# ---- what a call does once for each KV head


def prepared_queries(dtype: str, dim: int, queries: int, v: Vectors) -> list[Mix]:
    """Multiplies queries by the scale; or checks, rounds and orders them, and adds up each block."""
    if dtype in FLOATS:
        return [times({"load": 1, "product": 1, "store": 1}, queries * dim / v.lanes)]
    each = {"load": 2, "add": 1, "product": 2, "from int": 1, "shuffle": 1, "pairs": 0.5, "store": 0.5}
    sums = sums_over_lanes(queries * (dim / BLOCK + 2), v, v.lanes)  # largest, check, and the blocks
    return [total(times(each, queries * dim / v.lanes), sums)]


def output(dtype: str, dim: int, queries: int, v: Vectors) -> list[Mix]:
    """Clears the sums over values, and divides them at the end."""
    return [times({"load": 1, "product": 1, "store": 2}, queries * dim / v.lanes)]


KERNELS = {"score": score, "accumulate": accumulate, "softmax": softmax}
ENDS = {"queries": prepared_queries, "output": output}
