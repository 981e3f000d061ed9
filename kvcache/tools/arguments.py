"""Read numbers and prompts as people type them: 8k tokens, 4.7GB, ``-`` for standard input.

The parsers raise `argparse.ArgumentTypeError`, whose message `argparse` and the command line show as it is.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcache.errors import ModelFileError
from kvcache.models.reading import read_prompt, read_stdin
from kvcache.system import BINARY, parse_bytes

TOKENS = re.compile(r"([+-]?)(\d{1,3}(?:[_,]\d{3})+|\d{1,40})([km]?)", re.ASCII | re.IGNORECASE)


def parse_tokens(text: str) -> int:
    """Read a number of tokens.

    >>> parse_tokens("8192"), parse_tokens("8k"), parse_tokens("8_192"), parse_tokens("8,192"), parse_tokens("1M")
    (8192, 8192, 8192, 8192, 1048576)
    """
    found = TOKENS.fullmatch(text.strip())
    if found is None:
        raise ArgumentTypeError(f"{text!r} is no whole number, such as 8192, 8k or 1M")
    sign, digits, unit = found.groups()
    return int(sign + re.sub("[_,]", "", digits)) * BINARY[unit.lower()]


def parse_size(text: str) -> int:
    """Read a number of bytes: GiB and G are 2^30 of them, GB is 10^9.

    >>> parse_size("4.7GB"), parse_size("4.5GiB"), parse_size("800M"), parse_size("0")
    (4700000000, 4831838208, 838860800, 0)
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def prompt_bytes(prompt: str | None, file: Path | None, default: str) -> bytes:
    """Return a prompt: the argument, a file's content, standard input, or the default.

    ``-`` stands for standard input, as argument and as file; without either, what is piped into it counts before the
    default. Raise `ModelFileError` if something cannot be read, or holds too much.
    """
    if file is not None and str(file) != "-":
        return read_prompt(file)
    if file is not None or prompt == "-":
        return read_stdin()
    if prompt is not None:
        return os.fsencode(prompt)
    piped = b"" if sys.stdin is None or sys.stdin.isatty() else read_stdin()
    return piped or os.fsencode(default)


@contextmanager
def advise_order(model: Path, prompt: object) -> Iterator[None]:
    """Say in which order arguments come if there is no such model, and it may be the prompt that stands alone."""
    try:
        yield
    except ModelFileError as error:
        if prompt is not None or os.path.lexists(model):
            raise
        raise ModelFileError(f"{error}. MODEL comes first, such as examples/model, then PROMPT") from None
