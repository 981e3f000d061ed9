"""Keep values in files of one folder, which many processes may share."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import struct
import time
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple, Self, SupportsIndex

from kvcache.arguments import INT64_MAX, check_path, integer
from kvcache.living import Living
from kvcache.spelling import spelt
from kvcache.stores import files
from kvcache.stores.values import encode_key, view_of

__all__ = ["DirectoryStore"]

MAGIC = b"kvcstore"
HEADER = struct.Struct("<8sIQ")  # MAGIC, the bytes of the key, the bytes of the value; key and value follow
VALUE_NAME = re.compile(r"[0-9a-f]{40}\.kv")
TEMPORARY_NAME = re.compile(r"[0-9a-f]{32}\.tmp")
USAGE_NAME = "usage.lock"  # 8 bytes: those of all values; whoever changes them has the lock
MAX_KEY = 1 << 20  # bytes
LOCK_WAIT = 10.0  # seconds
SPARE = 16  # an eviction makes room for 1/16 of the limit more than is needed


@spelt
class DirectoryStore(MutableMapping[str, bytes]):
    """A mapping of str to bytes in files of one folder.

    A value is written to a temporary file, which then takes its name, so that nobody reads half a value. Any number of
    processes and threads may use a folder at the same time. A process that is killed leaves at most a temporary file,
    which is removed when the folder is opened again.

    Nothing is synced to the disk: values that are lost in a power cut are computed again, and waiting for the disk
    takes many times as long as writing. A power cut may tear a file. It is then not as long as it says, and counts as
    missing.

    Only files with names of its own kind are read, replaced or removed. Links are not followed. A hard link in the
    place of ``usage.lock`` is an error. Files are readable for their owner alone, because keys and values tell what was
    in the prompts.

    Parameters
    ----------
    path : path
        The folder. It is made if there is none. A relative one stays where it is when the process changes its own.
    max_bytes : int, optional
        The most bytes that files of values take. Here and before a value is written, those that were read or written
        least recently are removed, until 1/16 of the limit stays free, so that not every write has to look at all
        files. Temporary files come on top: one for each write at work. Without it, nothing is ever removed.

    Raises
    ------
    ValueError
        If `max_bytes` is not positive, or a value alone exceeds it; or a key has more than 1 MiB.
    TypeError
        If `path` is no path, a key no str, or a value no bytes.
    OSError
        If the folder cannot be made or used.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     DirectoryStore(folder, max_bytes=10**9)["any key: ../ø"] = b"a value"
    ...     DirectoryStore(folder)["any key: ../ø"]
    b'a value'
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: SupportsIndex | None = None) -> None:
        check_path(path, what="folder")
        self.max_bytes = None if max_bytes is None else integer(max_bytes, "max_bytes", 1, INT64_MAX)
        try:
            self.path = Path(path).absolute()  # keeps links, which may lead elsewhere later
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            named = error.filename or os.fspath(path)
            raise OSError(error.errno, f"the folder cannot be made: {error.strerror}", named) from error
        with files.open_folder(self.path) as folder:
            _remove_leftovers(folder)
            with contextlib.suppress(OSError), _Usage(folder) as usage:  # a folder may be there to read only
                self._evict(usage, 0)

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self.path)!r}, max_bytes={self.max_bytes})"

    @property
    def nbytes(self) -> int:
        """The bytes that files of values take."""
        with files.open_folder(self.path) as folder:
            return sum(file.size for file in _values(folder))

    # ---- one value

    def __getitem__(self, key: str) -> bytes:
        return self.read(key, INT64_MAX)

    def read(self, key: str, most: int) -> bytes:
        """Return a value, or its first `most` bytes: a file that somebody else made may be of any size."""
        name = _name_of(key)
        with files.open_folder(self.path) as folder, _opened(folder, name, key) as file:
            value = _read_value(file, _size_of_value(file, key), key, most)
            with contextlib.suppress(OSError):  # a file of somebody else's
                files.touch(file, folder, name)
        return value

    def read_many(self, keys: Iterable[str], most: int) -> dict[str, bytes]:
        """Return the values that there are of these keys, as `read` does."""
        found = {}
        for key in keys:
            with contextlib.suppress(KeyError):
                found[key] = self.read(key, most)
        return found

    def __setitem__(self, key: str, value: bytes) -> None:
        encoded, view = encode_key(key), view_of(value)
        if len(encoded) > MAX_KEY:
            raise ValueError(f"a key of {len(encoded)} bytes: the most are {MAX_KEY}")
        header = HEADER.pack(MAGIC, len(encoded), view.nbytes) + encoded
        size = len(header) + view.nbytes
        if self.max_bytes is not None and size > self.max_bytes:
            raise ValueError(f"a value of {view.nbytes} bytes takes {size}, more than max_bytes={self.max_bytes}")
        name = _name_of(key)
        with files.open_folder(self.path) as folder, _Temporary(folder) as temporary:
            temporary.write(header)
            temporary.write(view)
            with _Usage(folder) as usage:
                before = _size_of(folder, name)
                if self.max_bytes is not None and usage.total + size - before > self.max_bytes:
                    files.unlink(folder, name)  # it is replaced
                    self._evict(usage, size)
                    before = 0
                total = usage.total
                usage.total = total + size  # too much rather than too little, whatever ends this in between
                try:
                    temporary.rename(name)
                except OSError:
                    if temporary.name and _size_of(folder, temporary.name):  # else raised behind it, as by a handler
                        usage.total = total
                    raise
                usage.total = total + size - before

    def __delitem__(self, key: str) -> None:
        name = _name_of(key)
        with files.open_folder(self.path) as folder, _Usage(folder) as usage:
            _remove_value(usage, name, key)

    def pop(self, key: str, default: Any = ...) -> Any:
        """Remove a value and return it, once for all who do so; else return `default`, or raise if it is not given."""
        name = _name_of(key)
        try:
            with files.open_folder(self.path) as folder, contextlib.ExitStack() as opened:
                file = opened.enter_context(_opened(folder, name, key))
                # Before it is removed, for that may fail; and while nobody waits for the lock.
                value = _read_value(file, _size_of_value(file, key), key, INT64_MAX)
                with _Usage(folder) as usage:
                    if not _is_named(file, folder, name, key):  # somebody has replaced it meanwhile
                        del value
                        file = opened.enter_context(_opened(folder, name, key))
                        value = _read_value(file, _size_of_value(file, key), key, INT64_MAX)
                    _remove_value(usage, name, key)
                return value
        except KeyError:
            if default is ...:
                raise
            return default

    def popitem(self) -> tuple[str, bytes]:
        """Remove a value and return it with its key, once for all callers. Raise a KeyError if it is missing."""
        while (key := next(iter(self), None)) is not None:
            with contextlib.suppress(KeyError):  # somebody else came first
                return key, self.pop(key)
        raise KeyError("the folder has no values")

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, str):
            return False
        try:
            with files.open_folder(self.path) as folder, _opened(folder, _name_of(key), key) as file:
                return _size_of_value(file, key) is not None
        except KeyError:
            return False

    # ---- all values

    def __iter__(self) -> Iterator[str]:
        with files.open_folder(self.path) as folder:
            names = [file.name for file in _values(folder)]
        for name in names:
            with (
                contextlib.suppress(KeyError),
                files.open_folder(self.path) as folder,
                _opened(folder, name, name) as file,
            ):
                key = _read_key(file)
                if key is not None and _name_of(key) == name:
                    yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Remove all values."""
        with files.open_folder(self.path) as folder, _Usage(folder) as usage:
            for file in _values(folder):
                files.unlink(folder, file.name)
            usage.total = 0

    # ---- the folder

    def _evict(self, usage: _Usage, size: int) -> None:
        """Count anew, and remove what was used least recently until `size` more bytes fit."""
        values = sorted(_values(usage.folder), key=lambda file: (file.used, file.name))
        total = sum(file.size for file in values)
        if self.max_bytes is not None and total + size > self.max_bytes:
            most = max(self.max_bytes - self.max_bytes // SPARE - size, 0)
            for file in values:
                if total <= most:
                    break
                with contextlib.suppress(PermissionError):  # of one that nobody may remove
                    files.unlink(usage.folder, file.name)
                    total -= file.size
        usage.total = total


class _File(NamedTuple):
    name: str
    size: int
    used: int  # nanoseconds


class _Locked:
    """An open file, which may be locked; closed with the object, too, for an interrupt may keep ``__exit__`` away.

    The lock belongs to the open file, which a child that is forked meanwhile has open as well. So the lock is given
    back, not only closed; and a child closes the descriptors that it inherited. (POSIX locks would not be inherited,
    but lost as soon as anything in the process closes the same file, and keep no threads apart.)
    """

    file = -1
    num_forks = 0  # of the process: a child may have a file that was being opened, and not know of it

    def __init__(self, folder: files.Folder) -> None:
        self.folder = folder
        self.process = os.getpid()
        _all_locked.add(self)

    def close(self) -> None:
        file, self.file = self.file, -1  # before it is closed, which it must not be twice
        if file < 0:
            return
        try:
            if self.process == os.getpid():  # a child would take the lock from its parent
                with contextlib.suppress(OSError):
                    files.unlock(file)
        finally:
            os.close(file)

    __del__ = close


_all_locked: Living[_Locked] = Living()


def _count_fork() -> None:
    _Locked.num_forks += 1


def _close_in_child() -> None:
    for locked in _all_locked.alive():
        locked.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count_fork, after_in_child=_close_in_child)


class _Usage(_Locked):
    """The bytes of all values, as all processes count them; who has it open has a lock, for which others wait."""

    def __enter__(self) -> Self:
        deadline = time.monotonic() + LOCK_WAIT
        while True:
            num_forks = self.num_forks
            self.file = files.open_file(self.folder, USAGE_NAME, os.O_RDWR | os.O_CREAT)
            try:
                self._wait(deadline)
                if os.fstat(self.file).st_nlink and self.num_forks == num_forks:
                    return self
            except BaseException:
                self.close()
                raise
            self.close()  # somebody has removed it meanwhile, and others lock the next one; or a child may have it

    def _wait(self, deadline: float) -> None:
        """Wait until nobody else has the lock."""
        found = os.fstat(self.file)
        if not files.is_regular(found) or found.st_nlink > 1:  # a write would reach a file elsewhere
            raise OSError(errno.EMLINK, f"{USAGE_NAME} is not a file of this folder alone")
        while not files.lock(self.file):
            if time.monotonic() > deadline:  # its holder was stopped, perhaps
                raise TimeoutError(f"another process has locked {USAGE_NAME} for {LOCK_WAIT:g} s")
            time.sleep(0.001)

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def total(self) -> int:
        os.lseek(self.file, 0, os.SEEK_SET)
        data = os.read(self.file, 8)
        total = int.from_bytes(data, "little")
        if len(data) < 8 or total > INT64_MAX:  # new, or no count; it is not written, for the disk may be full
            total = sum(file.size for file in _values(self.folder))
        return total

    @total.setter
    def total(self, total: int) -> None:
        os.lseek(self.file, 0, os.SEEK_SET)
        os.write(self.file, min(max(total, 0), INT64_MAX).to_bytes(8, "little"))  # sparse files count what they say


class _Temporary(_Locked):
    """A file under a name of its own, locked while its writer lives, and removed unless it was renamed."""

    name = ""

    def __enter__(self) -> Self:
        while True:
            self.name = f"{secrets.token_hex(16)}.tmp"
            self.file = files.open_file(self.folder, self.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                if files.lock(self.file) and os.fstat(self.file).st_nlink:
                    return self
            except BaseException:  # such as of a file system without locks
                self.__exit__()
                raise
            self.close()  # somebody took it for a leftover before it was locked

    def __exit__(self, *exception: object) -> None:
        try:
            if self.name:
                files.unlink(self.folder, self.name)
        finally:
            self.close()

    def write(self, data: bytes | memoryview) -> None:
        while len(data):
            data = data[os.write(self.file, data) :]

    def rename(self, name: str) -> None:
        files.replace(self.folder, self.name, name)
        self.name = ""
        files.touch(self.file, self.folder, name)


def _name_of(key: str) -> str:
    """Return the file's name: of any key 43 characters that are safe everywhere."""
    return f"{hashlib.blake2b(encode_key(key), digest_size=20).hexdigest()}.kv"


