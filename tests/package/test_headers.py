"""The public headers: each compiles alone and says at its head what it has, and kvcache.h brings the other two."""

import re

import pytest
from support.compiling import HEADERS, ROOT, compiler, in_cpp, public_functions, run

MOST_LINES = 950  # of kvcache.h, which is for every day
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror", "-fsyntax-only", f"-I{ROOT}/include"]


def check(program, folder, language):
    """Compile a program in C or C++."""
    source = folder / "main.c"
    source.write_text(program)
    command = [*compiler(), "-std=c11", *WARNINGS]
    run(*(command if language == "c" else in_cpp(command)), "-x", language, source)


@pytest.mark.parametrize("language", ["c", "c++"])
@pytest.mark.parametrize("header", [header.name for header in HEADERS])
def test_it_compiles_alone_and_brings_the_others(header, language, tmp_path):
    calls = "".join(f"    (void)&{name};\n" for name in sorted(public_functions()))
    check(f"#include <{header}>\nint main(void) {{\n{calls}    return 0;\n}}\n", tmp_path, language)


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.name)
def test_its_contents_are_its_sections(header):
    text = header.read_text()
    contents = re.search(r"^ \* Contents\b.*\n((?: \*   .*\n)+)", text, re.M)[1]
    listed = re.findall(r"^ \*   ([\w. ]+?)  +\S", contents, re.M)
    sections = re.findall(r"^/\* ---- (.*?) -+ \*/$", text, re.M)
    assert listed == [*sections, *re.findall(r'^#include "(kvcache_\w+\.h)"', text, re.M)]


def test_the_everyday_header_is_short():
    assert len((ROOT / "include/kvcache.h").read_text().splitlines()) <= MOST_LINES
