"""Losses computed in low precision after the autocast region ended, and losses that are not what is trained."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch

from castwise._mistakes.corrected_code import loss_in_region
from castwise._mistakes.finder import Finder
from castwise._mistakes.mistake import caller
from castwise._torch_private import graph_nodes_made, number_of_node

# Ops that may follow on a loss computed in the region and lose almost no precision.
_HARMLESS = ("Mul", "Div", "Add", "Sub", "Neg", "ToCopy", "View", "Squeeze", "Unsqueeze", "Reshape", "Alias")


class Losses(Finder):
    """Finds such losses by the sequence numbers of graph nodes: nodes made after the region have higher ones.

    A loss that is inf or NaN and has finite gradients is not what is trained.
    """

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._of_thread = threading.local()
        self._optimizers = 0

    def left(self, region: Any) -> None:
        """Record the number of graph nodes made so far."""
        if region._enabled:
            self._of_thread.nodes = graph_nodes_made()

    def scaled(self, scaler: Any, loss: torch.Tensor, scaled: torch.Tensor) -> None:
        """Check the ops that computed the loss."""
        nodes = getattr(self._of_thread, "nodes", None)
        if loss.dtype not in (torch.float16, torch.bfloat16) or nodes is None or not self.watch.is_looking:
            return
        if torch.is_autocast_enabled(loss.device.type) or not _is_computed_after(loss.grad_fn, nodes):
            return
        self.watch.report(
            "loss-outside-autocast",
            f"this loss is computed in {str(loss.dtype).removeprefix('torch.')} outside the autocast region, which "
            "would compute it in fp32: it loses digits and may overflow",
            loss_in_region,
            caller(),
        )

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the optimizers."""
        self._optimizers += 1

    def judged(self, loss: float | None, gradients_are_finite: bool) -> None:
        """Report a loss that is not finite, of a step whose gradients are."""
        # Of several optimizers, one may have no part in what made the loss infinite, and finite gradients.
        if loss is None or math.isfinite(loss) or not gradients_are_finite or self._optimizers > 1:
            return
        self.watch.report(
            "loss-inf-gradients-finite",
            f"the loss of this step is {loss:g}, and its gradients are finite: the loss that is logged is not the one "
            "that is trained. A part of it may be detached, or only its sum overflows",
            "compute the loss in fp32, and log what backward is called on",
            caller(),
        )


def _is_computed_after(node: Any, nodes: int) -> bool:
    """Return True if a node or one of its inputs was made after the first `nodes` nodes, except by harmless ops."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or number_of_node(node) < nodes:
            continue
        seen.add(node)
        name = node.name()
        if not name.startswith(_HARMLESS) and "AccumulateGrad" not in name:
            return True
        waiting += [before for before, _ in node.next_functions]
    return False
