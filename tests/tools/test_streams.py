"""Every command where nobody takes what it says: the status tells, in a sentence or none, and never a traceback."""

import contextlib
import fcntl
import itertools
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from support.saved_states import STATES

pytest.importorskip("typer")

MODEL = Path(__file__).resolve().parents[2] / "examples/model"
KVCACHE = [sys.executable, "-P", "-m", "kvcache"]
COMMANDS = {
    "plan": ["plan", MODEL, "--no-measure"],
    "help": ["--help"],
    "info": ["info", "--json"],
    "selftest": ["selftest"],
    "inspect": ["inspect", STATES / "version-1"],
    "generate": ["generate", MODEL, "RÖMEO:", "--tokens", 5, "--quiet"],
}
PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
STREAMS = {  # where stdout goes, and the environment; the status, and what stderr gets
    "a full disk": (">/dev/full", {}, 2, "kvcache: No space left on device\n"),
    "an end that nobody reads": ("| exec true; exit ${PIPESTATUS[0]}", {}, 1, ""),
    "nowhere": (">&-", {}, 0, ""),
    "a plain locale": (">/dev/null", PLAIN, 0, ""),
    "ASCII": (">/dev/null", {"PYTHONIOENCODING": "ascii"}, 0, ""),
    "Latin-1": (">/dev/null", {"PYTHONIOENCODING": "latin-1"}, 0, ""),
}
IS_QUICK = {("plan", "a full disk"), ("generate", "ASCII"), ("inspect", "an end that nobody reads")}
IS_SLOW = {*itertools.product(COMMANDS, ["a full disk"]), *itertools.product(["generate", "info"], STREAMS)}


def command(name):
    return [*KVCACHE, *map(str, COMMANDS[name])]


def cases():
    for name in COMMANDS:
        for stream in STREAMS:
            mark = pytest.mark.slow if (name, stream) in IS_SLOW else pytest.mark.full
            yield pytest.param(name, stream, marks=() if (name, stream) in IS_QUICK else mark)


@pytest.mark.parametrize(("name", "stream"), [*cases()])
def test_a_stream(name, stream):
    stdout, environment, status, words = STREAMS[stream]
    code = ["bash", "-c", f"{shlex.join(command(name))} {stdout}"]
    done = subprocess.run(
        code, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | environment, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (status, words)


def run_until_closed(code, ignores_hangup):
    """Run a program in a terminal of 20 columns, closed once it says something; return its status and its stderr."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 20))

    def begin():
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores_hangup else signal.SIG_DFL)

    with subprocess.Popen(
        code, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=begin, text=True
    ) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):
            assert os.read(ours, 10)
        os.close(ours)
        try:
            said = process.communicate(timeout=300)[1]
        finally:
            process.kill()
    return process.returncode, said


@pytest.mark.parametrize("ignores_hangup", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_terminal_that_is_closed(ignores_hangup):
    """The hang-up ends it; where that is ignored, what it writes next does."""
    code = [*KVCACHE, "generate", str(MODEL), "ROMEO:", "--tokens", "4000", "--shift", "--quiet"]
    status, said = run_until_closed(code, ignores_hangup)
    if ignores_hangup:
        assert (status, said) == (2, "kvcache: Input/output error\n")
    else:
        assert (status, said) == (-signal.SIGHUP, "")
