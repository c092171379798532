"""What became of each step: taken, or skipped and why; told to the host without making it wait for the device.

What an accelerator has found out reaches the host while later steps run, and is looked at exactly `DELAY` updates
later: at a fixed time, so that all ranks do alike what follows from it. On a CPU it is looked at at once.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from castwise._warnings import warn
from castwise.amp import measuring
from castwise.amp.devices import is_capturing
from castwise.amp.gradients import is_plain, params_of, regroup
from castwise.amp.readback import Readback
from castwise.amp.schedules import Schedule
from castwise.amp.unscaling import Facts

DELAY = 2
"""Updates after which the facts of a step are looked at, on an accelerator."""


class Cause(str, Enum):
    """Why a step was skipped."""

    OVERFLOW = "overflow"
    """The loss was finite and gradients were not: the scale was too high, or the backward makes an inf by itself."""
    NONFINITE_LOSS = "non-finite loss"
    """The fault is in the forward or in the data; the scale is innocent."""
    NONFINITE_WEIGHTS = "non-finite weights"
    """Weights hold an inf or NaN: no step mends that."""
    ANOTHER_RANK = "another rank"
    """This rank's loss and gradients were finite."""
    UNKNOWN = "unknown"
    """No loss was given to `scale`: another rank's stage of a pipeline has it, or a CUDA graph."""

    __str__ = str.__str__


_MEANING = {
    Cause.OVERFLOW: "the loss was finite and the gradients were not, so the scale is too high or the backward makes "
    "an inf or NaN by itself",
    Cause.NONFINITE_LOSS: "the loss was not finite, so the forward or the data is at fault, and the scale is innocent",
    Cause.NONFINITE_WEIGHTS: "weights hold an inf or NaN, which no step can mend: go back to a checkpoint",
    Cause.ANOTHER_RANK: "loss and gradients of this rank were finite, those of another one were not",
    Cause.UNKNOWN: "gradients were not finite, and no loss was seen",
}


@dataclass(frozen=True)
class StepFacts:
    """One optimizer's step: what was found, as plain numbers on the host."""

    number: int
    """From 1; counts the calls of `step` with this scaler."""
    optimizer: torch.optim.Optimizer | None
    """None if it is no longer alive."""
    scale: float
    """During the step."""
    skipped: bool
    cause: Cause | None = None
    """None unless it was skipped."""
    parameters: tuple[torch.Tensor, ...] = ()
    """Of a skipped step: those whose gradients were not finite."""
    loss: float | None = None
    """The sum of the losses given to `scale` since the last update, unscaled; None if none was seen."""
    grad_norm: float | None = None
    """That `clip_grad_norm_` has found; None if it was not called."""


class ScaleExhausted(RuntimeError):  # noqa: N818  # it ends a training as StopIteration does a loop
    """The schedule's `patience` is at its end, or the scale has fallen below 1.

    Args:
        message: What happened.
        step: The last skipped step.
    """

    def __init__(self, message: str, step: StepFacts) -> None:
        RuntimeError.__init__(self, message, step)
        self.step = step
        self.diagnosis: object = None
        """What a Monitor with `on_skip="diagnose"` has found out of it."""

    def __str__(self) -> str:
        return str(self.args[0])


class Step(NamedTuple):
    """One optimizer's step as the scaler knows it: tensors."""

    number: int
    optimizer: Callable[[], Any]
    found_inf: torch.Tensor
    facts: Sequence[Facts]
    norm: torch.Tensor | None


class _Pending(NamedTuple):
    number: int
    update: int
    optimizer: Callable[[], Any]
    params: list[torch.Tensor]
    numbers: Readback
    """found_inf, scale before, scale after, loss, norm (NaN: unknown), and 1 for each of `params` that is finite."""
    has_loss: bool
    has_norm: bool


