"""`fix_of_mistake`: the edit of a script that corrects a mistake, where one place decides it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence

from castwise._fixing.edits import Change, after, before, indent_of, indented, instead, outdented
from castwise._script_source import ScriptSource

Fix = tuple[Change, ...] | str
"""The changes, none if an earlier fix corrects this too; or why it has to be done by hand."""

_UNKNOWN_SCALER = "the script has no one scaler and optimizer that can be named there"
_NOT_ONE_STATEMENT = "the line is not a statement of that kind"
_SIMPLE = ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return


def fix_of_mistake(name: str, source: ScriptSource, line: int) -> Fix:
    """Return the changes that correct a mistake of this name in a line, or why it has to be done by hand."""
    rule = _RULES.get(name)
    if rule is None:
        return "no one place of the script decides it"
    fixes = [rule(source, statement) for statement in source.statements_at(line)]
    possible = [fix for fix in fixes if not isinstance(fix, str)] or fixes
    return possible[0] if len(possible) == 1 else "the line has several statements"


def _unscale_before(source: ScriptSource, statement: ast.stmt) -> Fix:
    scaler, optimizer = source.names_at(statement)
    if not scaler or not optimizer:
        return _UNKNOWN_SCALER
    if not isinstance(statement, _SIMPLE):
        return _NOT_ONE_STATEMENT
    block = source.siblings(statement)
    if any(ast.unparse(each) == f"{scaler}.unscale_({optimizer})" for each in block[: block.index(statement)]):
        return ()  # by the fix of an earlier line
    if any(source.calls_in_function(statement, "unscale_")):
        return f"{scaler}.unscale_ is called elsewhere: move it before this line"
    return (before(source, statement, f"{scaler}.unscale_({optimizer})"),)


def _step_with_scaler(source: ScriptSource, statement: ast.stmt) -> Fix:
    call = _method_called(statement, "step")
    scaler = source.names_at(statement).scaler
    if call is None or call.args or call.keywords:
        return _NOT_ONE_STATEMENT
    if not scaler:
        return _UNKNOWN_SCALER
    assert isinstance(call.func, ast.Attribute)
    step = instead(source, call, f"{scaler}.step({source.text_of(call.func.value)})")
    updates = [ast.unparse(update.func) for update in source.calls_in_function(statement, "update")]
    if f"{scaler}.update" in updates:
        return (step,)
    return step, after(source, statement, f"{scaler}.update()")


def _scale_loss(source: ScriptSource, statement: ast.stmt) -> Fix:
    call, scaler = _method_called(statement, "backward"), source.names_at(statement).scaler
    if call is None:
        return _NOT_ONE_STATEMENT
    if not scaler:
        return _UNKNOWN_SCALER
    assert isinstance(call.func, ast.Attribute)
    return (instead(source, call.func.value, f"{scaler}.scale({source.text_of(call.func.value)})"),)


def _validate_in_region(source: ScriptSource, statement: ast.stmt) -> Fix:
    regions = {source.text_of(item.context_expr): item.context_expr for item in _regions(source)}
    if len(regions) != 1:
        return f"the script has {len(regions) or 'no'} different autocast regions to take the arguments from"
    [(text, region)] = regions.items()
    names = {node.id for node in ast.walk(region) if isinstance(node, ast.Name)}
    imported = {alias.asname or alias.name.split(".")[0] for alias in _imports(source)}
    unknown = sorted(name for name in names - imported if not source.is_known_at(statement, name))
    if unknown or "\n" in text:
        return f"the arguments of its autocast region are not known there: {', '.join(unknown) or text}"
    moved = indented(source, _with_uses(source, statement), f"with {text}:")
    return _NOT_ONE_STATEMENT if moved is None or not isinstance(statement, _SIMPLE) else moved


def _with_uses(source: ScriptSource, statement: ast.stmt) -> Sequence[ast.stmt]:
    """Return a statement and those after it, up to the last that reads what it assigns, such as the loss."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    block = source.siblings(statement)
    first = last = block.index(statement)
    for place, later in enumerate(block[first + 1 :], first + 1):
        if not isinstance(later, _SIMPLE):
            break
        if any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(later)):
            last = place
    return block[first : last + 1]


def _backward_after_region(source: ScriptSource, statement: ast.stmt) -> Fix:
    region = source.parent(statement)
    if not isinstance(region, ast.With) or not any(map(_is_region, region.items)):
        return "the backward is not directly in the block of the region"
    block = region.body
    first = block.index(statement)
    moved = outdented(source, block[first:], region.col_offset) if first else None
    return _NOT_ONE_STATEMENT if moved is None else moved


