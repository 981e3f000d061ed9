"""Lay out text in the columns of a terminal: words, numbers, paths and cells of tables stay whole at any width."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

WIDTH = 80  # of paragraphs that go to no terminal
NO_LIMIT = sys.maxsize  # of tables that go to no terminal: programs read their rows
LEAST = 20  # width of the second of two columns of words
SPACE = "\0"  # where no line ends; nothing that is printed has it


def columns(otherwise: int, stream: TextIO | None = None) -> int:
    """Return how many columns the variable ``COLUMNS`` says, or a stream's terminal has; by default that is stdout.

    Return `otherwise` if the variable is not set and the stream is no terminal.
    """
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size((stream or sys.stdout).fileno()).columns or otherwise
    except (AttributeError, OSError, ValueError):  # a file, a pipe, or an object that is neither
        return otherwise


def whole(text: str) -> str:
    """Return a text for `wrap` that stays in one line in spite of its spaces."""
    return text.replace(" ", SPACE)


def wrap(text: str, width: int, indent: str = "", rest: str = "") -> str:
    """Return a text in lines of at most `width` columns; only a longer word exceeds them.

    The first line begins with `indent`, the others with as much of `rest` as leaves room for the longest word. A size
    stays beside its unit.
    """
    text = re.sub(r"(?<=\d) (?=[KMGT]i?B)", SPACE, text)
    room = width - max(map(len, text.split()), default=0)
    lines = textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=rest[: max(room, 0)],
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace(SPACE, " ")


def print_error(text: str) -> None:
    """Print a sentence on stderr, in one line unless that is a terminal.

    If stderr is full, or nobody reads it, redirect it to nowhere, because Python flushes it again at exit.
    """
    try:
        print(wrap(text, columns(NO_LIMIT, sys.stderr)), file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def definitions(pairs: Iterable[tuple[str, str]], width: int, indent: str = "") -> str:
    """Return names with what is said of them beside them, or below them where there is no room for two columns."""
    pairs = list(pairs)
    beside = f"{indent}{'':{max(len(name) for name, _ in pairs) + 2}}"
    longest = max(len(word) for _, said in pairs for word in ["", *said.split()])
    if width - len(beside) >= max(LEAST, longest):
        return "\n".join(wrap(said, width, f"{indent + name:{len(beside)}}", beside) for name, said in pairs)
    below = f"{indent}    "
    return "\n".join(f"{indent}{name}\n{wrap(said, width, below, below)}".rstrip() for name, said in pairs)


class Table:
    """Aligned columns of given widths, whose rows may come one by one.

    A row that is wider than `limit` goes on in indented lines, which begin with a cell.
    """

    def __init__(self, widths: Sequence[int], to_right: Sequence[bool], limit: int) -> None:
        self._cells = [f"{'>' if right else '<'}{width}" for width, right in zip(widths, to_right, strict=True)]
        # One space between columns, if rows fit only so:
        self._gap = " " if sum(widths) + 2 * (len(widths) - 1) > limit >= sum(widths) + len(widths) - 1 else "  "
        self._lines: list[list[int]] = [[]]  # the columns of each line
        used = 0
        for column, width in enumerate(widths):
            if self._lines[-1] and used + width > limit:
                self._lines.append([])
                used = 4
            self._lines[-1].append(column)
            used += width + len(self._gap)

    def row(self, cells: Sequence[str]) -> str:
        """Return a row's lines."""
        texts = [f"{cell:{form}}" for cell, form in zip(cells, self._cells, strict=True)]
        lines = [self._gap.join(texts[column] for column in line).rstrip() for line in self._lines]
        return "\n".join([lines[0], *(f"    {line}" for line in lines[1:] if line)])
