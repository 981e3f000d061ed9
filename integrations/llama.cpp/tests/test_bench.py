"""Test the models that bench/ writes, and its comparisons, where llama.cpp was built on this cache."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvcache import runner

pytest.importorskip("gguf")  # which models are written with
import bench_llama_cpp
import bench_llama_prefix
import bench_llama_sparse
import ik_llama_cpp
import llama_cpp_contexts
import llama_cpp_models
import llama_cpp_sparse_models
import llama_cpp_summary
import llama_models
from llama_cpp_build import folder
from llama_cpp_contexts import CACHES, INSTALL, Context, Library, LlamaError, Model

TINY = llama_cpp_models.SHAPES["tiny"]
WINDOWS = replace(TINY, architecture="gemma3", num_layers=6, window=32)
HYBRID = replace(TINY, architecture="lfm2", num_layers=6, head_dim=32, conv_size=3)
DELTA = replace(TINY, architecture="qwen35", num_layers=8, conv_size=4, delta_heads=2)


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


def written(shape, folder):
    """Return the path of a model of that shape, or of that architecture."""
    if isinstance(shape, str):
        return llama_models.write_random(folder, shape)
    llama_cpp_models.write_random(folder / "model.gguf", shape)
    return folder / "model.gguf"


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    "shape", [TINY, WINDOWS, HYBRID, DELTA, "qwen2vl", "deepseek2"], ids=lambda shape: str(shape)[:40]
)
def test_a_context_is_filled_at_once(library, tmp_path, shape, cache, dtype):
    if cache == "plain" and dtype != "f16":
        pytest.skip("llama.cpp has quantised V with flash attention only")
    model = Model(library, written(shape, tmp_path))
    context = Context(model, cache, dtype, 256, 2)
    assert context.fill(100)
    first, last = context.positions()
    assert last == 99
    if shape in (HYBRID, DELTA):  # whose recurrent layers hold the last position alone
        assert first == 99
    elif shape == WINDOWS:  # kvcache names the first position that its rows let the sequence go back to
        assert first in ((98,) if cache == "kvcache" else (68, 69))
    else:
        assert first == 0
    context.decode()
    context.check()
    context.rewind(100)  # recurrent layers are filled again
    assert (context.tokens, context.positions()[1]) == (100, 99)
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


def test_the_users_variables_change_no_context(library, tiny, monkeypatch):
    kept = {"LLAMA_KVCACHE": "1", "LLAMA_KVCACHE_TYPE_K": "int8", "LLAMA_KVCACHE_PREFIX": "on"}
    model = Model(library, tiny)
    usual = Context(model, "kvcache", "f16", 256, 1)
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    context = Context(model, "kvcache", "f16", 256, 1)
    assert context.nbytes == usual.nbytes
    assert {name: os.environ.get(name) for name in kept} == kept
    for each in (usual, context):
        each.close()
    model.close()


def bench_small_sparse(library, folder, monkeypatch, name, *options):
    """Run the benchmark on a small model of the architecture; return which speedups it has kept."""
    small = replace(llama_cpp_sparse_models.SHAPES[name], num_heads=4, top_k=32)
    monkeypatch.setitem(llama_cpp_sparse_models.SHAPES, name, small)
    monkeypatch.setattr(bench_llama_sparse, "MODELS", folder)
    common = [f"--library={library.folder}", "--steps=2", "--prompts=1", "--threads=1"]
    bench_llama_sparse.main([*common, f"--json={folder / 'run.json'}", *options])
    rows = json.loads((folder / "run.json").read_text())["rows"]
    return {(row["name"].removeprefix("sparse layer"), row["type"]) for row in rows if "quotient" in row}


@pytest.mark.parametrize("name", [name for name in llama_cpp_sparse_models.SHAPES if name != "glm-dsa"])
def test_a_layer_whose_tokens_choose_rows(library, tmp_path, monkeypatch, capsys, name):
    options = ("--model", name, "--context=300", "--types", "f16", "int8")
    found = bench_small_sparse(library, tmp_path, monkeypatch, name, *options)
    printed = capsys.readouterr().out
    assert "not kvcache" not in printed
    assert "prefilled" not in printed
    model = "" if name == "deepseek32" else f" of {name}"
    sections = ("decode",) if name == "deepseek4" else ("decode", "prompt")
    assert found == {(f"{model}, {section}, speedup", dtype) for section in sections for dtype in ("f16", "int8")}


@pytest.mark.parametrize("shape", [TINY, HYBRID, DELTA], ids=lambda shape: shape.architecture)
def test_a_conversation_goes_on_after_a_restart(library, tmp_path, capsys, shape):
    model = written(shape, tmp_path)
    bench_llama_prefix.main(
        [f"--library={library.folder}", f"--model={model}", "--tokens=200", "--threads=1", "--cpu-time"]
    )
    lines = capsys.readouterr().out.splitlines()[1:]
    found = {line[:38].strip(): int(line.split(" s, ")[1].split()[0]) for line in lines}
    assert found.pop("kvcache, from a folder") >= 128  # of 232
    assert found.pop("own cache, from a file") == 231  # the answer's last token has no row yet
    assert found.pop("prefix on, another slot") >= 128
    computed = ("prefix on, first slot", "prefix off, first slot", "prefix off, another slot")
    computed += ("kvcache, computed after a restart", "own cache, computed after a restart")
    assert found == dict.fromkeys(computed, 0)


# ---- the comparison


def test_every_section_once(library, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_llama_cpp, "SELECT_FROM", 300)
    bench_llama_cpp.main([
        f"--library={library.folder}", f"--model={tiny}", "--context", "0", "300", "--types", "f16", "q4_0",
        "--steps=1", "--prompt-context", "40", "--prompt-types", "q8_0", "--prompts=1", "--shared=40",
        "--only", "decode", "selected", "prompt", "bytes", "memory",
        "--select=40", f"--json={tmp_path / 'run.json'}", f"--output={tmp_path / 'picture.svg'}",
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert "decoding, tokens/s" in printed
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert {row["section"] for row in rows} == {"llama_cpp tiny"}
    rates = {(row["name"], row["type"], row["context"]) for row in rows if "rate" in row}
    own = {("f16", "flash attention"), ("f16", "without it"), ("q4_0", "flash attention")}
    for context in (0, 300):
        for dtype, name in {*own, ("f16", "kvcache"), ("q4_0", "kvcache")}:
            rates.remove((f"decoding, {name}", dtype, context))
    for dtype in ("f16", "q4_0"):
        for name in ("flash attention", "all rows", "selected"):
            rates.remove((f"decoding with select=40, {name}", dtype, 300))
    for name in (", flash attention", ", kvcache", " in bytes, stored", " in bytes, int8"):
        rates.remove((f"prompts of 512{name}", "q8_0", 40))
    assert not rates
    assert "prompts of 512 in bytes, speedup over stored" in {row["name"] for row in rows if "quotient" in row}
    assert {row["name"] for row in rows if row["type"] == "q4_0" and "quotient" in row} == {
        "decoding, speedup over the default",
        "decoding with select=40, speedup over the default",
        "decoding with select=40, speedup over all rows",
        "decoding, flash attention, speedup over its f16",
        "decoding, kvcache, speedup over its f16",
        "memory at 300 tokens, over the default",
        "memory of 64 sequences that share 40 tokens, over the default",
    }
    assert "llama.cpp" in (tmp_path / "picture.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--steps=0"], "--steps 0: must be at least 1"),
        (["--select=0"], "--select 0: must be at least 1"),
        (["--cpu-time", "--threads=2"], "--cpu-time is for --threads 1"),
        (["--context", "512", "-1"], "--context [512, -1]: must be at least 0"),
        (["--only", "memory", "--output=picture.svg"], "--output draws what the section decode measures"),
        (["--only", "ik-prompt"], "--only ik-prompt needs --ik"),
        (["--json=/nowhere/run.json"], "there is no folder /nowhere"),
        (["--json=/"], "/ is a folder"),
        (["--output=/nowhere/picture.svg"], "there is no folder /nowhere"),
        (["--output=picture.txt"], "--output picture.txt: must end with .svg, .png or .pdf"),
        (["--model=model.gguf", "--types", "f16", "q8_0"], "the section summary measures one type"),
        (["--ik=ik_llama.cpp", "--only", "decode"], "--ik is for the sections ik-decode and ik-prompt"),
    ],
)
def test_bad_options(arguments, says, capsys):
    with pytest.raises(SystemExit):
        bench_llama_cpp.options(arguments)
    assert says in capsys.readouterr().err


INTERRUPTED = """\
import os, runpy, signal, sys
import llama_cpp_contexts
llama_cpp_contexts.Library._note = lambda *_: os.kill(os.getpid(), signal.SIGINT)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
@pytest.mark.parametrize("bench", [bench_llama_cpp, bench_llama_sparse])
def test_an_interrupt_ends_the_run_also_while_llama_cpp_logs(library, tiny, tmp_path, bench):
    command = [sys.executable, "-c", INTERRUPTED, bench.__file__, f"--library={library.folder}", "--steps=1"]
    command += [f"--model={tiny}"] if bench is bench_llama_cpp else []
    environment = os.environ | {"PYTHONPATH": str(Path(bench.__file__).parent), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGINT, done.stderr


@pytest.mark.parametrize("arguments", [["--context", "0"], ["--context", "8k", "-4"], ["--json=/nowhere/run.json"]])
def test_bad_options_of_a_layer_whose_tokens_choose_rows(arguments, capsys):
    with pytest.raises(SystemExit):
        bench_llama_sparse.options(arguments)
    assert arguments[0].split("=")[0] in capsys.readouterr().err.splitlines()[-1]


def test_a_library_that_is_missing_ends_the_run(tiny, tmp_path):
    with pytest.raises(SystemExit, match=r"build\.sh"):
        bench_llama_cpp.main([f"--library={tmp_path}", f"--model={tiny}"])


# ---- the sentence about a model


def test_the_sentence_agrees_with_its_own_numbers():
    """The median of quotients would be 1.00 here."""
    own, ours, plain = [0.010, 0.010, 0.030, 0.030, 0.030], [0.010, 0.010, 0.030, 0.010, 0.010], [0.02] * 5
    steps = {llama_cpp_summary.OWN: own, llama_cpp_summary.OURS: ours, llama_cpp_summary.PLAIN: plain}
    said = llama_cpp_summary.sentence("a.gguf", 300, steps, 512, {name: steps[name][::-1] for name in steps})
    assert said == (
        "After 300 tokens, a.gguf decodes 100 tokens/s on this cache and 33.3 on llama.cpp's own (50.0 without flash "
        "attention): 3.0 times as fast; a prompt of 512 more tokens takes 0.0100 s and 0.0300 s: 3.0 times as fast."
    )


def test_the_folder_of_a_build_is_taken_for_its_bin(library):
    assert llama_cpp_contexts.Library(library.folder.parent).folder == library.folder


def summarise(library, model, *options):
    bench_llama_cpp.main([f"--library={library.folder}", f"--model={model}", "--steps=3", "--prompts=1", *options])


def test_a_model_of_the_users_ends_with_a_sentence(library, tiny, tmp_path, capsys):
    summarise(library, tiny, "--context", "64", "300", f"--json={tmp_path / 'run.json'}")
    rate, seconds, speedup = r"[\d,.]+", r"[\d.]+ s", r"[\d.]+ times as fast"
    assert re.fullmatch(
        rf"After 300 tokens, tiny\.gguf decodes {rate} tokens/s on this cache and {rate} on llama\.cpp's own "
        rf"\({rate} without flash attention\): {speedup}; a prompt of 512 more tokens takes {seconds} and {seconds}: "
        rf"{speedup}\.",
        capsys.readouterr().out.splitlines()[-1],
    )
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert {(row["name"], row["context"]) for row in rows if "kvcache" in row["name"]} == {
        ("decoding, kvcache", 64), ("decoding, kvcache", 300), ("prompts of 512, kvcache", 300)
    }  # fmt: skip


def test_contexts_are_no_longer_than_the_models(library, tmp_path, capsys):
    summarise(library, written(replace(TINY, max_seq_len=1024), tmp_path))
    printed = capsys.readouterr().out
    assert "longer contexts are left out: the model was trained for 1,024 tokens" in printed
    assert "After 896 tokens, model.gguf decodes" in printed
    assert "a prompt of 64 more tokens" in printed


def test_without_time_there_is_one_context_and_a_short_prompt(library, tiny, monkeypatch, capsys):
    monkeypatch.setattr(llama_cpp_summary, "SECONDS", 0)
    summarise(library, tiny, "--context", "64", "300", "5000")
    printed = capsys.readouterr().out
    assert "longer contexts are left out: three minutes are too short for" in printed
    assert "After 64 tokens" in printed
    assert "a prompt of 64 more tokens" in printed


def test_without_memory_there_is_none(library, tiny, monkeypatch):
    monkeypatch.setattr(llama_cpp_summary, "available_memory", lambda: (0, ""))
    with pytest.raises(SystemExit, match=r"tiny\.gguf cannot be measured: 64 tokens take .* here, and 0 B are free"):
        summarise(library, tiny, "--context", "64")


def test_prompts_are_read_where_no_state_can_be_made(library, tiny, monkeypatch, capsys):
    def fail(*_):
        raise ValueError

    monkeypatch.setattr(llama_cpp_contexts, "lengthen", fail)
    summarise(library, tiny, "--context", "600")
    printed = capsys.readouterr().out
    assert "no state of random rows can be made" in printed
    assert "After 600 tokens" in printed
    assert "without flash attention)" not in printed


@pytest.mark.parametrize(
    ("architecture", "why"),
    [("deepseek4", "the model reads images"), ("mamba", "the model has no attention")],
)
def test_a_model_that_is_not_served_is_named_with_the_reason(library, tmp_path, architecture, why):
    model = llama_models.write_random(tmp_path, architecture)
    with pytest.raises(SystemExit, match=rf"This cache does not serve {model.name}: {architecture}: {why}"):
        summarise(library, model)


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, r"is no file: .*bench/llama_cpp_models\.py"), (b"text", "invalid magic"), (b"GGUF", "cannot be loaded")],
)
def test_a_file_that_is_no_model_is_an_error(library, tmp_path, content, says):
    path = tmp_path / "model.gguf"
    if content:
        path.write_bytes(content)
    with pytest.raises(SystemExit, match=says):
        summarise(library, path)


