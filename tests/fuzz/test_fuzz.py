"""Run the fuzzers, fuzz_*.c: on inputs that lead far, one a line of fuzz_*.txt, and on alterations of them; with --full
under libFuzzer, for a minute each.

What libFuzzer finds becomes a line of fuzz_*.txt, as the failure says it.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.compiling import EMULATOR, INCLUDE, LIBRARIES, ROOT, run, works

HERE = Path(__file__).parent
FUZZERS = sorted(HERE.glob("fuzz_*.c"))
FLAGS = ["-std=c11", "-g", *INCLUDE]
SECONDS = 60


@pytest.mark.parametrize("source", FUZZERS, ids=lambda path: path.stem)
def test_inputs(build, source):
    run(*EMULATOR, build(source, HERE / "replay.c"), "50", source.with_suffix(".txt"))


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """The core's objects for libFuzzer; without sanitizers in kernels, over which Clang takes minutes."""
    folder = tmp_path_factory.mktemp("fuzz")
    if EMULATOR or not shutil.which("clang") or not works(["clang"], ["-fsanitize=address,undefined"], folder):
        pytest.skip("needs clang with its sanitizers")

    def compile_one(source):
        target = folder / f"{source.parent.name}-{source.stem}.o"
        is_kernel = source.parent.name == "kernels"
        extra = ["-O2"] if is_kernel else ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        run("clang", *FLAGS, *extra, "-fsanitize=fuzzer-no-link", "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, ROOT.glob("src/*/*.c")))


@pytest.mark.full
@pytest.mark.parametrize("source", FUZZERS, ids=lambda path: path.stem)
def test_under_libfuzzer(core, source, tmp_path):
    corpus, found, program = tmp_path / "corpus", tmp_path / "found", tmp_path / source.stem
    for folder in (corpus, found):
        folder.mkdir()
    for i, line in enumerate(source.with_suffix(".txt").read_text().split()):
        (corpus / str(i)).write_bytes(bytes.fromhex(line))
    sanitizers = ["-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"]
    run("clang", *FLAGS, "-O1", *sanitizers, source, *core, "-o", program, *LIBRARIES)
    command = [program, corpus, f"-max_total_time={SECONDS}", "-max_len=2048", f"-artifact_prefix={found}/"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        inputs = "\n".join(path.read_bytes().hex() for path in found.iterdir())
        pytest.fail(f"{source.stem} fails on\n{inputs}\n{done.stdout[-5000:]}", pytrace=False)
