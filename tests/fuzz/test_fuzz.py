"""Run the fuzzers, fuzz_*.c and fuzz_*.py, on inputs that lead far, and on alterations of them.

Each line of fuzz_*.txt is an input. With --full each fuzzer looks for more inputs for a minute: in C under libFuzzer,
in Python by guided.py. libFuzzer also chooses the calls of tests/world.

What is found becomes a line of fuzz_*.txt, as the failure says it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.compiling import (
    EMULATOR,
    INCLUDE,
    LIBRARIES,
    ROOT,
    SANITIZERS,
    compile_all,
    divert,
    diverted_by,
    run,
    works,
    world_sources,
)

HERE = Path(__file__).parent
WORLD = HERE.parent / "world"
FUZZERS = sorted(HERE.glob("fuzz_*.c"))
FLAGS = ["-std=c11", "-g", *INCLUDE]
ALTERED = {"fuzz_attention": 1, "fuzz_state": 20}  # how often each input, by how long one takes
SOURCES = world_sources()
OTHERS = {"fuzz_attention": [], "fuzz_state": SOURCES}  # sources that a fuzzer needs
IN_PYTHON = sorted(path.stem for path in HERE.glob("fuzz_*.py"))
SECONDS = 60


@pytest.mark.parametrize("source", FUZZERS, ids=lambda path: path.stem)
def test_inputs(workshop, source):
    sources = source, HERE / "replay.c", *OTHERS[source.stem]
    workshop.run(*sources, arguments=[str(ALTERED[source.stem]), source.with_suffix(".txt")])


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """The core's objects for libFuzzer; without sanitizers in kernels, over which Clang takes minutes."""
    folder = tmp_path_factory.mktemp("fuzz")
    if EMULATOR or not shutil.which("clang") or not works(["clang"], SANITIZERS, folder):
        pytest.skip("needs clang with its sanitizers")

    def command_for(source):
        sanitizers = ["-O2"] if source.parent.name == "kernels" else ["-O1", *SANITIZERS]
        return ["clang", *FLAGS, *sanitizers, "-fsanitize=fuzzer-no-link"]

    return compile_all(folder, ROOT.glob("src/*/*.c"), command_for)


def fuzz(core, folder, sources, inputs, *flags):
    """Let libFuzzer look for inputs on which a program of these sources fails."""
    corpus, found, program = folder / "corpus", folder / "found", folder / sources[0].stem
    for path in (corpus, found):
        path.mkdir()
    for i, line in enumerate(inputs):
        (corpus / str(i)).write_bytes(bytes.fromhex(line))
    if diverted := diverted_by(*sources):
        core = [divert(["clang"], core, diverted, folder / "core.o")]
    run("clang", *FLAGS, "-O1", *SANITIZERS, "-fsanitize=fuzzer", *flags, *sources, *core, "-o", program, *LIBRARIES)
    command = [program, corpus, f"-max_total_time={SECONDS}", "-max_len=2048", f"-artifact_prefix={found}/"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        inputs = "\n".join(path.read_bytes().hex() for path in found.iterdir())
        pytest.fail(f"{program.name} fails on\n{inputs}\n{done.stdout[-5000:]}", pytrace=False)


@pytest.mark.full
@pytest.mark.parametrize("source", FUZZERS, ids=lambda path: path.stem)
def test_under_libfuzzer(core, source, tmp_path):
    fuzz(core, tmp_path, [source, *OTHERS[source.stem]], source.with_suffix(".txt").read_text().split())


@pytest.mark.full
def test_the_world_under_libfuzzer(core, tmp_path):
    fuzz(core, tmp_path, [WORLD / "drive_fuzz.c", *SOURCES], [], "-DFUZZER")


# ---- what is written in Python


def run_guided(tmp_path, *arguments):
    """Run a fuzzer in a process of its own, which an input may end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])}
    command = [sys.executable, HERE / "guided.py", *arguments, "--last", tmp_path / "last"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode:
        last = (tmp_path / "last").read_bytes().hex()
        pytest.fail(f"{done.stdout}\n{done.stderr[-5000:]}\nthe last input was\n{last}", pytrace=False)


@pytest.mark.parametrize("name", IN_PYTHON)
def test_inputs_in_python(name, tmp_path):
    run_guided(tmp_path, name, "--alter", "1")


@pytest.mark.full
@pytest.mark.parametrize("name", IN_PYTHON)
def test_guided_by_what_is_reached(name, tmp_path):
    run_guided(tmp_path, name, "--seconds", str(SECONDS))
