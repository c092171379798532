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
from weakref import WeakKeyDictionary

import torch

from castwise._warnings import warn
from castwise.amp import unscaling
from castwise.amp.devices import is_capturing
from castwise.amp.gradients import is_plain, params_of
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
    """No loss was given to `scale`: another rank's stage of a pipeline has it, or a CUDA graph. Or one of several
    losses was not finite, and of several optimizers only some were skipped."""

    __str__ = str.__str__


_MEANING = {
    Cause.OVERFLOW: "the loss was finite and the gradients were not, so the scale is too high or the backward makes "
    "an inf or NaN by itself",
    Cause.NONFINITE_LOSS: "the loss was not finite, so the forward or the data is at fault, and the scale is innocent",
    Cause.NONFINITE_WEIGHTS: "weights hold an inf or NaN, which no step can mend: go back to a checkpoint",
    Cause.ANOTHER_RANK: "loss and gradients of this rank were finite, those of another one were not",
    Cause.UNKNOWN: "gradients were not finite, and it is not known whether their loss was",
}


_WHERE = "castwise.diagnose(model, loss_fn, batch, scaler) says where it comes from"


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
    """Whether a gradient was not finite, or would not have been once it was unscaled."""
    cause: Cause | None = None
    """None unless it was skipped."""
    parameters: tuple[torch.Tensor, ...] = ()
    """Of a skipped step: those whose gradients were not finite."""
    loss: float | None = None
    """The sum of the losses given to `scale` since the last update, unscaled; None if none was seen."""
    grad_norm: float | None = None
    """That `clip_grad_norm_` has found; None if it was not called."""
    iteration: int = 0
    """What `GradScaler.iteration` was: from 1, counts the calls of `update`."""


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
        return f"{self.args[0]}. {_WHERE if self.diagnosis is None else self.diagnosis}"


class Step(NamedTuple):
    """One optimizer's step as the scaler knows it: tensors."""

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
    """found_inf, the least one of the iteration's steps, scale before, scale after, loss, norm (NaN: unknown), and 1
    for each of `params` that is finite."""
    has_loss: bool
    has_several_losses: bool
    has_norm: bool


class Outcomes:
    """What became of a scaler's steps, and who is told of it."""

    def __init__(self) -> None:
        self.hooks: OrderedDict[int, Callable[[StepFacts], object]] = OrderedDict()
        self.loss: torch.Tensor | None = None
        self.has_several_losses = False
        self.updates = 0
        self.steps, self.skips = 0, 0
        self._streaks: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._first_streak = 0
        self._has_warned = False
        self._pending: deque[_Pending] = deque()

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many steps there were, how many skipped ones are known of, and how many of an optimizer in a row."""
        return self.steps, self.skips, max(self._streaks.values(), default=self._first_streak)

    @counts.setter
    def counts(self, counts: tuple[int, int, int]) -> None:
        """Count on from these numbers, and forget what is still on its way."""
        self.steps, self.skips, self._first_streak = counts
        self._streaks.clear()
        self._pending.clear()

    def _streak(self, optimizer: Any, is_skipped: bool) -> int:
        """Return how many steps of an optimizer in a row were skipped, now that it is known of one more."""
        try:
            before = self._streaks.get(optimizer, self._first_streak)
            self._streaks[optimizer] = before + 1 if is_skipped else 0
            return self._streaks[optimizer]
        except TypeError:  # it is dead, or cannot be hashed or referenced weakly
            return 0

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
            self.has_several_losses = True
            self.loss = self.loss + loss.to(self.loss.device, non_blocking=True)

    def loss_is_nonfinite(self, like: torch.Tensor) -> torch.Tensor:
        """Return 1 if a loss was seen and it was not finite, else 0: fp32, shape (), on `like`'s device."""
        if self.loss is None:
            return torch.zeros_like(like, dtype=torch.float32)
        return self.loss.isfinite().logical_not().float().to(like.device, non_blocking=True)

    def wants(self, step: Step) -> bool:
        """Say whether there is more to know of a step: if it was skipped, or nobody knows yet, or somebody listens."""
        if step.found_inf.device.type != "cpu" or self.hooks:
            return not is_capturing(step.found_inf)
        return bool(step.found_inf)

    def add(self, steps: list[tuple[Step, bool]], before: torch.Tensor | None, after: torch.Tensor | None) -> None:
        """Take note of the steps of one iteration.

        Args:
            steps: Each with whether there is more to know of it.
            before: The scale while they were taken, which nobody will write to; None if no more is to know of any.
            after: The scale now.
        """
        loss, has_several_losses = self.loss, self.has_several_losses
        self.loss, self.has_several_losses = None, False
        found_infs = [step.found_inf.reshape(()) for step, _ in steps]
        self.updates += 1
        for step, is_wanted in steps:
            self.steps += 1
            if is_wanted and before is not None and after is not None:
                least = found_infs[0] if len(found_infs) == 1 else torch.stack(found_infs).amin()
                numbers = _ask_for(step, least, before, after, loss)
                has = loss is not None, has_several_losses, step.norm is not None
                params = [param for of_group, _ in step.facts for param in of_group]
                self._pending.append(_Pending(self.steps, self.updates, step.optimizer, params, numbers, *has))
            elif self._streaks or self._first_streak:
                self._streak(step.optimizer(), is_skipped=False)

    def settle(self, schedule: Schedule, stacklevel: int, *, ranks_agree: bool, all_: bool = False) -> None:
        """Look at the facts that are due, tell the hooks, and the user if steps are skipped again and again.

        Args:
            schedule: Says when that is, and how.
            stacklevel: Of the warning, counted from the caller.
            ranks_agree: Whether steps are skipped because of other ranks, too.
            all_: Look at all there are, which waits for the device.

        Raises:
            ScaleExhausted: If the schedule wants it so.
        """
        exhausted: ScaleExhausted | None = None
        while self._pending and (all_ or self._is_due(self._pending[0])):
            facts, after = _facts_of(self._pending.popleft(), ranks_agree=ranks_agree)
            self.skips += facts.skipped
            message = _exhaustion(facts, after, self._streak(facts.optimizer, facts.skipped), schedule)
            if message and schedule.on_exhausted == "raise":
                exhausted = exhausted or ScaleExhausted(message, facts)
            elif message and not self._has_warned:
                self._has_warned = True
                warn(f"{message}. {_WHERE}", UserWarning, stacklevel + 1)
            for hook in tuple(self.hooks.values()):
                told = hook(facts)
                if exhausted is not None and exhausted.step is facts:
                    exhausted.diagnosis = exhausted.diagnosis if told is None else told
        if exhausted is not None:
            raise exhausted

    def _is_due(self, pending: _Pending) -> bool:
        return pending.numbers.is_on_host or self.updates - pending.update >= DELAY