def _disable_scaler(source: ScriptSource, statement: ast.stmt) -> Fix:
    made = [call for call in _calls(statement) if ast.unparse(call.func).split(".")[-1] == "GradScaler"]
    if len(made) != 1:
        return _NOT_ONE_STATEMENT
    if any(keyword.arg in (None, "enabled") for keyword in made[0].keywords):
        return "the scaler is already given `enabled`"
    return (_with_argument(source, made[0], "enabled=False"),)


def _save_scaler(source: ScriptSource, statement: ast.stmt) -> Fix:
    scaler = source.names_at(statement).scaler
    saved = [
        value
        for node in ast.walk(statement)
        if isinstance(node, ast.Dict)
        for value in node.values
        if isinstance(value, ast.Call) and ast.unparse(value.func).endswith(".state_dict")
    ]
    if not saved:
        return "the states are not saved as one dict that is written there"
    if not scaler:
        return _UNKNOWN_SCALER
    entry = f'"scaler": {scaler}.state_dict()'
    end = source.span(saved[-1])[1]
    line = source.line(saved[-1].end_lineno or 0)
    rest = re.fullmatch(r"\s*(,?)\s*(#.*)?", line[source.column(end) :])
    if rest is None:
        return (Change(end, end, f", {entry}"),)
    line_end = end + len(rest[0])
    own_line = Change(line_end, line_end, f"{source.line_end}{indent_of(line)}{entry},")
    return (own_line,) if rest[1] else (Change(end, end, ","), own_line)


def _zero_after_step(source: ScriptSource, statement: ast.stmt) -> Fix:
    call = _method_called(statement, "step")
    if call is None:
        return _NOT_ONE_STATEMENT
    assert isinstance(call.func, ast.Attribute)
    optimizer = source.text_of(call.args[0] if call.args else call.func.value)
    return (after(source, statement, f"{optimizer}.zero_grad()"),)


def _advance_after_taken_step(source: ScriptSource, statement: ast.stmt) -> Fix:
    scaler, block = source.names_at(statement).scaler, source.siblings(statement)
    if not scaler or not isinstance(statement, ast.Expr):
        return _UNKNOWN_SCALER
    earlier = block[: block.index(statement)]
    updates = [each for each in earlier if isinstance(each, ast.Expr) and ast.unparse(each) == f"{scaler}.update()"]
    guarded = indented(source, [statement], f"if {scaler}.get_scale() >= scale:")
    if len(updates) != 1 or guarded is None:
        return f"{scaler}.update() is not called before it in the same block"
    return before(source, updates[0], f"scale = {scaler}.get_scale()"), *guarded


_RULES: dict[str, Callable[[ScriptSource, ast.stmt], Fix]] = {
    "clipped-while-scaled": _unscale_before,
    "measured-while-scaled": _unscale_before,
    "stepped-while-scaled": _step_with_scaler,
    "stepped-without-scaler": _step_with_scaler,
    "loss-not-scaled": _scale_loss,
    "validation-outside-autocast": _validate_in_region,
    "backward-inside-autocast": _backward_after_region,
    "scaler-for-bf16": _disable_scaler,
    "scaler-not-saved": _save_scaler,
    "never-zeroed": _zero_after_step,
    "schedule-advanced-on-skip": _advance_after_taken_step,
}


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (child for child in ast.walk(node) if isinstance(child, ast.Call))


def _method_called(statement: ast.stmt, method: str) -> ast.Call | None:
    """Return a statement's one call of a method; None if there are none or several."""
    if not isinstance(statement, _SIMPLE):
        return None
    found = [call for call in _calls(statement) if isinstance(call.func, ast.Attribute) and call.func.attr == method]
    return found[0] if len(found) == 1 else None


def _with_argument(source: ScriptSource, call: ast.Call, argument: str) -> Change:
    """Return the insertion of a last argument of a call."""
    end = source.span(call)[1] - 1
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if not given:
        return Change(end, end, argument)
    last = max(source.span(value)[1] for value in given)
    return Change(last, last, f", {argument}")


def _is_region(item: ast.withitem) -> bool:
    expression = item.context_expr
    return isinstance(expression, ast.Call) and ast.unparse(expression.func).split(".")[-1] == "autocast"


def _regions(source: ScriptSource) -> Iterator[ast.withitem]:
    blocks = (node for node in ast.walk(source.tree) if isinstance(node, ast.With))
    return (item for block in blocks for item in block.items if _is_region(item))


def _imports(source: ScriptSource) -> Iterator[ast.alias]:
    nodes = (node for node in source.tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))
    return (alias for node in nodes for alias in node.names)
