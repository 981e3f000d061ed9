"""The header of GGUF files: against the gguf package, and files that are cut, flipped and made to harm."""

import contextlib
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import gguf_files
from support.hostile import tensor, text

from kvcache import ModelFileError
from kvcache.models import gguf

METADATA: dict[str, tuple[str, Any]] = {  # key: what the writer calls its type, value
    "a.u8": ("uint8", 255),
    "a.i8": ("int8", -128),
    "a.u16": ("uint16", 65535),
    "a.i16": ("int16", -32768),
    "a.u32": ("uint32", 2**32 - 1),
    "a.i32": ("int32", -(2**31)),
    "a.u64": ("uint64", 2**64 - 1),
    "a.i64": ("int64", -(2**63)),
    "a.f32": ("float32", 0.5),
    "a.f64": ("float64", 0.1),
    "a.yes": ("bool", True),
    "a.no": ("bool", False),
    "a.text": ("string", "größer als 2¹⁶ \x1b[2J"),
    "a.ints": ("array", [1, -2, 3]),
    "a.floats": ("array", [0.25, -1.5]),
    "a.flags": ("array", [True, False, True]),
    "a.strings": ("array", ["a", "bb", "Ġccc", "é", "a string longer than others"]),
    "a.many": ("array", list(range(5000))),
}
SKIPPED = {"a.strings", "a.many"}
TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {
    "token_embd.weight": ("Q8_0", (10, 64)),
    "blk.0.attn_q.weight": ("Q4_0", (64, 96)),
    "blk.0.attn_norm.weight": ("F32", (64,)),
    "blk.0.ffn_up.weight": ("BF16", (7, 33)),
    "blk.0.ffn_gate_exps.weight": ("F16", (2, 3, 5)),
    "counts": ("I32", (2, 2, 3, 4)),
}


def write(path: Path, architecture: str = "llama", alignment: int | None = None) -> Path:
    """A file of everything, by the gguf package."""
    writer = reference.GGUFWriter(path, architecture)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, (kind, value) in METADATA.items():
        getattr(writer, f"add_{kind}")(key, value)
    rng = np.random.default_rng(1)
    for name, (kind, shape) in TENSORS.items():
        if kind == "I32":
            writer.add_tensor(name, rng.integers(0, 99, shape, np.int32))
            continue
        number = reference.GGMLQuantizationType[kind]
        data = reference.quants.quantize(rng.standard_normal(shape, np.float32), number)
        writer.add_tensor(name, data, raw_dtype=number)
    gguf_files.finish(writer)
    return path


def entry(key: bytes, number: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", number) + value


def array(number: int, count: int, elements: bytes = b"") -> bytes:
    return struct.pack("<IQ", number, count) + elements


def header(
    *parts: bytes, tensors: int = 0, entries: int = 0, version: int = 3, magic: bytes = b"GGUF", data: int = 0
) -> bytes:
    head = struct.pack("<4sIQQ", magic, version, tensors, entries) + b"".join(parts)
    return head + bytes(-len(head) % 32 + data) if data else head


# --- against the gguf package ------------------------------------------------------------------------------------


def test_a_few_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    found, data = gguf.read_header(path), path.read_bytes()
    name = "blk.0.attn_norm.weight"
    assert gguf.read_floats(found, name) == struct.unpack_from("<64f", data, found.tensors[name].offset)
    for other in ("blk.0.ffn_up.weight", "counts"):
        with pytest.raises(ModelFileError, match=f"tensor {other} must be at most 4,096 numbers of F32, not "):
            gguf.read_floats(found, other)
    path.write_bytes(data[:1000])
    with pytest.raises(ModelFileError, match="was changed while it was read"):
        gguf.read_floats(found, name)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("alignment", [None, 32, 64, 4096])
def test_everything_is_as_the_package_reads_it(tmp_path: Path, architecture: str, alignment: int | None) -> None:
    path = write(tmp_path / "model.gguf", architecture, alignment)
    found, expected = gguf.read_header(path), reference.GGUFReader(path)
    fields = {key: field for key, field in expected.fields.items() if not key.startswith("GGUF.")}
    assert list(found.metadata) == list(fields)
    for key, field in fields.items():
        value = found.metadata[key]
        assert isinstance(value, gguf.Skipped) == (key in SKIPPED)
        if field.types[0] == reference.GGUFValueType.ARRAY:
            assert gguf.read_array(found, key) == tuple(field.contents())
        else:
            assert value == field.contents()
            assert type(value) is type(field.contents())
    data = path.read_bytes()
    assert list(found.tensors) == [t.name for t in expected.tensors]
    for t in expected.tensors:
        ours = found.tensors[t.name]
        assert (ours.type, ours.shape) == (t.tensor_type.name, tuple(t.shape.tolist()[::-1]))
        assert (ours.offset, ours.nbytes) == (t.data_offset, t.n_bytes)
        assert data[ours.offset :][: ours.nbytes] == t.data.tobytes()


def test_every_type_has_the_package_s_size() -> None:
    for number, (name, elements, nbytes) in gguf.TENSOR_TYPES.items():
        kind = reference.GGMLQuantizationType(number)
        assert (kind.name, reference.GGML_QUANT_SIZES[kind]) == (name, (elements, nbytes))


def test_what_is_skipped_says_where_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    strings = gguf.read_header(path).metadata["a.strings"]
    assert (strings.type, strings.count) == ("str", 5)
    assert path.read_bytes()[strings.offset :].startswith(text(b"a") + text(b"bb"))


# --- small files by hand -----------------------------------------------------------------------------------------


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], gguf.Header]:
    def read(data: bytes) -> gguf.Header:
        path = tmp_path / "small.gguf"
        path.write_bytes(data)
        return gguf.read_header(path)

    return read


