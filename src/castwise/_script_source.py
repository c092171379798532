"""`ScriptSource`: the statements of a script, and the names it gives to scalers and optimizers."""

from __future__ import annotations

import ast
import bisect
import io
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module


class Names(NamedTuple):
    """How a script calls its scaler and its optimizer, such as `self.scaler`; "" where that is not one name."""

    scaler: str
    optimizer: str


class ScriptSource:
    """The text of a script and its syntax tree.

    Args:
        text: All of the script.

    Raises:
        SyntaxError: The text is not Python.
        ValueError: It has null bytes.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._lines = list(io.StringIO(text, newline=""))  # as Python splits them: not at form feeds
        self.line_end = "\r\n" if self._lines and self._lines[0].endswith("\r\n") else "\n"
        self._starts = [0, *accumulate(map(len, self._lines[:-1]))]
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def line(self, number: int) -> str:
        """Return a line, from 1, without its end; "" if there is none."""
        return self._lines[number - 1].rstrip("\r\n") if 0 < number <= len(self._lines) else ""

    def offset(self, line: int, column: int) -> int:
        """Return the position in the text of a place in the tree, whose columns are bytes."""
        return self._starts[line - 1] + len(self.line(line).encode()[:column].decode(errors="ignore"))

    def column(self, offset: int) -> int:
        """Return the characters of its line before a position in the text."""
        return offset - self._starts[bisect.bisect_right(self._starts, offset) - 1]

    def line_of(self, offset: int) -> int:
        """Return the number of the line that a position in the text is in."""
        return bisect.bisect_right(self._starts, offset)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where a node's text begins and ends."""
        assert node.end_lineno is not None  # set by the parser
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def text_of(self, node: ast.expr | ast.stmt) -> str:
        """Return a node's text as it is written."""
        start, end = self.span(node)
        return self.text[start:end]

    def statements_at(self, line: int) -> list[ast.stmt]:
        """Return the innermost statements that a line belongs to: several where semicolons separate them."""
        around = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
        ]
        outer = {self._parents[node] for node in around}
        return [node for node in around if node not in outer]

    def siblings(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the block that a statement is in."""
        blocks = (value for _, value in ast.iter_fields(self._parents[statement]) if isinstance(value, list))
        return next(block for block in blocks if statement in block)

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node around a node."""
        return self._parents.get(node)

    def names_at(self, node: ast.AST) -> Names:
        """Return the names of the scaler and the optimizer that can be used at a node.

        Calls of the same function decide; those of the rest of the script only if it has none. Without a scaler, it is
        the optimizer that steps at the node.
        """
        for scope in (self._scope_of(node), self.tree):
            calls = list(self._methods_called(scope, node))
            scalers = {owner for owner, name, call in calls if name == "unscale_" or self._scales_for_backward(call)}
            stepping = {owner for owner, name, call in calls if name == "step" and call.args}
            scalers |= stepping & {owner for owner, name, call in calls if name == "update"}
            if scalers:
                given = [call.args for owner, name, call in calls if owner in scalers and name in ("step", "unscale_")]
                first = [arguments[0] for arguments in given if arguments]
                return Names(_only(scalers), _only({ast.unparse(each) for each in first if self._means(each, node)}))
        steps = self._methods_called(node, node)
        return Names("", _only({owner for owner, name, call in steps if name == "step" and not call.args}))

    def _methods_called(self, scope: ast.AST, node: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
        """Yield owner and name of the methods that are called in a scope, of owners that can be used at a node."""
        for call in ast.walk(scope):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and self._means(call.func.value, node)
            ):
                yield ast.unparse(call.func.value), call.func.attr, call

    def _scales_for_backward(self, call: ast.Call) -> bool:
        """Return True for the `scaler.scale(loss)` of `scaler.scale(loss).backward()`."""
        outer = self._parents.get(call)
        is_scale = isinstance(call.func, ast.Attribute) and call.func.attr == "scale"
        return is_scale and isinstance(outer, ast.Attribute) and outer.attr == "backward"

    def calls_in_function(self, node: ast.AST, method: str) -> Iterator[ast.Call]:
        """Yield the calls of a method in the function around a node, or in the script around functions."""
        scope = self._scope_of(node)
        for call in ast.walk(scope):
            if not isinstance(call, ast.Call) or self._scope_of(call) is not scope:
                continue
            if isinstance(call.func, ast.Attribute) and call.func.attr == method:
                yield call

    def _class_of(self, node: ast.AST) -> ast.AST | None:
        around = self._parents.get(node)
        while around is not None and not isinstance(around, ast.ClassDef):
            around = self._parents.get(around)
        return around

    def _scope_of(self, node: ast.AST) -> ast.AST:
        around = self._parents.get(node)
        while around is not None and not isinstance(around, _FUNCTIONS | ast.Module):
            around = self._parents.get(around)
        return self.tree if around is None else around

    def _means(self, expression: ast.expr, node: ast.AST) -> bool:
        """Return True if an expression is a name, or attributes of one, that means the same at a node."""
        root: ast.expr = expression
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or not self.is_known_at(node, root.id):
            return False
        return root.id != "self" or self._class_of(expression) is self._class_of(node)

    def is_known_at(self, node: ast.AST, name: str) -> bool:
        """Return True if a name is assigned in a scope around a node."""
        scope: ast.AST | None = node
        while scope is not None:
            scope = self._parents.get(scope)
            if isinstance(scope, _SCOPES) and name in self._assigned_in(scope):
                return True
        return False

    def _assigned_in(self, scope: ast.AST) -> set[str]:
        names = {
            node.id
            for node in ast.walk(scope)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and self._nearest_scope(node) is scope
        }
        if isinstance(scope, _FUNCTIONS):
            arguments = scope.args
            all_arguments = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            names.update(argument.arg for argument in all_arguments)
        return names

    def _nearest_scope(self, node: ast.AST) -> ast.AST | None:
        around = self._parents.get(node)
        while around is not None and not isinstance(around, _SCOPES):
            around = self._parents.get(around)
        return around


def _only(names: set[str]) -> str:
    return next(iter(names)) if len(names) == 1 else ""
