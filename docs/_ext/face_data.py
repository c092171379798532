"""Docstrings of data that a face offers: Python keeps none of them, and autodoc looks in the file that is named."""

from __future__ import annotations

import sys
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer


def _processed(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    if what != "data":
        return
    face, _, last = name.rpartition(".")
    for module in [module for module in sys.modules if module.startswith(f"{face}._")]:
        if written := ModuleAnalyzer.for_module(module).find_attr_docs().get(("", last)):
            lines[:] = written


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the handler."""
    app.connect("autodoc-process-docstring", _processed)
    return {"parallel_read_safe": True}
