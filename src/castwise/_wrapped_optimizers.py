"""Optimizers that a framework has wrapped in an object of another class."""

from __future__ import annotations

from typing import Any


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of Lightning, Accelerate and DeepSpeed, which keep it in `.optimizer`.

    An object whose `step` runs optimizer hooks is an optimizer, not a wrapper, even if it contains another optimizer
    (as Lookahead does), and is returned as it is. So is an object whose chain of wrappers loops.
    """
    inner, passed = optimizer, [optimizer]
    while not _runs_hooks(inner) and getattr(inner, "optimizer", None) is not None:
        inner = inner.optimizer
        if any(inner is wrapper for wrapper in passed):
            return optimizer
        passed.append(inner)
    return inner


def _runs_hooks(optimizer: object) -> bool:
    return bool(getattr(getattr(type(optimizer), "step", None), "hooked", False))  # torch sets this mark
