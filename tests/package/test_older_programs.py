"""Programs that were compiled with an older header go on with today's library, or are refused in words.

`older` has the header of 0.2.0, without comments, and a program for each version: never change them.
"""

import re
import sys
from pathlib import Path

import pytest
from support.compiling import SANITIZERS, compiler, run, works

import kvcache

OLDER = Path(__file__).with_name("older")
LIBRARY = Path(kvcache.get_library())


@pytest.mark.skipif(sys.maxsize < 2**32, reason="sizes in the programs are those of 64 bits")
@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"])
def test_a_program_of_an_older_version(version, tmp_path):
    """0.2.0 works; 0.1.0 is refused, by the sizes of its structs."""
    program, flags = tmp_path / "program", ["-std=c11", "-Wall", "-Werror"]
    flags += SANITIZERS if works(compiler(), SANITIZERS, tmp_path) else []
    source = OLDER / f"program-{version}.c"
    run(*compiler(), *flags, source, LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}", "-o", program)
    run(program)


def test_functions_that_are_gone_are_those_the_changelog_names():
    """A program of 0.2.0 that calls one of them does not link; every other function has its arguments."""

    def declared(path):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
        return {re.sub(r"\s+", " ", line) for line in re.findall(r"^KVC_API ([^;]*);", text, re.M)}

    gone = declared(OLDER / "kvcache-0.2.0.h") - declared(Path(kvcache.get_include()) / "kvcache.h")
    assert {re.search(r"(kvc_\w+)\(", line)[1] for line in gone} == {
        "kvc_find_row",
        "kvc_first_position",
        "kvc_last_position",
    }
