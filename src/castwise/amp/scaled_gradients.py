"""Gradients of a `GradScaler`: what was done with each optimizer's since the last `update()`, and their unscaling."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from castwise._torch_private import never_traced
from castwise.amp import shards, unscaling
from castwise.amp.gradients import Gradients, params_of, present
from castwise.amp.observers import OBSERVERS, registered
from castwise.amp.optimizer_state import Memory, OptState, new_state, readback_of, refuse_if_over
from castwise.amp.scaled_losses import ScaledLosses


class ScaledGradients(ScaledLosses):
    """What a scaler knows of gradients, and how it unscales them."""

    _allow_fp16_gradients: bool

    def _forget_device_state(self) -> None:
        ScaledLosses._forget_device_state(self)
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(new_state)
        self._owners: dict[int, Callable[[], object]] = {}
        self._states_of_dead_optimizers: list[dict[str, Any]] = []
        self._optimizers_seen = 0
        self._memories: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()
        self._gradients_hooks: OrderedDict[int, Callable[[torch.optim.Optimizer, torch.Tensor], object]] = OrderedDict()
        self._gradients_seen: set[int] = set()

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
        scale = self._made_scale()
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

    def _collect(self, optimizer: torch.optim.Optimizer, *, allow_fp16: bool) -> Gradients:
        grads = self._memory_of(optimizer).collector(optimizer)
        if not allow_fp16:
            grads.refuse_fp16()
        else:
            grads = grads.sum_duplicates(of_fp16_only=True)
        if self._agreement is not None:
            grads = shards.local(grads, self._agreement.ranks_of_a_stage(), self._agreement.copies())
        return grads

    def _is_measured(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> bool:
        """Say whether clipping has measured the gradients that are there now, and left them to a fused step."""
        if "clip_coef" not in state:
            return False
        are_same: bool = state["clipped"].are(present(optimizer)[1])
        if self._agreement is not None and not are_same:
            raise _changed_since_clipping()  # ranks have decided on what was there, and only this one may look again
        return are_same

    def _factors(self, state: dict[str, Any], grads: Gradients) -> list[tuple[torch.Tensor, Gradients]]:
        """Group gradients by what they still have to be multiplied with: 1 / scale, and a coefficient of clipping."""
        inv_scale = self._inv_scale()
        if state["stage"] is OptState.READY:
            factors = self._unscaled.factors(grads, inv_scale)
        else:
            factors = [(torch.ones_like(inv_scale), grads)]
        coef = state.get("clip_coef")
        return factors if coef is None else [(factor * coef, part) for factor, part in factors]

    def _note_largest(self, state: dict[str, Any], factors: unscaling.Factors) -> None:
        """Put the largest magnitude of the unscaled gradients on record, if the schedule wants to know it."""
        if self._rule.needs_largest and "largest" not in state:
            scale = self._made_scale()
            norms, _ = unscaling.measure(factors, math.inf, in_fp32=True)
            state["largest"] = unscaling.total_norm(norms, math.inf, like=scale).float()

    def _note(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        found: dict[torch.device, torch.Tensor],
    ) -> dict[torch.device, torch.Tensor]:
        """Put what was found on record for `step` and `update`, and send it to the host if `step` will ask there."""
        scale = self._made_scale()
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

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
        self._agree("_found_inf_per_device")
        return self._found_of(self._state_of(optimizer))

    @staticmethod
    def _found_of(state: dict[str, Any]) -> dict[Any, torch.Tensor]:
        found: dict[Any, torch.Tensor] = state["found_inf_per_device"]
        return found

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
        state.update(new_state())

    def register_gradients_hook(self, hook: Callable[[torch.optim.Optimizer, torch.Tensor], object]) -> RemovableHandle:
        """Call a function with an optimizer and the scale, before its gradients are read or changed: once an iteration.

        They are as the backwards have left them, still scaled. A disabled scaler calls none.

        Args:
            hook: Is given the optimizer, and the scale: fp32, shape (), on its device.

        Returns:
            A handle, whose `remove()` ends it.
        """
        return registered(self._gradients_hooks, hook)

    def _show_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if self._gradients_hooks and id(optimizer) not in self._gradients_seen:
            scale, _ = self._check_scale_growth_tracker("step")
            for hook in tuple(self._gradients_hooks.values()):
                hook(optimizer, scale)
            self._gradients_seen.add(id(optimizer))

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

    def _note_call(self, name: str, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        if self._agreement is not None:
            # Optimizers are told apart by the order in which they came first; ranks have no other names for them.
            self._agreement.note_call(name, self._memory_of(optimizer).number, *arguments)

    def _account(self) -> str:
        scale = self._made_scale()
        # Without a sync only a CPU's are known; others follow from the history, while memory is sound.
        on_cpu = scale.device.type == "cpu"
        known = f"scale {scale.item()}, tracker {self._get_growth_tracker()}, " if on_cpu else ""
        return f"{known}{self._schedule()}"

    def _states(self) -> list[dict[str, Any]]:
        return [*self._states_of_dead_optimizers, *self._per_optimizer_states.values()]

    def _state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an optimizer's entry in `_per_optimizer_states`, or a new one that is not yet on record."""
        key, states = id(optimizer), self._per_optimizer_states
        owner = self._owners.get(key)
        if key in states and owner is not None and owner() is not optimizer:
            # The id is one of a dead optimizer, whose found_inf still counts in the next update().
            self._states_of_dead_optimizers.append(states.pop(key))
        self._owners[key] = _weak(optimizer)
        return states[key] if key in states else new_state()

    def _memory_of(self, optimizer: torch.optim.Optimizer) -> Memory:
        try:
            memory = self._memories.get(optimizer)
            if memory is None:
                memory = self._memories[optimizer] = Memory(optimizer, self._optimizers_seen)
                self._optimizers_seen += 1
        except TypeError:  # cannot be hashed or referenced weakly
            memory = Memory(optimizer, -1)
        return memory


def _changed_since_clipping() -> RuntimeError:
    return RuntimeError(
        "the gradients are not those that clip_grad_norm_() has measured on all ranks: call it again, on all of them, "
        "when all gradients of the step are there"
    )


def _weak(optimizer: object) -> Callable[[], object]:
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer  # cannot be referenced weakly, so it is kept alive until update()
