"""Sphinx: ``make docs``. The source is the root of the repository, so that links between its pages are the same everywhere."""

from __future__ import annotations

import lowtide

project = "lowtide"
author = "the lowtide developers"
copyright = f"2026, {author}"
release = version = lowtide.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "docs/contents"
include_patterns = ["docs/**", "benchmarks/results/**", "CHANGELOG.md"]
exclude_patterns = ["docs/_build/**", ".venv/**"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
highlight_language = "none"

autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}

html_theme = "furo"
html_title = "lowtide"
html_extra_path = ["site"]
html_show_sourcelink = False