def _exhaustion(facts: StepFacts, after: float, streak: int, schedule: Schedule) -> str:
    """Return what to tell the user after so many skips in a row, if anything."""
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


def _ask_for(
    step: Step, least: torch.Tensor, before: torch.Tensor, after: torch.Tensor, loss: torch.Tensor | None
) -> Readback:
    unknown = torch.full((), math.nan, device=after.device)
    numbers = [step.found_inf, least, before, after, *(unknown if it is None else it for it in (loss, step.norm))]
    parts = [number.reshape(1) for number in numbers] + [flags for _, flags in step.facts]
    return Readback(torch.cat([part.to(after.device, non_blocking=True) for part in parts]))


def _facts_of(pending: _Pending, *, ranks_agree: bool) -> tuple[StepFacts, float]:
    """Return the facts and the scale after the step; waits for the device."""
    found_inf, least, scale, after, loss, norm, *are_finite = pending.numbers.wait().tolist()
    skipped = found_inf != 0.0
    # Of several losses and optimizers, some of which had finite gradients, it may be another one's.
    is_its_loss = pending.has_loss and (least != 0.0 or not pending.has_several_losses)
    optimizer = pending.optimizer()
    bad = [param for param, is_finite in zip(pending.params, are_finite, strict=True) if not is_finite]
    facts = StepFacts(
        number=pending.number,
        optimizer=optimizer,
        scale=scale,
        skipped=skipped,
        cause=_cause(optimizer, loss, bool(bad), is_its_loss, ranks_agree) if skipped else None,
        parameters=tuple(bad) if skipped else (),
        loss=loss if pending.has_loss else None,
        grad_norm=norm if pending.has_norm else None,
        iteration=pending.update,
    )
    return facts, after


def _cause(optimizer: Any, loss: float, gradients_are_bad: bool, is_its_loss: bool, ranks_agree: bool) -> Cause:
    """Return why a step was skipped; a loss of NaN may be one that is not known."""
    if not math.isfinite(loss) and optimizer is not None and not _are_finite(optimizer):
        return Cause.NONFINITE_WEIGHTS
    if not math.isfinite(loss):
        return Cause.NONFINITE_LOSS if is_its_loss else Cause.UNKNOWN
    return Cause.ANOTHER_RANK if ranks_agree and not gradients_are_bad else Cause.OVERFLOW


def _are_finite(optimizer: Any) -> bool:
    """Read the weights that an optimizer trains, of DTensors this rank's part; waits for the device."""
    weights = [param for param in params_of(optimizer) if param.requires_grad]
    return all(bool(flags.all()) for _, flags in unscaling.check_local(weights, weights))
