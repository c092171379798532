"""`fix_of_mistake`: the edit of a script that corrects a mistake, where one place decides it.

An edit has to be right in every script that it is made in, so each rule knows one form of script, that of most: the
scaler, its backward and its step are in one function, and there is one optimizer. Anything else is left to be done by
hand.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence

from castwise._fixing.edits import Change, after, before, indent_of, indented, instead, outdented, without
from castwise._mistakes.corrected_code import argument_of_loss, model_in_fp32
from castwise._script_source import (
    LOOPS,
    MethodCall,
    ScriptSource,
    called_name,
    enabled_regions,
    has_backward,
    has_exit,
    is_enabled_region,
    is_region,
)

Fix = tuple[Change, ...] | str
"""The changes, none if an earlier fix corrects this too; or why it has to be done by hand."""

_NO_ONE_PLACE = "no one place of the script decides it"
_UNKNOWN_NAMES = "its function has no one scaler and optimizer that can be named there"
_OTHER_OPTIMIZERS = "the script has several optimizers"
_NOT_ONE_STATEMENT = "the line is not a statement of that kind"
_ON_A_BRANCH = "the loss is scaled, or the step taken, only on some ways through the code there"
_HIDDEN = ast.Yield | ast.YieldFrom | ast.Await | ast.Lambda
# What may follow a backward without autocast as well as inside it.
_AFTER_A_BACKWARD = {
    *("step", "update", "zero_grad", "scale", "backward", "unscale_", "clip_grad_norm_", "clip_grad_value_"),
    *("parameters", "get_last_lr", "item", "detach", "float", "append", "print"),
}
_LOSS = re.compile(r"loss|entropy|criterion|mse|nll|bce", re.IGNORECASE)


def fix_of_mistake(name: str, source: ScriptSource, line: int) -> Fix:
    """Return the changes that correct a mistake of this name in a line, or why it has to be done by hand."""
    rule = _RULES.get(name)
    if rule is None:
        return _NO_ONE_PLACE
    fixes = [rule(source, statement) for statement in source.statements_at(line)]
    if not fixes:
        return _NOT_ONE_STATEMENT
    possible = [fix for fix in fixes if not isinstance(fix, str)] or fixes
    return possible[0] if len(possible) == 1 else "the line has several statements"


def fix_of_loss(code: str, source: ScriptSource, line: int) -> Fix:
    """Return the changes that compute the loss of a line in fp32, in the region that a message's code begins with."""
    statements = source.statements_at(line)
    given = argument_of_loss(statements[0]) if len(statements) == 1 else None
    moved = None if given is None else indented(source, statements, code.partition("\n")[0])
    if given is None or moved is None or "torch" not in source.identifiers:
        return _NOT_ONE_STATEMENT
    return *moved, instead(source, given, f"{source.text_of(given)}.float()")


def _unscale_before(source: ScriptSource, statement: ast.stmt) -> Fix:
    scaler, optimizer = source.names_at(statement)
    if not scaler or not optimizer:
        return _UNKNOWN_NAMES
    if len(source.optimizers) > 1:
        return _OTHER_OPTIMIZERS
    first, unscale = source.place_to_unscale(statement), f"{scaler}.unscale_({optimizer})"
    block = source.block(first)
    place = block.index(first)
    step, update = (
        next((each for each in block[place + 1 :] if ast.unparse(each) == f"{scaler}.{call}"), None)
        for call in (f"step({optimizer})", "update()")
    )
    if any(ast.unparse(each) == unscale for each in block[: place + 1]):
        return ()  # by the fix of an earlier line
    later = source.later_unscale(first)
    unscaled = [call for call in source.method_calls if call.method == "unscale_"]
    if unscaled and (later is None or len(unscaled) > 1 or ast.unparse(later) != unscale):
        return f"{scaler}.unscale_ is called elsewhere: it has to come before this line, once for each step"
    if step is None or update is None or has_backward(block[place : block.index(step)]) or _hides(statement):
        return f"{scaler}.step({optimizer}) and {scaler}.update() do not follow it in the same block"
    if any(map(has_exit, block[place : block.index(update)])):
        return f"{scaler}.update() is not reached on each way from there"
    moved = () if later is None else without(source, later)
    if moved is None or (later is not None and block.index(later) > block.index(step)):
        return _NOT_ONE_STATEMENT
    return before(source, first, unscale), *moved


