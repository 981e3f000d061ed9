"""The command, run as people run it: in a terminal and without one, with good and with hostile input."""

import itertools
import json
import os
import pty
import shlex
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import kvcache

pytest.importorskip("typer")
pytest.importorskip("rich")

from kvcache.tools import cli

MODEL = str(Path(__file__).resolve().parents[2] / "examples/model")
COMMANDS = ["plan", "bench", "generate", "info"]


def run(*arguments, **environment):
    """Without a terminal."""
    code = [sys.executable, "-m", "kvcache.tools.cli", *map(str, arguments)]
    keep = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return subprocess.run(code, capture_output=True, text=True, env=keep | environment, timeout=600)


def run_in_terminal(*arguments, **environment):
    """Run in a terminal of 100 columns; return what it is sent, and the exit status."""
    ours, theirs = pty.openpty()
    code = [sys.executable, "-m", "kvcache.tools.cli", *map(str, arguments)]
    keep = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment = keep | {"TERM": "xterm-256color", "COLUMNS": "100"} | environment
    process = subprocess.Popen(code, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    sent = b""
    try:
        while chunk := os.read(ours, 65536):
            sent += chunk
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return process.wait(), sent.decode()


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
    done = run(*arguments)
    assert done.returncode == 0
    for command in COMMANDS:
        assert f"  {command} " in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command):
    done = run(command, "--help")
    assert done.returncode == 0
    assert f"\n    kvcache {command}" in done.stdout


def test_version_and_completion():
    assert run("--version").stdout.strip() == kvcache.__version__
    shown = run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_KVCACHE_COMPLETE=complete_bash" in shown.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["bogus"],
        ["plan"],
        ["plan", MODEL, "--nope"],
        ["plan", MODEL, "--context", "0"],
        ["plan", MODEL, "--dtype", "f8"],
    ],
)
def test_wrong_use(arguments):
    check_refused(run(*arguments))


# ---- plan


def test_plan():
    done = run("plan", MODEL, "--no-measure", "--context", 1000, "--sequences", 3)
    assert done.returncode == 0
    assert not done.stderr
    assert "\x1b" not in done.stdout
    lines = {line.split()[3]: line.split() for line in done.stdout.splitlines() if line.startswith("the model's own")}
    assert list(lines) == ["f32", "f16", "bf16", "q8_0", "q4_0"]
    cache = kvcache.KVCache.from_config(MODEL, dtype="q8_0")
    assert lines["q8_0"][4] == f"{cache.most_bytes(1):,}"


def test_plan_as_json():
    done = run("plan", MODEL, "--no-measure", "--json", "--dtype", "f16", "--dtype", "q4_0", "--window", 64)
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
    longest = own["longest_context"]
    left = made["memory"]["free"] - made["memory"]["weights"]
    assert longest * cache.most_bytes(1) <= left < (longest + 1) * cache.most_bytes(1)


@pytest.mark.slow
def test_plan_measures():
    made = json.loads(run("plan", MODEL, "--json").stdout)
    assert all(row["tokens_per_second"] > 0 for row in made["rows"])


def test_plan_draws(tmp_path):
    pytest.importorskip("matplotlib")
    assert run("plan", MODEL, "--no-measure", "--plot", tmp_path / "a.svg").returncode == 0
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")
    check_refused(run("plan", MODEL, "--no-measure", "--plot", tmp_path / "a.bogus"), "bogus")
    check_refused(run("plan", MODEL, "--no-measure", "--plot", tmp_path / "nowhere" / "a.png"), "nowhere")


def test_plan_of_types_that_the_heads_do_not_suit(tmp_path):
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 80}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = json.loads(run("plan", tmp_path, "--no-measure", "--json").stdout)
    assert [row["dtype"] for row in made["rows"]] == ["f32", "f16", "bf16"]
    check_refused(run("plan", tmp_path, "--dtype", "f16", "--dtype", "q8_0"), "32", "q8_0")


def test_plan_of_a_model_with_an_encoder(tmp_path):
    bart = {"is_encoder_decoder": True, "decoder_layers": 2, "decoder_attention_heads": 4, "d_model": 128}
    (tmp_path / "config.json").write_text(json.dumps(bart))
    check_refused(run("plan", tmp_path), "max_source_len")
    made = json.loads(run("plan", tmp_path, "--no-measure", "--json", "--max-source-len", 50).stdout)
    assert [group["policy"] for group in made["groups"]] == ["FullAttention()", "CrossAttention(max_len=50)"]


