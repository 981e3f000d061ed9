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


def commands_of(page):
    return re.findall(r"^```sh\n(.*?)\n```$", (ROOT / page).read_text(), re.M | re.S)


README = (ROOT / "README.md").read_text()
INSTALL, TEST, _TORCH, _HF, C_SOURCES, C_LIBRARY = commands_of("README.md")
(C_PROGRAM,) = re.findall(r"^```c\n(.*?)^```$", README, re.M | re.S)
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
IGNORED = [line.rstrip("/").rpartition("/")[2] for line in (ROOT / ".gitignore").read_text().split()]

pytestmark = pytest.mark.slow


class Reader:
    """Runs commands at the top of a fresh clone."""

    def __init__(self, folder):
        self.clone = folder / "kvcache"
        shutil.copytree(ROOT, self.clone, ignore=shutil.ignore_patterns(".git", *IGNORED))
        for git in ("git init --quiet", "git add --all --force"):
            subprocess.run(shlex.split(git), cwd=self.clone, check=True)
        commands = folder / "bin"
        commands.mkdir()
        for name, command in {
            "python3": f'{shlex.quote(sys._base_executable)} "$@"',
            "cc": f'{shutil.which("cc")} "$@" -O0',  # the kernels take a minute where they are optimised
        }.items():
            (commands / name).write_text(f"#!/bin/sh\nexec {command}\n")
            (commands / name).chmod(0o755)
        ours = ("KVCACHE_", "MAKE", "PYTHON", "VIRTUAL_ENV")  # what these tests are run with
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self.environment |= {"PATH": f"{commands}:{os.environ['PATH']}", "CC": "cc"}
        self.environment["PIP_NO_COMPILE"] = "1"  # takes as long as installing, and most modules are never imported

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
    return Reader(tmp_path_factory.mktemp("reader"))


def test_before_the_first_command_python_says_what_to_do(reader):
    reader.succeeds("python3 -m venv .venv")
    done = reader.run(".venv/bin/python -c 'import kvcache'")
    assert done.returncode == 1
    assert f"Run `pip install -e .` in {reader.clone}/, or run Python from another folder." in done.stdout


@pytest.fixture(scope="module")
def installed(reader):
    """The reader after README's first command."""
    done = reader.run("python3 -m venv .venv && .venv/bin/pip download --no-deps --dest .venv/probe 'setuptools>=77'")
    if done.returncode:
        pytest.skip(f"no package index can be reached: {done.stdout}")
    text = reader.succeeds(INSTALL)
    assert text.splitlines()[-1].startswith("(prefill 6 tokens, "), "the text, and a line of speeds on stderr"
    assert "ROMEO:" in text
    return reader


def test_the_first_command_leaves_nothing_that_git_would_add(installed):
    added = [line for line in installed.succeeds("git status --porcelain").splitlines() if not line.startswith("A ")]
    assert added == []


@pytest.mark.parametrize("place", ["beside the clone", "in the clone", "elsewhere"])
def test_programs_anywhere_import_what_is_installed(installed, tmp_path, place):
    """Beside the clone, the folder `kvcache` is a package without an __init__.py, which must not hide the real one."""
    clone = installed.clone
    folder = {"beside the clone": clone.parent, "in the clone": clone, "elsewhere": tmp_path}[place]
    shown = "kvcache.KVCache.__name__, os.path.exists(kvcache.get_include() + '/kvcache.h'), kvcache.__file__"
    (folder / "app.py").write_text(f"import os\nimport kvcache\n\nprint({shown})\n")
    expected = f"KVCache True {clone}/kvcache/__init__.py\n"
    for arguments in ("app.py", "-m app", f'-c "import os, kvcache; print({shown})"', "-P app.py"):
        assert installed.succeeds(f"cd {folder} && {clone}/.venv/bin/python {arguments}") == expected
    (folder / "app.py").unlink()


