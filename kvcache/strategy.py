"""Which sequences are stored at all."""

from __future__ import annotations

import importlib
import os
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
    """Store a sequence while there is memory enough for all that it may come to, as each of its batches decides anew.

    Free memory is what psutil says is available, or less where a cgroup of the process, of version 1 or 2, has less
    left, and what the cache keeps for reuse. A sequence may come to `max_seq_len` rows in each layer, as far as its
    policy keeps them; where there is no `max_seq_len`, to the tokens it has and those of the batch.

    A sequence that is stored is dropped where it may come to more than ``(1 + fraction) / 2`` of what would be free
    without it, so that one does not come and go as memory does. The batch that decides so still sees all of it; once it
    is committed the sequence holds nothing, its `KVCache.next_position` is 0, and its memory goes back to the system.
    To go on from another position is a `RowsGoneError`.

    Parameters
    ----------
    fraction : float, default 0.5
        How much of the memory that is free a sequence may take that is to be stored, above 0 and at most 1.

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


Outcome: TypeAlias = Literal["stored", "not stored", "dropped"]


class Decision(NamedTuple):
    """What becomes of a sequence when the batch is committed, and why."""

    outcome: Outcome
    why: Callable[[], str]  # who asks is told; putting it into words takes longer than deciding


def decide_never() -> Decision:
    """Decide as "disabled" does."""
    return Decision("not stored", lambda: "the strategy is 'disabled'")


def decide_by_length(strategy: LongSequencesOnly, num_tokens: int) -> Decision:
    """Decide on a sequence that holds nothing, and has so many tokens."""
    stored = num_tokens > strategy.threshold

    def why() -> str:
        words = "is" if stored else "is not"
        return f"its length, {num_tokens} tokens, {words} above the threshold of {strategy.threshold}"

    return Decision("stored" if stored else "not stored", why)


def decide_by_memory(strategy: Adaptive, needed: int, held: int, free: int, source: str) -> Decision:
    """Decide on a sequence that may come to so many bytes and holds some of them, where so many others are free."""
    fraction = (1 + strategy.fraction) / 2 if held else strategy.fraction
    most = int((free + held) * fraction)

    def why() -> str:
        words = "which is at most" if needed <= most else "which is more than"
        where = "would be free without it" if held else "are free"
        return (
            f"it may come to {readable(needed)}, {words} {readable(most)}, the fraction {fraction:g} of the "
            f"{readable(free + held)} that {where} ({source})"
        )

    return Decision("stored" if needed <= most else "dropped" if held else "not stored", why)


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
    for directory, limit, usage, inactive in _memory_cgroups(os.fspath(cgroups_of), os.fspath(root)):
        most = _number(f"{directory}/{limit}")
        used = None if most is None else _number(f"{directory}/{usage}")
        if most is None or used is None:  # no such level, or one without a limit: "max"
            continue
        left = max(0, most - used + (_number(f"{directory}/memory.stat", inactive) or 0))
        if left < free[0]:
            free = left, f"by {directory}/{limit}"
    return free


def _memory_cgroups(cgroups_of: str, root: str) -> Iterator[tuple[str, str, str, str]]:
    """Every directory that may limit the process, with the names of its limit, its usage and what can be dropped."""
    for line in _read(cgroups_of).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:  # version 2
            names = "memory.max", "memory.current", "inactive_file"
            mounts = [root, f"{root}/unified"]
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            mounts = [f"{root}/memory"]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                yield "/".join([mount, *parts[:depth]]), *names


def _number(file: str, name: str | None = None) -> int | None:
    """The number in a file, or in the line of it that begins with a name."""
    words = _read(file).split()
    try:
        return int(words[0 if name is None else words.index(name) + 1])
    except (ValueError, IndexError):
        return None


def _read(file: str) -> str:
    """A file of the kernel's, which is read in one piece; "" where there is none."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 1 << 16).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


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
