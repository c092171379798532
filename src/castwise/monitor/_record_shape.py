"""Check the records of a run when they are read, so that other code can rely on their shape.

A reader converts a JSON value, or raises a `ValueError` with the place and the problem. Entries without a reader, such
as those of a later castwise, are returned unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from castwise.monitor._formats import LOW_PRECISION

Reader: TypeAlias = Callable[[Any], Any]

_NOT_FINITE = {"nan", "inf", "-inf"}
# Exponents of fp64's smallest and largest numbers.
_LOWEST, _HIGHEST = -1074, 1023
LAST_SECOND = 2**34  # in the year 2514: every system can format times before it


def _fail(wanted: str, got: object) -> ValueError:
    spelled = repr(got)
    return ValueError(f"must be {wanted}, got {spelled if len(spelled) <= 60 else f'{spelled[:60]}...'}")


def _number(value: Any) -> float:
    """Read a number. Strings stand for inf and NaN, which JSON lacks."""
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or (isinstance(value, int) and abs(value) >= 2**63)
    ):
        raise _fail("a number, or 'nan', 'inf' or '-inf'", value)
    return value


def _time(value: Any) -> float:
    """Read a time; one before 1970, of a clock that was never set, becomes 0, which every system can format."""
    number = _number(value)
    if not -LAST_SECOND < number < LAST_SECOND:
        raise _fail(f"seconds since 1970, less than {LAST_SECOND}", value)
    return max(0.0, number)


def _positive(value: Any) -> float:
    number = _number(value)
    if not 0.0 < number < math.inf:
        raise _fail("a finite number > 0", value)
    return number


def _integer(lowest: int, below: int = 2**63) -> Reader:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value < below:
            raise _fail(f"an integer >= {lowest}" if below == 2**63 else f"an integer in [{lowest}, {below})", value)
        return value

    return read


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _fail("true or false", value)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _fail("a string", value)
    return value


def _or_null(read: Reader) -> Reader:
    return lambda value: None if value is None else read(value)


def _list(read: Reader) -> Reader:
    def read_all(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise _fail("a list", value)
        return [_at(place, read, each) for place, each in enumerate(value)]

    return read_all


def _by_name(read: Reader) -> Reader:
    def read_all(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _fail("an object", value)
        try:
            return {name: read(each) for name, each in value.items()}
        except ValueError:
            return {name: _at(name, read, each) for name, each in value.items()}  # adds the name to the error

    return read_all


def _fields(readers: Mapping[str, Reader], optional: Mapping[str, Reader] | None = None) -> Reader:
    known = {**readers, **(optional or {})}

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _fail("an object", value)
        missing = [name for name in readers if name not in value]
        if missing:
            raise ValueError(f"lacks {' and '.join(missing)}")
        return {name: _at(name, known[name], each) if name in known else each for name, each in value.items()}

    return read


def _at(where: object, read: Reader, value: Any) -> Any:
    try:
        return read(value)
    except ValueError as error:
        separator = " " if str(error).startswith(("must be", "lacks")) else ": "
        raise ValueError(f"{str(where)[:60]}{separator}{error}") from None


def _exponents(value: Any) -> dict[str, Any]:
    read: dict[str, Any] = _fields({"lowest": _integer(_LOWEST, _HIGHEST + 1), "counts": _list(_integer(0))})(value)
    if read["lowest"] + len(read["counts"]) > _HIGHEST + 1:
        raise _fail(f"at most {_HIGHEST}", read["lowest"] + len(read["counts"]) - 1)
    return read


_ANY_STATS = _fields(
    {
        "numel": _integer(0),
        "largest": _number,
        "smallest": _or_null(_number),
        "zero": _number,
        "nonfinite": _number,
        "exponents": _exponents,
        "formats": _fields(
            {
                name: _fields({"flush": _number, "subnormal": _number, "headroom_bits": _number})
                for name in LOW_PRECISION
            }
        ),
    }
)
_FORMATS = frozenset(LOW_PRECISION)
_FLOATS = {float}


def _stats(value: Any) -> Any:
    """Read statistics of a tensor. A large run has tens of thousands, so plain ones are accepted on a fast path."""
    return value if _are_plain_stats(value) else _ANY_STATS(value)


def _are_plain_stats(value: Any) -> bool:
    """Return True if all fields are surely valid: integers and floats in their places, no strings."""
    try:
        exponents, formats = value["exponents"], value["formats"]
        lowest, counts, numel = exponents["lowest"], exponents["counts"], value["numel"]
        numbers = [value["largest"], value["smallest"], value["zero"], value["nonfinite"]]
        for name in _FORMATS:
            fit = formats[name]
            numbers += (fit["flush"], fit["subnormal"], fit["headroom_bits"])
        return (
            type(numel) is type(lowest) is int
            and type(counts) is list
            and set(map(type, counts)) == {int}
            and min(counts) >= 0
            and max(counts) <= numel < 2**63
            and lowest >= _LOWEST
            and lowest + len(counts) <= _HIGHEST + 1
            and set(map(type, numbers)) == _FLOATS
        )
    except (KeyError, TypeError, IndexError):
        return False


_STEP = _integer(0)
_OPERAND = _fields({"saturated": _number, "flushed": _number, "relative_error": _number, "scale": _list(_number)})
QUANTIZED = _by_name(_fields({"recipe": _text}, dict.fromkeys(("input", "weight", "grad_output"), _OPERAND)))
"""Reads a sample's statistics of layers with 8-bit and 4-bit recipes."""

_KINDS = {
    "run": _fields({"format": _integer(1), "settings": _by_name(lambda value: value)}, {"time": _time}),
    "step": _fields(
        {"step": _STEP},
        {
            "skipped": _flag,
            "scale": _or_null(_number),
            "cause": _or_null(_text),
            "rank": _or_null(_integer(0)),
            "parameters": _or_null(_list(_text)),
            "grad_norm": _or_null(_number),
            "loss": _or_null(_number),
            "seconds": _or_null(_number),
        },
    ),
    "sample": _fields(
        {"step": _STEP, "scale": _positive},
        {
            "grad_norm": _or_null(_number),
            "gradients": _by_name(_stats),
            "modules": _by_name(_stats),
            "activations": _by_name(_stats),
            "weights": _by_name(_fields({"update_to_weight": _number, "lost_in_bf16": _number})),
            "owned": _by_name(_list(_text)),
            "quantized": QUANTIZED,
            "packed": _text,
        },
    ),
    "names": _fields(
        {
            "gradients": _list(_text),
            "owned": _by_name(_list(_text)),
            "activations": _list(_text),
            "weights": _list(_text),
        }
    ),
    "diagnosis": _fields(
        {"step": _STEP, **dict.fromkeys(("cause", "phase", "module", "op", "text", "advice"), _text)},
        {"rank": _or_null(_integer(0)), **dict.fromkeys(("summary", "remedy", "code"), _text)},
    ),
    "lost": _fields({"records": _integer(1)}),
    "alone": _fields({"step": _STEP, "why": _text}),
    "mistake": _fields({**dict.fromkeys(("name", "text", "corrected", "file", "source"), _text), "line": _integer(0)}),
}


def checked(record: object) -> dict[str, Any]:
    """Return a record with numbers instead of `"nan"`, `"inf"` and `"-inf"`. Unknown kinds are returned unchanged.

    Raises:
        ValueError: It is not a record, an entry is missing, or an entry is invalid.
    """
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise ValueError('it is not an object with a "kind"')
    kind = record["kind"]
    read: dict[str, Any] = _at(f"a {kind}", _KINDS[kind], record) if kind in _KINDS else record
    return read
