"""`{notebook}`: the cells of a notebook below its title, with the outputs that are stored in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

_BLOCK = re.compile(r"^```\{notebook\} (\S+)\n```$", re.M)


def markdown(notebook: dict[str, Any]) -> str:
    """Return the cells of a notebook as Markdown, without the title, which the page has."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.partition("\n\n")[2] if source.startswith("# ") else source)
            continue
        parts += [f"```python\n{source}\n```", *map(_shown, cell["outputs"])]
    return "\n\n".join(parts)


def _shown(output: dict[str, Any]) -> str:
    page = "".join(output.get("data", {}).get("text/html", ""))
    if page:
        return f'```{{raw}} html\n<div class="output" tabindex="0">{page}</div>\n```'
    text = "".join(output.get("text", "") or output["data"]["text/plain"])
    return f"```text\n{text.rstrip()}\n```"


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the block in a page before it is parsed, so that headings of the notebook are headings of the page."""

    def cells(match: re.Match[str]) -> str:
        _, path = app.env.relfn2path(match[1], page)
        app.env.note_dependency(path, docname=page)
        return markdown(json.loads(Path(path).read_text(encoding="utf-8")))

    source[0] = _BLOCK.sub(cells, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the handler."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
