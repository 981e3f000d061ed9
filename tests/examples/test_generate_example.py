"""examples/generate.py as people run it: piped, in a terminal, interrupted, and with bad input."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.repository_model import with_short_text
from support.row_types import TYPES

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "generate.py"
EXPECTED = json.loads((ROOT / "examples" / "model" / "expected.json").read_text())
MEASURING = "(measuring 8 steps without the cache, then 12 types on 4 texts of 2,048 tokens; Ctrl-C ends it)\n"
TIMEOUT = 600
LOSS_OF_60_TOKENS = 1.035254  # of the first 60 bytes of eval.txt
ENV = {name: value for name, value in os.environ.items() if name != "COLUMNS"}  # lines end where the text does


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", timeout=TIMEOUT, env=ENV
    )


def table_of(output: str) -> list[str]:
    """The table's lines that begin with a name."""
    lines = output.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.split() == ["tokens", "tokens/s"])
    return [line for line in lines[heading + 1 :] if line]


def test_greedy_text_and_table(tmp_path: Path) -> None:
    model = with_short_text(tmp_path)
    done = run("ROMEO:", "--model", model, "--compare", "--temperature", "0", "--tokens", "250", "--dtype", "f32")
    assert done.returncode == 0
    assert done.stderr == MEASURING.replace("4 texts of 2,048", "1 text of 60")
    assert done.stdout.startswith(EXPECTED["greedy"] + "\n\n")
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    table = table_of(done.stdout)
    names = ["prefill, f32 cache", "decode, f32 cache", "decode, without cache", "cache type", *TYPES]
    cells = [line.removeprefix(name).split() for line, name in zip(table, names, strict=True)]
    assert [row[0] for row in cells[:3]] == ["6", "249", "8"]
    assert all(float(row[1].replace(",", "")) > 0 for row in cells[:3])
    sizes = ["4,096", "2,048", "2,048", "1,088", "576", "640", "704", "768", "576", "1,056", "800", "544"]
    assert [row[0] for row in cells[4:]] == sizes
    assert float(cells[4][1]) == pytest.approx(LOSS_OF_60_TOKENS, abs=2e-6)


def speeds_of(errors: str) -> dict[str, tuple[int, float]]:
    """Tokens and tokens/s by name, of the last line on stderr."""
    found = re.findall(r"(prefill|decode) ([\d,]+) tokens, ([\d,.]+) tokens/s", errors.splitlines()[-1])
    return {name: (int(tokens.replace(",", "")), float(speed.replace(",", ""))) for name, tokens, speed in found}


def test_stdout_ends_with_the_text_and_stderr_has_a_line_of_speeds() -> None:
    done = run("ROMEO:", "--tokens", "20", "--temperature", "0")
    assert done.returncode == 0
    assert done.stdout == EXPECTED["greedy"][:26] + "\n"
    speeds = speeds_of(done.stderr)
    assert {name: tokens for name, (tokens, _) in speeds.items()} == {"prefill": 6, "decode": 19}
    assert all(speed > 0 for _, speed in speeds.values())


@pytest.mark.parametrize("arguments", [[], ["-"], ["--prompt-file", "-"], ["--prompt-file", "/dev/stdin"]])
def test_a_prompt_that_is_piped(arguments: list[str]) -> None:
    options = ["--quiet", "--tokens", "20", "--temperature", "0"]
    piped = subprocess.run(command(*arguments, *options), input=b"K\xd6NIG:\n", capture_output=True, timeout=TIMEOUT)
    assert (piped.returncode, piped.stderr) == (0, b"")
    assert piped.stdout.startswith("K\N{REPLACEMENT CHARACTER}NIG:\n".encode())


