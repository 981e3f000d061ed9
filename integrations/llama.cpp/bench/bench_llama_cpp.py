"""Compare llama.cpp on this cache with llama.cpp on its own, with flash attention on (its default) and off.

cd integrations/llama.cpp && ./build.sh                                      # once, minutes
python bench/bench_llama_cpp.py --model model.gguf                           # one of yours: a sentence, in 3 minutes
python bench/bench_llama_cpp.py --json run.json --output llama_cpp.svg       # everything, half an hour
python bench/bench_llama_cpp.py --only decode --context 0 8192 --types f16
python bench/bench_llama_cpp.py --ik ~/ik_llama.cpp --only ik-decode ik-prompt --context 8192

All contexts live in one process, share one model, and take turns: what else the machine does slows all of them. They
are filled to their depth with random rows at once, as a state; a model of random weights is written if none is named.
A speedup is the other's time by kvcache's: the median of the rounds with its quartiles.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import llama_cpp_models
from ik_llama_cpp import NAME, IkContext, IkModel, compiled
from llama_cpp_contexts import BLOCKED, CACHES, OWN_TYPES, TYPES, Context, Library, LlamaError, Model
from llama_cpp_summary import DEPTHS, summary

from kvcache.selecting import SELECT_FROM
from kvcache.tools.arguments import parse_tokens
from kvcache.tools.interleave import PAUSE, rounds

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))  # of the core
from figures import describe_machine, keep, new_file, quartiles, quotients
from resident_memory import measure_in_child

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
BUILT = CACHE / "kvcache/llama.cpp/shared-openmp/bin"  # where integrations/llama.cpp/build.sh leaves libllama
MODELS = CACHE / "kvcache-bench/llama-cpp-models"
DEFAULT_MODEL = "llama-1b"
MARGIN = 8  # tokens of a context beyond those that are measured
PROMPT = 512  # tokens of a prompt, which are one ubatch
PICTURES = (".svg", ".png", ".pdf")
SEQUENCES = 64  # that share a prompt

DEFAULT, BETTER, KVCACHE, SELECTED, IK = "flash", "better", "kvcache", "selected", "ik"
STORED, INT8 = PRECISIONS = "stored", "int8"  # of prompts
SUMMARY = "summary"
CONTEXTS = [0, 2048, 8192, 16384, 32768]  # tokens
OVER = {
    DEFAULT: "speedup over the default",
    BETTER: "speedup over the better of on and off",
    KVCACHE: "speedup over all rows",
    STORED: "speedup over stored",
}

# Wanted speedups of llama-1b, by section, yardstick, type and context. Beside IK they are of attention alone.
WANTED: dict[tuple[str, str, str, int], float] = {
    **{("decode", DEFAULT, dtype, 0): 0.98 for dtype in TYPES},
    **{("decode", DEFAULT, "f16", n): x for n, x in zip((2048, 8192, 16384, 32768), (1.7, 4.5, 7.5, 10), strict=True)},
    **{("decode", BETTER, "f16", n): x for n, x in zip((2048, 8192, 16384, 32768), (1.4, 2.1, 2.8, 3), strict=True)},
    ("decode", DEFAULT, "q8_0", 16384): 10,
    ("decode", DEFAULT, "q4_0", 16384): 10,
    ("prompt", DEFAULT, "f16", 8192): 1.8,
    ("prompt", DEFAULT, "q8_0", 8192): 12,
    ("bytes", STORED, "f16", 32768): 1.67,
    ("bytes", STORED, "int8", 32768): 1.33,
    (SELECTED, DEFAULT, "f16", 32768): 5.5,
    (SELECTED, KVCACHE, "f16", 32768): 1.5,
    ("decode", IK, "f16", 8192): 4,
    **{("decode", IK, dtype, 8192): 3 for dtype in ("q8_0", "int8")},
    **{("decode", IK, dtype, 16384): 5 for dtype in ("q4_0", "int4")},
    **{("prompt", IK, dtype, 8192): 2 for dtype in ("f16", "bf16", "q8_0", "int8", "q4_0", "int4")},
}

# ik_llama.cpp's types of K and V by --types, and kvcache's types beside each. Its q8_KV is only for K.
IK_TYPES = {
    "f16": (["f16/f16"], ["f16"]),
    "bf16": (["bf16/bf16"], ["bf16"]),
    "q8_0": (["q8_KV/q8_0", "q8_0/q8_0"], ["q8_0", "int8"]),
    "q4_0": (["q4_0/q4_0"], ["q4_0", "int4"]),
}

SPEEDUPS = ("over default", "quartiles", "wanted", "over better", "quartiles", "wanted")
BESIDE = (f"{NAME}'s", "tokens/s", KVCACHE, "speedup", "quartiles", "", "attention", "quartiles", "wanted")
WIDTHS = (9, 5, 15, 10, 8, 12, 14, 7, 11, 14, 7)  # of the columns of a table

MOST_PREFILLED = 32768  # tokens of a context that is filled by prompts: more would take hours

Key = TypeVar("Key")
Samples = dict[str, list[float]]  # seconds of each round, by cache
Beside = dict[tuple[str, int], list[float]]  # the same, by type, which for ik_llama.cpp is that of K and V, and depth


class Report:
    """Prints lines at once, and collects each figure as a row. Kept rows are in a section of the model's own."""

    def __init__(self, threads: int, wanted: dict[tuple[str, str, str, int], float], model: str = "") -> None:
        self.rows: list[dict[str, object]] = []
        self.threads, self._wanted, self.section = threads, wanted, f"llama_cpp {model}".rstrip()
        self._said: set[str] = set()

    def cells(self, *cells: str) -> None:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=False)).rstrip(), flush=True)

    def row(self, name: str, context: int, dtype: str, **figure: object) -> None:
        row = {"section": "llama_cpp", "name": name, "type": dtype, "context": context, "threads": self.threads}
        self.rows.append(row | figure)

    def open(self, title: str, *columns: str) -> None:
        self.head(title, *(name for name, *_ in CACHES.values()), *columns)

    def head(self, title: str, *columns: str) -> None:
        print(f"\n{title}\n", flush=True)
        self.cells("tokens", "type", *columns)

    def say(self, text: str) -> None:
        """Print a line once only."""
        if text not in self._said:
            self._said.add(text)
            print(f"    {text}", flush=True)

    def speeds(self, section: str, title: str, context: int, dtype: str, count: int, samples: Samples) -> None:
        """Add a line: each cache's tokens/s, and the speedups over the default and the better of llama.cpp's own."""
        own = [cache for cache in samples if cache != KVCACHE]
        over = {DEFAULT: (DEFAULT, KVCACHE)}
        if len(own) > 1:
            over[BETTER] = min(own, key=lambda cache: statistics.median(samples[cache])), KVCACHE
        names = {cache: name for cache, (name, *_) in CACHES.items()}
        self.line(section, title, names, over, context, dtype, count, samples)

    def line(
        self, section: str, title: str, names: Mapping[str, str], over: Mapping[str, tuple[str, str]], context: int,
        dtype: str, count: int, samples: Samples,
    ) -> None:  # fmt: skip
        """Add a line: tokens/s of each entrant that has samples, and speedups: of the second key over the first."""
        cells = []
        for key, name in names.items():
            cells.append(self._rate(f"{title}, {name}", context, dtype, count, samples.get(key)))
        for yardstick, (slow, fast) in over.items():
            found = quotients(samples[slow], samples[fast])
            cells += self._speedup(section, title, context, dtype, yardstick, found)
        self.cells(f"{context:,}", dtype, *cells)

    def _rate(self, name: str, context: int, dtype: str, count: int, seconds: list[float] | None) -> str:
        """Keep tokens/s, and return them as a cell, which is empty if there are no seconds."""
        if seconds is None:
            return ""
        rate = count / statistics.median(seconds)
        self.row(name, context, dtype, rate=rate)
        return f"{rate:.2f}"

    def _speedup(
        self, section: str, title: str, context: int, dtype: str, over: str, found: Sequence[float]
    ) -> list[str]:
        """Keep a speedup, and return its cells."""
        low, middle, high = quartiles(found)
        want = self._wanted.get((section, over, dtype, context))
        wanted = f">= {want:g}" if want else ""
        figure = {"quotient": middle, "low": low, "high": high, "wanted": wanted}
        self.row(f"{title}, {OVER[over]}", context, dtype, **figure)
        return [f"{middle:.2f}", f"{low:.2f} .. {high:.2f}", wanted]

    def beside(
        self, section: str, title: str, context: int, theirs: str, dtype: str, count: int, samples: Beside
    ) -> None:
        """Add a line: the tokens/s of ik_llama.cpp and kvcache, the speedup, and the speedup of attention alone."""
        cells = [theirs]
        for who, each in ((NAME, theirs), (KVCACHE, dtype)):
            rate = count / statistics.median(samples[each, context])
            cells.append(f"{rate:.2f}")
            self.row(f"{title}, {who}", context, each, rate=rate)
        want = self._wanted.get((section, IK, dtype, context))
        found = {"speedup": quotients(samples[theirs, context], samples[dtype, context])}
        if context:
            attention = (alone(samples, each, context) for each in (theirs, dtype))
            found["speedup of attention alone"] = quotients(*attention)
        for what, speedups in found.items():
            low, middle, high = quartiles(speedups)
            wanted = f">= {want:g}" if want and "alone" in what else ""
            cells += [f"{middle:.2f}", f"{low:.2f} .. {high:.2f}", wanted]
            name = f"{title}, {what} over {theirs}"
            self.row(name, context, dtype, quotient=middle, low=low, high=high, wanted=wanted)
        self.cells(f"{context:,}", dtype, *cells)


