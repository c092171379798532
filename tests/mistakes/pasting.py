"""The code of a message, pasted into the script that it was printed for."""

from __future__ import annotations

import ast
import re
import textwrap

from castwise._mistakes.mistake import Mistake

_HEADING = re.compile(
    r"# (?:moved from lines? (?P<first>\d+)(?: to (?P<last>\d+))? to (?:the )?)?"
    r"(?P<where>before|after|instead of|after the block of|end of the block of) line (?P<line>\d+):"
)
Edit = tuple[int, int, list[str]]
"""Index of the first line that is replaced, that of the first one after it that is not, and the new lines."""


def pasted(script: str, mistake: Mistake) -> str:
    """Return a script with the code of a mistake where its headings say, or instead of the statement at the line."""
    assert mistake.place is not None
    lines, edits = script.splitlines(), []
    for heading, code in _pieces(mistake.corrected):
        if heading is None:
            edits.append(_at(script, mistake.place.line, "instead of", code))
            continue
        edits.append(_at(script, int(heading["line"]), heading["where"], code))
        if heading["first"]:
            first, last = int(heading["first"]), int(heading["last"] or heading["first"])
            indent = lines[first - 1][: len(lines[first - 1]) - len(lines[first - 1].lstrip())]
            edits.append((first - 1, last, [f"{indent}pass"]))
    for start, end, new in sorted(edits, key=lambda edit: edit[:2], reverse=True):
        lines[start:end] = new
    return "\n".join([*lines, ""])


def _at(script: str, line: int, where: str, code: str) -> Edit:
    statement = _statement(script, line)
    start, end = statement.lineno - 1, statement.end_lineno or statement.lineno
    column = statement.col_offset
    if where == "end of the block of":
        assert isinstance(statement, ast.With)
        column = statement.body[0].col_offset
    at = {"before": (start, start), "instead of": (start, end)}.get(where, (end, end))
    return (*at, textwrap.indent(code, " " * column).splitlines())


def _pieces(code: str) -> list[tuple[re.Match[str] | None, str]]:
    """Return the headings with the code below each; other comments are left out."""
    pieces: list[tuple[re.Match[str] | None, list[str]]] = [(None, [])]
    for line in code.splitlines():
        if heading := _HEADING.fullmatch(line):
            pieces.append((heading, []))
        elif not line.startswith("#"):
            pieces[-1][1].append(line)
    return [(heading, "\n".join(lines)) for heading, lines in pieces if lines]


def _statement(script: str, line: int) -> ast.stmt:
    nodes = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.stmt)]
    around = [node for node in nodes if node.lineno <= line <= (node.end_lineno or 0)]
    return min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
