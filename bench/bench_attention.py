"""Measure the speed of attention, as one table: python bench/bench_attention.py --help.

All measurements of a line are interleaved in rounds: kvcache, the yardsticks, the peers, and again from the start. A
quotient is the median of the rounds' quotients.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # keeps NumPy's threads from competing with the measured code

# The imports stand below (E402), because NumPy reads these variables when it is imported.

import entrants  # noqa: E402
from attention_batches import batches  # noqa: E402
from attention_error import error  # noqa: E402
from attention_report import Report  # noqa: E402
from attention_speed import decode, peers, prefill, shapes, types  # noqa: E402
from driver import TYPES  # noqa: E402
from entrants import KINDS, Peers  # noqa: E402
from figures import describe_machine, keep  # noqa: E402
from program import Arguments  # noqa: E402

from kvcache.tools.arguments import parse_tokens  # noqa: E402

CONTEXTS = [1024, 8192, 32_768, 131_072]

SECTIONS: dict[str, Callable[[Report], None]] = {
    "decode": decode,
    "types": types,
    "peers": peers,
    "prefill": prefill,
    "shapes": shapes,
    "batches": batches,
    "error": error,
}


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.list("--only", SECTIONS, known=SECTIONS)
    parser.list("--dtype", [], known=TYPES)
    parser.list("--context", CONTEXTS, parse_tokens, help="numbers of tokens, such as 8k,32k")
    parser.list("--threads", [1, 2], int)
    parser.list("--prefill", [512, 4096], parse_tokens, help="tokens of a prompt, and its context")
    parser.number("--memory", 0, "MiB that layers take turns in; 0: four times the cache")
    parser.number("--seconds", 1.0, "for each line, more or less")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="other people's code")
    parser.list("--with", KINDS, known=KINDS)
    parser.kept()
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw tokens/s against context, of the section peers")
    o = parser.parse_args(arguments)
    entrants.working_set = o.memory << 20
    o.every_type = bool(o.dtype)
    o.dtype = o.dtype or list(TYPES)
    if o.plot and "peers" not in o.only:
        parser.error("--plot draws what the section peers measures")
    return o


def main(arguments: Sequence[str] | None = None) -> list[dict[str, object]]:
    o = options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that rows are kept and peers end
    print(describe_machine())
    print(f"load {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    kinds = {key: KINDS[key] for key in getattr(o, "with")} if o.peers else {}
    with Peers(kinds, lambda text: print(f"    {text}")) as installed:
        report = Report(o, installed)
        try:
            for section in o.only:
                SECTIONS[section](report)
        finally:
            if o.json:
                keep(o.json, o.command, report.rows)
    if o.plot:
        import plot_attention

        plot_attention.save(lambda: plot_attention.figure(report.rows), o.plot)
    return report.rows


if __name__ == "__main__":
    main()