def alone(samples: Beside, dtype: str, depth: int) -> list[float]:
    """Return the seconds of attention over the tokens of a depth, in each round: what they add to an empty context."""
    empty = statistics.median(samples[dtype, 0])
    return [seconds - empty for seconds in samples[dtype, depth]]


def warm(report: Report, context: Context | IkContext, dtype: str, depth: int) -> None:
    """Fill a context to a depth, and decode once."""
    if not context.fill(depth):
        report.say(f"{context.name} loads no state of {dtype}: its contexts are prefilled")
    if context.name == KVCACHE and context.own:
        report.say(f"not kvcache, but llama.cpp's own cache: {context.own}")
    context.decode()
    context.check()


def interleave(calls: dict[Key, Callable[[], float]], least: int) -> dict[Key, list[float]]:
    """Call functions that return seconds one after the other, in rounds."""
    found = zip(*rounds(*calls.values(), seconds=0, least=least), strict=True)
    return dict(zip(calls, map(list, found), strict=True))


def stepper(context: Context, depth: int) -> Callable[[], float]:
    """Return a function that decodes a token."""
    return context.decode


def reader(context: Context | IkContext, depth: int) -> Callable[[], float]:
    """Return a function that reads a prompt after a depth."""

    def read() -> float:
        context.rewind(depth)
        return context.decode(PROMPT)

    return read


