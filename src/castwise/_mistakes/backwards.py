"""Checks of every backward: whether it runs inside autocast, and whether its loss was scaled."""

from __future__ import annotations

import re
import weakref
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from castwise._guard import guarded
from castwise._mistakes.corrected_code import after_region, scaled
from castwise._mistakes.finder import Finder
from castwise._mistakes.mistake import Place, caller
from castwise._mistakes.scaled_gradients import is_one
from castwise._torch_private import backward_running
from castwise.amp._gradients import params_of


class Backwards(Finder):
    """Finds backwards inside autocast, and backwards of unscaled losses before a step that unscales.

    Hooks parameters while the watch is looking.
    """

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._params: dict[int, weakref.ref[torch.Tensor]] = {}
        self._hooks: list[RemovableHandle] = []
        self._scaled_running = 0
        self._scaled_backwards: set[int | None] = set()
        self._backward: int | None = None
        self._place: Place | None = None
        self._unscaled: dict[int, tuple[Place | None, weakref.ref[torch.Tensor]]] = {}

    def backward_starts(self, leaves: list[torch.Tensor]) -> None:
        """Record that a backward of a scaled loss is running."""
        self._scaled_running += 1
        self._scaled_backwards.add(backward_running())

    def backward_ended(self, leaves: list[torch.Tensor], scaler: Any) -> None:
        """Record that it ended."""
        self._scaled_running = max(0, self._scaled_running - 1)

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook the optimizer's parameters."""
        new = [param for param in params_of(optimizer) if param.requires_grad and not self._knows(param)]
        self._params.update((id(param), weakref.ref(param)) for param in new)
        if self.watch.is_looking:
            self._hook(new)

    def _knows(self, param: torch.Tensor) -> bool:
        known = self._params.get(id(param))
        return known is not None and known() is param

    def _hook(self, params: list[torch.Tensor]) -> None:
        for param in params:
            self._hooks.append(param.register_post_accumulate_grad_hook(self._gradient_came))  # type: ignore[no-untyped-call]  # torch's

    @guarded
    def _gradient_came(self, param: torch.Tensor) -> None:
        backward = backward_running()
        if backward is None:
            return  # FSDP2 accumulates gradients after the backward
        is_scaled = self._scaled_running > 0 or backward in self._scaled_backwards
        if backward != self._backward:
            self._backward = backward
            self._place = None if is_scaled else caller()
            if torch.is_autocast_enabled(param.device.type):
                self._report_inside_autocast(caller())
        if not is_scaled and self.watch.has_scaled and param.grad is not None:
            self._unscaled[id(param)] = self._place, weakref.ref(param.grad)

    def _report_inside_autocast(self, place: Place | None) -> None:
        self.watch.report(
            "backward-inside-autocast",
            "this backward runs inside an autocast region, which casts some of its ops differently: a backward should "
            "run after the region, in the dtypes of the forward",
            after_region,
            place,
        )

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Report gradients that this step divides by the scale although their loss was not multiplied by it."""
        places = []
        for param in params_of(optimizer) if self._unscaled else ():
            place, gradient = self._unscaled.pop(id(param), (None, lambda: None))
            if gradient() is not None and gradient() is param.grad:  # not zeroed since
                places.append(place)
        if not places or self.watch.is_by_hand or not scaler.is_enabled() or is_one(scaler):
            return
        source = places[0].source if places[0] is not None else "loss.backward()"
        if not re.search(r"\.backward\((\s*\)|\s*(retain_graph|create_graph|inputs)\s*=)", source):
            return  # backward(gradient) may start from a scaled gradient
        self.watch.report(
            "loss-not-scaled",
            "this loss is not scaled, but the step divides its gradients by the scale: the loss has almost no effect",
            scaled,
            places[0],
        )

    def ticked(self) -> None:
        """Hook the parameters while the watch is looking, and remove the hooks otherwise."""
        self._scaled_running = 0
        self._scaled_backwards.clear()
        if self.watch.is_looking and not self._hooks:
            self._hook([param for reference in self._params.values() if (param := reference()) is not None])
        elif not self.watch.is_looking:
            self.stop()

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._unscaled.clear()
