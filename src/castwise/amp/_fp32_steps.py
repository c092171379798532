"""What a scaler and an optimizer that computes its step in fp32 from 16-bit gradients, as `MasterWeights`, agree on."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import torch


class StepsInFP32(Protocol):
    """An optimizer whose `step` converts gradients to fp32, unscales them there, and clips them there.

    The scaler measures norms as if the gradients were in fp32 and never writes to them. For the call of `step` it sets
    `found_inf` and `grad_scale` as for torch's fused optimizers, and after clipping also `grad_factor`.
    """

    _steps_in_fp32: bool  # True; the mark by which a scaler knows such an optimizer
    inner: torch.optim.Optimizer  # which updates the fp32 weights
    grad_factor: torch.Tensor  # only in `step`: multiply by it instead of dividing by `grad_scale`

    def clip_grad_norm_(self, max_norm: float, norm_type: float = ..., error_if_nonfinite: bool = ...) -> torch.Tensor:
        """Clip the gradients of the next step, without a scaler; return their norm."""

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip the elements of the gradients of the next step, without a scaler."""

    def _unrounded_sum(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return the fp32 sum that a parameter's gradient was rounded from; None if it was not or that is not kept."""

    def _clip_once_unscaled(self, *, factor: torch.Tensor | None = ..., clip_value: float = ...) -> None:
        """Clip in the next step, once it has unscaled: multiply by a factor, or limit each element."""

    def _check_not_clipped_by_value(self) -> None:
        """Raise a RuntimeError if gradients are to be limited, which a norm computed now would not include."""


def steps_in_fp32(optimizer: Any) -> TypeGuard[StepsInFP32]:
    """Return True if an optimizer, or the one in its wrapper, follows the protocol."""
    return bool(getattr(optimizer, "_steps_in_fp32", False))
