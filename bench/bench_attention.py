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
from attention_speed import decode, peers, prefill, shapes, tiny, types  # noqa: E402
from driver import TYPES  # noqa: E402
from entrants import KINDS, Peers  # noqa: E402
from figures import describe_machine, keep, new_file  # noqa: E402

from kvcache.tools.arguments import parse_tokens  # noqa: E402

CONTEXTS = [1024, 8192, 32_768, 131_072]

SECTIONS: dict[str, Callable[[Report], None]] = {
    "decode": decode,
    "types": types,
    "peers": peers,
    "prefill": prefill,
    "shapes": shapes,
    "batches": batches,
    "tiny": tiny,
    "error": error,
}


def listed(kind: Callable[[str], object], known: Sequence[object] = ()) -> Callable[[str], list]:
    """Return a parser of a comma-separated list, for the type of an option."""

    def parse(text: str) -> list:
        values = [kind(word) for word in text.split(",")]
        for value in values:
            if known and value not in known:
                raise argparse.ArgumentTypeError(f"{value}: not one of {', '.join(map(str, known))}")
        return values

    return parse


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="Lists are separated by commas.")
    parser.add_argument("--only", type=listed(str, list(SECTIONS)), default=list(SECTIONS), metavar="SECTIONS",
                        help=f"of {', '.join(SECTIONS)}")  # fmt: skip
    parser.add_argument("--dtype", type=listed(str, list(TYPES)), metavar="TYPES", help=f"of {', '.join(TYPES)}")
    parser.add_argument("--context", type=listed(parse_tokens), default=CONTEXTS, metavar="TOKENS",
                        help="numbers of tokens, such as 8k,32k")  # fmt: skip
    parser.add_argument("--threads", type=listed(int), default=[1, 2], metavar="NUMBERS")
    parser.add_argument("--prefill", type=listed(parse_tokens), default=[512, 4096], metavar="N,CONTEXT",
                        help="of a prompt")  # fmt: skip
    parser.add_argument(
        "--memory", type=int, default=0, metavar="MIB", help="that layers take turns in; four times the cache"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line, more or less")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="other people's code")
    parser.add_argument("--with", dest="kinds", type=listed(str, list(KINDS)), default=list(KINDS), metavar="PEERS",
                        help=f"of {', '.join(KINDS)}")  # fmt: skip
    parser.add_argument("--json", type=new_file, metavar="FILE", help="keep the run, for bench/write_results.py")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw tokens/s against context, of the section peers")
    o = parser.parse_args(arguments)
    entrants.working_set = o.memory << 20
    o.every_type = o.dtype is not None
    o.dtype = o.dtype or list(TYPES)
    o.command = " ".join(["python bench/bench_attention.py", *(sys.argv[1:] if arguments is None else arguments)])
    if o.plot and "peers" not in o.only:
        parser.error("--plot draws what the section peers measures")
    return o


def main(arguments: Sequence[str] | None = None) -> list[dict[str, object]]:
    o = options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that rows are kept and peers end
    print(describe_machine())
    print(f"load {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    kinds = {key: KINDS[key] for key in o.kinds} if o.peers else {}
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
