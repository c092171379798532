"""`CheckedSteps`: check the steps of optimizers without a scaler, and skip those with an inf or NaN if asked to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from castwise._guard import ErrorBoundary
from castwise._warnings import warn_or_print
from castwise.amp._gradients import params_of
from castwise.amp._outcomes import Cause
from castwise.monitor._local_shards import is_split_over_ranks
from castwise.monitor._sharded_model_ranks import ShardedModelRanks
from castwise.monitor._step_check import Checked, LateCheck, StepCheck

_CPU = torch.device("cpu")

OnFault = Callable[[torch.optim.Optimizer, Checked], object]


class CheckedSteps:
    """Checks each step before it is taken, and calls a function if a loss or a gradient is not finite.

    Once an earlier fault has spoilt the weights, the function is called only for ranks that agree;
    `Checked.follows_earlier_fault` says so then.

    A step that calls a closure is checked after the closure. On an accelerator nothing waits, so the result is known
    later and the function is not called, unless steps are skipped.

    Args:
        optimizers: The optimizers, in whose steps the check runs.
        on_fault: Called before the step, while the weights are those of the forward.
        skips: Whether to skip a step with a gradient that is not finite. Waits for an accelerator at each step.
        guard: Catches errors.
        joint: Ranks of a split model, which agree on faults and on the steps to skip. The function is then called on
            all ranks if any has a fault, with the cause "another rank" on the others.
    """

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        on_fault: OnFault,
        skips: bool,
        guard: ErrorBoundary,
        joint: ShardedModelRanks | None = None,
    ) -> None:
        self._on_fault, self._guard, self._joint = on_fault, guard, joint
        self._skips = skips and all(_can_skip(optimizer, agrees=joint is not None) for optimizer in optimizers)
        self._has_fault = False
        self._check = StepCheck()
        self._checked: WeakKeyDictionary[torch.optim.Optimizer, Checked] = WeakKeyDictionary()
        self._late: WeakKeyDictionary[torch.optim.Optimizer, LateCheck] = WeakKeyDictionary()
        self._withheld: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._check.begin()
        before = guard.door(self._before)
        self._handles = [optimizer.register_step_pre_hook(before) for optimizer in optimizers]

    def remove(self) -> None:
        """Stop checking."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._check.end()
        self._handles = []
        self._give_back()

    def result_of(self, optimizer: torch.optim.Optimizer) -> tuple[Checked, LateCheck | None]:
        """Return the check of a step that was just taken or skipped, and a check that is still running."""
        self._give_back()
        return self._checked.pop(optimizer, Checked()), self._late.pop(optimizer, None)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        self._give_back()  # a step that raised has left them
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._look(optimizer)
            return None

        def checked() -> Any:
            loss = closure()
            self._guard.call(self._look, optimizer)
            return loss

        return ((args[0], checked, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": checked})

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        if device_of(optimizer).type != "cpu" and not self._skips:
            self._late[optimizer] = self._check.check_late(optimizer)
            return
        checked = self._agree(self._check.check(optimizer))
        if checked.has_nonfinite_gradients and self._skips and (self._joint is None or not self._joint.is_over):
            checked = replace(checked, is_skipped=True)
        self._checked[optimizer] = checked
        follows_earlier_fault = self._has_fault and checked.cause is Cause.NONFINITE_WEIGHTS
        if checked.left_out and self._joint is None:
            with self._guard:  # the weights are still those of its forward
                self._on_fault(optimizer, replace(checked, cause=Cause.NONFINITE_LOSS))
        if checked.cause is not None and (self._joint is not None or not follows_earlier_fault):
            checked = replace(checked, follows_earlier_fault=follows_earlier_fault)
            self._has_fault = True
            with self._guard:  # the step is skipped anyway
                self._on_fault(optimizer, checked)
        if checked.is_skipped:
            self._withheld = [(param, param.grad) for param in params_of(optimizer)]
            for param, _ in self._withheld:
                param.grad = None  # optimizers leave out parameters without a gradient

    def _agree(self, checked: Checked) -> Checked:
        """Return a check with what other ranks have found."""
        if self._joint is None:
            return checked
        of_weights = checked.cause is Cause.NONFINITE_WEIGHTS  # of which each rank knows its own part
        flags = checked.cause is not None, checked.has_nonfinite_gradients, of_weights
        has_fault, is_bad, of_weights = self._joint.any(*flags)
        cause = checked.cause or (Cause.ANOTHER_RANK if has_fault else None)
        cause = Cause.NONFINITE_WEIGHTS if of_weights else cause
        return replace(checked, cause=cause, has_nonfinite_gradients=is_bad)

    def _give_back(self) -> None:
        for param, gradient in self._withheld:
            if param.grad is None:
                param.grad = gradient
        self._withheld = []


def device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Return the device of an optimizer's first parameter."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            device: torch.device = param.device
            return device
    return _CPU


def _can_skip(optimizer: torch.optim.Optimizer, *, agrees: bool) -> bool:
    """Return True if an optimizer's steps can be skipped; warn if not. `agrees` if all ranks would skip the same."""
    name, why = type(optimizer).__name__, ""
    if not _leaves_out_params_without_gradient(type(optimizer)):
        why = "its code does not check for parameters without a gradient"
    elif not agrees and is_split_over_ranks(nn.ParameterList(params_of(optimizer))):
        why = "its parameters are split over ranks, which do not agree on a step"
    if why:
        warn_or_print(f"steps of {name} with an inf or NaN are not skipped: {why}", RuntimeWarning)
    return not why


def _leaves_out_params_without_gradient(kind: type) -> bool:
    if kind.__module__.startswith(("torch.optim.", "castwise.")):
        return True
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    return "grad is None" in source or "grad is not None" in source
