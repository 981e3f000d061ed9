"""Open untrusted files, check their fields, and limit the sizes that they may claim.

Every model file and text goes through `open_file`, which takes regular files only and maps none. So reading never waits
for a pipe or a device, and a file that shrinks while it is read is an error, not a crash. Every reader keeps the limits
below. Together they limit the cost of a refused file to 200 MB of memory and two seconds, for files of up to 10 MB and
sparse files of any size.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.arguments import INT32_MAX
from kvcache.errors import ModelFileError, NotSupportedError, plain, shown

# Models. The largest published models have 126 layers, 232 heads, heads of 576 elements, and queries of 73,728 elements
# per token.
MAX_LAYERS = 1 << 10
MAX_HEADS = 1 << 10
MAX_HEAD_DIM = 1 << 13
MAX_WIDTH = 1 << 18  # elements per token, over all heads
MAX_MODULES = 1 << 17  # of a model that is made to be counted: 25 s, 0.5 GiB; 61 layers of 256 experts have 63,000
MAX_CONTEXT = 1 << 30  # tokens; a window and a batch beyond it still have positions below 2^31

# The most that a field may hold, by its name or by GGUF's key; other whole numbers may go up to 2^31 - 1.
MOST = {
    **dict.fromkeys((
        "H_cycles", "L_cycles", "block_count", "decoder_block_count", "full_attention_interval",
        "global_attn_every_n_layers", "layer_group_size", "num_hidden_layers", "num_layers",
        "prefix_dense_sliding_window_pattern", "sliding_window_pattern",
    ), MAX_LAYERS),
    **dict.fromkeys((
        "attention.head_count", "attention.head_count_kv", "cross_num_attention_heads", "cross_num_key_value_heads",
        "index_n_heads", "indexer_n_heads", "num_attention_heads", "num_experts_per_tok", "num_key_value_heads",
        "sparse_num_index_heads",
    ), MAX_HEADS),
    **dict.fromkeys((
        "attention.key_length", "attention.key_length_swa", "attention.kv_lora_rank", "attention.kv_lora_rank_swa",
        "attention.value_length", "attention.value_length_swa", "cross_head_dim", "head_dim", "index_head_dim",
        "indexer_head_dim", "kv_lora_rank", "qk_rope_head_dim", "rope.dimension_count", "rope.dimension_count_swa",
        "sparse_index_dim", "v_head_dim",
    ), MAX_HEAD_DIM),
    **dict.fromkeys(("context_length", "max_position_embeddings"), MAX_CONTEXT),
}  # fmt: skip

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

INDEX = "model.safetensors.index.json"  # names the file of each tensor, where weights are split into several files

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


def find_config(source: str | os.PathLike[str]) -> Path:
    """Return the file that a path stands for: a folder's ``config.json``, the one beside safetensors, or itself.

    A folder without one may have the ``params.json`` of Meta's and Mistral's own format.
    """
    path = expanded(source)
    if path.suffix == ".safetensors":
        path = path.parent
    if not os.path.isdir(path):
        return path
    config, original = path / "config.json", path / "params.json"
    return original if os.path.isfile(original) and not os.path.lexists(config) else config


def is_gguf(path: Path) -> bool:
    """Whether a file begins with GGUF's magic bytes, or has its suffix."""
    with open_file(path) as file:
        return file.read(0, min(4, file.size)) == b"GGUF" or path.suffix == ".gguf"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file; raise `ModelFileError` if it is missing, too large, no JSON, or holds no object."""
    return _parse(read_file(path, MAX_JSON, "a configuration"), path)


def read_safetensors_header(file: File) -> tuple[dict[str, Any], int]:
    """Read a safetensors file's header: an entry for each tensor, and the offset at which the tensors' data begins.

    Raise `ModelFileError` if it is no safetensors file, or its header is larger than any real one.
    """
    length = int.from_bytes(file.read(0, min(8, file.size)), "little")
    if file.size < 8 or not length or length > min(MAX_JSON, file.size - 8):
        raise file.error(f"is not a whole safetensors file: its header should have {length:,} bytes")
    entries = _parse(file.read(8, length), file.path)
    entries.pop("__metadata__", None)
    return entries, 8 + length


def find_weights(folder: Path, tensors: Iterable[str] | None = None) -> list[Path | None]:
    """Find a folder's safetensors files, or only the files that hold `tensors`.

    None in the result stands for a file name of the index that leaves the folder.
    """
    index = folder / INDEX
    if not os.path.lexists(index):
        return [folder / "model.safetensors"]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        return [None]
    given = names.values() if tensors is None else map(names.get, tensors)
    found = dict.fromkeys(name if isinstance(name, str) and _is_in_folder(name) else None for name in given)
    if len(found) > MAX_FIELDS:
        raise ModelFileError(f"{plain(index)}: weight_map names {len(found):,} files; {MAX_FIELDS:,} are the most")
    return [None if name is None else folder / name for name in found]


def _is_in_folder(name: str) -> bool:
    """Whether a file name has no part that could lead out of the folder."""
    return name not in ("", ".", "..") and not {"/", os.sep, "\0"} & {*name}


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    """Decode a JSON object; refuse one of too many values before it takes memory."""
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ModelFileError(f"{plain(path)} holds more than {MAX_VALUES:,} values, the most that are read")
    try:
        values = json.loads(data)
    except ValueError as error:
        raise ModelFileError(f"{plain(path)} is not JSON: {error}") from None
    except RecursionError:
        raise ModelFileError(f"{plain(path)} is not a configuration: its values are nested too deeply") from None
    if not isinstance(values, dict):
        raise ModelFileError(f"{plain(path)} must hold a JSON object, not {shown(values)}")
    return values


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


def is_positive(value: Any) -> bool:
    """Whether a value is a number above 0 that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


