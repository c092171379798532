"""The outcome of each step (taken, or skipped and why), reported without making the host wait for the device.

Results from an accelerator reach the host while later steps run, and are read exactly `DELAY` updates later, so that
all ranks react to them at the same time. Results from a CPU are read at once.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from castwise._warnings import warn
from castwise.amp import _measure as measure
from castwise.amp._devices import is_capturing
from castwise.amp._gradients import params_of
from castwise.amp._readback import DELAY, Readback
from castwise.amp._schedules import Schedule

if TYPE_CHECKING:
    from castwise.amp._iteration import OptimizerRecord, ScalerIteration

_TOGETHER = 16  # steps whose results are sent together if no hook waits for them, as each transfer takes several ops


class Cause(str, Enum):
    """Why a step was skipped."""

    OVERFLOW = "overflow"
    """The loss was finite but gradients were not: the scale was too high, or the backward itself produces an inf."""
    NONFINITE_GRADIENTS = "non-finite gradients"
    """The same without a scale, so the backward itself produces an inf or NaN. No scaler reports it."""
    NONFINITE_LOSS = "non-finite loss"
    """The fault is in the forward or in the data; the scale is not the cause."""
    NONFINITE_WEIGHTS = "non-finite weights"
    """Weights contain an inf or NaN, which no step can repair."""
    ANOTHER_RANK = "another rank"
    """This rank's loss and gradients were finite, but another rank's were not."""
    UNKNOWN = "unknown"
    """No loss was seen in `scale`, because it is in another rank's pipeline stage or in a CUDA graph. Or one of several
    losses was not finite, and only some of several optimizers were skipped."""

    __str__ = str.__str__


_MEANING = {
    Cause.OVERFLOW: "the loss was finite but the gradients were not, so the scale is too high or the backward itself "
    "produces an inf or NaN",
    Cause.NONFINITE_GRADIENTS: "the loss was finite but the gradients were not, so the backward produces an inf or NaN",
    Cause.NONFINITE_LOSS: "the loss was not finite, so the forward or the data is at fault; the scale is not the cause",
    Cause.NONFINITE_WEIGHTS: "weights contain an inf or NaN, which no step can repair: go back to a checkpoint",
    Cause.ANOTHER_RANK: "this rank's loss and gradients were finite, but another rank's were not",
    Cause.UNKNOWN: "gradients were not finite, and it is not known whether the loss was",
}


_WHERE = "castwise.diagnose(model, loss_fn, batch, scaler) finds the origin"


@dataclass(frozen=True)
class StepFacts:
    """The outcome of one optimizer's step, as plain numbers on the host."""

    number: int
    """The number of the step, from 1; counts the calls of `step` with this scaler."""
    optimizer: torch.optim.Optimizer | None
    """The optimizer; None if it no longer exists."""
    scale: float
    """The scale during the step."""
    skipped: bool
    """Whether a gradient was not finite, or would not have been once unscaled."""
    cause: Cause | None = None
    """Why the step was skipped, or would have been: None unless a loss or a gradient was not finite."""
    parameters: tuple[torch.Tensor, ...] = ()
    """The parameters whose gradients were not finite."""
    loss: float | None = None
    """The sum of the losses given to `scale` since the last update, unscaled; None if there were none, or if another
    optimizer's loss was not finite."""
    grad_norm: float | None = None
    """The norm from `clip_grad_norm_`; None if it was not called."""
    iteration: int = 0
    """`GradScaler.iteration` at the step: from 1, counts the calls of `update`."""


class ScaleExhausted(RuntimeError):  # noqa: N818  # it ends a training run as StopIteration does a loop
    """The schedule's `patience` is exhausted, or the scale has fallen below 1.

    Args:
        message: What happened.
        step: The last skipped step.
    """

    __module__ = "castwise"  # where users find it, as a traceback shows it

    def __init__(self, message: str, step: StepFacts) -> None:
        RuntimeError.__init__(self, message, step)
        self.step = step
        self.diagnosis: object = None
        """The diagnosis from a step hook, such as that of a Monitor with `on_nonfinite="diagnose"`."""

    def __str__(self) -> str:
        return f"{self.args[0]}. {_WHERE if self.diagnosis is None else self.diagnosis}"


@dataclass(slots=True)
class _Pending:
    """A step whose outcome the host does not know yet."""

    number: int
    update: int
    optimizer: Callable[[], Any]
    found_inf: torch.Tensor
    least: torch.Tensor
    """The smallest found_inf of the iteration's steps."""
    scale: torch.Tensor
    """The scale during the step."""
    loss: torch.Tensor | None
    has_several_losses: bool
    norm: torch.Tensor | None
    params: list[torch.Tensor]
    norms: list[torch.Tensor]
    """One for each of `params`: not finite if its gradient is not."""
    numbers: Readback | None = None
    """All of these and the scale after the step, for this and other steps, once the transfer to the host has begun."""
    place: slice = field(default_factory=lambda: slice(0))
    """Where this step's are among them."""
    sent_at: int = 0
    ends_streak: bool = False
    """Whether the optimizer's next step is known to be finite, which may be known before this one is."""


