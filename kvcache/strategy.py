"""Which sequences are stored at all."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple, SupportsFloat, TypeAlias

from kvcache._core import INT32_MAX, integer

__all__ = ["Adaptive", "LongSequencesOnly", "Strategy"]


@dataclass(frozen=True)
class LongSequencesOnly:
    """Store a sequence once it is longer than so many tokens: short ones are cheaper to compute again.

    Parameters
    ----------
    threshold : int
        The most tokens that a sequence may have and still not be stored. At least 0.

    Raises
    ------
    ValueError
        If the number is too small or too large.
    TypeError
        If it is no integer.

    Examples
    --------
    Until then `KVCache.next_position` is 0, and the runner feeds the whole sequence:

    >>> import numpy as np
    >>> import kvcache
    >>> cache = kvcache.KVCache(1, 1, 8, 64, strategy=kvcache.LongSequencesOnly(2))
    >>> for length in (1, 2, 3, 4):
    ...     first = cache.next_position()
    ...     x = np.ones((length - first, 1, 8), np.float32)
    ...     with cache.batch(length - first) as batch:
    ...         out = batch.attend(0, x, x, x)
    ...     print(first, cache.seq_len())
    0 0
    0 0
    0 3
    3 4
    """

    threshold: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", integer(self.threshold, "threshold", 0, INT32_MAX))


@dataclass(frozen=True)
class Adaptive:
    """Store a sequence if there is memory enough when it begins for all that it may come to.

    That is what psutil says is available, or less where a cgroup of the process, of version 1 or 2, has less left. A
    sequence may come to `max_seq_len` rows in each layer, as far as its policy keeps them; where there is no
    `max_seq_len`, it is the tokens of the batch that count.

    Parameters
    ----------
    fraction : float, default 0.5
        How much of the memory that is free one sequence may take, above 0 and at most 1.

    Raises
    ------
    ValueError
        If it is out of range.
    TypeError
        If it is no number.
    ImportError
        If psutil is not installed.

    Examples
    --------
    >>> import kvcache
    >>> cache = kvcache.KVCache(32, 8, 128, 8192, strategy=kvcache.Adaptive(0.25))
    >>> print(cache.explain())
    strategy: Adaptive(fraction=0.25)
    a sequence of 8192 tokens takes 1.0 GiB
    """

    fraction: float = 0.5

    def __post_init__(self) -> None:
        fraction: SupportsFloat = self.fraction
        try:
            if isinstance(fraction, bool | str):
                raise TypeError
            number = float(fraction)
        except (TypeError, ValueError):
            raise TypeError(f"fraction={fraction!r}: a number is needed, not {type(fraction).__name__}") from None
        if not isfinite(number) or not 0 < number <= 1:
            raise ValueError(f"fraction={fraction!r}: must be above 0 and at most 1")
        object.__setattr__(self, "fraction", number)
        _psutil()


Strategy: TypeAlias = Literal["always", "disabled"] | LongSequencesOnly | Adaptive


class Decision(NamedTuple):
    """Whether a sequence is stored, and why."""

    stored: bool
    why: str


def decide(strategy: Strategy, num_tokens: int, nbytes: Callable[[], int]) -> Decision:
    """Decide on a sequence that begins with so many tokens, and may come to so many bytes."""
    if strategy == "always" or strategy == "disabled":
        return Decision(strategy == "always", f"the strategy is {strategy!r}")
    if isinstance(strategy, LongSequencesOnly):
        stored = num_tokens > strategy.threshold
        words = "is" if stored else "is not"
        return Decision(stored, f"its length, {num_tokens} tokens, {words} above the threshold of {strategy.threshold}")
    needed = nbytes()
    free, source = available_memory()
    most = int(free * strategy.fraction)
    words = "which is at most" if needed <= most else "which is more than"
    return Decision(
        needed <= most,
        f"it may come to {readable(needed)}, {words} {readable(most)}, the fraction {strategy.fraction:g} of the "
        f"{readable(free)} that are free ({source})",
    )


def available_memory() -> tuple[int, str]:
    """Return how many bytes are free, and who says so.

    Raises
    ------
    ImportError
        If psutil is not installed.
    """
    return free_memory(_psutil().virtual_memory().available)


def free_memory(
    available: int, cgroups_of: str | Path = "/proc/self/cgroup", root: str | Path = "/sys/fs/cgroup"
) -> tuple[int, str]:
    """Return how many bytes are free, and who says so: the machine, or a cgroup of the process that has less left.

    Parameters
    ----------
    available : int
        What the machine has.
    cgroups_of : path
        The file that lists the cgroups of the process.
    root : path
        Where cgroups are mounted.
    """
    free = available, "of this machine"
    for directory, limit, usage, inactive in _memory_cgroups(Path(cgroups_of), Path(root)):
        most, used = _number(directory / limit), _number(directory / usage)
        if most is None or used is None:  # no such level, or one without a limit: "max"
            continue
        left = max(0, most - used + (_number(directory / "memory.stat", inactive) or 0))
        if left < free[0]:
            free = left, f"by {directory / limit}"
    return free


def _memory_cgroups(cgroups_of: Path, root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Every directory that may limit the process, with the names of its limit, its usage and what can be dropped."""
    try:
        lines = cgroups_of.read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:  # version 2
            names = "memory.max", "memory.current", "inactive_file"
            mounts = [root, root / "unified"]
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            mounts = [root / "memory"]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                yield mount.joinpath(*parts[:depth]), *names


def _number(file: Path, name: str | None = None) -> int | None:
    """The number in a file, or in the line of it that begins with a name."""
    try:
        words = file.read_text().split()
        return int(words[0 if name is None else words.index(name) + 1])
    except (OSError, ValueError, IndexError):
        return None


def readable(nbytes: float) -> str:
    """Bytes for people: 1536 is 1.5 KiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    return f"{nbytes:.{0 if units[0] == 'B' else 1}f} {units[0]}"


def _psutil() -> Any:
    try:
        return importlib.import_module("psutil")
    except ImportError as error:
        raise ImportError("psutil is needed to see what memory is free: pip install 'kvcache[adaptive]'") from error