@contextlib.contextmanager
def _opened(folder: files.Folder, name: str, key: str) -> Iterator[int]:
    """Open a regular file for reading. Raise a KeyError if no file has this name."""
    try:
        file = files.open_file(folder, name, os.O_RDONLY)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):  # nothing, a link, a socket
            raise KeyError(key) from None
        raise
    try:
        if not files.is_regular(os.fstat(file)):
            raise KeyError(key)
        yield file
    finally:
        os.close(file)


def _is_named(file: int, folder: files.Folder, name: str, key: str) -> bool:
    """Whether an open file still has this name; a KeyError if none has."""
    with _opened(folder, name, key) as named:
        return os.path.sameopenfile(file, named)


def _read_exactly(file: int, size: int) -> bytes | None:
    """Read so many bytes; None if there are fewer."""
    parts = []
    while size:
        part = os.read(file, min(size, 1 << 30))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _read_value(file: int, size: int | None, key: str, most: int) -> bytes:
    """Return the first `most` bytes of a value whose size `_size_of_value` returned; a KeyError if it is None."""
    value = None if size is None else _read_exactly(file, min(size, most))
    if value is None:
        raise KeyError(key)
    return value


def _remove_value(usage: _Usage, name: str, key: str) -> None:
    """Remove a value's file, whatever it holds. Raise a KeyError if it is missing."""
    size, before = _size_of(usage.folder, name), usage.total
    if not files.unlink(usage.folder, name):
        raise KeyError(key)
    try:
        usage.total = before - size
    except OSError as error:
        if error.errno is None:  # a signal's handler raised it
            raise
        # The disk is full: too much is counted, until somebody counts anew.


