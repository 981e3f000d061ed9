"""Print what `kvcache plan` made, and draw it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from kvcache.cache import KVCache
from kvcache.errors import plain
from kvcache.layer import count
from kvcache.models.shapes import PREFILL_TOKENS, Shape
from kvcache.policy import Policy
from kvcache.system import readable
from kvcache.tools.memory_plan import AS_IT_IS, MOST_TOKENS, NO_ATTENTION, Memory, Plan, Row, variants
from kvcache.tools.terminal import print_list, print_paragraph, print_table

FITS = {True: "yes", False: "no", None: "maybe"}


def write(made: Plan) -> None:
    """Print a plan."""
    print_machine(made)
    print("\nbytes of a token, by type")
    for group in made.groups:
        shares = " (another's rows)" if group.shares else ""
        dims = "/".join(map(str, dict.fromkeys((group.head_dim, group.v_head_dim or group.head_dim))))
        dims += "" if group.v_head_dim else " (keys alone)"
        layers = count(group.num_layers, "layer")
        if group.policy == NO_ATTENTION:
            print_paragraph(f"{layers} without attention")
            continue
        layers = f"beside {layers}:" if group.beside else f"{layers} of"
        print_paragraph(f"{layers} {count(group.num_kv_heads, 'KV head')} x {dims}, {group.policy}{shares}")
        print_list(f"{dtype} {nbytes:,}" for dtype, nbytes in group.bytes_per_token.items())
    if len(made.groups) > 1:
        print_paragraph("in all")
        own = [row for row in made.rows if row.policy == AS_IT_IS]
        print_list(f"{row.dtype} {row.bytes_per_token:,}" for row in own)
    print(f"\n{count(made.sequences, 'sequence')} of {count(made.context, 'token')}")
    for policy, rows in groupby(made.rows, key=lambda row: row.policy):
        print()
        _print_rows(policy, [*rows], _heading(made))
    print()
    _print_meanings(made)


def print_machine(made: Plan) -> None:
    """Print what the model and the machine are."""
    trained = f", trained for {made.model_context:,} tokens" if made.model_context else ""
    print_paragraph(f"{plain(made.model_type)}, {count(made.num_layers, 'layer')}{trained}")
    _print_memory(made.memory)
    if made.bandwidth is not None:
        print_paragraph(f"memory is read at {made.bandwidth / 1e9:,.1f} GB/s ({made.bandwidth_source})")


def _print_memory(memory: Memory) -> None:
    """Print what is free, and what it must hold beside the cache."""
    print_paragraph(f"memory: {readable(memory.free)} free ({memory.source})")
    if memory.weights is None:
        such = "4.7GB" if memory.num_parameters is None else "q4_0 or 4.7GB"
        print_paragraph(f"weights: not counted; give --weights, such as {such} ({memory.weights_source})")
    else:
        is_part = memory.weights_read not in (None, memory.weights)
        read = f", of which a token reads {readable(memory.weights_read or 0)}" if is_part else ""
        print_paragraph(f"weights: {readable(memory.weights)} ({memory.weights_source}){read}")
    if memory.states is None:
        print_paragraph(f"recurrent states: not counted ({memory.states_source})")
    elif memory.states:
        print_paragraph(f"recurrent states: {readable(memory.states)} for each sequence ({memory.states_source})")


def _print_meanings(made: Plan) -> None:
    """Say what the columns are whose names do not say it."""
    memory, prompt = made.memory, any(row.prompt_nbytes for row in made.rows)
    counted = [
        *(["weights"] if memory.weights else []),
        f"cache{' and recurrent states' if memory.states else ''} of {count(made.sequences, 'sequence')}",
        *([f"more rows while a prompt runs, fed {PREFILL_TOKENS} tokens at once"] if prompt else []),
    ]
    print_paragraph(f"needs: {', '.join(counted)}; without the buffers of the program that runs the model")
    if made.bandwidth is not None:
        print_paragraph(f"{_heading(made)}: {_meaning_of_speed(made)}")
    longest = [MOST_TOKENS if row.longest_context is None else row.longest_context for row in made.rows]
    trained = made.model_context or MOST_TOKENS
    if made.context <= trained < max(longest):
        print_paragraph(f"max context: what memory holds; the model is trained for {trained:,} tokens")
    print_limits(made)


def print_limits(made: Plan) -> None:
    """Say if the context is longer than the model's, and which types are left out."""
    if made.context > (trained := made.model_context or MOST_TOKENS):
        print_paragraph(f"the model is trained for {trained:,} tokens: this context is longer")
    for reason in made.left_out:
        print_paragraph(f"left out: {reason}")


