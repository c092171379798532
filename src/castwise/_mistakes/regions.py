"""fp16 regions without a scaler, and models that are themselves fp16."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from castwise._mistakes.corrected_code import in_fp32, scaled_training
from castwise._mistakes.finder import Finder
from castwise._mistakes.mistake import Place, caller
from castwise._torch_private import graph_nodes_made
from castwise.amp._fp32_steps import steps_in_fp32
from castwise.amp._gradients import params_of


class Regions(Finder):
    """Finds fp16 autocast without a scaler, and autocast of a model with fp16 weights."""

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._entered: list[tuple[Place | None, int]] = []
        self._in_fp16: Place | None = None
        self._in_any: Place | None = None
        self._device = "cuda"

    def entered(self, region: Any) -> None:
        """Record the calling line and the number of graph nodes."""
        is_looking = region._enabled and self.watch.is_looking and torch.is_grad_enabled()
        self._entered.append((caller() if is_looking else None, graph_nodes_made()))

    def left(self, region: Any) -> None:
        """Record a region that made graph nodes, because gradients may flow through it."""
        place, nodes = self._entered.pop() if self._entered else (None, 0)
        if place is not None and graph_nodes_made() > nodes:
            self._in_any = place
            if region.fast_dtype is torch.float16:
                self._in_fp16, self._device = place, region.device

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Report mistakes in a step that follows such a region."""
        if self._in_any is None:
            return
        trained = [param for param in params_of(optimizer) if param.grad is not None]
        if not trained:
            return
        if self._in_fp16 is not None and not self.watch.has_scaled:
            self.watch.report(
                "fp16-without-scaler",
                "this region computes in fp16, and no GradScaler scales the loss: gradients below 2**-24 become zero",
                partial(scaled_training, device=self._device),
                self._in_fp16,
            )
        self._look_for_half(optimizer, trained)

    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Report fp16 weights before the unscaling, which raises for them."""
        self.stepping(scaler, optimizer)

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Report fp16 weights before the step, which raises for them."""
        if self._in_any is not None:
            self._look_for_half(optimizer, params_of(optimizer))

    def _look_for_half(self, optimizer: torch.optim.Optimizer, trained: list[torch.Tensor]) -> None:
        if not steps_in_fp32(optimizer) and any(param.dtype is torch.float16 for param in trained):
            self.watch.report(
                "half-with-autocast",
                "weights of the model are fp16, as after model.half(), and autocast is enabled: autocast expects fp32 "
                "weights. fp16 weights lose small updates, and their gradients cannot be unscaled",
                in_fp32,
                self._in_any,
            )

    def ticked(self) -> None:
        """Forget the regions of the iteration."""
        self._in_fp16 = self._in_any = None
