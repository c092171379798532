"""Losses that are scaled twice, and gradients that are unscaled by another scaler than the one that scaled them."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from castwise._mistakes.corrected_code import scaled_once
from castwise._mistakes.finder import Finder
from castwise._mistakes.mistake import caller
from castwise._torch_private import number_of_node
from castwise.amp._gradients import params_of

_NODES = 64  # of a loss that are searched for a scaled one


class Scalings(Finder):
    """Finds such losses by their graph, and such gradients by the last backward that reached their parameter."""

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._scaled: set[int] = set()  # numbers of the nodes of this iteration's scaled losses
        self._scaler_of: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[Any]]] = {}

    def scaled(self, scaler: Any, loss: torch.Tensor, scaled: torch.Tensor) -> None:
        """Report a loss that was computed from a scaled one."""
        if not self.watch.is_looking:
            return
        if self._is_scaled(loss.grad_fn) and not self.watch.is_by_hand:
            place = caller()
            self.watch.report(
                "scaled-twice",
                "this loss is already scaled, but the step divides its gradients by the scale only once: they stay too "
                "large by the factor of the scale",
                scaled_once,
                place,
            )
        if scaled.grad_fn is not None:
            self._scaled.add(number_of_node(scaled.grad_fn))

    def backward_ended(self, leaves: list[torch.Tensor], scaler: Any) -> None:
        """Note the scaler of the gradients that have come."""
        self._scaler_of.update({id(leaf): (weakref.ref(leaf), weakref.ref(scaler)) for leaf in leaves})

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Report a step with gradients that another scaler has scaled."""
        others = [known() for param in params_of(optimizer) for known in self._taken(param)]
        if not scaler.is_enabled() or self.watch.is_by_hand:
            return
        other = next((known for known in others if known is not None and known is not scaler), None)
        if other is not None:
            self.watch.report(
                "other-scaler",
                "these gradients were scaled by another GradScaler than the one that unscales them here: they are "
                "wrong by the ratio of the two scales",
                "step with the scaler that has scaled the loss of these parameters, or use one scaler for all",
                caller(),
            )

    def ticked(self) -> None:
        """Forget the losses of the iteration, and all gradients while the watch is not looking."""
        self._scaled.clear()
        if not self.watch.is_looking:
            self._scaler_of.clear()

    def stop(self) -> None:
        """Forget all."""
        self._scaled.clear()
        self._scaler_of.clear()

    def _taken(self, param: torch.Tensor) -> list[weakref.ref[Any]]:
        leaf, scaler = self._scaler_of.pop(id(param), (None, None))
        return [scaler] if leaf is not None and leaf() is param and scaler is not None else []

    def _is_scaled(self, node: Any) -> bool:
        waiting: list[Any] = [node]
        seen: set[Any] = set()
        while waiting and len(seen) < _NODES:
            node = waiting.pop(0)
            if node is None or node in seen:
                continue
            if number_of_node(node) in self._scaled:
                return True
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
        return False
