"""Run a command, print tables, and show a bar on stderr.

Terminal or not, stdout gets the same text, except for bold headings.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

from kvcache.columns import NO_LIMIT, WIDTH, Table, columns, print_error, whole, wrap
from kvcache.errors import KVCacheError, sentence


def run(command: Callable[[], int | None]) -> NoReturn:
    """Run a command and exit with its status: 1 where nobody reads on, 2 after a mistake, 130 after an interrupt.

    A warning that Python's filters make an error is a mistake.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed before the start, as by >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr, for a file's name on an ASCII terminal
    try:
        with _warnings_as_sentences():
            status = command()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except KeyboardInterrupt:
        status = 130
    except (KVCacheError, OSError, ImportError, ValueError, MemoryError, UserWarning) as error:
        print_error(f"kvcache: {sentence(error)}")
        status = 2
    sys.exit(status)


@contextmanager
def _warnings_as_sentences() -> Iterator[None]:
    """Print each `UserWarning` as errors are printed, and once; others are for developers, and keep Python's form."""
    show = warnings.showwarning
    printed = set[str]()

    def print_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if not issubclass(category, UserWarning):
            show(message, category, filename, lineno, file, line)
        elif str(message) not in printed:  # several lines of code may say the same
            printed.add(str(message))
            print_error(f"kvcache: warning: {message}")

    warnings.showwarning = print_warning
    try:
        yield
    finally:
        warnings.showwarning = show


def print_paragraph(text: str) -> None:
    """Print a sentence, in several lines where it is long; those after the first are indented."""
    print(wrap(text, columns(WIDTH), rest="  "))


def print_list(items: Iterable[str]) -> None:
    """Print short items side by side, indented, in as many lines as they take."""
    print(wrap("  ".join(map(whole, items)), columns(WIDTH), "    ", "    "))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, without rich's tables: importing them takes longer than making a plan."""
    cells = list(zip(headings, *rows, strict=True))
    to_right = [all(cell[:1].isdigit() or cell in ("-", "any") for cell in column[1:]) for column in cells]
    table = Table([max(map(len, column)) for column in cells], to_right, columns(NO_LIMIT))
    is_bold = _takes_control_sequences(sys.stdout) and not os.environ.get("NO_COLOR")
    bold, plain = ("\x1b[1m", "\x1b[0m") if is_bold else ("", "")
    for row in (headings, *rows):
        lines = table.row(row)
        print(f"{bold}{lines}{plain}" if row is headings else lines)


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows what is being done, and the fraction done, as a bar.

    The bar is on stderr, if that is a terminal. It appears with the first call, and is erased once the fraction is 1 or
    the context ends. It leaves stdout alone. Text printed while it is shown may be erased with it.
    """
    bar: Any = None

    def show(doing: str, fraction: float) -> None:
        nonlocal bar
        if bar is None and fraction < 1 and _takes_control_sequences(sys.stderr):
            bar = _bar()
        if bar is not None:
            bar.update(0, description=doing, completed=fraction)
            if fraction >= 1:
                bar.stop()  # which erases it for good

    try:
        yield show
    finally:
        if bar is not None:
            bar.stop()


def _bar() -> Any:
    """Return a bar of the package rich, which is shown."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:24}"), BarColumn(), TimeElapsedColumn()
    bar = Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False
    )  # fmt: skip
    bar.add_task("", total=1.0)
    bar.start()
    return bar


def _takes_control_sequences(stream: TextIO | Any) -> bool:
    """Return whether a stream goes to a terminal that takes control sequences."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
