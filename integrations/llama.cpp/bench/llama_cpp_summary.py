"""Say in one sentence how much faster a model decodes and reads prompts on this cache, within three minutes.

Contexts become longer as far as time, memory and the model's trained context allow. The time of the shorter ones
predicts the time of the next one.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from llama_cpp_contexts import BLOCKED, Context, LlamaError, Model

from kvcache.system import available_memory, readable
from kvcache.tools.interleave import rounds

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))  # of the core
from figures import quartiles

SECONDS = 135.0  # that a run plans with, to end within three minutes also on a machine that becomes slower
DEPTHS = (512, 2048, 8192, 32768)
SHORTEST = 64  # tokens of a context
PROMPT = 512  # tokens, or a sixteenth of the model's trained context if that is less
LEAST = 3  # steps of each cache
MARGIN = 8  # tokens of a context beyond those that are measured
BUSY = 0.5  # of the load average before the run, for each thread
COPIES = 5  # of a context's rows: one in each cache, and two where a state is made of random rows

OURS, OWN, PLAIN = "kvcache", "flash", "plain"

Samples = dict[str, list[float]]


class Costs:
    """Keeps the seconds of fills and steps at some depths, and predicts the seconds at another depth."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[int, float]]] = {}

    def add(self, what: str, depth: int, seconds: float) -> None:
        self._found.setdefault(what, []).append((depth, seconds))

    def predict(self, depth: int, calls: int) -> float:
        """Return the seconds of filling contexts to a depth and of calls of each cache there."""
        return sum(extrapolate(found, depth) * (1 if what == "fill" else calls) for what, found in self._found.items())


def extrapolate(found: list[tuple[int, float]], depth: int) -> float:
    """Return the seconds at a depth, on a line through the last two; from a single one, in proportion to the tokens."""
    last, seconds = found[-1]
    if len(found) == 1:
        return seconds * max(1.0, depth / last)
    before, fewer = found[-2]
    return seconds + max(0.0, seconds - fewer) / (last - before) * (depth - last)


def depths_within(wanted: Iterable[int], most: int) -> list[int]:
    """Return the depths of at most so many tokens; and `most` itself, if one was left out that is much longer."""
    depths = sorted(wanted)
    kept = [depth for depth in depths if depth <= most]
    if kept != depths and most >= 1.25 * max(kept, default=0) and most > 0:
        kept.append(most)
    return kept


