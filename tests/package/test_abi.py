"""The binary interface is the one written down in abi.txt: names exported, sizes of structs, offsets, values of enums.

abi.txt begins with how many there are of each. If a change raises a count, CHANGELOG.md says what the new ones are for.
After a change that is meant, `PYTHONPATH=tests python tests/package/test_abi.py > tests/package/abi.txt` writes it
down anew; where a program compiled before would no longer work, the version in include/kvcache.h changes with it.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from support import compiling
from support.compiling import ROOT, compiler, run

import kvcache

WRITTEN = Path(__file__).with_name("abi.txt")
REWRITE = "PYTHONPATH=tests python tests/package/test_abi.py > tests/package/abi.txt"
USERS, SOURCES = ("kvcache", "integrations", "examples", "bench"), {".pyx", ".pxi", ".c", ".cpp", ".rs"}
HEADERS = [Path(kvcache.get_include(), header.name).read_text() for header in compiling.HEADERS]
HEADER = re.sub(r"/\*.*?\*/|\\\n", " ", "".join(HEADERS), flags=re.S)
DECLARED = re.findall(r"^KVC_API [^;(]*?(kvc_\w+)\(", HEADER, re.M)


def exported(library):
    """The names that a shared library gives away, with what they are: T for a function."""
    if sys.platform != "linux" or not shutil.which("nm"):
        pytest.skip("there is no nm here, or no ELF")
    told = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    return sorted(line.split()[1:] for line in told.splitlines())


def fields(body):
    """The names in the body of a struct."""
    for declaration in filter(str.strip, body.split(";")):
        pointer = re.search(r"\(\*(\w+)\)", declaration)
        yield from [pointer[1]] if pointer else re.findall(r"(\w+)(?:\[\w+\])?\s*(?:,|$)", declaration.strip())


def facts():
    """Lines such as abi.txt has of the header, with what to print for the number of each."""
    for name, body in re.findall(r"typedef struct (kvc_\w+) \{(.*?)\} \1;", HEADER, re.S):
        yield f"struct {name}", f"sizeof({name})"
        for field in fields(body):
            yield f"field {name}.{field}", f"offsetof({name}, {field})"
    for body in re.findall(r"typedef enum kvc_\w+ \{(.*?)\}", HEADER, re.S):
        for value in re.findall(r"(?:^|,)\s*(KVC_\w+)\b(?!\()", body):
            yield f"value {value}", value
    for value in re.findall(r"\bX\((KVC_\w+),", HEADER):
        yield f"value {value}", value


def found():
    """Return what abi.txt should say of the installed library and header."""
    prints = "".join(f'printf("{fact} %lld\\n", (long long)({number}));\n' for fact, number in facts())
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "abi.c"), Path(folder, "abi")
        source.write_text(f"#include <kvcache.h>\n#include <stdio.h>\nint main(void) {{\n{prints}return 0;\n}}\n")
        run(*compiler(), f"-I{kvcache.get_include()}", source, "-o", program)
        told = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    functions = "".join(f"function {name}\n" for _, name in exported(kvcache.get_library()))
    kinds = Counter(line.split()[0] for line in (functions + told).splitlines())
    return "".join(f"{kind}s: {num}\n" for kind, num in kinds.items()) + functions + told


def test_all_that_is_exported_is_declared_and_the_other_way_round():
    assert exported(kvcache.get_library()) == sorted(["T", name] for name in DECLARED)


def test_each_function_is_called_outside_of_tests():
    files = [path for folder in USERS for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    texts = [path.read_text() for path in files if path.is_file()]
    called = {name for text in texts for name in re.findall(r"\b(kvc_\w+)\(", text)}
    unused = set(DECLARED) - called
    assert not unused, "no binding, integration, example or benchmark calls them: remove them"


def test_the_module_exports_nothing_but_its_beginning():
    assert [name for _, name in exported(kvcache._core.__file__)] == ["PyInit__core"]


@pytest.mark.skipif(sys.maxsize < 2**32, reason="abi.txt is that of 64 bits")
def test_it_is_the_one_written_down():
    assert found() == WRITTEN.read_text(), f"if this is meant: {REWRITE}"


def test_a_program_in_c_is_linked_to_the_library(tmp_path):
    source, program, library = tmp_path / "main.c", tmp_path / "main", Path(kvcache.get_library())
    source.write_text("#include <kvcache.h>\nint main(void) { return kvc_version() / 1000 < 1; }\n")
    rpath = f"-Wl,-rpath,{library.parent}"
    run(*compiler(), f"-I{kvcache.get_include()}", source, library, rpath, "-o", program)
    run(program)


if __name__ == "__main__":
    sys.stdout.write(found())
