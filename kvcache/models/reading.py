"""Open untrusted files, and limit the sizes that they may claim.

Every model file and text goes through `open_file`, which takes regular files only and maps none. So reading never waits
for a pipe or a device, and a file that shrinks while it is read is an error, not a crash. Every reader keeps the limits
below. Together they limit the cost of a refused file to 200 MB of memory and two seconds, for files of up to 10 MB and
sparse files of any size.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import ModelFileError, plain

__all__ = ["File", "Stamp", "expanded", "open_file", "read_file", "read_prompt", "read_stdin"]

# Models. The largest published models have 126 layers, 232 heads, heads of 576 elements, and queries of 73,728 elements
# per token.
MAX_LAYERS = 1 << 10
MAX_HEADS = 1 << 10
MAX_HEAD_DIM = 1 << 13
MAX_WIDTH = 1 << 18  # elements per token, over all heads
MAX_MODULES = 1 << 17  # of a model that is made to be counted: 25 s, 0.5 GiB; 61 layers of 256 experts have 63,000
MAX_CONTEXT = 1 << 30  # tokens; a window and a batch beyond it still have positions below 2^31

# JSON. An object takes about 200 bytes of memory, and at least 6 bytes of the file.
MAX_JSON = 1 << 24  # bytes; the largest weight indices have 14 MB
MAX_VALUES = 1 << 19  # values in one file; the largest weight indices name 140,000 tensors
MAX_FIELDS = 1 << 12  # entries of an object or list that is searched once per layer
MAX_NAME = 256  # characters of a field that holds a name
MAX_PARTS = 8  # depth of nested configurations; real ones nest twice

# GGUF. Real headers have a few thousand entries and tensors, and a vocabulary of at most 15 MB.
MAX_GGUF_HEADER = 1 << 26  # bytes
MAX_ENTRIES = 1 << 17  # entries of metadata; also the limit for tensors
MAX_ELEMENTS = 1 << 22  # elements of all arrays together; an array within an array counts as 64
MAX_STRING = 1 << 24  # bytes of all decoded strings together: chat templates, names
MAX_KEPT = 1 << 12  # elements of an array of numbers that is decoded; longer arrays stay in the file
MAX_ALL_KEPT = 1 << 18  # elements of all decoded arrays of numbers together
MAX_DEPTH = 4  # levels of arrays within arrays
MAX_AXES = 4  # axes of a tensor, as in ggml

# Tokenizers. The largest vocabularies have 262,144 tokens, in files of 33 MB. The package tokenizers takes 800 bytes of
# memory for an object of tokenizer.json, and 32 bytes for any other value.
MAX_TOKENIZER = 1 << 26  # bytes of tokenizer.json
MAX_OBJECTS = 1 << 16  # objects in tokenizer.json; each added token is one
MAX_LISTS = 3 << 18  # lists in tokenizer.json; each merge is one, and real files have up to 515,000
MAX_ITEMS = 3 << 19  # commas in tokenizer.json; real files have up to 1,300,000
MAX_TOKENS = 1 << 19  # tokens of a vocabulary
MAX_ADDED = 1 << 14  # control and user-defined tokens; real files have up to 6,000
MAX_TOKEN = 1 << 10  # characters of a token; the longest real tokens are runs of spaces
MAX_CUTS = 1 << 22  # characters of all tokens, where merges are derived from them; real files have up to 2,000,000
MAX_MERGES = 16  # merges per token; real files have up to 3

MAX_PROMPT = 1 << 26  # bytes of a prompt that is read from a file

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://", re.ASCII | re.IGNORECASE)
HUB = re.compile(r"https?://(?:huggingface\.co|hf\.co)/([\w.-]+/([\w.-]+))", re.ASCII)  # a model's page

Stamp: TypeAlias = tuple[int, int, int, int]  # identifies a file's content: device, inode, bytes, time of change


class File:
    """An open regular file, for one thread; its `descriptor` it does not close, and `path` is for messages."""

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
        """Return the `nbytes` bytes at offset `at`; raise `ModelFileError` if the file has fewer."""
        self._seek(at, nbytes)
        data = os.read(self._descriptor, nbytes)
        if len(data) < nbytes:
            raise self.error("became shorter while it was read")
        return data

    def read_array(self, at: int, nbytes: int) -> NDArray[np.uint8]:
        """Return the `nbytes` bytes at offset `at` as a new array; raise `ModelFileError` if the file has fewer."""
        self._seek(at, nbytes)
        data = np.empty(nbytes, np.uint8)
        view, done = data.data, 0
        with open(self._descriptor, "rb", buffering=0, closefd=False) as file:
            while done < nbytes:
                count = file.readinto(view[done : done + (1 << 30)])
                if not count:
                    raise self.error("became shorter while it was read")
                done += count
        return data

    def _seek(self, at: int, nbytes: int) -> None:
        if at + nbytes > self.size:
            raise self.error(f"ends at byte {self.size:,}, and {nbytes:,} bytes should follow byte {at:,}")
        os.lseek(self._descriptor, at, os.SEEK_SET)


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path whose ``~`` is the user's folder; raise `ModelFileError` for an address on the web."""
    name = os.path.expanduser(path)
    if ADDRESS.match(name) is None:
        return Path(name)
    on_hub = HUB.match(name)
    how = f": run `hf download {on_hub[1]} --local-dir {on_hub[2]}` and give that folder" if on_hub else ""
    raise ModelFileError(f"{plain(name)} is an address, and a file or folder of this machine is needed{how}")


@contextmanager
def open_file(path: str | os.PathLike[str], stamp: Stamp | None = None) -> Iterator[File]:
    """Open a regular file for reading; refuse pipes and devices at once.

    Raise `ModelFileError` if it does not exist, is something else, may not be read, or has changed since an earlier
    opening whose `File.stamp` is given.
    """
    path = Path(path)
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_BINARY"))
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        is_part = path.suffix in (".json", ".safetensors") and path.parent.name and os.path.isdir(path.parent)
        sentence = f"{plain(path.parent)} has no {plain(path.name)}" if is_part else f"there is no {plain(path)}"
        raise ModelFileError(sentence) from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
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
    """Return the content of a file; raise `ModelFileError` if it has more than `most` bytes.

    The error's message calls the file `what`.
    """
    with open_file(path) as file:
        if file.size > most:
            raise file.error(f"is larger than the {most >> 20} MiB that {what} may have")
        return file.read(0, file.size)


def read_prompt(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a prompt file; ``/dev/stdin`` may be a pipe or a terminal."""
    if os.fspath(path) == "/dev/stdin":
        return read_stdin()
    return read_file(path, MAX_PROMPT, "a prompt")


def read_stdin() -> bytes:
    """Return all of standard input; raise `ModelFileError` if it is closed, or has more than `MAX_PROMPT` bytes."""
    if sys.stdin is None:
        raise ModelFileError("standard input is closed: give the prompt as an argument, or as a file")
    try:
        data = sys.stdin.buffer.read(MAX_PROMPT + 1)
    except OSError as error:  # a folder, for example
        raise ModelFileError(f"standard input cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_PROMPT:
        raise ModelFileError(f"standard input gives more than the {MAX_PROMPT >> 20} MiB that a prompt may have")
    return data
