"""Every example that the documentation shows, run: docstrings, and the Python blocks of README and docs/."""

import doctest
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvcache

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(module.name for module in pkgutil.walk_packages(kvcache.__path__, "kvcache."))
MODULES = ["kvcache", *(name for name in MODULES if not re.search(r"\.(benchmarks|peers)\.", name))]  # these have none
PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if "```python\n" in page.read_text()]
WITH_TORCH = ("README.md", "huggingface.md", "models.md")  # pages whose programs need it
FOLDERS = ("", "docs/", "docs/design/", "examples/**/", "bench/**/", "integrations/**/")
LINKING = sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}*.md"))
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def marked(things, needs_torch):
    return [pytest.param(thing, marks=pytest.mark.hf if needs_torch(thing) else ()) for thing in things]


@pytest.mark.parametrize("name", marked(MODULES, lambda name: name.startswith(("kvcache.hf", "kvcache.server"))))
def test_docstrings(name):
    if name == "kvcache.plot":
        pytest.importorskip("matplotlib")
    module, known = importlib.import_module(name), {"np": np, "kvcache": kvcache}
    result = doctest.testmod(module, extraglobs=known, optionflags=OPTIONS)
    assert not result.failed


@pytest.mark.filterwarnings("error:.past_key_values. is deprecated:FutureWarning")  # nobody copies a deprecated name
@pytest.mark.parametrize("page", marked(PAGES, lambda page: page.name in WITH_TORCH), ids=lambda page: page.name)
def test_page(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {}
    for block in re.finditer(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S):
        code, line = block[1], block.string.count("\n", 0, block.start()) + 1
        assert page.name in WITH_TORCH or "transformers" not in code
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line)
            assert not doctest.DocTestRunner(optionflags=OPTIONS).run(test, clear_globs=False).failed
            names.update(test.globs)
        else:
            exec(compile("\n" * line + code, page, "exec"), names)


@pytest.mark.parametrize("part", ["[A-Z]", "state|stores", "plot", pytest.param("hf", marks=pytest.mark.hf)])
def test_what_a_sentence_names_is_there(part):
    """After `import kvcache` alone, in an interpreter where nothing else was imported."""
    if part == "plot":
        pytest.importorskip("matplotlib")
    pages = [re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S) for page in LINKING]
    code = " ".join(re.findall(r"`([^`\n]+)`", "\n".join(pages)))
    names = {*re.findall(rf"(?<![\w./:-])kvcache\.(?:{part})(?:\w+)?(?:\.\w+)*", code)}
    program = "\n".join(["import kvcache", *sorted(names)])
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_the_first_runner_is_a_runner(monkeypatch, capsys):
    """Its blocks are one program, about 100 lines up to the edits, whose logits are those of `kvcache.runner`.

    Those of an interactive session are none of it, as the page says.
    """
    pytest.importorskip("safetensors")
    from kvcache import runner

    monkeypatch.chdir(ROOT)
    page, _, edits = (ROOT / "docs/first-runner.md").read_text().partition("## What the cache does for you")
    assert "except the blocks with `>>>`" in page
    program, more = (
        "\n".join(code for code in re.findall(r"^```python\n(.*?)^```$", part, re.M | re.S) if ">>>" not in code)
        for part in (page, edits)
    )
    assert len([line for line in program.splitlines() if line.strip()]) <= 110
    names = {}
    exec(compile(f"{program}\n{more}", "first-runner.md", "exec"), names)
    assert names["cache"].next_position(0) == 12  # as the last session says
    assert capsys.readouterr().out.startswith("ROMEO:")
    model, tokens = runner.Llama.load(ROOT / "examples/model"), list(b"Now is the winter of our discontent")
    for kind in ("f32", "q8_0"):
        mine, theirs = names["new_cache"](kind), names["new_cache"](kind)
        for part in (tokens[:20], tokens[20:], [10]):  # a prompt in two pieces, and a token
            got, want = names["forward"](part, mine), model.forward(part, theirs, last_only=True)[0]
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 if kind == "f32" else 0.05)
    expected = json.loads((ROOT / "examples/model/expected.json").read_text())
    said = names["generate"](expected["prompt"].encode(), 100, names["new_cache"]("f32"), temperature=0)
    assert expected["greedy"].startswith(said)


