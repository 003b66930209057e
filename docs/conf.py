"""The site of the documentation: `make docs` builds it into `docs/_build`."""

import importlib

import sizewise

# Names are imported when first used, and autodoc sees only those that are there.
for _module, _names in sizewise._HOMES.items():
    for _name in _names:
        setattr(sizewise, _name, getattr(importlib.import_module(f"sizewise.{_module}"), _name))

project = "sizewise"
author = "The sizewise authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "sizewise"
# GitHub shows index.md; the site begins with the same page, included into contents.md, which has
# the list of pages beside it.
root_doc = "contents"
exclude_patterns = ["_build", "index.md"]
myst_heading_anchors = 3
default_role = "code"  # What docstrings have in backticks.
smartquotes = False  # Quotes are there to be copied.
autodoc_typehints = "description"
napoleon_use_ivar = True  # Attributes are described once, in their class.
# Links to source files and READMEs lead out of the site.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]
