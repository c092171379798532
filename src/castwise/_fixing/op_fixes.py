"""`fix_of_op`: the edit that keeps an op of the model or the loss away from the inputs at which it is not finite."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from castwise._fixing.edits import Change, instead
from castwise._fixing.mistake_fixes import Fix
from castwise._script_source import ScriptSource

# Smaller numbers are 0 in fp16.
_LEAST = "1e-7"
_BOUNDS = {
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log10", "reciprocal"), f"clamp_min({_LEAST})"),
    **dict.fromkeys(("acos", "asin"), "clamp(-1 + 1e-6, 1 - 1e-6)"),
}
# What the divisor is called with, where it cannot be negative.
_NOT_NEGATIVE = frozenset(["norm", "vector_norm", "std", "sqrt", "abs", "var", "exp"])
_IN_WORDS = {"a division": "div", "1 / x": "reciprocal"}


def fix_of_op(op: str, advice: str, source: ScriptSource, line: int) -> Fix:
    """Return the changes that bound an op's input in a line, or why it has to be done by hand.

    Args:
        op: Name such as "aten.div".
        advice: The remedy in words, which names the op of the forward where its gradient is at fault.
        source: The script.
        line: Where the op is called.
    """
    found = re.match(r"the gradient of (a division|1 / x|\w+)", advice)
    name = op.rpartition(".")[2].rstrip("_") if found is None else _IN_WORDS.get(found[1], found[1])
    if "epsilon" not in advice and "clamp" not in advice:
        return "no one place of the script decides it"
    inputs = [
        value
        for statement in source.statements_at(line)
        for value in (_divisors(statement) if name == "div" else _inputs(statement, name))
    ]
    if len(inputs) != 1:
        return f"the line has {len(inputs) or 'no'} calls of {name} whose input can be bounded"
    return (_bounded(source, inputs[0], _BOUNDS.get(name, f"clamp_min({_LEAST})")),)


def _inputs(statement: ast.stmt, name: str) -> Iterator[ast.expr]:
    """Yield the inputs of calls such as `x.sqrt()` and `torch.sqrt(x)`."""
    if name not in _BOUNDS:
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            if not node.args and not node.keywords:
                yield node.func.value
            elif len(node.args) == 1 and ast.unparse(node.func.value) == "torch":
                yield node.args[0]


def _divisors(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the divisors that are a norm or the like. Others may be negative, and stay so."""
    for node in ast.walk(statement):
        divisor = node.right if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) else None
        if isinstance(divisor, ast.Call) and ast.unparse(divisor.func).rpartition(".")[2] in _NOT_NEGATIVE:
            yield divisor


def _bounded(source: ScriptSource, value: ast.expr, bound: str) -> Change:
    text = source.text_of(value)
    is_whole = isinstance(value, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return instead(source, value, f"{text if is_whole else f'({text})'}.{bound}")
