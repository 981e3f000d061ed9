"""Print what `kvcache plan` made, and draw it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from kvcache.cache import KVCache
from kvcache.errors import plain
from kvcache.layer import DType, count
from kvcache.models.shapes import PREFILL_TOKENS, Shape
from kvcache.policy import Policy
from kvcache.system import readable
from kvcache.tools.memory_plan import AS_IT_IS, Plan, Row, variants
from kvcache.tools.terminal import print_list, print_paragraph, print_table

FITS = {True: "yes", False: "no", None: "cache alone"}


def write(made: Plan) -> None:
    """Print a plan."""
    memory = made.memory
    trained = f", trained for {made.model_context:,} tokens" if made.model_context else ""
    print_paragraph(f"{plain(made.model_type)}, {count(made.num_layers, 'layer')}{trained}")
    print_paragraph(f"memory: {readable(memory.free)} free ({memory.source})")
    if memory.weights is None:
        such = "4.7GB" if memory.num_parameters is None else "q4_0 or 4.7GB"
        print_paragraph(f"weights: not counted ({memory.weights_source}); give --weights, such as {such}")
    else:
        print_paragraph(f"weights: {readable(memory.weights)} ({memory.weights_source})")
    print("\nbytes of a token, by type")
    for group in made.groups:
        shares = " (another's rows)" if group.shares else ""
        dims = "/".join(map(str, dict.fromkeys((group.head_dim, group.v_head_dim or group.head_dim))))
        dims += "" if group.v_head_dim else " (keys alone)"
        layers = count(group.num_layers, "layer")
        layers = f"beside {layers}:" if group.beside else f"{layers} of"
        print_paragraph(f"{layers} {count(group.num_kv_heads, 'KV head')} x {dims}, {group.policy}{shares}")
        print_list(f"{dtype} {nbytes:,}" for dtype, nbytes in group.bytes_per_token.items())
    print(f"\n{count(made.sequences, 'sequence')} of {made.context:,} tokens")
    for policy, rows in groupby(made.rows, key=lambda row: row.policy):
        print()
        _print_rows(policy, [*rows])
    if any(row.tokens_per_second for row in made.rows):
        print()
        print_paragraph("tokens/s: attention alone, decoding one sequence at that context, from rates just measured")


def _print_rows(policy: str, rows: Sequence[Row]) -> None:
    """Print what each type takes under a policy."""
    print_paragraph(policy)
    print_table(
        ["type", "bytes/token", "in all", "fits", "longest context", "tokens/s"],
        [
            [
                row.dtype,
                f"{row.bytes_per_token:,}",
                readable(row.nbytes),
                FITS[row.fits],
                "any" if row.longest_context is None else f"{row.longest_context:,}",
                "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.1f}",
            ]
            for row in rows
        ],
    )
    if any(row.num_selecting for row in rows):
        sketches = readable(rows[0].sketch_nbytes)
        print_paragraph(f"{count(rows[0].num_selecting, 'layer')} with sketches, {sketches} in all; a token reads")
        print_list(f"{row.dtype} {readable(row.read_nbytes)}" for row in rows)
    if any(row.prompt_nbytes for row in rows):
        more = ", ".join(f"{row.dtype} {readable(row.prompt_nbytes)}" for row in rows)
        print_paragraph(f"more while a prompt runs, fed {PREFILL_TOKENS} tokens at once: {more}")


def draw(
    shape: Shape,
    made: Plan,
    dtypes: Sequence[DType],
    window: Policy | None,
    file: Path,
    select: int | None,
) -> None:
    """Draw the memory of each variant in each type, and what is free beside weights."""
    from kvcache import plot

    by_type = {dtype: variants(shape, dtype, window, select) for dtype in dtypes}
    caches = {
        dtype if name == AS_IT_IS else f"{dtype}, {name}": KVCache(by_type[dtype][name], max_seq_len=None)
        for name in by_type[dtypes[0]]
        for dtype in dtypes
    }
    axes = plot.memory(caches, max(2, made.context), sequences=made.sequences, free=made.memory.left)
    axes.figure.get_figure(root=True).savefig(file)
