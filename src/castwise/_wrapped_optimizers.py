"""Optimizers that a framework has wrapped in its own object."""

from __future__ import annotations

from typing import Any


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that steps, which wrappers of Lightning, Accelerate and DeepSpeed keep in `.optimizer`.

    A `step` that runs the hooks of optimizers is its own, and none that only passes the call on: an optimizer that is
    made of another one, as Lookahead is, stays as it is. So does one that is inside itself.
    """
    inner, passed = optimizer, [optimizer]
    while not _runs_hooks(inner) and getattr(inner, "optimizer", None) is not None:
        inner = inner.optimizer
        if any(inner is each for each in passed):
            return optimizer
        passed.append(inner)
    return inner


def _runs_hooks(optimizer: object) -> bool:
    return bool(getattr(getattr(type(optimizer), "step", None), "hooked", False))  # torch marks those that do
