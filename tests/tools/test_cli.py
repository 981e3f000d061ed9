"""The command, run as people run it: in a terminal and without one, with good and with hostile input."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.published_models import PUBLISHED
from support.repository_model import with_short_text
from support.row_types import TYPES
from support.saved_states import STATES
from support.terminal import run_in_terminal

import kvcache

pytest.importorskip("typer")
pytest.importorskip("rich")

from support.command import run_here

from kvcache import selecting
from kvcache.layer import DTYPES
from kvcache.tools import bench, cli, shown_plan, terminal

MODEL = str(Path(__file__).resolve().parents[2] / "examples/model")
COMMANDS = ["plan", "bench", "generate", "info", "selftest", "inspect"]


def run(*arguments, **environment):
    """Without a terminal."""
    code = [sys.executable, "-m", "kvcache", *map(str, arguments)]
    keep = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 600}
    return subprocess.run(code, env=keep | environment, **options)


def shell(line, **options):
    """Run a line as it is typed into a shell, where `kvcache` is the installed command."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        line, shell=True, capture_output=True, env=os.environ | {"PATH": path}, timeout=600, **options
    )


def check_refused(done, *words):
    """Check that the error is one sentence, without traceback, and stdout is empty."""
    assert done.returncode == 2, done.stderr
    assert not done.stdout
    assert done.stderr.startswith("kvcache: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


# ---- help


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_the_commands(arguments):
    done = run_here(*arguments)
    assert done.returncode == 0
    for command in COMMANDS:
        assert f"  {command} " in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_names_values(command):
    done = run_here(command, "--help")
    assert done.returncode == 0
    assert f"\n    kvcache {command}" in done.stdout
    assert not re.search(r"--[a-z-]+ <", done.stdout)  # typer's name of a type, in place of the value's


def test_python_m_is_the_command():
    varying = re.compile(r'"(free|longest_context|most_sequences)": \d+')
    for arguments in ("plan --help", f"plan {MODEL} --no-measure --json --context 9", "nonsense"):
        command = shell(f"kvcache {arguments}", text=True)
        module = shell(f"{sys.executable} -m kvcache {arguments}", text=True)
        assert (module.returncode, module.stderr) == (command.returncode, command.stderr)
        assert varying.sub("", module.stdout) == varying.sub("", command.stdout)
        assert "--help" not in arguments or module.stdout.startswith("Usage: kvcache plan ")


def test_python_m_without_the_extra(tmp_path):
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(name='typer')")
    check = "kvcache: there is no module typer; run: pip install 'kvcache[cli]'\n"
    assert run("--help", PYTHONPATH=str(tmp_path)).stderr == check
    assert run("selftest", "--json", PYTHONPATH=str(tmp_path)).stderr == check


def test_selftest_needs_numpy_alone(tmp_path):
    """It is what somebody runs first, on a machine for which other packages may have no wheels."""
    for module in ("typer", "rich", "psutil", "gguf", "tokenizers"):
        (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError(name='{module}')")
    alone = run("selftest", PYTHONPATH=str(tmp_path))
    assert (alone.returncode, alone.stderr) == (0, "")
    assert alone.stdout.splitlines()[-1] == run("selftest").stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("event", "status", "said"),
    [
        ("OSError(28, 'No space left on device')", 2, "kvcache: No space left on device\n"),
        ("BrokenPipeError", 1, ""),
        ("KeyboardInterrupt", 130, ""),
    ],
)
def test_selftest_ends_without_the_extra_as_with_it(event, status, said, tmp_path):
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(name='typer')")
    code = f"""
import sys
from kvcache import __main__
from kvcache.tools import selftest

def stopped():
    raise {event}

sys.argv[1:] = ["selftest"]
selftest.main = stopped
__main__.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (status, said)


@pytest.mark.parametrize("command", [[], *([command] for command in COMMANDS)])
def test_help_fits_a_terminal(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run_here(*command, "--help").stdout.splitlines()
    assert lines[0].startswith("Usage: kvcache ")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("columns", ["80", "60", "40"])
def test_help_cuts_no_summary(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    summary = run_here("--help").stdout
    for command in COMMANDS:
        said = " ".join(run_here(command, "--help").stdout.split("\n\n")[1].split())
        assert said.endswith(".")
        assert f"{command} {said}" in " ".join(summary.split())


@pytest.mark.parametrize("command", ["plan", "generate"])
def test_help_names_the_types(command):
    help_text = " ".join(run_here(command, "--help").stdout.split())
    assert f": {', '.join(DTYPES[:-1])} or {DTYPES[-1]}" in help_text


def test_version_and_completion():
    assert run("--version").stdout.strip() == kvcache.__version__
    shown = run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_KVCACHE_COMPLETE=complete_bash" in shown.stdout


@pytest.mark.parametrize("line", re.findall(".* =>.*", Path(__file__).with_name("refusals.txt").read_text()))
def test_what_is_refused(line):
    for name, text in {" MODEL": f" {MODEL}", "URL": "https://host//x.svg", "DTYPES": ", ".join(DTYPES)}.items():
        line = line.replace(name, text)
    command, words = line.split(" =>")
    check_refused(run_here(*shlex.split(command)), *words.strip().split(" | "))


# ---- warnings

UNKNOWN = {"model_type": "mystery", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
PLAN = ["plan", "--no-measure", "--weights", "none"]


def with_a_warning(tmp_path):
    """Return the folder of a model that runs, whose configuration has a field that is not read."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sparse_config": {"block": 16}}))
    return folder


