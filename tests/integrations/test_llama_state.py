"""Test the saved state of llama.cpp on this cache: with its own tests, and exchanged with its own cache."""

import functools

import pytest
from support import llama_cpp_build, llama_models

run = functools.partial(llama_cpp_build.run, timeout=600, LLAMA_KVCACHE="1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a function that writes a small random model of an architecture and returns its path."""
    return functools.partial(llama_models.write_random, tmp_path_factory.mktemp("models"))


def test_it_passes_for_llama_cpps_own_state(model):
    out = run("test-kvcache-state", "--types", "f16,q4_0", model("gemma2"))
    assert "0 of" in out.splitlines()[-1], out
    assert out.count("  ok ") == 6, out


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "llama4", "deepseek2", "gpt-oss", "bloom", "phi3"])
def test_it_passes_for_llama_cpps_own_state_with_all_types(model, architecture):
    run("test-kvcache-state", model(architecture), timeout=1800)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2"])  # full attention, windows, a hybrid
def test_llama_cpps_test_of_state(model, architecture):
    out = run("test-save-load-state", "-m", model(architecture), "-t", 1, "-v")
    assert "llama_kvcache: " in out
    assert "All tests passed." in out


def test_a_prompt_cache_of_llama_completion(model, tmp_path):
    command = ["-m", model("llama"), "-p", "a b c d", "-n", 8, "-s", 1, "--temp", 0, "-no-cnv", "-t", 1, "-v"]
    first = run("llama-completion", *command, "--prompt-cache", tmp_path / "session")
    again = run("llama-completion", *command, "--prompt-cache", tmp_path / "session")
    assert "llama_kvcache: " in first
    assert "loaded a session" in again
