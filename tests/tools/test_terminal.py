"""Every command with its outputs in terminals, files and pipes: what stdout is sent does not depend on it."""

import itertools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from support import terminal
from support.repository_model import MODEL, with_short_text
from support.saved_states import STATES
from support.terminal import run_in_terminal

pytest.importorskip("typer")
pytest.importorskip("rich")

ROOT = Path(__file__).resolve().parents[2]
KVCACHE = [sys.executable, "-P", "-m", "kvcache"]
GREEDY = ["--tokens", 5, "--temperature", 0]
PLANNED = ["--no-measure", "--memory", "16GB"]  # the same whatever is free while a command runs

# Measures nothing: a record of one row, after two steps.
BENCH = """
from kvcache.tools import bench, cli

def measure(shape, **_):
    from dataclasses import asdict
    for step in (0.25, 0.75):
        yield bench.Progress("decode, kvcache", step)
    row = {"part": "decode", "name": "kvcache", "type": "f16", "seconds": 1.0, "tokens_per_second": 2.0}
    machine = {"build": "a build", "isa": "scalar"}
    yield bench.Result({"machine": machine, "shape": asdict(shape), "bandwidth": 1e9, "rows": [row], "left_out": ["a"]})

bench.measure = measure
cli.main()
"""

# Checks nothing: says what a check may say.
SELFTEST = """
from kvcache.tools import cli, selftest

said = "1 to 5, and 4 callers, to the bit, and as much again as a message may have to say of what was wrong"
selftest.run = lambda: iter([selftest.Check("threads", passed, said) for passed in (True, True)])
cli.main()
"""

COMMANDS = {
    "help": [*KVCACHE, "--help"],
    "generate": [*KVCACHE, "generate", MODEL, "ROMEO:", *GREEDY, "--quiet"],
    "generate from a long prompt": [*KVCACHE, "generate", MODEL, "--prompt-file", "prompt", *GREEDY, "--quiet"],
    "generate, with a line": [*KVCACHE, "generate", MODEL, "ROMEO:", *GREEDY],
    "plan": [*KVCACHE, "plan", MODEL, *PLANNED, "--window", "1k", "--sink-tokens", 4],
    "plan as JSON": [*KVCACHE, "plan", MODEL, *PLANNED, "--json"],
    "plan with a warning": [*KVCACHE, "plan", "config.json", *PLANNED, "--weights", "none"],
    "bench": [sys.executable, "-P", "-c", BENCH, "bench"],
    "info": [*KVCACHE, "info"],
    "inspect": [*KVCACHE, "inspect", STATES / "version-1", "--verify"],
    "a mistake": [*KVCACHE, "plan", "nosuch/config.json"],
    "the example": [sys.executable, "-P", ROOT / "examples/generate.py", "ROMEO:", *GREEDY, "--quiet"],
}
# Every run begins a process: without --full there is one command of each kind of output.
QUICK = {"generate, with a line", "plan", "bench", "a mistake", "selftest", "help of plan"}
SPLITS = [split for split in itertools.product(("terminal", "pipe", "file"), repeat=2) if "terminal" in split]
FILES = [split for split in SPLITS if "file" in split]
PIPES = [split for split in SPLITS if "file" not in split]


def each(names):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in names]


def masked(text):
    """Leave out what differs from run to run, and what a terminal adds to the words."""
    text = re.sub(r"\x1b\[[01]?m", "", text.replace("\r\n", "\n"))
    return re.sub(r"[\d.,]+(?= *(tokens/s|[GM]iB free))|\b\d[\d,]{8,}", "", text)


