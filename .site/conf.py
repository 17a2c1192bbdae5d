"""Sphinx's settings; `make.py` writes the pages that it reads."""

import os

import numbsparse

project = "numbsparse"
author = "numbsparse contributors"
version = release = numbsparse.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
]
nitpicky = False  # types in docstrings are words for readers; links are checked in what is built
default_role = "py:obj"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autosummary_generate = False
numpydoc_show_class_members = False

myst_enable_extensions = ["html_image"]
myst_heading_anchors = 4
suppress_warnings = ["ref.python"]  # `.numpy()` in a text may be of several classes

html_theme = "pydata_sphinx_theme"
html_title = f"numbsparse {version}"
html_show_sourcelink = False
html_copy_source = False
html_static_path = [os.path.dirname(os.path.abspath(__file__)) + "/site.css"]
html_css_files = ["site.css"]
alone = "BENCHMARKS", "CONTRIBUTING", "CHANGELOG", "SUPPORT", "SECURITY"  # no pages below them
html_sidebars: dict[str, list[str]] = {page: [] for page in alone}
repository = os.environ.get("NUMBSPARSE_REPOSITORY")  # its address, where it has one
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 5,
    "pygments_light_style": "friendly",  # what a step adds is green, what it drops is red
    "pygments_dark_style": "monokai",
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
} | ({"github_url": repository} if repository else {})