def _step_with_scaler(source: ScriptSource, statement: ast.stmt) -> Fix:
    scaler, _ = source.names_at(statement)
    stepped = _stepped_alone(source, statement)
    if stepped is None or stepped.node.args or stepped.node.keywords:
        return _NOT_ONE_STATEMENT
    if not scaler:
        return _UNKNOWN_NAMES
    if not _shares_block_with(source, statement, scaler, ("scale",)):
        return _ON_A_BRANCH
    step = instead(source, stepped.node, f"{scaler}.step({stepped.owner})")
    if any(
        call.method == "update" and call.owner.split(".")[-1] == scaler.split(".")[-1] for call in source.method_calls
    ):
        return (step,)
    return step, after(source, statement, f"{scaler}.update()")


def _scale_loss(source: ScriptSource, statement: ast.stmt) -> Fix:
    scaler, _ = source.names_at(statement)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "backward":
        return _NOT_ONE_STATEMENT
    if call.args or "autograd" in ast.unparse(call.func.value) or _hides(statement):
        return _NOT_ONE_STATEMENT
    if not scaler:
        return _UNKNOWN_NAMES
    if not _shares_block_with(source, statement, scaler, ("scale", "step")):
        return _ON_A_BRANCH
    scaled = f"{scaler}.scale({source.text_of(call.func.value)})"
    return (Change(*source.span_with_brackets(call.func.value), scaled),)


def _validate_in_region(source: ScriptSource, statement: ast.stmt) -> Fix:
    regions = {source.text_of(item.context_expr): item for item in enabled_regions(source.tree)}
    if len(regions) != 1:
        return f"the script has {len(regions) or 'no'} different autocast regions to take the arguments from"
    [(text, region)] = regions.items()
    if "\n" in text or not _means_the_same(source, region, statement):
        return f"the arguments of its autocast region may be others there: {' '.join(text.split())}"
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign | ast.Return) or _hides(statement):
        return _NOT_ONE_STATEMENT
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    if not any(_LOSS.search(ast.unparse(call.func)) and _has_call(call.args) for call in calls):
        return "the model's output would have another dtype after it: its uses belong into the region too"
    moved = indented(source, [statement], f"with {text}:")
    return _NOT_ONE_STATEMENT if moved is None else moved


