"""`Checks`: all invariants of one model in training."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from castwise._guard import ErrorBoundary
from castwise._invariants.equal_ranks import EqualRanks
from castwise._invariants.gradient_norms import NormsAround
from castwise._invariants.invariant import EVENTS, Exemptions, Violation, how_to_exempt, named
from castwise._invariants.loss_spikes import LossSpikes
from castwise._invariants.optimizer_state import averages_that_cannot_fall
from castwise._invariants.resumed import LOADED_STATES
from castwise._invariants.saved_dtypes import SavedDtypes
from castwise._invariants.spike import Replays
from castwise._invariants.train_mode import TrainMode
from castwise._invariants.trained_weights import TrainedWeights
from castwise._invariants.written_weights import WrittenWeights, report_of

FIRST, EVERY = (10, 20), 50
"""Steps that are checked: these, and each multiple."""
_CHECKS = "weights", "optimizer states", "modes", "dtypes of files", "ranks", "writes to weights", "losses"
_MOST = 20  # of one invariant are reported
_DRAWS = 12  # the first steps of which random states are compared, and the first three of each EVERY after


def is_checked(step: int) -> bool:
    """Return True for the steps at which weights are compared with those at the check before."""
    return step in FIRST or step % EVERY == 0


class Checks:
    """Checks the invariants of a model, and reports each that is broken once for the same parameters, and each event.

    A check that fails is turned off with a warning.

    Args:
        model: The model.
        parameters: Returns its parameters by name.
        optimizers: Its optimizers.
        exemptions: What is not checked.
        report: Called with what is broken, as soon as it is known.
        report_norms: Called with norms of gradients around a spike.
        number: Returns the number of the next step in the record.
        spikes: Whether to keep what tells more of the causes of spikes: a copy of the weights, and gradients' elements;
            and digests of the weights before each step, which tell at which one ranks began to differ.
        replays: Repeats losses of spikes.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        optimizers: list[torch.optim.Optimizer],
        exemptions: Exemptions,
        report: Callable[[Violation], object],
        report_norms: Callable[[NormsAround], object],
        number: Callable[[], int],
        *,
        spikes: bool,
        replays: Replays,
    ) -> None:
        self._optimizers, self._exemptions, self._report = optimizers, exemptions, report
        self._report_norms = report_norms
        self._weights = TrainedWeights(model, parameters, optimizers)
        self._mode, self._saved = TrainMode(model), SavedDtypes(parameters)
        self._ranks = EqualRanks(model, parameters, optimizers[0], exemptions, each_step=spikes)
        self._written = WrittenWeights(parameters, exemptions, number, copies=spikes)
        sees_all = self._written.sees_all
        self._losses = LossSpikes(exemptions, sees_all, looks_at_gradients=spikes, replays=replays)
        self._number, self._copies = number, spikes
        self._ids = lambda: {id(param): name for name, param in parameters().items()}
        self._steps: dict[torch.optim.Optimizer, int] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._reported: set[tuple[str, str, tuple[str, ...]]] = set()
        self._guards = [
            ErrorBoundary(f"castwise does not check {what} any more, because the check failed", is_final=True)
            for what in _CHECKS
        ]

    def before_step(self, optimizer: torch.optim.Optimizer, batches: object = None) -> None:
        """Check what must hold before an optimizer's step, of which the micro-batches may be kept."""
        if _is_inside_a_step(optimizer):
            return
        step = self._steps.get(optimizer, 0) + 1
        of_weights, of_state, of_mode, of_files, of_ranks, *_ = self._guards
        self._look_for_spikes(optimizer, batches)
        self._check(of_state, LOADED_STATES.stepping, optimizer, self._number)
        self._check(of_weights, self._weights.note_gradients, optimizer)
        if step == FIRST[-1]:
            self._check(of_weights, self._weights.check_gradients, optimizer, step)
        if not (optimizer is self._optimizers[0] or not self._steps.get(self._optimizers[0])):
            return
        is_checked_now = is_checked(step)
        self._check(of_mode, self._mode.stepping, step, looks_at_draws=step < _DRAWS or step % EVERY < 3)
        self._check(of_files, self._saved.stepping, step, is_noted=is_checked_now)
        self._check(of_ranks, self._ranks.repeated_epoch, step)
        if self._copies:
            self._check(of_ranks, self._ranks.note_weights, step)
        if is_checked_now:
            self._check(of_ranks, self._ranks.check, step)
            self._check(of_weights, self._weights.check, step)
        if step == 2 or is_checked_now:
            for each in self._optimizers:
                self._check(of_state, averages_that_cannot_fall, each)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that was taken, and take the results that have arrived."""
        if _is_inside_a_step(optimizer):
            return
        self._steps[optimizer] = step = self._steps.get(optimizer, 0) + 1
        self._check(self._guards[0], self._weights.note_step, optimizer)
        self._check(self._guards[5], self._written.after_step, optimizer)
        self._check(self._guards[0], self._weights.results, step)
        if optimizer is self._optimizers[0]:
            self._check(self._guards[4], self._ranks.after_step, step)

    def step_known(
        self,
        optimizer: torch.optim.Optimizer,
        step: int,
        loss: float | None,
        norm: float | None,
        batches: object = None,
    ) -> None:
        """Look at the loss and the gradient norm of a step, which may be known later; its batches may be kept."""
        spikes = self._losses.step_known
        given = optimizer, step, loss, norm, batches
        self._check(self._guards[6], lambda: (each.report() for each in spikes(*given)))
        self._check(self._guards[6], self._losses.of_norm, optimizer, step, norm)
        if optimizer in LOADED_STATES.losses:
            self._check(self._guards[1], LOADED_STATES.loss_known, optimizer, step, loss)

    def usual_loss(self, optimizer: torch.optim.Optimizer) -> tuple[float, float] | None:
        """Return the median of an optimizer's last losses, and the sigma of their logarithms, if they are known."""
        return self._losses.usual(optimizer)

    def _look_for_spikes(self, optimizer: torch.optim.Optimizer, batches: object) -> None:
        """Look for what may be the cause of a spike, before a step."""
        *_, of_writes, of_losses = self._guards
        written = of_writes.call(self._written.before_step, optimizer)
        if written:
            self._losses.note_written(written)
            self._check(of_writes, report_of, written, copies=self._copies)
        self._check(of_losses, self._losses.before_step, optimizer, self._number(), self._ids, batches)
        if self._copies:
            of_losses.call(self._tell_norms)

    def _tell_norms(self, *, is_end: bool = False) -> None:
        for norms in self._losses.norms_due(self._ids, is_end=is_end):
            self._report_norms(norms)

    def forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Look at a forward of the model that begins."""
        self._guards[2].call(self._mode.forward, model)
        next_step = self._steps.get(self._optimizers[0], 0) + 1
        self._guards[4].call(self._ranks.forward, args, kwargs, is_checked=is_checked(next_step))

    def file_saved(self, saved: object) -> None:
        """Look at an object that is about to be written to a file."""
        self._guards[3].call(self._saved.saved, saved)

    def stop(self) -> None:
        """Report what is known, and drop all copies."""
        written = self._guards[5].call(self._written.end)
        if written:
            self._check(self._guards[5], report_of, written, copies=self._copies)
        self._check(self._guards[4], self._ranks.end)
        self._check(self._guards[6], lambda: (spike.report() for spike in self._losses.end()))
        self._check(self._guards[6], self._losses.risen)
        self._guards[6].call(self._tell_norms, is_end=True)
        self._written.stop()
        self._weights.clear()

    def _check(
        self, guard: ErrorBoundary, check: Callable[..., Iterable[Violation] | None], *args: Any, **kwargs: Any
    ) -> None:
        """Report what a check finds, unless it has failed before."""
        if guard.is_closed:
            return
        try:  # not `guard.call`, which would be a function more for each check in each step
            for broken in check(*args, **kwargs) or ():
                self._tell_unless_exempt(broken)
        except Exception as error:
            guard.failed(check, error)

    def _tell_unless_exempt(self, broken: Violation) -> None:
        left = tuple(name for name in broken.parameters if not self._exemptions.has(broken.name, name))
        if self._exemptions.has(broken.name) or (broken.parameters and not left):
            return
        if left != broken.parameters:
            text = broken.text.replace(named(broken.parameters), named(left))
            broken = replace(broken, parameters=left, text=text)
        is_event = broken.name in EVENTS and broken.severity == "warning"
        key = broken.name, broken.text if is_event else broken.remedy, broken.parameters
        if key in self._reported:
            return
        self._reported.add(key)
        count = self._counts[broken.name, broken.severity] = self._counts.get((broken.name, broken.severity), 0) + 1
        if count == _MOST:
            broken = replace(broken, text=f"{broken.text} Later ones are not reported.")
        if count <= _MOST:
            self._report(replace(broken, remedy=f"{broken.remedy}{how_to_exempt(broken.name)}"))


def _is_inside_a_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a class's `step`, which called the hooks already, has called the one of its base class."""
    has_several = _has_several_steps(type(optimizer))  # type: ignore[arg-type]  # a class is hashable
    frame, calls = sys._getframe(1) if has_several else None, 0
    while frame is not None:
        calls += frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return calls > 1


@functools.cache
def _has_several_steps(kind: type[torch.optim.Optimizer]) -> bool:
    """Return True if a class has a `step` beside a base class's and that of `Optimizer`; wrappers are none."""
    return len({inspect.unwrap(vars(base)["step"]) for base in kind.__mro__ if "step" in vars(base)}) > 2
