"""`ScriptLine`: the statement that a mistake is in, and what its script calls the scaler, the optimizer, the model."""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch

from castwise._mistakes.mistake import Place
from castwise._script_source import LOOPS, MethodCall, ScriptSource, Span, called_name, only

_OPTIMIZERS = {name for name, value in vars(torch.optim).items() if isinstance(value, type)} | {"MasterWeights"}
_SIMPLE = ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return


class ScriptLine:
    """A line of a script.

    Args:
        place: The line; None if it is not known.
    """

    def __init__(self, place: Place | None) -> None:
        self.place = place
        self.source = _source(place)
        statements = [] if self.source is None or place is None else self.source.statements_at(place.line)
        self.statement = statements[0] if len(statements) == 1 else None
        """Its statement; None if it cannot be read, or has several."""

    @property
    def is_simple(self) -> bool:
        """Whether the statement can be read and contains no others."""
        return isinstance(self.statement, _SIMPLE)

    @property
    def text(self) -> str:
        """The statement's text, or that of the line."""
        if self.statement is not None:
            return self.text_of(self.statement)
        return "" if self.place is None else self.place.source

    def text_of(self, statement: ast.stmt) -> str:
        """Return a statement's text without the indentation of its first line."""
        return self.replaced(statement, statement, None)

    def replaced(self, statement: ast.stmt, node: ast.expr | ast.stmt | Span, code: str | None) -> str:
        """Return a statement's text, dedented, with code instead of one of its nodes or of a part of it."""
        assert self.source is not None
        start, end = self.source.span(statement)
        text = self.source.text
        if code is None:
            text = text[start:end]
        else:
            first, last = node if isinstance(node, tuple) else self.source.span(node)
            text = f"{text[start:first]}{code}{text[last:end]}"
        head, *rows = text.splitlines()
        width = statement.col_offset
        return "\n".join([head, *(row[width:] if not row[:width].strip() else row for row in rows)])

    # -- names --------------------------------------------------------------------------------------------------

    @cached_property
    def scaler(self) -> str:
        """What the scaler is called here; "" if that is not one name."""
        if self.source is None or self.statement is None:
            return ""
        name = self.source.names_at(self.statement).scaler
        return name if name and self._is_visible(name) else self._made_by({"GradScaler"})

    @cached_property
    def optimizer(self) -> str:
        """What the optimizer is called here; "" if that is not one name."""
        if self.source is None or self.statement is None:
            return ""
        name = self.source.names_at(self.statement).optimizer
        return name if name and self._is_visible(name) else self._made_by(_OPTIMIZERS)

    def model_of(self, optimizer: ast.Assign | None) -> str:
        """Return what a model is called whose parameters an optimizer is made from; "" if that is not one name."""
        if self.source is None:
            return ""
        nodes = ast.walk(self.source.tree if optimizer is None else optimizer)
        calls = [call for call in self.source.method_calls if call.method in ("parameters", "named_parameters")]
        within = {id(node) for node in nodes}
        return only({call.owner for call in calls if id(call.node) in within})

    def assignment_of(self, name: str) -> ast.Assign | None:
        """Return the statement that makes the object of a name: the last one before the line, or the only one."""
        made = [each for each in self._assignments() if ast.unparse(each.targets[0]) == name]
        before = [each for each in made if self.place is not None and each.lineno < self.place.line]
        return before[-1] if before else made[0] if len(made) == 1 else None

    def imports(self, module: str) -> bool:
        """Return True if the script has `import module` at its top."""
        imports = [] if self.source is None else self.source.tree.body
        names = [alias for node in imports if isinstance(node, ast.Import) for alias in node.names]
        return any(alias.name == module and alias.asname in (None, module) for alias in names)

    @property
    def optimizers_made(self) -> set[str]:
        """The names of all optimizers that the script makes."""
        return {ast.unparse(each.targets[0]) for each in self._assignments() if _makes(each, _OPTIMIZERS)}

    @property
    def regions_made(self) -> set[str]:
        """The names of all variables that have an autocast region, such as `ctx = autocast("cuda") if ... else ...`."""
        nodes = [] if self.source is None else ast.walk(self.source.tree)
        assignments = (node for node in nodes if isinstance(node, ast.Assign) and len(node.targets) == 1)
        return {
            ast.unparse(assignment.targets[0])
            for assignment in assignments
            for node in ast.walk(assignment.value)
            if isinstance(node, ast.Call) and called_name(node) == "autocast"
        }

    def _assignments(self) -> Iterator[ast.Assign]:
        for node in [] if self.source is None else ast.walk(self.source.tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.value, ast.Call):
                yield node

    def _made_by(self, makers: set[str]) -> str:
        """Return the one name that is assigned a call of one of these and can be used in the line; "" if none."""
        assert self.source is not None
        assert self.statement is not None
        names = set()
        here = self.source.function(self.statement)
        for each in self._assignments():
            name = ast.unparse(each.targets[0])
            is_visible = self.source.function(each) in (here, self.source.tree) or (
                name.startswith("self.") and isinstance(here, ast.FunctionDef) and "self" in ast.unparse(here.args)
            )
            if _makes(each, makers) and is_visible and name.replace(".", "").isidentifier():
                names.add(name)
        return only(names)

    def _is_visible(self, name: str) -> bool:
        """Return False for the variable of a loop that the line is not in."""
        assert self.source is not None
        assert self.statement is not None
        around = set(self.source.around(self.statement))
        here = self.source.function(self.statement)
        loops = (node for node in ast.walk(here) if isinstance(node, LOOPS) and node not in around)
        return not any(name == ast.unparse(loop.target) for loop in loops)

    # -- statements ---------------------------------------------------------------------------------------------

    def calls(self, method: str) -> list[tuple[MethodCall, ast.stmt]]:
        """Return the calls of a method in the function of the statement, each with its statement."""
        if self.source is None or self.statement is None:
            return []
        calls = [call for call in self.source.calls_beside(self.statement) if call.method == method]
        pairs = [(call, self.source.statement(call.node)) for call in calls]
        return [(call, statement) for call, statement in pairs if statement is not None]

    def rest_of_block(self) -> Sequence[ast.stmt]:
        """Return the statement and those that follow it in its block."""
        assert self.source is not None
        assert self.statement is not None
        block = self.source.block(self.statement)
        return block[block.index(self.statement) :]

    def outermost_loop(self, statement: ast.stmt | None = None) -> ast.stmt | None:
        """Return the outermost loop around a statement, which is that of the line by default; None if there is none."""
        statement = statement or self.statement
        if self.source is None or statement is None:
            return None
        loops = [each for each in self.source.around(statement) if isinstance(each, ast.For | ast.While)]
        return loops[-1] if loops else None


def _makes(assignment: ast.Assign, makers: set[str]) -> bool:
    return isinstance(assignment.value, ast.Call) and called_name(assignment.value) in makers


def in_names_of_main(code: str) -> str:
    """Return code with what the script that was started calls its `model` and its `scaler`, where that is known."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    line = ScriptLine(Place(file, 0) if isinstance(file, str) else None)
    calls = [] if line.source is None else line.source.method_calls
    scalers = {call.owner for call in calls if call.method == "scale"}
    code = re.sub(r"(?<=\.bind\()model(?=\))", lambda _: line.model_of(None) or "model", code)
    return re.sub(r"(?m)^scaler(?= = )", lambda _: only(scalers) or "scaler", code)


def _source(place: Place | None) -> ScriptSource | None:
    try:
        return None if place is None else ScriptSource("".join(linecache.getlines(place.file)))
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        return None