@pytest.mark.parametrize("command", [["plan", "--no-measure"], ["generate", "--tokens", "1", "--quiet"]])
def test_a_warning_is_one_sentence(tmp_path, command):
    folder = with_a_warning(tmp_path)
    done = run(*command, folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    said = "sparse_config is not read: layers keep every row, of which they read some"
    assert done.stderr == f"kvcache: warning: {folder}/config.json: {said}\n"


def test_filters_of_warnings_count(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(UNKNOWN))
    said = f"{tmp_path}/config.json: model_type 'mystery' is not known: "
    done = run(*PLAN, tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert done.stderr.startswith(f"kvcache: warning: {said}")
    assert run(*PLAN, tmp_path, PYTHONWARNINGS="ignore").stderr == ""
    check_refused(run(*PLAN, tmp_path, PYTHONWARNINGS="error"), f"kvcache: {said}")


def test_warnings_for_developers_keep_their_form(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))

    def warn():
        for category in (UserWarning, FutureWarning):
            warnings.warn(f"a {category.__name__}", category, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.raises(SystemExit):
            terminal.run(warn)
    assert (capsys.readouterr().err, shown) == ("kvcache: warning: a UserWarning\n", ["a FutureWarning"])


# ---- plan


def measure_nothing(monkeypatch):
    """Take the rates of a plan for granted."""
    monkeypatch.setattr(bench, "read_bandwidth", lambda threads, seconds: 1e12)
    monkeypatch.setattr(bench, "decode_rates", lambda shape, dtypes, _: dict.fromkeys(dtypes, 1e12))


def rows_of(done):
    """Return the lines of a plan for the model's own policies."""
    lines = done.stdout.split("\nthe model's own\n")[1].split("\n\n")[0].splitlines()
    return lines[1:]


def test_plan():
    done = run("plan", MODEL, "--no-measure", "--context", 1000, "--sequences", 3)
    assert done.returncode == 0
    assert not done.stderr
    assert "\x1b" not in done.stdout
    lines = {line.split()[0]: line.split() for line in rows_of(done)}
    assert list(lines) == ["f16", "int8", "int6", "int6/int4", "int4"]
    cache = kvcache.KVCache.from_config(MODEL, k_dtype="int6", v_dtype="int4")
    assert lines["int6/int4"][1] == f"{3000 * cache.most_bytes(1) / 2**20:.1f}"
    assert "\n4 layers of 2 KV heads x 64, FullAttention()\n    f16 2,048  int8 1,056  " in done.stdout


def test_plan_writes_numbers_of_sequences_and_tokens_alike():
    text = run_here(*PLAN, MODEL, "--context", 1, "--sequences", "1k").stdout
    assert "\n1,024 sequences of 1 token\n" in text
    assert "cache of 1,024 sequences" in " ".join(text.split())


def test_plan_fits_80_columns(tmp_path, monkeypatch):
    measure_nothing(monkeypatch)
    config = LLAMA_8B | {
        "model_type": "gemma3_text",
        "sliding_window": 1024,
        "layer_types": ["sliding_attention", "full_attention"] * 16,
        "head_dim": 256,
        "quantization_config": {"quant_method": "a method with a long name"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--context", "1000M", "--sequences", 100, "--window", "100_000", "--sink-tokens", "4"]
    lines = run_here("plan", tmp_path / "config.json", *options).stdout.splitlines()
    assert sum(line.startswith("f16 ") for line in lines) == 2
    assert sum(line.startswith("    bf16 ") for line in lines) == 5
    assert "SlidingWindow(window=100000, num_sink_tokens=4)" in lines
    assert sum(line == "more while a prompt runs" for line in lines) == 2
    assert max(map(len, lines)) <= 80


def test_plan_as_json():
    done = run_here("plan", MODEL, "--no-measure", "--json", "--dtype", "f16", "--dtype", "q4_0", "--window", 64)
    made = json.loads(done.stdout)
    assert [(row["policy"][:3], row["dtype"]) for row in made["rows"]] == [
        ("the", "f16"),
        ("the", "q4_0"),
        ("Sli", "f16"),
        ("Sli", "q4_0"),
    ]
    cache = kvcache.KVCache.from_config(MODEL, dtype="f16")
    own, slid = made["rows"][0], made["rows"][2]
    assert own["nbytes"] == cache.most_bytes(made["context"])
    assert slid["nbytes"] == cache.most_bytes(64)
    assert slid["longest_context"] is None
    assert own["prompt_nbytes"] == 0
    assert slid["prompt_nbytes"] == cache.most_bytes(512)
    longest = own["longest_context"]
    assert own["needs"] == own["nbytes"] + made["memory"]["weights"]
    assert slid["needs"] == slid["nbytes"] + slid["prompt_nbytes"] + made["memory"]["weights"]
    left = made["memory"]["free"] - made["memory"]["weights"]
    assert longest * cache.most_bytes(1) <= left < (longest + 1) * cache.most_bytes(1)


def test_numbers_of_tokens_as_people_write_them():
    for text in ("8192", "8k", "8K", "8_192", "8,192"):
        made = json.loads(run_here("plan", MODEL, "--no-measure", "--json", "--context", text, "--window", "1k").stdout)
        assert made["context"] == 8192
        assert "window=1024" in made["rows"][-1]["policy"]
    assert json.loads(run_here("plan", MODEL, "--no-measure", "--json", "--context", "1M").stdout)["context"] == 1 << 20
    made = json.loads(run_here("plan", MODEL, "--no-measure", "--json", "--sequences", "1k").stdout)
    assert made["sequences"] == 1024


def test_plan_for_another_machine(tmp_path, monkeypatch):
    monkeypatch.delattr("kvcache.tools.bench.decode_rates")  # nothing is measured
    monkeypatch.delattr("kvcache.system.available_memory")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    options = [tmp_path, "--memory", "512GB", "--bandwidth", "400 GB/s", "--context", "8k", "--dtype", "f16"]
    done = run_here("plan", *options)
    assert "\nmemory: 476.8 GiB free (as given)\n" in done.stdout
    assert "\nmemory is read at 400.0 GB/s (as given; computing attention counts with --cores)\n" in done.stdout
    assert rows_of(done)[0].split() == ["f16", "1.0", "GiB", "16.0", "GiB", "yes", "3,783,717", "461", "25"]
    words = " ".join(done.stdout.split())
    assert "needs: weights, cache of 1 sequence; without the buffers of the program that runs the model" in words
    assert "decoding one sequence at that context: a token reads 14.0 GiB of weights and the rows that it sees" in words
    assert "max context: what memory holds; the model is trained for 131,072 tokens" in words
    made = json.loads(run_here("plan", *options, "--json").stdout)
    assert (made["memory"]["free"], made["memory"]["source"]) == (512 * 10**9, "as given")
    assert (made["bandwidth"], made["bandwidth_source"]) == (4e11, "as given; computing attention counts with --cores")
    (row,) = made["rows"]
    assert row["needs"] == 2 * PARAMETERS + row["nbytes"]
    assert row["tokens_per_second"] == pytest.approx(4e11 / (made["memory"]["weights_read"] + row["nbytes"]))
    done = run_here("plan", *options, "--sequences", 10, "--context", "1M")
    words = " ".join(done.stdout.split())
    assert "tokens/s: at most, of 10 sequences that decode together at that context, each 1/10 of it: a step" in words
    assert "the model is trained for 131,072 tokens: this context is longer" in words


def test_cores_are_planned_with(monkeypatch):
    threads = []
    monkeypatch.setattr(bench, "read_bandwidth", lambda threads, seconds: 1e9)
    monkeypatch.setattr(
        bench, "decode_rates", lambda shape, dtypes, _: threads.append(shape.threads) or dict.fromkeys(dtypes, 1e9)
    )
    options = ["--cores", 64, "--bandwidth", "400GB/s", "--weights", "none", "--json"]
    made = json.loads(run_here("plan", MODEL, *options).stdout)
    assert (threads, made["bandwidth"]) == ([1], 4e11)
    assert all(row["tokens_per_second"] == pytest.approx(64e9 / row["read_nbytes"]) for row in made["rows"])


@pytest.mark.parametrize(
    ("rate", "cell"),
    [(1234.5, "1,200"), (99.6, "100"), (12.6, "13"), (9.96, "10"), (2.345, "2.3"), (0.996, "1.0"),
     (0.434, "2.3 s/token"), (0.05, "20 s/token"), (0.001, "1,000 s/token"), (None, "-")],
)  # fmt: skip
def test_speeds_have_two_digits(rate, cell):
    assert shown_plan.speed(rate) == cell


def test_plan_names_recurrent_states(tmp_path):
    config = {"model_type": "qwen3_5_text", "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 24}
    heads = {"num_key_heads": 16, "num_value_heads": 48, "key_head_dim": 128, "value_head_dim": 128}
    config |= {"head_dim": 256, "num_key_value_heads": 4, **{f"linear_{name}": n for name, n in heads.items()}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = [tmp_path, "--weights", "none", "--bandwidth", "100GB/s", "--context", "4k"]
    text = run_here("plan", *options).stdout
    words = " ".join(text.split())
    assert "\nrecurrent states: 149.6 MiB for each sequence (in 48 layers)\n" in text
    assert "\n48 layers without attention\n16 layers of 4 KV heads x 256, " in text
    assert "needs: cache and recurrent states of 1 sequence;" in words
    assert "a token reads 149.6 MiB of states (and writes them) and the rows that it sees" in words
    made = json.loads(run_here("plan", *options, "--json").stdout)
    assert round(made["memory"]["states"] / 2**20, 2) == 149.62
    assert {row["needs"] - row["nbytes"] for row in made["rows"]} == {made["memory"]["states"]}


def test_plan_says_what_a_token_reads_of_experts(tmp_path):
    mixtral = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    text, made = plan_of(tmp_path, LLAMA_8B | mixtral, "--context", "1k")
    words = " ".join(text.stdout.split())
    assert "weights: 88.5 GiB (47,491,321,856 parameters in bf16), of which a token reads 24.5 GiB" in words
    assert made["memory"]["weights_read"] == pytest.approx(2 * (13.67e9 - 128256 * 4096), rel=1e-3)
    assert made["memory"]["share_used"] == 0.25
    text, _ = plan_of(
        tmp_path, LLAMA_8B | mixtral | {"quantization_config": {"quant_method": "a"}}, "--bandwidth", "1TB/s"
    )
    assert "tokens/s: not known, because it is not known how much a token" in " ".join(text.stdout.split())
    assert {line.split()[-1] for line in rows_of(text)} == {"-"}


def test_types_of_a_plan():
    def types(*given):
        options = itertools.chain.from_iterable(("--dtype", one) for one in given)
        made = json.loads(run_here("plan", MODEL, "--no-measure", "--json", *options).stdout)
        return [row["dtype"] for row in made["rows"]]

    assert types("all") == [*TYPES, "int6/int4"]
    assert types("q8_0", "float16/q4_0", "int8/int8", "q8_0") == ["q8_0", "f16/q4_0", "int8"]


def test_plan_says_in_a_terminal_what_it_measures():
    status, sent, _ = run_in_terminal([sys.executable, "-m", "kvcache", "plan", MODEL, "--dtype", "f16"])
    assert status == 0
    assert "measuring attention" in sent


# ---- the weights in a plan

LLAMA_8B = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
PARAMETERS = 8_030_261_248


def plan_of(tmp_path, config, *options):
    (tmp_path / "config.json").write_text(json.dumps(config))
    text, as_json = run_here("plan", tmp_path / "config.json", "--no-measure", *options), None
    if not text.returncode:
        as_json = json.loads(run_here("plan", tmp_path / "config.json", "--no-measure", "--json", *options).stdout)
    return text, as_json


def fits_of(done):
    """Return what the column says."""
    lines = done.stdout.splitlines()
    heading = next(line for line in lines if line.startswith("type "))
    first, end = heading.index("fits"), heading.index("max context")
    return {line[first:end].strip() for line in rows_of(done)}


def test_weights_are_counted_from_the_configuration_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # the extra [cli] does not bring it
    text, made = plan_of(tmp_path, LLAMA_8B)
    assert "weights: 15.0 GiB (8,030,261,248 parameters in bf16)" in text.stdout
    assert (made["memory"]["weights"], made["memory"]["num_parameters"]) == (2 * PARAMETERS, PARAMETERS)
    text, made = plan_of(tmp_path, LLAMA_8B | {"torch_dtype": None})
    assert "parameters in f32, as the configuration names no type" in " ".join(text.stdout.split())
    assert made["memory"]["weights"] == 4 * PARAMETERS


def test_weights_in_a_type(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    types = {"q4_0": PARAMETERS // 32 * 18, "Q8_0": PARAMETERS // 32 * 34, "q4_k": PARAMETERS // 256 * 144}
    for given, nbytes in {**types, "f16": 2 * PARAMETERS}.items():
        _, made = plan_of(tmp_path, LLAMA_8B, "--weights", given, "--context", "1k")
        assert made["memory"]["weights"] == nbytes


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        ("4.7GB", 4_700_000_000),
        ("4.5GiB", int(4.5 * 2**30)),
        ("800M", 800 << 20),
        ("0", 0),
        ("none", 0),
        ("100TB", 10**14),
    ],
)
def test_weights_of_a_size(tmp_path, given, nbytes):
    _, made = plan_of(tmp_path, LLAMA_8B, "--weights", given, "--context", "1k")
    assert made["memory"]["weights"] == nbytes
    for row in made["rows"]:
        assert row["fits"] is (nbytes + row["nbytes"] <= made["memory"]["free"])


@pytest.mark.hf
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "xverse"}, "transformers knows no model_type 'xverse'"),
        ({"vocab_size": -1}, "transformers cannot make the model ("),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "8,030,261,248 parameters, packed by gptq"),
        ({"torch_dtype": "float3"}, "8,030,261,248 parameters in float3"),
        ({"quantization_config": 4}, "quantization_config must be an object"),
    ],
)
def test_weights_that_are_not_counted(tmp_path, change, words):
    text, made = plan_of(tmp_path, LLAMA_8B | change, "--context", "1k")
    said = " ".join(text.stdout.split())
    assert "weights: not counted; give --weights, such as " in said
    assert words in said
    assert "give --weights" in said
    assert fits_of(text) == {"maybe"}
    assert made["memory"]["weights"] is None
    assert {row["fits"] for row in made["rows"]} == {None}
    for options, fits in ((["--context", "1000M"], "no"), (["--context", "1k", "--weights", "1M"], "yes")):
        assert fits_of(run_here("plan", tmp_path / "config.json", "--no-measure", *options)) == {fits}


def test_weights_in_a_type_need_a_count(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    config = LLAMA_8B | {"model_type": "olmo"}
    text, made = plan_of(tmp_path, config)
    said = " ".join(text.stdout.split())
    assert (
        "needs torch, which is not installed; run: pip install transformers, and pip install torch --index-url" in said
    )
    assert "give --weights, such as 4.7GB" in said
    assert made["memory"]["weights"] is None
    text, _ = plan_of(tmp_path, config, "--weights", "q4_0")
    check_refused(text, "counting needs torch", "--weights", "4.7GB")


def test_weights_of_files_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    index = tmp_path / "model.safetensors.index.json"
    sizes = {"total_size": 31_000_000_000, "total_parameters": 15_500_000_000}
    index.write_text(json.dumps({"metadata": sizes, "weight_map": {"a": "model-00001-of-00009.safetensors"}}))
    config = LLAMA_8B | {"model_type": "olmo"}
    text, made = plan_of(tmp_path, config, "--context", "1k")
    assert "weights: 28.9 GiB (as model.safetensors.index.json says)" in " ".join(text.stdout.split())
    memory = made["memory"]
    assert (memory["weights"], memory["num_parameters"]) == (sizes["total_size"], sizes["total_parameters"])
    _, made = plan_of(tmp_path, config, "--context", "1k", "--weights", "q8_0")
    assert made["memory"]["weights"] == sizes["total_parameters"] // 32 * 34
    index.write_text(json.dumps({"metadata": {"total_size": "31 GB"}}))
    check_refused(plan_of(tmp_path, config)[0], "total_size must be a whole number from 1 to", "index.json")


@pytest.mark.hf
def test_weights_of_files(tmp_path):
    def memory_of(path, *options):
        return json.loads(run_here("plan", path, "--no-measure", "--json", *options).stdout)["memory"]

    size = (Path(MODEL) / "model.safetensors").stat().st_size
    for path in (MODEL, f"{MODEL}/config.json"):
        memory = memory_of(path)
        assert (memory["weights"], memory["num_parameters"]) == (size, None)
    memory = memory_of(MODEL, "--weights", "f16")
    assert memory["weights"] == memory["num_parameters"] * 2
    assert 0 < size - memory["weights"] < 10_000  # the file's header
    shards = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(shards))
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(100))
    assert plan_of(tmp_path, LLAMA_8B)[1]["memory"]["weights"] == 2 * PARAMETERS  # a part is missing
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(bytes(200))
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(300))  # the same again
    assert plan_of(tmp_path, LLAMA_8B)[1]["memory"]["weights"] == 300


