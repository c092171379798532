"""Roles that insert numbers from `benchmarks/results` when the manual is built.

    {result}`weight_cache-cpu.json#/cases/MLP, inference, batch 1/torch ~1 castwise/median|.1f`
    {machine}`weight_cache-cpu.json, step_cost-cpu.json`

An invalid file, pointer or format is a warning, and warnings are errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import described
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxRole

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def at(document: Any, pointer: str) -> Any:
    """Return the value at an RFC 6901 pointer.

    Raises:
        ValueError: There is no value.
    """
    if pointer and not pointer.startswith("/"):
        raise ValueError(f"a JSON pointer begins with /, got {pointer!r}")
    found = document
    for token in pointer.split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(key)] if isinstance(found, list) else found[key]
        except (LookupError, TypeError, ValueError):
            has = f"; keys are {', '.join(found)}" if isinstance(found, dict) else ""
            raise ValueError(f"there is nothing at {key!r} in {pointer!r}{has}") from None
    return found


def read(file: str, folder: Path = RESULTS) -> Any:
    """Return the contents of a result file.

    Raises:
        ValueError: There is no such file.
    """
    try:
        return json.loads((folder / file).read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no file {file!r} in benchmarks/results") from None


def figure(reference: str, folder: Path = RESULTS) -> str:
    """Return the text of `FILE#/pointer|format`.

    Raises:
        ValueError: There is no such file, no value at the pointer, or the value cannot be formatted in this way.
    """
    where, _, spec = reference.partition("|")
    file, _, pointer = where.partition("#")
    found = at(read(file, folder), pointer)
    if isinstance(found, (dict, list)) or found is None:
        raise ValueError(f"{where!r} must be a number or text, got {type(found).__name__}")
    try:
        return format(found, spec)
    except ValueError as error:
        raise ValueError(f"{found!r} at {where!r} cannot be formatted with {spec!r}: {error}") from None


def machines(files: str, folder: Path = RESULTS) -> dict[str, list[str]]:
    """Return the machines and dates of files (`a.json, b.json`), each with the commands that measured them.

    Raises:
        ValueError: There is no such file, or it does not name its machine.
    """
    found: dict[str, list[str]] = {}
    for file in files.split(","):
        about = at(read(file.strip(), folder), "/machine")
        commands = found.setdefault(described(about), [])
        if about["command"] not in commands:
            commands.append(about["command"])
    return found


def _shown(text: str) -> list[nodes.Node]:
    return [nodes.inline(text=figure(text), classes=["measured"])]


def _machines_shown(files: str) -> list[nodes.Node]:
    shown: list[nodes.Node] = []
    for machine, commands in machines(files).items():
        shown.append(nodes.Text(f"{'; ' if shown else ''}{machine}: "))
        for place, command in enumerate(commands):
            shown += [nodes.Text(", " if place else ""), nodes.literal(text=command)]
    return shown


class _Role(SphinxRole):
    def __init__(self, show: Callable[[str], list[nodes.Node]]) -> None:
        super().__init__()
        self._show = show

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        for file in self.text.partition("#")[0].split(","):
            self.env.note_dependency(str(RESULTS / file.strip()))
        try:
            return self._show(self.text), []
        except ValueError as error:
            message = self.inliner.reporter.warning(str(error), line=self.lineno)
            return [self.inliner.problematic(self.rawtext, self.rawtext, message)], [message]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the roles."""
    app.add_role("result", _Role(_shown))
    app.add_role("machine", _Role(_machines_shown))
    return {"parallel_read_safe": True}