def test_a_context_that_fits_after_all_is_measured(library, tiny, monkeypatch, capsys):
    """Then nothing says that it is left out: the time of shorter contexts was long by chance."""
    said = iter(["too slow", "", ""])
    monkeypatch.setattr(llama_cpp_summary.Run, "_refusal", lambda *_: next(said))
    summarise(library, tiny, "--context", "400")
    printed = capsys.readouterr().out
    assert "After 400 tokens" in printed
    assert "left out" not in printed


def test_a_busy_machine_is_named(library, tiny, monkeypatch, capsys):
    for load, is_busy in ((0.9, False), (1.1, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0, 0))
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        summarise(library, tiny, "--context", "64", "--threads=2")
        printed = capsys.readouterr().out
        assert (f"Other programs used the processors (load {load})" in printed) == is_busy
        assert ("or with OMP_WAIT_POLICY=passive" in printed) == is_busy
    for threads, policy in (("1", ""), ("2", "PASSIVE")):  # nothing spins
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        summarise(library, tiny, "--context", "64", f"--threads={threads}")
        printed = capsys.readouterr().out
        assert "measure again without them." in printed
        assert "OMP_WAIT_POLICY" not in printed


def test_costs_are_predicted_on_a_line():
    costs = llama_cpp_summary.Costs()
    costs.add("fill", 100, 1.0)
    costs.add("kvcache", 100, 0.2)
    assert costs.predict(400, 5) == pytest.approx(4 * 1 + 5 * 4 * 0.2)
    costs.add("fill", 200, 1.5)
    costs.add("kvcache", 200, 0.1)  # faster, by chance
    assert costs.predict(400, 5) == pytest.approx(2.5 + 5 * 0.1)


