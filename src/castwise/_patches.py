"""Which code runs in torch's layers: torch's own, or a patch of the class or of the op that it calls.

A class may be patched before castwise is imported, and at any time after it.
"""

from __future__ import annotations

import sys
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

from torch import nn
from torch.nn import functional

OPS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    **{getattr(nn, f"Conv{n}d"): f"conv{n}d" for n in (1, 2, 3)},
    **{getattr(nn, f"ConvTranspose{n}d"): f"conv_transpose{n}d" for n in (1, 2, 3)},
}
"""The layers that `parts_of` knows, with the function of `torch.nn.functional` that gets their weight and bias."""


class Part(NamedTuple):
    """Code that the forward of a layer runs: a method of its class, or the op.

    Args:
        owner: The class, or `torch.nn.functional`.
        name: The name of its attribute.
        code: The value of the attribute.
    """

    owner: Any
    name: str
    code: Any

    @property
    def is_current(self) -> bool:
        """Whether the attribute still has this value."""
        return getattr(self.owner, self.name, None) is self.code

    @property
    def is_torchs(self) -> bool:
        """Whether it is torch's own: for a method, a plain function from the file of the class."""
        if self.owner is functional:
            return isinstance(self.code, BuiltinFunctionType)
        # `functools.wraps` copies `__module__`, `__name__` and `__wrapped__`, but not the code.
        file = getattr(sys.modules.get(self.owner.__module__), "__file__", None)
        return type(self.code) is FunctionType and self.code.__code__.co_filename == file


def parts_of(kind: type[nn.Module]) -> list[Part]:
    """Return the code that the forward of a kind of layer in `OPS` runs.

    Example:
        >>> [part.name for part in parts_of(nn.Linear)]
        ['forward', 'linear']
    """
    called = getattr(getattr(kind.forward, "__code__", None), "co_names", ())
    names = ["forward", *(name for name in called if callable(getattr(kind, name, None)))]
    return [
        Part(owner, name, getattr(owner, name))
        for owner, name in [*((kind, n) for n in names), (functional, OPS[kind])]
    ]


def patch_of(kind: type[nn.Module], name: str | None = None) -> str | None:
    """Return what was patched in a kind of layer in `OPS`, and by which module; None if the code is torch's own.

    Args:
        kind: The kind of layer.
        name: The part to look at; None for all.
    """
    for part in parts_of(kind):
        if not part.is_torchs and name in (None, part.name):
            owner = "nn.functional" if part.owner is functional else f"nn.{kind.__name__}"
            # A wrapper may have the `__module__` of the function that it wraps, but it has its own globals.
            module = getattr(part.code, "__globals__", {}).get("__name__", type(part.code).__name__)
            return f"{owner}.{part.name} was replaced by {module}"
    return None
