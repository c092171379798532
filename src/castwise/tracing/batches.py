"""A batch, as a model is given it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Batch = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that a model is called with.

    Args:
        batch: A tensor, a tuple of positional arguments, or a mapping of keyword arguments.

    Raises:
        TypeError: It is something else.

    Example:
        >>> arguments_of((1, 2)), arguments_of({"x": 1})
        (((1, 2), {}), ((), {'x': 1}))
    """
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    raise TypeError(
        "batch must be a tensor, a tuple of positional or a dict of keyword arguments of the model, "
        f"got {type(batch).__name__}"
    )