class Run:
    """Contexts with each cache, which are measured deeper and deeper."""

    def __init__(self, report: Any, model: Model, o: argparse.Namespace) -> None:
        self.report, self.model, self.o, self.dtype = report, model, o, o.types[0]
        self.prompt_size = min(PROMPT, model.max_seq_len // 16)
        self.room = o.steps + MARGIN + self.prompt_size // 8 + o.prompts * self.prompt_size
        self.free = available_memory()[0] - model.path.stat().st_size  # whose pages are in memory, or will be
        self.row_bytes = self._served()
        self.costs, self.contexts = Costs(), dict[str, Context]()
        most = (model.max_seq_len - self.room) // 64 * 64
        self.wanted = depths_within(o.depths, most)
        self.why = ""  # longer contexts are left out

    def _served(self) -> float:
        """Return the bytes of a token's rows; fail if this cache does not serve the model."""
        with closing(Context(self.model, OURS, self.dtype, 256, self.o.threads)) as context:
            if context.own:
                raise LlamaError(f"This cache does not serve {self.model.path.name}: {context.own}")
            return context.nbytes / 256

    def remaining(self) -> float:
        return self.o.begun + SECONDS - time.monotonic()

    def next(self, last: int) -> int:
        """Return the next depth to measure, which is halved until it fits; or 0, if none fits: `why` has the reason."""
        trained = f"the model was trained for {self.model.max_seq_len:,} tokens"
        self.why = "" if self.wanted == sorted(self.o.depths) else trained
        for depth in (each for each in self.wanted if each > last):
            while depth >= max(SHORTEST, 1.5 * last):
                why = self._refusal(depth)
                if not why:
                    return depth
                self.why = why
                depth //= 2
        return 0

    def _refusal(self, depth: int) -> str:
        """Return what is missing for a depth; half of the time is for prompts."""
        needed = COPIES * self.row_bytes * (depth + self.room)
        if needed > self.free:
            free = readable(max(0, self.free))
            return f"{depth:,} tokens take {readable(needed)} here, and {free} are free beside the model"
        seconds = self.costs.predict(depth, 1 + LEAST)
        if seconds and 2 * seconds > self.remaining():
            return f"three minutes are too short for {depth:,} tokens"
        return ""

    def open(self, depth: int, stack: ExitStack) -> int:
        """Make contexts of a depth, and fill them; return the depth that they have."""
        begun = time.monotonic()
        self.contexts = {}
        for cache in (OURS, OWN, *((PLAIN,) if self.dtype not in BLOCKED else ())):
            made = Context(self.model, cache, self.dtype, depth + self.room, self.o.threads)
            self.contexts[cache] = stack.enter_context(closing(made))
        depth = self._fill(depth)
        self.costs.add("fill", depth, time.monotonic() - begun)
        return depth

    def _fill(self, depth: int) -> int:
        """Fill contexts with random rows; if the state's form is unknown, read prompts for a quarter of the time."""
        if all(context.load_random(depth) for context in self.contexts.values()):
            return depth
        self.report.say("no state of random rows can be made of this model's: prompts are read in their place")
        ours = self.contexts[OURS]
        ours.rewind(0)
        end = time.monotonic() + self.remaining() / 4
        while ours.tokens < depth and (time.monotonic() < end or not ours.tokens):
            ours.decode(min(PROMPT, depth - ours.tokens))
        self.contexts.pop(PLAIN, None)  # whose states have another form
        if not self.contexts[OWN].load(ours.save(), ours.tokens):
            raise LlamaError(f"llama.cpp's own cache loads no state of {self.model.path.name}")
        return ours.tokens

    def decode(self, depth: int) -> Samples:
        """Measure steps: as many as a tenth of the time allows."""
        first = {cache: context.decode() for cache, context in self.contexts.items()}
        for context in self.contexts.values():
            context.check()
        most = int(SECONDS / 10 / sum(first.values()))
        samples = interleave(self.contexts, 1, max(LEAST, min(self.o.steps, most)))
        for cache, seconds in samples.items():
            self.costs.add(cache, depth, sum(seconds) / len(seconds))
        self.report.speeds("decode", "decoding", depth, self.dtype, 1, samples)
        return samples

    def prompt(self, depth: int) -> tuple[int, Samples]:
        """Measure prompts behind a depth; return their tokens, and seconds.

        They are as long as half of the time allows, and as many as the rest does.
        """
        contexts = {cache: self.contexts[cache] for cache in (OURS, OWN)}
        size = max(1, self.prompt_size // 8)
        samples = interleave(contexts, size, 1)
        token = sum(seconds for (seconds,) in samples.values()) / size
        longer = min(self.prompt_size, int(self.remaining() / 2 / token) // 32 * 32)
        if longer > size:
            size, samples = longer, interleave(contexts, longer, self.o.prompts, self.o.begun + SECONDS)
        self.report.open(f"a prompt's {size} tokens, tokens/s", "over default", "quartiles")
        self.report.speeds("prompt", f"prompts of {size}", depth, self.dtype, size, samples)
        return size, samples


def interleave(contexts: dict[str, Context], count: int, times: int, end: float = math.inf) -> Samples:
    """Append so many tokens to each context in turn, fewer times if another round could last beyond the end."""
    calls = [lambda context=context: context.decode(count) for context in contexts.values()]
    found = {cache: list[float]() for cache in contexts}
    for seconds in rounds(*calls, seconds=0, least=times):
        for samples, each in zip(found.values(), seconds, strict=True):
            samples.append(each)
        if time.monotonic() + 2 * sum(seconds) > end:
            break
    return found


def summary(report: Any, model: Model, o: argparse.Namespace) -> None:
    run = Run(report, model, o)
    columns = ("over default", "quartiles", "", "over better", "quartiles")
    report.open("decoding, tokens/s", *columns)
    depth, steps = 0, Samples()
    with ExitStack() as stack:
        while wanted := run.next(depth):
            stack.close()
            depth = run.open(wanted, stack)
            steps = run.decode(depth)
        if not steps:
            raise LlamaError(f"{model.path.name} cannot be measured: {run.why}")
        if run.why:
            report.say(f"longer contexts are left out: {run.why}")
        size, prompts = run.prompt(depth)
    if o.load > BUSY * o.threads:
        spinning = o.threads > 1 and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive"
        passive = ", or with OMP_WAIT_POLICY=passive, so that threads do not spin" if spinning else ""
        advice = f"measure again without them{passive}"
        print(f"\nOther programs used the processors (load {o.load:.1f}): {advice}.")
    print(f"\n{sentence(model.path.name, depth, steps, size, prompts)}")


# ---- words


def sentence(name: str, depth: int, steps: Samples, size: int, prompts: Samples) -> str:
    middle = {cache: quartiles(seconds)[1] for cache, seconds in steps.items()}
    rates = {cache: rate(1 / seconds) for cache, seconds in middle.items()}
    without = f" ({rates[PLAIN]} without flash attention)" if PLAIN in rates else ""
    ours, own = (quartiles(prompts[cache])[1] for cache in (OURS, OWN))
    return (
        f"After {depth:,} tokens, {name} decodes {rates[OURS]} tokens/s on this cache and {rates[OWN]} on llama.cpp's "
        f"own{without}: {times(middle[OWN] / middle[OURS])} as fast; a prompt of {size} more tokens takes "
        f"{rate(ours)} s and {rate(own)} s: {times(own / ours)} as fast."
    )


def rate(number: float) -> str:
    """Write three digits of a number."""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"


def times(speedup: float) -> str:
    return f"{speedup:.1f} times" if speedup >= 2 else f"{speedup:.2f} times"
