"""Models for the tests that run llama.cpp: those of bench/llama_cpp_models.py, and small random ones."""

import importlib.util
import sys
from unittest import mock

import pytest
from support import llama_cpp_build
from support.compiling import ROOT


def writer():
    """Return bench/llama_cpp_models.py as a module; skip the test without the package that it writes with."""
    pytest.importorskip("gguf")
    name = "llama_cpp_models"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"bench/{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def write_repository(folder):
    """Write the repository's model, whose tokens are bytes, and return its path."""
    return writer().write("repository", folder)


def write_windows(folder):
    """Write a small random model of seven layers, six of them with windows of 64 tokens; its vocabulary is the same."""
    module = writer()

    def add_bytes(writer, *_):
        add_vocabulary(writer, *module.byte_vocabulary())
        writer.add_bos_token_id(10)
        writer.add_add_bos_token(False)

    add_vocabulary, path = module.add_vocabulary, folder / "windows.gguf"
    with mock.patch.object(module, "add_vocabulary", add_bytes):
        module.write_random(path, module.Shape("gemma3", 7, 64, 64, 2, 1, 64, vocab_size=256, window=64))
    return path


def write_random(folder, architecture):
    """Write a small random model of an architecture unless the folder has one, and return its path."""
    if not list(folder.glob(f"{architecture}-*.gguf")):
        llama_cpp_build.run("test-llama-archs", "-a", f"^{architecture}$", "-o", folder)
    return sorted(folder.glob(f"{architecture}-*.gguf"))[0]


def text(begin, end):
    """Return a piece of the text that belongs to the repository's model, as long in bytes as in characters."""
    return (ROOT / "examples/model/eval.txt").read_text()[begin:end]
