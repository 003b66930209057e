"""The site of the documentation: `make docs` builds it into `docs/_build`."""

import importlib
from typing import Any

import sizewise

# Names are imported when first used, and autodoc sees only those that are there.
for _module, _names in sizewise._HOMES.items():
    for _name in _names:
        setattr(sizewise, _name, getattr(importlib.import_module(f"sizewise.{_module}"), _name))

project = "sizewise"
author = "The sizewise authors"
project_copyright = "the sizewise authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "sizewise"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["extra"]  # A page that leads from / to the first one.
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072b2", "color-brand-content": "#00639c"},
    "dark_css_variables": {"color-brand-primary": "#62b5ea", "color-brand-content": "#62b5ea"},
}
# Pages lie all over the repository and link to each other, so all of it is the source. GitHub shows
# docs/index.md; the site begins with the same page, included into contents.md, which has the list
# of pages beside it.
root_doc = "docs/contents"
include_patterns = ["*.md", "docs/**", "papers/**", "benchmarks/**"]
exclude_patterns = ["README.md", "docs/index.md", "docs/_build", ".*"]
myst_heading_anchors = 3
default_role = "code"  # What docstrings have in backticks.
smartquotes = False  # Quotes are there to be copied.
autodoc_typehints = "description"
napoleon_use_ivar = True  # Attributes are described once, in their class.
# Tables of papers are linked to, not listed. A test says that every page of docs is listed.
suppress_warnings = ["misc.highlighting_failure", "toc.not_included"]


def _titled(app: object, name: str, source: list[str]) -> None:
    """Give a table that a program wrote a heading: the search names pages by theirs."""
    if name.startswith(("papers/", "benchmarks/")) and not source[0].startswith("# "):
        source[0] = f"# {name}\n\n{source[0]}"


def setup(app: Any) -> None:
    """Do so whenever a page is read."""
    app.connect("source-read", _titled)
