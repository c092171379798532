"""The code that corrects a mistake, for pasting: in the names of the script, and complete.

Code without a heading replaces the statement that the mistake is in. Comments say where other code goes:
`# before line 7:`. Where the script does not show what to write, the code has the usual names, and a comment says so.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Sequence

from castwise._mistakes.script_line import ScriptLine
from castwise._script_source import MethodCall, ScriptSource, called_name, is_enabled_region

# What may be called with an argument in fp32 beside others in fp16; a method of a tensor, or a product, may not.
_LOSSES = re.compile(r"(^|[._])(\w*loss\w*|criterion|\w*cross_entropy\w*|kl_div)$")
_OF_MODELS = {"parameters", "named_parameters", "state_dict", "load_state_dict", "train", "eval"}

# -- steps and gradients ----------------------------------------------------------------------------------------------


def unscaled_before(line: ScriptLine) -> str:
    """Unscale before the line that uses gradients; see `ScriptSource.place_to_unscale`."""
    unscale = f"{line.scaler or 'scaler'}.unscale_({line.optimizer or 'optimizer'})"
    code = f"{unscale}\n{line.text}"
    if line.source is not None and line.statement is not None:
        first = line.source.place_to_unscale(line.statement)
        later = line.source.later_unscale(first)
        calls = [each for _, each in line.calls("unscale_") if each.lineno > line.statement.lineno]
        elsewhere = [each for each in calls if line.source.text_of(each) == unscale]
        if later is not None and line.source.text_of(later) == unscale:
            code = f"{_moved([later])} to before line {first.lineno}:\n{unscale}"
        elif elsewhere:
            code = f"# after line {elsewhere[0].lineno}, which unscales them:\n{line.text}"
        elif first is not line.statement or not line.is_simple:
            code = f"# before line {first.lineno}:\n{unscale}"
    return _noted(line, code, "scaler", "optimizer")


def clipped_after_unscaling(line: ScriptLine) -> str:
    """Unscale before the line that clips."""
    code = unscaled_before(line)
    if "clip_grad_norm_" not in line.text:
        return code
    names = f"{line.scaler or 'scaler'}.clip_grad_norm_({line.optimizer or 'optimizer'}, max_norm)"
    return f"{code}\n# or castwise's {names}, which reads them once"


def stepped_by_scaler(line: ScriptLine) -> str:
    """Step with the scaler, which is updated unless the script does so elsewhere."""
    scaler, optimizer = line.scaler or "scaler", line.optimizer or "optimizer"
    code, update = f"{scaler}.step({optimizer})", f"\n{scaler}.update()"
    if line.source is not None:
        own = scaler.rpartition(".")[2]
        calls = line.source.method_calls
        update = "" if any(call.method == "update" and call.owner.endswith(own) for call in calls) else update
    step = _call_in(line, "step")
    if step is not None and line.statement is not None:
        given = [step.owner, *_given(line, step)]
        code = line.replaced(line.statement, step.node, f"{scaler}.step({', '.join(given)})")
        if given[1:]:
            update = f"  # castwise's GradScaler takes closures, torch's does not{update}"
    return _noted(line, f"{code}{update}", "scaler")


def zeroed_after(line: ScriptLine) -> str:
    """Zero the gradients after the step."""
    return f"{line.text}\n{_optimizer_in(line) or 'optimizer'}.zero_grad()"


def scaled(line: ScriptLine) -> str:
    """Scale the loss whose backward the line calls."""
    scaler, statement = line.scaler or "scaler", line.statement
    code = f"{scaler}.scale(loss).backward()"
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and line.source is not None:
        called = statement.value.func
        if isinstance(called, ast.Attribute) and called.attr == "backward":
            loss = line.source.text_of(called.value)
            code = line.replaced(statement, called.value, f"{scaler}.scale({loss})")
    return _noted(line, code, "scaler")


def scaled_once(line: ScriptLine) -> str:
    """Leave out the scaling of a loss that is scaled already."""
    scale = _call_in(line, "scale")
    if scale is None or line.source is None or line.statement is None or len(scale.node.args) != 1:
        return "scale each loss once, where its backward is called"
    given = scale.node.args[0]
    loss = line.source.text_of(given)
    is_whole = isinstance(given, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return line.replaced(line.statement, scale.node, loss if is_whole else f"({loss})")


def unscaled_before_step(line: ScriptLine) -> str:
    """Unscale, and clip, before the step and not after each backward."""
    step = _step_of_scaler(line)
    if step is None or line.source is None or line.statement is None:
        return f"unscale once, right before the step: {line.text or 'scaler.unscale_(optimizer)'}"
    block = line.rest_of_block()
    count = next((place for place, each in enumerate(block[1:], 1) if not _uses_norm(each)), len(block))
    return f"{_moved(block[:count])} to before line {step.lineno}:\n{_texts(line, block[:count])}"


def updated_after_step(line: ScriptLine) -> str:
    """Update the scale after the step and not after each backward."""
    step = _step_of_scaler(line)
    if step is None or line.statement is None or not line.is_simple:
        return (
            "update the scale once, right after the step; optimizers that step in different iterations need a "
            "GradScaler each"
        )
    return f"{_moved([line.statement])} to after line {step.end_lineno}:\n{line.text}"


def advanced_after_taken_step(line: ScriptLine) -> str:
    """Advance the schedule unless the scale has gone down, as it does after a skipped step."""
    scaler = line.scaler or "scaler"
    step = _call_in(line, "step")
    is_schedule = step is not None and step.owner not in (line.scaler, line.optimizer) and line.is_simple
    schedule = line.text if is_schedule else "scheduler.step()"
    updates = [each for call, each in line.calls("update") if call.owner == scaler]
    before = f"line {updates[0].lineno}" if len(updates) == 1 else f"{scaler}.update()"
    name = "scale_before" if line.source is None else line.source.free_name("scale_before")
    advance = f"if {scaler}.get_scale() >= {name}:\n{_indented(schedule)}"
    code = f"{advance}\n# before {before}:\n{name} = {scaler}.get_scale()"
    owner = step.owner if is_schedule and step is not None else "scheduler"
    return _noted(line, f"{code}\n# or, with castwise's scaler: {scaler}.step_scheduler({owner})", "scaler")


# -- regions ----------------------------------------------------------------------------------------------------------


def after_region(line: ScriptLine) -> str:
    """Move the backward, and what follows it in the region, out of the region."""
    region = _region_around(line)
    inside = (
        [] if line.source is None or line.statement is None else [line.statement, *line.source.around(line.statement)]
    )
    first = next((each for each in inside if region is not None and each in region.body), None)
    if region is None or not isinstance(first, ast.Expr | ast.If):  # a loop may have the forward in it
        return f"# after the autocast region, not in it:\n{line.text or 'loss.backward()'}"
    moved = region.body[region.body.index(first) :]
    return f"{_moved(moved)} to after the block of line {region.lineno}:\n{_texts(line, moved)}"


def in_region(line: ScriptLine, region: str) -> str:
    """Run the line in a region, whose arguments are given as code."""
    if line.is_simple:
        return f"with {region}:\n{_indented(line.text)}"
    return f"# around this line, and around what uses its result:\nwith {region}:"


def loss_in_region(line: ScriptLine) -> str:
    """Move what computes the loss into the region before it."""
    words = "compute the loss inside the autocast region"
    if line.source is None or line.statement is None:
        return words
    block = line.source.block(line.statement)
    before = block[: block.index(line.statement)]
    regions = [place for place, each in enumerate(before) if isinstance(each, ast.With) and _has_region(line, each)]
    moved = before[regions[-1] + 1 :] if regions else []
    if not moved or not all(isinstance(each, ast.Assign | ast.AugAssign | ast.AnnAssign) for each in moved):
        return words
    region = before[regions[-1]].lineno
    return f"{_moved(moved)} to the end of the block of line {region}:\n{_texts(line, moved)}"


def loss_in_fp32(line: ScriptLine, device: str) -> str:
    """Compute the loss of a line with autocast disabled and its first argument in fp32."""
    head = f'with torch.autocast("{device}", enabled=False):'
    given = argument_of_loss(line.statement) if line.is_simple and line.statement is not None else None
    if line.source is None or line.statement is None or given is None:
        return f"# around the loss, with .float() on its arguments:\n{head}"
    text = line.replaced(line.statement, given, f"{line.source.text_of(given)}.float()")
    return f"{head}\n{_indented(text)}"


def argument_of_loss(statement: ast.stmt) -> ast.expr | None:
    """Return the first argument of the loss that a statement computes, if it is a value; None for other code."""
    call = getattr(statement, "value", None)
    if not isinstance(call, ast.Call) or not call.args or not _LOSSES.search(ast.unparse(call.func)):
        return None
    return call.args[0] if isinstance(call.args[0], ast.Name | ast.Attribute | ast.Subscript) else None


def scaled_training(line: ScriptLine, device: str) -> str:
    """Train with a scaler on a device."""
    or_bf16 = "# or dtype=torch.bfloat16, which needs no scaler"
    (backward, to_scale), (step, to_step) = _only_call(line, "backward"), _only_call(line, "step")
    if line.source is None or backward is None or step is None or to_scale is None or to_step is None:
        make = f'scaler = torch.amp.GradScaler("{device}")'
        used = f"scaler.scale(loss).backward()\nscaler.step({line.optimizer or 'optimizer'})\nscaler.update()"
        return f"# once, before the loop:\n{make}\n# for each batch, with its loss:\n{used}\n{or_bf16}"
    assert isinstance(backward.node.func, ast.Attribute)
    loss = line.source.text_of(backward.node.func.value)
    scaler = "self.scaler" if step.owner.startswith("self.") else "scaler"
    scale = line.replaced(to_scale, backward.node.func.value, f"{scaler}.scale({loss})")
    taken = line.replaced(to_step, step.node, ", ".join([f"{scaler}.step({step.owner}", *_given(line, step)]) + ")")
    clip = (
        f"\n# before gradients are clipped: {scaler}.unscale_({step.owner})" if "clip_grad" in line.source.text else ""
    )
    return (
        f'{_where_made(line, step.owner, to_step)}\n{scaler} = torch.amp.GradScaler("{device}")\n'
        f"# instead of line {to_scale.lineno}:\n{scale}\n# instead of line {to_step.lineno}:\n{taken}\n"
        f"{scaler}.update(){clip}\n{or_bf16}"
    )


def cast_before_compiling(line: ScriptLine) -> str:
    """Set how backwards are compiled before the script compiles."""
    compiled = None if line.source is None else _compiles(line.source)
    where = "before torch.compile is called" if compiled is None else f"before line {compiled}"
    return f'# {where}:\ntorch._functorch.config.backward_pass_autocast = "off"'


# -- models, optimizers and scalers -----------------------------------------------------------------------------------


def in_fp32(line: ScriptLine) -> str:
    """Leave the model in fp32 where the script makes it fp16."""
    found = None if line.source is None else model_in_fp32(line.source)
    if found is None or line.source is None:
        return "keep the weights in fp32, without half: autocast casts the inputs of each op"
    call, code = found
    statement = line.source.statement(call)
    assert statement is not None
    return f"# instead of line {statement.lineno}:\n{line.replaced(statement, call, code)}"


def model_in_fp32(source: ScriptSource) -> tuple[ast.Call, str] | None:
    """Return the only call that makes something fp16, if that is a model, and what leaves it in fp32."""
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and _halves(node)]
    statement = source.statement(calls[0]) if len(calls) == 1 else None
    if not isinstance(statement, ast.Expr | ast.Assign):
        return None
    assert isinstance(calls[0].func, ast.Attribute)
    owner = source.text_of(calls[0].func.value)
    is_alone = statement.value is calls[0] and isinstance(statement, ast.Expr)
    name = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else owner
    if name not in {call.owner for call in source.method_calls if call.method in _OF_MODELS}:
        return None  # it may be an input that is cast
    return calls[0], f"{owner}.float()" if is_alone else owner


def with_master_weights(line: ScriptLine, dtype: object) -> str:
    """Wrap the optimizer in `MasterWeights` where it is made."""
    optimizer = _optimizer_in(line) or "optimizer"
    made = line.assignment_of(optimizer)
    model = line.model_of(made)
    wrap = f"{optimizer} = castwise.MasterWeights({optimizer}, {model or 'model'}, dtype={dtype})"
    first = "" if line.imports("castwise") else "import castwise\n"
    where = f"after line {made.end_lineno}" if made is not None else "once, where the optimizer is made"
    return _noted(line, f"# {where}:\n{first}{wrap}", *([] if model else ["model"]))


def disabled_scaler(line: ScriptLine) -> str:
    """Disable the scaler where it is made."""
    call = _scaler_made(line)
    if call is None or line.source is None or line.statement is None:
        code = "# where the scaler is made: enabled=False"
    else:
        kept = [text for text in _given(line, call) if not text.startswith("enabled=")]
        code = line.replaced(line.statement, call.node, f"{call.owner}({', '.join([*kept, 'enabled=False'])})")
    device = f"{line.source.text_of(call.node.args[0])}, " if call and call.node.args and line.source else ""
    return (
        f"{code}\n# or castwise.GradScaler({device}schedule=castwise.schedules.Guard()), to skip non-finite steps only"
    )


def scaler_for(line: ScriptLine, device: str) -> str:
    """Make the scaler for another device."""
    call = _scaler_made(line)
    if call is None or line.source is None or line.statement is None:
        return f'# where the scaler is made:\ntorch.amp.GradScaler("{device}")'
    is_old = "cuda.amp" in call.owner or re.search(r"from \S*cuda\.amp import .*GradScaler", line.source.text)
    given = [text for text in _given(line, call) if not text.startswith("device=")]
    kept = given[1:] if call.node.args and not is_old else given
    made = ", ".join([f'"{device}"', *kept])
    return line.replaced(line.statement, call.node, f"{'torch.amp.GradScaler' if is_old else call.owner}({made})")


def made_once(line: ScriptLine) -> str:
    """Make the scaler before the loop that it is made in."""
    loop = line.outermost_loop()
    if line.statement is None or line.source is None or not line.is_simple:
        return f"# once, before the loop over epochs:\n{line.text or 'scaler = torch.amp.GradScaler()'}"
    if loop is not None:
        return f"{_moved([line.statement])} to before line {loop.lineno}:\n{line.text}"
    function = getattr(line.source.function(line.statement), "name", "")
    passed_on = f"the loop that calls {function}, and passed to it" if function else "the loop over epochs"
    return f"# once, before {passed_on}:\n{line.text}"


def saved_with_scaler(line: ScriptLine) -> str:
    """Save the scaler's state in the dict with the optimizer's."""
    entry = f'"scaler": {line.scaler or "scaler"}.state_dict()'
    saved = _saved_state(line)
    if saved is None or line.source is None or line.statement is None:
        return _noted(line, f"# into the checkpoint with the optimizer's state:\n{{{entry}}}", "scaler")
    key, state = saved
    separator = ", " if key.lineno == line.statement.lineno else ",\n" + " " * key.col_offset
    code = line.replaced(line.statement, state, f"{line.source.text_of(state)}{separator}{entry}")
    return _noted(line, code, "scaler")


def random_state_preserved(line: ScriptLine) -> str:
    """Preserve the random state of a checkpointed layer."""
    keywords = [] if line.statement is None else [*ast.walk(line.statement)]
    values = [node.value for node in keywords if isinstance(node, ast.keyword) and node.arg == "preserve_rng_state"]
    if line.statement is None or len(values) != 1 or not line.is_simple:
        return "pass preserve_rng_state=True to checkpoint"
    return line.replaced(line.statement, values[0], "True")


# -- what the script has ----------------------------------------------------------------------------------------------


def _call_in(line: ScriptLine, method: str) -> MethodCall | None:
    """Return the one call of a method in the statement."""
    calls = [call for call, statement in line.calls(method) if statement is line.statement]
    return calls[0] if len(calls) == 1 else None


def _only_call(line: ScriptLine, method: str) -> tuple[MethodCall | None, ast.stmt | None]:
    """Return the one call of a method that is a statement, and the statement; for `step`, only those of optimizers."""
    calls = [] if line.source is None else [call for call in line.source.any_calls if call.method == method]
    if method == "step" and line.source is not None:
        optimizers = line.source.optimizers | line.optimizers_made
        calls = [call for call in calls if call.owner in optimizers]
    statement = line.source.statement(calls[0].node) if line.source is not None and len(calls) == 1 else None
    is_alone = isinstance(statement, ast.Expr) and statement.value is calls[0].node
    return (calls[0], statement) if is_alone else (None, None)


def _where_made(line: ScriptLine, optimizer: str, used: ast.stmt) -> str:
    """Return the heading of what is made once, beside an optimizer, for the statement that uses both."""
    assert line.source is not None
    made = line.assignment_of(optimizer)
    if made is not None and (
        optimizer.startswith("self.") or line.source.function(made) in (line.source.function(used), line.source.tree)
    ):
        return f"# after line {made.end_lineno}:"
    loop = line.outermost_loop(used)
    if loop is None or made is not None:
        return "# once, where the optimizer is made, and passed on like it:"
    return f"# before line {loop.lineno}:"


def _step_of_scaler(line: ScriptLine) -> ast.stmt | None:
    """Return the one statement in which the scaler steps its one optimizer."""
    steps = [each for call, each in line.calls("step") if call.owner == line.scaler and call.node.args]
    return steps[0] if len(steps) == 1 else None


def _optimizer_in(line: ScriptLine) -> str:
    """Return the optimizer that the line steps or loads; "" if it does neither."""
    call = _call_in(line, "step") or _call_in(line, "load_state_dict")
    if call is None:
        return line.optimizer
    is_scaler = call.owner == line.scaler and bool(call.node.args)
    return ast.unparse(call.node.args[0]) if is_scaler else call.owner


def _region_around(line: ScriptLine) -> ast.With | None:
    around = [] if line.source is None or line.statement is None else line.source.around(line.statement)
    return next((each for each in around if isinstance(each, ast.With) and _has_region(line, each)), None)


def _has_region(line: ScriptLine, block: ast.With) -> bool:
    """Return True for a block of an autocast region, also of one that a variable has."""
    names = {ast.unparse(item.context_expr) for item in block.items}
    return any(map(is_enabled_region, block.items)) or not names.isdisjoint(line.regions_made)


def _uses_norm(statement: ast.stmt) -> bool:
    return "clip" in ast.unparse(statement) or "norm" in ast.unparse(statement)


def _compiles(source: ScriptSource) -> int | None:
    """Return the line in which the script compiles first."""
    nodes = (node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute) and node.attr == "compile")
    return min((node.lineno for node in nodes if ast.unparse(node) == "torch.compile"), default=None)


def _halves(call: ast.Call) -> bool:
    """Return True for `model.half()` and `model.to(torch.float16)`."""
    if not isinstance(call.func, ast.Attribute):
        return False
    given = [ast.unparse(value) for value in (*call.args, *(keyword.value for keyword in call.keywords))]
    return (call.func.attr == "half" and not given) or (call.func.attr == "to" and given == ["torch.float16"])


def _scaler_made(line: ScriptLine) -> MethodCall | None:
    """Return the call of the statement that makes a scaler, with what is called as its owner."""
    nodes = [] if line.statement is None else ast.walk(line.statement)
    calls = [node for node in nodes if isinstance(node, ast.Call) and called_name(node) == "GradScaler"]
    is_plain = len(calls) == 1 and line.is_simple and not any(isinstance(each, ast.Starred) for each in calls[0].args)
    return MethodCall(ast.unparse(calls[0].func), "", calls[0]) if is_plain else None


def _saved_state(line: ScriptLine) -> tuple[ast.expr, ast.expr] | None:
    """Return the key and the value of the optimizer's state in a dict of the statement."""
    nodes = [] if line.statement is None or not line.is_simple else ast.walk(line.statement)
    dicts = [node for node in nodes if isinstance(node, ast.Dict)]
    entries = [(key, value) for node in dicts for key, value in zip(node.keys, node.values, strict=True) if key]
    states = [(key, value) for key, value in entries if ast.unparse(value).endswith(".state_dict()")]
    of_optimizer = [entry for entry in states if ast.unparse(entry[1]) == f"{line.optimizer}.state_dict()"]
    return next(reversed(of_optimizer or states), None)


