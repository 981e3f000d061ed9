"""Files that are written whole or not at all, read in parts, and with a secret's MAC at their end."""

from __future__ import annotations

import errno
import hashlib
import hmac
import io
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, TypeAlias, cast

from kvcache.arguments import check_path
from kvcache.errors import StateFormatError

StrPath: TypeAlias = str | os.PathLike[str]

MAC_BYTES = 32
SENT_BYTES = 8 << 20  # after so many, the disk begins to write; later, fsync would wait for all
NAME_BYTES = 233  # of a name, in that of its temporary file: with 22 more, the 255 that file systems take


class StateFile:
    """A file of `size` bytes that is open to be read.

    It is not mapped: what others cut off meanwhile is then an error, where a mapping would end the process.
    """

    def __init__(self, file: io.FileIO) -> None:
        found = os.fstat(file.fileno())
        _check_regular(found.st_mode)  # another one may have come in its place
        if not found.st_size:
            raise StateFormatError("truncated: the file is empty")
        self._file = file
        self.size = found.st_size

    def read(self, at: int, nbytes: int) -> bytearray:
        """Return the `nbytes` bytes at offset `at`, or as many as the file has."""
        data = bytearray(max(min(nbytes, self.size - at), 0))
        self.read_to(at, memoryview(data))
        return data

    def read_to(self, at: int, to: memoryview) -> None:
        """Fill `to` with the bytes at offset `at`."""
        self._file.seek(at)
        while to:
            count = self._file.readinto(to)
            if not count:
                raise StateFormatError("became shorter while it was read")
            to = to[count:]


@contextmanager
def open_state(path: StrPath) -> Iterator[StateFile]:
    """Open a regular file, and wait for no other; errors in its content name it."""
    check_path(path)
    try:
        _check_regular(os.stat(path).st_mode)  # to open another one could wake its writer, or rewind a tape
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            yield StateFile(file)
    except StateFormatError as error:
        raise StateFormatError(f"{os.fspath(path)}: {error}") from None


def _check_regular(mode: int) -> None:
    """Raise for anything but a regular file; a folder is refused when it is opened."""
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise StateFormatError("is not a regular file")


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # else a FIFO would wait for its writer


# ---- secrets


def begin_mac(secret: Any) -> hashlib.blake2b:
    """Begin a MAC."""
    if not isinstance(secret, bytes | bytearray | memoryview):
        raise TypeError(f"secret: bytes are needed, not {type(secret).__name__}")
    if not 1 <= len(bytes(secret)) <= 64:
        raise ValueError(f"secret of {len(bytes(secret))} bytes: it must have from 1 to 64")
    return hashlib.blake2b(digest_size=MAC_BYTES, key=bytes(secret), person=b"kvcache-state-1")


# ---- writing


class Writer:
    """Writes a state, with a MAC of all bytes of the file at its end if there is a secret."""

    def __init__(self, file: BinaryIO, mac: hashlib.blake2b | None) -> None:
        self._file = file
        self._mac = mac
        self._held = b""  # 32 bytes that may be the last: they are replaced by the MAC
        self._written = self._sent = file.tell()  # bytes; sent: the system was told to write them to the disk

    def write(self, data: bytes | memoryview) -> None:
        """Write the next bytes."""
        if self._mac is None:
            self._put(data)
            return
        self._put_held()
        if len(data) == MAC_BYTES:
            self._held = bytes(data)
        else:
            self._mac.update(data)
            self._put(data)

    def finish(self) -> None:
        """Write the MAC."""
        if self._mac is not None:
            self._held = self._mac.digest()
            self._put_held()

    def _put_held(self) -> None:
        """Write the held bytes: they were not the last ones."""
        if self._held and self._mac is not None:
            self._mac.update(self._held)
            self._put(self._held)
            self._held = b""

    def _put(self, data: bytes | memoryview) -> None:
        """Write bytes to the file; tell the system to begin to write them to the disk."""
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        self._written += len(data)
        if sys.platform == "linux" and self._written - self._sent >= SENT_BYTES:
            os.posix_fadvise(self._file.fileno(), self._sent, self._written - self._sent, os.POSIX_FADV_DONTNEED)
            self._sent = self._written


def check_replaceable(path: StrPath) -> None:
    """Raise OSError if something other than a regular file is at `path`, such as a folder, a device or a FIFO."""
    check_path(path)
    _mode_of(path)


def _mode_of(path: StrPath) -> int | None:
    """Return the mode of the regular file at `path`; None if nothing is there."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EEXIST
        raise OSError(code, "is not a regular file, and is not replaced: give the name of one", os.fspath(path))
    return stat.S_IMODE(mode)


@contextmanager
def replacing(path: StrPath) -> Iterator[BinaryIO]:
    """Open a file that takes the place of another, as a whole, once all is written and on the disk.

    It gets the mode of the file that it replaces. A new file can be read by its owner only, since tokens and rows tell
    what was said.
    """
    check_path(path)
    try:
        target = _target_of(path)
        mode = _mode_of(target)
        folder, name = os.path.split(os.fsdecode(target))
        kept = os.fsencode(name)[:NAME_BYTES].decode(sys.getfilesystemencoding(), "ignore")  # may cut in a character
        temporary = os.path.join(folder, f".{kept}.{secrets.token_hex(8)}.tmp")
        with _written_whole(temporary) as file:
            if mode is not None:
                os.chmod(temporary, mode)
            yield file
            os.fsync(file.fileno())
            file.close()
            os.replace(temporary, target)
        _sync_folder(folder)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error  # which may name the temporary one


def _target_of(path: StrPath) -> StrPath:
    """Return where a link leads, so that it stays one; also if nothing is there yet."""
    try:
        return os.path.realpath(path, strict=True)
    except FileNotFoundError:
        return os.path.realpath(path)


@contextmanager
def _written_whole(path: str) -> Iterator[BinaryIO]:
    """Make a file for its owner alone, and remove it if there is an error."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with open(path, "wb", buffering=0, opener=lambda path, _: os.open(path, flags, 0o600)) as file:
        try:
            yield cast(BinaryIO, file)
        except BaseException:
            try:
                file.close()
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(path)
            raise


def _sync_folder(folder: str) -> None:
    """Put the names in a folder on the disk, if the system opens folders."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- reading


class Reader:
    """Reads bytes [begin, end) of a file, which are a state; if there is a secret, its MAC is to be right.

    `mac` has seen what is before it in the file.
    """

    def __init__(self, file: StateFile, begin: int, end: int, mac: hashlib.blake2b | None = None) -> None:
        self._file = file
        self._at, self._end = begin, end
        self._mac = mac

    def read(self, to: memoryview) -> None:
        """Read the next bytes; raise if the last ones are not the MAC."""
        self._file.read_to(self._at, to)
        self._at += len(to)
        if self._mac is None:
            return
        if self._at == self._end and not any(to):
            raise StateFormatError("has no MAC: it was saved without a secret")
        if self._at == self._end and not hmac.compare_digest(self._mac.digest(), bytes(to)):
            raise StateFormatError("its MAC is another one: it was altered, or saved with another secret")
        self._mac.update(to)
