"""Test that llama.cpp behaves on this cache as on its own, scene by scene, and after failures."""

import os
import subprocess

import pytest
from support import llama_cpp_build


def run(name, *args, timeout=600):
    """Run a program of the build on one thread; return what it printed."""
    done = subprocess.run(
        [llama_cpp_build.program(name), *map(str, args)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
    )
    assert done.returncode == 0, f"{name} returned {done.returncode}:\n{done.stdout[-8000:]}"
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


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt-oss"])
def test_scenes_are_as_with_llama_cpps_own_cache(model, architecture):
    out = run("test-kvcache", model(architecture))
    assert out.count("  ok ") >= 43, out


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_context_goes_on_after_failures(model, architecture):
    assert run("test-kvcache-failures", model(architecture)).endswith("ok\n")
