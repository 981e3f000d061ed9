"""Sphinx: sphinx-build -W docs docs/_build (the package must be installed)."""

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
