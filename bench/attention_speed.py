"""Sections of bench_attention.py: decoding, shapes, peers and prompts."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import replace

from attention_report import BLOCKED, Report, wanted
from driver import Driver
from entrants import (
    KINDS,
    QUANTISED,
    SINGLES,
    SIXTEEN_BITS,
    Entrant,
    Offers,
    Shape,
    attending,
    core,
    in_cache,
    in_use,
    multiplying,
    multiplying_bytes,
    own_pages,
    reading,
    set_up,
)
from figures import quotients

OVER_F16 = "speedup over kvcache f16"
OVER_FASTEST = "speedup over the fastest peer"
OVER_GGML = "speedup over ggml's fastest path"
OVER_TORCH = "speedup over torch by hand"
OVER_SDPA = "speedup over torch's SDPA"
OVER_HUGGING_FACE = "speedup over Hugging Face"

# ---- one query, against reading the same bytes and against multiply-adds


def against_the_machine(report: Report, shape: Shape, name: str, want: str = "") -> None:
    """Add a line for attention against the machine's limit: memory bandwidth, or multiply-adds."""
    with own_pages() as are_huge, core(shape) as ours:
        readers = reading(shape.nbytes, shape.threads, are_huge(shape.nbytes * shape.layers))
        entrants = [ours, in_cache(shape), *readers, multiplying(shape.threads)]
        ours_s, cached_s, *others_s, products_s = report.compete(entrants, shape.threads)
    floor = min(products_s) * shape.multiply_adds  # at the machine's best rate, not its median
    best, reader = min(zip(others_s, readers, strict=True), key=lambda pair: statistics.median(pair[0]))
    read = statistics.median(best)
    bound = "memory" if read >= floor else "multiply-adds"
    limit = best if bound == "memory" else [floor] * len(ours_s)
    rate = shape.num_kv_heads / statistics.median(cached_s) / 1e6
    note = (
        f"of {bound}; reads {shape.nbytes / read / 1e9:.1f} GB/s, {1e6 * read:,.0f} µs ({reader.name}), multiply-adds "
        f"{1e6 * floor:,.0f} µs; from cache {rate:.3g} rows/µs and core"
    )
    report.line(
        name, shape, ours_s, (limit, ours_s), want, note, bound=bound, read_seconds=read, floor_seconds=floor,
        rows_per_us_in_cache=rate, of_reading=statistics.median(quotients(best, ours_s)),
    )  # fmt: skip


def decode(report: Report) -> None:
    report.open("decode", "Decoding: one query of 32 heads over 8 KV heads x 128, as a share of what bounds it")
    o = report.options
    for context in o.context:
        for threads in o.threads:
            for dtype in o.dtype:
                name = "share of the limit"
                against_the_machine(report, Shape(context, dtype, threads), name, wanted(name, dtype))


def types(report: Report) -> None:
    report.open("types", "Decoding by element type, in blocks of the default size: 32 query heads over 8 KV heads")
    o = report.options
    dtypes = ["f16", *(dtype for dtype in o.dtype if dtype != "f16")]
    for context in o.context:
        for dim in (128, 64):
            shapes = [Shape(context, dtype, max(o.threads), head_dim=dim) for dtype in dtypes]
            with contextlib.ExitStack() as stack:
                drivers = [stack.enter_context(in_use(shape)) for shape in shapes]
                for threads in o.threads:
                    types_with_threads(report, [replace(shape, threads=threads) for shape in shapes], drivers)


def types_with_threads(report: Report, shapes: Sequence[Shape], drivers: Sequence[Driver]) -> None:
    """Add a line for each type over the first, and one for reading as many bytes as the first type has."""
    first = shapes[0]
    readers = reading(first.nbytes, first.threads, huge=True)
    entrants = [*map(attending, shapes, drivers), *readers]
    samples = report.compete(entrants, first.threads)
    base_s, read_s = samples[0], min(samples[len(shapes) :], key=statistics.median)

    def rate(nbytes: int, seconds: Sequence[float]) -> str:
        return f"{nbytes / statistics.median(seconds) / 1e9:.1f} GB/s"

    for shape, seconds in zip(shapes, samples, strict=False):
        name, value = f"heads of {shape.head_dim}, {OVER_F16}", rate(shape.nbytes, seconds)
        report.line(name, shape, seconds, (base_s, seconds), "", value, value=value)
    value = rate(first.nbytes, read_s)
    report.line(f"heads of {first.head_dim}, reading", first, read_s, (base_s, read_s), "", value, value=value)