def _heading(made: Plan) -> str:
    """Return the heading of the column with speeds."""
    return "attention/s" if made.memory.weights == 0 else "tokens/s"


def _meaning_of_speed(made: Plan) -> str:
    """Say what the speeds are of, or why they are not known."""
    memory, num = made.memory, made.sequences
    weights = memory.read_together(num)
    if weights is None:
        return "not known, because it is not known how much a token reads of the weights"
    if any(row.tokens_per_second is None for row in made.rows):
        return (
            "not known from --bandwidth alone; give --cores as well: so many queries read each latent or index key "
            "that computing limits attention, not memory"
        )
    read = [f"{readable(round(weights))} of weights"] if weights else []
    read += [f"{readable(memory.states * num)} of states (and writes them)"] if memory.states else []
    if num == 1:
        others = f"{', '.join(read)} and " if read else ""
        return f"at most, decoding one sequence at that context: a token reads {others}the rows that it sees"
    others = f"{', '.join(read)}, and " if read else ""
    return (
        f"at most, of {num:,} sequences that decode together at that context, each 1/{num:,} of it: a step reads "
        f"{others}the rows of all sequences"
    )


def _print_rows(policy: str, rows: Sequence[Row], speeds: str) -> None:
    """Print what each type takes under a policy."""
    print_paragraph(policy)
    print_table(
        ["type", "cache", "needs", "fits", "max context", "max sequences", speeds],
        [
            [
                row.dtype,
                readable(row.nbytes),
                readable(row.needs),
                FITS[row.fits],
                *("any" if most is None else f"{most:,}" for most in (row.longest_context, row.most_sequences)),
                speed(row.tokens_per_second),
            ]
            for row in rows
        ],
    )
    if any(row.num_selecting for row in rows):
        sketches = readable(rows[0].sketch_nbytes)
        print_paragraph(f"{count(rows[0].num_selecting, 'layer')} with sketches, {sketches} in all; a token reads")
        print_list(f"{row.dtype} {readable(row.read_nbytes)}" for row in rows)
    if any(row.prompt_nbytes for row in rows):
        print_paragraph("more while a prompt runs")
        print_list(f"{row.dtype} {readable(row.prompt_nbytes)}" for row in rows)


def speed(tokens_per_second: float | None) -> str:
    """Return tokens per second with two digits. Below 1, return seconds per token."""
    if tokens_per_second is None:
        return "-"
    is_slow = float(f"{tokens_per_second:.2g}") < 1
    number = float(f"{1 / tokens_per_second if is_slow else tokens_per_second:.2g}")
    return f"{number:,.{1 if number < 10 else 0}f}{' s/token' if is_slow else ''}"


def draw(
    shape: Shape,
    made: Plan,
    dtypes: Sequence[str],
    window: Policy | None,
    file: Path,
    select: int | None,
) -> None:
    """Draw the memory of each variant in each type, and what is free beside weights and states."""
    from kvcache import plot

    by_type = {dtype: variants(shape, dtype, window, select) for dtype in dtypes}
    caches = {
        dtype if name == AS_IT_IS else f"{dtype}, {name}": KVCache(by_type[dtype][name], max_seq_len=None)
        for name in by_type[dtypes[0]]
        for dtype in dtypes
    }
    free = max(0, made.memory.free - made.memory.beside(made.sequences))
    axes = plot.memory(caches, max(2, made.context), sequences=made.sequences, free=free)
    plot.save(axes.figure.get_figure(root=True), file)
