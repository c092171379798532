"""`bounded_input`: the edit that keeps an op of the model or the loss away from inputs at which it is not finite."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from castwise._mistakes.script_line import ScriptLine
from castwise._script_source import ScriptSource, Span

_LEAST = "clamp_min(1e-12)"  # which is 0 in fp16
_DOMAIN = "clamp(-1 + 1e-6, 1 - 1e-6)"  # which is -1 and 1 in 16-bit formats
_BOUNDS = {
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log10"), _LEAST),
    **dict.fromkeys(("acos", "asin"), _DOMAIN),
}
_WORKS_IN = {_LEAST: {"float32", "float64", "bfloat16"}, _DOMAIN: {"float32", "float64"}}
# Methods and functions whose result cannot be negative.
_NOT_NEGATIVE = frozenset(["norm", "vector_norm", "std", "sqrt", "abs", "var", "exp"])
_NO_TENSORS = {"math", "np", "numpy", "cmath", "self"}


def line_with_bound(line: ScriptLine, op: str, advice: str, dtypes: Sequence[str]) -> str:
    """Return the code of a line with the op's input bounded, for pasting; "" if that has to be done by hand.

    Args:
        line: The line; the others are as in `bounded_input`.
    """
    if line.source is None or line.statement is None or not line.is_simple:
        return ""
    found = bounded_input(op, advice, dtypes, line.source, line.statement.lineno)
    if isinstance(found, str):
        return ""
    return f"# instead of line {line.statement.lineno}:\n{line.replaced(line.statement, *found)}"


def bounded_input(
    op: str, advice: str, dtypes: Sequence[str], source: ScriptSource, line: int
) -> tuple[Span, str] | str:
    """Return the input of an op in a line and the code that bounds it, or why that has to be done by hand.

    Args:
        op: Name such as "aten.div".
        advice: The remedy in words, which names the op of the forward where its gradient is at fault.
        dtypes: Names of the dtypes of the op's inputs.
        source: The script.
        line: Where the op is called.
    """
    found = re.match(r"the gradient of (a division|\w+)", advice)
    name = op.rpartition(".")[2].rstrip("_") if found is None else found[1]
    name = "div" if name in ("a division", "1", "reciprocal") else name  # of the gradient of 1 / x
    if "epsilon" not in advice and "clamp" not in advice:
        return "no one place of the script decides it"
    bound = _BOUNDS.get(name, _LEAST)
    if not dtypes or not set(dtypes) <= _WORKS_IN[bound]:
        return f"{' and '.join(sorted(set(dtypes))) or 'its dtype'} may not hold a bound as small as is needed"
    inputs = [
        value
        for statement in source.statements_at(line)
        for value in (_divisors(statement) if name == "div" else _inputs(statement, name))
    ]
    if len(inputs) != 1 or _is_bounded(inputs[0]):
        return f"the line has no one {'division' if name == 'div' else name} whose input can be bounded"
    return _bounded(source, inputs[0], bound)


def _inputs(statement: ast.AST, name: str) -> Iterator[ast.expr]:
    """Yield the inputs of calls such as `x.sqrt()` and `torch.sqrt(x)`."""
    if name not in _BOUNDS:
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            owner = ast.unparse(node.func.value)
            if not node.args and not node.keywords and owner not in _NO_TENSORS:
                yield node.func.value
            elif len(node.args) == 1 and owner == "torch":
                yield node.args[0]


def _divisors(statement: ast.stmt) -> list[ast.expr]:
    """Return the divisor of a statement's one division, if it is a norm or the like. Others may be negative.

    Of a square root, it is the input: the gradient of the root is not finite at 0 either.
    """
    divisors = [
        node.right for node in ast.walk(statement) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    ]
    if len(divisors) != 1 or not isinstance(divisors[0], ast.Call):
        return []
    function = divisors[0].func
    if not isinstance(function, ast.Attribute) or ast.unparse(function.value) in _NO_TENSORS:
        return []
    if function.attr == "sqrt":
        return [*_inputs(divisors[0], "sqrt")]
    return divisors if function.attr in _NOT_NEGATIVE else []


def _is_bounded(value: ast.expr) -> bool:
    """Return True for a value that is clamped or has an epsilon added already, so that the fault is another one."""
    text = ast.unparse(value)
    return "clamp" in text or "clip" in text or "eps" in text or re.search(r"\+ \d*\.?\d*e-", text) is not None


def _bounded(source: ScriptSource, value: ast.expr, bound: str) -> tuple[Span, str]:
    start, end = span = source.span_with_brackets(value)
    is_whole = isinstance(value, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) or span != source.span(value)
    text = source.text[start:end]
    return span, f"{text if is_whole else f'({text})'}.{bound}"
