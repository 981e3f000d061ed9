"""The core's own tests, and the programs in the documentation, in C: built as compiling.py says."""

import os
import re

import pytest
from support.compiling import EMULATOR, ROOT, SANITIZERS, is_for_windows, run

PAGES = [ROOT / "README.md", ROOT / "docs/c.md", ROOT / "docs/prefix.md"]
LEFT_OUT = "Not for Windows: " if is_for_windows() else None  # stands in the head comment, with the reason
SOURCES = [path for path in (ROOT / "tests/c").glob("*/test_*.c") if not LEFT_OUT or LEFT_OUT not in path.read_text()]
TESTS = sorted(SOURCES, key=lambda path: (-path.stat().st_size, path))  # a long one must not come last


@pytest.mark.parametrize("source", TESTS, ids=lambda path: path.stem)
def test_program(workshop, source):
    workshop.run(source)


def test_quick_runs_have_no_sanitizers(workshop, pytestconfig):
    """They double the time of every program."""
    if "KVCACHE_C_FLAGS" in os.environ or pytestconfig.option.slow or pytestconfig.option.full:
        pytest.skip("the core is built with the flags that were asked for")
    assert not {*SANITIZERS} & {*workshop.core()[0]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(build, page, tmp_path):
    programs = re.findall(r"^```c\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert programs
    for i, program in enumerate(programs):
        source = tmp_path / f"{page.stem}{i}.c"
        source.write_text(program)
        built = build(source)
        if "kvc_save(" not in program or "qemu-s390x" not in EMULATOR:  # which is big-endian: nothing is saved there
            run(*EMULATOR, built)