MLA = {"head_dim": 576, "v_dim": 512, "value_in_key": True, "num_kv_heads": 1}
SHAPES: list[tuple[str, dict[str, object]]] = [
    ("head_dim 64", {"head_dim": 64}),
    ("head_dim 80", {"head_dim": 80}),
    ("head_dim 96", {"head_dim": 96}),
    ("head_dim 256", {"head_dim": 256}),
    ("1 query head a KV head", {"num_heads": 8}),
    ("7 query heads a KV head", {"num_heads": 28, "num_kv_heads": 4}),
    ("16 query heads a KV head", {"num_heads": 64, "num_kv_heads": 4}),
    ("MLA 576/512, 16 query heads", MLA | {"num_heads": 16}),
    ("MLA 576/512, 128 query heads", MLA | {"num_heads": 128}),
    ("V in q8_0", {"v_type": "q8_0"}),
    ("3 query tokens", {"num_tokens": 3}),
    ("5 query tokens", {"num_tokens": 5}),
]


def shapes(report: Report) -> None:
    report.open("shapes", "Other shapes, as shares of what bounds them; what is not named is as in decoding")
    o = report.options
    context = min(o.context, key=lambda n: abs(n - 8192))
    dtypes = o.dtype if o.every_type else [dtype for dtype in ("f16", "q8_0") if dtype in o.dtype]
    some = [
        (name, shape)
        for name, change in SHAPES
        for threads in o.threads
        for shape in (replace(Shape(context, dtype, threads), **change) for dtype in dtypes)
        if not (shape.dtype in BLOCKED and shape.head_dim % 32) and shape.v_type != shape.dtype
    ]
    for name, shape in some:
        against_the_machine(report, shape, name)


# ---- peers

# The type of kvcache to compare with a peer's type, where kvcache has no type of the same name.
COMPARED = {"int8": "q8_0", "u8": "q8_0", "fp8": "q8_0", "int4": "q4_0", "u4": "q4_0"}


def peers_group(report: Report, context: int, threads: int, dtypes: Sequence[str], offers: Offers) -> None:
    """Add lines for some types of kvcache, and for the peers to compare with them."""
    shape = Shape(context, dtypes[0], threads)
    with contextlib.ExitStack() as stack:
        ours = [stack.enter_context(core(replace(shape, dtype=dtype))) for dtype in dtypes]
        stack.enter_context(report.peers)
        others = set_up(report.peers, offers, shape)
        samples = report.compete([*ours, *others], threads)
        errors = [peer.error() if peer.error else 0.0 for peer in others]
    ours_s = dict(zip(dtypes, samples, strict=False))
    for dtype, seconds in ours_s.items():
        report.line("kvcache", replace(shape, dtype=dtype), seconds)
        if dtype in BLOCKED and "f16" in ours_s:
            quotient = ours_s["f16"], seconds
            report.line(f"  {OVER_F16}", replace(shape, dtype=dtype), (), quotient, wanted(OVER_F16, dtype))
    found = {}
    for peer, seconds, error in zip(others, samples[len(ours) :], errors, strict=True):
        base = COMPARED.get(peer.kind, peer.kind)
        base = base if base in ours_s else dtypes[0]
        note = f"its time over that of kvcache's {base}; error {error:.1e}"
        quotient = seconds, ours_s[base]
        report.line(f"    {peer.name}", replace(shape, dtype=peer.kind), seconds, quotient, "", note, error=error)
        found[peer] = seconds
    summary(report, shape, found, ours_s)


def summary(report: Report, shape: Shape, found: dict[Entrant, list[float]], ours_s: dict[str, list[float]]) -> None:
    """Add a line for the speedup over the fastest of some peers, for each type of kvcache."""

    def over(name: str, base: str, *starts: str, kinds: Sequence[str] = ()) -> None:
        """Add a line over the fastest peer with a name that starts as in `starts`, of any type or of `kinds`."""
        some = {p: s for p, s in found.items() if p.name.startswith(starts) and (not kinds or p.kind in kinds)}
        if some and base in ours_s:
            peer = min(some, key=lambda peer: statistics.median(some[peer]))
            quotient = some[peer], ours_s[base]
            report.line(f"  {name}", replace(shape, dtype=base), (), quotient, wanted(name, base), peer.name)

    names = [kind.name for kind in KINDS.values() if kind.name != "Hugging Face"]
    for base in ours_s:
        if base in BLOCKED:
            over(OVER_FASTEST, base, *names)
            over(OVER_GGML, base, "ggml", kinds=[base])
        elif not set(BLOCKED) & set(ours_s):
            over(OVER_FASTEST, base, *names)
            over(OVER_GGML, base, "ggml")
            over(OVER_TORCH, base, "torch")
            over(OVER_HUGGING_FACE, base, "Hugging Face", kinds=[base])


