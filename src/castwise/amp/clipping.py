"""The arithmetic of clipping gradients by their norm."""

from __future__ import annotations

import math

import torch

from castwise.amp.checks import real_number


def check_bound(name: str, value: object) -> float:
    """Return the bound as a float; raise unless it is a number >= 0 (inf clips nothing)."""
    bound = real_number(name, value)
    if not bound >= 0.0:
        raise ValueError(f"{name} must be a number >= 0, got {value!r}")
    return bound


def check_norm_type(value: object) -> float:
    """Return p as a float; raise unless it is a number > 0, or inf."""
    norm_type = math.inf if value == "inf" else real_number("norm_type", value)
    if not norm_type > 0.0:
        raise ValueError(f"norm_type must be a number > 0 or inf, got {value!r}")
    return norm_type


def coefficient(
    total_norm: torch.Tensor, max_norm: float, found_inf: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return min(1, max_norm / (total_norm + 1e-6)) in fp32, or 1 if a gradient is not finite; and found_inf.

    The formula is that of `torch.nn.utils.clip_grad_norm_`. Gradients are multiplied by it and by `factor` (fp32, one
    element) at once. If fp32 has no normal number for the product they count as not finite: the scale is too large.
    """
    ratio = (max_norm / (total_norm + 1e-6)).clamp(max=1.0).float()
    if max_norm > 0.0:
        found_inf = torch.maximum(found_inf, (ratio * factor < torch.finfo(torch.float32).tiny).float())
    return torch.where(found_inf != 0, torch.ones_like(ratio), ratio), found_inf
