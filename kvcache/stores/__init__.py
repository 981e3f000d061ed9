"""Stores, in which prefixes outlive the process and are shared between machines.

A store is any mutable mapping of str to bytes that several threads can use at once: a class of this package, or a
mapping of another library, such as zict or fsspec. `kvcache.PrefixCache` takes it as `store`, and uses it through a
client. All prefix caches that are given the same store share the client. A store that is slow, full, gone or wrong
costs speed, never correctness.

A mapping may have methods for many keys at once, and then they are called. ``get_many(keys)`` returns a dict of the
values found. ``set_many(items)`` takes a dict. ``read_many(keys, most)`` returns a dict of the first `most` bytes of
each value found.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, unquote

from kvcache import system
from kvcache.stores import valkey
from kvcache.stores.client import StoreStats
from kvcache.stores.directory import DirectoryStore
from kvcache.stores.valkey import ValkeyStore

__all__ = ["DirectoryStore", "StoreStats", "ValkeyStore", "open"]


def open(url: str) -> DirectoryStore | ValkeyStore:
    """Open a store by its address.

    Parameters
    ----------
    url : str
        ``dir:PATH`` is a `DirectoryStore`. ``valkey://HOST:PORT/DATABASE`` and ``valkey+cluster://HOST:PORT`` are a
        `ValkeyStore`, also with ``valkeys``, ``redis`` or ``rediss`` in place of ``valkey``. Keyword arguments of these
        classes follow as options: ``dir:~/prefixes?max_bytes=20GiB``, ``valkey://localhost?ttl=3600&timeout=0.5``. A
        question mark, an ampersand or a percent sign elsewhere is written ``%3F``, ``%26`` or ``%25``; so is each
        special character of a password, and an ``@`` in an option of a server.

    Raises
    ------
    ValueError
        If the address is of no known kind, or an option is unknown or unsuitable.
    TypeError
        If `url` is no str.
    OSError
        If the folder cannot be made or used.
    ImportError
        If the package valkey is needed and not installed.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = open(f"dir:{folder}/prefixes?max_bytes=20GiB")
    >>> store.max_bytes
    21474836480
    """
    shown = valkey.shown(url)
    address, _, query = url.partition("?")
    scheme, _, path = address.partition(":")
    if scheme == "dir":
        if not path:
            raise ValueError(f"{shown!r} has no path: dir:PATH is needed")
        return DirectoryStore(os.path.expanduser(unquote(path)), **_options(shown, query, _DIRECTORY_OPTIONS))
    if scheme.partition("+")[0] in ("valkey", "valkeys", "redis", "rediss"):
        valkey.check_login(url)
        return ValkeyStore(address, **_options(shown, query, _VALKEY_OPTIONS))
    raise ValueError(f"{shown!r} is no store: dir:PATH, valkey://HOST:PORT/0 and valkey+cluster://HOST:PORT are")


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number of seconds, such as 3600 or 0.5") from None


def _seconds_or_none(text: str) -> float | None:
    return None if text.lower() == "none" else _seconds(text)


_DIRECTORY_OPTIONS: dict[str, Callable[[str], Any]] = {"max_bytes": system.parse_bytes}
_VALKEY_OPTIONS: dict[str, Callable[[str], Any]] = {
    "ttl": _seconds_or_none,
    "timeout": _seconds,
    "prefix": str,
    "ca_certs": os.path.expanduser,
    "certfile": os.path.expanduser,
    "keyfile": os.path.expanduser,
}


def _options(url: str, query: str, known: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Read the options of an address, each given once."""
    options: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}") from None
    for name, text in pairs:
        if name not in known:
            raise ValueError(f"{url!r}: there is no option {name!r}, but {', '.join(sorted(known))}")
        if name in options:
            raise ValueError(f"{url!r} gives {name} twice")
        try:
            options[name] = known[name](text)
        except ValueError as error:
            raise ValueError(f"{url!r}: {name}: {error}") from None
    return options
