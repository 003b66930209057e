"""The site of the documentation: `make docs` builds it into `docs/_build`."""

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
autodoc_typehints = "description"
napoleon_use_ivar = True  # Attributes are described once, in their class.
# Links to source files and READMEs lead out of the site.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]
