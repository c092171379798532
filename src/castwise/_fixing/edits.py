"""`Change`: a piece of a script replaced by another, and `changed`: the script after several of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from castwise._script_source import ScriptSource


class Change(NamedTuple):
    """A part of a script's text and what replaces it.

    Args:
        start: Where the part begins, in characters.
        end: Where it ends; `start` for an insertion.
        text: What replaces it.
    """

    start: int
    end: int
    text: str

    def moves(self, offset: int) -> int:
        """Return by how many characters the change moves what is at an offset."""
        return len(self.text) - (self.end - self.start) if self.start < offset else 0


def before(source: ScriptSource, statement: ast.stmt, code: str) -> Change:
    """Return the insertion of one line of code before a statement."""
    start = source.span(statement)[0]
    indent = source.line(statement.lineno)[: source.column(start)]
    return Change(start, start, f"{code}; " if indent.strip() else f"{code}{source.line_end}{indent}")


def after(source: ScriptSource, statement: ast.stmt, code: str) -> Change:
    """Return the insertion of one line of code after a statement."""
    start, end = source.span(statement)
    first = source.line(statement.lineno)
    indent = indent_of(first)
    rest = source.line(statement.end_lineno or statement.lineno)[source.column(end) :]
    if (rest.strip() and not rest.lstrip().startswith("#")) or first[: source.column(start)].strip():
        return Change(end, end, f"; {code}")
    return Change(end + len(rest), end + len(rest), f"{source.line_end}{indent}{code}")


def instead(source: ScriptSource, node: ast.expr | ast.stmt, code: str) -> Change:
    """Return the replacement of a node by code."""
    return Change(*source.span(node), code)


def without(source: ScriptSource, statement: ast.stmt) -> tuple[Change] | None:
    """Return the removal of a statement with its lines; None if they have something else, such as a comment."""
    start, end = source.span(statement)
    first, last = source.offset(statement.lineno, 0), source.end_of_line(statement.end_lineno or statement.lineno)
    if f"{source.text[first:start]}{source.text[end:last]}".strip():
        return None
    return (Change(first, last + len(source.line_end), ""),)


def indented(source: ScriptSource, statements: Sequence[ast.stmt], head: str) -> tuple[Change, ...] | None:
    """Return statements that follow each other moved into a block that begins with `head`.

    None if a statement does not begin its line, or has a text of several lines, which would change.
    """
    rows = _rows(source, statements)
    if rows is None:
        return None
    start = source.offset(rows[0], 0)
    first = source.line(rows[0])
    indent = indent_of(first)
    step = "\t" if indent.startswith("\t") else "    "
    moved = [source.offset(row, 0) for row in rows[1:] if source.line(row).strip()]
    head_and_step = f"{indent}{head}{source.line_end}{step}"
    return Change(start, start, head_and_step), *(Change(at, at, step) for at in moved)


def outdented(source: ScriptSource, statements: Sequence[ast.stmt], column: int) -> tuple[Change, ...] | None:
    """Return statements that follow each other moved to the left, to a column.

    None for those that `indented` refuses as well.
    """
    rows = _rows(source, statements)
    if rows is None:
        return None
    width = statements[0].col_offset - column
    moved = [(source.offset(row, 0), source.line(row)) for row in rows]
    return tuple(Change(at, at + min(width, len(indent_of(line))), "") for at, line in moved)


def changed(text: str, changes: Iterable[Change]) -> str:
    """Return a text after changes that do not overlap."""
    for change in sorted(changes, key=lambda change: change.start, reverse=True):
        text = f"{text[: change.start]}{change.text}{text[change.end :]}"
    return text


def indent_of(line: str) -> str:
    """Return the blanks that a line begins with."""
    return line[: len(line) - len(line.lstrip())]


def _rows(source: ScriptSource, statements: Sequence[ast.stmt]) -> range | None:
    first, last = statements[0], statements[-1]
    rows = range(first.lineno, (last.end_lineno or last.lineno) + 1)
    texts = (node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Constant))
    has_long_text = any(isinstance(node.value, (str, bytes)) and node.lineno != node.end_lineno for node in texts)
    joined = (node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.JoinedStr))
    if has_long_text or any(node.lineno != node.end_lineno for node in joined):
        return None
    start, end = source.span(first)[0], source.span(last)[1]
    rest = source.line(rows[-1])[source.column(end) :].strip()
    if source.line(rows[0])[: source.column(start)].strip() or (rest and not rest.startswith("#")):
        return None
    return rows