def test_weights_of_a_gguf(tmp_path):
    gguf_files = pytest.importorskip("support.gguf_files")
    metadata = {"block_count": 1, "attention.head_count": 2, "embedding_length": 64, "context_length": 99}
    metadata = {f"llama.{name}": value for name, value in metadata.items()}
    tensors = [("token_embd.weight", np.zeros((8, 64), np.float32), None)]
    names = [f"a-{i:05}-of-00002.gguf" for i in (1, 2)]
    whole, *parts = (gguf_files.write(tmp_path / name, "llama", metadata, tensors) for name in ("a.gguf", *names))

    def weights_of(path, *options):
        return json.loads(run_here("plan", path, "--no-measure", "--json", *options).stdout)["memory"]["weights"]

    assert weights_of(whole) == whole.stat().st_size
    assert weights_of(whole, "--weights", "q8_0") == 8 * 64 // 32 * 34
    assert weights_of(parts[0]) == sum(part.stat().st_size for part in parts)
    assert weights_of(parts[1], "--weights", "f16") == 2 * 2 * 8 * 64
    parts[1].unlink()
    assert weights_of(parts[0]) is None
    empty = gguf_files.write(tmp_path / "empty.gguf", "llama", metadata, [])
    assert "weights: not counted; give --weights, such as 4.7GB (the file has no tensors)" in " ".join(
        run_here("plan", empty, "--no-measure").stdout.split()
    )
    assert "1 of the model's 2 files are there" in " ".join(run_here("plan", parts[0], "--no-measure").stdout.split())
    check_refused(run_here("plan", parts[0], "--weights", "f16"), "1 of the model's 2 files are there", "--weights")


