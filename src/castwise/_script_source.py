"""`ScriptSource`: the statements of a script, and the names it gives to scalers and optimizers."""

from __future__ import annotations

import ast
import bisect
import io
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

LOOPS = ast.For | ast.AsyncFor
Span = tuple[int, int]
"""Where a part of a text begins and ends, in characters."""
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module


class Names(NamedTuple):
    """How a function calls its scaler and its optimizer, such as `self.scaler`; "" where that is not one name."""

    scaler: str
    optimizer: str


class MethodCall(NamedTuple):
    """A call such as `scaler.step(optimizer)`.

    Args:
        owner: The text before the method, a name or attributes of one: `scaler`.
        method: The method: `step`.
        node: The call.
    """

    owner: str
    method: str
    node: ast.Call


class ScriptSource:
    """The text of a script and its syntax tree.

    Args:
        text: All of the script.

    Raises:
        MemoryError, RecursionError: It is nested too deeply.
        SyntaxError: The text is not Python.
        ValueError: It has null bytes.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python has warned of its escapes
            self.tree = ast.parse(text)
        self._lines = list(io.StringIO(text, newline=""))  # as Python splits them: not at form feeds
        self.line_end = "\r\n" if self._lines and self._lines[0].endswith("\r\n") else "\n"
        self._starts = [0, *itertools.accumulate(map(len, self._lines[:-1]))]
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    # -- text ---------------------------------------------------------------------------------------------------

    def line(self, number: int) -> str:
        """Return a line, from 1, without its end; "" if there is none."""
        return self._lines[number - 1].rstrip("\r\n") if 0 < number <= len(self._lines) else ""

    def offset(self, line: int, column: int) -> int:
        """Return the position in the text of a place in the tree, whose columns are bytes."""
        return self._starts[line - 1] + len(self.line(line).encode()[:column].decode(errors="ignore"))

    def end_of_line(self, number: int) -> int:
        """Return where a line ends, from 1; where the text ends if it has fewer lines."""
        is_there = number <= len(self._starts)
        return self._starts[number - 1] + len(self.line(number)) if is_there else len(self.text)

    def column(self, offset: int) -> int:
        """Return the characters of its line before a position in the text."""
        return offset - self._starts[bisect.bisect_right(self._starts, offset) - 1]

    def line_of(self, offset: int) -> int:
        """Return the number of the line that a position in the text is in."""
        return bisect.bisect_right(self._starts, offset)

    def span(self, node: ast.expr | ast.stmt) -> Span:
        """Return where a node's text begins and ends."""
        assert node.end_lineno is not None  # set by the parser
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def span_with_brackets(self, value: ast.expr) -> Span:
        """Return the span of an expression; with the brackets around it where it is what an attribute is taken of."""
        start, end = self.span(value)
        is_owner = isinstance(self._parents[value], ast.Attribute)
        in_brackets = is_owner and self.text[start - 1 : start] == "(" and self.text[end : end + 1] == ")"
        return (start - 1, end + 1) if in_brackets else (start, end)

    def text_of(self, node: ast.expr | ast.stmt) -> str:
        """Return a node's text as it is written."""
        start, end = self.span(node)
        return self.text[start:end]

    # -- statements ---------------------------------------------------------------------------------------------

    def statements_at(self, line: int) -> list[ast.stmt]:
        """Return the innermost statements that a line belongs to: several where semicolons separate them."""
        around = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
        ]
        outer = {outer for node in around for outer in self.around(node)}
        return [node for node in around if node not in outer]

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the innermost first, up to its function or the script."""
        parent = self._parents.get(node)
        while parent is not None:
            yield parent
            if isinstance(parent, Function):
                return
            parent = self._parents.get(parent)

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of a statement's block, itself among them."""
        blocks = (value for _, value in ast.iter_fields(self._parents[statement]) if isinstance(value, list))
        return next((block for block in blocks if statement in block), [statement])

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """Return the statement that an expression is in; None in a lambda, which runs at another time."""
        around = (each for each in (node, *self.around(node)) if isinstance(each, ast.stmt))
        return next(around, None)

    def function(self, node: ast.AST) -> ast.AST:
        """Return the function that a node is in, or the script."""
        return next((each for each in self.around(node) if isinstance(each, Function)), self.tree)

    def place_to_unscale(self, statement: ast.stmt) -> ast.stmt:
        """Return the statement before which gradients that a statement reads can be unscaled.

        It is the first one after the backward, so that all statements between have the same, and after an earlier step
        and a `continue`. Loops around the statement that do not compute gradients or step belong to it, and so do
        branches and blocks that a step follows. If code between may add to gradients, as a sum over ranks does, it is
        the statement itself.
        """
        for around in self.around(statement):
            if not isinstance(around, LOOPS | ast.If | ast.With) or has_backward([around]) or _steps(around):
                break
            later = self._after(around)
            if not isinstance(around, LOOPS) and not any(isinstance(each, ast.Expr) and _steps(each) for each in later):
                break
            statement = around
        block = self.block(statement)
        before = block[: block.index(statement)]
        ends = [place for place, each in enumerate(before, 1) if has_backward([each]) or _steps(each) or has_exit(each)]
        is_after_backward = has_backward(before) and not _may_change_gradients(before[ends[-1] :])
        return block[ends[-1]] if is_after_backward else statement

    def later_unscale(self, statement: ast.stmt) -> ast.Expr | None:
        """Return the function's only statement that unscales, if it follows in the same block before any backward."""
        calls = [call for call in self.calls_beside(statement) if call.method == "unscale_"]
        unscaling = self.statement(calls[0].node) if len(calls) == 1 else None
        after = self._after(statement)
        if not isinstance(unscaling, ast.Expr) or unscaling not in after:
            return None
        return None if has_backward(after[: after.index(unscaling)]) else unscaling

    def _after(self, statement: ast.stmt) -> list[ast.stmt]:
        block = self.block(statement)
        return block[block.index(statement) + 1 :]

    # -- names --------------------------------------------------------------------------------------------------

    @cached_property
    def identifiers(self) -> set[str]:
        """All names and attributes of the script."""
        nodes = list(ast.walk(self.tree))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        return names | {node.arg for node in nodes if isinstance(node, ast.arg)}

    def free_name(self, name: str) -> str:
        """Return a name, with a number behind it if the script uses it already."""
        numbered = (f"{name}{number or ''}" for number in itertools.count())
        return next(each for each in numbered if each not in self.identifiers)

    @cached_property
    def method_calls(self) -> list[MethodCall]:
        """The calls of methods of names and of their attributes."""
        attributes = ((call, call.node.func) for call in self.any_calls)
        return [call for call, func in attributes if isinstance(func, ast.Attribute) and _is_name(func.value)]

    @cached_property
    def any_calls(self) -> list[MethodCall]:
        """The calls of methods of anything, such as `(a + b).backward()`."""
        calls = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        methods = ((node, node.func) for node in calls if isinstance(node.func, ast.Attribute))
        return [MethodCall(ast.unparse(func.value), func.attr, node) for node, func in methods]

    def calls_beside(self, node: ast.AST) -> list[MethodCall]:
        """Return the calls of methods in the function of a node."""
        function = self.function(node)
        return [call for call in self.method_calls if self.function(call.node) is function]

    @cached_property
    def optimizers(self) -> set[str]:
        """What the script steps with a scaler, or both steps and zeroes."""
        zeroed = {call.owner for call in self.method_calls if call.method == "zero_grad"}
        stepped = {call.owner for call in self.method_calls if call.method == "step"} & zeroed
        return stepped | {
            ast.unparse(call.node.args[0])
            for call in self.method_calls
            if call.method in ("step", "unscale_") and len(call.node.args) == 1 and _is_name(call.node.args[0])
        }

    def names_at(self, node: ast.AST) -> Names:
        """Return the names of the scaler and the optimizer in the function of a node.

        An optimizer that no scaler steps is the one that steps at the node. Of several that scalers step, it is the
        only one that steps between the node and the next backward.
        """
        calls = self.calls_beside(node)
        steps = [call for call in calls if call.method == "step" and not call.node.args]
        here = {call.owner for call in steps if node in (call.node, *self.around(call.node))}
        updated = {call.owner for call in calls if call.method == "update"}
        scalers = {call.owner for call in calls if call.method == "unscale_" or self.is_scaled_backward(call)}
        scalers |= {call.owner for call in calls if call.method == "step" and call.node.args} & updated
        stepping = [call.node for call in calls if call.owner in scalers and call.method in ("step", "unscale_")]
        stepped = [
            (step.lineno, ast.unparse(step.args[0])) for step in stepping if step.args and _is_name(step.args[0])
        ]
        first = node.lineno if isinstance(node, ast.stmt) else 0
        backwards = (call.node.lineno for call in calls if call.method == "backward" or self.is_scaled_backward(call))
        last = min((line for line in backwards if line > first), default=math.inf)
        next_ones = {name for line, name in stepped if first <= line < last}
        optimizer = only({name for _, name in stepped} or here) or only(next_ones)
        return Names(only(scalers), optimizer)

    def is_scaled_backward(self, call: MethodCall) -> bool:
        """Return True for the `scaler.scale(loss)` of `scaler.scale(loss).backward()`."""
        outer = self._parents.get(call.node)
        return call.method == "scale" and isinstance(outer, ast.Attribute) and outer.attr == "backward"