@pytest.fixture
def lend(installed):
    """Return a function that lends the reader what stands beside a library of this environment.

    It is taken back before the next command: to pip, all of that is installed already.
    """
    (folder,) = installed.clone.glob(".venv/lib/python*/site-packages")
    path = folder / "lent.pth"
    yield lambda library: path.write_text(f"{Path(library.origin).parents[1]}\n")
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("library", ["numpy", "transformers"])
def test_the_programs_run_where_the_reader_stands(installed, lend, library):
    (program,) = (program for program in PROGRAMS if f"import {library}" in program or f"from {library}" in program)
    if library == "transformers":  # gigabytes, with torch: lent, if they are here
        lend(importlib.util.find_spec(library) or pytest.skip(f"{library} is not installed"))
    installed.succeeds(".venv/bin/python", input=program)
    (installed.clone / "snippet.py").write_text(program)
    installed.succeeds(".venv/bin/python snippet.py")


@pytest.mark.full  # .ci/run installs [test] and passes these tests, and its first command makes such an install
def test_the_second_command_tests_what_the_first_installed(installed):
    text = installed.succeeds(f"{TEST} tests/package/test_package.py")
    assert f"kvcache: {installed.clone}/kvcache/__init__.py" in text


@pytest.mark.parametrize(
    "extras", re.findall(r"^pip install '(kvcache\[.*?\])'", (ROOT / "docs/cli.md").read_text(), re.M)
)
def test_extras_are_added_without_compiling(installed, extras, tmp_path):
    for compiler in ("cc", "gcc", "clang", "c++", "g++"):
        (tmp_path / compiler).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / compiler).chmod(0o755)
    text = installed.succeeds(f"export PATH={tmp_path}:$PATH CC={tmp_path}/cc; .venv/bin/pip install '{extras}'")
    assert "Building" not in text
    assert installed.succeeds(".venv/bin/kvcache --help").startswith("Usage: kvcache ")


@pytest.mark.full  # .ci/run builds it with what is installed
def test_the_documentation_is_built_without_a_warning(installed):
    (command,) = re.findall(r"^`(pip install .* && sphinx-build .*)` makes a web site", README, re.M)
    installed.succeeds(f". .venv/bin/activate && {command} -W --keep-going")
    index, guide, api = (
        (installed.clone / f"docs/_build/{page}.html").read_text() for page in ("index", "huggingface", "api")
    )
    assert 'href="huggingface.html"' in index[index.index("begin with") :]
    assert re.search(r"<dl.*?<dt><code[^>]*><span class=\"pre\">policy</span>", guide, re.S), "its lists of definitions"
    for name in ("hf.HFCache", "hf.HFEncoderDecoderCache", "runner.Llama", "plot.memory"):
        assert f'id="kvcache.{name}"' in api


def test_the_program_in_c_is_built_with_the_sources(reader):
    (reader.clone / "app.c").write_text(C_PROGRAM)
    assert reader.succeeds(C_SOURCES) == "tokens stored: 1\n"


@pytest.mark.full  # .ci/run installs it in another folder
def test_the_programs_in_c_and_cpp_are_built_on_the_installed_library(reader, tmp_path, monkeypatch):
    for command in ("cmake", "pkg-config", "c++"):
        if not shutil.which(command):
            pytest.skip(f"there is no {command} here")
    (reader.clone / "app.c").write_text(C_PROGRAM)
    (reader.clone / "app.cpp").write_text(C_PROGRAM)
    monkeypatch.setitem(reader.environment, "HOME", str(tmp_path))
    assert reader.succeeds(C_LIBRARY).splitlines()[-1] == "tokens stored: 1"
    export, build = C_LIBRARY.splitlines()[1:]
    assert reader.succeeds(f"{export}; {build.replace('cc app.c', 'c++ app.cpp')}") == "tokens stored: 1\n"
    (example,) = commands_of("examples/cpp/README.md")
    assert "a fork, and a token for it" in reader.succeeds(f"{export}; {example}")
    shared, static = commands_of("docs/c.md")
    shared = "\n".join(line for line in shared.splitlines() if not line.startswith(("cmake -B", "ctest")))
    assert reader.succeeds(shared).splitlines()[-1] == "tokens stored: 1"
    assert reader.succeeds(f"{export}; {static}") == "tokens stored: 1\n"
