"""Test the example in C++, and that README's program is C and C++ alike, without a warning."""

import re
import shutil

import pytest
from support.compiling import EMULATOR, ROOT, run

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
COMPILERS = [("gcc", "c11"), ("clang", "c11"), ("g++", "c++17"), ("g++", "c++20"), ("clang++", "c++20")]


def test_the_example(build):
    lines = run(*EMULATOR, build(ROOT / "examples/cpp/decode.cpp")).splitlines()
    assert [re.sub(r" +", " ", line) for line in lines] == [
        "a prompt sequence 0: 5 tokens, sequence 1: 0",
        "three tokens more sequence 0: 8 tokens, sequence 1: 0",
        "the model failed sequence 0: 8 tokens, sequence 1: 0",
        "a fork, and a token for it sequence 0: 8 tokens, sequence 1: 9",
        lines[4],
        "nine tokens that do not fit sequence 0: 8 tokens, sequence 1: 9",
    ]
    assert lines[4].startswith("refused: 9 more tokens do not fit: sequence 0 holds 8 of max_seq_len 16")


@pytest.fixture
def readme(tmp_path):
    (program,) = re.findall(r"^```c\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    (tmp_path / "app.c").write_text(program)
    (tmp_path / "app.cpp").write_text(program)
    return tmp_path


@pytest.mark.parametrize(("compiler", "standard"), COMPILERS)
def test_readme_is_c_and_cpp(readme, compiler, standard):
    if not shutil.which(compiler):
        pytest.skip(f"there is no {compiler} here")
    source = readme / ("app.cpp" if "++" in standard else "app.c")
    run(compiler, f"-std={standard}", *WARNINGS, f"-I{ROOT}/include", "-fsyntax-only", source)


def test_readme_runs_as_cpp(build, readme):
    assert run(*EMULATOR, build(readme / "app.cpp")) == "tokens stored: 1\n"