@pytest.mark.full  # test_plan_measures_selected_rows and test_plan_says_in_a_terminal_what_it_measures measure less
def test_plan_measures():
    done = run("plan", MODEL, "--json")
    assert done.stderr == ""
    assert all(row["tokens_per_second"] > 0 for row in json.loads(done.stdout)["rows"])


def test_files_that_cannot_be_used_are_named_without_a_number(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    missing = tmp_path / "nosuch" / "config.json"
    for command in ("plan", "bench", "generate"):
        for path, said in ((missing, f"there is no {missing}"), (folder, f"{folder} has no config.json")):
            done = run_here(command, path)
            check_refused(done, said)
            assert "Errno" not in done.stderr
            assert "downloads" not in done.stderr
    done = run_here("plan", MODEL, "--no-measure", "--plot", "/proc/a.png")
    check_refused(done, "/proc/a.png: ")
    assert "Errno" not in done.stderr


@pytest.mark.parametrize("prompt", ["ROMEO:", "Hello", "a/b"])
def test_a_prompt_in_the_place_of_the_model(prompt):
    advice = "MODEL comes first, such as examples/model, then PROMPT"
    check_refused(run_here("generate", prompt), f"there is no {prompt}", advice)
    assert advice not in run_here("generate", prompt, "a prompt").stderr
    assert advice not in run_here("plan", prompt).stderr


def test_plan_as_it_is_typed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    done = shell("kvcache plan config.json --weights 4.7GB --context 128k --no-measure", cwd=tmp_path, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "weights: 4.4 GiB (as given), of which a token reads 4.1 GiB\n" in done.stdout
    assert "1 sequence of 131,072 tokens" in done.stdout
    done = shell("kvcache plan nosuch/config.json", cwd=tmp_path, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "kvcache: there is no nosuch/config.json\n")
    done = shell("kvcache plan nofile.json", cwd=tmp_path, text=True)
    assert (done.returncode, done.stderr) == (2, "kvcache: there is no nofile.json\n")
    done = shell("kvcache plan meta-llama/Llama-3.1-8B", cwd=tmp_path, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "`hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B`" in done.stderr


def test_plan_draws(tmp_path):
    pytest.importorskip("matplotlib")
    assert run_here("plan", MODEL, "--no-measure", "--plot", tmp_path / "a.svg").returncode == 0
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")
    assert run_here("plan", MODEL, "--no-measure", "--plot", tmp_path / "b.PNG").returncode == 0
    assert (tmp_path / "b.PNG").read_bytes().startswith(b"\x89PNG")
    for name in (tmp_path / "a.bogus", tmp_path / "nowhere" / "a.png"):
        check_refused(run_here("plan", MODEL, "--no-measure", "--plot", name), str(name.relative_to(tmp_path).parts[0]))


@pytest.fixture
def drawn(monkeypatch):
    """The caches whose memory a plan draws, by name."""
    plot = pytest.importorskip("kvcache.plot", exc_type=ImportError)
    drawn, draw = {}, plot.memory
    monkeypatch.setattr(
        plot, "memory", lambda caches, *limit, **more: drawn.update(caches) or draw(caches, *limit, **more)
    )
    return drawn


def test_plan_draws_the_window_too(tmp_path, drawn):
    types = ["--dtype", "f16", "--dtype", "q8_0"]
    done = run_here("plan", MODEL, "--no-measure", *types, "--window", "1k", "--plot", tmp_path / "a.svg")
    assert done.returncode == 0, done.stderr
    window = "SlidingWindow(window=1024)"
    assert [*drawn] == ["f16", "q8_0", f"f16, {window}", f"q8_0, {window}"]
    policies = [kvcache.FullAttention()] * 2 + [kvcache.SlidingWindow(1024)] * 2
    assert [{layer.policy for layer in cache.layers} for cache in drawn.values()] == [{policy} for policy in policies]


LLAMA_1B = LLAMA_8B | {"num_hidden_layers": 16, "hidden_size": 2048, "max_position_embeddings": 131_072}


def test_plan_of_selected_rows(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B))
    measure_nothing(monkeypatch)
    rates = bench.SelectRates(1e12, 1e12)
    monkeypatch.setattr("kvcache.tools.bench.select_rates", lambda shape, select, dtypes: dict.fromkeys(dtypes, rates))
    done = run_here("plan", tmp_path, "--select", "2k", "--weights", "none", "--dtype", "f16", "--dtype", "int8")
    assert done.returncode == 0, done.stderr
    assert "\n\nselect=2048\ntype  " in done.stdout
    said = "14 layers with sketches, 252.0 MiB in all; a token reads\n    f16 822.2 MiB  int8 546.0 MiB\n"
    assert said in done.stdout
    made = json.loads(run_here("plan", tmp_path, "--select", "2k", "--weights", "none", "--json").stdout)
    rows = {(row["policy"], row["dtype"]): row for row in made["rows"]}
    assert len(rows) == 2 * 6  # with the model's own, bf16
    selecting, dense = rows["select=2048", "int8"], rows["the model's own", "int8"]
    assert selecting["tokens_per_second"] == pytest.approx(1e12 / selecting["read_nbytes"])
    assert 3 * selecting["read_nbytes"] < dense["read_nbytes"] == dense["nbytes"]


def test_plan_measures_selected_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "cache_size", lambda: 1 << 20)  # some machines have 480 MiB
    config = LLAMA_1B | {"num_hidden_layers": 3, "num_key_value_heads": 1, "num_attention_heads": 4, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--dtype", "f16", "--context", "8k", "--select", 100, "--json", "--threads", 1]
    dense, selecting = json.loads(run_here("plan", tmp_path, *options).stdout)["rows"]
    assert selecting["num_selecting"] == 1
    assert min(dense["tokens_per_second"], selecting["tokens_per_second"]) > 0


def test_plan_draws_sketches_too(tmp_path, drawn):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B))
    options = ["--no-measure", "--dtype", "f16", "--select", 50, "--plot", tmp_path / "a.svg"]
    done = run_here("plan", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert {name: sum(layer.sketch for layer in cache.layers) for name, cache in drawn.items()} == {
        "f16": 0, "f16, select=50": 14}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--select", "2k", "--context", "4k"], "of a text of 4,096 tokens: give --context 8,192 or more"),
        (["--select", "64k"], "of a text of 131,072 tokens: give --context 131,153 or more"),
        (["--select", "0"], "0 is not in the range from 1"),
        (["--select", "2.5"], "2.5"),
    ],
)
def test_plan_refuses_selections(tmp_path, options, says):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B))
    check_refused(run_here("plan", tmp_path, "--no-measure", *options), "--select", says)


