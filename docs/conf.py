"""Sphinx configuration of the manual (`make docs`). Neither the build nor the built pages use the network."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `benchmarks`
sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import castwise

project = "castwise"
author = "castwise contributors"
copyright = author
version = release = castwise.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "commands",
    "comments",
    "identifiers",
    "notebook",
    "op_tables",
    "pictures",
    "prose_links",
    "results",
    "face_data",
    "signatures",
]
exclude_patterns = ["_build", "writing.md"]
nitpicky = True
smartquotes_action = "D"  # only the dashes between a parameter and its text, not quotes
# Names that exist only for type checkers, and generic types given as text.
nitpick_ignore_regex = [
    ("py:class", r"nn\..*|Ranks|WeightCacheLike|BoundPolicyLike|MixedPrecisionPolicy|Mistake|Checkup|pandas\..*"),
    ("py:class", r"(dict|list|collections\.abc\.Mapping)\[.*"),
]

html_theme = "furo"
html_title = f"castwise {release}"
html_static_path = ["_static"]
html_css_files = ["castwise.css"]
html_show_sphinx = False
html_copy_source = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
# Docstrings quote names with backticks, as in Markdown.
default_role = "name"
# castwise has its own index of names, which includes torch's.
html_use_index = False
html_domain_indices = False
