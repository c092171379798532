"""`StepCheck`: look at the gradients and the losses of each step before an optimizer takes it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from castwise._torch_private import stored_values
from castwise.amp._gradients import params_of
from castwise.amp._outcomes import Cause, StepFacts
from castwise.amp._readback import Readback
from castwise.diagnosis._backward_calls import BACKWARD_CALLS

_kind_of = operator.attrgetter("device", "dtype", "layout", "__class__")


@dataclass(frozen=True)
class Checked:
    """The check of a step before it is taken.

    Args:
        cause: Why a loss or gradients are not finite; None if all are finite.
        has_nonfinite_gradients: Whether the step would spoil weights.
        loss: The sum of the losses since the previous step, without those left out; None if no `backward` was seen.
        grad_norm: The norm of all gradients, before they were clipped.
        parameters: The parameters whose gradients are not finite.
        is_skipped: Whether the step is skipped for it.
        follows_earlier_fault: Whether an earlier fault has spoilt the weights.
        left_out: Whether this one is finite, and the script has left out a step before it with a loss that is not.
    """

    cause: Cause | None = None
    has_nonfinite_gradients: bool = False
    loss: float | None = None
    grad_norm: float | None = None
    parameters: tuple[torch.Tensor, ...] = ()
    is_skipped: bool = False
    follows_earlier_fault: bool = False
    left_out: bool = False

    def added_to(self, facts: StepFacts) -> StepFacts:
        """Return the facts of a step with those of this check."""
        return replace(
            facts,
            skipped=self.is_skipped,
            cause=self.cause,
            parameters=self.parameters,
            loss=self.loss,
            grad_norm=self.grad_norm,
        )


class LateCheck:
    """A check whose result is on an accelerator.

    Args:
        gradients: Not finite if a gradient is not; fp32, shape ().
        losses: fp32, shape (); the loss, and the loss without those that the script may have left out. Empty if no
            `backward` was seen.
    """

    def __init__(self, gradients: torch.Tensor, losses: Sequence[torch.Tensor]) -> None:
        self._numbers = Readback(torch.stack([gradients, *(loss.to(gradients.device) for loss in losses)]))

    def wait(self) -> Checked:
        """Wait for the device."""
        norm, *losses = self._numbers.wait().tolist()
        is_finite = math.isfinite(norm)
        loss = losses[-1 if is_finite and not math.isfinite(losses[0]) else 0] if losses else None
        return Checked(_cause(is_finite, loss), not is_finite, loss, norm)


class StepCheck:
    """Looks at the gradients and losses of steps without a scaler.

    The norm that `clip_grad_norm_` has computed is enough if it is finite. Otherwise each gradient is read once. Of
    gradients that are split over ranks, this rank's part is read, so no rank waits for another.
    """

    def begin(self) -> None:
        """Start to read losses and norms."""
        BACKWARD_CALLS.follow()

    def end(self) -> None:
        """Stop."""
        BACKWARD_CALLS.leave()

    def check(self, optimizer: torch.optim.Optimizer) -> Checked:
        """Check the step that an optimizer is about to take. Waits for an accelerator."""
        params, gradients = _params_and_gradients(optimizer)
        losses = [loss.item() for loss in _losses()]
        loss = losses[0] if losses else None
        bad: tuple[torch.Tensor, ...] = ()
        clipped_norm = BACKWARD_CALLS.norm_of(params)
        norm = _norm_on_host(gradients) if clipped_norm is None else _local(clipped_norm).item()
        if not math.isfinite(norm):  # a norm may also overflow alone
            bad = tuple(param for param in params if param.grad is not None and not _is_finite(param.grad))
        left_out = len(losses) > 1 and not bad and not math.isfinite(losses[0])
        loss = losses[-1] if left_out else loss
        cause = _cause(not bad, loss)
        if cause is not None and not all(map(_is_finite, params)):
            cause = Cause.NONFINITE_WEIGHTS
        is_dtensor = any(hasattr(kind, "to_local") for kind in set(map(type, params)))  # then it is this rank's part's
        return Checked(cause, bool(bad), loss, None if is_dtensor else norm, bad, left_out=left_out and cause is None)

    def check_late(self, optimizer: torch.optim.Optimizer) -> LateCheck:
        """Start to check a step on an accelerator, without waiting for it."""
        return LateCheck(_norm(_params_and_gradients(optimizer)[1]), _losses())


def _params_and_gradients(optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters that have a gradient, and the gradients."""
    params = [param for param in params_of(optimizer) if param.grad is not None]
    return params, [param.grad for param in params]  # type: ignore[misc]  # none is None


def _losses() -> list[torch.Tensor]:
    """Return the sum of the losses since the previous step, and without those of steps that the script has left out.

    One sum if there are no such; none if there are no losses. fp32, shape (), on the device of the first loss.
    """
    losses, left_out = BACKWARD_CALLS.losses, BACKWARD_CALLS.left_out
    return [_sum_of(losses[start:]) for start in sorted({0, left_out})] if losses else []


def _sum_of(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    first = losses[0].reshape(()).float()
    return sum((loss.reshape(()).float().to(first.device) for loss in losses[1:]), first)


def _cause(gradients_are_finite: bool, loss: float | None) -> Cause | None:
    if loss is not None and not math.isfinite(loss):
        return Cause.NONFINITE_LOSS
    if gradients_are_finite:
        return None
    return Cause.UNKNOWN if loss is None else Cause.NONFINITE_GRADIENTS


def _norms(gradients: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the norm of each gradient, shape (), finite if the gradient is, unless it overflows itself."""
    kinds = set(map(_kind_of, gradients))
    if len(kinds) == 1 and next(iter(kinds))[2:] == (torch.strided, torch.Tensor):
        return _norms_of_group(gradients)
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in map(_local, gradients):
        if gradient.numel():
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return [norm for group in groups.values() for norm in _norms_of_group(group)]


def _norms_of_group(gradients: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    wide = torch.float32 if gradients[0].dtype is torch.float16 else None  # fp16 holds no norm above 65504
    return torch._foreach_norm(gradients, 2, wide)


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients, fp32, shape ()."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for norm in _norms(gradients):
        by_kind.setdefault((norm.device, norm.dtype), []).append(norm)
    norms: list[torch.Tensor] = [torch.linalg.vector_norm(torch.stack(of_kind)).float() for of_kind in by_kind.values()]
    if not norms:
        return torch.zeros(())
    return (
        norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    )


def _norm_on_host(gradients: list[torch.Tensor]) -> float:
    """Return the norm of all gradients. Waits for an accelerator."""
    if gradients and gradients[0].device.type != "cpu":
        return float(_norm(gradients))
    return math.hypot(*map(torch.Tensor.item, _norms(gradients)))  # faster than to stack as many small tensors


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(_local(tensor).isfinite().all())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, the stored values of a sparse tensor, any other tensor itself."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout is torch.sparse_coo:
        return stored_values(tensor)
    return tensor
