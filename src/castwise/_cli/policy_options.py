"""Parsing of policies and schedules given on the command line."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from castwise import Policy, policies, schedules
from castwise._cli.completion import POLICIES
from castwise._cli.option_checks import check_policy, check_schedule_name
from castwise._user_error import UserError
from castwise.amp._schedules import Schedule

_LARGEST_EXPONENT = 1024  # that of fp64; it also limits a power of Python integers to 10,240 bits


def read_policy(text: str) -> Policy:
    """Return a policy by name or from a file.

    Raises:
        UserError: There is no such policy, or the file is not a valid policy.
    """
    check_policy(text)
    if text in POLICIES:
        ready: Policy = getattr(policies, text)
        return ready
    path = Path(text)
    try:
        return Policy.from_file(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from None
    except ValueError as error:
        raise UserError(naming(path, error)) from None


def naming(path: object, error: ValueError) -> str:
    """Return an error's message, prefixed with its file if the message does not name it."""
    text = str(error)
    return text if str(path) in text else f"{path}: {text}"


def read_schedule(text: str) -> Schedule:
    """Parse a schedule written as in Python: `Headroom` or `Dynamic(init_scale=1024.0, hysteresis=2)`.

    Raises:
        UserError: The text is not a valid schedule.
    """
    try:
        node = ast.parse(text, mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        check_schedule_name(name, text)
        given = [_value(argument) for argument in call.args]
        named = {keyword.arg: _value(keyword.value) for keyword in call.keywords if keyword.arg}
        made: Schedule = getattr(schedules, name)(*given, **named)
    except (SyntaxError, ValueError, TypeError) as error:
        raise UserError(f"--schedule {text!r}: {error}") from None
    except (RecursionError, MemoryError):  # Python's parser gave up
        raise UserError(f"--schedule is nested too deeply: {text[:40]!r}...") from None
    return made


def _value(node: ast.expr) -> Any:
    """Evaluate a literal, or a power of numbers such as 2.0**16, without running code.

    Raises:
        ValueError: It is neither, or a power that is not finite or exceeds `_LARGEST_EXPONENT`.
    """
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)):
        return ast.literal_eval(node)
    base, exponent = _value(node.left), _value(node.right)
    for number in (base, exponent):
        if type(number) not in (int, float):
            raise ValueError(f"base and exponent of a power must be numbers, got {ast.unparse(node)}")
    if abs(base) > _LARGEST_EXPONENT or abs(exponent) > _LARGEST_EXPONENT:
        raise ValueError(f"base and exponent of a power must be <= {_LARGEST_EXPONENT}, got {ast.unparse(node)}")
    try:
        power = base**exponent
    except ArithmeticError:
        power = None
    if type(power) not in (int, float):
        raise ValueError(f"a power must be a finite real number, got {ast.unparse(node)}")
    return power
