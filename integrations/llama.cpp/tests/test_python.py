"""Test llama-cpp-python on the library of the build, as the README installs and uses it."""

import re
import subprocess
import sys

import llama_cpp_build
import llama_models
import pytest
from llama_server import ENVIRONMENT, USED
from support.compiling import ROOT

README = ROOT / "integrations/llama.cpp/README.md"

# Prints 50 greedy tokens, those after a prompt that goes on, the same from a saved state, and the first ones again.
PROGRAM = """
import sys
import llama_cpp

llm = llama_cpp.Llama("model.gguf", n_ctx=1024, n_threads=1, verbose=True)
prompt, more = open("prompt.txt", "rb").read(), b"KING HENRY:"

def complete(llm, text):
    tokens = []
    for token in llm.generate(llm.tokenize(text, add_bos=False), temp=0.0, repeat_penalty=1.0):
        tokens.append(token)
        if len(tokens) == 50:
            return tokens

print(complete(llm, prompt))
state = llm.save_state()
print(complete(llm, prompt + more))
other = llama_cpp.Llama("model.gguf", n_ctx=1024, n_threads=1)
other.load_state(state)
print(complete(other, prompt + more))
llm.reset()
print(complete(llm, prompt))
print(state.llama_state_size)
answer = llm.create_completion(prompt.decode(), max_tokens=50, temperature=0.0, stream=True)
print("".join(part["choices"][0]["text"] for part in answer).encode())
"""


def blocks():
    """Return the commands and the programs of the README's section."""
    section = README.read_text().split("\n## From Python\n")[1].split("\n## ")[0]
    found = re.findall(r"^```(\w+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in found] == ["sh", "sh", "python", "python"]
    return [text for _, text in found]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Install the binding into a fresh virtual environment, in a home with the build where the README has it."""
    build = llama_cpp_build.folder()
    if not (build / "bin/libllama.so").exists():
        pytest.skip("llama.cpp was built without a shared library")
    folder = tmp_path_factory.mktemp("llama-python")
    llama_models.write_repository(folder).rename(folder / "model.gguf")
    (folder / "llama-kvcache").symlink_to(build)
    (folder / "prompt.txt").write_text(llama_models.text(0, 200))
    (folder / "program.py").write_text(PROGRAM)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True).stdout.strip()
    done = shell(folder, blocks()[0], PIP_CACHE_DIR=cache)
    if done.returncode and re.search("Could not find a version|No matching distribution|Connection", done.stderr):
        pytest.skip("pip reaches no index here")
    assert done.returncode == 0, done.stderr
    return folder


def shell(home, commands, **environment):
    activated = f". venv/bin/activate\n{commands}"
    return subprocess.run(
        ["bash", "-ec", activated], cwd=home, env=ENVIRONMENT | {"HOME": str(home)} | environment,
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip


@pytest.mark.slow
def test_the_readme_and_a_saved_state(home):
    _, exports, *programs = blocks()
    (home / "readme.py").write_text("\n".join(programs))
    done = shell(home, f"{exports}\npython readme.py")
    assert done.returncode == 0, done.stderr
    assert re.search(USED, done.stderr)
    assert len(done.stdout) > 32
    assert re.search(r"^\d+ cells, ", done.stdout, re.M)
    printed = {}
    for switch in ("1", "0"):
        done = shell(home, f"{exports}\nexport LLAMA_KVCACHE={switch}\npython program.py")
        assert done.returncode == 0, done.stderr
        assert bool(re.search(USED, done.stderr)) == (switch == "1")
        printed[switch] = done.stdout.splitlines()
    first, longer, restored, again, size, _ = printed["1"]
    assert int(size) > 100_000
    assert printed["1"] == printed["0"]
    assert (first, longer) == (again, restored)
    assert len(first.split(",")) == 50
