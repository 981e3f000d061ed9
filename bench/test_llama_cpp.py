"""Test the models for llama.cpp, and its comparison with kvcache, where integrations/llama.cpp was built."""

import importlib.util
import json
from dataclasses import replace

import bench_llama_cpp
import llama_cpp_models
import numpy as np
import pytest
from llama_cpp_contexts import CACHES, INSTALL, Context, Library, LlamaError, Model
from support.llama_cpp_build import folder

from kvcache import runner

WINDOWS = replace(llama_cpp_models.SHAPES["tiny"], architecture="gemma3", num_layers=6, window=32)


@pytest.fixture(scope="module")
def library():
    if not importlib.util.find_spec("llama_cpp"):
        pytest.skip(INSTALL)
    return Library(folder() / "bin")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return llama_cpp_models.write("tiny", tmp_path_factory.mktemp("models"))


# ---- models


def test_random_weights_are_the_same_again(tiny, tmp_path):
    assert llama_cpp_models.write("tiny", tmp_path / "new").read_bytes() == tiny.read_bytes()


def logits(path, tokens):
    model = runner.Llama.load(path)
    with runner.new_cache(model.config, runner.Options(dtype="f32")) as cache:
        return model.forward(tokens, cache)


def test_products_with_random_weights_are_about_1(tiny):
    assert 0.3 < logits(tiny, [1, 7, 300]).std() < 3


def test_the_repositorys_model_is_the_same_as_gguf(tmp_path):
    tokens = list(b"To be, or not to be")
    found = logits(llama_cpp_models.write("repository", tmp_path), tokens)
    np.testing.assert_allclose(found, logits(llama_cpp_models.REPOSITORY, tokens), atol=1e-3)


def test_models_are_written_where_they_are_asked_for(tmp_path, capsys):
    llama_cpp_models.main(["--output", str(tmp_path / "models"), "--shape", "tiny", "repository"])
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"tiny.gguf", "repository.gguf"}
    assert "tiny.gguf" in capsys.readouterr().out


# ---- contexts


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("shape", ["tiny", "windows"])
def test_a_context_is_filled_at_once(library, tiny, tmp_path, shape, cache, dtype):
    if cache == "plain" and dtype != "f16":
        pytest.skip("llama.cpp has quantised V with flash attention only")
    if shape == "windows":
        tiny = tmp_path / "windows.gguf"
        llama_cpp_models.write_random(tiny, WINDOWS)
    model = Model(library, tiny)
    context = Context(model, cache, dtype, 256, 2)
    assert context.fill(100)
    first, last = context.positions()
    assert last == 99
    if shape == "windows":  # kvcache names the first position that its rows let the sequence go back to
        assert first in ((98,) if cache == "kvcache" else (68, 69))
    else:
        assert first == 0
    context.decode()
    context.check()
    context.close()
    model.close()


def test_every_cache_gives_the_same_logits(library, tmp_path):
    model, found = Model(library, llama_cpp_models.write("repository", tmp_path)), {}
    for cache in CACHES:
        context = Context(model, cache, "f16", 256, 2)
        if cache == "kvcache" and context.own:
            pytest.skip(context.own)
        context.decode(50)
        context.rewind(30)
        context.decode()
        found[cache] = context.check()
        context.close()
    model.close()
    np.testing.assert_allclose(found["kvcache"], found["flash"], atol=0.02)
    np.testing.assert_allclose(found["plain"], found["flash"], atol=0.02)


def test_what_is_missing_is_named(library, tmp_path):
    with pytest.raises(LlamaError, match=r"run integrations/llama\.cpp/build\.sh"):
        Library(tmp_path)
    with pytest.raises(LlamaError, match=r"bench/llama_cpp_models\.py"):
        Model(library, tmp_path / "none.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(LlamaError, match="cannot be loaded"):
        Model(library, tmp_path / "broken.gguf")


# ---- the comparison


def test_every_section_once(library, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_llama_cpp, "MODELS", tiny.parent)
    bench_llama_cpp.main([
        f"--library={library.folder}", f"--model={tiny}", "--context", "0", "300", "--types", "f16", "q4_0",
        "--steps=1", "--prompt-context", "40", "--prompt-types", "q8_0", "--prompts=1", "--shared=40",
        f"--json={tmp_path / 'run.json'}", f"--output={tmp_path / 'picture.svg'}",
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert "decoding, tokens/s" in printed
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    rates = {(row["name"], row["type"], row["context"]) for row in rows if "rate" in row}
    own = {("f16", "flash attention"), ("f16", "without it"), ("q4_0", "flash attention")}
    for context in (0, 300):
        for dtype, name in {*own, ("f16", "kvcache"), ("q4_0", "kvcache")}:
            rates.remove((f"decoding, {name}", dtype, context))
    assert rates == {("prompts of 512, flash attention", "q8_0", 40), ("prompts of 512, kvcache", "q8_0", 40)}
    assert {row["name"] for row in rows if row["type"] == "q4_0" and "quotient" in row} == {
        "decoding, speedup over the default",
        "memory at 300 tokens, over the default",
        "memory of 64 sequences that share 40 tokens, over the default",
    }
    assert {row["name"] for row in rows if "seconds" in row and row["type"] == "q4_0"} == {
        "step of a tiny model, flash attention",
        "step of a tiny model, kvcache",
    }
    assert "llama.cpp" in (tmp_path / "picture.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--steps=0"], "--steps 0: must be at least 1"),
        (["--context", "512", "-1"], "--context [512, -1]: must be at least 0"),
        (["--only", "memory", "--output=picture.svg"], "--output draws what the section decode measures"),
    ],
)
def test_bad_options(arguments, says, capsys):
    with pytest.raises(SystemExit):
        bench_llama_cpp.options(arguments)
    assert says in capsys.readouterr().err


def test_a_library_that_is_missing_ends_the_run(tiny, tmp_path):
    with pytest.raises(SystemExit, match=r"build\.sh"):
        bench_llama_cpp.main([f"--library={tmp_path}", f"--model={tiny}"])