def rested(call: Callable[[], float]) -> Callable[[], float]:
    """Return a function that calls another once the threads of another process sleep."""

    def run() -> float:
        time.sleep(PAUSE)
        return call()

    return run


# ---- sections


def measure(
    report: Report, model: Model, entrants: Mapping[Key, Mapping[str, Any]], depth: int, room: int, least: int,
    of: Callable[[Context, int], Callable[[], float]],
) -> dict[Key, list[float]]:  # fmt: skip
    """Make each entrant's context, fill it to a depth, and interleave what `of` returns for it.

    The contexts are held at once. An entrant is what Context is made with.
    """
    calls = {}
    with ExitStack() as stack:
        for key, given in entrants.items():
            made = Context(model, n_ctx=depth + room, threads=report.threads, **given)
            warm(report, stack.enter_context(closing(made)), given["dtype"], depth)
            calls[key] = of(made, depth)
        return interleave(calls, least)


def caches_of(dtype: str) -> dict[str, dict[str, str]]:
    """Return an entrant for each cache that has the type."""
    return {cache: {"cache": cache, "dtype": dtype} for cache in CACHES if cache != "plain" or dtype not in BLOCKED}


def decode(report: Report, model: Model, o: argparse.Namespace) -> None:
    """Measure all types of a depth in turn, so that their times can be divided."""
    report.open("decoding, tokens/s", *SPEEDUPS)
    entrants = {(dtype, cache): given for dtype in o.types for cache, given in caches_of(dtype).items()}
    found = {each: measure(report, model, entrants, each, o.steps + MARGIN, o.steps, stepper) for each in o.context}
    for dtype in o.types:
        for depth, samples in found.items():
            of_type = {cache: seconds for (each, cache), seconds in samples.items() if each == dtype}
            report.speeds("decode", "decoding", depth, dtype, 1, of_type)
    over_first(report, o.types, found)