Read = Callable[[bytes], gguf.Header]


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_of_nothing(read: Read, version: int) -> None:
    found = read(header(version=version))
    assert (found.version, found.metadata, found.tensors) == (version, {}, {})


def test_types_that_are_not_known_stay_numbers(read: Read) -> None:
    found = read(header(tensor(shape=(3, 2), number=4711), tensors=1, data=10)).tensors["t"]
    assert (found.type, found.shape, found.nbytes) == (4711, (2, 3), None)


def test_a_tensor_of_no_axes_is_one_number(read: Read) -> None:
    assert read(header(tensor(shape=()), tensors=1, data=4)).tensors["t"].nbytes == 4


def test_nested_arrays_are_skipped(read: Read) -> None:
    inner = array(8, 2, text(b"x") + text(b"yy")) + array(0, 3, b"abc")
    found = read(header(entry(b"k", 9, array(9, 2, inner)), entry(b"l", 0, b"\x07"), entries=2))
    assert found.metadata == {"k": gguf.Skipped("array", 2, 24 + 9 + 4 + 12), "l": 7}
    with pytest.raises(ModelFileError, match="k is not an array of strings or numbers"):
        gguf.read_array(found, "k")
    with pytest.raises(ModelFileError, match="l is not an array of strings or numbers"):
        gguf.read_array(found, "l")


@pytest.mark.parametrize(("levels", "fits"), [(4, True), (5, False), (100_000, False)])
def test_how_deep_arrays_nest(read: Read, levels: int, fits: bool) -> None:
    data = header(entry(b"k", 9, array(9, 1) * (levels - 1) + array(0, 1, b"x")), entries=1)
    if fits:
        assert read(data).metadata["k"].count == 1
    else:
        with pytest.raises(ModelFileError, match="'k' nests arrays deeper than 4 levels"):
            read(data)


def test_an_array_that_is_not_utf8(read: Read) -> None:
    found = read(header(entry(b"k", 9, array(8, 2, text(b"a") + text(b"\xff"))), entries=1))
    with pytest.raises(ModelFileError, match=r"small\.gguf: string 1 of 'k' is not UTF-8: invalid start byte"):
        gguf.read_array(found, "k")


def test_a_file_that_changes(read: Read) -> None:
    found = read(header(entry(b"k", 9, array(8, 2, text(b"a") + text(b"b"))), entries=1))
    read(header() + bytes(10))
    with pytest.raises(ModelFileError, match="was changed while it was read"):
        gguf.read_array(found, "k")


# --- what is refused ---------------------------------------------------------------------------------------------

