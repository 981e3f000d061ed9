"""The header of a GGUF file: its metadata, as the file has it, and the places of its tensors.

`kvcache.models.gguf_models` gives the metadata Hugging Face's names, and `kvcache.models.shapes` derives the layers'
shapes.

Reading trusts no file. Every count and length is checked before anything is allocated or looped over: against the rest
of the file, and against the limits of `kvcache.models.reading`. The arrays of a vocabulary are skipped, not decoded, so
that a large one costs little; `read_array` decodes one. The file is not mapped, so a file that is cut while it is read
raises an error. Tensors are located, not read. Versions 2 and 3 are supported, little-endian; the format is described
at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

>>> import struct, tempfile
>>> name = b"general.architecture"
>>> data = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)  # version, tensors, entries of metadata
>>> data += struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, 5) + b"llama"  # 8: a string
>>> with tempfile.NamedTemporaryFile() as file:
...     _ = file.write(data), file.flush()
...     read_header(file.name).metadata
{'general.architecture': 'llama'}
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from kvcache.errors import ModelFileError, plain, shown
from kvcache.models import reading
from kvcache.models.reading import File, Stamp, open_file

CHUNK = 1 << 16  # bytes of the first read; each later one doubles the bytes in memory
NESTED = 64  # elements that an array within an array counts as, because Python loops over such arrays

# GGUF's number of a type: this module's name, struct's format
NUMBERS = {
    0: ("u8", "B"), 1: ("i8", "b"), 2: ("u16", "H"), 3: ("i16", "h"), 4: ("u32", "I"), 5: ("i32", "i"),
    6: ("f32", "f"), 7: ("bool", "B"), 10: ("u64", "Q"), 11: ("i64", "q"), 12: ("f64", "d"),
}  # fmt: skip
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")  # a string's length, which precedes its bytes
TYPE_NAMES = {number: name for number, (name, _) in NUMBERS.items()} | {STRING: "str", ARRAY: "array"}
TYPE_NUMBERS = {name: number for number, name in TYPE_NAMES.items()}

# ggml's number of a type: name, elements per block, bytes per block
TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Skipped:
    """An array that stays in the file until `read_array` reads it."""

    type: str  # the elements' type: "str", "f32", "i32", ..., "array"
    count: int
    offset: int  # bytes from the beginning of the file to the first element


@dataclass(frozen=True, slots=True)
class Tensor:
    """The place and type of a tensor's data."""

    name: str
    shape: tuple[int, ...]  # outermost axis first, as in NumPy: the reverse of GGUF's order
    type: str | int  # "F32", "F16", "BF16", "Q8_0", "Q4_0", ...; or the number of an unknown type
    offset: int  # bytes from the beginning of the file
    nbytes: int | None  # None: the type is unknown


