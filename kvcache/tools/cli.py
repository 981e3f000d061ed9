"""The command ``kvcache``, which plans a model's cache, measures this machine, generates text, describes the build."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from kvcache.columns import print_error, whole
from kvcache.errors import KVCacheError, plain
from kvcache.layer import FloatDType, count
from kvcache.models import shapes
from kvcache.policy import CrossAttention, SlidingWindow
from kvcache.runtime import __version__, get_num_threads, print_values, show_config
from kvcache.selecting import least_tokens
from kvcache.system import available_memory, readable, why_threads
from kvcache.tools import memory_plan, rates, shown_plan, shown_team, team_plan, weighing
from kvcache.tools.arguments import advise_order, prompt_bytes
from kvcache.tools.options import (
    ALL,
    CONTEXT_OPTION,
    TYPES,
    AsJson,
    Cores,
    EvictBy,
    Model,
    Plot,
    Prompts,
    Select,
    Share,
    Threads,
    TopP,
    Types,
    Weights,
    adapter_of,
    file_of,
    model_argument,
    not_nan,
    rate_or_size,
    seconds_option,
    tokens_option,
    type_option,
)
from kvcache.tools.pages import Command, Group
from kvcache.tools.terminal import print_paragraph, print_table, progress, run

if TYPE_CHECKING:
    from kvcache import state
    from kvcache.tools import bench

CONTEXT = 8192  # tokens of a sequence, if neither the user nor the model says
PROMPT = "Once upon a time"

F = TypeVar("F", bound=Callable[..., Any])

app = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _command(*examples: str, name: str | None = None) -> Callable[[F], F]:
    """Make a function a command, whose page has its docstring and these examples."""
    heading = "Examples:" if len(examples) > 1 else "Example:"

    def register(function: F) -> F:
        return app.command(name, cls=Command, epilog="\n".join([heading, *examples]))(function)

    return register


def main() -> NoReturn:
    """Run the command and exit."""
    run(_run)


def _run() -> int | None:
    """Run the command; return its exit status."""
    try:
        status: int | None = app(prog_name="kvcache", standalone_mode=False)
    except typer.Abort:
        return 130
    except typer.TyperException as error:
        print_error(f"kvcache: {error.format_message()}")
        return 2
    return status


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """The KV cache for CPU inference: plan it, measure it, generate through it."""
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


# ---- kvcache plan


@_command(
    "kvcache plan Llama-3.1-8B/config.json --weights q4_0 --context 128k",
    "kvcache plan Llama-3.1-8B/config.json --memory 64GB --bandwidth 100GB/s",
    "kvcache plan gemma-3-4b-Q4_0.gguf --dtype q8_0 --window 4k --sink-tokens 4",
    "kvcache plan Llama-3.1-8B --users 10 --context 32k --prompt 4k",
    name="plan",
)
def plan_command(
    model: Model,
    context: Annotated[
        int | None, tokens_option("Tokens of a sequence, such as 8k; by default the model's context.", 1)
    ] = None,
    sequences: Annotated[
        int | None, tokens_option("Sequences of so many tokens, which decode together; by default 1.", 1)
    ] = None,
    users: Annotated[
        int | None, tokens_option("Plan for so many users, each with a text of so many tokens.", 1)
    ] = None,
    prompt: Annotated[
        int | None, tokens_option("With --users: tokens of a prompt, such as 4k; by default the context.", 1)
    ] = None,
    dtype: Types = [],  # noqa: B006 (typer copies it)
    weights: Weights = None,
    memory: Annotated[Any, rate_or_size("Plan for a machine with so much free memory, such as 512GB.", "512GB")] = None,
    bandwidth: Annotated[
        Any, rate_or_size("Plan for a machine that reads memory so fast, such as 400GB/s.", "400GB/s")
    ] = None,
    cores: Cores = None,
    window: Annotated[int | None, tokens_option("Plan also for a window of N tokens.", 1)] = None,
    sink_tokens: Annotated[int, tokens_option("With --window: the first N tokens stay.", 0)] = 0,
    select: Annotated[int | None, tokens_option("Plan also for tokens that read about N rows, such as 2k.", 1)] = None,
    max_source_len: Annotated[int | None, tokens_option("Tokens or frames that an encoder is given.", 1)] = None,
    threads: Threads = None,
    measure: Annotated[bool, typer.Option(help="Measure how fast this machine reads rows: a second or two.")] = True,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Say how much memory a model takes on a machine, what fits, and how fast it decodes."""
    _check_picture(plot)
    _check_sinks(sink_tokens, window)
    _check_cores(cores, bandwidth, measure)
    shape = shapes.read(model, max_source_len)
    context = context or shape.max_seq_len or CONTEXT
    types = _types(shape, model, dtype)
    policy = None if window is None else SlidingWindow(window, sink_tokens)
    _check_selection(context, select)
    _check_team(users, prompt, sequences, context)
    with progress() as show:
        if measure:
            show("counting weights", 0)
        found = _memory(model, weights, memory)
        known = None if bandwidth is None else rates.given(bandwidth)
        if cores is not None or (bandwidth is None and measure):
            show("measuring attention", 0.5)
            multiplied = None if users is None else weighing.multiplied_type(model, weights)
            measured = _measured(shape, types, context, 1 if cores else threads, select, multiplied)
            known = rates.of_cores(bandwidth, cores, measured) if cores else measured
    options: dict[str, Any] = {"window": policy, "select": select, "rates": known}
    plan = partial(memory_plan.make, shape, found, context=context, dtypes=types, **options)
    made, team = plan(sequences=users or sequences or 1), None
    if users is not None:
        team = team_plan.make(shape, made, plan(sequences=1), prompt=prompt or context, **options)
    if plot is not None:
        shown_plan.draw(shape, made, types, policy, plot, select)
    _print_plan(made, team, as_json)


