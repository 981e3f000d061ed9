"""Test that llama.cpp behaves on this cache as on its own, scene by scene, and after failures."""

import functools
import re

import llama_models
import pytest
from llama_cpp_build import run
from support.compiling import ROOT


@pytest.fixture(scope="module")
def model(folder):
    """Return a function that writes a small random model of an architecture and returns its path."""
    return functools.partial(llama_models.write_random, folder)


@pytest.mark.threads
def test_scenes_on_two_threads(model):
    run("test-kvcache", "--threads", 2, "--only", "coupled", model("llama"), OMP_NUM_THREADS="2")


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt-oss"])
def test_scenes_are_as_with_llama_cpps_own_cache(model, architecture):
    out = run("test-kvcache", model(architecture))
    assert out.count("  ok ") >= 45, out


@pytest.mark.parametrize(
    ("architecture", "count"), [("llama", 276), ("gemma3", 276), ("lfm2", 160), ("glm5-next", 160)]
)
def test_a_sequence_that_cannot_be_ends_the_process(model, architecture, count):
    """Full attention, windows, a hybrid, and a hybrid whose tokens do not move."""
    out = run("test-kvcache-ids", model(architecture))
    assert out.endswith("ok\n")
    assert out.count("  ok ") == count


def test_defects_of_llama_cpps_own_cache_do_not_occur(tmp_path):
    sizes = {"architecture": "llama", "num_layers": 2, "num_heads": 2, "head_dim": 32}
    out = run("test-kvcache", "--only", "defects", llama_models.write_small(tmp_path / "model.gguf", **sizes))
    assert out.count("  ok   llama.cpp's own cache is ") == 3


@pytest.mark.parametrize("architecture", ["qwen2vl", "qwen35"])
def test_tokens_with_m_rope_do_not_move(model, architecture):
    assert "  ok   immovable" in run("test-kvcache", "--only", "immovable", model(architecture))


@pytest.mark.slow
def test_scenes_with_the_repositorys_model(repository):
    run("test-kvcache", repository)


def test_scenes_in_int8_are_nearly_as_with_llama_cpps_own_cache(repository):
    """Which stores f32 rows."""
    out = run("test-kvcache", "--only", "int8", repository)
    assert out.count("  ok ") == 14, out


@pytest.mark.parametrize(
    "sizes",
    [
        {"architecture": "llama", "num_layers": 5, "num_heads": 4, "num_kv_heads": 2},
        {"architecture": "gemma3", "num_layers": 12, "num_heads": 2, "window": 64},
        {"architecture": "lfm2", "num_layers": 9, "num_heads": 2, "conv_size": 3},
    ],
    ids=lambda sizes: sizes["architecture"],
)
def test_tokens_of_long_texts_select_rows(tmp_path, sizes):
    out = run("test-kvcache-select", llama_models.write_small(tmp_path / "model.gguf", head_dim=32, **sizes))
    assert out.count("  ok ") >= (20 if sizes["architecture"] == "llama" else 5), out


IN_BYTES = {
    "full attention": {"architecture": "llama", "num_layers": 1, "num_heads": 4, "num_kv_heads": 2},
    "windows": {"architecture": "gemma3", "num_layers": 1, "num_heads": 2, "window": 512},
    "both": {"architecture": "gemma3", "num_layers": 6, "num_heads": 2, "window": 64},
    "hybrid": {"architecture": "lfm2", "num_layers": 3, "num_heads": 2, "conv_size": 3, "hidden_size": 256},
}


@pytest.mark.parametrize("sizes", IN_BYTES.values(), ids=IN_BYTES)
def test_prompts_are_multiplied_in_bytes(tmp_path, sizes):
    """On plain C, which multiplies bytes on every machine. Tokens that follow, and short prompts, keep their bits."""
    model = llama_models.write_small(tmp_path / "model.gguf", head_dim=128, **sizes)
    assert run("test-kvcache-prompts", model, KVCACHE_ISA="scalar").endswith("ok\n")


@pytest.mark.parametrize("architecture", ["deepseek2", "gpt-oss", "minimax-m3"])
def test_prompts_of_further_models_are_multiplied_in_bytes(folder, architecture):
    """Values in keys, sinks, and tokens that choose rows by keys alone, once there are more than they choose."""
    write = llama_models.write_sparse if architecture in llama_models.SPARSE else llama_models.write_random
    assert run("test-kvcache-prompts", write(folder, architecture), KVCACHE_ISA="scalar").endswith("ok\n")


def perplexity(model, kvcache, *args):
    """Return the perplexity of the text that the repository's model was tried on."""
    text = ROOT / "examples/model/eval.txt"
    for _ in range(10):  # llama.cpp's log may lose its last lines when the program ends
        out = run("llama-perplexity", "-m", model, "-f", text, "-c", 512, "-t", 1, *args, LLAMA_KVCACHE=kvcache)
        if found := re.search(r"Final estimate: PPL = ([0-9.]+)", out):
            return float(found.group(1))
    raise AssertionError(out)


@pytest.mark.slow
@pytest.mark.parametrize(("type_", "tolerance"), [("q8_0", 1e-3), ("q4_0", 1e-2)])
def test_perplexity_is_that_of_llama_cpps_own_cache(repository, type_, tolerance):
    types = ["-ctk", type_, "-ctv", type_]
    own = perplexity(repository, "0", *types)
    assert perplexity(repository, "1", *types) == pytest.approx(own, rel=tolerance)


def test_perplexity_in_int8_is_nearly_that_of_f16(repository):
    types = ["--kvcache-type-k", "int8", "--kvcache-type-v", "int8"]
    assert perplexity(repository, "1", *types) == pytest.approx(perplexity(repository, "1"), rel=1e-3)


def test_perplexity_of_prompts_in_bytes_is_nearly_that_of_others(repository):
    found = perplexity(repository, "1", "--kvcache-prompts", "int8")
    assert found == pytest.approx(perplexity(repository, "1"), rel=1e-2)


def test_training_says_to_take_llama_cpps_own_cache(model):
    out = run("test-kvcache", "--only", "training", model("llama"), model("granitehybrid"))
    assert out.count("  ok   training") == 2


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2"])
def test_a_context_goes_on_after_failures(model, architecture):
    assert run("test-kvcache-failures", model(architecture)).endswith("ok\n")


@pytest.mark.slow
def test_deepseek_v4_goes_on_after_failures(tmp_path):
    assert run("test-kvcache-failures", llama_models.write_compressed(tmp_path, "-d", "0.5")).endswith("ok\n")