@dataclass(frozen=True)
class Header:
    """The part of a file before the tensors' data."""

    path: Path
    version: int
    metadata: dict[str, Any]  # numbers and strings; short arrays of numbers as tuples, other arrays as `Skipped`
    tensors: dict[str, Tensor]
    stamp: Stamp  # identifies the file's content


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a GGUF file; each tensor of a known type lies within the file, and no two overlap.

    Raise `ModelFileError` if it is missing, no GGUF, damaged, cut short, big-endian, or of an unsupported version.
    """
    with _open(path) as source:
        version, num_tensors, num_entries = source.beginning()
        metadata = dict(source.entries(num_entries))
        if len(metadata) < num_entries:
            raise source.error("a key of the metadata is there twice")
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment.bit_count() != 1:
            raise source.error(f"general.alignment must be a power of two, not {shown(alignment)}")
        tensors = source.tensors(num_tensors, alignment)
        return Header(source.path, version, metadata, tensors, source.file.stamp)


def read_array(header: Header, key: str) -> tuple[Any, ...]:
    """Read an array of strings or numbers of the metadata, from the header or, if it was skipped, from the file.

    Raise `ModelFileError` if the entry is no such array, a string is not UTF-8, or the file has changed.
    """
    value = header.metadata[key]
    if isinstance(value, tuple):
        return value
    if not isinstance(value, Skipped) or value.type == "array":
        raise ModelFileError(f"{plain(header.path)}: {plain(key)} is not an array of strings or numbers")
    with _open(header.path, header.stamp, value.offset) as source:
        if value.type != "str":
            return source.numbers(TYPE_NUMBERS[value.type], value.count)
        return source.strings(key, value.count)


def read_floats(header: Header, name: str) -> tuple[float, ...]:
    """Read a short F32 tensor of one axis, such as the factors of a rotation.

    Raise `ModelFileError` if the tensor is another one, has more than 4,096 elements, or the file has changed.
    """
    tensor = header.tensors[name]
    if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > reading.MAX_KEPT:
        raise ModelFileError(
            f"{plain(header.path)}: tensor {plain(name)} must be at most {reading.MAX_KEPT:,} numbers of F32, not "
            f"{list(tensor.shape)} of {tensor.type}"
        )
    with _open(header.path, header.stamp, tensor.offset) as source:
        return source.numbers(TYPE_NUMBERS["f32"], tensor.shape[0])


@contextmanager
def _open(path: str | os.PathLike[str], stamp: Stamp | None = None, at: int = 0) -> Iterator[_Source]:
    with open_file(path, stamp) as file:
        if not file.size:
            raise file.error("is empty")
        yield _Source(file, at)


class _Source:
    """A file that is read in growing pieces as decoding needs them, and the offset that decoding has reached."""

    def __init__(self, file: File, at: int) -> None:
        self.file, self.path, self.size = file, file.path, file.size
        self.base, self.at = at, at  # offsets in the file: where `data` begins, and the next byte to decode
        self.data = bytearray()
        # Counts that are checked against limits: elements decoded or passed over one by one, elements of arrays that
        # are kept in memory, bytes of strings.
        self.elements = self.kept = self.string_bytes = 0

    def error(self, what: str) -> ModelFileError:
        return ModelFileError(f"{plain(self.path)}: {what}")

    def grow(self) -> bool:
        """Read more of the file; return whether there was more."""
        begin = self.base + len(self.data)
        count = min(max(CHUNK, len(self.data)), self.size - begin)
        if count > 0 and len(self.data) + count > reading.MAX_GGUF_HEADER:
            raise self.error(f"its header is longer than the {reading.MAX_GGUF_HEADER >> 20} MiB that one may have")
        self.data += self.file.read(begin, max(count, 0))
        return count > 0

    def take(self, count: int, nbytes: int, what: str) -> int:
        """Read `count` items of `nbytes` bytes each, and advance; return where they begin in `data`."""
        self.expect(count, nbytes, what)
        begin = self.at - self.base
        while len(self.data) < begin + count * nbytes:
            self.grow()
        self.at += count * nbytes
        return begin

    def expect(self, count: int, nbytes: int, what: str) -> None:
        """Refuse a count of items, each of at least `nbytes` bytes, that cannot fit in the rest of the file."""
        left = self.size - self.at
        if count * nbytes > left:
            raise self.error(f"{count:,} {what} should follow byte {self.at:,}, and only {max(left, 0):,} bytes do")

    def count_elements(self, count: int) -> None:
        """Count elements that are walked, and refuse more than the limit."""
        self.elements += count
        if self.elements > reading.MAX_ELEMENTS:
            raise self.error(f"its arrays have more than {reading.MAX_ELEMENTS:,} elements")

    # --- numbers and strings -------------------------------------------------------------------------------------

    def numbers(self, number: int, count: int) -> tuple[Any, ...]:
        """Decode `count` numbers of the type with GGUF's number `number`; a bool is a number here."""
        name, letter = NUMBERS[number]
        packed = struct.calcsize(f"<{letter}")
        self.count_elements(count)
        begin = self.take(count, packed, f"elements of {packed} bytes")
        values = struct.unpack_from(f"<{count}{letter}", self.data, begin)
        if name == "bool":
            if values and max(values) > 1:
                raise self.error(f"a byte after {self.at - count:,} is neither true nor false but {max(values)}")
            values = tuple(map(bool, values))
        return values

    def u32(self) -> int:
        return int(self._one("<I", 4))

    def u64(self) -> int:
        return int(self._one("<Q", 8))

    def _one(self, layout: str, nbytes: int) -> Any:
        return struct.unpack_from(layout, self.data, self.take(1, nbytes, f"number of {nbytes} bytes"))[0]

    def string(self, what: str) -> str:
        """Decode a string, which errors call `what`."""
        length = self.u64()
        if length > reading.MAX_STRING:
            raise self.error(
                f"{what} is said to have {length:,} bytes; {reading.MAX_STRING:,} are the most that are read"
            )
        self.expect(length, 1, f"bytes of {what}")
        self.string_bytes += length
        if self.string_bytes > reading.MAX_STRING:
            raise self.error(f"its names and strings have more than {reading.MAX_STRING:,} bytes")
        begin = self.take(length, 1, f"bytes of {what}")
        try:
            return self.data[begin : begin + length].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error.reason} at byte {error.start:,} of it") from None

    # --- the parts of a header -----------------------------------------------------------------------------------

    def beginning(self) -> tuple[int, int, int]:
        """Decode the version, the number of tensors and the number of metadata entries."""
        self.grow()
        if self.data[:4] != b"GGUF":
            is_of_folder = self.path.suffix in (".json", ".safetensors")
            advice = f"; give the folder that it is in, {plain(self.path.parent)}" if is_of_folder else ""
            raise self.error(f"it is no GGUF file: it begins with {bytes(self.data[:4])!r}{advice}")
        self.at = 4
        version = self.u32()
        if version and not version & 0xFFFF:
            raise self.error("it is big-endian, and only little-endian files are read")
        if version not in (2, 3):
            raise self.error(f"GGUF version {version} is not read, only 2 and 3 are")
        num_tensors, num_entries = self.u64(), self.u64()
        for count, nbytes, what in ((num_entries, 13, "entries of metadata"), (num_tensors, 24, "tensors")):
            self.expect(count, nbytes, what)
            if count > reading.MAX_ENTRIES:
                raise self.error(f"it has {count:,} {what}; {reading.MAX_ENTRIES:,} are the most that are read")
        return version, num_tensors, num_entries

    def entries(self, count: int) -> Iterator[tuple[str, Any]]:
        """Decode the entries of the metadata: keys and values."""
        for i in range(count):
            key = self.string(f"key {i:,}")
            yield key, self._value(key, self._type(key))

    def _type(self, key: str) -> int:
        """Decode GGUF's number of a type."""
        number = self.u32()
        if number not in TYPE_NAMES:
            raise self.error(f"{shown(key)} has the type {number}, which there is not")
        return number

    def _value(self, key: str, number: int) -> Any:
        """Decode a value of the type with this number; pass over an array of strings, or a long one."""
        if number == STRING:
            return self.string(f"the value of {shown(key)}")
        if number != ARRAY:
            return self.numbers(number, 1)[0]
        number, count = self._type(key), self.u64()
        if number in NUMBERS and count <= reading.MAX_KEPT:
            self.kept += count
            if self.kept > reading.MAX_ALL_KEPT:
                raise self.error(f"its short arrays have more than {reading.MAX_ALL_KEPT:,} elements")
            return self.numbers(number, count)
        skipped = Skipped(TYPE_NAMES[number], count, self.at)
        self._skip(key, number, count, 1)
        return skipped

    def _skip(self, key: str, number: int, count: int, depth: int) -> None:
        """Pass over the `count` elements of an array, which is within `depth` - 1 others."""
        if number in NUMBERS:
            packed = struct.calcsize(f"<{NUMBERS[number][1]}")
            self.expect(count, packed, f"elements of {packed} bytes")
            self.at += count * packed
        elif number == STRING:
            self._skip_strings(key, count)
        elif depth == reading.MAX_DEPTH:
            raise self.error(f"{shown(key)} nests arrays deeper than {reading.MAX_DEPTH} levels")
        else:
            self.expect(count, 12, "arrays")
            self.count_elements(count * NESTED)
            for _ in range(count):
                self._skip(key, self._type(key), self.u64(), depth + 1)

    def _skip_strings(self, key: str, count: int) -> None:
        """Pass over strings: only their lengths are decoded."""
        self.expect(count, 8, "strings")
        self.count_elements(count)
        at, last, data, unpack = self.at - self.base, len(self.data) - 8, self.data, LENGTH.unpack_from
        for _ in repeat(None, count):  # keep each step short: a vocabulary has hundreds of thousands
            if at > last:
                last = self._reach(at + 8, key) - 8
            (length,) = unpack(data, at)
            at += length + 8
        self._reach(at, key)
        self.at = self.base + at

    def _reach(self, end: int, key: str) -> int:
        """Read an array's strings until `data` has `end` bytes; return how many it has."""
        while len(self.data) < end:
            if not self.grow():
                raise self.error(f"the strings of {shown(key)} go past the end of the file")
        return len(self.data)

    def strings(self, key: str, count: int) -> tuple[str, ...]:
        """Decode the strings of an array."""
        at, unpack = self.at - self.base, LENGTH.unpack_from
        self._skip_strings(key, count)
        data = self.data
        found = []
        try:
            for _ in range(count):
                end = at + 8 + unpack(data, at)[0]
                found.append(data[at + 8 : end].decode())
                at = end
        except UnicodeDecodeError as error:
            raise self.error(f"string {len(found):,} of {shown(key)} is not UTF-8: {error.reason}") from None
        return tuple(found)

    # --- tensors -------------------------------------------------------------------------------------------------

    def tensors(self, count: int, alignment: int) -> dict[str, Tensor]:
        """Decode the places of tensors, and check that they lie in the file and do not overlap."""
        found = [self._tensor(i) for i in range(count)]
        base = -(-self.at // alignment) * alignment
        tensors = {}
        for name, shape, number, relative in found:
            if relative % alignment:
                raise self.error(f"tensor {shown(name)} begins at {relative:,}, no multiple of {alignment:,}")
            known, nbytes = self._stored(name, shape, number)
            offset = base + relative
            if offset + (nbytes or 0) > self.size:
                raise self.error(f"tensor {shown(name)} of shape {list(shape)} goes past the end of the file")
            tensors[name] = Tensor(name, shape, known, offset, nbytes)
        if len(tensors) < count:
            raise self.error("a tensor is there twice")
        end = 0
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.nbytes and tensor.offset < end:
                raise self.error(f"tensor {shown(tensor.name)} begins within another")
            end = max(end, tensor.offset + (tensor.nbytes or 0))
        return tensors

    def _tensor(self, i: int) -> tuple[str, tuple[int, ...], int, int]:
        """Decode a tensor's name, shape, type, and offset from the first tensor's data."""
        name = self.string(f"the name of tensor {i:,}")
        axes = self.u32()
        if axes > reading.MAX_AXES:
            raise self.error(f"tensor {shown(name)} has {axes:,} axes; {reading.MAX_AXES} are the most there can be")
        shape = tuple(self.u64() for _ in range(axes))[::-1]
        if math.prod(shape) >= 2**63:
            raise self.error(f"tensor {shown(name)} cannot have the shape {list(shape)}")
        return name, shape, self.u32(), self.u64()

    def _stored(self, name: str, shape: tuple[int, ...], number: int) -> tuple[str | int, int | None]:
        """Return the name of a tensor's type and the tensor's bytes; the number and None for an unknown type."""
        if number not in TENSOR_TYPES:
            return number, None
        known, elements, nbytes = TENSOR_TYPES[number]
        row = shape[-1] if shape else 1
        if row % elements:
            raise self.error(f"tensor {shown(name)} has rows of {row:,} elements; {known} stores {elements} at a time")
        return known, math.prod(shape) // elements * nbytes