def _print_plan(made: memory_plan.Plan, team: team_plan.Team | None, as_json: bool) -> None:
    """Print a plan, and how fast a team decodes, if there is one."""
    if as_json:
        _print_json(made if team is None else {**dataclasses.asdict(made), "team": dataclasses.asdict(team)})
    elif team is None:
        shown_plan.write(made)
    else:
        shown_team.write(made, team)


def _types(shape: shapes.Shape, model: Path, given: Sequence[str]) -> list[str]:
    """Return the types that are given, or otherwise the usual types."""
    if ALL in given:
        return memory_plan.every_type(shape)
    for stored in given:
        if reason := memory_plan.why_not(shape, stored):
            raise typer.BadParameter(reason, param_hint="--dtype")
    return [*dict.fromkeys(given)] or memory_plan.usual_types(shape, model)


def _memory(model: Path, weights: str | int | None, free: int | None) -> memory_plan.Memory:
    """Return free memory, and the size of a model's weights; blame --weights if these cannot be counted in a type."""
    try:
        return memory_plan.available_memory(model, weights, free)
    except KVCacheError as error:
        if not isinstance(weights, str):
            raise
        raise typer.BadParameter(f"give a size, such as 4.7GB: {error}", param_hint="--weights") from None


def _measured(
    shape: shapes.Shape,
    types: Sequence[str],
    context: int,
    threads: int | None,
    select: int | None,
    weights: FloatDType | None,
) -> rates.Rates:
    """Measure this machine's rates for the types of keys and values."""
    dtypes = [*dict.fromkeys(one for stored in types for one in memory_plan.keys_and_values(stored))]
    return rates.measure(shape, dtypes, context=context, threads=threads, select=select, weights=weights)


def _check_sinks(sink_tokens: int, window: int | None) -> None:
    if sink_tokens and window is None:
        raise typer.BadParameter(
            "it needs --window: without one every token is seen anyway", param_hint="--sink-tokens"
        )


def _check_cores(cores: int | None, bandwidth: int | None, measure: bool) -> None:
    if cores is not None and (bandwidth is None or not measure):
        needs = "--bandwidth, of the machine that has so many cores" if bandwidth is None else "to measure a core here"
        raise typer.BadParameter(f"it needs {needs}", param_hint="--cores")


def _check_team(users: int | None, prompt: int | None, sequences: int | None, context: int) -> None:
    """Refuse options about a team that do not go together."""
    if users is not None and sequences is not None:
        raise typer.BadParameter(
            f"{users} users have {users} sequences: leave --sequences {sequences} out", param_hint="--users"
        )
    if prompt is not None and users is None:
        raise typer.BadParameter("it needs --users, who send such prompts", param_hint="--prompt")
    if prompt is not None and prompt > context:
        raise typer.BadParameter(
            f"{prompt:,} tokens are more than the context of {context:,}: give at most as many, or a longer --context",
            param_hint="--prompt",
        )


