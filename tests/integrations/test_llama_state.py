"""Test the saved state of llama.cpp on this cache: with its own tests, and exchanged with its own cache."""

import os
import subprocess

import pytest
from support import llama_cpp_build

ON_THIS_CACHE = {"LLAMA_KVCACHE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def run(name, *args, timeout=600, folder=None):
    """Run a program on this cache, in a folder; return what it printed."""
    done = subprocess.run(
        [llama_cpp_build.program(name), *map(str, args)],
        cwd=folder,
        env=os.environ | ON_THIS_CACHE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
    )
    assert done.returncode == 0, f"{name} returned {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a function that writes a small random model of an architecture and returns its path."""
    folder = tmp_path_factory.mktemp("models")

    def write(architecture):
        if not list(folder.glob(f"{architecture}-*.gguf")):
            run("test-llama-archs", "-a", f"^{architecture}$", "-o", folder)
        return sorted(folder.glob(f"{architecture}-*.gguf"))[0]

    return write


def test_it_passes_for_llama_cpps_own_state(model):
    out = run("test-kvcache-state", "--types", "f16,q4_0", model("gemma2"))
    assert "0 of" in out.splitlines()[-1], out
    assert out.count("  ok ") == 6, out


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "llama4", "deepseek2", "gpt-oss", "bloom", "phi3"])
def test_it_passes_for_llama_cpps_own_state_with_all_types(model, architecture):
    run("test-kvcache-state", model(architecture), timeout=1800)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2"])  # full attention, windows, a hybrid
def test_llama_cpps_test_of_state(model, tmp_path, architecture):
    out = run("test-save-load-state", "-m", model(architecture), "-t", 1, "-v", folder=tmp_path)
    assert "llama_kvcache: " in out
    assert "All tests passed." in out


def test_a_prompt_cache_of_llama_completion(model, tmp_path):
    command = ["-m", model("llama"), "-p", "a b c d", "-n", 8, "-s", 1, "--temp", 0, "-no-cnv", "-t", 1, "-v"]
    first = run("llama-completion", *command, "--prompt-cache", tmp_path / "session")
    again = run("llama-completion", *command, "--prompt-cache", tmp_path / "session")
    assert "llama_kvcache: " in first
    assert "loaded a session" in again
