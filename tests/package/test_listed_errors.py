"""The header lists KVC_ERR_NOMEM and KVC_ERR_FULL for those calls on prefixes that test_errors.c has seen fail so."""

import re

from support.compiling import ROOT

HEADER = (ROOT / "include/kvcache_prefix.h").read_text()
PROGRAM = (ROOT / "tests/c/prefix/test_errors.c").read_text()


def listed(comment):
    return {error for error in ("NOMEM", "FULL") if f"KVC_ERR_{error}" in comment}


def test_errors_of_prefixes():
    """Each call of the header, but for stores in a folder, which have a test of their own."""
    found = re.findall(r"/\*((?:[^*]|\*(?!/))*)\*/\s+KVC_API kvc_status (\w+)\(", HEADER)
    expected = {name: listed(comment) for comment, name in found if not name.startswith("kvc_dir_store")}
    rows = re.findall(r'^    \{"(\w+)", run_\w+, ([A-Z| ]+), \d\},$', PROGRAM, re.M)
    assert len(expected) > 15
    assert {name: set(errors.split(" | ")) - {"NONE"} for name, errors in rows} == expected
