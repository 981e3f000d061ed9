"""Test which models llama.cpp runs on this cache: small random models of each architecture, with both caches."""

import math
import os
import re
import subprocess

import llama_cpp_build
import llama_models
import pytest
from support import gguf_files
from support.compiling import ROOT

README = ROOT / "integrations/llama.cpp/README.md"
# One of each kind of attention: plain, windows and softcap, sinks, ALiBi, MLA, NoPE layers, hybrid, without a cache,
# M-RoPE.
SOME = ["llama", "gemma2", "gpt-oss", "bloom", "deepseek2", "llama4", "lfm2", "falcon-h1", "dream", "mamba", "qwen3vl"]


def run(program, *args):
    """Return what a program of the build prints; fail with it if the program does."""
    command = [llama_cpp_build.program(program), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_WAIT_POLICY": "passive"})
    assert not done.returncode, done.stdout + done.stderr[-2000:]
    return done.stdout


def write_models(folder, names):
    """Write models whose attention is far from even, and return their paths."""
    run("test-llama-archs", *llama_models.SEED, "-a", names, "-d", "0.5", "-o", folder)
    return sorted(folder.glob("*.gguf"))


def test_readme_lists_what_is_served():
    table = run("test-kvcache-archs", "--table")
    assert table in README.read_text(), f"put this into {README}:\n{table}"


def test_models_of_each_kind_give_the_same_logits(tmp_path):
    models = write_models(tmp_path, f"^({'|'.join(SOME)})$")
    assert {re.sub("-(dense|moe)$", "", model.stem) for model in models} == set(SOME)
    printed = run("test-kvcache-archs", *models)
    assert re.search(r"mamba-dense.gguf\n  refused   mamba: the model has no attention\n", printed)
    assert printed.count("\n  images ") == 1
    assert re.search(r"dream-dense.gguf\n  encode    works without a cache\n", printed)


@pytest.mark.parametrize("name", llama_models.SPARSE)
def test_models_whose_tokens_choose_rows_give_the_same_logits(tmp_path, name):
    model = llama_models.write_sparse(tmp_path, name, "-d", "0.5")
    printed = run("test-kvcache-archs", "--types", "f32,f16", "--scenes", "text,seqs,streams,rollback", model)
    assert printed.count("| f32 ") == (3 if name == "minimax-m3" else 4)


def test_tokens_that_moved_are_chosen_as_if_they_had_not(tmp_path):
    """Also in a pool of sequences, and in batches of any size."""
    models = [llama_models.write_sparse(tmp_path, name) for name in llama_models.SPARSE]
    one = {"has_weights": False, "leading_dense_block_count": 0}
    models = [llama_models.write_layers(tmp_path / model.name, model, [0], **one) for model in models]
    assert run("test-kvcache-sparse", *models).count("  ok ") == 6 * len(models)


@pytest.mark.parametrize("name", llama_models.POOLED)
def test_models_that_pool_keys(tmp_path, name):
    """Scenes as with llama.cpp's own cache, states that go on as if nothing had happened, and what is refused."""
    (dense := tmp_path / "dense").mkdir()
    models = [
        llama_models.write_sparse(tmp_path, name, "-d", "0.5"),
        llama_models.write_random(dense, name, "-d", "0.5"),
    ]
    assert run("test-kvcache-strides", *models).count("  ok ") >= 240


def test_deepseek_v4_gives_the_same_logits(tmp_path):
    """In text, also behind tokens that see each other, and with several sequences."""
    model = llama_models.write_compressed(tmp_path, "-d", "0.5")
    assert run("test-kvcache-archs", model).count("| f32 ") == 6


def test_rows_that_stand_for_several_tokens_follow_what_is_done_to_these(tmp_path):
    model = llama_models.write_compressed(tmp_path, "-d", "0.5")
    windows = llama_models.write_layers(tmp_path / "windows.gguf", model, [0, 1])  # layers without such rows
    assert run("test-kvcache-strides", model, windows).count("  ok ") >= 150


@pytest.mark.threads
def test_models_give_the_same_logits_on_two_threads(tmp_path):
    models = write_models(tmp_path, "^(deepseek2|lfm2|granitehybrid)$")
    models.append(llama_models.write_compressed(tmp_path, "-d", "0.5"))
    options = ("--threads", "2", "--scenes", "text,seqs", "--types", "f16")
    assert run("test-kvcache-archs", *options, *models).count("| f16 ") == 8


# With YaRN, each shift of llama.cpp's own cache multiplies keys by YaRN's magnitude; this factor makes it 1.
UNSCALED = 1 / (1 + 0.1 * math.log(4))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", ["--yarn", "4", "--set", f"llama.rope.scaling.attn_factor={UNSCALED}"]),
        ("deepseek2", ["--yarn", "4", "--set", f"deepseek2.rope.scaling.attn_factor={UNSCALED}"]),
        ("gpt-oss", ["--yarn", "4", "--scenes", "text,seqs,noncausal"]),
        ("gemma2", ["--set", "gemma2.attention.sliding_window=7", "--set", "gemma2.attn_logit_softcapping=2.0"]),
        ("phi3", ["--set", "phi3.rope.scaling.original_context_length=64"]),
        ("gptneox", ["--set", "gptneox.rope.dimension_count=32"]),
        ("chatglm", ["--set", "chatglm.rope.dimension_count=32"]),
        ("mpt", ["--set", "mpt.attention.max_alibi_bias=4.0"]),
    ],
)
def test_models_with_other_hyperparameters_give_the_same_logits(tmp_path, name, options):
    models = write_models(tmp_path, f"^{name}$")
    assert "  text " in run("test-kvcache-archs", *options, *models)