@pytest.mark.parametrize(
    ("most", "kept"), [(40_000, [512, 2048]), (2048, [512, 2048]), (2000, [512, 2000]), (600, [512]), (0, [])]
)
def test_the_longest_context_is_close_to_the_trained_one(most, kept):
    assert llama_cpp_summary.depths_within((2048, 512), most) == kept


# ---- ik_llama.cpp

# Answers as ik_llama.c does, with seconds that depend on the tokens and on K's type alone.
INSTANT_IK = """\
import sys
COST = {"f16": 4, "bf16": 3, "q8_KV": 6, "q8_0": 5, "q4_0": 8}
types, tokens = {}, {}
for line in sys.stdin:
    verb, key, *words = line.split()
    answer = "ok 1"
    if verb == "open":
        types[key] = words[0]
    elif verb in ("fill", "rewind"):
        tokens[key] = int(words[0])
    elif verb == "decode":
        answer = f"ok {1 + COST[types[key]] * tokens[key]}"
    print(answer, flush=True)
"""


class Instant:
    """Stands for a context with kvcache, whose attention takes a second for each token."""

    name, own = "kvcache", ""

    def __init__(self, model, cache, dtype, n_ctx, threads):
        self.tokens = 0

    def fill(self, tokens):
        self.tokens = tokens
        return True

    rewind = fill

    def decode(self, count=1):
        return 1 + self.tokens

    def check(self):
        pass

    def close(self):
        pass


