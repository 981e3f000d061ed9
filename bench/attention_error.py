"""The section "error" of bench_attention.py: the distance between attention and the same in float64."""

from __future__ import annotations

import numpy as np
from attention_report import Report, wanted
from driver import Driver
from entrants import Shape


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Compute attention in float64: q [heads, dim], k and v [KV heads, rows, dim]."""
    group = len(q) // len(k)
    out = np.empty((len(q), v.shape[2]))
    for head, (keys, values) in enumerate(zip(k, v, strict=True)):
        queries = slice(head * group, (head + 1) * group)
        scores = q[queries].astype(np.float64) @ keys.astype(np.float64).T / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[queries] = weights @ values.astype(np.float64) / weights.sum(axis=1, keepdims=True)
    return out


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bf16, ties to even, and return it as f32."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def error_of(driver: Driver, shape: Shape, q_type: str) -> float:
    """Measure the relative error of one token's output with queries of a type.

    The rounding of a bf16 output would hide every other error, so the exact output is rounded as well. Two rounded
    numbers differ by a whole step or not at all, but on average by as much as the numbers before rounding.
    """
    q, out, k, v = driver.attend_and_show(shape.num_heads, shape.threads, shape.context, q_type)
    right = exact(q, k, v)
    if q_type == "bf16":
        return float(np.abs(out - round_to_bf16(right)).sum() / np.abs(right).sum())
    return float(np.linalg.norm(out - right) / np.linalg.norm(right))


def error(report: Report) -> None:
    report.open("error", "||out - exact|| / ||exact||: exact in float64 over the stored values, unit normal data")
    o = report.options
    context = max(o.context)
    for dtype in o.dtype:
        shape = Shape(context, dtype, max(o.threads))
        name = "relative error"
        with Driver(1, 8, 128, context, dtype, num_threads=shape.threads) as driver:
            driver.append(context - 1, fresh=True)
            report.line(name, shape, (), error_of(driver, shape, "f32"), wanted(name, dtype))
            if dtype == "bf16":  # the other sections time bf16 queries, which another kernel may multiply
                note = "sum of |out - exact| over that of |exact|; out is bf16, and exact is rounded to it"
                relative = error_of(driver, shape, "bf16")
                report.line(f"{name}, bf16 queries", shape, (), relative, wanted(name, dtype), note)