def test_pictures_need_matplotlib(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError")
    done = run("plan", MODEL, "--no-measure", "--plot", "a.png", PYTHONPATH=str(tmp_path))
    check_refused(done, "pip install 'kvcache[plot]'")


def gguf(*parts):
    return b"GGUF" + struct.pack("<I", 3) + b"".join(parts)


HOSTILE = {
    "missing": None,
    "empty.gguf": b"",
    "empty.json": b"",
    "cut.json": b'{"num_hidden_layers": ',
    "cut.gguf": gguf(struct.pack("<Q", 1)),
    "many.gguf": gguf(struct.pack("<QQ", 2**63, 2**63 - 1)),
    "long.gguf": gguf(struct.pack("<QQQ", 0, 1, 2**63)),
    "deep.json": b"[" * 1_000_000,
    "types.json": b'{"num_hidden_layers": {"a": [1]}, "num_attention_heads": "many"}',
    "number.json": b"17",
    "large.json": b'{"num_hidden_layers": 1e400, "num_attention_heads": 9}',
    "layers.json": b'{"num_hidden_layers": 2147483647, "num_attention_heads": 1, "hidden_size": 8}',
    "control.json": b'{"model_type": "a\\u001b[2Jb\\n", "num_hidden_layers": 0}',
}


FEW = ["missing", "many.gguf", "deep.json"]  # the others are read by the same function


@pytest.mark.parametrize(
    ("command", "name"), [*(("plan", name) for name in HOSTILE), *itertools.product(["generate", "bench"], FEW)]
)
def test_hostile_files(tmp_path, command, name):
    path = tmp_path / name
    if HOSTILE[name] is not None:
        path.write_bytes(HOSTILE[name])
    done = run(command, path)
    check_refused(done, str(path))
    assert len(done.stderr) < 500
    assert "\x1b" not in done.stderr


# ---- bench and generate


QUICK_BENCH = ["bench", "--seconds", 1, "--context", 64, "--no-peers", "--threads", 1]


@pytest.mark.slow
def test_bench(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speed.png"
    record = json.loads(run(*QUICK_BENCH, MODEL, "--json", "--plot", picture).stdout)
    assert {row["type"] for row in record["rows"]} == {"f32", "f16", "bf16", "q8_0", "q4_0"}
    assert {row["part"] for row in record["rows"]} == {"decode", "prefill", "append"}
    assert (record["shape"]["head_dim"], record["shape"]["context"]) == (64, 64)
    assert picture.read_bytes().startswith(b"\x89PNG")
    cli._print_bench(record)
    assert "memory is read at" in capsys.readouterr().out


def test_bench_needs_a_folder_for_its_picture(tmp_path):
    pytest.importorskip("matplotlib")
    check_refused(run(*QUICK_BENCH, "--plot", tmp_path / "nowhere" / "a.png"), "nowhere")


def test_generate():
    done = run("generate", MODEL, "ROMEO:", "--tokens", 20, "--temperature", 0, "--dtype", "q8_0", "--no-compare")
    assert done.returncode == 0
    text, _, table = done.stdout.partition("\n\n")
    assert text.startswith("ROMEO:")
    assert len(text) > 10
    assert "q8_0 cache" in table + text
    quiet = run("generate", MODEL, "ROMEO:", "--tokens", 20, "--temperature", 0, "--dtype", "q8_0", "--quiet")
    assert done.stdout.startswith(quiet.stdout)


def test_generate_from_a_file(tmp_path):
    file = tmp_path / "prompt"
    file.write_text("A" * 1100)  # several batches
    arguments = ["generate", MODEL, "--prompt-file", file, "--tokens", 3, "--quiet"]
    done = run(*arguments)
    assert done.stdout.startswith("A" * 1100)
    assert not done.stderr
    status, sent = run_in_terminal(*arguments)
    assert status == 0
    assert "prompt" in sent  # how far it is
    check_refused(run("generate", MODEL, "a", "--prompt-file", file), "--prompt-file")
    check_refused(run("generate", MODEL, "--prompt-file", tmp_path / "nowhere"), "nowhere")


@pytest.mark.parametrize(
    ("options", "word"), [(["--window", "0"], "window"), (["--top-p", "2"], "top-p"), (["--sink-tokens", "3"], "sink")]
)
def test_generate_refuses(options, word):
    check_refused(run("generate", MODEL, "a", *options), word)


def test_interrupt():
    code = [sys.executable, "-m", "kvcache.tools.cli", "generate", MODEL, "ROMEO:", "--shift", "--tokens", "1000000"]

    def heeds_the_signal():  # which whoever runs the tests in the background ignores, and so would the command
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(code, **pipes, text=True, preexec_fn=heeds_the_signal) as process:
        assert process.stdout.read(12).startswith("ROMEO:")  # it is at it
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "tokens/s" in rest
    assert "Traceback" not in errors


def documented():
    """The commands that docs/cli.md shows, but for the one that takes a minute."""
    page = Path(MODEL).parents[1] / "docs/cli.md"
    lines = [line for line in page.read_text().splitlines() if line.startswith(("kvcache plan", "kvcache generate"))]
    slow = "kvcache plan"  # it measures
    return [
        pytest.param(shlex.split(line)[1:], marks=[pytest.mark.slow] if line.startswith(slow) else []) for line in lines
    ]


@pytest.mark.parametrize("arguments", documented(), ids=" ".join)
def test_documented_commands(arguments, monkeypatch):
    monkeypatch.chdir(Path(MODEL).parents[1])
    faster = ["--no-compare"] if arguments[0] == "generate" else []
    assert run(*arguments, *faster, PYTHONSAFEPATH="1").returncode == 0


# ---- info


def test_info():
    done = run("info")
    assert done.returncode == 0
    assert kvcache.show_config("dicts")["isa"] in done.stdout
    found = json.loads(run("info", "--json", OMP_NUM_THREADS="1", KVCACHE_ISA="scalar").stdout)
    assert found["threads"].startswith("1: ")
    assert found["isa"] == "scalar"
    assert "scalar" in found["instruction sets"].split()
    assert found["memory"] > 0


# ---- terminals


def test_terminal_has_colour_unless_told_otherwise():
    arguments = ["plan", MODEL, "--no-measure"]
    status, sent = run_in_terminal(*arguments)
    assert status == 0
    assert "\x1b[1m" in sent  # bold headings
    _, plain = run_in_terminal(*arguments, NO_COLOR="1", TERM="dumb")
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 100


def test_reader_that_has_had_enough():
    code = f"{sys.executable} -m kvcache.tools.cli plan {MODEL} --no-measure --json | head -1"
    done = subprocess.run(code, shell=True, capture_output=True, text=True)
    assert done.stdout == "{\n"
    assert not done.stderr
