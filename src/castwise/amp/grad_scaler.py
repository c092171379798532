"""`GradScaler`: the state machine of gradient scaling. Nothing here is numeric.

What the gradients are is in `gradients`, how they are measured and unscaled in `unscaling` and `measuring`, which ones
are unscaled already in `ledger`, what is known of an optimizer in `optimizer_state`, how the scale moves in
`schedules`. Attributes with a leading underscore that torch's class has as
well keep its names and meaning: subclasses and frameworks use them, down to replacing `_unscale_grads_` on an instance.

Under `torch.compile` only `scale` is traced; the rest looks at optimizers and gradients as they are, and runs eagerly.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from castwise._torch_private import are_functorch_transforms_active, never_traced
from castwise._warnings import warn
from castwise.amp import checkpoint, clipping, closures, measuring, shards, unscaling
from castwise.amp.after_step import AfterSteps, LastStep, advance_of
from castwise.amp.agreement import Agreement, Ranks
from castwise.amp.checks import check_scale
from castwise.amp.devices import MultiDeviceReplicator as _MultiDeviceReplicator
from castwise.amp.devices import amp_definitely_not_available, device_type, is_capturing
from castwise.amp.gradients import Contents, Gradients, are_contiguous, params_of, present, repeat
from castwise.amp.ledger import Ledger
from castwise.amp.observers import OBSERVERS, step_of
from castwise.amp.optimizer_state import (
    Memory,
    OptState,
    given,
    is_stepped_by_torch,
    is_to_be_skipped,
    last_step,
    no_momentum_of_a_skipped_step,
    readback_of,
    refuse_if_over,
)
from castwise.amp.optimizer_state import new_state as _refresh_per_optimizer_state
from castwise.amp.outcomes import Outcomes, Step, StepFacts
from castwise.amp.schedules import Dynamic, Met, Schedule, on_device

__all__ = ["GradScaler", "OptState"]

# Numbers of torch's signature, told by identity from equal ones that a caller gives.
INIT_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000


class GradScaler(torch.amp.GradScaler):
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

    def _take(self, schedule: Schedule, trackers: Mapping[str, float] | None = None) -> None:
        self._rule = schedule
        self._init_scale = schedule.init_scale
        self._init_trackers = schedule.trackers() if trackers is None else dict(trackers)
        if isinstance(schedule, Dynamic):
            self._growth_factor = schedule.growth_factor
            self._backoff_factor = schedule.backoff_factor
            self._growth_interval = schedule.growth_interval

    def _schedule(self) -> Schedule:
        """Return the schedule, with the numbers that subclasses and frameworks may have set on the scaler."""
        rule = self._rule
        if isinstance(rule, Dynamic):
            now = (self._growth_factor, self._backoff_factor, self._growth_interval)
            if now != (rule.growth_factor, rule.backoff_factor, rule.growth_interval):
                growth_factor, backoff_factor, growth_interval = now
                self._rule = rule = dataclasses.replace(
                    rule, growth_factor=growth_factor, backoff_factor=backoff_factor, growth_interval=growth_interval
                )
        return rule

    @property
    def schedule(self) -> Schedule:
        """How the scale moves: what was given, or `schedules.Dynamic`."""
        return self._schedule()

    @property
    def agrees(self) -> bool:
        """Whether all ranks take and skip the same steps; False for a process group that leaves some of them out."""
        return self._agreement is not None and self._agreement.is_of_all_ranks()

    @property
    def iteration(self) -> int:
        """The number of the iteration under way: from 1, one more after each `update`, and anew in each process."""
        return self._outcomes.updates + 1

    def _forget_device_state(self) -> None:
        self._scale: torch.Tensor | None = None
        self._growth_tracker: torch.Tensor | None = None
        self._trackers: dict[str, torch.Tensor] = {}
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(_refresh_per_optimizer_state)
        self._owners: dict[int, Callable[[], object]] = {}
        self._states_of_dead_optimizers: list[dict[str, Any]] = []
        self._unscaled = Ledger()
        self._optimizers_seen = 0
        self._memories: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()
        self._outcomes = Outcomes()
        self._after_steps = AfterSteps()
        self._last_step: LastStep | None = None
        self._has_warned_of_strangers = False
        self._gradients_hooks: OrderedDict[int, Callable[[torch.optim.Optimizer, torch.Tensor], object]] = OrderedDict()
        self._gradients_seen: set[int] = set()

    # -- scaling ------------------------------------------------------------------------------------------------

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
            outputs: A tensor of any shape, or an iterable of such (nested as you like).

        Returns:
            The products: lists, tuples and named tuples come back as what they were, other iterables as a generator.

        Raises:
            ValueError: There is something in `outputs` that is not a tensor.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            scale = self._scale_for(outputs)
            return self._watched(outputs, self._times(outputs, scale.to(device=outputs.device, non_blocking=True)))
        _refuse_what_is_no_loss(outputs)
        scaled: Iterable[torch.Tensor] = self._scale_all(outputs, [])
        return scaled

    def _scale_all(self, outputs: Any, copies: list[_MultiDeviceReplicator]) -> Any:
        if isinstance(outputs, torch.Tensor):
            if not copies:
                copies.append(_MultiDeviceReplicator(self._scale_for(outputs)))
            return self._watched(outputs, self._times(outputs, copies[0].get(outputs.device)))
        _refuse_what_is_no_loss(outputs)  # an iterator's outputs come to light only now
        scaled = (self._scale_all(output, copies) for output in outputs)
        if isinstance(outputs, tuple) and hasattr(outputs, "_make"):
            return outputs._make(scaled)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def _times(self, output: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return output * scale

    def _watched(self, loss: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
        """Let the ledger know of each backward that starts from a scaled loss, before it adds to any gradient."""
        if is_dynamo_compiling():
            self._unscaled.backward_is_hidden()
        elif are_functorch_transforms_active():
            self._unscaled.backward_starts()  # no hooks there; the backward comes after this call, at least
            return scaled
        elif scaled.requires_grad:
            self._unscaled.watch(scaled)
        self._outcomes.note_loss(loss)
        if not is_dynamo_compiling():
            for observer in OBSERVERS:
                observer.scaled(self, loss, scaled)
        return scaled

    def _scale_for(self, output: torch.Tensor) -> torch.Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        assert self._scale is not None
        return self._scale

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise RuntimeError("the growth tracker exists already and the scale does not: set both or neither")
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)
        self._trackers = on_device(self._init_trackers, dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None and self._agreement is not None:
            # Of the stages of a pipeline only the last has a loss to scale.
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        if self._scale is None or self._growth_tracker is None:
            raise RuntimeError(
                f"{funcname}() needs a scale, which the first scale() makes: "
                "call scaler.scale(loss).backward() earlier in the iteration"
            )
        return self._scale, self._growth_tracker

    # -- unscaling ----------------------------------------------------------------------------------------------

    @never_traced
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer's parameters by the scale, in place, and note if any is not finite.

        For looking at gradients or changing them between the backward and `step`, once per `step` and after all
        gradients of the step are accumulated. Does not sync, except for CPU gradients.

        Raises:
            RuntimeError: Called twice, or after `step`, before an `update()`; or before the first `scale()`.
            TypeError: `optimizer` is not one, or has gradients of a dtype or layout that cannot be unscaled.
            ValueError: There are fp16 gradients and they are not allowed; nothing has been changed then.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._state_of(optimizer)
        refuse_if_over(state, "unscale_")
        self._look_for_later_backwards(optimizer, state, "unscale_")
        for observer in OBSERVERS:
            observer.unscaling(self, optimizer)
        self._show_gradients(optimizer)
        self._note_call("unscale_", optimizer)
        if state["stage"] is OptState.READY:
            self._unscale(optimizer, state, allow_fp16=self._allow_fp16_gradients)
        elif not state.pop("unscaled_by_clipping", False):
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(): "
                "call it once per step, and scaler.update() after the step"
            )

    def _unscale(self, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, allow_fp16: bool) -> None:
        scale, _ = self._check_scale_growth_tracker("unscale_")
        ranks_know = self._agreement is not None and self._is_measured(optimizer, state)
        found_inf = torch.zeros_like(scale)
        if self._unscales_by_itself():
            grads = self._collect(optimizer, allow_fp16=allow_fp16)
            factors = self._factors(state, grads)
            self._note_largest(state, factors)
            found, facts = unscaling.unscale_(factors, found_inf)
            if facts:
                state["finite"] = facts
        else:
            if self._rule.needs_largest:
                self._note_largest(state, self._factors(state, self._collect(optimizer, allow_fp16=True)))
            found = self._unscale_grads_(optimizer, self._inv_scale(), found_inf, allow_fp16)
        self._unscaled.record(params_of(optimizer))
        state.pop("clip_coef", None)
        state["stage"] = OptState.UNSCALED
        if not ranks_know:
            self._note(optimizer, state, found)

    def _note_largest(self, state: dict[str, Any], factors: unscaling.Factors) -> None:
        """Put the largest magnitude of the unscaled gradients on record, if the schedule wants to know it."""
        if self._rule.needs_largest and "largest" not in state:
            scale, _ = self._check_scale_growth_tracker("step")
            norms, _ = unscaling.measure(factors, math.inf, in_fp32=True)
            state["largest"] = unscaling.total_norm(norms, math.inf, like=scale).float()

    def _inv_scale(self) -> torch.Tensor:
        scale, _ = self._check_scale_growth_tracker("unscale_")
        # fp32 division may be approximate on some devices; mps has no fp64.
        return scale.to(measuring.wide(scale.device)).reciprocal().float()

    def _collect(self, optimizer: torch.optim.Optimizer, *, allow_fp16: bool) -> Gradients:
        grads = self._memory_of(optimizer).collector(optimizer)
        if not allow_fp16:
            grads.refuse_fp16()
        else:
            grads = grads.sum_duplicates(of_fp16_only=True)
        if self._agreement is not None:
            grads = shards.local(grads, self._agreement.ranks_of_a_stage(), self._agreement.copies())
        return grads

    def _memory_of(self, optimizer: torch.optim.Optimizer) -> Memory:
        try:
            memory = self._memories.get(optimizer)
            if memory is None:
                memory = self._memories[optimizer] = Memory(optimizer, self._optimizers_seen)
                self._optimizers_seen += 1
        except TypeError:  # cannot be hashed or referenced weakly
            memory = Memory(optimizer, -1)
        return memory

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply an optimizer's gradients with a factor, whatever was done before.

        For tools that call or replace it: `unscale_` and `step` go through it only if somebody has replaced it.

        Returns:
            Per device of gradients its found_inf, fp32 like the one given, 1 if a gradient is not finite.
        """
        return unscaling.unscale_([(inv_scale, self._collect(optimizer, allow_fp16=allow_fp16))], found_inf)[0]

    def _unscales_by_itself(self) -> bool:
        """Say whether nobody has put an `_unscale_grads_` of his own in the place of castwise's."""
        return "_unscale_grads_" not in vars(self) and type(self)._unscale_grads_.__module__.startswith("castwise.")

    def _note(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        found: dict[torch.device, torch.Tensor],
    ) -> dict[torch.device, torch.Tensor]:
        """Put what was found on record for `step` and `update`, and send it to the host if `step` will ask there."""
        scale, _ = self._check_scale_growth_tracker("step")
        # No gradient, no inf: the step counts as finite.
        found = found or {scale.device: torch.zeros_like(scale)}
        if self._agreement is not None:
            found = {scale.device: unscaling.combine(found.values(), scale)}
            state["is_of_this_rank"] = True
        state["found_inf_per_device"] = found
        self._per_optimizer_states[id(optimizer)] = state
        # Ranks reduce found_inf between unscale_() and step(), here or in a tool of which nothing is seen here.
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        if is_alone and self._agreement is None and not self._memory_of(optimizer).takes_grad_scale(optimizer):
            state["readback"] = readback_of(found)
        return found

    def _agree(self, call: str) -> None:
        """Let ranks agree on what each of them has found since they last did, in one collective for all optimizers."""
        if self._agreement is None:
            return
        states = [state for state in self._states() if "is_of_this_rank" in state]
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if flags:
            self._agreement.any_(flags, f"{call}() with {self._account()}")
        for state in states:
            del state["is_of_this_rank"]

    def _account(self) -> str:
        scale, growth_tracker = self._check_scale_growth_tracker("_account")
        # Without a sync only a CPU's are known; others follow from the history, while memory is sound.
        known = f"scale {scale.item()}, tracker {growth_tracker.item()}, " if scale.device.type == "cpu" else ""
        return f"{known}{self._schedule()}"

    def _note_call(self, name: str, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        if self._agreement is not None:
            # Optimizers are told apart by the order in which they came first; ranks have no other names for them.
            self._agreement.note_call(name, self._memory_of(optimizer).number, *arguments)

    def _states(self) -> list[dict[str, Any]]:
        return [*self._states_of_dead_optimizers, *self._per_optimizer_states.values()]

    # -- clipping -----------------------------------------------------------------------------------------------

    @never_traced
    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clip the gradients of an optimizer, all together, to a norm; in the place of `unscale_` and torch's clipping.

        The gradients are read once. A fused optimizer (`_step_supports_amp_scaling`) unscales and clips in its own
        step, so its `.grad` are still scaled until then; those of any other, or after `unscale_`, are unscaled and
        clipped by one multiplication here. If they are not finite, nothing is clipped and `step` will skip; so it is if
        the scale is so large that fp32 cannot hold 1 / scale * max_norm / norm. May be called before `unscale_`, after
        it, and again. A disabled scaler clips as well. Does not sync, except for CPU gradients.

        Args:
            optimizer: All gradients of its parameters count as one vector.
            max_norm: The largest norm they may have, >= 0; inf only measures.
            norm_type: p of the p-norm, > 0, or inf. 1, 2 and inf take one read of the gradients, others two on a CPU.
            error_if_nonfinite: Raise instead of skipping the step, which syncs.

        Returns:
            The p-norm of the unscaled gradients before clipping, shape (), on the device of the first: fp32, or fp64
            if a gradient is. It is 0 without gradients. Sums are taken in fp64, on a CPU in pieces.

        Raises:
            RuntimeError: Called after `step`, or before the first `scale()`; or a backward has added to gradients that
                were clipped; or they are not finite and `error_if_nonfinite` is set. Nothing has been changed then.
            TypeError: `optimizer` is not one, an argument has the wrong type, or a gradient a dtype or layout that
                cannot be unscaled.
            ValueError: An argument is out of its range, or there are fp16 gradients and they are not allowed.

        Example:
            >>> scaler = GradScaler("cpu")
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = torch.optim.SGD([weight], lr=0.1)
            >>> scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
            >>> scaler.clip_grad_norm_(optimizer, max_norm=1.0)
            tensor(5.)
            >>> weight.grad
            tensor([0.6000, 0.8000])
        """
        max_norm, norm_type = clipping.check_bound("max_norm", max_norm), clipping.check_norm_type(norm_type)
        if not self._enabled:
            return torch.nn.utils.clip_grad_norm_(params_of(optimizer), max_norm, norm_type, error_if_nonfinite)
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        state = self._state_of(optimizer)
        refuse_if_over(state, "clip_grad_norm_")
        self._look_for_later_backwards(optimizer, state, "clip_grad_norm_")
        for observer in OBSERVERS:
            observer.unscaling(self, optimizer)
        self._show_gradients(optimizer)
        self._note_call("clip_grad_norm_", optimizer, max_norm, norm_type)
        is_fused = self._memory_of(optimizer).takes_grad_scale(optimizer)
        allow_fp16 = is_fused or self._allow_fp16_gradients
        if state["stage"] is OptState.READY and not self._unscales_by_itself():
            self._unscale(optimizer, state, allow_fp16=allow_fp16)
            state["unscaled_by_clipping"] = True
        grads = self._collect(optimizer, allow_fp16=allow_fp16).sum_duplicates()
        factors = self._factors(state, grads)
        self._note_largest(state, factors)
        in_its_step = is_fused and state["stage"] is OptState.READY and not grads.repeat
        norms, facts = unscaling.measure(factors, norm_type, in_fp32=in_its_step)
        total = unscaling.total_norm(norms, norm_type, like=scale)
        flags = [*state["found_inf_per_device"].values(), *unscaling.found_infs(facts).values()]
        found_inf = unscaling.combine(flags or [torch.zeros_like(scale)], scale)
        if self._agreement is not None:
            call = f"clip_grad_norm_({max_norm}, {norm_type}) with {self._account()}"
            found_inf, total = self._agreement.norm(found_inf, total, norm_type, call)
        if error_if_nonfinite and (found_inf or not total.isfinite()):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped: let "
                "the step be skipped (error_if_nonfinite=False), or find out where it comes from"
            )
        factor = self._inv_scale() if state["stage"] is OptState.READY else torch.ones_like(scale)
        coef, found_inf = clipping.coefficient(total, max_norm, found_inf, factor * state.get("clip_coef", 1.0))
        if in_its_step:
            state["clip_coef"] = coef * state.get("clip_coef", 1.0)
            self._unscaled.record(params_of(optimizer), are_unscaled=False)
        else:
            unscaling.multiply_([(factor * coef, part) for factor, part in factors])
            if state["stage"] is OptState.READY:
                state["stage"], state["unscaled_by_clipping"] = OptState.UNSCALED, True
            self._unscaled.record(params_of(optimizer))
        state["clipped"] = Contents(present(optimizer)[1])
        state["finite"], state["norm"] = facts, total
        self._note(optimizer, state, {scale.device: found_inf})
        state.pop("is_of_this_rank", None)  # the norm's collective has told all ranks
        return unscaling.like_gradients(total, grads)

    @never_traced
    def clip_grad_value_(self, optimizer: torch.optim.Optimizer, clip_value: float) -> None:
        """Unscale the gradients of an optimizer, if they are not yet, and clip each element to [-v, v].

        May be called wherever `clip_grad_norm_` may, also on a disabled scaler.

        Args:
            optimizer: Any; there is no way for a fused one to clip elements by itself.
            clip_value: v >= 0.

        Raises:
            RuntimeError: Called after `step`, or before the first `scale()`.
            TypeError: `optimizer` is not one, `clip_value` is no number, or there are complex gradients.
            ValueError: `clip_value` < 0, or there are fp16 gradients and they are not allowed.
        """
        clip_value = clipping.check_bound("clip_value", clip_value)
        if not self._enabled:
            torch.nn.utils.clip_grad_value_(params_of(optimizer), clip_value)
            return
        self._check_scale_growth_tracker("clip_grad_value_")
        state = self._state_of(optimizer)
        refuse_if_over(state, "clip_grad_value_")
        self._look_for_later_backwards(optimizer, state, "clip_grad_value_")
        for observer in OBSERVERS:
            observer.unscaling(self, optimizer)
        self._show_gradients(optimizer)
        self._note_call("clip_grad_value_", optimizer, clip_value)
        allow_fp16 = self._allow_fp16_gradients
        grads = self._collect(optimizer, allow_fp16=allow_fp16)
        grads.refuse_complex()
        grads.sum_duplicates()
        self._settle(optimizer, state, allow_fp16=allow_fp16)
        with torch.no_grad():
            for values in self._collect(optimizer, allow_fp16=allow_fp16).values():
                if clip_value <= torch.finfo(values.tensors[0].dtype).max:  # else it is none of their numbers
                    torch._foreach_clamp_min_(values.tensors, -clip_value)
                    torch._foreach_clamp_max_(values.tensors, clip_value)

    def _look_for_later_backwards(self, optimizer: torch.optim.Optimizer, state: dict[str, Any], name: str) -> None:
        """Begin anew with an optimizer of which some gradients were clipped and then others put in their place."""
        later = self._unscaled.forgotten(optimizer) if "clipped" in state else []
        if not later:
            return
        if any(state["clipped"].hold(param.grad) for param in later):
            raise RuntimeError(
                f"{name}() is being called after a backward has added to gradients that were clipped before it: "
                "clip once all gradients of a step are accumulated"
            )
        if self._agreement is not None and name == "step":
            raise _changed_since_clipping()
        if "clip_coef" in state:
            grads = self._collect(optimizer, allow_fp16=True)
            are_later = set(map(id, later))
            earlier = grads.part([i for i, param in enumerate(grads.params) if id(param) not in are_later])
            unscaling.multiply_(self._factors(state, earlier))
            self._unscaled.record(earlier.params)
        state.clear()
        state.update(_refresh_per_optimizer_state())

    def _settle(self, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, allow_fp16: bool) -> None:
        """Multiply gradients now with all that `step` would leave to a fused optimizer."""
        if state["stage"] is OptState.READY:
            self._unscale(optimizer, state, allow_fp16=allow_fp16)
            state["unscaled_by_clipping"] = True

    def _factors(self, state: dict[str, Any], grads: Gradients) -> list[tuple[torch.Tensor, Gradients]]:
        """Group gradients by what they still have to be multiplied with: 1 / scale, and a coefficient of clipping."""
        inv_scale = self._inv_scale()
        if state["stage"] is OptState.READY:
            factors = self._unscaled.factors(grads, inv_scale)
        else:
            factors = [(torch.ones_like(inv_scale), grads)]
        coef = state.get("clip_coef")
        return factors if coef is None else [(factor * coef, part) for factor, part in factors]

    # -- stepping -----------------------------------------------------------------------------------------------

    @never_traced
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer on unscaled gradients, unless they are not finite: then nothing but the skip is noted.

        Syncs with the host to learn whether to skip, except for fused optimizers, which decide on the device.
        After a step `.grad` are unscaled, and clipped if `clip_grad_norm_` was called. After a skipped one they are
        not finite: a fused optimizer leaves them as they were, for any other they are unscaled.

        A closure is called as often as the optimizer likes. It calls `scaler.scale(loss).backward()`, may call
        `clip_grad_norm_`, and returns the loss, unscaled. If one evaluation is not finite, the parameters and the
        optimizer's state are put back to what they were and the step is skipped; that takes a copy of them.

        Args:
            optimizer: The optimizer whose gradients come from scaled losses.
            *args: Passed to `optimizer.step`, of which a closure is the first.
            **kwargs: Passed to `optimizer.step`.

        Returns:
            What `optimizer.step` returned; None when the step was skipped.

        Raises:
            RuntimeError: Called twice, or after `skip`, before an `update()`; or before the first `scale()`.
            TypeError: `optimizer` is not one, or has gradients of a dtype or layout that cannot be unscaled.
            ValueError: There are fp16 gradients and they are not allowed; nothing has been changed then.
        """
        if not OBSERVERS:
            return self._step(optimizer, *args, **kwargs)
        with step_of(self, optimizer):
            return self._step(optimizer, *args, **kwargs)

    def _step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self._enabled:
            returned = optimizer.step(*args, **kwargs)
            self._last_step = self._memory_of(optimizer).last_step = LastStep(self.iteration)
            return returned
        state = self._state_of(optimizer)
        refuse_if_over(state, "step")
        self._look_for_later_backwards(optimizer, state, "step")
        self._note_call("step", optimizer)
        closure = closures.closure_of(args, kwargs)
        if closure is None:
            self._show_gradients(optimizer)
        if closure is not None:
            returned = self._step_with_closure(optimizer, state, closure, args, kwargs)
        elif self._memory_of(optimizer).takes_scaler(optimizer):
            self._check_scale_growth_tracker("step")
            warn(
                "an optimizer's step(grad_scaler=...) is deprecated: read the tensors grad_scale and found_inf "
                "that GradScaler sets on the optimizer instead",
                FutureWarning,
                3,
            )
            returned = optimizer.step(*args, **kwargs | {"grad_scaler": self})
        elif self._memory_of(optimizer).takes_grad_scale(optimizer):
            returned = self._step_with_scale(optimizer, state, *args, **kwargs)
        else:
            self._check_scale_growth_tracker("step")
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
                state = self._state_of(optimizer)
            self._agree("step")
            returned = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state = self._finish(optimizer)
        self._last_step = self._memory_of(optimizer).last_step = last_step(state, self.iteration)
        return returned

    def _finish(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = self._per_optimizer_states[id(optimizer)] = self._state_of(optimizer)
        state["stage"] = OptState.STEPPED
        state.pop("clipped", None)  # it keeps gradients alive
        return state

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if is_to_be_skipped(optimizer_state):
            self._look_for_the_bad(optimizer, optimizer_state)
            return None
        return optimizer.step(*args, **kwargs)

    def _look_for_the_bad(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Find out which gradients of a skipped step are not finite, now: they may be gone before `update`."""
        if "finite" not in state:
            state["finite"] = unscaling.check_local(*present(optimizer))

    def _step_with_scale(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Let an optimizer that can do so unscale, clip and skip by itself."""
        scale, _ = self._check_scale_growth_tracker("step")
        if state["stage"] is OptState.READY and self._unscaled:
            grads = self._collect(optimizer, allow_fp16=True)
            if self._unscaled.knows_any(grads):
                # One grad_scale speaks for all of its gradients, and some are unscaled already.
                self._unscale(optimizer, state, allow_fp16=True)
        if state["stage"] is OptState.READY and not self._is_measured(optimizer, state):
            self._check_inf_per_device(optimizer)
            state = self._state_of(optimizer)
        unscaled = state["stage"] is OptState.UNSCALED
        self._agree("step")
        found_inf = unscaling.combine(state["found_inf_per_device"].values(), scale)
        facts = given(optimizer, grad_scale=self._grad_scale(optimizer, state), found_inf=found_inf)
        with facts, no_momentum_of_a_skipped_step(optimizer, found_inf):
            returned = optimizer.step(*args, **kwargs)
        if found_inf.device.type == "cpu" and found_inf.item():
            self._look_for_the_bad(optimizer, state)
        # torch's fused kernels write the gradients back unscaled, unless they skip; of others nothing is known.
        if not unscaled and is_stepped_by_torch(optimizer):
            self._unscaled.record(params_of(optimizer), unless=found_inf)
        return returned

    @never_traced
    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
        """Note whether an optimizer could step on gradients divided by the scale, without writing them."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._state_of(optimizer)
        if self._unscales_by_itself():
            divisor = self._grad_scale(optimizer, state)
            if divisor is None:
                divisor = torch.ones_like(scale)
            params, grads = present(optimizer)
            if repeat(grads):  # an optimizer that writes gradients back would unscale one as often as it is there
                self._unscale(optimizer, state, allow_fp16=True)
                return self._found_of(state)
            if self._rule.needs_largest:
                self._note_largest(state, self._factors(state, self._collect(optimizer, allow_fp16=True)))
            probe = self._memory_of(optimizer).probe
            if are_contiguous(grads) and probe.proves_finite(grads, divisor, torch.float32):
                state["finite"] = unscaling.all_finite(params)
            else:
                state["finite"] = unscaling.check(self._collect(optimizer, allow_fp16=True), divisor)
            found = unscaling.found_infs(state["finite"])
            if "clip_coef" in state:  # what clipping has found stands, as it does for other optimizers
                flags = [*state["found_inf_per_device"].values(), *found.values()]
                found = {scale.device: unscaling.combine(flags, scale)}
        else:
            found = self._unscale_grads_(optimizer, torch.ones_like(scale), torch.zeros_like(scale), True)
        return self._note(optimizer, state, found)

    def _is_measured(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> bool:
        """Say whether clipping has measured the gradients that are there now, and left them to a fused step."""
        if "clip_coef" not in state:
            return False
        are_same: bool = state["clipped"].are(present(optimizer)[1])
        if self._agreement is not None and not are_same:
            raise _changed_since_clipping()  # ranks have decided on what was there, and only this one may look again
        return are_same

    def _grad_scale(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> torch.Tensor | None:
        """Return what a fused optimizer has to divide its gradients by; a `grad_scale` of the user's takes part."""
        of_user = getattr(optimizer, "grad_scale", None)
        scale = self._get_scale_async()
        assert scale is not None
        divisor = torch.full_like(scale, of_user) if isinstance(of_user, (int, float)) else of_user
        if state["stage"] is OptState.READY:
            divisor = scale if divisor is None else scale * divisor
        if "clip_coef" in state:
            divisor = state["clip_coef"].reciprocal() if divisor is None else divisor / state["clip_coef"]
        return divisor

    def _step_with_closure(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        closure: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Unscale and check after every evaluation; a fused optimizer is no exception, its step comes later."""
        allow_fp16 = self._allow_fp16_gradients or self._memory_of(optimizer).takes_grad_scale(optimizer)

        loss_before = self._outcomes.loss  # of other optimizers

        def evaluate() -> Any:
            state.clear()
            state.update(_refresh_per_optimizer_state())
            self._outcomes.loss = loss_before
            with self._unscaled.closure():
                loss = closure()
            self._show_gradients(optimizer)
            scale, _ = self._check_scale_growth_tracker("step")
            self._settle(optimizer, state, allow_fp16=allow_fp16)
            is_finite = closures.is_finite(loss)
            if not is_finite or self._agreement is not None:  # ranks agree on the loss as well
                found = dict(state["found_inf_per_device"]) if is_finite else {scale.device: torch.ones_like(scale)}
                self._note(optimizer, state, found)
            self._agree("step")
            if is_to_be_skipped(state):
                raise closures.NonFiniteEvaluationError
            return loss

        if "clip_coef" in state:
            self._settle(optimizer, state, allow_fp16=allow_fp16)
        self._per_optimizer_states[id(optimizer)] = state
        args, kwargs = closures.with_closure(args, kwargs, evaluate)
        try:
            with closures.put_back_on_error(optimizer):
                return optimizer.step(*args, **kwargs)
        except closures.NonFiniteEvaluationError:
            return None
        except BaseException:
            # The closure's gradients are there now, of which the ledger knows what is unscaled.
            self._per_optimizer_states.pop(id(optimizer), None)
            raise

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Say that an optimizer is deliberately not stepped in this iteration, so that `update()` is in order.

        Its gradients stay as clipping has left them (the manual's page on clipping says how), so zero them before the
        next backward. If they were found not to be finite (by `unscale_` or clipping), the scale still backs off; if
        nothing was looked at and no other optimizer is stepped, the scale stays.

        Raises:
            RuntimeError: Called after `step` or `skip` of the same optimizer, before an `update()`.
            TypeError: `optimizer` is not one.
        """
        if not self._enabled:
            return
        params_of(optimizer)
        refuse_if_over(self._state_of(optimizer), "skip")
        self._note_call("skip", optimizer)
        self._finish(optimizer)["skipped"] = True

    @property
    def step_skipped(self) -> torch.Tensor:
        """Whether the last `step` was skipped: bool, shape (), on the scale's device, without a sync.

        False before the first step, and whenever the scaler is disabled.
        """
        found = [] if self._last_step is None else list(self._last_step.found_infs)
        if not found:
            return torch.zeros((), dtype=torch.bool, device=None if self._scale is None else self._scale.device)
        return unscaling.combine(found, found[0] if self._scale is None else self._scale) != 0

    @never_traced
    def step_scheduler(
        self, scheduler: Any, *args: Any, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        """Advance a learning-rate schedule, or call a function, if the optimizer's last `step` was really taken.

        Call it once an iteration, after `step`, before or after `update`. It is advanced as often as the optimizer
        was stepped: a skipped step, or a call without a new step, advances nothing. A function is not told from
        another one, so it is called whenever the step was in the iteration under way, or, until something is scaled
        again, in the one before. On an accelerator where the host
        does not know yet (a fused optimizer's step) it is advanced up to two updates later; `synchronize()`,
        `state_dict()` and pickling advance what is left.

        Args:
            scheduler: Something with a `step()`, or a function.
            *args: Passed on.
            optimizer: Whose step counts: by default `scheduler.optimizer`, if it has one, else that of the last `step`.
            **kwargs: Passed on.

        Raises:
            TypeError: `scheduler` has no `step` and is no function, or it is a module.
        """
        call = advance_of(scheduler, args, kwargs)
        optimizer = getattr(scheduler, "optimizer", None) if optimizer is None else optimizer
        last = self._last_step if optimizer is None else self._memory_of(optimizer).last_step
        is_function = not hasattr(scheduler, "step")
        if last is not None and (self._is_recent(last) if is_function else last.is_new_to(scheduler)):
            self._after_steps.add(last, call)
        elif last is None and self._last_step is not None and not self._has_warned_of_strangers:
            self._has_warned_of_strangers = True
            warn(
                f"step_scheduler() advances nothing yet: the optimizer of this {type(scheduler).__name__} was never "
                "stepped with this scaler, others were; if it is wrapped, say whose step counts with optimizer=...",
                UserWarning,
                2,
            )
        self._after_steps.run(self._outcomes.updates)

    def _is_recent(self, step: LastStep) -> bool:
        is_of_the_last = step.iteration == self.iteration - 1 and self._outcomes.loss is None
        return step.iteration == self.iteration or is_of_the_last

    @never_traced
    def synchronize(self) -> None:
        """Wait for the device, advance what `step_scheduler` has still to advance, and tell the hooks of all steps.

        Raises:
            ScaleExhausted: If the schedule wants it so.
        """
        self._after_steps.run()
        self._outcomes.settle(self._rule, 2, ranks_agree=self._agreement is not None, all_=True)

    def register_step_hook(self, hook: Callable[[StepFacts], object]) -> RemovableHandle:
        """Call a function with the facts of each step, from `update`: on an accelerator two updates later.

        A disabled scaler calls none. What the hook returns is ignored, but for the step that ends in a
        `ScaleExhausted`: there it becomes the error's `diagnosis`.

        Args:
            hook: Is given the `StepFacts`, plain numbers on the host.

        Returns:
            A handle, whose `remove()` ends it.
        """
        return _registered(self._outcomes.hooks, hook)

    def register_gradients_hook(self, hook: Callable[[torch.optim.Optimizer, torch.Tensor], object]) -> RemovableHandle:
        """Call a function with an optimizer and the scale, before its gradients are read or changed: once an iteration.

        They are as the backwards have left them, still scaled. A disabled scaler calls none.

        Args:
            hook: Is given the optimizer, and the scale: fp32, shape (), on its device.

        Returns:
            A handle, whose `remove()` ends it.
        """
        return _registered(self._gradients_hooks, hook)

    def _show_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if self._gradients_hooks and id(optimizer) not in self._gradients_seen:
            scale, _ = self._check_scale_growth_tracker("step")
            for hook in tuple(self._gradients_hooks.values()):
                hook(optimizer, scale)
            self._gradients_seen.add(id(optimizer))

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
        self._agree("_found_inf_per_device")
        return self._found_of(self._state_of(optimizer))

    @staticmethod
    def _found_of(state: dict[str, Any]) -> dict[Any, torch.Tensor]:
        found: dict[Any, torch.Tensor] = state["found_inf_per_device"]
        return found

    def _state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an optimizer's entry in `_per_optimizer_states`, or a new one that is not yet on record."""
        key, states = id(optimizer), self._per_optimizer_states
        owner = self._owners.get(key)
        if key in states and owner is not None and owner() is not optimizer:
            # The id is one of a dead optimizer, whose found_inf still counts in the next update().
            self._states_of_dead_optimizers.append(states.pop(key))
        self._owners[key] = _weak(optimizer)
        return states[key] if key in states else _refresh_per_optimizer_state()

    # -- moving the scale ---------------------------------------------------------------------------------------

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

    def _number(self, new_scale: float | torch.Tensor) -> float:
        if not isinstance(new_scale, torch.Tensor):
            return check_scale("new_scale", new_scale)
        if new_scale.numel() != 1 or new_scale.requires_grad or new_scale.device.type != self._device:
            raise TypeError(
                f"new_scale must be a number or a one-element tensor on {self._device} without requires_grad, "
                f"got {tuple(new_scale.shape)} on {new_scale.device.type}, requires_grad={new_scale.requires_grad}"
            )
        return check_scale("new_scale", new_scale.item())

    # -- looking and saving -------------------------------------------------------------------------------------

    def _get_scale_async(self) -> torch.Tensor | None:
        return self._scale

    @never_traced
    def get_scale(self) -> float:
        """Return the scale as a Python number, which syncs with the device; 1.0 when disabled."""
        if not self._enabled:
            return 1.0
        self._unscaled.backward_may_start()  # of a loss that is scaled by hand with it
        for observer in OBSERVERS:
            observer.asked(self)
        scale = self._get_scale_async()
        return self._init_scale if scale is None else float(scale.item())

    def get_growth_factor(self) -> float:
        """Return what the scale is multiplied by when it grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by when it grows.

        Args:
            new_factor: Finite, > 1.

        Raises:
            TypeError: It is not a number.
            ValueError: It is out of its range.
            RuntimeError: The schedule has no such factor.
        """
        self._refuse_without("growth_factor")
        self._growth_factor = Dynamic(growth_factor=new_factor).growth_factor

    def get_backoff_factor(self) -> float:
        """Return what the scale is multiplied by after a skipped step."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by after a skipped step.

        Args:
            new_factor: In (0, 1).

        Raises:
            TypeError: It is not a number.
            ValueError: It is out of its range.
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
            TypeError: It is not a whole number.
            ValueError: It is out of its range.
            RuntimeError: The schedule has no such interval.
        """
        self._refuse_without("growth_interval")
        self._growth_interval = Dynamic(growth_interval=new_interval).growth_interval

    def _refuse_without(self, name: str) -> None:
        if not hasattr(self._rule, name):
            raise RuntimeError(f"{self._rule} has no {name}: it would have no effect")

    @never_traced
    def _get_growth_tracker(self) -> int:
        if not self._enabled:
            return 0
        return self._init_growth_tracker if self._growth_tracker is None else int(self._growth_tracker.item())

    def is_enabled(self) -> bool:
        """Say whether this scaler scales; False also if it was made for CUDA where there is none."""
        return self._enabled

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

    def _get_trackers(self) -> dict[str, float]:
        return {name: tracker.item() for name, tracker in self._trackers.items()} or dict(self._init_trackers)

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
            self._trackers = on_device(
                saved.trackers, self._scale.device
            )  # other options, so it remembers more or less
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


def _changed_since_clipping() -> RuntimeError:
    return RuntimeError(
        "the gradients are not those that clip_grad_norm_() has measured on all ranks: call it again, on all of them, "
        "when all gradients of the step are there"
    )


def _refuse_what_is_no_loss(outputs: object) -> None:
    if isinstance(outputs, torch.Tensor):
        return
    if not isinstance(outputs, Iterable) or isinstance(outputs, (str, bytes, Mapping)):
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, got {outputs!r}")
    if isinstance(outputs, (list, tuple)):
        for output in outputs:
            _refuse_what_is_no_loss(output)


def _weak(optimizer: object) -> Callable[[], object]:
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer  # cannot be referenced weakly, so it is kept alive until update()


def _nobody() -> None:
    return None


def _registered(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


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
