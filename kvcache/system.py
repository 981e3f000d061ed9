"""Find what this process may use: the free memory, by the machine and by its cgroups, and the processors."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvcache import _core

SIZE = re.compile(r"(\d{1,40}(?:\.\d{1,40})?) ?(?:([kmgt])(i?b)?|b)?", re.ASCII | re.IGNORECASE)
BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def available_memory() -> tuple[int, str]:
    """Return the number of free bytes, and the source of the limit: the machine, or a cgroup.

    Raises
    ------
    ImportError
        If the system has no /proc/meminfo, and psutil is not installed.
    """
    return free_memory(machine_memory())


def machine_memory(meminfo: str | Path = "/proc/meminfo") -> int:
    """Return the number of bytes that the machine has available: free ones, and caches that the kernel can drop.

    `meminfo` is the file in which Linux says so; elsewhere psutil does, and ``ImportError`` is raised if it is missing.
    """
    kib = _number(os.fspath(meminfo), "MemAvailable:")
    if kib is not None:
        return kib << 10
    try:
        return int(importlib.import_module("psutil").virtual_memory().available)
    except ImportError as error:
        raise ImportError("psutil is needed to see what memory is free on this system: pip install psutil") from error


def free_memory(
    available: int, cgroups_of: str | Path = "/proc/self/cgroup", root: str | Path = "/sys/fs/cgroup"
) -> tuple[int, str]:
    """Return the number of free bytes, and the source of the limit: the machine, or a cgroup with less left.

    `available` are the machine's bytes; `cgroups_of` lists the cgroups of the process, `root` is where they are
    mounted.
    """
    free = available, "of this machine"
    for directory, limit, usage, inactive in _memory_cgroups(os.fspath(cgroups_of), os.fspath(root)):
        most = _number(f"{directory}/{limit}")
        used = None if most is None else _number(f"{directory}/{usage}")
        if most is None or used is None:  # this level does not exist, or has no limit ("max")
            continue
        left = max(0, most - used + (_number(f"{directory}/memory.stat", inactive) or 0))
        if left < free[0]:
            free = left, f"by {directory}/{limit}"
    return free


def _memory_cgroups(cgroups_of: str, root: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield each directory that may limit the process, with the names of its limit, usage and reclaimable bytes."""
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
    """Return the first number in a file, or the number that follows a name in it; None if it is missing."""
    words = _read(file).split()
    try:
        return int(words[0 if name is None else words.index(name) + 1])
    except (ValueError, IndexError):
        return None


def _read(file: str) -> str:
    """Read a file of the kernel in one call; return "" if it does not exist."""
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
    """Write a number of bytes for people: 1536 is 1.5 KiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    return f"{nbytes:.{0 if units[0] == 'B' else 1}f} {units[0]}"


def parse_bytes(text: str) -> int:
    """Read a number of bytes as people write it: GiB and G are 2^30 of them, GB is 10^9.

    Raises
    ------
    ValueError
        If the text is no such number.
    """
    found = SIZE.fullmatch(text.strip())
    if found is None or ("." in found[1] and not found[2]):  # a part of a byte
        raise ValueError(f"{text!r} is no number of bytes, such as 4.7GB, 4.4GiB or 800M")
    number, unit, kind = (part or "" for part in found.groups())
    return int(float(number) * (DECIMAL if kind.lower() == "b" else BINARY)[unit.lower()])


def why_threads(number: int) -> str:
    """Say how many threads a call uses, and why it is so many."""
    for name in ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT"):
        if os.environ.get(name, "").split(",")[0].strip() == str(number):
            return f"{number}: {name} says so"
    binding = [name for name in ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY") if os.environ.get(name)]
    if binding and os.environ.get("OMP_PROC_BIND", "").lower() != "false" and _core.threading_layer() == "openmp":
        places = f"the places to which OpenMP binds threads by {' and '.join(binding)}"
        return f"{number}: {places}, as far as its cgroup lets it"
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{number}: the physical cores among the {allowed} processors that it may use, as far as its cgroup lets it"