class Outcomes:
    """Collects the results of a scaler's steps and reports them to hooks and schedulers."""

    def __init__(self) -> None:
        self.hooks: OrderedDict[int, Callable[[StepFacts], object]] = OrderedDict()
        self.updates = 0
        self.steps, self.skips = 0, 0
        self._streaks: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._first_streak = 0
        self._has_warned = False
        self._diagnosis: object = None
        """The last value that a hook has returned since a step was taken."""
        self.pending: deque[_Pending] = deque()
        """Steps whose outcome the host does not know yet."""
        self._scale: torch.Tensor | None = None

    @property
    def counts(self) -> tuple[int, int, int]:
        """The number of steps, the number of known skips, and the longest current run of skips of one optimizer."""
        return self.steps, self.skips, max(self._streaks.values(), default=self._first_streak)

    @counts.setter
    def counts(self, counts: tuple[int, int, int]) -> None:
        """Continue from these counts, and forget pending results."""
        self.steps, self.skips, self._first_streak = counts
        self._streaks.clear()
        self.pending.clear()

    def _streak(self, optimizer: Any, is_skipped: bool) -> int:
        """Count one more step of an optimizer, and return how many of its last steps in a row were skipped."""
        try:
            before = self._streaks.get(optimizer, self._first_streak)
            self._streaks[optimizer] = before + 1 if is_skipped else 0
            return self._streaks[optimizer]
        except TypeError:  # it is dead, or cannot be hashed or referenced weakly
            return 0

    def _end_streak(self, optimizer: Any) -> None:
        """Record that a step was finite: after the pending steps before it, if there are any."""
        for pending in reversed(self.pending):
            if pending.optimizer() is optimizer:
                pending.ends_streak = True
                return
        self._streak(optimizer, is_skipped=False)

    def wants(self, step: OptimizerRecord) -> bool:
        """Return True if a step has to be reported: it was or may have been skipped, or there are hooks."""
        if step.step_taken and not self.hooks:
            return False
        return not any(map(is_capturing, step.found_inf_per_device.values()))

    def add(
        self,
        steps: list[OptimizerRecord],
        scale_before: torch.Tensor | None,
        scale: torch.Tensor | None,
        iteration: ScalerIteration,
    ) -> None:
        """Record the steps of one iteration.

        Args:
            steps: In the order in which they began.
            scale_before: The scale during the steps, in a tensor that is never written to; None if no step has to be
                reported.
            scale: The scale now.
            iteration: The iteration, for its losses.
        """
        self.updates += 1
        loss = None if scale_before is None else iteration.loss(scale_before.device)
        for index, step in enumerate(steps):
            self.steps += 1
            if scale_before is not None and scale is not None and self.wants(step):
                found_infs = [measure.combine(other.found_inf_per_device.values(), scale) for other in steps]
                self.pending.append(
                    _Pending(
                        self.steps,
                        self.updates,
                        step.info.optimizer,
                        found_infs[index],
                        found_infs[0] if len(steps) == 1 else torch.stack(found_infs).amin(),
                        scale_before,
                        loss,
                        len(iteration.seen_losses()) > 1,
                        step.norm,
                        [param for of_group, _ in step.nonfinite_markers for param in of_group],
                        [norm for _, norms in step.nonfinite_markers for norm in norms],
                    )
                )
                self._scale = scale
            elif self.pending or self._streaks or self._first_streak:
                self._end_streak(step.optimizer)

    def settle(self, schedule: Schedule, *, ranks_agree: bool, all_: bool = False) -> None:
        """Read the results that are due, call the hooks, and warn or raise if too many steps in a row are skipped.

        Args:
            schedule: Its `patience` and `on_exhausted` apply.
            ranks_agree: Whether steps are also skipped because of other ranks.
            all_: Read all results, which waits for the device.

        Raises:
            ScaleExhausted: The schedule's `on_exhausted` is "raise".
        """
        exhausted: ScaleExhausted | None = None
        self._send(all_=all_)
        while self.pending and (all_ or self._is_due(self.pending[0])):
            pending = self.pending.popleft()
            facts, after = _facts_of(pending, ranks_agree=ranks_agree)
            self.skips += facts.skipped
            message = _exhaustion(facts, after, self._streak(facts.optimizer, facts.skipped), schedule)
            if pending.ends_streak:
                self._streak(facts.optimizer, is_skipped=False)
            if message and schedule.on_exhausted == "raise":
                exhausted = exhausted or ScaleExhausted(message, facts)
            self._diagnosis = self._diagnosis if facts.skipped else None
            for hook in tuple(self.hooks.values()):
                diagnosis = hook(facts)
                self._diagnosis = self._diagnosis if diagnosis is None else diagnosis
            if exhausted is not None and exhausted.step is facts:
                exhausted.diagnosis = self._diagnosis
            elif message and exhausted is None and not self._has_warned:
                self._has_warned = True
                warn(f"{message}. {_WHERE if self._diagnosis is None else self._diagnosis}", UserWarning)
        if exhausted is not None:
            raise exhausted

    def _send(self, *, all_: bool) -> None:
        """Send results to the host: at once on a CPU or if there are hooks, else for several steps together."""
        waiting = [pending for pending in self.pending if pending.numbers is None]
        if not waiting or self._scale is None:
            return
        if not (all_ or self.hooks or self._scale.device.type == "cpu" or len(waiting) >= _TOGETHER):
            return
        scale_after, later = self._scale, None
        together: list[torch.Tensor] = []  # one transfer, because each takes several launches
        for pending in reversed(waiting):
            if later is not None and later.update != pending.update:
                scale_after = later.scale
            later = pending
            known = [pending.found_inf, pending.least, pending.scale, scale_after]
            known += [number for number in (pending.loss, pending.norm) if number is not None]
            pending.place = slice(len(together), len(together) + len(known) + len(pending.norms))
            together += [part.to(self._scale.device, non_blocking=True).reshape(1) for part in [*known, *pending.norms]]
        numbers = Readback(torch.cat(together))
        for pending in waiting:
            pending.numbers, pending.sent_at = numbers, self.updates

    def _is_due(self, pending: _Pending) -> bool:
        if pending.numbers is None:
            return False
        return pending.numbers.is_on_host or self.updates - pending.sent_at >= DELAY