def _check_selection(context: int, select: int | None) -> None:
    if select is not None and context < (least := least_tokens(select)):
        raise typer.BadParameter(
            f"tokens read all rows of a text of {context:,} tokens: give --context {least:,} or more",
            param_hint="--select",
        )


# ---- kvcache bench


@_command(
    "kvcache bench --plot speed.svg",
    "kvcache bench Llama-3.1-8B/config.json --context 32k --threads 1 --json",
    name="bench",
)
def bench_command(
    model: Annotated[Path | None, model_argument("Whose heads to measure; else 32 and 8 of 128.")] = None,
    context: Annotated[int, CONTEXT_OPTION] = CONTEXT,
    threads: Threads = None,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, callback=not_nan, metavar="S", help="About how long it may take.")
    ] = 60.0,
    peers: Annotated[bool, typer.Option(help="Measure other people's code too, where it is installed.")] = True,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Measure what this machine gives: bandwidth, decoding, prefill and storing by type, and peers."""
    from kvcache.tools import bench

    _check_picture(plot)
    shape = bench.Shape(context=context, threads=threads or get_num_threads())
    if model is not None:
        shape = rates.largest_layer(shapes.read(model, context), context, threads)
    record = _measure(shape, seconds, peers)
    if plot is not None:
        from kvcache.plot import save

        save(bench.picture(record), plot)
    if as_json:
        _print_json(record)
    else:
        _print_bench(record)


def _measure(shape: bench.Shape, seconds: float, peers: bool) -> dict[str, Any]:
    """Run the benchmark with a progress bar; return its record."""
    from kvcache.tools import bench

    with progress() as show:
        for step in bench.measure(shape, seconds=seconds, peers=peers):
            if isinstance(step, bench.Result):
                return step.record
            show(step.doing, step.fraction)
    raise AssertionError("the last one is the result")


def _print_bench(record: dict[str, Any]) -> None:
    """Print what the benchmark measured."""
    machine, shape = record["machine"], record["shape"]
    dims = f"{shape['num_heads']} query and {shape['num_kv_heads']} KV heads x {shape['head_dim']}"
    print_paragraph(f"{machine['build']}; {machine['isa']}, {count(shape['threads'], 'thread')}")
    print_paragraph(f"{count(shape['num_layers'], 'layer')} of {dims}, {shape['context']:,} tokens")
    print(f"memory is read at {record['bandwidth'] / 1e9:.1f} GB/s\n")
    print_table(
        ["", "", "type", "tokens/s", "GB/s", "of bandwidth", "over f16", "our time x"],
        [
            [
                row["part"],
                row["name"],
                row["type"],
                f"{row['tokens_per_second']:,.1f}",
                f"{row['bytes_per_second'] / 1e9:.1f}" if "bytes_per_second" in row else "-",
                f"{row['of_bandwidth']:.2f}" if "of_bandwidth" in row else "-",
                f"{row['over_f16']:.2f}" if "over_f16" in row else "-",
                f"{row['by_ours']:.1f}" if "by_ours" in row else "-",
            ]
            for row in record["rows"]
        ],
    )
    for reason in record["left_out"]:
        print_paragraph(f"left out: {reason}")


# ---- kvcache generate


@_command(
    'kvcache generate examples/model "ROMEO:" --dtype q8_0',
    "kvcache generate Llama-3.2-1B-Q8_0.gguf --window 512 < play.txt",
    "kvcache generate examples/model --prompt-file play.txt --shift",
    "kvcache generate examples/model --prompt-file play.txt --keep 25%",
)
def generate(
    model: Annotated[Path, model_argument("A Hugging Face folder or a GGUF.")],
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help=f"Text to continue; -, or a pipe: standard input.  [default: {PROMPT}]"),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(parser=file_of, metavar="FILE", help="Read the prompt from a file; -: from standard input."),
    ] = None,
    dtype: Annotated[Any, type_option(f"Element type of the cache: {TYPES}.")] = "f16",
    hadamard: Annotated[bool, typer.Option("--hadamard", help="Transform rows before they are quantised.")] = False,
    window: Annotated[int | None, tokens_option("Each token sees the last N only.")] = None,
    shift: Annotated[bool, typer.Option("--shift", help="Drop the older half of a full context and go on.")] = False,
    sink_tokens: Annotated[int | None, tokens_option("With --window or --shift: the first N tokens stay.")] = None,
    prompts: Prompts = "stored",
    select: Select = None,
    keep: Share = None,
    evict_by: EvictBy = None,
    tokens: Annotated[int, tokens_option("How many to generate, such as 300 or 2k.")] = 300,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same text.")] = 0,
    temperature: Annotated[float, typer.Option(metavar="T", help="0: always the likeliest token.")] = 0.8,
    top_p: TopP = 0.95,
    compare: Annotated[
        bool, typer.Option("--compare", help="Then print tokens/s without the cache, and what each type loses.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Write the text and nothing else.")] = False,
) -> int:
    """Continue a text with a model of the Llama family, through the cache."""
    from kvcache import runner

    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("give a prompt or a file with one, not both", param_hint="--prompt-file")
    if compare and quiet:
        raise typer.BadParameter("--quiet leaves the table out: give one of both", param_hint="--compare")
    text = prompt_bytes(prompt, prompt_file, PROMPT)
    options = runner.Options(
        dtype=dtype,
        window=window,
        shift=shift,
        num_sink_tokens=sink_tokens,
        max_new_tokens=tokens,
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        compare=compare,
        quiet=quiet,
        transform="hadamard" if hadamard else None,
        prompts=prompts,
        select=select,
        keep=keep,
        evict_by=evict_by,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for an ASCII terminal
    with progress() as show, advise_order(model, prompt or prompt_file):
        return runner.run(model, text, options, sys.stdout, on_prefill=lambda done, total: show("prompt", done / total))


# ---- kvcache serve


@_command(
    "kvcache serve examples/model",
    "kvcache serve Qwen3-0.6B --dtype int8 --capacity 64k --keys keys.json --store dir:~/prompts?max_bytes=20GiB",
)
def serve(
    model: Annotated[Path, model_argument("A folder with a model of transformers and its tokenizer.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What clients call it; else the folder's name.")
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Where to listen; 0.0.0.0: for other machines, too.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0: any free one.")] = 8000,
    capacity: Annotated[int, tokens_option("Tokens that the cache holds, of all requests together.", 130)] = 1 << 15,
    dtype: Annotated[Any, type_option(f"Element type of the cache: {TYPES}; f16 by default.")] = None,
    prompts: Prompts = "stored",
    select: Select = None,
    store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Keep prompts over restarts: a folder, or as dir:~/prompts?max_bytes=20GiB."),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(parser=file_of, metavar="FILE", help="JSON: the API keys of clients.")
    ] = None,
    adapter: Annotated[
        list[Any],
        typer.Option(
            parser=adapter_of,
            metavar="NAME=FOLDER",
            help="An adapter of PEFT (LoRA), and what clients call it. May be given several times.",
        ),
    ] = [],  # noqa: B006 (typer copies it)
    max_running: Annotated[int, typer.Option(min=1, max=4096, metavar="N", help="Answers that go on at once.")] = 64,
    max_waiting: Annotated[
        int, typer.Option(min=0, max=1 << 20, metavar="N", help="Answers that wait; others get 503.")
    ] = 256,
    read_timeout: Annotated[float, seconds_option("To read a request.")] = 30.0,
    timeout: Annotated[float, seconds_option("For a whole answer.")] = 600.0,
    max_body: Annotated[Any, rate_or_size("The most bytes of a request.", "8MiB", 1 << 10)] = "8MiB",
    cors_origin: Annotated[
        list[str],
        typer.Option(metavar="URL", help="Let scripts of this origin ask; *: of any. May be given several times."),
    ] = [],  # noqa: B006 (typer copies it)
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Write a line for each request.")] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="Write the log as JSON.")] = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's interface does: many requests at once on one cache."""
    try:
        from kvcache.server import command
        from kvcache.server.application import Limits
    except ModuleNotFoundError as error:
        raise ImportError(f"there is no module {error.name}; run: pip install 'kvcache[serve]'") from None
    limits = Limits(max_running, max_waiting, read_timeout, timeout, max_body, tuple(cors_origin), log_requests)
    how = {"dtype": dtype, "select": select, "prompts": None if prompts == "stored" else prompts}
    how["adapters"] = tuple(adapter)
    command.serve(
        command.Options(
            model, name, host, port, keys=keys, capacity=capacity, store=store, limits=limits, log_json=log_json, **how
        )
    )


