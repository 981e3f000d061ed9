"""Compare a step of the C example with the same step through llama2.c's attention over plain f32 arrays.

python bench/bench_c_example.py                # the whole table, in about a minute
python bench/bench_c_example.py --threads 1 --dtype f16 --seconds 10
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
from collections.abc import Sequence

import numpy as np
from compiling import CORE, CORE_FLAGS, HERE, ROOT, Floats, build
from driver import TYPES
from figures import Figures, Line, quiet_quotient, quotients, table

from kvcache.tools.interleave import rounds

MODEL = ROOT / "examples/model"
KVCACHE, PLAIN, DOT = range(3)  # attentions, as c_example.c numbers them
OTHERS = {PLAIN: "llama2.c", DOT: "llama2.c with the example's dot product"}
WANTED = {64: ">= 1", 2000: ">= 3"}  # by context
STEPS = 20  # steps timed in one round


@functools.cache
def library() -> ctypes.CDLL:
    example = [source for source in sorted(ROOT.glob("examples/c/*.c")) if source.stem != "generate"]
    sources = [HERE / "c_example.c", *example, *CORE]
    library = build("c_example", sources, [*CORE_FLAGS, f"-I{ROOT}/examples/c"])
    library.runner_new.restype = ctypes.c_void_p
    library.runner_logits.restype = ctypes.POINTER(ctypes.c_float)
    return library


class Runner:
    """The model, with a kvcache and with plain arrays (c_example.c)."""

    def __init__(self, threads: int, dtype: str) -> None:
        handle = library().runner_new(bytes(MODEL), threads, TYPES[dtype])
        if not handle:
            raise RuntimeError("the model cannot be run")
        self._handle = ctypes.c_void_p(handle)

    def close(self) -> None:
        library().runner_free(self._handle)

    def feed(self, tokens: bytes) -> None:
        """Append tokens to the cache and to the arrays."""
        if library().runner_feed(self._handle, tokens, len(tokens)):
            raise RuntimeError("the tokens cannot be stored")

    def steps(self, whose: int, token: int) -> tuple[float, float]:
        """Append a token and take it back, STEPS times; return median seconds of attention and of the step."""
        seconds = np.empty((2, STEPS))
        attention, whole = (ctypes.c_void_p(array.ctypes.data) for array in seconds)
        if library().runner_steps(self._handle, whose, ctypes.c_ubyte(token), STEPS, attention, whole):
            raise RuntimeError("the step failed")
        return statistics.median(seconds[0]), statistics.median(seconds[1])

    def logits(self, whose: int, token: int) -> Floats:
        self.steps(whose, token)
        return np.ctypeslib.as_array(library().runner_logits(self._handle), (256,)).copy()


def measure(figures: Figures, runner: Runner, token: int, name: str, wanted: str, seconds: float) -> None:
    """Add a line for the speedup over each other attention, with the step's speedup and the distance of logits."""
    steps = [functools.partial(runner.steps, whose, token) for whose in (KVCACHE, *OTHERS)]
    found = np.array(list(rounds(*steps, seconds=seconds, least=15)))  # [rounds, whose, attention or the whole step]
    attention, whole = found[:, KVCACHE].T
    kvcache = f"kvcache {np.median(attention) * 1e6:.0f} of {np.median(whole) * 1e6:.0f} µs"
    for whose, other in OTHERS.items():
        step = found[:, whose, 1]
        median, quiet = statistics.median(quotients(step, whole)), quiet_quotient(step, whole)
        error = np.abs(runner.logits(KVCACHE, token) - runner.logits(whose, token)).max()
        note = f"the whole step {median:.2f}, of the fastest {quiet:.2f}; {kvcache}; logits within {error:.0e}"
        figures.ratio(f"{name}: speedup over {other}", found[:, whose, 0], attention, wanted, note)


def listed(text: str) -> list[str]:
    return text.split(",")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=listed, default=["1", "2"], metavar="NUMBERS")
    parser.add_argument("--dtype", type=listed, default=["f32", "f16"], metavar="TYPES", help=f"of {', '.join(TYPES)}")
    parser.add_argument("--seconds", type=float, default=5, help="for each length, type and number of threads")
    options = parser.parse_args(arguments)
    text = (MODEL / "eval.txt").read_bytes()
    lines: list[Line] = []
    for threads in options.threads:
        for dtype in options.dtype:
            runner, fed = Runner(int(threads), dtype), 0
            for context, wanted in WANTED.items():
                runner.feed(text[fed:context])
                fed = context
                name = f"{context:,} tokens, {dtype}, {threads} thread{'s' * (threads != '1')}"
                measure(Figures(lines), runner, text[context], name, wanted, options.seconds)
            runner.close()
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
