"""A message names what its reader has: no constant or function of C reaches Python, in errors of the core either."""

import ast
import re

import numpy as np
import pytest
from support.c_sources import SRC, amalgamate
from support.python_sources import CYTHON_DOCSTRING, DOCUMENTED, PACKAGE

import kvcache

C_NAME = re.compile(r"\b(?:KVC|kvc)_\w+")

# Sentences on arguments that Python's callers do not give: it passes types and kinds of its own, and makes no plans.
FOR_C_ONLY = {
    "args->put is not NULL: rows are stored by kvc_put before tasks are run",
    "layers[%d].%s_type is %d: no kvc_type",
    "layers[%d].%s_transform is %d: no kvc_transform",
    "layers[%d].policy.kind is %d: no kvc_policy_kind",
    "layers[%d].rope.kind is %d: no kvc_rope_kind",
    "%s_type is %d: it must be KVC_F32, KVC_F16 or KVC_BF16",
    "precision is %d: it must be KVC_PRECISION_STORED, 0, or KVC_PRECISION_INT8, 1",
    "%s_type is %d: it must be KVC_F32, KVC_F16 or KVC_BF16, or %d, as the layer stores %s",
}


def c_strings(path):
    """The strings of a source; such that follow each other are one."""
    code = amalgamate.COMMENT.sub(" ", amalgamate.INCLUDE.sub("", path.read_text()))
    parts = []
    for token in amalgamate.TOKEN.finditer(code):
        if token["string"] and token[0].startswith('"'):
            parts.append(token[0][1:-1])
        elif parts:
            yield "".join(parts)
            parts = []


def python_strings(path):
    """The strings of a module, docstrings aside."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, DOCUMENTED)
                  if node.body and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def cython_strings(path):
    text = CYTHON_DOCSTRING.sub(":\n", path.read_text())
    text = re.sub(r'\A(?:#.*\n)*""".*?"""\n', "", text, flags=re.S)
    return re.findall(r'"(?:\\.|[^"\\\n])*"', text)


def test_messages_of_c():
    named = {text for path in SRC.rglob("*.[ch]") for text in c_strings(path) if C_NAME.search(text)}
    assert named == FOR_C_ONLY


def test_messages_of_c_do_not_name_python():
    python = re.compile("python|numpy|=False|=True|=None", re.IGNORECASE)
    assert [text for path in SRC.rglob("*.[ch]") for text in c_strings(path) if python.search(text)] == []


def test_messages_of_python():
    modules = {path: python_strings(path) for path in PACKAGE.rglob("*.py")}
    parts = {path: cython_strings(path) for path in PACKAGE.rglob("*.p[yx]*") if path.suffix in (".pyx", ".pxi")}
    assert len(parts) > 5
    for path, strings in {**modules, **parts}.items():
        assert [text for text in strings if C_NAME.search(text)] == [], path


def test_tokens_that_would_move_without_a_rope():
    cache = kvcache.KVCache(1, 1, 2, 64)
    with cache.batch(1) as batch:
        batch.put(0, *np.zeros((2, 1, 1, 2), np.float32))
    for move in (lambda: cache.shift(0, None, 1), lambda: cache.divide(0, None, 2)):
        with pytest.raises(kvcache.NotSupportedError, match="give its rope when the cache is made, or say") as caught:
            move()
        assert not C_NAME.search(str(caught.value))