def test_attention_alone_is_what_a_context_adds(tmp_path, monkeypatch, capsys):
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n{INSTANT_IK}")
    program.chmod(0o755)
    monkeypatch.setattr(ik_llama_cpp, "compiled", lambda folder: program)
    monkeypatch.setattr(bench_llama_cpp, "Context", Instant)
    o = bench_llama_cpp.options(["--ik=there", "--context=100", "--prompt-context=100", "--steps=2"])
    o.model = tmp_path / "llama-1b.gguf"
    report = bench_llama_cpp.Report(1, bench_llama_cpp.WANTED)
    bench_llama_cpp.ik_decode(report, None, o)
    bench_llama_cpp.ik_prompt(report, None, o)
    name = "speedup of attention alone over"
    found = {(row["name"], row["type"]): row["quotient"] for row in report.rows if name in row["name"]}
    cost = {"f16/f16": 4, "q8_KV/q8_0": 6, "q8_0/q8_0": 5, "q4_0/q4_0": 8}
    beside = {"f16": ["f16/f16"], "int8": ["q8_KV/q8_0", "q8_0/q8_0"], "int4": ["q4_0/q4_0"]}
    beside |= {"q8_0": beside["int8"], "q4_0": beside["int4"]}
    for dtype, theirs in beside.items():
        for other in theirs:
            assert found.pop((f"decoding beside ik_llama.cpp, {name} {other}", dtype)) == pytest.approx(cost[other])
            if cost[other] < 8:  # --prompt-types
                key = (f"prompts of 512 beside ik_llama.cpp, {name} {other}", dtype)
                assert found.pop(key) == pytest.approx(cost[other])
    for dtype in ("f16", "q8_0", "int8"):
        key = (f"prompts of 512 beside ik_llama.cpp's fastest type, {name} bf16/bf16", dtype)
        assert found.pop(key) == pytest.approx(3)
    assert not found
    assert "q8_KV/q8_0" in capsys.readouterr().out


