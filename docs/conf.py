"""Sphinx settings of the documentation; `make docs` builds it, warnings are errors."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import _settings

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


def setup(app: Any) -> None:
    """Put the tables of all settings on their page."""
    app.connect("source-read", _fill_in)


def _fill_in(app: Any, name: str, source: list[str]) -> None:
    if name == "settings":
        source[0] = source[0].replace(_settings.MARK, _settings.tables())
