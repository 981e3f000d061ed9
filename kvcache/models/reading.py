"""Opens untrusted files, and bounds what they may say.

Everything that is read of a model or a text goes through `open_file`, which takes regular files only, whole ones: no
pipe or device that would be waited for, no memory that is mapped and may be gone when it is looked at. The limits are
those of every reader. Together they keep a file that is refused, of up to 10 MB or a sparse one of any size, below
200 MB of memory and two seconds.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import ModelFileError, plain

__all__ = ["File", "Stamp", "open_file", "read_file", "read_prompt"]

# What a model can be. The largest of those published have 126 layers, 232 heads, heads of 576 elements, and queries of
# 73,728 elements a token.
MAX_LAYERS = 1 << 10
MAX_HEADS = 1 << 10
MAX_HEAD_DIM = 1 << 13
MAX_WIDTH = 1 << 18  # elements of all heads of a token
MAX_CONTEXT = 1 << 30  # tokens; a window and a batch beside it still have positions

# JSON. An object takes some 200 bytes of memory, and 6 or more of the file.
MAX_JSON = 1 << 24  # bytes; the largest indices of weights have 14 MB
MAX_VALUES = 1 << 19  # the largest have 140,000 tensors
MAX_FIELDS = 1 << 12  # entries of an object or a list that is searched, which happens once for each layer
MAX_NAME = 256  # characters of a field that is a name
MAX_PARTS = 8  # depth of configurations within configurations; real ones nest twice

# GGUF. A header has some thousand entries and tensors, and a vocabulary of 15 MB at most.
MAX_GGUF_HEADER = 1 << 26  # bytes
MAX_ENTRIES = 1 << 17  # entries of metadata, and as many tensors
MAX_ELEMENTS = 1 << 22  # elements of all arrays that are walked over; an array in an array counts as 64
MAX_STRING = 1 << 24  # bytes of all strings that are kept: chat templates, names
MAX_KEPT = 1 << 12  # elements of an array of numbers that is kept; longer ones are left in the file
MAX_ALL_KEPT = 1 << 18  # and of all of these
MAX_DEPTH = 4  # of arrays in arrays
MAX_AXES = 4  # of a tensor, as in ggml

# Tokenizers. The largest vocabularies have 262,144 tokens, and files of 33 MB.
# The package takes 800 bytes of memory for an object of tokenizer.json, and 32 for any other value.
MAX_TOKENIZER = 1 << 26  # bytes of tokenizer.json
MAX_OBJECTS = 1 << 16  # of it; each token that is added is one
MAX_LISTS = 3 << 18  # of it; each merge is one, and the most in real files are 515,000
MAX_ITEMS = 3 << 19  # commas of it; the most in real files are 1,300,000
MAX_TOKENS = 1 << 19
MAX_ADDED = 1 << 14  # control tokens and a user's; the most in real files are 6,000
MAX_TOKEN = 1 << 10  # characters; the longest are rows of spaces
MAX_CUTS = 1 << 22  # characters of all, where it must be looked for pairs; the most in real files are 2,000,000
MAX_MERGES = 16  # for each token; the most in real files are 3

MAX_PROMPT = 1 << 26  # bytes of a text that is read from a file

Stamp: TypeAlias = tuple[int, int, int, int]  # of a file as it is: device, inode, bytes, time of the last change


class File:
    """A regular file that is open.

    Parameters
    ----------
    path : Path
        What messages call it.
    descriptor : int
        Of the open file; whoever opened it closes it.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise self.error("is not a file")
        self.size = found.st_size
        self.stamp: Stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def error(self, what: str) -> ModelFileError:
        """Return an error whose sentence begins with the file's name."""
        return ModelFileError(f"{plain(self.path)} {what}")

    def read(self, at: int, nbytes: int) -> bytes:
        """Return so many bytes; an error if they are not there, or no longer."""
        self._seek(at, nbytes)
        data = os.read(self._descriptor, nbytes)
        if len(data) < nbytes:
            raise self.error("became shorter while it was read")
        return data

    def read_array(self, at: int, nbytes: int) -> NDArray[np.uint8]:
        """Return so many bytes as an array of one's own; an error if they are not there, or no longer."""
        self._seek(at, nbytes)
        data = np.empty(nbytes, np.uint8)
        view, done = data.data, 0
        while done < nbytes:
            count = os.readv(self._descriptor, [view[done : done + (1 << 30)]])
            if not count:
                raise self.error("became shorter while it was read")
            done += count
        return data

    def _seek(self, at: int, nbytes: int) -> None:
        if at + nbytes > self.size:
            raise self.error(f"ends at byte {self.size:,}, and {nbytes:,} bytes should follow byte {at:,}")
        os.lseek(self._descriptor, at, os.SEEK_SET)


@contextmanager
def open_file(path: str | os.PathLike[str], stamp: Stamp | None = None) -> Iterator[File]:
    """Open a regular file for reading; nothing else is waited for.

    Parameters
    ----------
    path : str or path-like
        The file.
    stamp : tuple, optional
        `File.stamp` from when it was open before: it must be the same file still.

    Raises
    ------
    ModelFileError
        There is no such file, it is a folder, a pipe or a device, it may not be read, or it was changed.
    """
    path = Path(path)
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC"))
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        is_part = path.suffix in (".json", ".safetensors") and os.path.isdir(path.parent)
        sentence = f"{plain(path.parent)} has no {plain(path.name)}" if is_part else f"there is no {plain(path)}"
        raise ModelFileError(sentence) from None
    except (OSError, ValueError) as error:  # the latter: a zero byte in its name
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelFileError(f"{plain(path)} cannot be read: {reason}") from None
    try:
        file = File(path, descriptor)
        if stamp is not None and stamp != file.stamp:
            raise file.error("was changed while it was read")
        yield file
    except OSError as error:
        raise ModelFileError(f"{plain(path)} cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)


def read_file(path: str | os.PathLike[str], most: int, what: str) -> bytes:
    """Return all that a file holds; an error if it is larger than what it is called may be."""
    with open_file(path) as file:
        if file.size > most:
            raise file.error(f"is larger than the {most >> 20} MiB that {what} may have")
        return file.read(0, file.size)


def read_prompt(path: str | os.PathLike[str]) -> bytes:
    """Return the text that a file holds; what comes through standard input may be a pipe or a terminal."""
    if os.fspath(path) != "/dev/stdin":
        return read_file(path, MAX_PROMPT, "a prompt")
    data = sys.stdin.buffer.read(MAX_PROMPT + 1)
    if len(data) > MAX_PROMPT:
        raise ModelFileError(f"standard input gives more than the {MAX_PROMPT >> 20} MiB that a prompt may have")
    return data