def test_what_a_build_of_ik_llama_cpp_lacks_is_named(tmp_path):
    header = tmp_path / "include/llama.h"
    with pytest.raises(LlamaError, match=r"no include/llama\.h; .*git clone"):
        ik_llama_cpp.compiled(tmp_path)
    header.parent.mkdir()
    header.touch()
    with pytest.raises(LlamaError, match=r"no shared libllama and libggml; .*cmake -B build"):
        ik_llama_cpp.compiled(tmp_path)
    for name in ("llama", "ggml"):
        (tmp_path / f"build/{name}").mkdir(parents=True)
        (tmp_path / f"build/{name}/lib{name}.so").touch()
    with pytest.raises(LlamaError, match=r"ik_llama\.c does not fit what is there: .*error"):
        ik_llama_cpp.compiled(tmp_path)
    with pytest.raises(SystemExit, match="does not fit"):
        bench_llama_cpp.main([f"--ik={tmp_path}", f"--model={header}"])


@pytest.fixture(scope="module")
def ik_folder():
    named = os.environ.get("KVCACHE_IK_LLAMA_CPP")
    return Path(named) if named else pytest.skip("KVCACHE_IK_LLAMA_CPP names no clone of ik_llama.cpp that was built")


@pytest.mark.parametrize(
    ("shape", "dtype", "loads"),
    [
        ("tiny", "f16/f16", True), ("tiny", "q8_KV/q8_0", False), ("tiny", "q4_0/q4_0", True),
        ("glm-dsa", "f16/f16", True), ("glm-dsa", "q8_0/q8_0", True),
    ],
)  # fmt: skip
def test_a_context_of_ik_llama_cpp_is_filled(ik_folder, tmp_path, shape, dtype, loads):
    write = llama_cpp_models.write if shape == "tiny" else llama_cpp_sparse_models.write
    model = ik_llama_cpp.IkModel(ik_folder, write(shape, tmp_path), 2, cpu_time=loads)
    context = model.context(dtype, 3600)
    assert context.fill(3500) == loads
    assert context.decode() > 0
    context.rewind(3000)
    assert context.decode(512) > 0
    context.close()
    with pytest.raises(LlamaError, match="no such line or context"):
        context.decode()
    model.close()


