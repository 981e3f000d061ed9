"""Whole GGUF files, written by the gguf package."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
from numpy.typing import NDArray


def write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Iterable[tuple[str, NDArray[Any], gguf.GGMLQuantizationType | None]] = (),
) -> Path:
    """Metadata in the types that converters give such values, and tensors with name and type; None: the array's."""
    writer = gguf.GGUFWriter(path, architecture)
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
    }  # fmt: skip
    for key, value in metadata.items():
        add.get(type(value), writer.add_array)(key, value)
    for name, data, kind in tensors:
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