def _means_the_same(source: ScriptSource, region: ast.withitem, statement: ast.stmt) -> bool:
    """Return True if the arguments of a region are in the same function, or constants and what modules have."""
    if source.function(region) is source.function(statement):
        return True
    names = {node.id for node in ast.walk(region) if isinstance(node, ast.Name)}
    imports = (node for node in source.tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    return names <= {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}


def _backward_after_region(source: ScriptSource, statement: ast.stmt) -> Fix:
    region, *outer = source.around(statement)
    if not isinstance(region, ast.With) or len(region.items) != 1 or not any(map(is_enabled_region, region.items)):
        return "the backward is not directly in the block of a region alone"
    if any(isinstance(each, ast.With) and any(map(is_region, each.items)) for each in outer):
        return "there is a region around the region"
    block = region.body
    first = block.index(statement)
    moved = block[first:]
    called = {called_name(node) for each in moved for node in ast.walk(each) if isinstance(node, ast.Call)}
    if not first or not called <= _AFTER_A_BACKWARD or any(map(_hides, moved)):
        return "what follows the backward in the region may have to stay in it"
    changes = outdented(source, moved, region.col_offset)
    return _NOT_ONE_STATEMENT if changes is None else changes


def _disable_scaler(source: ScriptSource, statement: ast.stmt) -> Fix:
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    made = [call for call in calls if called_name(call) == "GradScaler"]
    if len(made) != 1:
        return _NOT_ONE_STATEMENT
    [call] = made
    is_starred = any(isinstance(given, ast.Starred) for given in call.args)
    if is_starred or len(call.args) > 1 or any(keyword.arg in (None, "enabled") for keyword in call.keywords):
        return "the scaler may already be given `enabled`"
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    end = max((source.span(value)[1] for value in given), default=source.span(call)[1] - 1)
    return (Change(end, end, f"{', ' if given else ''}enabled=False"),)


def _save_scaler(source: ScriptSource, statement: ast.stmt) -> Fix:
    scaler, optimizer = source.names_at(statement)
    if not scaler or not optimizer:
        return _UNKNOWN_NAMES
    dicts = [node for node in ast.walk(statement) if isinstance(node, ast.Dict)]
    keys = {key.value for node in dicts for key in node.keys if isinstance(key, ast.Constant)}
    saved = [value for node in dicts for value in node.values if ast.unparse(value) == f"{optimizer}.state_dict()"]
    if len(saved) != 1 or "scaler" in keys:
        return "the optimizer's state is not saved in one dict that is written there, without a scaler"
    entry = f'"scaler": {scaler}.state_dict()'
    end = source.span(saved[0])[1]
    line = source.line(saved[0].end_lineno or 0)
    rest = re.fullmatch(r"\s*(,?)\s*(#.*)?", line[source.column(end) :])
    if rest is None:
        return (Change(end, end, f", {entry}"),)
    line_end = end + len(rest[0])
    own_line = Change(line_end, line_end, f"{source.line_end}{indent_of(line)}{entry},")
    return (own_line,) if rest[1] else (Change(end, end, ","), own_line)


def _zero_before_backward(source: ScriptSource, statement: ast.stmt) -> Fix:
    stepped = _stepped_alone(source, statement)
    if stepped is None or stepped.node.keywords:
        return _NOT_ONE_STATEMENT
    if stepped.node.args and stepped.owner != source.names_at(statement).scaler:
        return _NOT_ONE_STATEMENT
    optimizer = ast.unparse(stepped.node.args[0]) if stepped.node.args else stepped.owner
    if source.optimizers - {optimizer}:
        return _OTHER_OPTIMIZERS
    block = source.block(statement)
    earlier = block[: block.index(statement)]
    first = next((each for each in earlier if has_backward([each])), None)
    if not isinstance(first, ast.Expr):
        return "the backward is not before it in the same block"
    return (before(source, first, f"{optimizer}.zero_grad()"),)


def _advance_after_taken_step(source: ScriptSource, statement: ast.stmt) -> Fix:
    scaler = source.names_at(statement).scaler
    stepped = _stepped_alone(source, statement)
    if stepped is None:
        return _NOT_ONE_STATEMENT
    if not scaler:
        return _UNKNOWN_NAMES
    block = source.block(statement)
    earlier = block[: block.index(statement)]
    updates = [place for place, each in enumerate(earlier) if ast.unparse(each) == f"{scaler}.update()"]
    if len(updates) != 1:
        return f"{scaler}.update() is not called before it in the same block"
    update = earlier[updates[0]]
    before_update = ast.unparse(earlier[updates[0] - 1]) if updates[0] else ""
    kept = re.fullmatch(rf"(scale_before\d*) = {re.escape(scaler)}\.get_scale\(\)", before_update)  # by another fix
    name = kept[1] if kept else source.free_name("scale_before")
    guarded = indented(source, [statement], f"if {scaler}.get_scale() >= {name}:")
    if guarded is None:
        return _NOT_ONE_STATEMENT
    return (*([] if kept else [before(source, update, f"{name} = {scaler}.get_scale()")]), *guarded)


def _keep_model_in_fp32(source: ScriptSource, statement: ast.stmt) -> Fix:
    found = model_in_fp32(source)
    if found is None:
        return "the script has no one call that casts a model to fp16 and nothing else, such as model.half()"
    return (instead(source, *found),)


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
    "never-zeroed": _zero_before_backward,
    "schedule-advanced-on-skip": _advance_after_taken_step,
    "half-with-autocast": _keep_model_in_fp32,
}


def _stepped_alone(source: ScriptSource, statement: ast.stmt) -> MethodCall | None:
    """Return the `step` that is all of a statement; None if it is something else, or of what a loop runs over."""
    if not isinstance(statement, ast.Expr):
        return None
    found = [call for call in source.method_calls if call.node is statement.value and call.method == "step"]
    loops = [each for each in source.around(statement) if isinstance(each, LOOPS)]
    variables = {node.id for loop in loops for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return found[0] if found and not used & variables else None


def _shares_block_with(source: ScriptSource, statement: ast.stmt, scaler: str, methods: Sequence[str]) -> bool:
    """Return True if a block around a statement calls a method of the scaler itself, not on one of its branches."""
    ways = [statement, *(each for each in source.around(statement) if isinstance(each, ast.stmt))]
    blocks = [source.block(each) for each in ways if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    uses = [call for call in source.method_calls if call.owner == scaler and call.method in methods]
    direct = {id(source.statement(call.node)) for call in uses}
    return any(id(each) in direct for block in blocks for each in block)


def _has_call(nodes: Iterable[ast.AST]) -> bool:
    return any(isinstance(each, ast.Call) for node in nodes for each in ast.walk(node))


def _hides(statement: ast.stmt) -> bool:
    """Return True if parts of a statement run at another time, or other code in the middle of it."""
    return any(isinstance(node, _HIDDEN) for node in ast.walk(statement))
