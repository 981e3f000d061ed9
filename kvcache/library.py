"""Where the C library and its header lie, for who builds on them."""

from __future__ import annotations

from pathlib import Path

from kvcache import _core

__all__ = ["get_include", "get_library"]

_PACKAGE = Path(_core.__file__).parent


def _system() -> list[str]:
    """Return the folder of the header and the path of the library, if the package was built on an installed one."""
    found = _PACKAGE / "system-library"
    return found.read_text().splitlines() if found.exists() else []


def get_include() -> str:
    """Return the folder that ``kvcache.h`` lies in.

    Returns
    -------
    str
        For a compiler's ``-I``.

    Examples
    --------
    >>> import kvcache, os
    >>> os.path.isfile(os.path.join(kvcache.get_include(), "kvcache.h"))
    True
    """
    if system := _system():
        return system[0]
    installed = _PACKAGE / "include"
    return str(installed if installed.is_dir() else _PACKAGE.parent / "include")  # the latter: installed in place


def get_library() -> str:
    """Return the path of the C library that this package itself uses.

    It exports what ``kvcache.h`` declares, and nothing else, and knows nothing of Python: a C program may be linked to
    it, and `ctypes.CDLL` or an extension module that loads it shares the one copy in the process.

    Returns
    -------
    str
        Path of ``libkvcache.so``: of the one in the package, or of the installed one that the package was built on.

    Examples
    --------
    >>> import ctypes, kvcache
    >>> ctypes.CDLL(kvcache.get_library()).kvc_version() >= 1000
    True
    """
    if system := _system():
        return system[1]
    return str(_PACKAGE / "lib" / "libkvcache.so")
