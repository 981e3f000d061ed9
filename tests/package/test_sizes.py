"""How large the parts are: sizes.txt has the most lines of each, and the most words of the documentation.

Raising a number is a line in the commit that says for what. A part that is 2 % below its number lowers it. Data do not
count: JSON, tables and pictures.
"""

import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = {".json", ".csv", ".svg", ".png", ".safetensors"}
WORDS = "words of docs and README.md"


def files():
    """Return the paths of a clone, or of a copy of one: all that git does not ignore."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    if not (ROOT / ".gitignore").exists():
        pytest.skip("neither a clone nor a copy of one")
    ignored = [line.strip("/").rpartition("/")[2] for line in (ROOT / ".gitignore").read_text().split()]
    found = (path for path in ROOT.rglob("*") if path.is_file())
    return [p for p in found if not any(fnmatch(part, name) for part in p.relative_to(ROOT).parts for name in ignored)]


def counted(paths):
    """Return the lines of each part by its folder, and the words of the documentation."""
    files = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths if path.suffix not in DATA}
    texts = {name: data.decode() for name, data in files.items() if b"\0" not in data}
    sizes = {
        part: sum(text.count("\n") for name, text in texts.items() if name.startswith(f"{part}/"))
        for part in ("src", "include", "kvcache", "tests", "bench", "integrations/llama.cpp")
    }
    everything = sum(text.count("\n") for name, text in texts.items() if not name.startswith("examples/model/"))
    sizes["all without integrations/llama.cpp"] = everything - sizes["integrations/llama.cpp"]
    pages = [text for name, text in texts.items() if name.endswith(".md") and name.startswith(("docs/", "README"))]
    sizes[WORDS] = sum(len(text.split()) for text in pages)
    return sizes


def test_sizes():
    lines = (ROOT / "tests/package/sizes.txt").read_text().splitlines()
    most = {part: int(number.replace(",", "")) for number, part in (line.split(maxsplit=1) for line in lines)}
    sizes = counted(files())
    print(*(f"{size:9,} {part}" for part, size in sizes.items()), sep="\n")
    assert most.keys() == sizes.keys()
    grown = {part: (size, most[part]) for part, size in sizes.items() if size > most[part]}
    assert not grown, "a part is larger than sizes.txt lets it be: take something away, or say in the commit for what"
    shrunk = {part: (size, most[part]) for part, size in sizes.items() if size < 0.98 * most[part]}
    assert not shrunk, "a part is smaller: lower its number in sizes.txt"
