"""`GradScaler`: the state machine of gradient scaling. Nothing here is numeric.

It is built in layers, each of which knows those below it: `scaled_losses`, `scaled_gradients`, `clipped_gradients`,
`scaled_steps`; here are the end of an iteration, and saving. What the gradients are is in `gradients`, how they are
measured and unscaled in `unscaling` and `measuring`, which ones are unscaled already in `ledger`, what is known of an
optimizer in `optimizer_state`, how the scale moves in `schedules`.

Attributes with a leading underscore that torch's class has as well keep its names and meaning: subclasses and
frameworks use them, down to replacing `_unscale_grads_` on an instance.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from castwise._torch_private import never_traced
from castwise._warnings import warn
from castwise.amp import checkpoint, measuring, unscaling
from castwise.amp.after_step import AfterSteps
from castwise.amp.agreement import Agreement, Ranks
from castwise.amp.devices import MultiDeviceReplicator as _MultiDeviceReplicator  # noqa: F401  # torch has it here
from castwise.amp.devices import amp_definitely_not_available, device_type, is_capturing
from castwise.amp.observers import OBSERVERS
from castwise.amp.optimizer_state import OptState
from castwise.amp.optimizer_state import new_state as _refresh_per_optimizer_state
from castwise.amp.outcomes import Step
from castwise.amp.scaled_steps import ScaledSteps
from castwise.amp.schedules import Dynamic, Met, Schedule, on_device

__all__ = ["GradScaler", "OptState"]

# Numbers of torch's signature, told by identity from equal ones that a caller gives.
INIT_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000


class GradScaler(ScaledSteps):
    """Scale losses so that small gradients survive in fp16, and skip a step whose gradients are not finite.

    A training step is `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`; gradients are
    unscaled in `step`, or before it by `unscale_(optimizer)` for whoever wants to clip or look at them. The scale
    is an fp32 tensor on the device of the first loss and follows `schedules.Dynamic`.

    With its default arguments it does what `torch.amp.GradScaler` does, bit for bit, and is an instance of it.
    It differs where torch's is wrong: arguments that cannot work are refused, the scale never leaves
    [2**-126, 2**126], a gradient that unscaling would make infinite skips the step, a parameter of two optimizers
    is unscaled once, and an optimizer without gradients steps as it would without a scaler.

    Args:
        device: The type of device the losses live on. `"cuda"` on a machine without CUDA warns and disables.
        init_scale: The first scale, a power of two by custom, within [2**-126, 2**126]; 2**16 by default.
        growth_factor: What the scale is multiplied by after `growth_interval` finite steps in a row; > 1, 2 by default.
        backoff_factor: What the scale is multiplied by after a skipped step; in (0, 1), 0.5 by default.
        growth_interval: Steps; >= 1, 2000 by default.
        enabled: False makes every method pass through; the arguments are then not looked at, as in torch.
        schedule: How the scale moves, with all its numbers; in the place of the four above. By default
            `schedules.Dynamic` with these.
        allow_fp16_gradients: Take gradients of fp16 parameters, which are refused otherwise. They are unscaled in
            fp32 arithmetic and rounded to fp16, where small ones may vanish.
        process_group: A `torch.distributed` group or device mesh whose ranks shall take and skip the same steps and
            clip to a norm over all of them: what each has found is reduced, in one collective a step.
        pipeline_stages: How many stages of a pipeline the ranks of the group hold, each on as many of them. A gradient
            that is neither a DTensor nor flattened by FSDP1 counts as a copy that all ranks of its stage hold.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, or torch knows no such device; or there is a schedule and numbers
            beside it.

    Warns:
        UserWarning: CUDA is asked for and missing.

    Example:
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scaler.scale(weight.sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> weight.grad
        tensor([1., 1.])
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = INIT_SCALE,
        growth_factor: float = GROWTH_FACTOR,
        backoff_factor: float = BACKOFF_FACTOR,
        growth_interval: int = GROWTH_INTERVAL,
        enabled: bool = True,
        *,
        schedule: Schedule | None = None,
        allow_fp16_gradients: bool = False,
        process_group: Ranks | None = None,
        pipeline_stages: int = 1,
    ) -> None:
        self._device = device_type(device)
        self._allow_fp16_gradients = allow_fp16_gradients
        self._agreement: Agreement | None = None
        self._enabled = enabled
        self._init_scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._init_growth_tracker = 0
        self._init_trackers: dict[str, float] = {}
        self._rule: Schedule = Dynamic() if schedule is None else schedule
        if schedule is not None:
            _check_schedule(schedule)
            if enabled:
                _refuse_numbers_beside(schedule, init_scale, growth_factor, backoff_factor, growth_interval)
            self._take(schedule)
        elif enabled:
            self._take(Dynamic(init_scale, growth_factor, backoff_factor, growth_interval))
        if enabled and self._device == "cuda" and amp_definitely_not_available():
            warn("GradScaler: CUDA is not available. Disabling.", UserWarning, 2)
            self._enabled = False
        if process_group is not None:
            self._agree_with(Agreement(process_group, self._device, pipeline_stages))
        self._forget_device_state()
        for observer in OBSERVERS:
            observer.scaler_made(self, wanted=enabled)

    def _agree_with(self, agreement: Agreement) -> None:
        self._agreement = agreement
        agreement.start(self._init_scale, self._init_growth_tracker, *self._init_trackers.values())

    @never_traced
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """End an iteration: move the scale by what its steps met, once for all optimizers.

        Args:
            new_scale: Set the scale to this instead: a number, or a tensor of one element (that is read on the
                host) on the scaler's type of device, without `requires_grad`. The growth tracker stays.

        Raises:
            RuntimeError: Before the first `scale()`, or without `new_scale` when nothing was stepped or unscaled.
            TypeError: `new_scale` is neither a number nor such a tensor.
            ValueError: `new_scale` is outside [2**-126, 2**126].
        """
        if not self._enabled:
            return
        number = None if new_scale is None else self._number(new_scale)
        for observer in OBSERVERS:
            observer.updating(self, is_set=number is not None)
        self._agree("update")
        states = self._states()
        found_infs = [found_inf for state in states for found_inf in state["found_inf_per_device"].values()]
        all_skipped = bool(states) and not found_infs and all(state.get("skipped") for state in states)
        steps = self._steps()
        before = self._scale.clone() if self._scale is not None and any(is_wanted for _, is_wanted in steps) else None
        if number is not None or not all_skipped:
            self._move_scale(number, found_infs)
        self._outcomes.add(steps, before, self._scale)
        if self._agreement is not None:
            self._agreement.note_update(number)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._states_of_dead_optimizers.clear()
        self._owners.clear()
        self._unscaled.clear()
        self._gradients_seen.clear()
        if self._scale is None or not is_capturing(self._scale):  # there nobody may wait for anything
            self._after_steps.run(self._outcomes.updates)
            self._outcomes.settle(self._rule, 2, ranks_agree=self._agreement is not None)

    def _steps(self) -> list[tuple[Step, bool]]:
        """Return the steps of this iteration, each with whether there is more to know of it."""
        steps: list[tuple[Step, bool]] = []
        dead = ((_nobody, state) for state in self._states_of_dead_optimizers)
        alive = ((self._owners.get(key, _nobody), state) for key, state in self._per_optimizer_states.items())
        for optimizer, state in itertools.chain(dead, alive):
            found = state["found_inf_per_device"]
            if state["stage"] is OptState.STEPPED and found and not state.get("skipped") and self._scale is not None:
                found_inf = unscaling.combine(found.values(), self._scale)
                step = Step(optimizer, found_inf, state.get("finite", ()), state.get("norm"))
                steps.append((step, self._outcomes.wants(step)))
        return steps

    def _move_scale(self, new_scale: float | None, found_infs: list[torch.Tensor]) -> None:
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            scale.fill_(new_scale)
        elif found_infs:
            trackers = {"growth_tracker": growth_tracker, **self._trackers}
            self._schedule().advance_(scale, trackers, self._met(unscaling.combine(found_infs, scale)))
        else:
            raise RuntimeError(
                "No inf checks were recorded prior to update(): call scaler.step(optimizer) or "
                "scaler.unscale_(optimizer) since the last one"
            )

    def _met(self, found_inf: torch.Tensor) -> Met:
        """Return what the iteration met, with as much as the schedule wants to know; the same on all ranks."""
        rule = self._schedule()
        if not (rule.needs_loss or rule.needs_largest):
            return Met(found_inf)
        found = [state["largest"] for state in self._states() if "largest" in state]
        largest = unscaling.combine(found, found_inf) if found else torch.zeros_like(found_inf)
        loss_is_nonfinite = self._outcomes.loss_is_nonfinite(found_inf)
        if self._agreement is not None:
            known = torch.where(largest.isfinite(), largest, 0.0).to(measuring.wide(largest.device))
            loss_is_nonfinite, largest = self._agreement.norm(
                loss_is_nonfinite, known, math.inf, f"update() with {self._account()}"
            )
        return Met(found_inf, loss_is_nonfinite, largest.float())

    @never_traced
    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, in the format of torch's scaler; empty when disabled. Syncs with the device.

        Returns:
            `scale`, `growth_factor`, `backoff_factor` (floats), `growth_interval` and `_growth_tracker` (ints), as of
            torch; `steps_taken`, `steps_skipped` and `skips_in_a_row` (ints), which torch's scaler does not read;
            and `schedule` unless that is as torch's: its name, its settings and what it remembers.

        Raises:
            ScaleExhausted: As of `synchronize()`.
        """
        if not self._enabled:
            return {}
        self.synchronize()
        for observer in OBSERVERS:
            observer.saved(self)
        schedule, (steps, skips, skips_in_a_row) = self._schedule(), self._outcomes.counts
        numbers: dict[str, Any] = {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
            "steps_taken": steps - skips,
            "steps_skipped": skips,
            "skips_in_a_row": skips_in_a_row,
        }
        if schedule != Dynamic(schedule.init_scale, self._growth_factor, self._backoff_factor, self._growth_interval):
            numbers["schedule"] = checkpoint.of_schedule(schedule, self._get_trackers())
        return numbers

    @never_traced
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state from `state_dict()`, ours or torch's; a disabled scaler ignores it.

        What is still on its way of earlier steps is dropped: it advances no schedule, and no hook is told of it.

        Args:
            state_dict: Plain numbers by name.

        Raises:
            RuntimeError: It is empty, as a disabled scaler's is.
            TypeError: It is not a mapping, or an entry has the wrong type. Nothing has been changed then.
            ValueError: An entry is missing, unknown or out of its range. Nothing has been changed then.
        """
        if not self._enabled:
            return
        saved = checkpoint.read(state_dict, self._schedule())
        if self._agreement is not None:
            self._agreement.start(saved.scale, saved.growth_tracker, *saved.trackers.values())
        self._take(saved.schedule, saved.trackers)
        self._init_scale, self._init_growth_tracker = saved.scale, saved.growth_tracker
        self._after_steps = AfterSteps()
        self._last_step = None
        for memory in self._memories.values():
            memory.last_step = None
        taken, skips, skips_in_a_row = saved.counts
        self._outcomes.counts = taken + skips, skips, skips_in_a_row
        if self._scale is not None:
            self._scale.fill_(saved.scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(saved.growth_tracker)
        if self._scale is not None and self._trackers.keys() != saved.trackers.keys():
            # Other options, so it remembers more or less.
            self._trackers = on_device(saved.trackers, self._scale.device)
        for name, tracker in self._trackers.items():
            tracker.fill_(saved.trackers[name])
        for observer in OBSERVERS:
            observer.loaded(self)

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and (self._per_optimizer_states or self._states_of_dead_optimizers):
            raise RuntimeError(
                "a GradScaler can be pickled or copied only at the beginning of an iteration: "
                "call scaler.update() before"
            )
        # Device tensors and what belongs to this process stay; numbers travel and are put on a device lazily.
        state = {name: value for name, value in self.__dict__.items() if name not in _PROCESS_LOCAL}
        if self._enabled:
            self.synchronize()
        for observer in OBSERVERS:
            observer.saved(self)
        return state | {
            "_init_scale": self.get_scale() if self._enabled else self._init_scale,
            "_init_growth_tracker": self._get_growth_tracker(),
            "_init_trackers": self._get_trackers(),
            "_outcomes": self._outcomes.counts,
            "_scale": None,
            "_growth_tracker": None,
            "_trackers": {},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget_device_state()
        outcomes = self._outcomes
        self.__dict__.update(state)
        outcomes.counts = state["_outcomes"]
        self._outcomes = outcomes


_PROCESS_LOCAL = (
    "_per_optimizer_states",
    "_owners",
    "_states_of_dead_optimizers",
    "_unscaled",
    "_optimizers_seen",
    "_memories",
    "_outcomes",
    "_after_steps",
    "_last_step",
    "_has_warned_of_strangers",
    "_gradients_hooks",
    "_gradients_seen",
)


def _nobody() -> None:
    return None


def _check_schedule(schedule: object) -> None:
    if not isinstance(schedule, Schedule) or type(schedule) is Schedule:
        raise TypeError(
            f"schedule must be one of castwise.schedules, such as Dynamic(init_scale=1024.0), got {schedule!r}"
        )


def _refuse_numbers_beside(schedule: Schedule, *numbers: float) -> None:
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    defaults = (INIT_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL)
    beside = [
        f"{name}={given!r}"
        for name, given, default in zip(names, numbers, defaults, strict=True)
        if given is not default
    ]
    if beside:
        name = type(schedule).__name__
        raise ValueError(f"a schedule carries all its own numbers: give {', '.join(beside)} to {name}, or leave it out")
