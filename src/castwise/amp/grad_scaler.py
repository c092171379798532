"""`GradScaler`: scale losses, unscale gradients, skip steps that are not finite, move the scale.

The class orders the calls. `_gradients` collects the gradients, `_measure` does the arithmetic on them,
`_shared_params` tracks which are already unscaled, `_schedules` moves the scale, `_agreement` makes all ranks take the
same decision, `_closures` runs steps with closures, `_outcomes` reports each step and the cause of a skip to the host,
`_after_step` makes the calls that wait for such a report, and `_checkpoint` checks loaded states.

The state of one iteration is a `ScalerIteration`, which `update` replaces as a whole. In it, each optimizer has a
record, whose `state` is a value of its own: `Ready`, then perhaps `ClipPending` (which a fused step carries out) or
`Unscaled`, and at last `Stepped` or `SkipCalled`.

Private attributes that torch's class also has keep their names and meaning, because subclasses and frameworks use them
and even replace `_unscale_grads_` on an instance. Under `torch.compile` only `scale` is traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast, overload

import torch
from torch.amp import grad_scaler as torch_grad_scaler
from torch.amp.grad_scaler import OptState
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from castwise._torch_private import UNSCALES_IN_STEP, never_traced
from castwise._warnings import warn
from castwise.amp import _checkpoint as checkpoint
from castwise.amp import _closures as closures
from castwise.amp import _measure as measure
from castwise.amp import _torch_words as torch_words
from castwise.amp._after_step import AfterSteps, LastStep, scheduler_call
from castwise.amp._agreement import Agreement, Ranks
from castwise.amp._checks import check_scale
from castwise.amp._devices import amp_definitely_not_available, device_type, is_capturing
from castwise.amp._fp32_steps import StepsInFP32, steps_in_fp32
from castwise.amp._gradients import Gradients, Group, collect, params_and_grads, params_of
from castwise.amp._iteration import (
    ClipPending,
    KnownOptimizers,
    OptimizerRecord,
    OptimizerStates,
    Ready,
    ScalerIteration,
    SkipCalled,
    Snapshot,
    Stepped,
    Unscaled,
)
from castwise.amp._observers import OBSERVERS, add_hook, notify_of_step
from castwise.amp._outcomes import Outcomes, StepFacts
from castwise.amp._readback import ScaleBound, any_set
from castwise.amp._schedules import Dynamic, IterationFacts, Schedule, on_device

__all__ = ["GradScaler", "OptState"]

# The defaults of torch's signature, distinguished by identity from equal numbers that a caller passes.
INIT_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000


_ReplicatorInTorch: Any = getattr(torch_grad_scaler, "_MultiDeviceReplicator", object)  # for `isinstance`


class _MultiDeviceReplicator(_ReplicatorInTorch):  # type: ignore[misc]  # a class, if torch has it
    """Copies of a tensor on several devices, each created on first use."""

    def __init__(self, master_tensor: torch.Tensor) -> None:
        self.master = master_tensor
        self._per_device_tensors: dict[torch.device, torch.Tensor] = {}

    def get(self, device: torch.device) -> torch.Tensor:
        """Return the copy on `device`, never the master tensor itself, so callers may write to it."""
        if device not in self._per_device_tensors:
            self._per_device_tensors[device] = self.master.to(device, non_blocking=True, copy=True)
        return self._per_device_tensors[device]


def _refresh_per_optimizer_state() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class GradScaler(torch.amp.GradScaler):
    """Scale losses so that small gradients survive in fp16, and skip steps whose gradients are not finite.

    A training step is `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`. `step` unscales
    the gradients; to inspect or clip them first, call `unscale_(optimizer)`. The scale is an fp32 tensor on the device
    of the first loss and follows `schedules.Dynamic` by default.

    With default arguments, results are bit for bit those of `torch.amp.GradScaler`, the base class. The exceptions are
    cases where torch is wrong: this class rejects arguments that cannot work, keeps the scale finite and nonzero,
    skips a step if unscaling would make a gradient infinite, unscales a parameter of two optimizers only once, and
    steps an optimizer without gradients as it would without a scaler.

    Args:
        device: The type of device that the losses are on. `"cuda"` without CUDA warns and disables the scaler, but
            `"cuda:0"` does not, as in torch.
        init_scale: The first scale, usually a power of two, in [2**-126, 3.4e38]; 2**16 by default.
        growth_factor: Multiplies the scale after `growth_interval` finite steps in a row; > 1, 2 by default.
        backoff_factor: Multiplies the scale after a skipped step; in (0, 1), 0.5 by default.
        growth_interval: Finite steps in a row before the scale grows; >= 1, 2000 by default.
        enabled: False turns every method into a pass-through. Arguments are then not checked, as in torch.
        schedule: How the scale moves, instead of the four numbers above. By default, `schedules.Dynamic` with these
            numbers.
        allow_fp16_gradients: Accept fp16 gradients, which are rejected otherwise. They are unscaled in fp32 arithmetic
            and rounded to fp16, where small ones may flush to zero.
        process_group: A `torch.distributed` group or device mesh whose ranks take and skip the same steps and clip
            by one norm over all ranks. A step takes one collective; `schedules.Headroom`, norms of an order above 4
            and optimizers that are stepped one after the other take more.
        pipeline_stages: Number of pipeline stages on the ranks of the group, each on the same number of ranks. A
            gradient that is neither a DTensor nor flattened by FSDP1 counts as replicated on all ranks of its stage. A
            stage need not have a loss to scale.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, or a schedule is given together with one of the four numbers.

    Warns:
        UserWarning: CUDA is requested but not available.

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
        wanted = enabled
        if enabled and device == "cuda" and amp_definitely_not_available():  # not "cuda:0", as in torch
            hint = "The CPU has GradScaler('cpu')"
            warn(torch_words.warning_of_scaler(hint, self._device), UserWarning)
            enabled = False
        self._enabled = enabled
        self._init_scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._init_growth_tracker = 0
        self._init_trackers: dict[str, float] = {}
        self._rule: Schedule = (
            Dynamic() if schedule is None else schedule
        )  # of a disabled scaler: its numbers are not checked
        if schedule is not None:
            _check_schedule(schedule)
            if enabled:
                _refuse_numbers_with(schedule, init_scale, growth_factor, backoff_factor, growth_interval)
            self._adopt(schedule)
        elif enabled:
            try:
                self._adopt(Dynamic(init_scale, growth_factor, backoff_factor, growth_interval))
            except (TypeError, ValueError) as ours:
                numbers = (init_scale, growth_factor, backoff_factor, growth_interval)
                raise torch_words.error(ours, lambda: torch_words.scaler(*numbers)) from None
        if process_group is not None:
            self._set_agreement(Agreement(process_group, self._device, pipeline_stages))
        self._reset_process_state()
        for observer in OBSERVERS:
            # A scaler that has disabled itself for lack of CUDA was still wanted.
            observer.scaler_created(self, wanted=wanted)

    _keeps_loss_dtype = False  # a loss of shape () in half precision becomes fp32, as in torch

    def _reset_process_state(self) -> None:
        self._scale: torch.Tensor | None = None
        self._growth_tracker: torch.Tensor | None = None
        self._trackers: dict[str, torch.Tensor] = {}
        self._iteration = ScalerIteration()
        self._optimizers = KnownOptimizers()
        self._scale_bound = ScaleBound()
        self._outcomes = Outcomes()
        self._after_steps = AfterSteps()
        self._last_step: LastStep | None = None
        self._has_warned_of_unstepped = False
        self._gradients_hooks: OrderedDict[int, Callable[[torch.optim.Optimizer, torch.Tensor], object]] = OrderedDict()

    def _set_agreement(self, agreement: Agreement) -> None:
        self._agreement = agreement
        agreement.start(self._init_scale, self._init_growth_tracker, *self._init_trackers.values())

    def _adopt(self, schedule: Schedule, trackers: Mapping[str, float] | None = None) -> None:
        self._rule = schedule
        self._init_scale = schedule.init_scale
        self._init_trackers = schedule.trackers() if trackers is None else dict(trackers)
        if isinstance(schedule, Dynamic):
            self._growth_factor = schedule.growth_factor
            self._backoff_factor = schedule.backoff_factor
            self._growth_interval = schedule.growth_interval

    # -- the loss -----------------------------------------------------------------------------------------------------

    @overload
    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...
    @overload
    def scale(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]: ...
    @overload
    def scale(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]: ...
    @overload
    def scale(self, outputs: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]: ...
    def scale(self, outputs: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor | Iterable[torch.Tensor]:
        """Multiply losses by the scale, on their own devices and without a sync.

        Args:
            outputs: A tensor of any shape, or an iterable of tensors or of nested iterables.

        Returns:
            The scaled losses. Lists, tuples and named tuples keep their type, other iterables become generators.

        Raises:
            ValueError: `outputs` contains something other than tensors.
        """
        if not self._enabled:
            return outputs
        if not isinstance(outputs, torch.Tensor):
            scaled_all: Iterable[torch.Tensor] = self._scale_all(outputs)
            return scaled_all
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        scale = self._scale
        assert scale is not None
        if scale.device != outputs.device:
            scale = scale.to(outputs.device, non_blocking=True)
        scaled = outputs * scale
        if self._keeps_loss_dtype:
            scaled = scaled.to(outputs.dtype)
        self._iteration.note_loss(outputs)  # also in compiled code, which sums its losses inside the graph
        if not is_dynamo_compiling():
            if self._iteration.records:
                self._iteration.expect_later_backward()
            elif self._agreement is not None:
                self._agreement.note_loss()
            for observer in OBSERVERS:
                observer.scaled(self, outputs, scaled)
        return scaled

    def _scale_all(self, outputs: Any) -> Any:
        if isinstance(outputs, torch.Tensor):
            return self.scale(outputs)
        _check_is_loss(outputs)  # the items of an iterator are seen only now
        # Scaled only when they are consumed, as in torch, unless in a list or tuple.
        scaled = (self._scale_all(output) for output in outputs)
        if isinstance(outputs, tuple) and hasattr(outputs, "_make"):
            return outputs._make(scaled)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            ours = RuntimeError("the growth tracker is set but the scale is not: set both or neither")
            torch_scaler = torch_words.scaler(_growth_tracker=self._growth_tracker)
            raise torch_words.error(ours, lambda: torch_scaler._lazy_init_scale_growth_tracker(dev))
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)
        self._note_scale(self._init_scale)
        self._trackers = on_device(self._init_trackers, dev)

    def _note_scale(self, number: float) -> None:
        """Note that the scale was set to a number, rounded to fp32; compiled code notes nothing, and reads it later."""
        if self._scale is not None and not self._scale.is_cpu and not is_dynamo_compiling():
            self._scale_bound.set(self._scale, number)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None and self._agreement is not None and self._agreement.has_stages:
            # Only the last stage of a pipeline has a loss to scale.
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        if self._scale is None or self._growth_tracker is None:
            or_stages = "" if self._agreement is None else ", or pass pipeline_stages= if other ranks have the loss"
            ours = RuntimeError(
                f"{funcname}() needs a scale, which the first scale() creates: "
                f"call scaler.scale(loss).backward() earlier in the iteration{or_stages}"
            )
            torch_scaler = torch_words.scaler(_scale=self._scale, _growth_tracker=self._growth_tracker)
            raise torch_words.error(ours, lambda: torch_scaler._check_scale_growth_tracker(funcname))
        return self._scale, self._growth_tracker

    def _existing_scale(self) -> torch.Tensor:
        """Return the scale, after a public method has checked that it exists."""
        assert self._scale is not None
        return self._scale

    # -- the start of every call on an optimizer ----------------------------------------------------------------------

    def _begin_call(
        self, optimizer: torch.optim.Optimizer, call: str, *arguments: object, runs_hooks: bool = True
    ) -> OptimizerRecord:
        """Check that a call is allowed now, run the gradients hooks, and return the optimizer's record.

        Args:
            optimizer: The optimizer of the call.
            call: The name of the public method.
            *arguments: Its other arguments, which must be the same on all ranks.
            runs_hooks: Whether to run the hooks of `register_gradients_hook` now, before the gradients change.
        """
        record = self._iteration.records.get(id(optimizer))
        if record is None:
            record = self._new_record(optimizer)
        if isinstance(record.state, (Stepped, SkipCalled)):
            record.refuse(call)
        if record.grads_before_later_loss is not None:
            record = self._check_later_backward(record, record.grads_before_later_loss, call)
        if self._gradients_hooks and runs_hooks:
            self._run_gradients_hooks(record)
        if self._agreement is not None:
            self._agreement.note_call(call, record.info.number, *arguments)
        return record

    def _new_record(self, optimizer: torch.optim.Optimizer, *, hooks_ran: bool = False) -> OptimizerRecord:
        info = self._optimizers.register(optimizer)
        supports = bool(getattr(optimizer, UNSCALES_IN_STEP, False))  # read every time, as it may change
        takes_scaler = supports and info.wants_scaler
        record = OptimizerRecord(
            optimizer,
            info,
            takes_scaler=takes_scaler,
            takes_grad_scale=supports and not takes_scaler,
            hooks_ran=hooks_ran,
        )
        if self._iteration.unclaimed:
            self._adopt_unclaimed(record)
        self._iteration.records[id(optimizer)] = record
        if self._agreement is not None:
            self._agreement.watch(optimizer)
        return record

    def _adopt_unclaimed(self, record: OptimizerRecord) -> None:
        """Give a new record the state that a tool has written for its optimizer in `_per_optimizer_states`."""
        state = self._iteration.unclaimed.pop(id(record.optimizer), None)
        if state is None:
            return
        found = state["found_inf_per_device"]
        state.give_to(record)
        if found:
            self._set_found_inf(record, found)

    def _check_later_backward(self, record: OptimizerRecord, before: Snapshot, call: str) -> OptimizerRecord:
        """Start a new record if gradients were replaced after clipping; raise if a backward has added to them."""
        params, grads = params_and_grads(record.optimizer)
        written, later = before.changed(grads)
        if written:
            raise RuntimeError(
                f"{call}() is being called after a backward has added to gradients that were already clipped: "
                "clip only when all gradients of a step are accumulated"
            )
        record.grads_before_later_loss = None
        if not later:
            return record
        # A step cannot measure the later gradients; only clipping again on all ranks can.
        if self._agreement is not None and call == "step":
            raise _changed_since_clipping()
        earlier = collect(record.optimizer, allow_fp16=True, agreement=self._agreement).without(
            {params[index] for index in later}
        )
        if isinstance(record.state, ClipPending):
            found_inf = measure.combine(record.found_inf_per_device.values(), record.state.divisor)
            # A divisor that overflows would make zeros of gradients whose step is to be skipped.
            factor = torch.where(found_inf != 0, math.nan, measure.reciprocal(record.state.divisor))
            measure.multiply_(earlier.groups, factor, {})
        self._optimizers.shared.mark(earlier.params)
        return self._new_record(record.optimizer, hooks_ran=record.hooks_ran)

    # -- unscaling ----------------------------------------------------------------------------------------------------

    @never_traced
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale an optimizer's gradients in place, and record whether they are finite.

        Call it to inspect or change gradients between the backward and `step`: once per `step`, when all its
        gradients are accumulated. Does not sync, except for CPU gradients.

        Raises:
            RuntimeError: Called twice or after `step` without an `update()` in between, or before the first `scale()`.
            TypeError: `optimizer` is not an optimizer, or has gradients of a dtype or layout that cannot be unscaled.
            ValueError: There are fp16 gradients and they are not allowed. Nothing is changed.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        for observer in OBSERVERS:
            observer.unscaling(self, optimizer)
        record = self._begin_call(optimizer, "unscale_")
        if record.state.awaits_unscaling:
            self._unscale(record, allow_fp16=self._allow_fp16_gradients)
        elif isinstance(record.state, Unscaled) and record.state.allows_unscale_call:
            # Clipping has unscaled already, so this call only uses up the permission.
            record.state = dataclasses.replace(record.state, allows_unscale_call=False)
        else:
            ours = RuntimeError("Call it once per step, and scaler.update() after the step")
            torch_scaler, nothing = torch_words.scaler(stage=OptState.UNSCALED), None  # torch looks at the stage first
            raise torch_words.error(ours, lambda: torch_scaler.unscale_(nothing))  # type: ignore[arg-type]

    def _unscale(self, record: OptimizerRecord, *, allow_fp16: bool, allows_unscale_call: bool = False) -> None:
        """Unscale the gradients in place, and clip them if that was left to a fused step.

        Args:
            record: The optimizer. Gradients that are unscaled already are multiplied by 1, which checks them.
            allow_fp16: Whether fp16 gradients are allowed.
            allows_unscale_call: Whether the user may still call `unscale_`.
        """
        scale, state = self._existing_scale(), record.state
        clip_pending = isinstance(state, ClipPending)
        found_by_clipping = list(record.found_inf_per_device.values()) if clip_pending else []
        # Ranks have agreed on the result of clipping, so a later result of this rank must not replace it.
        was_measured = (
            self._agreement is not None
            and isinstance(state, ClipPending)
            and self._is_unchanged_since_clipping(record, state)
        )
        if isinstance(state, ClipPending) and state.factor is not None:  # it is too fine for 16-bit gradients
            cast(StepsInFP32, record.optimizer)._clip_once_unscaled(factor=state.factor * scale)
            record.state = Ready()
        found = self._divide(record, allow_fp16=allow_fp16)
        if self._optimizers.shared.watches:
            self._optimizers.shared.note_unscaled(params_of(record.optimizer))
        if state.awaits_unscaling:  # otherwise a tool has only checked them again
            record.state = Unscaled(allows_unscale_call, is_clipped=clip_pending)
        if found_by_clipping:
            # What clipping found still skips the step.
            found = {scale.device: measure.combine([*found_by_clipping, *found.values()], scale)}
        if not was_measured:
            self._set_found_inf(record, found)

    def _divide(self, record: OptimizerRecord, *, allow_fp16: bool) -> measure.FoundInfs:
        """Divide gradients by the scale, and by what clips them; return what was found by device."""
        scale = self._existing_scale()
        if self._replaces_unscaling():
            if self._rule.needs_largest:
                # The replacement decides whether fp16 is allowed.
                self._note_largest(record, collect(record.optimizer, allow_fp16=True, agreement=self._agreement))
            # Without a clip factor: with a replacement, clipping has unscaled first.
            return self._unscale_grads_(
                record.optimizer, measure.reciprocal(scale), torch.zeros_like(scale), allow_fp16
            )
        grads = collect(record.optimizer, allow_fp16=allow_fp16, agreement=self._agreement)
        found: measure.FoundInfs = {}
        may_overflow = scale.is_cpu or self._scale_bound.of(scale) < 1.0
        if self._rule.needs_largest and record.largest is None:
            self._note_largest(record, grads)
            if may_overflow and not scale.is_cpu and record.largest is not None and not grads.has_fp16():
                found[scale.device], may_overflow = measure.nonfinite([record.largest]), False
        for factor, groups in self._factors(record, grads):
            measure.multiply_(groups, factor, found)
            if may_overflow:
                measure.find_new_infs(groups, factor, found)
        return found

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply an optimizer's gradients by a factor, even if they are already unscaled.

        For tools that call or replace it: `unscale_` and `step` call it only if a subclass or a script has replaced
        it.

        Returns:
            found_inf by device, fp32 like the argument: 1 if a gradient on the device is not finite.
        """
        grads = collect(optimizer, allow_fp16=allow_fp16, agreement=self._agreement)
        found = {group.device: found_inf.to(group.device, copy=True) for group in grads.groups}
        measure.multiply_(grads.groups, inv_scale, found)
        measure.find_new_infs(grads.groups, inv_scale, found)
        return found

    def _replaces_unscaling(self) -> bool:
        """Return True if a subclass or a script has replaced castwise's `_unscale_grads_`."""
        # ShardedGradScaler's override only changes a default, so castwise's own classes do not count.
        return "_unscale_grads_" in vars(self) or not type(self)._unscale_grads_.__module__.startswith("castwise.")

    def _has_unscaled(self, params: list[torch.Tensor]) -> bool:
        """Return True if a gradient is already unscaled, by another optimizer or earlier by this one."""
        return any(param in self._optimizers.shared.unscaled for param in params)

    def _factors(self, record: OptimizerRecord, grads: Gradients) -> list[tuple[torch.Tensor, list[Group]]]:
        """Return gradients in groups with the factor that unscales (and clips) each; unscaled ones are only clipped."""
        scale, unscaled = self._existing_scale(), self._optimizers.shared.unscaled
        if not record.state.awaits_unscaling:
            return [(torch.ones_like(scale), grads.groups)]
        factor = measure.reciprocal(record.state.divisor if isinstance(record.state, ClipPending) else scale)
        unscaled = {param: unscaled[param] for param in grads.params if param in unscaled} if unscaled else {}
        if not unscaled:
            return [(factor, grads.groups)]
        # What is left for gradients that are unscaled already: 1, or the clipping, rounded.
        clip_factor = factor * scale if isinstance(record.state, ClipPending) else torch.ones_like(scale)
        parts = [(factor, grads.without(unscaled).groups)]
        for param, unless in unscaled.items():
            # A fused step that was skipped on the device has left its gradients scaled.
            kept = clip_factor if unless is None else torch.where(unless.to(scale.device) != 0, factor, clip_factor)
            parts.append((kept, grads.only({param}).groups))
        return parts

    def _note_largest(self, record: OptimizerRecord, grads: Gradients) -> None:
        """Record the largest magnitude of the unscaled gradients, for schedules that need it."""
        if record.largest is not None:
            return
        scale = self._existing_scale()
        found = [torch.zeros_like(scale)]
        for factor, groups in self._factors(record, grads):
            norm, _ = measure.norm_of(groups, math.inf, scale, math.inf)
            found.append((norm * factor.to(norm.device)).float())
        record.largest = torch.stack(found).amax()

    def _set_found_inf(self, record: OptimizerRecord, found: measure.FoundInfs) -> None:
        """Record found_inf for `step` and `update`."""
        if self._agreement is not None or not found:  # a step without gradients counts as finite
            scale = self._existing_scale()
            found = {scale.device: measure.combine(found.values(), scale)}
        record.found_inf_per_device, record.is_reduced = found, self._agreement is None

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
        if self._agreement is not None:
            # Callers decide by the flags, so they are made the same on all ranks.
            self._reduce_found_inf("_found_inf_per_device")
        record = self._iteration.records.get(id(optimizer))
        return {} if record is None else record.found_inf_per_device

    @property
    def _per_optimizer_states(self) -> defaultdict[int, Any]:
        """The per-optimizer states of torch's class, for tools that read or write them."""
        return OptimizerStates.of(self._iteration)

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: Mapping[int, Any]) -> None:
        if isinstance(states, OptimizerStates) and states.iteration is self._iteration:  # after `|=`
            return
        iteration = ScalerIteration()  # an `update` written for torch's class ends an iteration with this assignment
        OptimizerStates.of(iteration).update(states)
        self._iteration = iteration

    # -- clipping -----------------------------------------------------------------------------------------------------

    @never_traced
    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clip an optimizer's gradients by their total norm, instead of `unscale_` and torch's clipping.

        The gradients are read once. A fused optimizer unscales and clips in its own
        step, so its `.grad` stay scaled until then. Otherwise, or after `unscale_`, one multiplication here unscales
        and clips. If gradients are not finite, or the scale is so large that fp32 cannot hold scale * norm / max_norm,
        nothing is clipped and `step` skips. May be called before or after `unscale_`, and repeatedly. A disabled
        scaler clips too. Does not sync, except for CPU gradients.

        Args:
            optimizer: The optimizer; all gradients of its parameters count as one vector.
            max_norm: The largest allowed norm, >= 0; inf only computes the norm.
            norm_type: p of the p-norm, > 0, or inf.
            error_if_nonfinite: Raise instead of skipping the step. This syncs.

        Returns:
            The p-norm of the unscaled gradients before clipping, shape (), on the first gradient's device: fp32, or
            fp64 if a gradient is. It is as accurate as torch's, and 0 without gradients.

        Raises:
            RuntimeError: Called after `step` or before the first `scale()`, a backward has added to clipped gradients,
                or the gradients are not finite and `error_if_nonfinite` is set; or called for a `MasterWeights` after
                `clip_grad_value_`. Nothing is clipped.
            TypeError: `optimizer` is not an optimizer, an argument has the wrong type, or a gradient has a dtype or
                layout that cannot be unscaled.
            ValueError: An argument is out of its range, or there are fp16 gradients and they are not allowed.

        Example:
            >>> import castwise
            >>> scaler = castwise.GradScaler("cpu")
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = torch.optim.SGD([weight], lr=0.1)
            >>> scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
            >>> scaler.clip_grad_norm_(optimizer, max_norm=1.0)
            tensor(5.)
            >>> weight.grad
            tensor([0.6000, 0.8000])
        """
        max_norm, norm_type = measure.check_bound("max_norm", max_norm), measure.check_norm_type(norm_type)
        if not self._enabled:
            if steps_in_fp32(optimizer):  # it clips in its own step, in fp32, where 16-bit gradients are not rounded
                return optimizer.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
            return torch.nn.utils.clip_grad_norm_(params_of(optimizer), max_norm, norm_type, error_if_nonfinite)
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        for observer in OBSERVERS:
            observer.unscaling(self, optimizer)
        record = self._begin_call(optimizer, "clip_grad_norm_", max_norm, norm_type)
        fp32_optimizer = cast(StepsInFP32, optimizer) if record.info.steps_in_fp32 else None
        if fp32_optimizer is not None:
            fp32_optimizer._check_not_clipped_by_value()
        # A fused step computes in fp32, so fp16 gradients are allowed, as in torch.
        allow_fp16 = record.takes_grad_scale or self._allow_fp16_gradients
        grads = self._gradients_to_clip(record, norm_type, allow_fp16=allow_fp16)
        # A step would unscale a repeated gradient once per occurrence.
        leaves_clip_to_step = record.takes_grad_scale and record.state.awaits_unscaling and not grads.repeat
        measured = grads  # as the step will read them
        if fp32_optimizer is not None and not grads.repeat:
            measured = grads.measured_in_fp32(fp32_optimizer._unrounded_sum)
        if isinstance(record.state, ClipPending):
            scaled_by = record.state.divisor  # clipped before: measure the gradients as that call would leave them
        else:
            scaled_by = scale if record.state.awaits_unscaling else torch.ones_like(scale)
        clip, norms = self._measure_clip(record, measured, scaled_by, max_norm, norm_type, not leaves_clip_to_step)
        if error_if_nonfinite and (clip.found_inf or not clip.norm.isfinite()):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {clip.norm.item()}, so they cannot be clipped: "
                "skip the step with error_if_nonfinite=False, or find the cause with castwise.diagnose()"
            )
        if leaves_clip_to_step:
            factor = clip.factor(scaled_by) if record.info.steps_in_fp32 else None
            record.state = ClipPending(clip.divisor, factor, Snapshot(params_and_grads(optimizer)[1]))
        else:
            clip = self._clip_now(record, grads, clip, scaled_by)
        record.found_inf_per_device, record.is_reduced = {scale.device: clip.found_inf}, True
        record.nonfinite_markers, record.norm = norms, clip.norm
        return clip.norm if not grads.groups else clip.norm.to(grads.groups[0].device)

    def _gradients_to_clip(self, record: OptimizerRecord, norm_type: float, *, allow_fp16: bool) -> Gradients:
        """Collect gradients that all are multiplied by the same number.

        They are unscaled first if some of them are already, if a subclass has its own `_unscale_grads_`, or if the
        device adds up their squares in fp32.
        """
        optimizer, agreement = record.optimizer, self._agreement
        grads = collect(optimizer, allow_fp16=allow_fp16, sum_duplicates=True, agreement=agreement)
        if self._rule.needs_largest:
            self._note_largest(record, grads)
        has_unscaled = self._optimizers.shared.unscaled and self._has_unscaled(grads.params)
        sums_in_fp32 = norm_type != math.inf and any(map(measure.needs_unscaling, grads.groups))
        if record.state.awaits_unscaling and (has_unscaled or sums_in_fp32 or self._replaces_unscaling()):
            self._unscale(record, allow_fp16=allow_fp16, allows_unscale_call=True)
            grads = collect(optimizer, allow_fp16=allow_fp16, sum_duplicates=True, agreement=agreement)
        return grads

    def _measure_clip(
        self,
        record: OptimizerRecord,
        grads: Gradients,
        scaled_by: torch.Tensor,
        max_norm: float,
        norm_type: float,
        unscales_here: bool,
    ) -> tuple[measure.Clip, measure.Norms]:
        """Return the numbers that clip, the same on all ranks, and the norm of each parameter's gradient on this one.

        An inf that was found before stays found, as it still skips the step. With `unscales_here`, so does one that the
        unscaling of fp16 gradients will make.
        """
        scaled_norm, norms = measure.norm_of(grads.groups, norm_type, scaled_by, max_norm)
        found_before = list(record.found_inf_per_device.values())
        if self._agreement is not None:
            found_here = [] if record.is_reduced else list(found_before)
            if unscales_here and record.state.awaits_unscaling:
                found_here += measure.fp16_overflows(grads.groups, scaled_by)
            if found_here:  # an inf of this rank alone travels in the norm
                found = measure.combine(found_here, scaled_by)
                scaled_norm = torch.where(found.to(scaled_norm.device) != 0, math.inf, scaled_norm)
            # Part of the ranks' digest: other arguments on another rank raise.
            call = f"clip_grad_norm_({max_norm}, {norm_type}) with {_text(self._refresh_schedule())}"
            scaled_norm = self._agreement.norm(scaled_norm, norm_type, call, grads.share)
        clip = measure.clip(scaled_norm, scaled_by, max_norm, torch.float64 if grads.is_double() else torch.float32)
        if found_before:
            found_inf = measure.combine([clip.found_inf, *found_before], scaled_by)
            clip = clip._replace(found_inf=(found_inf != 0).float())  # tools may have written other numbers
        return clip, norms

    def _clip_now(
        self, record: OptimizerRecord, grads: Gradients, clip: measure.Clip, scaled_by: torch.Tensor
    ) -> measure.Clip:
        """Unscale and clip gradients in place; return the numbers with what that has found."""
        state = record.state
        if state.awaits_unscaling and grads.has_fp16():
            # Unscaling may make an fp16 gradient infinite even if the norm is finite.
            self._unscale(record, allow_fp16=True, allows_unscale_call=True)
            found_infs = [clip.found_inf, *record.found_inf_per_device.values()]
            clip = clip._replace(found_inf=measure.combine(found_infs, clip.found_inf))
            scaled_by = torch.ones_like(scaled_by)
        if record.info.steps_in_fp32 and not state.awaits_unscaling:
            cast(StepsInFP32, record.optimizer)._clip_once_unscaled(factor=clip.factor(scaled_by))
        else:
            measure.multiply_(grads.groups, clip.factor(scaled_by), {clip.found_inf.device: clip.found_inf})
        if state.awaits_unscaling and self._optimizers.shared.watches:
            self._optimizers.shared.note_unscaled(params_of(record.optimizer))
        # This call has unscaled, so the user still may call unscale_, unless they did before.
        record.state = Unscaled(not isinstance(state, Unscaled) or state.allows_unscale_call, is_clipped=True)
        return clip

    @never_traced
    def clip_grad_value_(self, optimizer: torch.optim.Optimizer, clip_value: float) -> None:
        """Unscale an optimizer's gradients, unless they already are, and clip each element to [-v, v].

        May be called wherever `clip_grad_norm_` may, also on a disabled scaler.

        Args:
            optimizer: The optimizer. A fused one cannot clip elements in its step, so they are always clipped here,
                except those of a `MasterWeights`, which clips them in fp32 in its step.
            clip_value: v, >= 0.

        Raises:
            RuntimeError: Called after `step` or before the first `scale()`.
            TypeError: `optimizer` is not an optimizer, `clip_value` is not a number, or there are complex gradients.
            ValueError: `clip_value` < 0, or there are fp16 gradients and they are not allowed.
        """
        clip_value = measure.check_bound("clip_value", clip_value)
        if not self._enabled:
            if steps_in_fp32(optimizer):
                optimizer.clip_grad_value_(clip_value)
            else:
                torch.nn.utils.clip_grad_value_(params_of(optimizer), clip_value)
            return
        self._check_scale_growth_tracker("clip_grad_value_")
        for observer in OBSERVERS:
            observer.unscaling(self, optimizer)
        record = self._begin_call(optimizer, "clip_grad_value_", clip_value)
        allow_fp16 = record.info.steps_in_fp32 or self._allow_fp16_gradients
        collect(  # raises before anything is unscaled, and adds up duplicates of sparse gradients
            record.optimizer, allow_fp16=allow_fp16, allow_complex=False, sum_duplicates=True, agreement=self._agreement
        )
        if record.info.steps_in_fp32:
            cast(StepsInFP32, optimizer)._clip_once_unscaled(clip_value=clip_value)
            return
        self._unscale_if_needed(record, allow_fp16=allow_fp16)
        with torch.no_grad():
            for group in collect(record.optimizer, allow_fp16=allow_fp16, agreement=self._agreement).groups:
                if clip_value <= torch.finfo(group.dtype).max:  # else the dtype cannot hold it
                    torch._foreach_clamp_min_(group.tensors, -clip_value)
                    torch._foreach_clamp_max_(group.tensors, clip_value)

    def _unscale_if_needed(self, record: OptimizerRecord, *, allow_fp16: bool) -> None:
        """Unscale gradients unless they already are, and still allow the user to call `unscale_`."""
        if record.state.awaits_unscaling:
            self._unscale(record, allow_fp16=allow_fp16, allows_unscale_call=True)

    # -- the step -----------------------------------------------------------------------------------------------------

    @never_traced
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients and step the optimizer; skip the step if they are not finite.

        Syncs with the host to decide whether to skip, except for fused optimizers, which decide on the device.
        After a step, `.grad` are unscaled, and clipped if `clip_grad_norm_` was called. After a skipped step they are
        not finite: a fused optimizer leaves them unchanged, any other leaves them unscaled.

        The optimizer may call a closure several times. The closure calls `scaler.scale(loss).backward()`, may call
        `clip_grad_norm_`, and returns the unscaled loss. If an evaluation is not finite, the step is skipped, and the
        parameters and the optimizer's state are restored from a copy.

        Args:
            optimizer: The optimizer whose gradients come from scaled losses.
            *args: Passed to `optimizer.step`; the first one may be a closure.
            **kwargs: Passed to `optimizer.step`.

        Returns:
            The result of `optimizer.step`; None if the step was skipped.

        Raises:
            RuntimeError: Called twice or after `skip` without an `update()` in between, or before the first `scale()`.
            TypeError: `optimizer` is not an optimizer, or has gradients of a dtype or layout that cannot be unscaled.
            ValueError: There are fp16 gradients and they are not allowed. Nothing is changed.
        """
        if not OBSERVERS:
            return self._step(optimizer, *args, **kwargs)
        with notify_of_step(self, optimizer):
            return self._step(optimizer, *args, **kwargs)

    def _step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self._enabled:
            returned = optimizer.step(*args, **kwargs)
            info = self._optimizers.register(optimizer, is_scaled=False)
            self._last_step = info.last_step = LastStep(self.iteration)
            return returned
        closure = closures.closure_of(args, kwargs) if args or kwargs else None
        if closure is None:  # the closure's own scale() may be the first
            self._check_scale_growth_tracker("step")
        record = self._begin_call(optimizer, "step", runs_hooks=closure is None)
        if closure is not None:
            returned = self._step_with_closure(record, closure, args, kwargs)
            # Evaluations have replaced the record, and a closure may even have called update().
            record = self._iteration.records.get(id(optimizer)) or self._new_record(optimizer)
        elif record.takes_scaler:
            hint = (
                "step(grad_scaler=...) is deprecated: read the tensors grad_scale and found_inf that GradScaler sets "
                "on the optimizer instead"
            )
            warn(torch_words.warning_of_step(hint), FutureWarning)
            returned = optimizer.step(*args, **kwargs | {"grad_scaler": self})
        elif record.takes_grad_scale:
            returned = self._step_with_scale(record, *args, **kwargs)
        else:
            if record.state.awaits_unscaling:
                self.unscale_(optimizer)  # the public method, as in torch, because subclasses override it
            if self._agreement is not None:
                self._reduce_found_inf("step")
            returned = self._maybe_opt_step(optimizer, record, *args, **kwargs)
        record.state = Stepped()
        found_infs = list(record.found_inf_per_device.values())
        # A fused step's outcome comes with its flag on every device, as it must on accelerators.
        step_taken = None if record.takes_grad_scale else record.step_taken
        last = LastStep(self._outcomes.updates + 1, found_infs, step_taken=step_taken)
        self._last_step = record.info.last_step = last
        return returned

    def _maybe_opt_step(self, optimizer: torch.optim.Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        record = optimizer_state
        if type(record) is not OptimizerRecord:  # from a `step` written for torch's class
            record = self._iteration.records.get(id(optimizer)) or self._new_record(optimizer)
            record.found_inf_per_device = optimizer_state["found_inf_per_device"]
        if self._decide_skip(record):
            return None
        return optimizer.step(*args, **kwargs)

    def _decide_skip(self, record: OptimizerRecord) -> bool:
        """Read found_inf, which waits for the device; record and return whether the step is skipped.

        If it is, also record which gradients are not finite, because they may be gone before `update`.
        """
        flags = record.found_inf_per_device.values()
        is_on_host = all(flag.is_cpu for flag in flags)
        record.step_taken = not (any(map(torch.Tensor.item, flags)) if is_on_host else any_set(flags))
        if not record.step_taken:
            params, grads = params_and_grads(record.optimizer)
            still_scaled_by = self._scale if record.state.awaits_unscaling else None
            record.note_nonfinite(measure.local_flags(params, grads, still_scaled_by))
            for observer in OBSERVERS:
                observer.skipped(self, record.optimizer, is_scaled=still_scaled_by is not None)
        return not record.step_taken

    def _step_with_scale(self, record: OptimizerRecord, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer that unscales, clips and skips in its own step."""
        scale, optimizer, shared = self._existing_scale(), record.optimizer, self._optimizers.shared
        if record.state.awaits_unscaling and shared.unscaled and self._has_unscaled(params_of(optimizer)):
            # One grad_scale applies to all its gradients, but some are already unscaled.
            self._unscale(record, allow_fp16=True)
        state = record.state
        if isinstance(state, Ready) or (
            isinstance(state, ClipPending) and not self._is_unchanged_since_clipping(record, state)
        ):
            self._check_inf_per_device(optimizer)
            state = record.state
        if self._agreement is not None:
            self._reduce_found_inf("step")
        found_inf = measure.combine(record.found_inf_per_device.values(), scale)  # fused kernels compare it with 1
        # An accelerator decides without the host, so observers hear of a skip on a CPU only.
        may_be_skipped = not found_inf.is_cpu or self._decide_skip(record)
        attributes = {"grad_scale": self._grad_scale(record), "found_inf": found_inf}
        # The factor does not contain a grad_scale that the user has set.
        if (
            isinstance(state, ClipPending)
            and state.factor is not None
            and getattr(optimizer, "grad_scale", None) is None
        ):
            attributes["grad_factor"] = state.factor
        with closures.temporary_attributes(optimizer, **attributes):
            # Called even if it is skipped, as in torch: the optimizer reads found_inf and changes nothing.
            if may_be_skipped and isinstance(optimizer, torch.optim.SGD):
                with closures.no_momentum_of_a_skipped_step(optimizer, found_inf):
                    returned = optimizer.step(*args, **kwargs)
            else:
                returned = optimizer.step(*args, **kwargs)
        # torch's fused kernels write the gradients back unscaled, unless they skip; other kernels may not.
        if state.awaits_unscaling and shared.watches and type(optimizer).step.__module__.startswith("torch.optim."):
            shared.note_unscaled(params_of(optimizer), unless=found_inf)
        return returned

    def _is_unchanged_since_clipping(self, record: OptimizerRecord, state: ClipPending) -> bool:
        """Return True if the gradients are still those that clipping has left to a fused step."""
        is_unchanged = state.grads.matches(params_and_grads(record.optimizer)[1])
        if self._agreement is not None and not is_unchanged:
            raise _changed_since_clipping()  # ranks decided on the earlier gradients, and one rank cannot check alone
        return is_unchanged

    @never_traced
    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
        """Record whether an optimizer's gradients would be finite once divided by the scale.

        They stay scaled, unless a gradient occurs twice: then they are unscaled here.
        """
        if self._scale is None:
            self._check_scale_growth_tracker("_check_inf_per_device")
        scale = self._existing_scale()
        record = self._iteration.records.get(id(optimizer)) or self._new_record(optimizer)
        if self._replaces_unscaling():
            # A factor of 1, as in torch: only checks them.
            found = self._unscale_grads_(optimizer, torch.ones_like(scale), torch.zeros_like(scale), True)
            self._set_found_inf(record, found)
            return record.found_inf_per_device
        grads = collect(record.optimizer, allow_fp16=True, agreement=self._agreement)
        if grads.repeat:  # an optimizer that writes gradients back would unscale one once per occurrence
            self._unscale(record, allow_fp16=True)
            return record.found_inf_per_device
        if self._rule.needs_largest:
            self._note_largest(record, grads)
        divisor = self._grad_scale(record)
        found, norms = measure.check(grads.groups, torch.ones_like(scale) if divisor is None else divisor)
        record.nonfinite_markers = norms
        state = record.state
        if isinstance(state, ClipPending) or (isinstance(state, Unscaled) and state.is_clipped):
            # The result of clipping still counts, as it does for other optimizers.
            flags = [*record.found_inf_per_device.values(), *found.values()]
            found = {scale.device: measure.combine(flags, scale)}
        self._set_found_inf(record, found)
        return record.found_inf_per_device

    def _grad_scale(self, record: OptimizerRecord) -> torch.Tensor | None:
        """Return the divisor that gradients still need, including a `grad_scale` that the user has set."""
        user_scale = getattr(record.optimizer, "grad_scale", None)
        scale = self._get_scale_async()  # torch's accessor, which subclasses override
        assert scale is not None
        if isinstance(user_scale, (int, float)):
            user_scale = torch.full_like(scale, user_scale)
        if not record.state.awaits_unscaling:  # unscaled already: only the user's own factor is left
            return user_scale
        divisor = record.state.divisor if isinstance(record.state, ClipPending) else scale
        return divisor if user_scale is None else divisor * user_scale

    def _step_with_closure(
        self,
        record: OptimizerRecord,
        closure: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Unscale and check gradients after every evaluation, also for a fused optimizer, which steps later."""
        optimizer, hooks_ran = record.optimizer, record.hooks_ran
        allow_fp16 = self._allow_fp16_gradients or record.takes_grad_scale
        losses_before = list(self._iteration.losses)

        def evaluate() -> Any:
            # Every evaluation begins with scaled, unchecked gradients.
            self._iteration.losses[:] = losses_before  # its losses replace those of the evaluation before
            return self._evaluate(self._new_record(optimizer, hooks_ran=hooks_ran), closure, allow_fp16=allow_fp16)

        # Gradients clipped or unscaled before the step count as unscaled until an evaluation writes them.
        if isinstance(record.state, ClipPending):
            self._unscale_if_needed(record, allow_fp16=allow_fp16)
        if isinstance(record.state, Unscaled):
            self._optimizers.shared.mark(params_of(optimizer))
        args, kwargs = closures.with_closure(args, kwargs, evaluate)
        # `MasterWeights` calls the closure before it changes anything, and only it may write to its weights.
        undo = contextlib.nullcontext() if record.info.steps_in_fp32 else closures.put_back_on_error(optimizer)
        try:
            with undo:
                return optimizer.step(*args, **kwargs)
        except closures.NonFiniteEvaluationError:
            return None
        except BaseException:
            self._iteration.records.pop(id(optimizer), None)  # nothing was stepped, and the closure owns the gradients
            raise

    def _evaluate(self, record: OptimizerRecord, closure: Callable[[], Any], *, allow_fp16: bool) -> Any:
        """Call a closure, unscale the gradients that it has computed, and return its loss.

        Raises:
            NonFiniteEvaluationError: The loss or a gradient is not finite, on any of the ranks that agree.
        """
        optimizer, shared = record.optimizer, self._optimizers.shared
        before = Snapshot(params_and_grads(optimizer)[1])
        loss = closure()
        params, grads = params_and_grads(optimizer)
        written, new = before.changed(grads)  # these are scaled, however the closure computes them
        shared.forget([params[index] for index in (*written, *new)])
        # A later backward in the closure may have replaced the record after clipping.
        record = self._iteration.records.get(id(optimizer), record)
        scale, _ = self._check_scale_growth_tracker("step")
        if self._gradients_hooks:
            self._run_gradients_hooks(record)
        self._unscale_if_needed(record, allow_fp16=allow_fp16)
        shared.mark(params)  # in case the next evaluation computes no gradients
        is_finite = closures.is_finite(loss)
        if not is_finite or self._agreement is not None:  # ranks agree on the loss as well
            # A loss that is not finite skips the step even if the gradients are finite.
            found = record.found_inf_per_device if is_finite else {scale.device: torch.ones_like(scale)}
            self._set_found_inf(record, dict(found))
        if self._agreement is not None:
            self._reduce_found_inf("step")
        if self._decide_skip(record):
            raise closures.NonFiniteEvaluationError
        return loss

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave an optimizer out of this iteration on purpose, so that `update()` accepts the missing step.

        Its gradients stay as clipping left them (see the manual's page on clipping), so zero them before the next
        backward. If `unscale_` or clipping found that they are not finite, the scale still backs off. If nothing was
        checked and no other optimizer steps, the scale does not change.

        Raises:
            RuntimeError: Called after `step` or `skip` of the same optimizer without an `update()` in between.
            TypeError: `optimizer` is not an optimizer.
        """
        if not self._enabled:
            return
        record = self._begin_call(optimizer, "skip", runs_hooks=False)
        record.state = SkipCalled()

    # -- the end of an iteration --------------------------------------------------------------------------------------

    @never_traced
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """End an iteration: move the scale according to the results of its steps, once for all optimizers.

        Args:
            new_scale: Set the scale to this instead: a number, or a one-element tensor without `requires_grad` on the
                scaler's type of device, which is read on the host. The growth tracker does not change.

        Raises:
            RuntimeError: Called before the first `scale()`, or without `new_scale` if nothing was stepped, unscaled or
                skipped with `skip()`.
            TypeError: `new_scale` is neither a number nor such a tensor.
            ValueError: `new_scale` is below 2**-126 or not finite in fp32.
        """
        if not self._enabled:
            return
        number = None if new_scale is None else self._number(new_scale)
        for observer in OBSERVERS:
            observer.updating(self, is_set=number is not None)
        if self._agreement is not None:
            self._reduce_found_inf("update")
        iteration, outcomes = self._iteration, self._outcomes
        found_infs: list[torch.Tensor] = []
        steps = []
        for record in iteration.records.values():
            # Gradients that changed since clipping stay scaled.
            if isinstance(record.state, ClipPending) and record.state.grads.matches(
                params_and_grads(record.optimizer)[1]
            ):
                self._unscale(record, allow_fp16=True)  # their fused step may come after this iteration
            found_infs += record.found_inf_per_device.values()
            # No flags: the optimizer took the scaler itself, or never called its closure.
            if isinstance(record.state, Stepped) and record.found_inf_per_device:
                steps.append(record)
        for state in iteration.unclaimed.values():
            found_infs += state["found_inf_per_device"].values()
        # A copy, because the scale moves in place; needed only for steps to report.
        scale_before = self._scale.clone() if self._scale is not None and any(map(outcomes.wants, steps)) else None
        # After skip() alone the scale stays; after no call at all, _move_scale raises.
        if number is not None or found_infs or not iteration.has_only_skip_calls():
            self._move_scale(number, found_infs)
        outcomes.add(steps, scale_before, self._scale, iteration)
        if self._agreement is not None:
            self._agreement.note_update(number)
        # Before settle, which may raise ScaleExhausted: the iteration is over all the same.
        self._iteration = ScalerIteration()
        if self._optimizers.shared.watches:
            self._optimizers.shared.begin_iteration()
        has_pending = bool(self._after_steps.calls or outcomes.pending)
        if has_pending and not (self._scale is not None and is_capturing(self._scale)):  # where the host may not wait
            self._after_steps.run(outcomes.updates)
            outcomes.settle(self._rule, ranks_agree=self._agreement is not None)

    def _number(self, new_scale: float | torch.Tensor) -> float:
        if not isinstance(new_scale, torch.Tensor):
            return check_scale("new_scale", new_scale)
        if new_scale.numel() != 1 or new_scale.requires_grad or new_scale.device.type != self._device:
            ours = TypeError(
                f"new_scale must be a number or a one-element tensor on {self._device} without requires_grad, "
                f"got {tuple(new_scale.shape)} on {new_scale.device.type}, requires_grad={new_scale.requires_grad}"
            )
            torch_scaler = torch_words.scaler(stage=OptState.READY, _device=self._device)
            raise torch_words.error(ours, lambda: torch_scaler.update(new_scale))
        return check_scale("new_scale", new_scale.item())

    def _move_scale(self, new_scale: float | None, found_infs: list[torch.Tensor]) -> None:
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            scale.fill_(new_scale)
            self._note_scale(new_scale)
        elif found_infs:
            trackers = {"growth_tracker": growth_tracker, **self._trackers}
            schedule, found_inf = self._refresh_schedule(), measure.combine(found_infs, scale)
            wants_more = schedule.needs_loss or schedule.needs_largest
            facts = self._iteration_facts(found_inf) if wants_more else IterationFacts(found_inf)
            if scale.is_cpu:
                schedule.advance_(scale, trackers, facts)
            else:
                self._scale_bound.before_update(scale)
                schedule.advance_(scale, trackers, facts)
                is_finite = not self._iteration.unclaimed and all(
                    map(_is_known_taken, self._iteration.records.values())
                )
                self._scale_bound.after_update(scale, functools.partial(schedule.lowest_after, is_finite=is_finite))
        else:
            ours = RuntimeError("Call scaler.step(optimizer) or scaler.unscale_(optimizer) before each update()")
            raise torch_words.error(ours, torch_words.scaler(stage=OptState.READY).update)

    def _iteration_facts(self, found_inf: torch.Tensor) -> IterationFacts:
        """Return the results of the iteration that the schedule needs, the same on all ranks."""
        found = [record.largest for record in self._iteration.records.values() if record.largest is not None]
        largest = measure.combine(found, found_inf) if found else torch.zeros_like(found_inf)
        loss_is_nonfinite = self._iteration.loss_is_nonfinite(found_inf)
        if self._agreement is not None:
            call = f"update() with {_text(self._refresh_schedule())}"
            # Where it is not finite, found_inf is set and Headroom does not read it.
            known = torch.where(largest.isfinite(), largest, 0.0)
            loss_is_nonfinite, largest = self._agreement.maxima([loss_is_nonfinite, known], call)
        return IterationFacts(found_inf, loss_is_nonfinite.float(), largest.float())

    def _reduce_found_inf(self, call: str) -> None:
        """Reduce over the ranks all found_inf that are not yet reduced, in one collective for all optimizers."""
        assert self._agreement is not None
        records = [record for record in self._iteration.records.values() if not record.is_reduced]
        if records:
            flags = [flag for record in records for flag in record.found_inf_per_device.values()]
            # In place, in the tensors of the records.
            self._agreement.any_(flags, f"{call}() with {_text(self._refresh_schedule())}")
        for record in records:
            record.is_reduced = True

    # -- the outcome of steps -----------------------------------------------------------------------------------------

    @property
    def step_skipped(self) -> torch.Tensor:
        """Whether the last `step` was skipped: bool, shape (), on the scale's device, without a sync.

        False before the first step, and whenever the scaler is disabled.
        """
        found = () if self._last_step is None else self._last_step.found_infs
        if self._scale is None or not found:
            return torch.zeros((), dtype=torch.bool, device=None if self._scale is None else self._scale.device)
        return measure.combine(found, self._scale) != 0

    @never_traced
    def step_scheduler(
        self, scheduler: Any, *args: Any, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        """Advance a learning-rate scheduler, or call a function, if the optimizer's last `step` was taken.

        Call it once per iteration, after `step` and before or after `update`. A scheduler advances once for each step
        taken: a skipped step, or a call without a new step, advances nothing. Functions cannot be distinguished, so a
        function is called if the step was in the current iteration, or in the previous one and nothing was scaled
        since. If the host does not know the outcome yet (a fused optimizer on an accelerator), this happens up to two
        updates later; `synchronize()`, `state_dict()` and pickling make all pending calls.

        Args:
            scheduler: An object with a `step()` method, or a function.
            *args: Passed to it.
            optimizer: The optimizer whose step counts; by default `scheduler.optimizer`, if it has one, else the
                optimizer of the last `step`.
            **kwargs: Passed to it.

        Raises:
            TypeError: `scheduler` has no `step` and is not a function, or it is a module.
        """
        call = scheduler_call(scheduler, args, kwargs)
        optimizer = getattr(scheduler, "optimizer", None) if optimizer is None else optimizer
        last = (
            self._last_step
            if optimizer is None
            else self._optimizers.register(optimizer, is_scaled=self._enabled).last_step
        )
        is_function = not hasattr(scheduler, "step")
        # `claim` also notes the scheduler, so that a step advances it once.
        if last is not None and (self._is_recent(last) if is_function else last.claim(scheduler)):
            self._after_steps.add(last, call)
        elif last is None and self._last_step is not None and not self._has_warned_of_unstepped:
            self._has_warned_of_unstepped = True
            warn(
                f"step_scheduler() advances nothing yet: the optimizer of this {type(scheduler).__name__} was never "
                "stepped with this scaler, but others were. If it is wrapped, pass the one that steps as optimizer=...",
                UserWarning,
            )
        self._after_steps.run(self._outcomes.updates)

    def _is_recent(self, step: LastStep) -> bool:
        is_of_previous = step.iteration == self.iteration - 1 and not self._iteration.seen_losses()
        return step.iteration == self.iteration or is_of_previous

    @never_traced
    def synchronize(self) -> None:
        """Wait for the device, make all pending calls of `step_scheduler`, and run the step hooks for all steps.

        Raises:
            ScaleExhausted: Too many steps were skipped, and the schedule's `on_exhausted` is "raise".
        """
        self._after_steps.run()
        self._outcomes.settle(self._rule, ranks_agree=self._agreement is not None, all_=True)

    def register_step_hook(self, hook: Callable[[StepFacts], object]) -> RemovableHandle:
        """Call a function with the facts of each step, in `update`; on an accelerator, two updates later.

        A disabled scaler calls none. The last value other than None that hooks have returned since a step was taken
        becomes the `diagnosis` of a `ScaleExhausted`, or ends the warning that is shown instead.

        Args:
            hook: Called with the `StepFacts`, plain numbers on the host.

        Returns:
            A handle whose `remove()` unregisters the hook.
        """
        return add_hook(self._outcomes.hooks, hook)

    def register_gradients_hook(self, hook: Callable[[torch.optim.Optimizer, torch.Tensor], object]) -> RemovableHandle:
        """Call a function before an optimizer's gradients are read or changed for the first time in an iteration.

        The gradients are as the backward left them, still scaled. If `step` is given a closure, the function is called
        for each of its evaluations. A disabled scaler calls none.

        Args:
            hook: Called with the optimizer and the scale (fp32, shape (), on its device).

        Returns:
            A handle whose `remove()` unregisters the hook.
        """
        return add_hook(self._gradients_hooks, hook)

    def _run_gradients_hooks(self, record: OptimizerRecord) -> None:
        if self._gradients_hooks and not record.hooks_ran:
            scale, _ = self._check_scale_growth_tracker("step")
            for hook in tuple(self._gradients_hooks.values()):
                hook(record.optimizer, scale)
            record.hooks_ran = True

    # -- numbers ------------------------------------------------------------------------------------------------------

    def _refresh_schedule(self) -> Schedule:
        """Return the schedule with the numbers that subclasses and frameworks may have set on the scaler."""
        rule = self._rule
        if isinstance(rule, Dynamic) and self._enabled:
            now = (self._growth_factor, self._backoff_factor, self._growth_interval)
            if now != (rule.growth_factor, rule.backoff_factor, rule.growth_interval):
                growth_factor, backoff_factor, growth_interval = now
                self._rule = rule = dataclasses.replace(
                    rule, growth_factor=growth_factor, backoff_factor=backoff_factor, growth_interval=growth_interval
                )
        return rule

    @property
    def schedule(self) -> Schedule:
        """The schedule that moves the scale: the given one, or `schedules.Dynamic`."""
        return self._refresh_schedule()

    @property
    def agrees(self) -> bool:
        """Whether all ranks take and skip the same steps; False for a process group that leaves out some ranks."""
        return self._agreement is not None and self._agreement.is_of_all_ranks()

    @property
    def iteration(self) -> int:
        """The number of the current iteration: starts at 1 in each process and grows by 1 with each `update`."""
        return self._outcomes.updates + 1

    def _get_scale_async(self) -> torch.Tensor | None:
        return self._scale

    @never_traced
    def get_scale(self) -> float:
        """Return the scale as a Python number, 1.0 when disabled. Syncs with the device."""
        if not self._enabled:
            return 1.0
        for observer in OBSERVERS:
            observer.reading_scale(self)
        scale = self._get_scale_async()
        return self._init_scale if scale is None else float(scale.item())

    def get_growth_factor(self) -> float:
        """Return the factor by which the scale grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows.

        Args:
            new_factor: Finite, > 1.

        Raises:
            TypeError: `new_factor` is not a number.
            ValueError: `new_factor` is out of its range.
            RuntimeError: The schedule has no such factor.
        """
        self._refuse_without("growth_factor")
        self._growth_factor = Dynamic(growth_factor=new_factor).growth_factor

    def get_backoff_factor(self) -> float:
        """Return the factor that multiplies the scale after a skipped step."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor that multiplies the scale after a skipped step.

        Args:
            new_factor: In (0, 1).

        Raises:
            TypeError: `new_factor` is not a number.
            ValueError: `new_factor` is out of its range.
            RuntimeError: The schedule has no such factor.
        """
        self._refuse_without("backoff_factor")
        self._backoff_factor = Dynamic(backoff_factor=new_factor).backoff_factor

    def get_growth_interval(self) -> int:
        """Return the number of finite steps after which the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of finite steps after which the scale grows.

        Args:
            new_interval: Steps, >= 1.

        Raises:
            TypeError: `new_interval` is not an integer.
            ValueError: `new_interval` is out of its range.
            RuntimeError: The schedule has no such interval.
        """
        self._refuse_without("growth_interval")
        self._growth_interval = Dynamic(growth_interval=new_interval).growth_interval

    def _refuse_without(self, name: str) -> None:
        if not hasattr(self._rule, name):
            raise RuntimeError(f"{self._rule} has no {name}, so it cannot be set")

    @never_traced
    def _get_growth_tracker(self) -> int:
        if not self._enabled:
            return 0
        return self._init_growth_tracker if self._growth_tracker is None else int(self._growth_tracker.item())

    def _get_trackers(self) -> dict[str, float]:
        return {name: tracker.item() for name, tracker in self._trackers.items()} or dict(self._init_trackers)

    def is_enabled(self) -> bool:
        """Return True if this scaler is enabled; False also if it has disabled itself for lack of CUDA."""
        return self._enabled

    def __repr__(self) -> str:
        if "_last_step" not in vars(self):  # a subclass has not called __init__ yet
            return object.__repr__(self)
        name = f"{type(self).__name__}({self._device!r}"
        if not self._enabled:
            return f"{name}, enabled=False)"
        try:
            rule = self._refresh_schedule()
        except (TypeError, ValueError):  # a subclass or a framework has set numbers that no schedule accepts
            rule = self._rule
        fp16 = ", allow_fp16_gradients=True" if self._allow_fp16_gradients else ""
        group = ", process_group=..." if self._agreement is not None else ""
        return f"{name}, schedule={rule}{fp16}{group})"

    # -- saving and loading -------------------------------------------------------------------------------------------

    @never_traced
    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers, in torch's format; empty when disabled. Syncs with the device.

        Returns:
            `scale`, `growth_factor`, `backoff_factor` (floats), `growth_interval` and `_growth_tracker` (ints), as in
            torch; `steps_taken`, `steps_skipped` and `skips_in_a_row` (ints), which torch's scaler ignores; and
            `schedule` (its name, settings and trackers), unless it is the same as torch's.

        Raises:
            ScaleExhausted: See `synchronize()`.
        """
        if not self._enabled:
            return {}
        self.synchronize()
        for observer in OBSERVERS:
            observer.saving(self)
        schedule, (steps, skips, skips_in_a_row) = self._refresh_schedule(), self._outcomes.counts
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
        # Torch's numbers say it all unless there are other settings.
        if schedule != Dynamic(schedule.init_scale, self._growth_factor, self._backoff_factor, self._growth_interval):
            numbers["schedule"] = checkpoint.of_schedule(schedule, self._get_trackers())
        return numbers

    @never_traced
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state from `state_dict()` of this class or of torch's; a disabled scaler ignores it.

        Pending results of earlier steps are dropped: they advance no scheduler and call no hook.

        Args:
            state_dict: Plain numbers by name.

        Raises:
            RuntimeError: `state_dict` is empty, as from a disabled scaler.
            TypeError: `state_dict` is not a mapping, or an entry has the wrong type. Nothing is changed.
            ValueError: An entry is missing (then it is a KeyError, too), unknown or out of its range. Nothing is
                changed.
        """
        if not self._enabled:
            return
        saved = checkpoint.read(state_dict, self._refresh_schedule())
        if self._agreement is not None:
            self._agreement.start(saved.scale, saved.growth_tracker, *saved.trackers.values())
        self._adopt(saved.schedule, saved.trackers)
        # After _adopt, which sets the schedule's own first scale.
        self._init_scale, self._init_growth_tracker = saved.scale, saved.growth_tracker
        self._after_steps = AfterSteps()
        self._last_step = None
        self._optimizers.forget_last_steps()
        taken, skips, skips_in_a_row = saved.counts
        self._outcomes.counts = taken + skips, skips, skips_in_a_row  # also drops pending results
        if self._scale is not None:
            self._scale.fill_(saved.scale)
            self._note_scale(saved.scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(saved.growth_tracker)
        if self._scale is not None and self._trackers.keys() != saved.trackers.keys():
            # The loaded schedule has other options and so other trackers.
            self._trackers = on_device(saved.trackers, self._scale.device)
        for name, tracker in self._trackers.items():
            tracker.fill_(saved.trackers[name])
        for observer in OBSERVERS:
            observer.loaded(self)

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._iteration.has_begun():
            ours = RuntimeError("To pickle or copy it now, call scaler.update() first")
            torch_scaler = torch_words.scaler(_per_optimizer_states={0: {}})
            raise torch_words.error(ours, torch_scaler.__getstate__)
        # Leave out what belongs to this process. Numbers are kept, and move to a device on first use.
        fresh = object.__new__(type(self))
        fresh._reset_process_state()
        state = {name: value for name, value in self.__dict__.items() if name not in vars(fresh)}
        if self._enabled:
            self.synchronize()
        for observer in OBSERVERS:
            observer.saving(self)
        return state | {
            "_init_scale": self.get_scale() if self._enabled else self._init_scale,
            "_init_growth_tracker": self._get_growth_tracker(),
            "_init_trackers": self._get_trackers(),
            "_counts": self._outcomes.counts,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_counts" not in state:
            self._take_over(state)
            return
        self._reset_process_state()
        self._outcomes.counts = state.pop("_counts")
        self.__dict__.update(state)

    def _take_over(self, state: dict[str, Any]) -> None:
        """Take the state of an object of torch's class, which a script has pickled whole without castwise."""
        settings = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
        known = {name: state[f"_{name}"] for name in settings if f"_{name}" in state}  # a disabled one has no numbers
        GradScaler.__init__(self, state["_device"], **known)
        self._init_growth_tracker = state.get("_init_growth_tracker", 0)
        torch_only = ("_scale", "_growth_tracker", "_per_optimizer_states")
        self.__dict__.update({name: state[name] for name in state.keys() - vars(self).keys() - {*torch_only}})


@functools.lru_cache(maxsize=8)
def _text(schedule: Schedule) -> str:
    return repr(schedule)


def _is_known_taken(record: OptimizerRecord) -> bool:
    return bool(record.step_taken)


def _changed_since_clipping() -> RuntimeError:
    return RuntimeError(
        "the gradients have changed since clip_grad_norm_() measured them on all ranks: call it again on all ranks, "
        "when all gradients of the step are accumulated"
    )


def _check_is_loss(outputs: object) -> None:
    if isinstance(outputs, torch.Tensor):
        return
    if not isinstance(outputs, Iterable) or isinstance(outputs, (str, bytes, Mapping)):
        ours = ValueError(f"scale() cannot scale {outputs!r}")
        nothing: Any = None  # torch goes on for ever into the letters of a string
        raise torch_words.error(ours, lambda: torch_words.scaler().scale(nothing))
    if isinstance(outputs, (list, tuple)):
        for output in outputs:
            _check_is_loss(output)


def _check_schedule(schedule: object) -> None:
    if not isinstance(schedule, Schedule) or type(schedule) is Schedule:
        raise TypeError(
            f"schedule must be one of castwise.schedules, such as Dynamic(init_scale=1024.0), got {schedule!r}"
        )


def _refuse_numbers_with(schedule: Schedule, *numbers: float) -> None:
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    defaults = (INIT_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL)
    conflicting = [
        f"{name}={given!r}"
        for name, given, default in zip(names, numbers, defaults, strict=True)
        if given is not default  # by identity, so that a default passed explicitly counts as given (see INIT_SCALE)
    ]
    if conflicting:
        raise ValueError(
            f"{', '.join(conflicting)} cannot be combined with schedule=: use the arguments of "
            f"{type(schedule).__name__}(...) instead"
        )
