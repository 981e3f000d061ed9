"""Every example that the documentation shows, run: docstrings, and the Python blocks of README and docs/."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import kvcache

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(module.name for module in pkgutil.walk_packages(kvcache.__path__, "kvcache."))
MODULES = ["kvcache", *(name for name in MODULES if not re.search(r"\.(benchmarks|peers)\.", name))]  # these have none
PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if "```python\n" in page.read_text()]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def need(name):
    if name == "kvcache.plot":
        pytest.importorskip("matplotlib")
    if name in ("kvcache.hf", "huggingface.md"):
        pytest.importorskip("torch")
        pytest.importorskip("transformers")


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    need(name)
    result = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert not result.failed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page):
    need(page.name)
    names = {}
    for block in re.finditer(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S):
        code, line = block[1], block.string.count("\n", 0, block.start()) + 1
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line)
            assert not doctest.DocTestRunner(optionflags=OPTIONS).run(test, clear_globs=False).failed
            names.update(test.globs)
        else:
            exec(compile("\n" * line + code, page, "exec"), names)


def test_reference_is_complete():
    page = (ROOT / "docs/api.md").read_text()
    assert set(kvcache.__all__) == set(re.findall(r"^\.\. auto(?:class|function|data|exception):: (\w+)$", page, re.M))
