"""What can be replayed: a batch with a loss function, or with the gradients that the model's output has got."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from castwise._torch_private import tree_leaves
from castwise.diagnosis.fault_search import Case
from castwise.diagnosis.replay import Edge, Root, edge_of, edges_below


def outputs_of(output: Any) -> list[torch.Tensor]:
    """List the floating-point tensors in a model's output, in order.

    Lists, tuples, dicts and what is registered with torch's pytree are looked into, other objects one level deep.
    """
    leaves: list[Any] = []
    for leaf in tree_leaves(output):
        leaves += [leaf] if isinstance(leaf, torch.Tensor) else tree_leaves(_attributes(leaf))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


class OfLoss(Case):
    """A batch and a loss function."""

    loss_is_finite = None

    def __init__(self, model: nn.Module, args: Any, kwargs: Any, loss_fn: Callable[[Any], torch.Tensor]) -> None:
        self.model, self.args, self.kwargs, self._loss_fn = model, args, kwargs, loss_fn
        self.loss: float | None = None

    @override
    def region(self) -> AbstractContextManager[Any]:
        return nullcontext()  # the caller's

    @override
    def ends(self, output: Any) -> list[torch.Tensor]:
        loss = self._loss_fn(output)
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"loss_fn must return the loss as a tensor, got {type(loss).__name__}")
        if loss.numel() != 1:
            raise RuntimeError(f"the loss must have one element, got shape {tuple(loss.shape)}: reduce it in loss_fn")
        self.loss = float(loss.detach())
        return [loss]

    @override
    def not_finite(self, ends: list[torch.Tensor]) -> list[torch.Tensor]:
        return [loss for loss in ends if not loss.isfinite().all()]

    @override
    def roots(self, ends: list[torch.Tensor], scale: float) -> list[Root]:
        # As GradScaler.scale does: a half loss is promoted by the scale, which is fp32.
        return [
            (loss.reshape(()) * torch.tensor(scale, device=loss.device), None) for loss in ends if loss.requires_grad
        ]

    @override
    def lost_gradients(self) -> list[torch.Tensor]:
        return []


class OfOutput(Case):
    """A batch and the gradients of the model's output; see `diagnosis.diagnose_replay`."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        gradients: Sequence[torch.Tensor | None],
        scale: float,
        region: Callable[[], AbstractContextManager[Any]],
        loss_is_finite: bool | None,
        with_backward: bool,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.loss_is_finite, self._with_backward = loss_is_finite, with_backward
        self._gradients, self._scale, self._region = gradients, scale, region

    @override
    def region(self) -> AbstractContextManager[Any]:
        return self._region()

    @override
    def ends(self, output: Any) -> list[torch.Tensor]:
        return outputs_of(output)

    @override
    def not_finite(self, ends: list[torch.Tensor]) -> list[torch.Tensor]:
        # An output may be infinite where it is masked. It is not if the loss gives it a gradient that is not finite.
        has_backward = any(gradient is not None for gradient in self._gradients)
        if has_backward and not any(map(_has_lost, self._gradients)):
            return []
        lost = [(end, gradient) for end, gradient in self._pairs(ends) if _has_lost(end)]
        if self.loss_is_finite:  # then what is not finite of one element's gradient comes from no other one
            lost = [(end, gradient) for end, gradient in lost if _have_lost_the_same(end, gradient)]
        return [end for end, _ in lost]

    @override
    def roots(self, ends: list[torch.Tensor], scale: float) -> list[Root]:
        pairs = self._pairs(ends) if self._with_backward else []
        # Of a condensed batch there are largest magnitudes only, which no backward can begin with.
        whole = [
            (end, gradient * (scale / self._scale))
            for end, gradient in pairs
            if gradient is not None and end.requires_grad and gradient.shape == end.shape
        ]
        seeds: dict[Edge, Root] = {edge_of(end): (end, gradient) for end, gradient in whole}  # a tensor may be in twice
        inner = edges_below([end for end, _ in whole]) if len(seeds) > 1 else set()
        for edge in inner.intersection(seeds):
            _replace_gradient(*seeds.pop(edge))
        return list(seeds.values())

    @override
    def lost_gradients(self) -> list[torch.Tensor]:
        return [each for each in self._gradients if each is not None and _has_lost(each)] if self._with_backward else []

    def _pairs(self, ends: list[torch.Tensor]) -> Iterable[tuple[torch.Tensor, torch.Tensor | None]]:
        return zip(ends, self._gradients, strict=True)


def _replace_gradient(end: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Let an output that another output is computed from have the gradient it had.

    As that is the sum of what came from outside and what the other one leads to, a backward must not begin with it. One
    that is not finite is left to the backward, which may see what made it.
    """
    if not end.is_leaf and not _has_lost(gradient):
        end.register_hook(lambda _: gradient)  # type: ignore[no-untyped-call]  # torch's


def _has_lost(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not tensor.isfinite().all()


def _have_lost_the_same(end: torch.Tensor, gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool((end.isfinite() | gradient.isfinite()).logical_not().any())


def _attributes(value: Any) -> list[Any]:
    """Return what is directly in an object that torch's pytree does not know."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (nn.Module, ModuleType, type)):
        return []
    if is_dataclass(value):
        return [getattr(value, field.name, None) for field in fields(value)]
    return list(getattr(value, "__dict__", {}).values())
