"""Compare llama.cpp on this cache with its own, in a model whose tokens choose rows by an indexer (DeepSeek V3.2).

integrations/llama.cpp/build.sh                     # once, minutes
python bench/bench_llama_sparse.py --json run.json  # ten minutes
python bench/bench_llama_sparse.py --context 32k --types int8 --only decode

The layers have DeepSeek V3.2's attention, 128 heads over latents of 576 elements and 64 index heads of 128, and small
random matrices beside it. Contexts are filled with random rows. Each figure is of attention alone: the time of a step
or a prompt, less the time of one in an empty context. llama.cpp's own cache has flash attention on, its default;
where it lacks a type, f16 rows.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from bench_llama_cpp import BUILT, MARGIN, PROMPT, Report, interleave, reader, recorded, warm, written
from figures import describe_machine, new_file, quartiles, quotients
from llama_cpp_contexts import OWN_TYPES, TYPES, Context, Library, Model

from kvcache.tools.arguments import parse_tokens

WANTED = {("decode", 32768): 4, ("decode", 131072): 8, ("prompt", 32768): 3}
CACHES = {"own": "flash", "kvcache": "kvcache"}


def measure(report: Report, model: Model, section: str, dtype: str, depth: int, o: argparse.Namespace) -> None:
    """Print a line: milliseconds of a layer with each cache, and the speedup."""
    count, least = (1, o.steps) if section == "decode" else (PROMPT, o.prompts)
    calls: dict[tuple[str, int], Callable[[], float]] = {}
    with ExitStack() as stack:
        for key, cache in CACHES.items():
            own_type = "f16" if key == "own" and dtype in OWN_TYPES else dtype
            for at in (0, depth):
                room = count * (least if count == 1 else 1) + 2 * MARGIN
                context = stack.enter_context(closing(Context(model, cache, own_type, at + room, o.threads)))
                warm(report, context, own_type, at)
                calls[key, at] = context.decode if count == 1 else reader(context, at)
        samples = interleave(calls, least)
    alone = {}
    for key in CACHES:
        empty = statistics.median(samples[key, 0])
        alone[key] = [(seconds - empty) / model.num_layers for seconds in samples[key, depth]]
        seconds = statistics.median(alone[key])
        report.row(f"sparse layer, {section}, {key}", depth, dtype, seconds=seconds)
    low, middle, high = quartiles(quotients(alone["own"], alone["kvcache"]))
    want = WANTED.get((section, depth))
    wanted = f">= {want}" if want else ""
    report.row(f"sparse layer, {section}, speedup", depth, dtype, quotient=middle, low=low, high=high, wanted=wanted)
    times = (f"{1e3 * statistics.median(alone[key]):.2f}" for key in CACHES)
    report.cells(f"{depth:,}", dtype, *times, f"{middle:.2f}", f"{low:.2f} .. {high:.2f}", wanted)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=os.environ.get("LLAMA_CPP_LIB_PATH", BUILT), metavar="FOLDER",
                        help="with libllama; default: $LLAMA_CPP_LIB_PATH, or what build.sh built")  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=("decode", "prompt"), default=["decode", "prompt"],
                        help="default: both")  # fmt: skip
    parser.add_argument("--context", type=parse_tokens, nargs="+", default=[32768, 131072], metavar="N",
                        help="tokens; default: 32768 131072; prompts are read after the first")  # fmt: skip
    parser.add_argument("--types", nargs="+", choices=[*TYPES, *OWN_TYPES], default=["f16", "q8_0", "int8"],
                        help="of rows; default: f16 q8_0 int8")  # fmt: skip
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--cpu-time", action="store_true",
                        help="count CPU time, for a machine that is busy otherwise; with --threads 1")  # fmt: skip
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="tokens that each decodes; default: 16")
    parser.add_argument("--prompts", type=int, default=3, metavar="N", help="that each reads; default: 3")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="keep the run, for bench/write_results.py")
    o = parser.parse_args(arguments)
    for name in ("context", "threads", "steps", "prompts"):
        given = getattr(o, name)
        if min(given if isinstance(given, list) else [given]) < 1:
            parser.error(f"--{name} {given}: must be at least 1")
    if o.cpu_time and o.threads > 1:
        parser.error("--cpu-time is for --threads 1: it adds up what threads take")
    o.command = " ".join(["python bench/bench_llama_sparse.py", *(sys.argv[1:] if arguments is None else arguments)])
    return o


def main(arguments: Sequence[str] | None = None) -> None:
    o = options(arguments)
    print(describe_machine())
    report = Report(o.threads, {})
    with recorded(report, o):
        model = Model(Library(o.library), written("deepseek32"))
        if o.cpu_time:
            model.library.clock = time.process_time
        for section in o.only:
            what = "a step" if section == "decode" else f"a prompt of {PROMPT}"
            report.head(f"{what}, attention of a layer, ms", "own", "kvcache", "speedup", "quartiles", "wanted")
            for depth in o.context if section == "decode" else o.context[:1]:
                for dtype in o.types:
                    measure(report, model, section, dtype, depth, o)
        model.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a KeyboardInterrupt would be lost where llama.cpp calls the log
    main()
