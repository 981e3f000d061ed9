"""Configuration of Sphinx: sphinx-build -W docs docs/_build (the package must be installed)."""

import os
import re
from pathlib import Path

from docutils import nodes
from sphinx.ext.autodoc.mock import _MockObject
from sphinx.util import inspect
from sphinx.util.inspect import stringify_signature

import kvcache

project = "kvcache"
author = "the kvcache authors"
project_copyright = author
version = release = kvcache.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = False
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
default_role = "py:obj"  # `KVCache.fork` in a docstring is a link
autodoc_typehints = "none"  # the docstrings name the types
numpydoc_show_class_members = False  # autodoc lists them

# kvcache.hf is described without torch, transformers and safetensors, which take gigabytes. For the mocked types, a
# union (A | B) and a sum of tuples return one of their two operands.
autodoc_mock_imports = ["safetensors", "torch", "transformers"]
for operation in ("__or__", "__ror__", "__add__"):
    setattr(_MockObject, operation, lambda self, other: self)

html_theme = "furo"
html_title = f"kvcache {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]


def link_files(app, file, text, page):
    """Make links of a file right on the page that it is shown on: to other pages, or to download what is no page."""

    def link(found):
        label, target, anchor = found.groups(default="")
        path = (file.parent / target).resolve()
        if not path.exists():
            return found[0]
        if path.is_relative_to(app.srcdir):
            return f"[{label}]({os.path.relpath(path, page.parent)}{anchor})"
        path = path / "README.md" if path.is_dir() else path
        return f"{{download}}`{label.replace('`', '')} <{os.path.relpath(path, page.parent)}>`"

    return re.sub(r"(?<!!)\[([^]]+)\]\(([^)#\s]+)(#[^)]*)?\)", link, text)


def link_page(app, docname, source):
    page = Path(app.env.doc2path(docname))
    source[0] = link_files(app, page, source[0], page)


def link_included(app, file, docname, source):
    """Include README without losing its links, which are relative to its own folder."""
    if file.name == "README.md":
        source[0] = link_files(app, app.srcdir / file, source[0], app.srcdir / docname)


def show_arguments(app, what, name, thing, options, signature, returns):
    """Show the arguments of a class whose base is mocked, and hides them."""
    if signature == "(*args, **kwargs)" and what == "class":
        signature = stringify_signature(inspect.signature(thing.__init__, bound_method=True), show_annotation=False)
    return signature, returns


def number_citations(app, doctree, docname):
    """Show [1] for what numpydoc names [R0123456789ab-1], to keep the citations of different docstrings apart."""
    for text in list(doctree.findall(nodes.Text)):
        if re.fullmatch(r"\[R[0-9a-f]{12}-\d+\]", text):
            text.parent.replace(text, nodes.Text(f"[{text.partition('-')[2]}"))


def setup(app):
    app.connect("source-read", link_page)
    app.connect("include-read", link_included)
    app.connect("autodoc-process-signature", show_arguments)
    app.connect("doctree-resolved", number_citations)
