"""Which region a model that Accelerate has prepared runs in."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def region_of_forward(model: nn.Module) -> Any:
    """The region that a prepared model's forward runs in: what a decorated function was decorated with."""
    forward = model.forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
        forward = getattr(forward, "model_forward", forward)  # Accelerate's conversion of outputs
        variables = inspect.getclosurevars(forward).nonlocals if inspect.isfunction(forward) else {}
        if "autocast_instance" in variables:
            return variables["autocast_instance"]
    return None
