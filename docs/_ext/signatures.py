"""Readable signatures: defaults are shown as values, and enums have no signature."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from typing import Any

from sphinx.application import Sphinx

_CONSTANT = re.compile(r"(?<== )(_?[A-Z][A-Z0-9_]*|\d+ << \d+)(?=[,)])")


def as_written(signature: str, found: Any) -> str:
    """Replace defaults that are constants or dataclass factories with their values.

    `init_scale: float = INIT_SCALE` becomes `init_scale: float = 65536.0`.
    """
    for field in dataclasses.fields(found) if inspect.isclass(found) and dataclasses.is_dataclass(found) else ():
        if field.default_factory is not dataclasses.MISSING:
            signature = signature.replace("<factory>", repr(field.default_factory()), 1)
    function = inspect.unwrap(found.__init__ if inspect.isclass(found) else found)
    names = dict(getattr(function, "__globals__", {}))
    return _CONSTANT.sub(lambda match: repr(eval(match[1], names)), signature)


def _processed(
    app: Sphinx, what: str, name: str, found: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    if inspect.isclass(found) and issubclass(found, enum.Enum):
        return "", None
    return signature and as_written(signature, found), returns


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the handler."""
    app.connect("autodoc-process-signature", _processed)
    return {"parallel_read_safe": True}
