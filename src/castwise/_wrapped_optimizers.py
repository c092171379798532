"""Optimizers that a framework has wrapped in an object of another class."""

from __future__ import annotations

from typing import Any


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of Lightning, Accelerate and DeepSpeed, which keep it in `.optimizer`.

    torch's `PostLocalSGDOptimizer` keeps it in `.optim`.

    An object whose `step` runs optimizer hooks is an optimizer, not a wrapper, even if it contains another optimizer
    (as Lookahead does), and is returned as it is. So is an object whose chain of wrappers loops.
    """
    inner, passed = optimizer, [optimizer]
    while not runs_hooks(inner):
        wrapped = getattr(inner, "optimizer", None)
        wrapped = getattr(inner, "optim", None) if wrapped is None else wrapped
        if wrapped is None:
            break
        inner = wrapped
        if any(inner is wrapper for wrapper in passed):
            return optimizer
        passed.append(inner)
    return inner


def runs_hooks(optimizer: object) -> bool:
    """Return True if the `step` of an object runs the hooks of an optimizer, which wrappers leave to their own."""
    return bool(getattr(getattr(type(optimizer), "step", None), "hooked", False))  # torch sets this mark
