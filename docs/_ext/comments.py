"""Leave comments out of the built pages: marks of blocks, and tests that prove a sentence."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx


def _remove(app: Sphinx, doctree: nodes.document) -> None:
    for node in list(doctree.findall(nodes.raw)):
        if node.astext().startswith("<!--") and node.astext().rstrip().endswith("-->"):
            node.parent.remove(node)


def setup(app: Sphinx) -> dict[str, bool]:
    """Remove them before links are resolved."""
    app.connect("doctree-read", _remove)
    return {"parallel_read_safe": True}