class Fields:
    """The fields of a configuration, each checked as it is read; `source` names the file or argument in messages."""

    def __init__(self, values: Mapping[str, Any], source: str, used: set[str] | None = None) -> None:
        self.values = values
        self.source = source
        self.used = set[str]() if used is None else used
        if len(values) > MAX_FIELDS:
            raise self.error(f"it has {len(values):,} fields; {MAX_FIELDS:,} are the most that are read")

    def error(self, what: str) -> ModelFileError:
        """Return an error whose sentence begins with the source."""
        return ModelFileError(f"{self.source}: {what}")

    def unsupported(self, what: str) -> NotSupportedError:
        """Return an error for a model that is refused, whose sentence begins with the source."""
        return NotSupportedError(f"{self.source}: {what}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field unchecked, and note in `used` that it was asked for; null counts as absent."""
        self.used.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def _needed(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise self.error(f"there is no field {name!r}")
        return value

    def count(self, name: str, default: int | None = None, *, least: int = 1, most: int | None = None) -> int:
        """Return a field that holds a whole number, from `least` to `most`, by default the limit in `MOST`."""
        value, most = self._needed(name, default), MOST.get(name, INT32_MAX) if most is None else most
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(f"{name} must be a whole number from {least} to {most}, not {shown(value)}")
        return value

    def counts(self, name: str, length: int, default: int | None = None, *, least: int = 1) -> list[int]:
        """Return a whole number for each layer, of a field that holds one number for all, or a list."""
        if not isinstance(self.get(name), list | tuple):
            return [self.count(name, default, least=least)] * length
        listed = self.sequence(name, length) or []
        each = [Fields({name: value}, f"{self.source}, layer {i}") for i, value in enumerate(listed)]
        return [fields.count(name, least=least) for fields in each]

    def positive(self, name: str, default: float | None = None, most: float = sys.float_info.max) -> float:
        """Return a field that holds a number above 0."""
        value = self._needed(name, default)
        if not is_positive(value) or value > most:
            limit = "" if most == sys.float_info.max else f" of at most {most:g}"
            raise self.error(f"{name} must be a positive number{limit}, not {shown(value)}")
        return float(value)

    def expect(self, name: str, supported: str | bool) -> None:
        """Refuse a field that is present with another value."""
        value = self.get(name, supported)
        if value != supported:
            raise self.error(f"{name} {shown(value)} is not supported, only {supported!r} is")

    def text(self, name: str, default: str | None = None) -> str:
        """Return a field that holds a string."""
        value = self._needed(name, default)
        if not isinstance(value, str) or len(value) > MAX_NAME:
            raise self.error(f"{name} must be a string of at most {MAX_NAME} characters, not {shown(value)}")
        return value

    def part(self, name: str) -> Fields | None:
        """Return a field that holds an object, as `Fields`."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{name} must be an object, not {shown(value)}")
        return Fields(value, f"{self.source}, {name}")

    def sequence(self, name: str, length: int | None = None) -> list[Any] | None:
        """Return a field that holds a list; with `length`, its first `length` entries, or raise if it has fewer."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self.error(f"{name} must be a list, not {shown(value)}")
        if len(value) > MAX_FIELDS:
            raise self.error(f"{name} has {len(value):,} entries; {MAX_FIELDS:,} are the most that are read")
        if length is not None and len(value) < length:
            raise self.error(f"{name} must have one entry for each of the {length} layers, not {len(value)}")
        return list(value[:length])
