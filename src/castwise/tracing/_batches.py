"""How a batch becomes the arguments of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Batch = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments for calling a model with a batch.

    Args:
        batch: A tensor, a tuple of positional arguments, or a mapping of keyword arguments.

    Raises:
        TypeError: The batch is something else.

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
        "batch must be a tensor, a tuple of positional arguments, or a dict of keyword arguments, "
        f"got {type(batch).__name__}"
    )
