"""Fingerprints of models: the same for a copy, another for any other model."""

import os
import shutil

import numpy as np
import pytest
from support import gguf_files

from kvcache.errors import ModelFileError
from kvcache.models.fingerprint import fingerprint


@pytest.fixture
def folder(tmp_path):
    """A folder with two files of weights, the second of which is sampled."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "a.safetensors").write_bytes(b"weights")
    (path / "b.safetensors").write_bytes(np.random.default_rng(0).bytes(5_000_000))
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}')
    return path


def test_a_copy_is_the_same_model(folder, tmp_path):
    before = fingerprint(folder)
    assert len(before) == 32
    shutil.copytree(folder, tmp_path / "copy")
    for name in (tmp_path / "copy").iterdir():
        os.utime(name, (1, 1))
    (tmp_path / "copy" / "README.md").write_text("a copy")
    assert fingerprint(tmp_path / "copy") == before == fingerprint(str(folder))


@pytest.mark.parametrize("name", ["config.json", "a.safetensors", "b.safetensors"])
def test_any_other_file_is_another_model(folder, name):
    before = {fingerprint(folder)}
    data = (folder / name).read_bytes()
    for changed in (data + b" ", data[:-1], b" " + data[1:], data[:-1] + b"}}", bytes(len(data))):
        (folder / name).write_bytes(changed)
        before.add(fingerprint(folder))
    assert len(before) == 6


def test_ggufs(tmp_path):
    def write(name, epsilon, value, zeros=0):
        metadata = {"epsilon": epsilon, "zeros": "0" * zeros}
        gguf_files.write(tmp_path / name, "llama", metadata, [("x", np.full((1000, 64), value, np.float32), None)])
        return fingerprint(tmp_path / name)

    first = write("a.gguf", 0.5, 1)
    assert write("b.gguf", 0.5, 1) == first
    assert len({first, write("c.gguf", 0.25, 1), write("d.gguf", 0.5, 2), write("e.gguf", 0.5, 1, 9)}) == 4


def test_what_is_missing(folder, tmp_path):
    with pytest.raises(ModelFileError, match="there is no"):
        fingerprint(tmp_path / "none.gguf")
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"has no b\.safetensors"):
        fingerprint(folder)
