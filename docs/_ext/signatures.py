"""Readable signatures: defaults are shown as values, and enums and records have no signature."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import re
from typing import Any

import torch
from sphinx.application import Sphinx

from castwise.monitor._records import JsonObject

_FLOAT = re.compile(r"(?<== )\d+\.\d+(e[+-]?\d+)?(?=[,)])")
_CONSTANT = re.compile(r"(?<== )(_?[A-Z][A-Z0-9_]*|\d+ << \d+)(?=[,)])")


def as_written(signature: str, found: Any) -> str:
    """Replace defaults that are constants or dataclass factories with their values.

    `init_scale: float = INIT_SCALE` becomes `init_scale: float = 2.0**16`.
    """
    for field in dataclasses.fields(found) if inspect.isclass(found) and dataclasses.is_dataclass(found) else ():
        if field.default_factory is not dataclasses.MISSING:
            signature = signature.replace("<factory>", repr(field.default_factory()), 1)
    function = inspect.unwrap(found.__init__ if inspect.isclass(found) else found)
    names = dict(getattr(function, "__globals__", {}))
    signature = _CONSTANT.sub(lambda match: repr(eval(match[1], names)), signature)
    return _FLOAT.sub(lambda match: spelled(float(match[0])), signature)


def spelled(value: float) -> str:
    """Spell a float as users write it: powers of two and the largest fp32 number by their definition."""
    if value == float(torch.finfo(torch.float32).max):
        return "torch.finfo(torch.float32).max"
    mantissa, exponent = math.frexp(value)
    return f"2.0**{exponent - 1}" if mantissa == 0.5 and abs(exponent) > 8 else repr(value)


def _processed(
    app: Sphinx, what: str, name: str, found: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    if inspect.isclass(found) and issubclass(found, (enum.Enum, JsonObject)):  # of records, users only read attributes
        return "", None
    return signature and as_written(signature, found), returns


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the handler."""
    app.connect("autodoc-process-signature", _processed)
    return {"parallel_read_safe": True}