def test_plan_of_latents(tmp_path):
    mla = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16,
           "num_hidden_layers": 4, "hidden_size": 2048, "max_position_embeddings": 131_072}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(mla))
    text = run_here(*PLAN, tmp_path, "--bandwidth", "400GB/s").stdout
    words = " ".join(text.split())
    assert "attention/s: not known from --bandwidth alone; give --cores as well" in words
    assert words.endswith("left out: int6/int4: values of this deepseek_v3 lie in its keys, and have their type")
    check_refused(run_here("plan", tmp_path, "--select", "2k"), "select=2048: no layer of the model can select rows")


def test_plan_of_types_that_the_heads_do_not_suit(tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 80}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = json.loads(run_here("plan", tmp_path, "--no-measure", "--json", "--dtype", "all").stdout)
    assert [row["dtype"] for row in made["rows"]] == ["f32", "f16", "bf16"]
    made = json.loads(run_here("plan", tmp_path, "--no-measure", "--json").stdout)
    assert [row["dtype"] for row in made["rows"]] == ["f16"]
    check_refused(run_here("plan", tmp_path, "--dtype", "f16", "--dtype", "q8_0"), "32", "q8_0")


def test_plan_of_a_model_with_an_encoder(tmp_path):
    bart = {"is_encoder_decoder": True, "decoder_layers": 2, "decoder_attention_heads": 4, "d_model": 128}
    (tmp_path / "config.json").write_text(json.dumps(bart))
    check_refused(run("plan", tmp_path), "max_source_len")
    made = json.loads(run("plan", tmp_path, "--no-measure", "--json", "--max-source-len", 50).stdout)
    assert [group["policy"] for group in made["groups"]] == ["FullAttention()", "CrossAttention(max_len=50)"]