# ---- kvcache info


@_command("kvcache info --json")
def info(as_json: AsJson = False) -> None:
    """Say what this build is and what it found: instruction sets, threads, memory."""
    from kvcache.tools import selftest

    found: dict[str, Any] = {**show_config("dicts")}
    found["instruction sets"] = " ".join(selftest.instruction_sets())
    found["threads"] = why_threads(get_num_threads())
    free, source = available_memory()
    found["memory"] = f"{readable(free)} free ({source})"
    if as_json:
        _print_json({**found, "memory": free})
    else:
        print_values(found)


# ---- kvcache selftest


@_command("kvcache selftest", name="selftest")
def selftest_command(as_json: AsJson = False) -> int:
    """Check this build on this machine: kernels, a generation, threads, files; print a line to send."""
    from kvcache.tools import selftest

    if not as_json:
        return selftest.main()
    checks = [*selftest.run()]
    _print_json({"machine": selftest.machine(), "checks": [dataclasses.asdict(check) for check in checks]})
    return 0 if all(check.passed for check in checks) else 1


# ---- kvcache inspect


@_command("kvcache inspect chat.state --verify")
def inspect(
    file: Annotated[Path, typer.Argument(parser=file_of, metavar="FILE", help="A saved state.", show_default=False)],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all of it, and compare it with its checksums.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a saved state holds: its layers, its sequences, the model it is for."""
    from kvcache import state

    found = state.inspect(file, verify=verify)
    if as_json:
        _print_json(_state_as_json(found, verify))
        return
    name, size = whole(plain(file)), readable(found.nbytes)
    print_paragraph(f"{name}: version {found.version}, written by kvcache {found.library}, {size}")
    _print_state(found, verify)
    if found.following is not None:
        print()
        print_paragraph(f"behind it, {found.behind}, {readable(found.following.nbytes)}")
        _print_state(found.following, verify)


def _print_state(found: state.SavedState, verify: bool) -> None:
    """Print a saved state: its model, checks, layers and sequences."""
    from kvcache.state.saved import batch_of

    print_paragraph(f"model: {found.fingerprint or 'not said'}")
    print_paragraph(f"MAC: {'there, not checked (loading with the secret does)' if found.has_mac else 'none'}")
    print(f"checksums: {'right' if verify else 'not compared (--verify)'}")
    for layer, number in Counter(map(str, found.layers)).items():
        print_paragraph(f"{count(number, 'layer')} of {layer}")
    is_cross = [isinstance(layer.policy, CrossAttention) for layer in found.layers]
    batch = batch_of(found)
    if batch is not None:
        texts, columns = count(len(batch[2]), "text"), count(batch[1], "token")
        print_paragraph(f"batch of transformers: {texts}, {columns} with padding")
    rows = []
    for one in found.sequences:
        if batch is not None and one.seq_id == batch[0]:  # it says which sequences are the batch
            continue
        of_tokens = [n for n, cross in zip(one.num_rows, is_cross, strict=True) if not cross]
        most = max(of_tokens or one.num_rows, default=0)
        rows.append([str(one.seq_id), str(most), str(one.next_position), str(len(one.tokens))])
    if rows:
        print()
        print_table(["sequence", "rows", "next position", "token ids"], rows)


def _state_as_json(found: state.SavedState, verified: bool) -> dict[str, Any]:
    """Return what --json prints of a saved state."""
    facts = ("version", "library", "fingerprint", "nbytes", "has_mac")
    limits = ("block_size", "max_seq_len", "max_sequences", "capacity", "max_bytes")
    of_sequence = ("seq_id", "num_rows", "next_position")
    return {
        **{name: getattr(found, name) for name in facts},
        "verified": verified,
        **{name: getattr(found, name) or None for name in limits},
        "layers": [str(layer) for layer in found.layers],
        "sequences": [
            {**{name: getattr(one, name) for name in of_sequence}, "tokens": one.tokens.tolist()}
            for one in found.sequences
        ],
        "tensors": [dataclasses.asdict(tensor) for tensor in found.tensors],
        **({} if found.following is None else {"following": _state_as_json(found.following, verified)}),
    }


# ---- printing and drawing


def _check_picture(file: Path | None) -> None:
    if file is not None:
        from kvcache import plot

        plot.check_file(file)


def _print_json(value: Any) -> None:
    plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    print(json.dumps(plain, indent=2))
