"""Clipped gradients of a `GradScaler`: they are read once, to measure, unscale and clip them."""

from __future__ import annotations

from typing import Any

import torch

from castwise._torch_private import never_traced
from castwise.amp import clipping, unscaling
from castwise.amp.gradients import Contents, params_of, present
from castwise.amp.observers import OBSERVERS
from castwise.amp.optimizer_state import OptState, refuse_if_over
from castwise.amp.scaled_gradients import ScaledGradients


class ClippedGradients(ScaledGradients):
    """How a scaler clips gradients."""

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
            state.pop("clip_coef", None)  # it is among the factors
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

    def _settle(self, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, allow_fp16: bool) -> None:
        """Multiply gradients now with all that `step` would leave to a fused optimizer."""
        if state["stage"] is OptState.READY:
            self._unscale(optimizer, state, allow_fp16=allow_fp16)
            state["unscaled_by_clipping"] = True
