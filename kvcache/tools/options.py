"""Options and arguments of the command line that several commands have, and how their values are read."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache.arguments import INT64_MAX, MAX_THREADS
from kvcache.errors import ModelFileError
from kvcache.layer import DTYPES, DType, to_dtype
from kvcache.models.reading import expanded
from kvcache.tools import memory_plan, weighing
from kvcache.tools.arguments import parse_size, parse_tokens

LEAST_WEIGHTS = 1 << 17  # bytes; the smallest published models have more
LEAST_MACHINE = 1 << 20  # bytes of a machine's memory, or bytes that it reads in a second
ALL = "all"  # types
MIXED = re.compile(r"(q\d_k)_(?:xs|s|m|l|xl)", re.IGNORECASE)  # names of GGUFs whose tensors differ in type


def tokens_option(text: str, least: int | None = None) -> Any:
    """Make an option that takes a number of tokens, checked here if `least` is given, otherwise where it is used."""

    def parse(value: object) -> int:
        try:
            number = parse_tokens(str(value))
        except ArgumentTypeError as error:
            raise typer.BadParameter(str(error)) from None
        if least is not None and not least <= number <= memory_plan.MOST_TOKENS:
            raise typer.BadParameter(f"{value} is not in the range from {least} to {memory_plan.MOST_TOKENS}")
        return number

    return typer.Option(parser=parse, metavar="N", help=text)


def not_nan(value: float) -> float:
    """Return a number that passed a check of its range, which NaN passes, too."""
    if math.isnan(value):
        raise typer.BadParameter("nan is no number")
    return value


def type_option(text: str) -> Any:
    """Make an option that takes an element type."""

    def parse(name: str) -> DType:
        try:
            return to_dtype(name, "type")
        except ValueError:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(DTYPES)}") from None

    return typer.Option("--dtype", parser=parse, autocompletion=lambda: [*DTYPES], metavar="TYPE", help=text)


def stored(name: str) -> str:
    """Return what a text names: "all", a type, or the types of keys and of values."""
    if name == ALL:
        return name
    try:
        return "/".join(dict.fromkeys(memory_plan.keys_and_values(name)))
    except ValueError:
        types = f"{ALL}, {', '.join(DTYPES)}"
        raise typer.BadParameter(f"{name!r} is none of {types}, nor two for keys/values, as int6/int4") from None


def rate_or_size(text: str, such: str, least: int = LEAST_MACHINE) -> Any:
    """Make an option that takes `least` bytes or more, or bytes per second if `such` an example does."""
    what, unit = ("rate", "/s") if such.endswith("/s") else ("size", "")

    def parse(value: str) -> int:
        try:
            number = parse_size(value.strip().removesuffix(unit))
        except ArgumentTypeError:
            raise typer.BadParameter(f"{value!r} is no {what}, such as {such}") from None
        if not least <= number <= INT64_MAX:
            than = "fewer" if number < least else "more"
            any_one = "any machine's" if least == LEAST_MACHINE or number > least else f"{least:,}"
            raise typer.BadParameter(f"{value!r} is {number:,} bytes{unit}, {than} than {any_one}: give it as {such}")
        return number

    return typer.Option(parser=parse, metavar=what.upper(), help=text)


def weights_of(text: str) -> str | int:
    """Return the type of weights that a text names, or the number of bytes."""
    if text.lower() in weighing.WEIGHT_TYPES:
        return text.lower()
    if mixed := MIXED.fullmatch(text):
        raise typer.BadParameter(f"{text} mixes types: give {mixed[1].lower()}, or the file's size, such as 4.7GB")
    try:
        nbytes = 0 if text.lower() == "none" else parse_size(text)
    except ArgumentTypeError:
        types = ", ".join(weighing.WEIGHT_TYPES)
        raise typer.BadParameter(f"{text!r} is no size, such as 4.7GB or none, and no type: {types}") from None
    if 0 < nbytes < LEAST_WEIGHTS:  # gigabytes or parameters were meant
        raise typer.BadParameter(
            f"{text!r} is {nbytes:,} bytes, fewer than any model's weights: give a size such as 4.7GB, a type, or none"
        )
    if nbytes > INT64_MAX:
        raise typer.BadParameter(f"{text!r} is {nbytes:,} bytes, more than any model's weights: give it as 4.7GB")
    return nbytes


def share_of(text: str) -> float:
    """Return the share that a text names: 25% or 0.25."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no share, such as 25% or 0.25") from None
    if not 0 < share <= 1:
        raise typer.BadParameter(f"{text!r} must be above 0 and at most 1, such as 25% or 0.25")
    return share


def file_of(name: str) -> Path:
    """Return the path that a text names, with ~ expanded."""
    if not name:
        raise typer.BadParameter("'' names no file")
    try:
        return expanded(name)
    except ModelFileError as error:
        raise typer.BadParameter(str(error)) from None


def model_argument(text: str) -> Any:
    """Make the argument that names a model's files."""
    return typer.Argument(parser=file_of, metavar="MODEL", help=text, show_default=False)


def seconds_option(text: str) -> Any:
    """Make an option that takes seconds."""
    return typer.Option(min=0.1, max=86400, callback=not_nan, metavar="S", help=text)


def adapter_of(text: str) -> tuple[str, Path]:
    """Return the name and the folder of an adapter."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise typer.BadParameter(f"{text!r} is no NAME=FOLDER")
    return name, file_of(folder)


Model = Annotated[Path, model_argument("A Hugging Face folder, its config.json, or a GGUF.")]
TYPES = f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
Types = Annotated[
    list[Any],
    typer.Option(
        "--dtype",
        parser=stored,
        autocompletion=lambda: [ALL, *DTYPES],
        metavar="TYPE",
        help=f"Only this type: {TYPES}; two for keys/values, as int6/int4; or {ALL}. May be given several times. By "
        f"default: the model's own, {', '.join(memory_plan.RECOMMENDED)}.",
    ),
]
CONTEXT_OPTION = tokens_option("Tokens of a sequence, such as 8192 or 8k.", 1)
Threads = Annotated[
    int | None, typer.Option(min=1, max=MAX_THREADS, metavar="N", help="Threads; by default as `kvcache info` says.")
]
Select = Annotated[int | None, tokens_option("Tokens read about N rows of a text of 8k tokens or more; such as 2k.")]
Prompts = Annotated[
    Any, typer.Option(parser=str, metavar="WAY", help="int8: multiply the prompt in bytes, faster and less precisely.")
]
Share = Annotated[
    Any, typer.Option(parser=share_of, metavar="SHARE", help="Keep this share of the prompt's rows, such as 25%.")
]
EvictBy = Annotated[
    str | None,
    typer.Option(metavar="POLICY", help="With --keep: future, the default, or kvzip, which reads the prompt twice."),
]
TopP = Annotated[float, typer.Option(metavar="P", help="Draw from the likeliest tokens, of probability P together.")]
Weights = Annotated[
    Any,
    typer.Option(
        parser=weights_of,
        metavar="TYPE|SIZE",
        help="Count weights in a type (q4_k, f16, ...), as a size (4.7GB), or none.",
    ),
]
Cores = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_THREADS, metavar="N", help="With --bandwidth: so many cores, each as fast as one of these here."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", parser=file_of, metavar="FILE", help="Draw it too: a .png, .svg or .pdf file.")
]