def select(report: Report, model: Model, o: argparse.Namespace) -> None:
    """Measure tokens that select rows beside tokens that read all, and beside llama.cpp's own cache."""
    title = f"decoding with select={o.select}"
    names = {DEFAULT: CACHES[DEFAULT][0], KVCACHE: "all rows", SELECTED: "selected"}
    over = {DEFAULT: (DEFAULT, SELECTED), KVCACHE: (KVCACHE, SELECTED)}
    report.head(f"{title}, tokens/s", *names.values(), *SPEEDUPS[:3], "over all", *SPEEDUPS[1:3])
    for dtype, depth in itertools.product(o.types, (depth for depth in o.context if depth >= SELECT_FROM)):
        entrants: dict[str, dict[str, Any]] = {key: caches_of(dtype)[key] for key in (DEFAULT, KVCACHE)}
        entrants[SELECTED] = entrants[KVCACHE] | {"select": o.select}
        samples = measure(report, model, entrants, depth, o.steps + MARGIN, o.steps, stepper)
        report.line(SELECTED, title, names, over, depth, dtype, 1, samples)


def over_first(report: Report, types: Sequence[str], found: dict[int, dict[tuple[str, str], list[float]]]) -> None:
    """Add a line for each further type: the speedup of each cache over itself with the first type."""
    first, *others = types
    if not others:
        return
    report.open(f"decoding, speedup over {first} of the same cache")
    for dtype in others:
        for depth, samples in found.items():
            cells = []
            for cache, (name, *_) in CACHES.items():
                cells.append("")
                if (dtype, cache) in samples and (first, cache) in samples:
                    low, middle, high = quartiles(quotients(samples[first, cache], samples[dtype, cache]))
                    cells[-1] = f"{middle:.2f}"
                    title = f"decoding, {name}, speedup over its {first}"
                    report.row(title, depth, dtype, quotient=middle, low=low, high=high)
            report.cells(f"{depth:,}", dtype, *cells)


def prompt(report: Report, model: Model, o: argparse.Namespace) -> None:
    report.open(f"a prompt's {PROMPT} tokens in one ubatch, tokens/s", *SPEEDUPS)
    for dtype, depth in itertools.product(o.prompt_types, o.prompt_context):
        samples = measure(report, model, caches_of(dtype), depth, PROMPT + MARGIN, o.prompts, reader)
        report.speeds("prompt", f"prompts of {PROMPT}", depth, dtype, PROMPT, samples)


def in_bytes(report: Report, model: Model, o: argparse.Namespace) -> None:
    """Measure prompts that are multiplied in bytes beside prompts that are not, both on this cache."""
    title, over = f"prompts of {PROMPT} in bytes", {STORED: (STORED, INT8)}
    report.head(f"a prompt's {PROMPT} tokens by precision, tokens/s", *PRECISIONS, "over stored", *SPEEDUPS[1:3])
    for dtype, depth in itertools.product(o.prompt_types, o.prompt_context):
        entrants = {each: caches_of(dtype)[KVCACHE] | {"prompts": each} for each in PRECISIONS}
        samples = measure(report, model, entrants, depth, PROMPT + MARGIN, o.prompts, reader)
        report.line("bytes", title, {each: each for each in PRECISIONS}, over, depth, dtype, PROMPT, samples)


