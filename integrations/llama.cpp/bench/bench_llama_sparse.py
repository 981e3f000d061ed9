"""Compare llama.cpp on this cache with its own, in a model whose tokens choose rows by an indexer.

cd integrations/llama.cpp && ./build.sh             # once, minutes
python bench/bench_llama_sparse.py --json run.json  # ten minutes
python bench/bench_llama_sparse.py --context 32k --types int8 --only decode
python bench/bench_llama_sparse.py --ik ~/ik_llama.cpp --only decode   # beside ik_llama.cpp, too
python bench/bench_llama_sparse.py --model glm5-next --only decode     # keys that stand for several tokens

The layers have DeepSeek V3.2's attention, 128 heads over latents of 576 elements and 64 index heads of 128, and small
random matrices beside it. With --model glm5-next they have GLM-5.3 Flash's, 64 heads over latents of 512 elements and
32 index heads; with --model qwen4exp Qwen 4's, 16 heads of 256 over 2 KV heads and 4 index heads. An index key stands
for 4 tokens there. With --model deepseek4 they have DeepSeek V4's, 64 heads of 512 and 64 index heads. The first
layer chooses 512 rows that stand for 4 tokens. The second layer sees all rows that stand for 128. A figure is the mean
of both. llama.cpp's own cache cannot go back in that model, so that prompts are left out.

Contexts are filled with random rows. Each figure is of attention alone: the time of a step or a prompt, less the time
of one in an empty context. llama.cpp's own cache has flash attention on, its default; where it lacks a type, f16 rows.
ik_llama.cpp has q8_0 rows there. It does not know the architecture deepseek32, so with --ik the model is of the
architecture glm-dsa.
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

from bench_llama_cpp import BUILT, MARGIN, MODELS, PROMPT, Report, interleave, reader, recorded, rested, warm
from ik_llama_cpp import NAME, IkContext, IkModel
from llama_cpp_contexts import OWN_TYPES, TYPES, Context, Library, Model
from llama_cpp_sparse_models import SHAPES, SPARSE_LAYERS, write

from kvcache.tools.arguments import parse_tokens

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))  # of the core
from figures import describe_machine, new_file, quartiles, quotients

WANTED = {("decode", 32768): 4, ("decode", 131072): 8, ("prompt", 32768): 3}
WANTED_POOLED = {
    "glm5-next": {("decode", 32768): 8},
    "qwen4exp": {("decode", 32768): 8},
    "deepseek4": {("decode", 32768): 6},
}
DEFAULT, BESIDE_IK = "deepseek32", "glm-dsa"
OWN, KVCACHE = "own", "kvcache"
INSTEAD = {OWN: "f16", NAME: "q8_0"}  # others' types, where kvcache's is one that it alone has
Makers = dict[str, Callable[[str, int], Context | IkContext]]  # of a context, by entrant: from its type and length


def measure(report: Report, makers: Makers, section: str, dtype: str, depth: int, o: argparse.Namespace) -> None:
    """Print a line for each other entrant: milliseconds of a layer of it and of kvcache, and the speedup."""
    count, least = (1, o.steps) if section == "decode" else (PROMPT, o.prompts)
    calls: dict[tuple[str, int], Callable[[], float]] = {}
    with ExitStack() as stack:
        for key, make in makers.items():
            own_type = INSTEAD.get(key, dtype) if dtype in OWN_TYPES else dtype
            for at in (0, depth):
                room = count * (least if count == 1 else 1) + 2 * MARGIN
                context = stack.enter_context(closing(make(own_type, at + room)))
                warm(report, context, own_type, at)
                call = context.decode if count == 1 else reader(context, at)
                calls[key, at] = rested(call) if o.ik else call
        samples = interleave(calls, least)
    beside = f" of {o.model}" if o.model != DEFAULT else f" beside {NAME}" if o.ik else ""
    wanted = WANTED_POOLED.get(o.model, WANTED)
    title = f"sparse layer{beside}, {section}"
    alone = {}
    for key in makers:
        empty = statistics.median(samples[key, 0])
        alone[key] = [(seconds - empty) / SPARSE_LAYERS for seconds in samples[key, depth]]
        report.row(f"{title}, {key}", depth, dtype, seconds=statistics.median(alone[key]))
    for key in makers:
        if key == KVCACHE:
            continue
        low, middle, high = quartiles(quotients(alone[key], alone[KVCACHE]))
        want = wanted.get((section, depth)) if key == OWN else None
        figure = {"quotient": middle, "low": low, "high": high, "wanted": f">= {want}" if want else ""}
        report.row(f"{title}, speedup{'' if key == OWN else f' over {key}'}", depth, dtype, **figure)
        times = (f"{1e3 * statistics.median(alone[each]):.2f}" for each in (key, KVCACHE))
        quartile = f"{low:.2f} .. {high:.2f}"
        report.cells(f"{depth:,}", dtype, key, *times, f"{middle:.2f}", quartile, str(figure["wanted"]))


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=os.environ.get("LLAMA_CPP_LIB_PATH", BUILT), metavar="FOLDER",
                        help="with libllama; default: $LLAMA_CPP_LIB_PATH, or what build.sh built")  # fmt: skip
    parser.add_argument("--ik", type=Path, metavar="FOLDER", help="a clone of ik_llama.cpp, built in its folder build")
    parser.add_argument("--model", choices=[name for name in SHAPES if name != BESIDE_IK], default=DEFAULT,
                        help=f"whose attention; default: {DEFAULT}")  # fmt: skip
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
    if o.model == "deepseek4":
        o.only = ["decode"]
    if o.ik and o.model != DEFAULT:
        parser.error(f"--model {o.model}: ik_llama.cpp does not know the architecture")
    if o.cpu_time and o.threads > 1:
        parser.error("--cpu-time is for --threads 1: it adds up what threads take")
    words = sys.argv[1:] if arguments is None else arguments
    o.command = " ".join(["python integrations/llama.cpp/bench/bench_llama_sparse.py", *words])
    return o


def main(arguments: Sequence[str] | None = None) -> None:
    o = options(arguments)
    print(describe_machine())
    report = Report(o.threads, {})
    with recorded(report, o), ExitStack() as stack:
        path = write(BESIDE_IK if o.ik else o.model, MODELS)
        model = stack.enter_context(closing(Model(Library(o.library), path)))
        if o.cpu_time:
            model.library.clock = time.process_time
        makers: Makers = {
            OWN: lambda dtype, n_ctx: Context(model, "flash", dtype, n_ctx, o.threads),
            KVCACHE: lambda dtype, n_ctx: Context(model, "kvcache", dtype, n_ctx, o.threads),
        }
        if o.ik:
            ik = stack.enter_context(closing(IkModel(o.ik, path, o.threads, cpu_time=o.cpu_time)))
            makers[NAME] = lambda dtype, n_ctx: ik.context(f"{dtype}/{dtype}", n_ctx)
        for section in o.only:
            what = "a step" if section == "decode" else f"a prompt of {PROMPT}"
            title = f"{what}, attention of a layer, ms"
            report.head(title, "entrant", "its", KVCACHE, "speedup", "quartiles", "wanted")
            for depth in o.context if section == "decode" else o.context[:1]:
                for dtype in o.types:
                    measure(report, makers, section, dtype, depth, o)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a KeyboardInterrupt would be lost where llama.cpp calls the log
    main()
