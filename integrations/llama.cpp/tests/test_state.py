"""Test the saved state of llama.cpp on this cache: with its own tests, and exchanged with its own cache."""

import functools

import llama_cpp_build
import llama_models
import pytest

run = functools.partial(llama_cpp_build.run, timeout=600, LLAMA_KVCACHE="1")


@pytest.fixture(scope="module")
def model(folder):
    """Return a function that writes a small random model of an architecture and returns its path."""

    def write(architecture):
        if architecture == "deci":
            return llama_models.write_deci(folder)
        if architecture in llama_models.SPARSE:
            return llama_models.write_sparse(folder, architecture)
        return llama_models.write_random(folder, architecture)

    return write


@pytest.mark.parametrize(
    ("architecture", "types", "count"),
    [
        ("gemma2", "f16,q4_0,q5_1,int8", 12),
        ("granitehybrid", "f16,int8", 8),
        ("deci", "f32,q8_0,int8", 10),
        ("deepseek2", "int8", 4),
        ("qwen2vl", "f16,int8", 8),
        ("dots3note", "f16,int8", 8),
        ("minimax-m3", "f16", 4),
    ],  # windows, a hybrid, blank layers, values in keys, images, indexers with windows and with values
)
def test_it_passes_for_llama_cpps_own_state(model, architecture, types, count):
    """Values are transposed or not (flash attention off, on), sequences are divided, and states go both ways.

    llama.cpp lacks int8: its own cache refuses such states, which go from this cache to this cache.
    """
    out = run("test-kvcache-state", "--types", types, model(architecture))
    assert out.splitlines()[-1].startswith("0 of"), out
    assert out.count("  ok ") == count, out


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        "gemma2",
        "llama4",
        "deepseek2",
        "gpt-oss",
        "bloom",
        "phi3",
        "deci",
        "granitehybrid",
        "falcon-h1",
        "lfm2",
        *llama_models.SPARSE,
    ],
)
def test_it_passes_for_llama_cpps_own_state_with_all_types(model, architecture):
    run("test-kvcache-state", model(architecture), timeout=1800)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2"])  # full attention, windows, a hybrid
def test_llama_cpps_test_of_state(model, architecture):
    out = run("test-save-load-state", "-m", model(architecture), "-t", 1, "-v")
    assert "llama_kvcache: " in out