def peers(report: Report) -> None:
    report.open("peers", "Decoding, beside peers of the same shape: over 1, kvcache is faster")
    o = report.options
    for context in o.context:
        for threads in o.threads:
            groups = [
                (["f32"], SINGLES),
                (["f16", "bf16"], SIXTEEN_BITS),
                (["f16", "q8_0", "q4_0"], QUANTISED),
            ]
            for dtypes, offers in groups:
                chosen = [dtype for dtype in dtypes if dtype in o.dtype]
                if chosen and (chosen != ["f16"] or "bf16" in dtypes):
                    peers_group(report, context, threads, chosen, offers)


# ---- prompts


def prefill(report: Report) -> None:
    o = report.options
    tokens, context = o.prefill
    report.open("prefill", f"Prompts: {tokens} tokens, the last of {context:,}")
    for threads in o.threads:
        for dtype in o.dtype:
            prefill_of_type(report, Shape(context, dtype, threads, num_tokens=tokens))
        prefill_by_type(report, Shape(context, "f16", threads, num_tokens=tokens))


def prefill_of_type(report: Report, shape: Shape) -> None:
    """Add lines for a prompt against multiply-adds, torch and ggml, with queries and outputs of torch's type."""
    dtype = shape.dtype
    torch_type = "bf16" if dtype in BLOCKED else dtype
    offers = [("ggml", (mode, dtype)) for mode in (["flash"] if dtype in BLOCKED else ["flash", "matmul"])]
    offers += [("torch", ("sdpa", torch_type))]
    own = replace(shape, q_type=torch_type)
    products = multiplying_bytes(shape.threads)
    with core(own) as ours, core(replace(own, in_bytes=True)) as in_bytes, report.peers:
        others = set_up(report.peers, offers, shape)
        entrants = [ours, in_bytes, multiplying(shape.threads), *products, *others]
        ours_s, bytes_s, multiply_s, *others_s = report.compete(entrants, shape.threads, least=3)
    products_s, others_s = others_s[: len(products)], others_s[len(products) :]
    name = "share of the machine's f32 multiply-adds"
    against_products(report, shape, name, ours_s, multiply_s)
    against_products(report, shape, f"in bytes, {name}", bytes_s, multiply_s)
    for each in products_s:
        against_products(report, shape, "in bytes, share of its products of bytes", bytes_s, each)
    report.line("in bytes, speedup over exact", shape, bytes_s, (ours_s, bytes_s), "> 1")
    for peer, seconds in zip(others, others_s, strict=True):
        report.line(f"    {peer.name}", replace(shape, dtype=peer.kind), seconds)
    for start, name in (("torch", OVER_SDPA), ("ggml", OVER_GGML)):
        some = [pair for pair in zip(others, others_s, strict=True) if pair[0].name.startswith(start)]
        if some:
            peer, seconds = min(some, key=lambda pair: statistics.median(pair[1]))
            report.line(f"  {name}", shape, (), (seconds, ours_s), "> 1", f"{peer.name} {peer.kind}")


def against_products(
    report: Report, shape: Shape, name: str, seconds: Sequence[float], of_product: Sequence[float]
) -> None:
    """Add a line for a prompt against as many multiply-adds, or products of bytes, of which one takes `of_product`."""
    limit = min(of_product) * shape.multiply_adds  # at the machine's best rate, not its median
    rate, best = 2e-9 * shape.multiply_adds / statistics.median(seconds), 2e-9 / min(of_product)
    note = f"{rate:.1f} of {best:.1f} GFLOP/s"
    report.line(name, shape, seconds, ([limit] * len(seconds), seconds), wanted(name), note)


def prefill_by_type(report: Report, shape: Shape) -> None:
    """Add lines for each type over f16, interleaved: times of different runs cannot be divided."""
    dtypes = [dtype for dtype in report.options.dtype if dtype != shape.dtype]
    if not dtypes or shape.dtype not in report.options.dtype:
        return
    with contextlib.ExitStack() as stack:
        each = [stack.enter_context(core(replace(shape, dtype=dtype))) for dtype in (shape.dtype, *dtypes)]
        base_s, *samples = report.compete(each, shape.threads)
    for dtype, seconds in zip(dtypes, samples, strict=True):
        name, note = "cost over kvcache f16", f"{1e6 * statistics.median(base_s):,.0f} µs"
        report.line(name, replace(shape, dtype=dtype), seconds, (seconds, base_s), wanted(name, dtype), note)