# -- texts ------------------------------------------------------------------------------------------------------------


def _given(line: ScriptLine, call: MethodCall) -> list[str]:
    """Return the arguments of a call as they are written."""
    assert line.source is not None
    named = (f"{keyword.arg}=" if keyword.arg else "**" for keyword in call.node.keywords)
    values = (line.source.text_of(keyword.value) for keyword in call.node.keywords)
    return [*map(line.source.text_of, call.node.args), *map("".join, zip(named, values, strict=True))]


def _moved(statements: Sequence[ast.stmt]) -> str:
    """Return the beginning of a heading for statements that follow each other."""
    first, last = statements[0].lineno, statements[-1].end_lineno
    return f"# moved from line {first}" if first == last else f"# moved from lines {first} to {last}"


def _texts(line: ScriptLine, statements: Iterable[ast.stmt]) -> str:
    return "\n".join(map(line.text_of, statements))


def _indented(code: str) -> str:
    return textwrap.indent(code, "    ")


def _noted(line: ScriptLine, code: str, *used: str) -> str:
    """Return code with a comment on those of the usual names that stand for names which are not known."""
    unknown = [name for name in used if not getattr(line, name, "")]
    if not unknown:
        return code
    verb = "is that" if len(unknown) == 1 else "are those"
    return f"{code}\n# {' and '.join(unknown)} {verb} of the training loop"