@pytest.mark.parametrize(
    ("name", "num_layers", "more"),
    [("DeepSeek V3.2", 61, 61), ("MiniMax M3", 60, 57)],
)
def test_layers_of_the_model_are_counted_not_those_of_its_cache(tmp_path, monkeypatch, name, num_layers, more):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name].config))
    said = run_here(*PLAN, tmp_path).stdout
    assert f", {num_layers} layers, trained for " in said
    assert f"\nbeside {more} layers: 1 KV head x 128 (keys alone), FullAttention()\n" in said
    made = json.loads(run_here(*PLAN, tmp_path, "--json").stdout)
    assert made["num_layers"] == num_layers
    assert [(group["num_layers"], group["beside"]) for group in made["groups"]] == [(num_layers, False), (more, True)]
    measured = []
    monkeypatch.setattr(bench, "measure", lambda shape, **_: measured.append(shape) or iter([bench.Result({})]))
    assert run_here("bench", tmp_path, "--json").returncode == 0
    assert measured[0].num_layers == num_layers


def test_pictures_need_matplotlib(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError")
    done = run("plan", MODEL, "--no-measure", "--plot", "a.png", PYTHONPATH=str(tmp_path))
    check_refused(done, "pip install 'kvcache[plot]'")


def gguf(*parts):
    return b"GGUF" + struct.pack("<I", 3) + b"".join(parts)


HOSTILE = {  # some of what tests/models/test_hostile_files.py has
    "missing": None,
    "empty.gguf": b"",
    "many.gguf": gguf(struct.pack("<QQ", 2**63, 2**63 - 1)),
    "deep.json": b"[" * 1_000_000,
    "control.json": b'{"model_type": "a\\u001b[2Jb\\n", "num_hidden_layers": 0}',
}


@pytest.mark.parametrize(
    ("command", "name"), [*(("plan", name) for name in HOSTILE), ("generate", "many.gguf"), ("bench", "control.json")]
)
def test_hostile_files(tmp_path, command, name):
    path = tmp_path / name
    if HOSTILE[name] is not None:
        path.write_bytes(HOSTILE[name])
    done = run_here(command, path)
    check_refused(done, str(path))
    assert len(done.stderr) < 500
    assert "\x1b" not in done.stderr


# ---- bench and generate


QUICK_BENCH = ["bench", "--seconds", 1, "--context", 64, "--no-peers", "--threads", 1]


@pytest.mark.slow
def test_bench(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    from kvcache.tools import bench

    monkeypatch.setattr(bench, "cache_size", lambda: 8 << 20)  # some machines have 480 MiB: that takes most of a minute
    picture = tmp_path / "speed.png"
    record = json.loads(run_here(*QUICK_BENCH, MODEL, "--json", "--plot", picture).stdout)
    assert {row["type"] for row in record["rows"]} == set(DTYPES)
    assert {row["part"] for row in record["rows"]} == {"decode", "prefill", "append"}
    assert (record["shape"]["head_dim"], record["shape"]["context"]) == (64, 64)
    assert picture.read_bytes().startswith(b"\x89PNG")
    cli._print_bench(record)
    assert "memory is read at" in capsys.readouterr().out


def test_bench_needs_a_folder_for_its_picture(tmp_path):
    pytest.importorskip("matplotlib")
    check_refused(run_here(*QUICK_BENCH, "--plot", tmp_path / "nowhere" / "a.png"), "nowhere")


def test_generate():
    arguments = ["generate", MODEL, "ROMEO:", "--tokens", 20, "--temperature", 0, "--dtype", "q8_0"]
    alone, quiet = run(*arguments), run_here(*arguments, "--quiet")
    assert (alone.returncode, quiet.returncode) == (0, 0)
    assert alone.stdout.startswith("ROMEO:")
    assert len(alone.stdout) > 10
    assert alone.stdout == quiet.stdout  # and no table
    assert quiet.stderr == ""
    assert alone.stderr.startswith("(prefill 6 tokens, ")
    assert alone.stderr.count("\n") == 1


@pytest.mark.parametrize("options", ["", "--window 32 --sink-tokens 4"])
def test_generate_is_quiet_at_the_end_of_the_context_too(tmp_path, options):
    (tmp_path / "prompt").write_bytes((Path(MODEL) / "eval.txt").read_bytes()[:2045])
    arguments = ["generate", MODEL, "--prompt-file", tmp_path / "prompt", "--tokens", 5, *options.split(), "--quiet"]
    done = run_here(*arguments)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("share", "policy", "kept"), [("25%", "future", 150), ("0.5", "kvzip", 300)])
def test_generate_keeps_a_share_of_the_prompt(tmp_path, share, policy, kept):
    (tmp_path / "prompt").write_bytes((Path(MODEL) / "eval.txt").read_bytes()[:600])
    options = ["--prompt-file", tmp_path / "prompt", "--tokens", 3, "--temperature", 0, "--keep", share]
    done = run_here("generate", MODEL, *options, "--evict-by", policy)
    assert done.returncode == 0
    assert f"kept the rows of {kept} tokens of the prompt)" in done.stderr.replace("\n", " ")
    done = run_here("generate", with_short_text(tmp_path), *options, "--evict-by", policy, "--compare")
    assert re.search(rf"^prefill.* 600 .*{kept} of them kept$", done.stdout, re.MULTILINE)


def test_generate_compares(tmp_path):
    options = ["--compare", "--tokens", 20, "--temperature", 0, "--dtype", "q8_0", "--hadamard"]
    done = run_here("generate", with_short_text(tmp_path), "ROMEO:", *options)
    assert done.returncode == 0
    text, _, table = done.stdout.partition("\n\n")
    assert text.startswith("ROMEO:")
    assert "hadamard q8_0 cache" in table
    assert [line.split("  ")[0] for line in table.splitlines() if "q4_0" in line] == ["hadamard q4_0"]


GREEDY = "--tokens 20 --temperature 0 --quiet"


@pytest.mark.parametrize(
    "option", ["", "-", "--prompt-file -", pytest.param("--prompt-file /dev/stdin", marks=pytest.mark.slow)]
)
def test_generate_from_a_pipe(option):
    expected = run_here("generate", MODEL, "ROMEO:\n", *GREEDY.split()).stdout
    done = shell(f"echo ROMEO: | kvcache generate {MODEL} {option} {GREEDY}", text=True)
    assert (done.stdout, done.stderr) == (expected, "")
    assert expected.startswith("ROMEO:\n")


def test_generate_from_standard_input(tmp_path):
    (tmp_path / "play.txt").write_bytes(b"ROM\xc9O:")
    done = shell(f"kvcache generate {MODEL} {GREEDY} < {tmp_path}/play.txt")
    assert done.stdout.startswith("ROM\N{REPLACEMENT CHARACTER}O:".encode())
    argument = shell(f"echo ROMEO: | kvcache generate {MODEL} KING: {GREEDY}", text=True)
    assert argument.stdout.startswith("KING:")
    for nothing in (f"kvcache generate {MODEL} {GREEDY} < /dev/null", f"true | kvcache generate {MODEL} {GREEDY}"):
        assert shell(nothing, text=True).stdout.startswith("Once upon a time")
    assert shell(f"kvcache generate {MODEL} {GREEDY} <&-", text=True).stdout.startswith("Once upon a time")
    for asked, said in (("true |", "the prompt is empty"), ("<&-", "standard input is closed")):
        done = shell(f"{asked} kvcache generate {MODEL} - {GREEDY}", text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr


def test_generate_names_its_prompt():
    help_text = " ".join(run_here("generate", "--help").stdout.split())
    assert "[default: Once upon a time]" in help_text


@pytest.mark.parametrize("tokenizer", [None, "{", '{"model": {"type": "Unheard"}}'])
def test_generate_refuses_a_family_by_its_name(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64}))
    if tokenizer:
        (tmp_path / "tokenizer.json").write_text(tokenizer)
    check_refused(run_here("generate", tmp_path, "a"), "model_type 'gpt2' is not supported", "llama, mistral")


