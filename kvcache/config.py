"""What this build of kvcache is, what it found on this machine, and how many threads it uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, SupportsIndex, overload

from kvcache import _core

__all__ = ["get_num_threads", "set_num_threads", "show_config"]


def _version() -> str:
    major, rest = divmod(_core.version(), 1_000_000)
    return f"{major}.{rest // 1000}.{rest % 1000}"


__version__: Final = _version()


def get_num_threads() -> int:
    """How many threads a call uses where the cache was not told.

    Returns
    -------
    int
        The number given to `set_num_threads`, else ``OMP_NUM_THREADS``, else the physical cores that this process may
        use, the limits of its cgroup counted in. Always 1 in a build without OpenMP, and in a child after ``os.fork``.
    """
    return _core.get_num_threads()


def set_num_threads(num_threads: SupportsIndex | None) -> None:
    """Set how many threads a call uses where the cache was not told, for the whole process.

    Parameters
    ----------
    num_threads : int or None
        From 1 to 4096; None: as if it had never been set.

    Raises
    ------
    ValueError
        If it is out of range.
    TypeError
        If it is no integer.

    Examples
    --------
    >>> import kvcache
    >>> kvcache.set_num_threads(2)
    >>> kvcache.set_num_threads(None)
    """
    _core.set_num_threads(num_threads)


@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...


@overload
def show_config(mode: Literal["dicts"]) -> dict[str, str | int | None]: ...


def show_config(mode: Literal["stdout", "dicts"] = "stdout") -> dict[str, str | int | None] | None:
    """Show what a report of an error should say about kvcache and the machine.

    Parameters
    ----------
    mode : {"stdout", "dicts"}, default "stdout"
        Whether to print it or to return it, as `numpy.show_config` does.

    Returns
    -------
    dict or None
        With ``mode="dicts"``. ``isa`` is the instruction set that a cache made now would use; None if the environment
        variable ``KVCACHE_ISA`` names one that is not to be had.

    Raises
    ------
    ValueError
        If there is no such mode.

    Examples
    --------
    >>> import kvcache
    >>> kvcache.show_config(mode="dicts")["kvcache"] == kvcache.__version__
    True
    """
    if mode not in ("stdout", "dicts"):
        raise ValueError(f"mode={mode!r}: must be 'stdout' or 'dicts'")
    import os
    import platform

    import numpy

    found: dict[str, str | int | None] = {
        "kvcache": __version__,
        "build": _core.build_info(),
        "isa": _core.isa(),
        "num_threads": get_num_threads(),
        "KVCACHE_ISA": os.environ.get("KVCACHE_ISA"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "system": platform.platform(),
    }
    if mode == "dicts":
        return found
    print_values(found)
    return None


def print_values(found: Mapping[str, object]) -> None:
    """Print values below each other, each after its name."""
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:{width}}  {'-' if value is None else value}")