def words(text):
    """Return what a user reads, without the spaces and the lines, which depend on the width."""
    return re.sub(r"\s", "", masked(text))


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt").write_text("A" * 1100)  # several batches, without a newline
    config = {"model_type": "mystery", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def run(name, stdout, stderr, **environment):
        kinds = [f"{tmp_path}/{stream}" if kind == "file" else kind for stream, kind in
                 (("stdout", stdout), ("stderr", stderr))]  # fmt: skip
        return run_in_terminal(COMMANDS[name], stdout=kinds[0], stderr=kinds[1], **environment)

    return run


@pytest.mark.parametrize("splits", [PIPES, pytest.param(FILES, marks=pytest.mark.full)], ids=["pipes", "files"])
@pytest.mark.parametrize("name", each(COMMANDS))
def test_stdout_is_the_same_wherever_the_outputs_go(run, name, splits):
    expected = run(name, "file", "file")
    assert expected[1 if name != "a mistake" else 2]
    for split in splits:
        status, *sent = run(name, *split)
        assert status == expected[0]
        out, err = expected[1:]
        if split == ("terminal", "terminal"):
            assert words("\n".join(terminal.screen(sent[0]))) in (words(out + err), words(err + out))
        else:
            assert masked(sent[0]) == masked(out), split
            if split[1] == "terminal":
                assert words("\n".join(terminal.screen(sent[1]))) == words(err)
            else:
                assert masked(sent[1]) == masked(err), split
            assert all("\x1b" not in text for kind, text in zip(split, sent, strict=True) if kind != "terminal")


@pytest.mark.parametrize("name", ["generate from a long prompt", "bench"])
def test_a_bar_is_for_a_terminal_that_can_erase_it(run, name):
    assert "\x1b[2K" in run(name, "file", "terminal")[2]
    assert "\x1b[2K" in run(name, "terminal", "terminal")[1]
    for environment in ({"TERM": "dumb"}, {"TERM": "unknown"}):
        assert "\x1b" not in "".join(run(name, "terminal", "terminal", **environment)[1:])
    assert "\x1b" not in "".join(run(name, "pipe", "pipe", FORCE_COLOR="1", TTY_COMPATIBLE="1")[1:])
    plain = run(name, "terminal", "terminal", NO_COLOR="1")[1]
    assert not re.search(r"\x1b\[[0-9;]*[1-9][0-9;]*m", plain)


def test_a_bar_leaves_the_prompt(run):
    """It comes first: erasing it would erase the last line of a prompt that does not end one."""
    _, sent, _ = run("generate from a long prompt", "terminal", "terminal")
    lines = terminal.screen(sent)
    assert "".join(lines).startswith("A" * 1100)
    assert lines[0] == "A" * 80
    assert sent.index("prompt ") < sent.index("AAAA")


def test_generate_survives_a_narrow_terminal(run):
    _, sent, _ = run("generate from a long prompt", "terminal", "terminal", size=(5, 20))
    assert "".join(terminal.screen(sent, 20)).startswith("A" * 1100)


# ---- widths

WIDTHS = [[40, 120], pytest.param([60, 80, 200], marks=pytest.mark.full)]
# What people read, not data that programs read: a generated text or JSON has no lines of ours.
READ = {
    **{name: COMMANDS[name] for name in ("plan", "bench", "info")},
    "a file with a long name": [*KVCACHE, "inspect", "a file with a long name"],
    "selftest": [sys.executable, "-P", "-c", SELFTEST, "selftest"],
    **{f"help of {name}": [*KVCACHE, *name.split(), "--help"] for name in
       ("", "plan", "bench", "generate", "info", "selftest", "inspect")},
}  # fmt: skip


def pieces(text):
    """Return the words that people read, a size with its unit as one; not the marks at which a shell's line goes on."""
    text = re.sub(r"(\d) (?=[KMGT]iB)", r"\1_", masked(text).replace(" \\\n", "\n"))
    return sorted(text.split())


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("name", each(READ))
def test_words_are_whole_at_any_width(run, name, widths, monkeypatch, tmp_path):
    shutil.copy(STATES / "version-1", tmp_path / "a file with a long name")
    monkeypatch.setitem(COMMANDS, name, READ[name])
    status, into_file, _ = run(name, "file", "file")
    assert status == 0
    for columns in widths:
        status, sent, _ = run(name, "terminal", "pipe", size=(24, columns))
        assert status == 0
        shown = "\n".join(terminal.screen(sent, columns))
        assert pieces(shown) == pieces(into_file), columns
        assert max(map(len, masked(sent).splitlines())) <= columns
        for cell in re.findall(r"a file with a long name|\S+ [KMGT]iB", masked(into_file)):
            assert cell in shown, columns


def test_a_table_that_is_wider_than_the_terminal_breaks_between_cells(tmp_path):
    """It is written row by row, before the width of what follows is known."""
    command = [*KVCACHE, "generate", with_short_text(tmp_path), "ROMEO:", "--compare", "--hadamard", "--tokens", 3]
    status, into_file, _ = run_in_terminal(command, stdout="pipe", stderr="pipe")
    assert status == 0
    assert any(len(line) > 80 for line in into_file.splitlines())
    status, sent, _ = run_in_terminal(command, stderr="pipe", size=(24, 40))
    assert status == 0
    shown = "\n".join(terminal.screen(sent, 40))
    assert pieces(re.sub(r"[\d,.]+", "", shown)) == pieces(re.sub(r"[\d,.]+", "", into_file))
    assert max(map(len, sent.splitlines())) <= 40


@pytest.mark.parametrize("widths", WIDTHS)
def test_a_mistake_is_whole_words_on_a_terminal(run, widths):
    one_line = run("a mistake", "pipe", "pipe")[2]
    assert one_line.count("\n") == 1
    for columns in widths:
        sent = run("a mistake", "pipe", "terminal", size=(24, columns))[2]
        assert terminal.screen(sent, columns) == [line.rstrip() for line in sent.replace("\r", "").split("\n")]
        assert sent.split() == one_line.split()