def test_generate_takes_tokens_as_people_write_them():
    arguments = ["generate", MODEL, "A", "--quiet", "--temperature", 0]
    done = run_here(*arguments, "--tokens", "1k", "--window", "1k", "--sink-tokens", "0,004")
    assert len(done.stdout.rstrip("\n")) in (1024, 1025)  # a newline may be the model's own
    assert done.stderr == ""


def test_generate_from_a_file(tmp_path):
    file = tmp_path / "prompt"
    file.write_text("A" * 1100)  # several batches
    arguments = ["generate", MODEL, "--prompt-file", file, "--tokens", 3, "--quiet"]
    done = run_here(*arguments)
    assert done.stdout.startswith("A" * 1100)
    assert not done.stderr
    check_refused(run_here("generate", MODEL, "a", "--prompt-file", file), "--prompt-file")
    check_refused(run_here("generate", MODEL, "--prompt-file", tmp_path / "nowhere"), "nowhere")


def test_generate_multiplies_prompts_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_ISA", "scalar")  # which does
    arguments = ["generate", with_short_text(tmp_path), "ROMEO:" * 60, "--tokens", 2, "--temperature", 0, "--compare"]
    exact, in_bytes = (run_here(*arguments, "--prompts", prompts) for prompts in ("stored", "int8"))
    assert (exact.returncode, in_bytes.returncode) == (0, 0)
    assert "in bytes" not in exact.stdout
    assert "\nprefill in bytes, f16 cache " in in_bytes.stdout


def test_generate_selects_rows(monkeypatch):
    arguments = ["generate", MODEL, "ROMEO:" * 60, "--tokens", 60, "--temperature", 0, "--quiet"]
    dense = run_here(*arguments)
    monkeypatch.setattr(selecting, "SELECT_FROM", 380)
    selected = run_here(*arguments, "--select", 1)
    assert (dense.returncode, selected.returncode) == (0, 0)
    assert selected.stdout[:380] == dense.stdout[:380]  # a token is a byte, and the 380th is the first to select rows
    assert selected.stdout != dense.stdout


def interrupted(*arguments):
    """Interrupt a run that would go on for long; return what it printed after its prompt."""
    code = [sys.executable, "-m", "kvcache", "generate", MODEL, "ROMEO:", "--tokens", "1000000", *map(str, arguments)]

    def heeds_the_signal():  # which whoever runs the tests in the background ignores, and so would the command
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(code, **pipes, text=True, preexec_fn=heeds_the_signal) as process:
        assert process.stdout.read(12).startswith("ROMEO:")  # it is at it
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    return rest


def test_interrupt():
    assert "tokens/s" in interrupted("--shift", "--compare")


ROOT = Path(MODEL).parents[1]


def shown():
    """The lines that the help pages and docs/cli.md show."""
    pages = [run_here(command, "--help").stdout for command in COMMANDS]
    lines = [line.strip() for page in pages for line in page.splitlines() if line.startswith("    kvcache ")]
    lines += re.findall(r"^(?:echo .*\| )?kvcache .*$", (ROOT / "docs/cli.md").read_text(), re.M)
    lines = [
        line.split("  #")[0] for line in lines if "--install-completion" not in line
    ]  # it changes the user's shell
    return dict.fromkeys(lines)


def marks_of(line):
    """These take long; test_bench, test_plan_measures_selected_rows and test_selftest_needs_numpy_alone do less."""
    return pytest.mark.full if re.search(r" (bench|selftest|plan .*--cores)\b", line) else ()