class Outcomes:
    """What became of a scaler's steps, and who is told of it."""

    def __init__(self) -> None:
        self.hooks: OrderedDict[int, Callable[[StepFacts], object]] = OrderedDict()
        self.loss: torch.Tensor | None = None
        self.updates = 0
        self.steps, self.skips, self.skips_in_a_row = 0, 0, 0
        self._has_warned = False
        self._pending: deque[_Pending] = deque()

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many steps there were, how many of them were skipped, and how many in a row; all that are settled."""
        return self.steps, self.skips, self.skips_in_a_row

    @counts.setter
    def counts(self, counts: tuple[int, int, int]) -> None:
        self.steps, self.skips, self.skips_in_a_row = counts
        self._pending.clear()

    def note_loss(self, loss: torch.Tensor) -> None:
        """Add to this iteration's loss, so that a step that is skipped has a cause."""
        if not (loss.is_floating_point() and is_plain(loss)):
            return
        loss = loss.detach()
        if loss.dim() or loss.dtype is not torch.float32:
            loss = loss.sum(dtype=torch.float32)
        if self.loss is None:
            self.loss = loss
        else:
            self.loss = self.loss + loss.to(self.loss.device, non_blocking=True)

    def loss_is_nonfinite(self, like: torch.Tensor) -> torch.Tensor:
        """Return 1 if a loss was seen and it was not finite, else 0: fp32, shape (), on `like`'s device."""
        if self.loss is None:
            return torch.zeros_like(like, dtype=torch.float32)
        return self.loss.isfinite().logical_not().float().to(like.device, non_blocking=True)

    def count(self, found_inf: torch.Tensor) -> bool:
        """Count a step, and say whether there is more to know: if it was skipped, or nobody knows yet, or wants to."""
        self.steps += 1
        if found_inf.device.type != "cpu" or self.hooks:
            return not is_capturing(found_inf)
        if found_inf.item():
            return True
        self.skips_in_a_row = 0
        return False

    def add(self, steps: list[Step], before: torch.Tensor | None, after: torch.Tensor | None) -> None:
        """Take note of the steps of one iteration of which there is more to know.

        Args:
            steps: Those.
            before: The scale while they were taken, which nobody will write to.
            after: The scale now.
        """
        loss, self.loss = self.loss, None
        self.updates += 1
        if before is not None and after is not None:
            self._pending += [_ask_for(step, self.updates, before, after, loss) for step in steps]

    def settle(self, schedule: Schedule, stacklevel: int, *, all_: bool = False) -> None:
        """Look at the facts that are due, tell the hooks, and the user if steps are skipped again and again.

        Args:
            schedule: Says when that is, and how.
            stacklevel: Of the warning, counted from the caller.
            all_: Look at all there are, which waits for the device.

        Raises:
            ScaleExhausted: If the schedule wants it so.
        """
        exhausted: ScaleExhausted | None = None
        while self._pending and (all_ or self._is_due(self._pending[0])):
            facts, after = _facts_of(self._pending.popleft())
            self.skips += facts.skipped
            self.skips_in_a_row = self.skips_in_a_row + 1 if facts.skipped else 0
            message = self._is_exhausted(facts, after, schedule)
            if message and schedule.on_exhausted == "raise":
                exhausted = exhausted or ScaleExhausted(message, facts)
            elif message and not self._has_warned:
                self._has_warned = True
                warn(message, UserWarning, stacklevel + 1)
            for hook in tuple(self.hooks.values()):
                told = hook(facts)
                if exhausted is not None and exhausted.step is facts:
                    exhausted.diagnosis = told or exhausted.diagnosis
        if exhausted is not None:
            raise exhausted

    def _is_due(self, pending: _Pending) -> bool:
        return pending.numbers.is_on_host or self.updates - pending.update >= DELAY

    def _is_exhausted(self, facts: StepFacts, after: float, schedule: Schedule) -> str:
        if not facts.skipped or facts.cause is None:
            return ""
        if self.skips_in_a_row >= schedule.patience:
            what = f"{self.skips_in_a_row} steps in a row were skipped, the last at scale {facts.scale:g}"
        elif after < 1.0 <= facts.scale:
            what = f"the scale has fallen below 1, to {after:g}, after {self.skips_in_a_row} skipped steps in a row"
        else:
            return ""
        where = f" ({len(facts.parameters)} gradients are not finite)" if facts.parameters else ""
        return (
            f"{what}. Cause: {facts.cause}: {_MEANING[facts.cause]}{where}. castwise.diagnose(model, loss_fn, batch, "
            "scaler) names the module and the op"
        )


def _ask_for(step: Step, update: int, before: torch.Tensor, after: torch.Tensor, loss: torch.Tensor | None) -> _Pending:
    dtype, device = measuring.wide(after.device), after.device
    unknown = torch.full((), math.nan, dtype=dtype, device=device)
    numbers = [
        step.found_inf,
        before,
        after,
        unknown if loss is None else loss,
        step.norm if step.norm is not None else unknown,
    ]
    flags = [flags for _, flags in step.facts]
    parts = [number.reshape(1) for number in numbers] + flags
    together = torch.cat([part.to(device=device, dtype=dtype, non_blocking=True) for part in parts])
    params = [param for of_group, _ in step.facts for param in of_group]
    return _Pending(
        step.number, update, step.optimizer, params, Readback(together), loss is not None, step.norm is not None
    )


def _facts_of(pending: _Pending) -> tuple[StepFacts, float]:
    """Return the facts and the scale after the step; waits for the device."""
    found_inf, scale, after, loss, norm, *are_finite = pending.numbers.wait().tolist()
    skipped = found_inf != 0.0
    optimizer = pending.optimizer()
    bad = [param for param, is_finite in zip(pending.params, are_finite, strict=True) if not is_finite]
    facts = StepFacts(
        number=pending.number,
        optimizer=optimizer,
        scale=scale,
        skipped=skipped,
        cause=_cause(optimizer, loss if pending.has_loss else None, bool(bad)) if skipped else None,
        parameters=tuple(bad) if skipped else (),
        loss=loss if pending.has_loss else None,
        grad_norm=norm if pending.has_norm else None,
    )
    return facts, after


def _cause(optimizer: Any, loss: float | None, gradients_are_bad: bool) -> Cause:
    if optimizer is not None and not _are_finite(params_of(optimizer)):
        return Cause.NONFINITE_WEIGHTS
    if loss is None:
        return Cause.UNKNOWN
    if not math.isfinite(loss):
        return Cause.NONFINITE_LOSS
    return Cause.OVERFLOW if gradients_are_bad else Cause.ANOTHER_RANK


@torch.no_grad()
def _are_finite(weights: list[torch.Tensor]) -> bool:
    """Read the weights, of DTensors this rank's part; waits for the device."""
    local = [getattr(weight, "to_local", lambda weight=weight: weight)().detach() for weight in weights]
    local = [torch.view_as_real(weight) if weight.is_complex() else weight for weight in local]
    floats = [weight for weight in local if weight.is_floating_point() and weight.layout is torch.strided]
    return all(
        bool(
            measuring.are_finite(
                tensors, torch.ones((), device=device), torch.promote_types(dtype, torch.float32)
            ).all()
        )
        for (dtype, _, device, _), group in regroup(floats).items()
        if (tensors := [floats[index] for index in group])
    )
