"""Steps of a `GradScaler`: taken, skipped, with a closure, fused; and who is told of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from castwise._torch_private import never_traced
from castwise._warnings import warn
from castwise.amp import closures, unscaling
from castwise.amp.after_step import AfterSteps, LastStep, advance_of
from castwise.amp.clipped_gradients import ClippedGradients
from castwise.amp.gradients import are_contiguous, params_of, present, repeat
from castwise.amp.observers import OBSERVERS, registered, step_of
from castwise.amp.optimizer_state import (
    OptState,
    given,
    is_stepped_by_torch,
    is_to_be_skipped,
    last_step,
    new_state,
    no_momentum_of_a_skipped_step,
    refuse_if_over,
)
from castwise.amp.outcomes import StepFacts


class ScaledSteps(ClippedGradients):
    """How a scaler steps optimizers."""

    def _forget_device_state(self) -> None:
        ClippedGradients._forget_device_state(self)
        self._after_steps = AfterSteps()
        self._last_step: LastStep | None = None
        self._has_warned_of_strangers = False

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

    def _grad_scale(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> torch.Tensor | None:
        """Return what a fused optimizer has to divide its gradients by; a `grad_scale` of the user's takes part."""
        of_user = getattr(optimizer, "grad_scale", None)
        scale = self._get_scale_async()
        assert scale is not None
        divisor = torch.full_like(scale, of_user) if isinstance(of_user, (int, float)) else of_user
        if state["stage"] is not OptState.READY:
            return divisor
        divisor = scale if divisor is None else scale * divisor
        return divisor / state["clip_coef"] if "clip_coef" in state else divisor

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
            state.update(new_state())
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
        found = () if self._last_step is None else self._last_step.found_infs
        if self._scale is None or not found:
            return torch.zeros((), dtype=torch.bool, device=None if self._scale is None else self._scale.device)
        return unscaling.combine(found, self._scale) != 0

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
        return registered(self._outcomes.hooks, hook)
