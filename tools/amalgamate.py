"""Write the core as one source and one header.

Headers come first, each once. Then every source is a part, with its templates (the headers without a guard) in their
places. C has no scope between a file and a function, so a name that several parts define gets the part's name as a
prefix, and every part ends by undefining its macros.
"""

import argparse
import functools
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "include/kvcache.h"
SOURCES = sorted(ROOT.glob("src/*/*.c"))

HEAD = """\
/* kvcache {version}: the KV cache for CPU inference.  {what}
 * Written by tools/amalgamate.py.
 *
{licence}
 */
"""
HEADER_IS = "The whole public C interface of kvcache.c, which stands beside it."
SOURCE_IS = """The whole core in one file, which needs no other.
 *
 *   cc -O2 -c kvcache.c     and, where it is linked, -lm -lpthread
 *"""
FEATURES = """\
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* what some parts ask for, before any includes anything */
#endif
#if !defined(_FILE_OFFSET_BITS) && !defined(_TIME_BITS)
#define _FILE_OFFSET_BITS 64
#define _TIME_BITS 64
#endif
"""

INCLUDE = re.compile(r'^#include "(.*)"\n', re.M)
GUARD = re.compile(r"^#ifndef (\w+)\n#define \1\n", re.M)
DEFINE = re.compile(r"^ *# *define (?!_)(\w+)", re.M)
DIRECTIVE = re.compile(r"^ *#(?:\\\n|[^\n])*", re.M)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
TOKEN = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|[\w.])*|->|\#\#|\S""", re.S
)


@functools.cache
def files_included(path):
    """Return the project's files that a file includes, in order.  The public headers are one, which includes none."""
    if path.parent == HEADER.parent:
        return []
    folders = (path.parent, ROOT / "src", HEADER.parent)
    names = INCLUDE.findall(path.read_text())
    return [next(folder / name for folder in folders if (folder / name).exists()).resolve() for name in names]


@functools.cache
def is_template(path):
    return not GUARD.search(path.read_text())


def headers_of(paths):
    """Return the headers that these files need, each after the headers that it includes."""
    found = {}
    for path in paths:
        files = files_included(path)
        found |= dict.fromkeys([*headers_of(files), *(file for file in files if not is_template(file))])
    return [*found]


def splice(path):
    """Return a file's text, with templates in the place of their #include, and without the #include of headers."""
    files = iter(files_included(path))
    return INCLUDE.sub(lambda _: splice(file) if is_template(file := next(files)) else "", path.read_text())


def interface():
    """Return the text of the public header, with the headers that it includes in their places."""
    return INCLUDE.sub(lambda include: INCLUDE.sub("", HEADER.with_name(include[1]).read_text()), HEADER.read_text())


def scan(text):
    """Yield each token, its neighbours, and the brackets around it: `{` as struct, union, enum or body."""
    blank = COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), text)
    tokens = [*TOKEN.finditer(blank)]
    words = ["", "", *(token[0] for token in tokens), ""]
    inside = []
    for i, token in enumerate(tokens, 2):
        if words[i] in (")", "]", "}"):
            inside.pop()
        yield token, words[i - 1], words[i + 1], inside
        if words[i] in ("(", "[", "{"):
            kinds = {"struct", "union", "enum"}.intersection(words[i - 2 : i]) if words[i] == "{" else [words[i]]
            inside.append(next(iter(kinds), "body"))


@functools.cache
def names_of(text):
    """Return the names that a text defines at file scope, macros aside."""
    names = set()
    for token, before, after, inside in scan(DIRECTIVE.sub("", text)):
        declared = not inside and before != "=" and after in ("(", ";", "=", "[", ",")
        tag = not inside and before in ("struct", "union", "enum") and after == "{"
        enumerator = inside == ["enum"] and before in ("{", ",")
        if (declared or tag or enumerator) and re.match("[A-Za-z]", token[0]):
            names.add(token[0])
    return names - {*DEFINE.findall(text)}


def rename(text, names, prefix):
    """Return the text with a prefix to these names, except where they name a field."""
    done, at = [], 0
    for token, before, after, inside in scan(text):
        is_field = before in (".", "->") or ("struct" in inside and after in (";", ",", ":", "[", ")"))
        if token[0] in names and not is_field:
            done += text[at : token.start()], prefix
            at = token.start()
    return "".join([*done, text[at:]])


def source():
    """Return the text of kvcache.c, without the comment at its top."""
    parts = {path: splice(path) for path in SOURCES}
    counts = Counter(name for text in parts.values() for name in names_of(text))
    shared = {name for name, count in counts.items() if count > 1}
    headers = (interface() if path == HEADER else INCLUDE.sub("", path.read_text()) for path in headers_of(SOURCES))
    pieces = [FEATURES, *headers]
    for path, text in parts.items():
        undefined = "".join(f"#undef {name}\n" for name in dict.fromkeys(DEFINE.findall(text)))
        pieces.append(rename(text, shared & names_of(text), f"{path.stem}_") + undefined)
    return "\n".join(pieces)


def head(what):
    """Return the comment at the top of a file, in which `what` describes the file."""
    version = ".".join(re.findall(r"^#define KVC_VERSION_\w+ +(\d+)", HEADER.read_text(), re.M))
    licence = "\n".join(f" * {line}".rstrip() for line in (ROOT / "LICENSE").read_text().splitlines())
    return HEAD.format(version=version, what=what, licence=licence)


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kvcache.h").write_text(head(HEADER_IS) + interface())
    (folder / "kvcache.c").write_text(head(SOURCE_IS) + source())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Then: cc -O2 -c FOLDER/kvcache.c")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where kvcache.c and kvcache.h are written")
    main(parser.parse_args().folder)