# A process measures its memory once a context was made, filled and used.
CHILD = """
import ctypes, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from llama_cpp_contexts import Context, Library, Model
model = Model(Library(Path({library!r})), Path({model!r}))
context = Context(model, {cache!r}, {dtype!r}, {n_ctx}, {threads}, n_seq_max={sequences}, unified={unified})
context.decode(min(512, {depth}))  # as a prompt, which uses all buffers
context.fill({depth})
context.share({sequences})
context.decode_each({sequences})
ctypes.CDLL(None).malloc_trim(0)  # of the state that was loaded
result.append(resident())
result.append(context.own)
"""


def memory(report: Report, model: Model, o: argparse.Namespace) -> None:
    report.open("resident memory of a process, MiB", "over default", "wanted", "", "with a pool")
    for dtype in o.types:
        depth = max(o.context)
        resident(report, model, o, dtype, depth, 1, f"memory at {depth:,} tokens")
        shared = min(o.shared, depth or o.shared)
        title = f"memory of {SEQUENCES} sequences that share {shared:,} tokens"
        resident(report, model, o, dtype, shared, SEQUENCES, title)


def resident(
    report: Report, model: Model, o: argparse.Namespace, dtype: str, depth: int, sequences: int, title: str
) -> None:
    """Add a line: the memory with each cache; with more sequences than one also of a pool that all share."""
    entrants = {cache: (cache, False) for cache in CACHES if cache != "plain" or dtype not in BLOCKED}
    if sequences > 1:
        entrants["pool"] = (DEFAULT, True)
    found = {}
    for key, (cache, unified) in entrants.items():
        n_ctx = (depth + MARGIN) * (1 if unified else sequences) + sequences * unified
        code = CHILD.format(
            here=str(HERE), library=str(o.library), model=str(o.model), cache=cache, dtype=dtype, n_ctx=n_ctx,
            threads=o.threads, sequences=sequences, unified=unified, depth=depth,
        )  # fmt: skip
        found[key], own = measure_in_child(code)
        name = CACHES[cache][0] + (", one pool" if unified else "")
        report.row(f"{title}, {dtype}, {name}", depth, dtype, value=f"{found[key] / 2**20:,.0f} MiB")
        if cache == KVCACHE and own:
            report.say(f"not kvcache, but llama.cpp's own cache: {own}")
    over = found[KVCACHE] / found[DEFAULT]
    wanted = "<= 1" if sequences == 1 else "< 1"
    report.row(f"{title}, over the default", depth, dtype, quotient=over, wanted=wanted)
    *cells, pool = (f"{found[key] / 2**20:,.0f}" if key in found else "" for key in (*CACHES, "pool"))
    tokens = f"{depth:,}" + (f" x{sequences}" if sequences > 1 else "")
    report.cells(tokens, dtype, *cells, f"{over:.3f}", wanted, "", pool)


def take_turns(
    report: Report, model: Model, ik: IkModel, theirs: Sequence[str], ours: Sequence[str], depth: int, count: int,
    least: int,
) -> Beside:  # fmt: skip
    """Interleave steps, or prompts of `count` tokens, of ik_llama.cpp and kvcache: empty, and after a depth."""
    room = least + MARGIN if count == 1 else count + MARGIN
    calls: dict[tuple[str, int], Callable[[], float]] = {}
    with ExitStack() as stack:
        for at in dict.fromkeys((0, depth)):
            for dtype in (*theirs, *ours):
                context: Context | IkContext
                if dtype in theirs:
                    context = ik.context(dtype, at + room)
                else:
                    context = Context(model, KVCACHE, dtype, at + room, report.threads)
                stack.enter_context(closing(context))
                warm(report, context, dtype, at)
                calls[dtype, at] = rested(context.decode if count == 1 else reader(context, at))
        samples = interleave(calls, least)
    return samples


