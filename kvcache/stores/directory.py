"""`DirectoryStore`: values in the files of a folder, by the store of the C core (src/prefix/directory.c).

A key is the name of a block in hexadecimal digits; the core takes the name itself, as bytes. A value's file begins with
a header that holds the key, and is called by a hash of the key.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, SupportsIndex

from kvcache import _core
from kvcache.arguments import INT64_MAX, check_path, integer, spelt
from kvcache.errors import shown
from kvcache.stores.calls import view_of

KEY = re.compile(r"[0-9a-f]{64}")  # the name of a block
VALUE_NAME = re.compile(r"[0-9a-f]{40}\.kv")
KEY_AT, HEADER_SIZE = 20, 84  # where the key begins in a file, and the value


@spelt
class DirectoryStore(MutableMapping[str, bytes]):
    """A mapping of blocks' names to bytes in files of one folder.

    A key is the name of a block: 64 hexadecimal digits in lower case. A value has at least one byte.

    A value is written to a temporary file, which then takes its name, so that nobody reads half a value. Any number of
    processes and threads may use a folder at the same time, also programs in C (``kvc_dir_store_new``). A process that
    is killed leaves at most a temporary file, which is removed when the folder is opened again, or room is made.

    Nothing is synced to the disk: values that are lost in a power cut are computed again, and waiting for the disk
    takes many times as long as writing. A power cut may tear a file. It is then not as long as it says, and counts as
    missing.

    Only files with names of its own kind are read, replaced or removed. Links are not followed. A hard link in the
    place of ``usage.lock`` is an error. Files are readable for their owner alone, because keys and values tell what was
    in the prompts.

    Parameters
    ----------
    path : path
        The folder. It is made if it does not exist. A relative path stays where it is when the process changes its own.
    max_bytes : int, optional
        The most bytes that files of values take. Here and before a value is written, the least recently read or written
        values are removed until 1/16 of the limit is free, so that not every write looks at all files. Temporary files
        come on top: one for each write at work. Without it, nothing is ever removed.

    Raises
    ------
    ValueError
        If `max_bytes` is not positive, a value is empty or alone exceeds `max_bytes`, or a key is not a block's name.
    TypeError
        If `path` is not a path, a key not a str, or a value not bytes.
    OSError
        If the folder cannot be made or used.

    Examples
    --------
    >>> import tempfile
    >>> key = 64 * "a"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     DirectoryStore(folder, max_bytes=10**9)[key] = b"a value"
    ...     DirectoryStore(folder)[key]
    b'a value'
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: SupportsIndex | None = None) -> None:
        check_path(path, what="folder")
        self.max_bytes = None if max_bytes is None else integer(max_bytes, "max_bytes", 1, INT64_MAX // 2)
        self.path = Path(os.fsdecode(path)).absolute()  # keeps links, which may lead elsewhere later
        self._open()

    def _open(self) -> None:
        self._folder = _core.FolderStore(os.fsencode(self.path), self.max_bytes or 0)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_folder"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self.path)!r}, max_bytes={self.max_bytes})"

    @property
    def nbytes(self) -> int:
        """The bytes that files of values take."""
        total = 0
        for file in self._files():
            with contextlib.suppress(FileNotFoundError):
                total += file.stat(follow_symlinks=False).st_size
        return total

    def __getitem__(self, key: str) -> bytes:
        return self.read(key, INT64_MAX)

    def read(self, key: str, most: int) -> bytes:
        """Return a value, or its first `most` bytes: a file that somebody else made may be of any size."""
        name, most = _name_of(key), integer(most, "most", 1, INT64_MAX)
        value = None if name is None else self._folder.read(name, most)
        if value is None:
            raise KeyError(key)
        return value

    def read_many(self, keys: Iterable[str], most: int) -> dict[str, bytes]:
        """Return the values that are found for these keys, as `read` does."""
        most = integer(most, "most", 1, INT64_MAX)
        names = ((key, _name_of(key)) for key in keys)
        found = ((key, None if name is None else self._folder.read(name, most)) for key, name in names)
        return {key: value for key, value in found if value is not None}

    def __setitem__(self, key: str, value: bytes) -> None:
        name, view = _name_of(key), view_of(value)
        if name is None:
            raise ValueError(f"key={shown(key)}: the name of a block is needed, 64 hexadecimal digits")
        size = HEADER_SIZE + view.nbytes
        if not view.nbytes or (self.max_bytes is not None and size > self.max_bytes):
            raise ValueError(
                f"a value of {view.nbytes} bytes takes {size}: it needs at least 1 byte, and max_bytes={self.max_bytes}"
            )
        self._folder.write(name, view)

    def __delitem__(self, key: str) -> None:
        name = _name_of(key)
        is_there = name is not None and self._folder.size(name) > 0
        if name is not None:
            self._folder.remove(name)  # also a file that a power cut tore, which counts as missing
        if not is_there:
            raise KeyError(key)

    def pop(self, key: str, default: Any = ...) -> Any:
        """Remove a value and return it, or return `default`. Others who pop it at the same moment may get it, too."""
        value = self.get(key)
        if value is None and default is ...:
            raise KeyError(key)
        if value is not None:
            self._folder.remove(bytes.fromhex(key))
        return default if value is None else value

    def __contains__(self, key: object) -> bool:
        name = _name_of(key) if isinstance(key, str) else None
        return name is not None and self._folder.size(name) > 0

    def __iter__(self) -> Iterator[str]:
        for file in [*self._files()]:
            key = _key_of(file)
            if key is not None and key in self:
                yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Remove all values, and files that a power cut tore."""
        for file in [*self._files()]:
            key = _key_of(file)
            if key is not None and KEY.fullmatch(key):
                self._folder.remove(bytes.fromhex(key))
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.path)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        """Return the files of values."""
        with os.scandir(self.path) as entries:
            for file in entries:
                if VALUE_NAME.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                    yield file


def _name_of(key: str) -> bytes | None:
    """Return the name that the digits of a key stand for; None if it is not the name of a block."""
    if not isinstance(key, str):
        raise TypeError(f"key={shown(key)}: a str is needed, not {type(key).__name__}")
    return bytes.fromhex(key) if KEY.fullmatch(key) else None


def _key_of(file: os.DirEntry[str]) -> str | None:
    """Return the key that a file says, if that is the key of its name."""
    try:
        with open(file.path, "rb", opener=_open_itself) as opened:
            key = opened.read(HEADER_SIZE)[KEY_AT:]
    except OSError:  # somebody removed it meanwhile
        return None
    is_own = file.name == f"{hashlib.blake2b(key, digest_size=20).hexdigest()}.kv"
    return key.decode("ascii", "replace") if is_own else None


def _open_itself(path: str, flags: int) -> int:
    """Open a file; follow no link, and wait for no other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
