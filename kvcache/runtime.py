"""The library at run time: version, threads, a report on the machine, and the paths of the C library and header."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, SupportsIndex, overload

from kvcache import _core


def _version() -> str:
    major, rest = divmod(_core.version(), 1_000_000)
    return f"{major}.{rest // 1000}.{rest % 1000}"


__version__: Final = _version()


def get_num_threads() -> int:
    """Return the number of threads of a call, for caches made without `num_threads`.

    Returns
    -------
    int
        The number given to `set_num_threads`; else the first in ``OMP_NUM_THREADS``, which is read once, or the
        physical cores that this process may use within the limits of its cgroup, but no more than `threadpoolctl` or
        `torch.set_num_threads` leave to the calling thread, where the threads are OpenMP's. ``OMP_THREAD_LIMIT``
        bounds these in any case. Always 1 in a child after ``os.fork`` of a process with caches.
    """
    return _core.get_num_threads()


def set_num_threads(num_threads: SupportsIndex | None) -> None:
    """Set the number of threads of a call, for caches made without `num_threads`, in the whole process.

    Parameters
    ----------
    num_threads : int or None
        The number of threads, from 1 to 4096; None undoes an earlier call.

    Raises
    ------
    ValueError, TypeError
        If the number is out of range, or no integer.

    Examples
    --------
    >>> kvcache.set_num_threads(2)
    >>> kvcache.set_num_threads(None)
    """
    _core.set_num_threads(num_threads)


def get_threading_layer() -> str | None:
    """Return whose threads calls use.

    Returns
    -------
    str or None
        "openmp", in a build that has it: calls are parallel regions of the OpenMP runtime that other libraries of the
        process use, and obey its environment variables and threadpoolctl. While another program holds regions up,
        calls use the own threads, or the calling one alone where OpenMP binds threads. "own", in other builds, in
        children of ``fork()``, and with ``KVCACHE_THREADS=own`` in the environment, which is read once: threads of
        this library, which never spin for longer than 50 µs, and are one set however many threads call. None if the
        variable names a layer that this build does not have, with which no cache can be made.
    """
    return _core.threading_layer()


@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...


@overload
def show_config(mode: Literal["dicts"]) -> dict[str, str | int | None]: ...


def show_config(mode: Literal["stdout", "dicts"] = "stdout") -> dict[str, str | int | None] | None:
    """Show the facts about kvcache and the machine that belong in a bug report.

    Parameters
    ----------
    mode : {"stdout", "dicts"}, default "stdout"
        Whether to print the report or to return it, as `numpy.show_config` does.

    Returns
    -------
    dict or None
        The report, with ``mode="dicts"``. ``isa`` is the instruction set of a cache made now; None if the environment
        variable ``KVCACHE_ISA`` names a set that the build or the machine does not have. ``threading_layer`` is what
        `get_threading_layer` returns.

    Raises
    ------
    ValueError
        If there is no such mode.

    Examples
    --------
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
        "threading_layer": get_threading_layer(),
        **{name: os.environ.get(name) for name in ("KVCACHE_ISA", "KVCACHE_THREADS", "OMP_NUM_THREADS")},
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "system": platform.platform().replace("-with-", " with "),
    }
    if mode == "dicts":
        return found
    print_values(found)
    return None


CHOSEN_BY = {  # facts that are None if a variable of the environment names none
    "isa": ("KVCACHE_ISA", "instruction set of this build and machine"),
    "threading_layer": ("KVCACHE_THREADS", "threading layer of this build"),
}


def print_values(found: Mapping[str, object]) -> None:
    """Print what `show_config` found, names and values in as many columns as there are."""
    from kvcache.columns import WIDTH, columns, definitions

    said = {name: "-" if value is None else str(value) for name, value in found.items()}
    for name, (variable, what) in CHOSEN_BY.items():
        if found[name] is None:
            said[name] = f"none: {variable}={found[variable]} is no {what}"
    print(definitions(said.items(), columns(WIDTH)))


_PACKAGE = Path(_core.__file__).parent


def _system() -> list[str]:
    """Return the header's folder and the library's path if the package uses an installed library; else nothing."""
    found = _PACKAGE / "system-library"
    return found.read_text().splitlines() if found.exists() else []


def get_include() -> str:
    """Return the folder of ``kvcache.h``, and of the headers that it includes.

    Returns
    -------
    str
        The folder's path, for a compiler's ``-I``.

    Examples
    --------
    >>> import kvcache, os
    >>> os.path.isfile(os.path.join(kvcache.get_include(), "kvcache.h"))
    True
    """
    if system := _system():
        return system[0]
    installed = _PACKAGE / "include"
    return str(installed if installed.is_dir() else _PACKAGE.parent / "include")  # else it is an editable install


def get_library() -> str:
    """Return the path of the C library that this package uses.

    It exports the functions of ``kvcache.h`` only, and does not depend on Python. Link a C program to it, or load it
    with `ctypes.CDLL` or from an extension module: the process then has one copy of the library.

    Returns
    -------
    str
        The path of ``libkvcache.so``, on Windows ``libkvcache.dll``: in the package, or of the installed library that
        the package was built on.

    Examples
    --------
    >>> import ctypes, kvcache
    >>> ctypes.CDLL(kvcache.get_library()).kvc_version() >= 1000
    True
    """
    if system := _system():
        return system[1]
    return str(_PACKAGE / ("libkvcache.dll" if sys.platform == "win32" else "lib/libkvcache.so"))