def ik_decode(report: Report, model: Model, o: argparse.Namespace) -> None:
    name = f"decoding beside {NAME}"
    report.head(f"{name}; attention is what the context adds to a step", *BESIDE)
    with closing(IkModel(o.ik, o.model, o.threads)) as ik:
        for theirs, ours in (IK_TYPES[dtype] for dtype in o.types if dtype in IK_TYPES):
            for depth in o.context:
                filled_at_once = [each for each in theirs if "q8_KV" not in each or depth <= MOST_PREFILLED]
                samples = take_turns(report, model, ik, filled_at_once, ours, depth, 1, o.steps)
                for other, dtype in itertools.product(filled_at_once, ours):
                    report.beside("decode", name, depth, other, dtype, 1, samples)


def ik_prompt(report: Report, model: Model, o: argparse.Namespace) -> None:
    """Read prompts beside ik_llama.cpp's same type, and beside its type with the fastest attention."""
    name = f"prompts of {PROMPT} beside {NAME}"
    report.head(f"{name}; attention is what the context adds to a prompt", *BESIDE)
    pairs = [pair for each in o.prompt_types if each in IK_TYPES for pair in itertools.product(*IK_TYPES[each])]
    every = [other for theirs, _ in IK_TYPES.values() for other in theirs]
    ours = list(dict.fromkeys(dtype for _, dtype in pairs))
    for depth in o.prompt_context if pairs else ():
        with closing(IkModel(o.ik, o.model, o.threads)) as ik:
            samples = take_turns(report, model, ik, every, ours, depth, PROMPT, o.prompts)
        for other, dtype in pairs:
            report.beside("prompt by type", name, depth, other, dtype, PROMPT, samples)
        fastest = min(every, key=lambda other: statistics.median(alone(samples, other, depth)))
        for dtype in ours:
            report.beside("prompt", f"{name}'s fastest type", depth, fastest, dtype, PROMPT, samples)


SECTIONS: dict[str, Callable[[Report, Model, argparse.Namespace], None]] = {
    SUMMARY: summary,
    "decode": decode,
    SELECTED: select,
    "prompt": prompt,
    "bytes": in_bytes,
    "memory": memory,
    "ik-decode": ik_decode,
    "ik-prompt": ik_prompt,
}


