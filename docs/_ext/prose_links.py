"""Links in prose: names in docstrings become links if they are documented, and named files must exist.

In docstrings, backticks quote names as in Markdown. A quoted name becomes a link if the manual documents it. Types in
signatures that the manual does not document (torch's, Python's and castwise's private ones) must be importable.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxRole

ROOT = Path(__file__).parents[2]
_COLON = "\ue000"  # a placeholder that napoleon ignores
_A_NAME = re.compile(r"[A-Za-z_][\w.]*\w(\(\))?")


class _Name(SphinxRole):
    """A quoted name such as `unscale_` in a docstring."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        text = nodes.literal(text=self.text)
        if not _A_NAME.fullmatch(self.text):
            return [text], []
        within = {key: self.env.ref_context.get(key) for key in ("py:module", "py:class")}
        target = self.text.removesuffix("()")
        link = addnodes.pending_xref("", text, refdomain="py", reftype="obj", reftarget=target, quoted=True, **within)
        link["refdoc"] = self.env.docname
        return [link], []


class _File(SphinxRole):
    """{repo}`tests/amp/test_clipping.py`: a file or folder of the repository."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        if not (ROOT / self.text.partition("::")[0]).exists():
            message = self.inliner.reporter.warning(f"there is no {self.text!r} in the repository", line=self.lineno)
            return [self.inliner.problematic(self.rawtext, self.rawtext, message)], [message]
        return [nodes.literal(text=self.text, classes=["file"])], []


def is_importable(name: str) -> bool:
    """Return True if a dotted name, or a name in `builtins` or `typing`, exists."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return any(hasattr(import_module(module), name) for module in ("builtins", "typing"))


def _leave_as_text(app: Sphinx, env: Any, node: addnodes.pending_xref, text: nodes.Node) -> nodes.Node | None:
    if node.get("refdomain") != "py":
        return None
    # Only signatures may contain names that the manual does not document.
    is_signature = node["refdoc"].startswith("reference/")
    return text if node.get("quoted") or (is_signature and is_importable(node["reftarget"])) else None


def _for_docutils(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Convert syntax that napoleon does not support: fenced code, and `Returns:` without a type.

    Napoleon parses text before the first colon as a type; castwise's types are in the signatures.
    """
    converted: list[str] = []
    if what in {"attribute", "data", "property"} and lines:
        lines[0] = lines[0].replace(":", _COLON)
    fence, returns = False, False
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        if line.strip().startswith("```"):
            fence = not fence
            converted += [f"{indent}.. code-block:: {line.strip()[3:]}", ""] if fence else [""]
        elif fence:
            converted.append(f"   {line}")
        elif line in {"Returns:", "Yields:"}:
            returns = True
            converted += ["", ":returns:"]
        else:
            returns = returns and (not line or bool(indent))
            converted.append(f"   {line}" if returns and line else line)
            if not returns and line and not indent and converted[-2:-1] and converted[-2].startswith("   "):
                converted.insert(-1, "")
    lines[:] = converted


def _with_colons(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the roles."""
    app.add_role("name", _Name())
    app.add_role("repo", _File())
    app.connect("autodoc-process-docstring", _for_docutils, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", _with_colons, priority=600)
    app.connect("missing-reference", _leave_as_text)
    return {"parallel_read_safe": True}