def _size_of_value(file: int, key: str) -> int | None:
    """Return the size of the value that follows; None if the file has another key, or another length than it says."""
    encoded = encode_key(key)
    size = os.fstat(file).st_size - HEADER.size - len(encoded)
    if size < 0:
        return None
    beginning = HEADER.pack(MAGIC, len(encoded), size) + encoded
    return size if os.read(file, len(beginning)) == beginning else None


def _read_key(file: int) -> str | None:
    """Return the key; None if the file has another length than it says, or claims too long a key."""
    header = os.read(file, HEADER.size)
    if len(header) == HEADER.size:
        magic, key_size, size = HEADER.unpack(header)
        is_whole = HEADER.size + key_size + size == os.fstat(file).st_size
        if magic == MAGIC and key_size <= MAX_KEY and is_whole:
            key = _read_exactly(file, key_size)
            if key is not None:
                with contextlib.suppress(UnicodeDecodeError):
                    return key.decode(errors="surrogatepass")
    return None


def _values(folder: files.Folder) -> list[_File]:
    """List the files of values, damaged ones too."""
    values = []
    with files.entries(folder) as entries:
        for entry in entries:
            if VALUE_NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if files.is_regular(found):
                        values.append(_File(entry.name, found.st_size, found.st_mtime_ns))
    return values


def _size_of(folder: files.Folder, name: str) -> int:
    try:
        found = os.stat(folder.at(name), dir_fd=folder.descriptor, follow_symlinks=False)
        return found.st_size if files.is_regular(found) else 0
    except FileNotFoundError:
        return 0


def _remove_leftovers(folder: files.Folder) -> None:
    """Remove temporary files whose writers are gone: nobody has locked them."""
    with files.entries(folder) as entries:
        names = [entry.name for entry in entries if TEMPORARY_NAME.fullmatch(entry.name)]
    for name in names:
        with contextlib.suppress(KeyError, OSError), _opened(folder, name, name) as file:
            if files.lock(file):
                files.unlink(folder, name)