@pytest.mark.parametrize("line", [pytest.param(line, marks=marks_of(line)) for line in shown()])
def test_shown_lines_succeed_with_the_extra_alone(line, tmp_path):
    """A model that the user has is the repository's here; a configuration is Llama 3.1's own."""
    blocked = ["torch", "transformers", *(["matplotlib"] if "--plot" not in line else [])]
    for module in blocked:
        (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError(name={module!r})")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "Llama-3.1-8B").mkdir()
    (tmp_path / "Llama-3.1-8B/config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "play.txt").write_text("ROMEO:")
    shutil.copy(STATES / "version-1", tmp_path / "chat.state")
    line = re.sub(r"\S+\.gguf", MODEL, line)
    command, unmeasured = line.split("kvcache ")[-1].split()[0], "" if "--cores" in line else " --no-measure"
    line += {"generate": " --tokens 5", "bench": " --seconds 1 --no-peers", "plan": unmeasured}.get(command, "")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "not counted" not in done.stdout


# ---- info


def test_info_says_which_variable_is_wrong():
    said = " ".join(run("info", KVCACHE_ISA="AVX2").stdout.split())
    assert "isa none: KVCACHE_ISA=AVX2 is no instruction set of this build and machine" in said
    said = " ".join(run("info", KVCACHE_THREADS="4").stdout.split())
    assert "threading_layer none: KVCACHE_THREADS=4 is no threading layer of this build" in said


def test_info():
    done = run("info")
    assert done.returncode == 0
    assert kvcache.show_config("dicts")["isa"] in done.stdout
    found = json.loads(run("info", "--json", OMP_NUM_THREADS="1", KVCACHE_ISA="scalar").stdout)
    assert found["threads"].startswith("1: ")
    assert found["isa"] == "scalar"
    assert "scalar" in found["instruction sets"].split()
    assert found["memory"] > 0


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({}, "the physical cores among the "),
        ({"OMP_NUM_THREADS": "1,2", "OMP_THREAD_LIMIT": "1"}, "OMP_NUM_THREADS says so"),
        ({"OMP_NUM_THREADS": "2", "OMP_THREAD_LIMIT": "1"}, "OMP_THREAD_LIMIT says so"),
        ({"OMP_PLACES": "{0}"}, "the places to which OpenMP binds threads by OMP_PLACES, "),
        ({"OMP_PROC_BIND": "true", "OMP_PLACES": "{0}"}, "the places to which OpenMP binds threads by OMP_PLACES and "),
        ({"OMP_PROC_BIND": "false", "OMP_PLACES": "{0}"}, "the physical cores among the "),
    ],
)
def test_info_says_why_there_are_so_many_threads(monkeypatch, environment, reason):
    for name in ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_PLACES", "OMP_PROC_BIND"):
        monkeypatch.delenv(name, raising=False)
    if environment and kvcache.get_threading_layer() != "openmp":
        pytest.skip("this build has no OpenMP")
    found = json.loads(run("info", "--json", **environment).stdout)
    assert re.fullmatch(rf"\d+: {re.escape(reason)}.*", found["threads"])


@pytest.mark.parametrize("encoding", ["ascii", "cp932"])
def test_what_stdout_cannot_encode_is_escaped(tmp_path, encoding):
    file = tmp_path / "h\xe9.state"
    kvcache.KVCache(1, 1, 8, 16).save(file)
    done = run("inspect", file, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert "h\\xe9.state: version" in " ".join(done.stdout.split())


# ---- terminals


def test_terminal_has_colour_unless_told_otherwise():
    code = [sys.executable, "-m", "kvcache", "plan", MODEL, "--no-measure"]
    status, sent, _ = run_in_terminal(code)
    assert status == 0
    assert "\x1b[1m" in sent  # bold headings
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in run_in_terminal(code, **environment)[1]


# ---- inspect


def test_inspect(tmp_path):
    found = run_here("inspect", STATES / "version-1", "--verify")
    assert found.returncode == 0, found.stderr
    assert "version 1, written by kvcache 0.3.0" in " ".join(found.stdout.split())
    assert "model: golden 1\nMAC: there, not checked (loading with the secret does)\nchecksums: right\n" in found.stdout
    table = [line.split() for line in found.stdout.splitlines()[-3:]]
    assert table == [["-3", "1", "1", "0"], ["0", "10", "11", "5"], ["7", "13", "18", "2"]]
    assert "not compared" in run_here("inspect", STATES / "version-1").stdout


@pytest.mark.hf
def test_inspect_of_a_batch_of_transformers(tmp_path):
    """The file's additional sequence, which lists the batch, is no line of the table."""
    import torch
    import transformers

    from kvcache.hf import HFCache

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, eos_token_id=None, **sizes))
    model.set_attn_implementation("kvcache")
    cache = HFCache(model.config)
    model.generate(torch.ones(2, 5, dtype=torch.long), cache=cache, max_new_tokens=3)
    cache.save(tmp_path / "chat")
    lines = run_here("inspect", tmp_path / "chat").stdout.splitlines()
    assert "batch of transformers: 2 texts, 7 tokens with padding" in lines
    assert [line.split()[1:] for line in lines[-3:]] == [["rows", "next", "position", "token", "ids"], *[["7"] * 3] * 2]


def test_inspect_as_json():
    found = json.loads(run_here("inspect", STATES / "version-1", "--json").stdout)
    assert (found["version"], found["fingerprint"], found["verified"], found["block_size"]) == (1, "golden 1", False, 4)
    assert [one["seq_id"] for one in found["sequences"]] == [-3, 0, 7]
    assert found["sequences"][1]["tokens"] == [3, 1, 4, 1, 5]
    assert found["tensors"][0]["name"] == "state"


def test_inspect_of_a_damaged_file(tmp_path):
    data = bytearray((STATES / "version-1").read_bytes())
    data[-400] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    found = run_here("inspect", tmp_path / "damaged", "--verify")
    assert found.returncode == 2
    assert re.fullmatch(r"kvcache: .*damaged: altered: tensor layer.* does not match its checksum\n", found.stderr)
    found = run_here("inspect", tmp_path / "none")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.endswith("none: No such file or directory\n")


@pytest.mark.parametrize("stderr", ["/dev/full", "closed", "pipe"])
def test_a_mistake_that_nobody_reads_has_its_status(stderr):
    code = shlex.join([sys.executable, "-m", "kvcache", "plan", "nosuch"])
    streams = {
        "/dev/full": "2>/dev/full",
        "closed": "2>&-",
        "pipe": "2>&1 >/dev/null | exec true; exit ${PIPESTATUS[0]}",
    }
    assert subprocess.run(["bash", "-c", f"{code} {streams[stderr]}"], timeout=600).returncode == 2


def test_a_notice_that_nobody_reads_leaves_the_table(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to((Path(MODEL) / name).absolute())
    code = [sys.executable, "-m", "kvcache", "generate", str(tmp_path), "x", "--tokens=2", "--compare"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(code, stdout=subprocess.PIPE, stderr=full, text=True, timeout=600)
    assert (done.returncode, "bytes/token" in done.stdout) == (0, True)


def test_an_interrupt_while_the_command_is_loaded(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    done = run("--help", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (130, "")