@pytest.mark.parametrize("tokens", ["20", pytest.param("1_000", marks=pytest.mark.full)])
def test_the_model_stands_before_the_prompt(tmp_path: Path, tokens: str) -> None:
    """As in `kvcache generate` and the example in C."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("KING:")
    model, options = str(ROOT / "examples" / "model"), ("--quiet", "--tokens", tokens, "--temperature", "0")
    expected = run("KING:", *options)
    assert expected.stdout.startswith("KING:")
    assert run(model, "KING:", *options).stdout == expected.stdout
    assert run("--model", model, *options, "KING:").stdout == expected.stdout
    assert run(model, *options, "--prompt-file", prompt).stdout == expected.stdout


def test_quiet_is_the_text_alone() -> None:
    done = run("--quiet", "--temperature", "0", "--tokens", "250")
    assert done.stdout == EXPECTED["greedy"] + "\n"
    assert done.stderr == ""


def test_prompt_file_and_seed(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes("KÖNIG:\n".encode())
    texts = [
        run("--prompt-file", prompt, "--quiet", "--tokens", "30", "--seed", seed).stdout for seed in ("5", "5", "6")
    ]
    assert texts[0].startswith("KÖNIG:\n")
    assert texts[0] == texts[1] != texts[2]


def test_the_end_of_the_context(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes((ROOT / "examples" / "model" / "eval.txt").read_bytes()[:2040])
    full = run("--prompt-file", prompt, "--tokens", "50", "--temperature", "0")
    assert full.returncode == 0
    notice = "(stopped at 2,048 tokens, the model's whole context; with a window or a shift it would go on)\n"
    assert full.stderr.startswith(notice)
    assert full.stderr.count("\n") == 2
    assert speeds_of(full.stderr)["decode"][0] == 7  # the prompt's own pass gives the first of the eight
    window = ("--window", "100", "--tokens", "50", "--temperature", "0")
    on = run("--prompt-file", prompt, *window)
    assert (on.returncode, on.stderr.count("\n")) == (0, 1)
    assert speeds_of(on.stderr)["decode"][0] == 49
    sinks = run("--prompt-file", prompt, *window, "--sink-tokens", "4")
    assert sinks.returncode == 0
    assert sinks.stderr.startswith("(the sink tokens ended up further back than the model was trained to look)\n")
    assert sinks.stderr.count("\n") == 2


def test_a_shift_goes_on(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes((ROOT / "examples" / "model" / "eval.txt").read_bytes()[:2040])
    done = run("--prompt-file", prompt, "--shift", "--tokens", "60", "--dtype", "q8_0")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert done.stdout.startswith(prompt.read_text())
    assert speeds_of(done.stderr)["decode"][0] == 59


def test_help() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert 'python examples/generate.py "ROMEO:"' in done.stdout
    flags = (
        "--dtype --window --shift --sink-tokens --tokens --seed --temperature --top-p --compare --model --prompt-file "
        "--quiet"
    )
    for flag in flags.split():
        assert flag in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "0"], "tokens must be at least 1, not 0"),
        (["--tokens", "many"], "argument --tokens: 'many' is no whole number, such as 8192, 8k or 1M"),
        (
            ["--window", "2000", "--sink-tokens", "100"],
            "window and sink tokens may together be at most the model's context, 2,048",
        ),
        (["--window", str(10**30)], "window and sink tokens may together be at most the model's context, 2,048"),
        (["--dtype", "f64"], "argument --dtype: invalid choice: 'f64'"),
        (["--no-such"], "unrecognized arguments: --no-such"),
        ([""], "the prompt is empty"),
        (["a", "b", "--prompt-file", "c"], "give a prompt or --prompt-file, not both"),
        (["a", "b", "--model", "c"], "give the model as an argument or as --model, not both"),
        (["a", "b", "c"], "unrecognized arguments: c"),
        (["--prompt-file", "/no/such/file"], "there is no /no/such/file"),
        (["--model", str(ROOT / "examples")], "has no config.json"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str) -> None:
    """tests/runner has what the runner refuses."""
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("generate.py: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def start(*arguments: str, stdin: int | None = None, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    def listen_to_interrupts() -> None:  # where the tests run in the background, they are ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(
        command(*arguments), preexec_fn=listen_to_interrupts, stdin=stdin, stdout=stdout, stderr=stderr, env=ENV
    )


def read_until(descriptor: int, enough: Callable[[bytes], bool]) -> bytes:
    """Read until there is enough, or until the end, which is an error for a terminal on Linux."""
    data, deadline = b"", time.monotonic() + TIMEOUT
    while not enough(data):
        assert select.select([descriptor], [], [], deadline - time.monotonic())[0], f"nothing came after {data!r}"
        try:
            piece = os.read(descriptor, 4096)
        except OSError:
            break
        if not piece:
            break
        data += piece
    return data


def to_the_end(_: bytes) -> bool:
    return False


def test_a_reader_that_leaves() -> None:
    with start("ROMEO:", "--tokens", "2000", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert read_until(process.stdout.fileno(), lambda data: len(data) > 20).startswith(b"ROMEO:")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(TIMEOUT) == 1


@pytest.mark.parametrize("when", ["in the text", "in the comparison"])
def test_interrupt_in_a_pipe(when: str) -> None:
    count, shown = ("2000", 50) if when == "in the text" else ("20", 26)
    with start("ROMEO:", "--compare", "--tokens", count, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        output = read_until(process.stdout.fileno(), lambda data: len(data) >= shown)
        said = b"" if when == "in the text" else b"".join(process.stderr.readline() for _ in MEASURING.splitlines())
        process.send_signal(signal.SIGINT)
        output += read_until(process.stdout.fileno(), to_the_end)
        assert (said + process.stderr.read()).decode() == ("" if when == "in the text" else MEASURING)
        assert process.wait(TIMEOUT) == 130
    table = table_of(output.decode())
    assert table[0].startswith("prefill, f16 cache")
    assert table[1].startswith("decode, f16 cache")
    assert any(line.startswith("f32 ") for line in table)


def in_a_terminal(*arguments: str, interrupt_after: int | None = None) -> tuple[int, str]:
    """Exit status, and what the terminal showed."""
    controller, terminal = pty.openpty()
    try:
        with start(*arguments, stdin=terminal, stdout=terminal, stderr=terminal) as process:
            os.close(terminal)
            shown = b""
            if interrupt_after is not None:
                shown = read_until(controller, lambda data: len(data) >= interrupt_after)
                process.send_signal(signal.SIGINT)
            shown += read_until(controller, to_the_end)
            return process.wait(TIMEOUT), shown.decode().replace("\r\n", "\n")
    finally:
        os.close(controller)


def test_interrupt_in_a_terminal() -> None:
    status, shown = in_a_terminal("ROMEO:", "--compare", "--tokens", "2000", interrupt_after=50)
    assert status == 130
    assert "Traceback" not in shown
    assert [line.split()[0] for line in table_of(shown)] == ["prefill,", "decode,", "cache", *TYPES]
