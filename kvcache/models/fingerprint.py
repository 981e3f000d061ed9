"""Tell models apart by their files, without reading all of them."""

from __future__ import annotations

import hashlib
import os

from kvcache.models.gguf import read_header
from kvcache.models.reading import MAX_GGUF_HEADER, MAX_JSON, File, expanded, is_gguf, open_file, read_file
from kvcache.models.weights import shards

SAMPLES = 256  # places at which a large file is read
SAMPLE = 4096  # bytes at each


def fingerprint(path: str | os.PathLike[str]) -> str:
    """Return a name for a model that is the same wherever its files lie, and another one for another model.

    It is a hash over a folder's ``config.json``, or a GGUF's header, and over each file of weights. Of these it takes
    the size and 4 KiB at 256 evenly spread places, so that a model and its fine-tuned version differ. Names and times
    of files do not matter, nor do a folder's other files.

    Parameters
    ----------
    path : path
        A Hugging Face folder with safetensors or any file in it, or a GGUF file.

    Returns
    -------
    str
        32 hexadecimal digits.

    Raises
    ------
    ModelFileError
        A file is missing or cannot be read.
    """
    path = expanded(path)
    digest = hashlib.blake2b(digest_size=16, person=b"kvcache-model-1")
    if not os.path.isdir(path) and is_gguf(path):
        header = read_header(path)
        end = min((tensor.offset for tensor in header.tensors.values()), default=0)
        with open_file(path, header.stamp) as file:
            _add(digest, file, header=min(end, MAX_GGUF_HEADER))
        return digest.hexdigest()
    folder = path if os.path.isdir(path) else path.parent
    digest.update(read_file(folder / "config.json", MAX_JSON, "a configuration"))
    for shard in shards(folder):
        with open_file(shard) as file:
            _add(digest, file, header=0)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, file: File, *, header: int) -> None:
    """Add a file's size, its first `header` bytes, and samples of all of it."""
    digest.update(file.size.to_bytes(8, "little"))
    digest.update(file.read(0, header))
    last = max(0, file.size - SAMPLE)
    for at in sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}):
        digest.update(file.read(at, min(SAMPLE, file.size)))