# ---- the command


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=os.environ.get("LLAMA_CPP_LIB_PATH", BUILT), metavar="FOLDER",
                        help="with libllama; default: $LLAMA_CPP_LIB_PATH, or what build.sh built")  # fmt: skip
    parser.add_argument("--model", type=model_of, metavar="GGUF",
                        help="or random weights in the shape of a model that llama_cpp_models.py knows, such as "
                             f"qwen3.5-0.8b, a hybrid model; default: {DEFAULT_MODEL}")  # fmt: skip
    parser.add_argument("--ik", type=Path, metavar="FOLDER", help="a clone of ik_llama.cpp, built in its folder build")
    parser.add_argument("--only", nargs="+", choices=SECTIONS,
                        help="default: summary with --model; or all others, with --ik those beside it")  # fmt: skip
    parser.add_argument("--context", type=parse_tokens, nargs="+", metavar="N",
                        help=f"tokens; default: {' '.join(map(str, CONTEXTS))}, with summary "
                             f"{' '.join(map(str, DEPTHS))}; memory is measured at the most")  # fmt: skip
    types = [*TYPES, *OWN_TYPES]
    parser.add_argument("--types", nargs="+", choices=types,
                        help="of rows; default: f16 q8_0 q4_0, with summary f16 alone; beside int8, int6 and int4, "
                             "llama.cpp's own cache has q8_0, q8_0 and q4_0")  # fmt: skip
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--cpu-time", action="store_true",
                        help="count CPU time, for a machine that is busy otherwise; with --threads 1")  # fmt: skip
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="tokens that each decodes; default: 16")
    parser.add_argument("--select", type=int, default=2048, metavar="N",
                        help="rows that a token selects, in the section selected; default: 2048")  # fmt: skip
    parser.add_argument("--prompt-context", type=parse_tokens, nargs="+", default=[8192], metavar="N",
                        help="tokens before a prompt; default: 8192")  # fmt: skip
    parser.add_argument("--prompt-types", nargs="+", choices=types, default=["f16", "q8_0"],
                        help="default: f16 q8_0")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=3, metavar="N", help="that each reads; default: 3")
    parser.add_argument("--shared", type=parse_tokens, default=2048, metavar="N",
                        help=f"tokens that {SEQUENCES} sequences share; default: 2048")  # fmt: skip
    parser.add_argument("--json", type=new_file, metavar="FILE", help="keep the run, for bench/write_results.py")
    parser.add_argument(
        "--output", type=new_file, metavar="PICTURE", help=f"tokens/s against context; {', '.join(PICTURES)}"
    )
    o = parser.parse_args(arguments)
    o.begun, o.load = time.monotonic(), os.getloadavg()[0]
    o.context, o.depths = o.context or CONTEXTS, [each for each in o.context or [] if each] or DEPTHS
    least = {"context": 0, "prompt_context": 0, "shared": 1, "threads": 1, "steps": 1, "select": 1, "prompts": 1}
    for name, fewest in least.items():
        given = getattr(o, name)
        if min(given if isinstance(given, list) else [given]) < fewest:
            parser.error(f"--{name.replace('_', '-')} {given}: must be at least {fewest}")
    beside = [section for section in SECTIONS if section.startswith(IK)]
    others = [section for section in SECTIONS if section != SUMMARY and (o.ik or section not in beside)]
    o.only = o.only or ([SUMMARY] if o.model and not o.ik else others)
    chosen = [section for section in o.only if section in beside]
    if chosen and not o.ik:
        parser.error(f"--only {chosen[0]} needs --ik: a clone of ik_llama.cpp, built in its folder build")
    if o.ik and not chosen:
        parser.error(f"--ik is for the sections {' and '.join(beside)}, which --only leaves out")
    if o.cpu_time and (o.threads > 1 or o.ik):
        parser.error("--cpu-time is for --threads 1 in one process: it adds up what threads take")
    if o.output and "decode" not in o.only:
        parser.error("--output draws what the section decode measures")
    if o.output and o.output.suffix not in PICTURES:
        parser.error(f"--output {o.output}: must end with {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    if o.types and len(o.types) > 1 and SUMMARY in o.only:
        parser.error(f"--types {' '.join(o.types)}: the section {SUMMARY} measures one type; --only names others")
    o.types = o.types or ["f16", "q8_0", "q4_0"]
    words = sys.argv[1:] if arguments is None else arguments
    o.command = " ".join(["python integrations/llama.cpp/bench/bench_llama_cpp.py", *words])
    return o


def written(name: str) -> Path:
    """Return the path of a model of random weights, written at its first use."""
    path = MODELS / f"{name}.gguf"
    return path if path.exists() else llama_cpp_models.write(name, MODELS)


def model_of(name: str) -> Path:
    """Return a file; for the name of a shape, a written file of random weights."""
    return written(name) if name in llama_cpp_models.SHAPES else Path(name)


@contextmanager
def recorded(report: Report, o: argparse.Namespace) -> Iterator[None]:
    """Keep what a run has reported in the end; an error of llama.cpp ends the program with its message."""
    try:
        yield
    except LlamaError as error:
        sys.exit(str(error))
    finally:
        if o.json:
            keep(o.json, o.command, [row | {"section": report.section} for row in report.rows])


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    o = options(arguments)
    o.model = o.model or written(DEFAULT_MODEL)
    print(describe_machine())
    print(f"{o.model.name}, {o.threads} threads, load {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    report = Report(o.threads, WANTED) if o.model.stem == DEFAULT_MODEL else Report(o.threads, {}, o.model.stem)
    with recorded(report, o):
        if o.ik:
            compiled(o.ik)  # says at once what is missing
        model = Model(Library(o.library), o.model)
        if o.cpu_time:
            model.library.clock = time.process_time
        for section in o.only:
            SECTIONS[section](report, model, o)
        model.close()
    if o.output:
        import plot_attention

        plot_attention.save(lambda: plot_attention.llama_cpp(report.rows), o.output)
    return report.rows


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a KeyboardInterrupt would be lost where llama.cpp calls the log
    main()