def _exhaustion(facts: StepFacts, after: float, streak: int, schedule: Schedule) -> str:
    """Return the message after so many skips in a row; empty if there is nothing to report."""
    if facts.cause is None:
        return ""
    if streak >= schedule.patience:
        what = f"the last {_several(streak, 'step')} skipped, the last one at scale {facts.scale:g}"
    elif after < 1.0 <= facts.scale:
        what = f"the scale has fallen below 1, to {after:g}, and the last {_several(streak, 'step')} skipped"
    else:
        return ""
    where = f" ({_several(len(facts.parameters), 'gradient')} not finite)" if facts.parameters else ""
    return f"{what}. Cause: {facts.cause}: {_MEANING[facts.cause]}{where}"


def _several(count: int, noun: str) -> str:
    return f"{noun} was" if count == 1 else f"{count} {noun}s were"


def _facts_of(pending: _Pending, *, ranks_agree: bool) -> tuple[StepFacts, float]:
    """Return the facts and the scale after the step; waits for the device."""
    assert pending.numbers is not None
    found_inf, least, scale, after, *numbers = pending.numbers.wait()[pending.place].tolist()
    loss = numbers.pop(0) if pending.loss is not None else math.nan
    norm = numbers.pop(0) if pending.norm is not None else None
    skipped = found_inf != 0.0
    # With several losses and optimizers, and finite gradients in some, the loss may be another optimizer's.
    is_its_loss = pending.loss is not None and (least != 0.0 or not pending.has_several_losses)
    optimizer = pending.optimizer()
    bad = [param for param, norm_of in zip(pending.params, numbers, strict=True) if not math.isfinite(norm_of)]
    facts = StepFacts(
        number=pending.number,
        optimizer=optimizer,
        scale=scale,
        skipped=skipped,
        cause=_cause(optimizer, loss, bool(bad), is_its_loss, ranks_agree) if skipped else None,
        parameters=tuple(bad) if skipped else (),
        # If the sum is not finite although this step's gradients are, it includes another optimizer's loss.
        loss=loss if pending.loss is not None and (skipped or is_its_loss or math.isfinite(loss)) else None,
        grad_norm=norm,
        iteration=pending.update,
    )
    return facts, after


def _cause(optimizer: Any, loss: float, gradients_are_bad: bool, is_its_loss: bool, ranks_agree: bool) -> Cause:
    """Return why a step was skipped; a loss of NaN may stand for an unknown one."""
    if not math.isfinite(loss) and optimizer is not None and not _are_finite(optimizer):
        return Cause.NONFINITE_WEIGHTS
    if not math.isfinite(loss):
        return Cause.NONFINITE_LOSS if is_its_loss else Cause.UNKNOWN
    return Cause.ANOTHER_RANK if ranks_agree and not gradients_are_bad else Cause.OVERFLOW


def _are_finite(optimizer: Any) -> bool:
    """Return True if the weights that an optimizer trains are finite on this rank; waits for the device."""
    weights = [param for param in params_of(optimizer) if param.requires_grad]
    return all(bool(flags.all()) for _, flags in measure.local_flags(weights, weights))
