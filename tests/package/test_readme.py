"""What README has a reader do in a clone, in its order and in its words, from an environment with nothing in it."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.compiling import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^```sh\n(.*)\n```$", README, re.M)
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
IGNORED = [line.rstrip("/").rpartition("/")[2] for line in (ROOT / ".gitignore").read_text().split()]

pytestmark = pytest.mark.slow


class Reader:
    """Runs commands at the top of a fresh clone."""

    def __init__(self, folder):
        self.clone = folder / "clone"
        shutil.copytree(ROOT, self.clone, ignore=shutil.ignore_patterns(".git", *IGNORED))
        for git in ("git init --quiet", "git add --all --force"):
            subprocess.run(shlex.split(git), cwd=self.clone, check=True)
        commands = folder / "bin"
        commands.mkdir()
        (commands / "python3").write_text(f'#!/bin/sh\nexec {shlex.quote(sys._base_executable)} "$@"\n')
        (commands / "python3").chmod(0o755)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.environment["PATH"] = f"{commands}:{os.environ['PATH']}"

    def run(self, command, **options):
        return subprocess.run(
            ["sh", "-c", command],
            cwd=self.clone,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            **options,
        )

    def succeeds(self, command, **options):
        done = self.run(command, **options)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    if not shutil.which("git"):
        pytest.skip("there is no git here")
    reader = Reader(tmp_path_factory.mktemp("reader"))
    done = reader.run("python3 -m venv .venv && .venv/bin/pip download --no-deps --dest .venv/probe 'setuptools>=77'")
    if done.returncode:
        pytest.skip(f"no package index can be reached: {done.stdout}")
    return reader


def test_before_the_first_command_python_says_what_to_do(reader):
    done = reader.run(".venv/bin/python -c 'import kvcache'")
    assert done.returncode == 1
    assert f"Run `pip install -e .` in {reader.clone}/, or run Python from another folder." in done.stdout


@pytest.fixture(scope="module")
def installed(reader):
    """The reader after README's first command."""
    text = reader.succeeds(COMMANDS[0])
    assert "ROMEO:" in text
    return reader


def test_the_first_command_leaves_nothing_that_git_would_add(installed):
    added = [line for line in installed.succeeds("git status --porcelain").splitlines() if not line.startswith("A ")]
    assert added == []


@pytest.mark.parametrize("library", ["numpy", "transformers"])
def test_the_programs_run_where_the_reader_stands(installed, library):
    (program,) = (program for program in PROGRAMS if f"import {library}" in program or f"from {library}" in program)
    if library == "transformers":  # gigabytes, with torch: lent to the reader, if this environment has them
        found = importlib.util.find_spec(library) or pytest.skip(f"{library} is not installed")
        (folder,) = installed.clone.glob(".venv/lib/python*/site-packages")
        (folder / "lent.pth").write_text(f"{Path(found.origin).parents[1]}\n")
    installed.succeeds(".venv/bin/python", input=program)
    (installed.clone / "snippet.py").write_text(program)
    installed.succeeds(".venv/bin/python snippet.py")


def test_the_second_command_tests_what_the_first_installed(installed):
    text = installed.succeeds(f"{COMMANDS[1]} tests/package/test_package.py tests/package/test_docs.py")
    assert f"kvcache: {installed.clone}/kvcache/__init__.py" in text
