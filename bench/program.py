"""What the programs of this folder share: their arguments, caches of random rows, and the fastest of calls in turn."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from compiling import Floats
from figures import new_file

import kvcache
from kvcache.tools.interleave import rounds, timed

PIECE = 4096  # tokens of a batch that fills a cache
RNG = np.random.default_rng(0)


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


class _Flat(argparse.Action):
    """Keeps one list of lists."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, [each for some in values for each in some])


class Arguments(argparse.ArgumentParser):
    """The arguments of a program, which its docstring describes; `command` of the result has its words."""

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description, formatter_class=_Help, epilog="Lists are separated by spaces or commas."
        )

    def list(
        self, name: str, default: Sequence[Any], kind: Callable[[str], Any] = str, known: Iterable[Any] = (),
        help: str = " ",
    ) -> None:  # fmt: skip
        """Add an option that takes a list, of known words if there are any."""

        def parse(text: str) -> list[Any]:
            found = [kind(word) for word in text.split(",")]
            for word in found:
                if known and word not in known:
                    raise argparse.ArgumentTypeError(f"{word}: not one of {', '.join(map(str, known))}")
            return found

        if known and help == " ":
            help = f"of {', '.join(map(str, known))}"
        metavar = name.removeprefix("--").upper()
        self.add_argument(name, nargs="+", action=_Flat, type=parse, default=[*default], metavar=metavar, help=help)

    def number(self, name: str, default: float, help: str = " ") -> None:
        """Add an option that takes a number, whole if its default is."""
        self.add_argument(name, type=type(default), default=default, metavar="N", help=help)

    def kept(self) -> None:
        self.add_argument("--json", type=new_file, metavar="FILE", help="keep the run, for bench/write_results.py")

    def parse_args(self, arguments: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        found = super().parse_args(arguments, namespace)
        words = sys.argv[1:] if arguments is None else arguments
        found.command = " ".join([f"python bench/{Path(sys.argv[0]).name}", *words])
        return found


def random(*shape: int) -> Floats:
    return RNG.standard_normal(shape, np.float32)


def put(batch: kvcache.Batch, made: kvcache.KVCache) -> None:
    """Put random rows for all tokens of a batch; layers of one shape get the same."""

    @cache
    def rows(num_heads: int, dim: int) -> Floats:
        return random(len(batch.positions), num_heads, dim)

    for i, layer in enumerate(made.layers):
        k, has_values = rows(layer.num_kv_heads, layer.head_dim), layer.v_head_dim and not layer.value_in_key
        batch.put(i, k, rows(layer.num_kv_heads, layer.v_head_dim) if has_values else None)


def fill(made: kvcache.KVCache, num_tokens: int, piece: int = PIECE) -> kvcache.KVCache:
    """Store random rows of sequence 0 until it has so many tokens, a piece at a time."""
    while (left := num_tokens - made.next_position()) > 0:
        with made.batch(min(left, piece)) as batch:
            put(batch, made)
    return made


def fastest(least: int, **calls: Callable[[], object]) -> dict[str, float]:
    """Make calls in turn, so often; return the fewest milliseconds of each."""
    found = rounds(*(partial(timed, call) for call in calls.values()), seconds=0, least=least)
    return {name: 1e3 * min(s for s, _ in each) for name, each in zip(calls, zip(*found, strict=True), strict=True)}
