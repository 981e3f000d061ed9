"""Configuration of Sphinx: sphinx-build -W docs docs/_build (the package must be installed)."""

import re
from pathlib import Path

import kvcache

project = "kvcache"
author = "the kvcache authors"
project_copyright = author
version = release = kvcache.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
exclude_patterns = ["_build"]
nitpicky = False
myst_heading_anchors = 2
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings name the types
numpydoc_show_class_members = False  # autodoc lists them

html_theme = "furo"
html_title = f"kvcache {version}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]


def link_sources(app, docname, source):
    """Turn links to the repository's files outside docs/ into downloads, as MyST does not with Markdown pages."""
    folder = Path(app.env.doc2path(docname)).parent

    def download(link):
        text, path = link[1].replace("`", ""), (folder / link[2]).resolve()
        if path.is_relative_to(app.srcdir):
            return link[0]
        return f"{{download}}`{text} <{link[2]}/README.md>`" if path.is_dir() else f"{{download}}`{text} <{link[2]}>`"

    source[0] = re.sub(r"(?<!!)\[([^]]+)\]\(((?:\.\./)+[^)#\s]+?)/?(?:#[^)]*)?\)", download, source[0])


def setup(app):
    app.connect("source-read", link_sources)