@pytest.mark.parametrize(("root", "title"), [("src", "## The core"), ("kvcache", "## The package")])
def test_the_map_has_the_folders_that_exist(root, title):
    """Its table has each folder of sources, and no other. A file that is named with its folder exists."""
    page = (ROOT / "docs/design/architecture.md").read_text()
    table = page.partition(title)[2].partition("\n## ")[0].partition("Where to look:")[0]
    first = " ".join(re.findall(r"^\| (`[^|]+) \|", table, re.M))
    tracked = {path.parent.relative_to(ROOT / root).parts for path in (ROOT / root).rglob("*.[chp]*")}
    assert set(re.findall(r"`(\w+)/`", first)) == {parts[0] for parts in tracked if parts} - {"lib", "__pycache__"}
    for name in re.findall(r"`([\w/]+\.\w+)`", page):
        if name.partition("/")[0] in {parts[0] for parts in tracked if parts} and "/" in name:
            assert any((ROOT / folder / name).is_file() for folder in ("src", "kvcache")), name


def anchors_of(page):
    """The anchors of a page's headings, as code hosts and Sphinx name them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{target} leads nowhere"
        assert not anchor or anchor in anchors_of(file), f"{path or page.name} has no heading #{anchor}"


@pytest.mark.parametrize(("page", "introduces"), [("concepts", 20), ("choosing", 4), ("eviction", 2)])
def test_the_glossary_has_the_terms_of(page, introduces):
    """A term is bold and in small letters where it is introduced; advice in bold begins with a capital letter."""
    terms = set(re.findall(r"\*\*((?:KV )?[a-z][a-z ]*)\*\*", (ROOT / f"docs/{page}.md").read_text()))
    known = set(re.findall(r"^(\w.*)$", (ROOT / "docs/glossary.md").read_text(), re.M))
    assert len(terms) >= introduces
    assert not [term for term in terms if not {term, term.removesuffix("s")} & known]


def test_the_map_names_files_that_exist():
    text = (ROOT / "docs/design/architecture.md").read_text()
    folders = ("src", "kvcache", "tests", "include", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    names = {str(path) for path in files}
    for name in re.findall(r"`([\w/]+\.(?:c|h|py|pyx|pxi|pxd))`", text):
        assert any(path.endswith(f"/{name}") for path in names), f"{name} is not there"


def test_reference_is_complete():
    page = (ROOT / "docs/api.md").read_text()
    assert set(kvcache.__all__) == set(re.findall(r"^\.\. auto(?:class|function|data|exception):: (\w+)$", page, re.M))
    package = (ROOT / "kvcache/hf/__init__.py").read_text()  # importing it would take torch
    (names,) = re.findall(r"^__all__ = \[(.*)\]$", package, re.M)
    listed = re.findall(r"^\.\. auto(?:class|function):: kvcache\.hf\.(\w+)$", page, re.M)
    assert set(re.findall(r'"(\w+)"', names)) - {"NAME"} == set(listed)


@pytest.mark.parametrize("name", ["README.md", "docs/huggingface.md", "docs/benchmarks.md", "bench/README.md"])
def test_torch_for_cpus_comes_before_what_brings_torch(name):
    """On Linux pip's choice is the build with CUDA, of 5 GB."""
    page = (ROOT / name).read_text()
    said = re.search(r"pip install torch --index-url \S+/cpu$|huggingface\.md#install", page, re.M)
    assert said, "it does not say how to install torch for CPUs"
    if name in ("README.md", "docs/huggingface.md"):
        assert said.start() < page.index("[hf]'")


def test_the_first_page_says_why_and_shows_how():
    """The site's first page has README's reasons, example and limits: it includes them."""
    page, readme = ((ROOT / name).read_text() for name in ("docs/index.md", "README.md"))
    for block in re.findall(r"^```{include} \.\./README\.md\n(.*?)^```$", page, re.M | re.S):
        marks = dict(re.findall(r'^:(start-after|end-before): "(.*)"$', block, re.M))
        included = readme[: readme.index(marks["end-before"])]
        assert included.rstrip()[-1] in ".|`", included[-20:]  # no half of a link
        page = page.replace(block, included)
    places = [page.index(part) for part in ("begin with", "**Fast.**", "batch.attend(", "never run on macOS")]
    assert places == sorted(places)


def test_the_guide_says_first_who_rotates():
    page = (ROOT / "docs/python.md").read_text()
    assert re.search(r"rotates? +q +and +k", page[: page.index("```")].replace("`", "").replace("\n", " "))