HUGE = 2**63
BAD = {
    "it begins with b'GGML'": header(magic=b"GGML"),
    "it begins with b'FUGG'": header(magic=b"FUGG"),
    "it is big-endian, and only little-endian files are read": struct.pack(">4sIQQ", b"GGUF", 3, 0, 0),
    "GGUF version 1 is not read, only 2 and 3 are": header(version=1),
    "GGUF version 4 is not read": header(version=4),
    "GGUF version 0 is not read": header(version=0),
    "9,223,372,036,854,775,808 tensors should follow byte 24, and only 0 bytes do": header(tensors=HUGE),
    "9,223,372,036,854,775,808 entries of metadata should follow": header(entries=HUGE),
    "it has 131,073 tensors; 131,072 are the most": header(tensors=2**17 + 1, data=2**22),
    "18,446,744,073,709,551,615 bytes; 16,777,216 are the most": header(
        struct.pack("<Q", 2**64 - 1), bytes(9), entries=1
    ),
    "1,000 bytes of key 0 should follow byte 32, and only 9 bytes do": header(
        struct.pack("<Q", 1000), bytes(9), entries=1
    ),
    "key 0 is not UTF-8: invalid start byte at byte 1 of it": header(entry(b"a\xff", 0, b"1"), entries=1),
    "the value of 'k' is not UTF-8": header(entry(b"k", 8, text(b"\xc3")), entries=1),
    "'k' has the type 13, which there is not": header(entry(b"k", 13, b"1"), entries=1),
    "'k' has the type 4294967295": header(entry(b"k", 9, array(2**32 - 1, 0)), entries=1),
    "is neither true nor false but 2": header(entry(b"k", 7, b"\x02"), entries=1),
    "neither true nor false but 255": header(entry(b"k", 9, array(7, 3, b"\x00\xff\x01")), entries=1),
    "1,099,511,627,776 elements of 1 bytes should follow": header(entry(b"k", 9, array(7, 2**40)), entries=1),
    "9,223,372,036,854,775,808 elements of 8 bytes": header(entry(b"k", 9, array(10, HUGE)), entries=1),
    "9,223,372,036,854,775,808 strings should follow": header(entry(b"k", 9, array(8, HUGE)), entries=1),
    "9,223,372,036,854,775,808 arrays should follow": header(entry(b"k", 9, array(9, HUGE)), entries=1),
    "the strings of 'k' go past": header(entry(b"k", 9, array(8, 2, text(b"a") + struct.pack("<Q", 5))), entries=1),
    "strings of 'l' go past": header(entry(b"l", 9, array(8, 2, struct.pack("<QQ", 2**64 - 1, 1))), entries=1),
    "strings of 'm' go past": header(entry(b"m", 9, array(8, 2, struct.pack("<QQ", 2**63 - 60, 1))), entries=1),
    "a key of the metadata is there twice": header(entry(b"k", 0, b"1"), entry(b"k", 0, b"2"), entries=2),
    "tensor 'b' begins within another": header(tensor(b"a"), tensor(b"b"), tensors=2, data=64),
    "a tensor is there twice": header(tensor(), tensor(), tensors=2, data=64),
    "tensor 't' has 5 axes; 4 are the most": header(tensor(shape=(1,) * 5), tensors=1, data=64),
    "has 4,294,967,295 axes": header(tensor(axes=2**32 - 1), tensors=1, data=64),
    "cannot have the shape [4294967296, 4294967296]": header(tensor(shape=(2**32, 2**32)), tensors=1, data=64),
    "cannot have the shape [9223372036854775808]": header(tensor(shape=(HUGE,), number=4711), tensors=1, data=64),
    "'t' of shape [17] goes past the end of the file": header(tensor(shape=(17,)), tensors=1, data=64),
    "'t' of shape [4] goes past the end": header(tensor(offset=64), tensors=1, data=64),
    "of shape [1] goes past": header(tensor(shape=(1,), number=4711, offset=2**64 - 32), tensors=1, data=64),
    "begins at 4, no multiple of 32": header(tensor(offset=4), tensors=1, data=64),
    "has rows of 33 elements; Q8_0 stores 32 at a time": header(tensor(shape=(33,), number=8), tensors=1, data=64),
    "has rows of 1 elements; Q4_0": header(tensor(shape=(), number=2), tensors=1, data=64),
    **{
        f"general.alignment must be a power of two, not {shown}": header(
            entry(b"general.alignment", number, value), entries=1
        )
        for shown, number, value in [
            ("0", 4, struct.pack("<I", 0)),
            ("24", 4, struct.pack("<I", 24)),
            ("-32", 5, struct.pack("<i", -32)),
            ("True", 7, b"\x01"),
            ("32.0", 6, struct.pack("<f", 32)),
            ("'32'", 8, text(b"32")),
            ("(32,)", 9, array(4, 1, struct.pack("<I", 32))),
            ("Skipped(type='str', count=1", 9, array(8, 1, text(b"32"))),
        ]
    },
}


