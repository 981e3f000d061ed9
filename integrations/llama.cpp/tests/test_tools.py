"""Test llama.cpp's own tests on this cache, and its programs as the page has its readers call them."""

import functools
import json
import os
import re
import socket
import subprocess
import time
import urllib.request

import llama_cpp_build
import llama_models
import pytest
from support.compiling import ROOT

README = (ROOT / "integrations/llama.cpp/README.md").read_text()
BUILD, SERVE, USE, COMPLETE, BENCH, TYPES, *_ = re.findall(r"^```sh\n(.*?)\n```$", README, re.M | re.S)


run = functools.partial(llama_cpp_build.run, LLAMA_KVCACHE="1")


# ---- llama.cpp's own tests of memory and state: the exit status tells, as a log may lose its last lines


def test_state_restored_between_others(repository):
    said = run("test-state-restore-fragmented", "-m", repository, "-lv", "4")
    assert "SUCCESS" in said
    assert "llama_kvcache:" in said, "it ran on this cache"


@pytest.mark.slow
@pytest.mark.threads
def test_contexts_side_by_side(repository):
    options = ("-p", "ROMEO:", "-n", "64", "-c", "256", "-ub", "32", "-np", "4", "-t", "2")
    run("test-thread-safety", "-m", repository, *options, OMP_NUM_THREADS="2")


@pytest.mark.slow
def test_every_architecture():
    run("test-llama-archs", *llama_models.SEED)


@pytest.fixture(scope="module")
def architectures(tmp_path_factory):
    """A folder of small random models of every architecture."""
    folder = tmp_path_factory.mktemp("architectures")
    run("test-llama-archs", *llama_models.SEED, "-o", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("program", ["test-save-load-state", "test-recurrent-state-rollback"])
def test_states_of_every_architecture(architectures, program):
    run(program, "--models", architectures)


# ---- the page's commands, in its order


class Reader:
    """Runs the page's commands in a folder with a model, after its first command has been run."""

    def __init__(self, folder, model):
        self.folder = folder
        (folder / "model.gguf").symlink_to(model)
        self.environment = os.environ | {"HOME": str(folder)}
        self.environment.pop("LLAMA_KVCACHE", None)

    def start(self, command, **options):
        return subprocess.Popen(
            ["sh", "-c", f"{USE}\n{command}"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            **options,
        )

    def run(self, command):
        with self.start(command) as process:
            said, _ = process.communicate(timeout=1800)
        assert process.returncode == 0, f"{command}\n{said[-8000:]}"
        return said


@pytest.fixture
def reader(tmp_path, repository):
    build = re.fullmatch(r"integrations/llama.cpp/build.sh --output ~/([\w-]+)", BUILD)[1]
    (tmp_path / build).symlink_to(llama_cpp_build.folder())
    return Reader(tmp_path, repository)


def test_the_page_completes_a_text(reader):
    said = reader.run(COMPLETE)
    (shown,) = re.findall(r"^(llama_kvcache: .*), \w+, up to .*$", README, re.M)
    assert f"{shown}, " in said, "the line that the page shows"
    own = reader.run(COMPLETE.replace("-lv 4", "-lv 4 --no-kvcache"))
    assert "llama_kvcache:" not in own


def test_the_page_completes_a_text_in_another_type(reader):
    assert "K (int8), V (int8), " in reader.run(f"{TYPES} -lv 4")


def test_the_page_serves(reader):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = SERVE.replace("8080", str(port))
    assert command != SERVE
    with reader.start(f"exec env {command} -lv 4") as server:
        try:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/completion",
                json.dumps({"prompt": "ROMEO:", "n_predict": 8}).encode(),
                {"Content-Type": "application/json"},
            )
            for _ in range(600):
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        assert json.load(answer)["tokens_predicted"] == 8
                    break
                except OSError:  # it has not begun to listen, or still loads the model
                    assert server.poll() is None, server.stdout.read()
                    time.sleep(0.2)
        finally:
            server.terminate()
        assert "llama_kvcache:" in server.communicate(timeout=60)[0]


@pytest.mark.slow
def test_the_page_measures(reader):
    said = reader.run(BENCH)
    assert {"pp512", "tg32", "pp512 @ d8192", "tg32 @ d8192"} <= {cell.strip() for cell in said.split("|")}


def test_the_page_names_the_version_that_is_pinned():
    pinned = (ROOT / "integrations/llama.cpp/pin.txt").read_text().split()[0]
    assert set(re.findall(r"llama-cpp-python==[\d.]+", README)) == {pinned}
