"""A directive whose content is Markdown that a function writes when the manual is built."""

from __future__ import annotations

from collections.abc import Callable

from docutils import nodes
from sphinx.util.docutils import SphinxDirective


def directive(markdown: Callable[[], str]) -> type[SphinxDirective]:
    """Return a directive without arguments."""

    class Generated(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            return self.parse_text_to_nodes(markdown(), allow_section_headings=True)

    return Generated
