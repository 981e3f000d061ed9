"""Open, lock, replace and remove files that other processes use: what systems do in ways of their own.

On Windows these are the calls, and the locked byte, of src/base/files.c.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from kvcache import _core

__all__ = [
    "Folder",
    "entries",
    "is_regular",
    "lock",
    "open_file",
    "open_folder",
    "replace",
    "touch",
    "unlink",
    "unlock",
]

T = TypeVar("T")


class Folder(NamedTuple):
    """An open folder: files have names in it, whatever becomes of its path; on Windows it is the path alone."""

    path: str
    descriptor: int | None

    def at(self, name: str) -> str:
        """Return what a call of the system that is given the descriptor, too, knows a file by."""
        return os.path.join(self.path, name) if self.descriptor is None else name


if sys.platform == "win32":
    import _winapi
    import msvcrt

    BUSY_WAIT = 1.0  # seconds
    LOCKED_BYTE = 0x7FFFFFFF  # stands for the file: nobody else can read a byte that is locked

    @contextlib.contextmanager
    def open_folder(path: str | os.PathLike[str]) -> Iterator[Folder]:
        """Open a folder for a call."""
        os.scandir(path).close()  # raises if there is none
        yield Folder(os.fspath(path), None)

    def _open(folder: Folder, name: str, flags: int) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        access = _winapi.GENERIC_READ | (_winapi.GENERIC_WRITE if writes else 0)
        how = 1 if flags & os.O_EXCL else 4 if flags & os.O_CREAT else 3  # CREATE_NEW, OPEN_ALWAYS, OPEN_EXISTING
        handle = _core.open_shared(folder.at(name), access, how)
        try:
            return msvcrt.open_osfhandle(handle, os.O_NOINHERIT)
        except OSError:  # too many files
            _winapi.CloseHandle(handle)
            raise

    def _unlink(folder: Folder, name: str) -> None:
        """Remove a file under another name: there a removed one may keep its name until all have closed it."""
        other = folder.at(f"{secrets.token_hex(16)}.tmp")
        os.rename(folder.at(name), other)
        with contextlib.suppress(OSError):  # left over, for who next opens the folder
            os.unlink(other)

    def _lock(file: int, mode: int) -> None:
        at = os.lseek(file, 0, os.SEEK_CUR)
        os.lseek(file, LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(file, mode, 1)
        finally:
            os.lseek(file, at, os.SEEK_SET)

    def lock(file: int) -> bool:
        """Lock an open file until it is unlocked, or its process ends; return False if another one has the lock."""
        try:
            _lock(file, msvcrt.LK_NBLCK)
        except OSError as error:
            if error.errno not in (errno.EACCES, 0):  # 0 is Wine's
                raise
            return False
        return True

    def unlock(file: int) -> None:
        """Give the lock of an open file back, if it has it."""
        _lock(file, msvcrt.LK_UNLCK)

else:
    import fcntl

    BUSY_WAIT = 0.0
    ITSELF = os.O_NOFOLLOW | os.O_NONBLOCK

    @contextlib.contextmanager
    def open_folder(path: str | os.PathLike[str]) -> Iterator[Folder]:
        """Open a folder for a call."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield Folder(os.fspath(path), descriptor)
        finally:
            os.close(descriptor)

    def _open(folder: Folder, name: str, flags: int) -> int:
        return os.open(name, flags | ITSELF, 0o600, dir_fd=folder.descriptor)

    def _unlink(folder: Folder, name: str) -> None:
        os.unlink(name, dir_fd=folder.descriptor)

    def lock(file: int) -> bool:
        """Lock an open file until it is unlocked, or its process ends; return False if another one has the lock."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(file: int) -> None:
        """Give the lock of an open file back, if it has it."""
        fcntl.flock(file, fcntl.LOCK_UN)


def _when_free(call: Callable[..., T], *arguments: object, **keywords: object) -> T:
    """Call a function of the system; on Windows again, for a second, while others have the file open.

    While it is open, a file cannot be replaced. Nor can it be made anew after it was removed.
    """
    deadline = time.monotonic() + BUSY_WAIT
    while True:
        try:
            return call(*arguments, **keywords)
        except PermissionError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.001)


def entries(folder: Folder) -> os._ScandirIterator[str]:
    """Return what is in a folder, to be closed."""
    return os.scandir(folder.path) if folder.descriptor is None else os.scandir(folder.descriptor)


def open_file(folder: Folder, name: str, flags: int) -> int:
    """Open a file, for its owner alone where it is made; follow no link, and wait for no other end of a pipe."""
    return _when_free(_open, folder, name, flags)


def is_regular(found: os.stat_result) -> bool:
    """Whether it is a file, and no link; on Windows, an open link is told by its attributes alone."""
    is_link = getattr(found, "st_file_attributes", 0) & stat.FILE_ATTRIBUTE_REPARSE_POINT
    return stat.S_ISREG(found.st_mode) and not is_link


def replace(folder: Folder, name: str, other: str) -> None:
    """Give a file the name of another, which it replaces as a whole."""
    in_it = folder.descriptor
    _when_free(os.replace, folder.at(name), folder.at(other), src_dir_fd=in_it, dst_dir_fd=in_it)


def unlink(folder: Folder, name: str) -> bool:
    """Remove a file; return whether it was there."""
    try:
        _when_free(_unlink, folder, name)
    except FileNotFoundError:
        return False
    return True


def touch(file: int, folder: Folder, name: str) -> None:
    """Note that an open file is used now."""
    now = time.time_ns()  # finer than the clock of the file system
    os.utime(folder.at(name) if folder.descriptor is None else file, ns=(now, now))