@pytest.mark.parametrize("message", BAD)
def test_bad_files(read: Read, message: str) -> None:
    """They are refused in a sentence, and take no memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            read(BAD[message])
        assert tracemalloc.get_traced_memory()[1] < len(BAD[message]) + 200_000
    finally:
        tracemalloc.stop()
    assert str(caught.value).partition(": ")[0].endswith("small.gguf")
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_names_of_a_file_do_not_steer_a_terminal(read: Read) -> None:
    with pytest.raises(ModelFileError, match=r"'\\x1b\[2J' has the type 99"):
        read(header(entry(b"\x1b[2J", 99, b""), entries=1))
    with pytest.raises(ModelFileError, match=r"aaa\.\.\. has the type 99"):
        read(header(entry(b"a" * 10_000, 99, b""), entries=1))


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match=r"there is no .*nowhere\.gguf"):
        gguf.read_header(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelFileError, match="is not a file"):
        gguf.read_header(tmp_path)
    with pytest.raises(ModelFileError, match="pipe is not a file"):
        gguf.read_header(str(tmp_path / "pipe"))
    with pytest.raises(ModelFileError, match=r"empty\.gguf is empty"):
        gguf.read_header(tmp_path / "empty.gguf")


# --- damage of every kind ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file with a little of everything."""
    parts = [
        entry(b"general.alignment", 4, struct.pack("<I", 32)),
        entry(b"text", 8, text("é".encode())),
        entry(b"flags", 9, array(7, 2, b"\x00\x01")),
        entry(b"strings", 9, array(8, 3, text(b"a") + text(b"") + text(b"ccc"))),
        entry(b"nested", 9, array(9, 1, array(4, 2, bytes(8)))),
    ]
    tensors = [tensor(b"a", (3, 2)), tensor(b"b", (32,), 32, 8)]
    return header(*parts, *tensors, entries=5, tensors=2, data=32 + 34)


def test_cut_at_every_byte(read: Read, whole: bytes) -> None:
    assert list(read(whole).tensors) == ["a", "b"]
    for length in range(len(whole)):
        with pytest.raises(ModelFileError):
            read(whole[:length])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # fuzz_models.py tries more
@given(data=st.data())
def test_flipped_bytes(read: Read, whole: bytes, data: st.DataObject) -> None:
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        damaged[at] = data.draw(st.integers(0, 255) | st.sampled_from([damaged[at] ^ 1 << bit for bit in range(8)]))
    with contextlib.suppress(ModelFileError):
        found = read(bytes(damaged))
        for key, value in found.metadata.items():
            if isinstance(value, gguf.Skipped) and value.type != "array":
                gguf.read_array(found, key)


# --- bounded work ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "what"), [(8, "empty strings"), (9, "empty arrays")], ids=lambda value: str(value))
def test_arrays_of_a_large_file_of_zeros(tmp_path: Path, number: int, what: str) -> None:
    """A file may be large and cost nobody anything: what is walked over has a limit of its own."""
    path = tmp_path / "sparse.gguf"
    path.write_bytes(header(entry(b"k", 9, array(number, 2**32)), entries=1))
    os.truncate(path, 2**40)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match="its arrays have more than 4,194,304 elements"):
            gguf.read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_vocabulary_is_not_decoded(tmp_path: Path) -> None:
    words = b"".join(text(b"%d" % i) for i in range(100_000))
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(header(entry(b"k", 9, array(8, 100_000, words)), entries=1))
    tracemalloc.start()
    try:
        found = gguf.read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 2 * path.stat().st_size
    finally:
        tracemalloc.stop()
    assert gguf.read_array(found, "k") == tuple(map(str, range(100_000)))