# Models that test-llama-archs does not write: those with layers that share rows, and embeddings without a cache.
BARE = {
    "bitnet": {},
    "gemma3n": {"block_count": 22, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count_kv": 1},
    "gemma4": {
        "block_count": 7,
        "embedding_length": 128,
        "embedding_length_per_layer_input": 64,
        "feed_forward_length": 192,
        "attention.head_count_kv": 1,
        "attention.shared_kv_layers": 2,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.key_length_swa": 32,
        "attention.value_length_swa": 32,
        "attention.sliding_window_pattern": [True, True, True, True, False, True, False],
        "rope.dimension_count": 64,
        "rope.dimension_count_swa": 32,
        "rope.freq_base_swa": 10000.0,
    },
    "bert": {"attention.causal": False},
    "gemma-embedding": {"block_count": 6},
    "llama-embed": {},
}


@pytest.mark.parametrize("name", BARE)
def test_models_of_metadata_only_give_the_same_results(tmp_path, name):
    sizes = {"block_count": 2, "context_length": 256, "embedding_length": 256, "feed_forward_length": 384}
    heads = {"attention.head_count": 2, "attention.head_count_kv": 2, "attention.sliding_window": 32}
    epsilons = {"attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5}
    metadata = {f"{name}.{key}": value for key, value in (sizes | heads | epsilons | BARE[name]).items()}
    tokens = {"tokens": [f"tok_{i}" for i in range(128)], "scores": [0.0] * 128, "token_type_count": 1, "model": "test"}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in tokens.items()}
    model = gguf_files.write(tmp_path / f"{name}.gguf", name, {f"{name}.vocab_size": 128} | metadata)
    embeds = name in {"bert", "gemma-embedding", "llama-embed"}
    printed = run("test-kvcache-archs", *(["--embeddings"] if embeds else []), model)
    assert ("works without a cache" if embeds else "  text ") in printed


@pytest.mark.slow
def test_models_of_every_architecture_give_the_same_logits(tmp_path):
    models = write_models(tmp_path, ".")
    assert len(models) > 120
    print(run("test-kvcache-archs", *models))
