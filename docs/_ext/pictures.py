"""`{picture}`: an inline drawing from `docs/pictures` that uses the page's colours and scrolls on narrow screens."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Picture(SphinxDirective):
    """Insert an SVG file into the page, so that it uses the page's colours."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the drawing in its own box."""
        _, path = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(path)
        try:
            drawing = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise self.error(f"there is no picture {self.arguments[0]!r}") from error
        return [nodes.raw("", f'<div class="picture" tabindex="0">{drawing}</div>', format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("picture", Picture)
    return {"parallel_read_safe": True}
