"""Where prefixes outlive the process, and are shared between machines.

A store is any mutable mapping of str to bytes that can be used by two threads at once: those in this package, or any
other, such as those of zict and fsspec. `kvcache.PrefixCache` takes one as `store`, and uses it through a guard: a
store that is slow, full, gone or wrong costs speed, never correctness.
"""

from __future__ import annotations

import os
from urllib.parse import parse_qsl, unquote

from kvcache import system
from kvcache.stores.directory import DirectoryStore
from kvcache.stores.guard import StoreStats

__all__ = ["DirectoryStore", "StoreStats", "open"]


def open(url: str) -> DirectoryStore:
    """Open a store by its address.

    Parameters
    ----------
    url : str
        ``dir:PATH`` is a `DirectoryStore`; its option is ``max_bytes``, a number or a size such as 20GiB. Options
        follow a question mark: ``dir:~/.cache/prefixes?max_bytes=20GiB``. A question mark or a percent sign in a path
        is written ``%3F`` or ``%25``.

    Raises
    ------
    ValueError
        If the address is of no known kind, or an option is unknown or unsuitable.
    OSError
        If the folder cannot be used.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = open(f"dir:{folder}/prefixes?max_bytes=20GiB")
    >>> store.max_bytes
    21474836480
    """
    scheme, _, rest = url.partition(":")
    if scheme == "dir":
        return _open_directory(url, rest)
    raise ValueError(f"{url!r} is no store: dir:PATH is one")


def _open_directory(url: str, rest: str) -> DirectoryStore:
    path, _, query = rest.partition("?")
    if not path:
        raise ValueError(f"{url!r} has no path: dir:PATH is needed")
    options = _options(url, query, {"max_bytes"})
    max_bytes = system.parse_bytes(options["max_bytes"]) if "max_bytes" in options else None
    return DirectoryStore(os.path.expanduser(unquote(path)), max_bytes=max_bytes)


def _options(url: str, query: str, known: set[str]) -> dict[str, str]:
    """Read the options of an address, each given once."""
    pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    options = dict(pairs)
    for name in options:
        if name not in known:
            raise ValueError(f"{url!r}: there is no option {name!r}, but {', '.join(sorted(known))}")
    if len(options) < len(pairs):
        raise ValueError(f"{url!r} gives an option twice")
    return options