def called_name(call: ast.Call) -> str:
    """Return the last part of the name of what is called; "" if it has none."""
    return ast.unparse(call.func).rpartition(".")[2] if isinstance(call.func, ast.Attribute | ast.Name) else ""


def has_backward(statements: Iterable[ast.AST]) -> bool:
    """Return True if some code calls a backward, or names one."""
    nodes = (node for each in statements for node in ast.walk(each))
    return any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in nodes)


def has_exit(statement: ast.stmt) -> bool:
    """Return True if what follows a statement may not run, because of a `continue` or the like in it."""
    return any(isinstance(node, ast.Continue | ast.Break | ast.Return | ast.Raise) for node in ast.walk(statement))


def is_region(item: ast.withitem) -> bool:
    """Return True for an autocast region, enabled or not."""
    return isinstance(item.context_expr, ast.Call) and called_name(item.context_expr) == "autocast"


def is_enabled_region(item: ast.withitem) -> bool:
    """Return True for an autocast region that is not given `enabled=False`."""
    call = item.context_expr
    disabled = (
        [ast.unparse(each.value) for each in call.keywords if each.arg == "enabled"]
        if isinstance(call, ast.Call)
        else []
    )
    return is_region(item) and disabled != ["False"]


def enabled_regions(tree: ast.AST) -> Iterator[ast.withitem]:
    """Yield the autocast regions of some code that are not given `enabled=False`."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.With))
    return (item for block in blocks for item in block.items if is_enabled_region(item))


def _may_change_gradients(statements: list[ast.stmt]) -> bool:
    nodes = [node for statement in statements for node in ast.walk(statement)]
    names = [getattr(node, "id", getattr(node, "attr", "")) for node in nodes]
    return any(part in name for name in names for part in ("reduce", "average", "sync", "gather", "backward"))


def _steps(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == "step" for each in ast.walk(node))


def _is_name(expression: ast.expr) -> bool:
    """Return True for a name, or attributes of one."""
    while isinstance(expression, ast.Attribute):
        expression = expression.value
    return isinstance(expression, ast.Name)


def only(names: set[str]) -> str:
    """Return the one name in a set; "" if it has none or several."""
    return next(iter(names)) if len(names) == 1 else ""
