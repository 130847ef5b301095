"""Sphinx settings of the documentation; `make docs` builds it, warnings are errors."""

from importlib.metadata import version as installed_version

project = "rllib-gigpo"
author = "the rllib-gigpo authors"
release = version = installed_version("rllib-gigpo")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"rllib-gigpo {release}"
html_static_path = ["_static"]
# Readers without a network get the whole page too.
html_theme_options = {"source_repository": "", "top_of_page_buttons": []}

myst_enable_extensions = ["dollarmath", "deflist", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