def test_ik_llama_cpp_names_what_it_refuses(ik_folder, tmp_path):
    model = ik_llama_cpp.IkModel(ik_folder, llama_cpp_models.write("tiny", tmp_path), 2)
    with pytest.raises(LlamaError, match="no context of types int8 and f16"):
        model.context("int8/f16", 64)
    model.close()
    missing = ik_llama_cpp.IkModel(ik_folder, tmp_path / "none.gguf", 2)
    with pytest.raises(LlamaError, match="failed to load model"):
        missing.context("f16/f16", 64)
    missing.close()


def test_beside_ik_llama_cpp(library, ik_folder, tiny, tmp_path):
    bench_llama_cpp.main([
        f"--library={library.folder}", f"--model={tiny}", f"--ik={ik_folder}", "--only", "ik-decode",
        "ik-prompt", "--context=600", "--types", "f16", "q8_0", "q4_0", "--steps=1", "--prompt-context=40",
        "--prompts=1", f"--json={tmp_path / 'run.json'}",
    ])  # fmt: skip
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    speedups = {row["type"] for row in rows if "decoding beside ik_llama.cpp, speedup over" in row["name"]}
    assert speedups == {"f16", "q8_0", "int8", "q4_0", "int4"}


def test_a_layer_whose_tokens_choose_rows_beside_ik_llama_cpp(library, ik_folder, tmp_path, monkeypatch, capsys):
    options = (f"--ik={ik_folder}", "--context=1000", "--types", "q8_0", "int8", "--cpu-time")
    found = bench_small_sparse(library, tmp_path, monkeypatch, "glm-dsa", *options)
    assert "not kvcache" not in capsys.readouterr().out
    assert found == {
        (f" beside ik_llama.cpp, {section}, speedup{over}", dtype)
        for section in ("decode", "prompt")
        for over in ("", " over ik_llama.cpp")
        for dtype in ("q8_0", "int8")
    }
