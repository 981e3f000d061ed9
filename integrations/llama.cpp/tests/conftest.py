"""Fixtures of the tests that run llama.cpp: a folder for what a file's tests write, and models that no test changes."""

import llama_cpp_build
import llama_models
import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a file's own logs, states and models; skip its tests where llama.cpp was not built."""
    llama_cpp_build.folder()
    return tmp_path_factory.mktemp("llama-cpp")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Return the folder of the models that files share."""
    llama_cpp_build.folder()
    return tmp_path_factory.mktemp("llama-cpp-models")


@pytest.fixture(scope="session")
def repository(model_folder):
    return llama_models.write_repository(model_folder)


@pytest.fixture(scope="session")
def hybrid(model_folder):
    return llama_models.write_hybrid(model_folder)


@pytest.fixture(scope="session")
def windows(model_folder):
    return llama_models.write_windows(model_folder)
