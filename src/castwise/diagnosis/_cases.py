"""The two kinds of replay: a batch with a loss function, or a batch with the gradients of the model's output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from castwise._torch_private import tree_leaves
from castwise.diagnosis._fault_search import Case
from castwise.diagnosis._replay import Edge, Root, edge_of, edges_below


def outputs_of(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in a model's output, in order.

    Searches lists, tuples, dicts and types registered with torch's pytree at any depth, other objects one level deep.
    """
    if isinstance(output, torch.Tensor):  # the usual case, in which torch's walk takes several times as long
        return [output] if output.is_floating_point() else []
    leaves: list[Any] = []
    for leaf in tree_leaves(output):
        leaves += [leaf] if isinstance(leaf, torch.Tensor) else tree_leaves(_attributes(leaf))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


class OfLoss(Case):
    """A batch and a loss function."""

    loss_is_finite = None

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        kwargs: Any,
        loss_fn: Callable[[Any], torch.Tensor],
        region: Callable[[], AbstractContextManager[Any]] = nullcontext,  # the caller's
    ) -> None:
        self.model, self.args, self.kwargs, self._loss_fn, self._region = model, args, kwargs, loss_fn, region
        self.loss: float | None = None

    @override
    def region(self) -> AbstractContextManager[Any]:
        return self._region()

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
        # Like GradScaler.scale: multiplying by the fp32 scale promotes a half-precision loss.
        return [
            (loss.reshape(()) * torch.tensor(scale, device=loss.device), None) for loss in ends if loss.requires_grad
        ]

    @override
    def nonfinite_gradients(self) -> list[torch.Tensor]:
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
        # A masked output may be infinite. It is a fault only if the loss gives it a non-finite gradient.
        has_backward = any(gradient is not None for gradient in self._gradients)
        if has_backward and not any(map(_is_nonfinite, self._gradients)):
            # The gradient of a mean is finite whatever its terms are. Masks are -inf: no mask makes a NaN or inf that
            # reaches a loss.
            return [] if self.loss_is_finite is not False else [end for end in ends if not (end < math.inf).all()]
        lost = [(end, gradient) for end, gradient in self._pairs(ends) if _is_nonfinite(end)]
        if self.loss_is_finite:  # then a non-finite element of the gradient comes from that same output element
            lost = [(end, gradient) for end, gradient in lost if _share_nonfinite_element(end, gradient)]
        return [end for end, _ in lost]

    @override
    def roots(self, ends: list[torch.Tensor], scale: float) -> list[Root]:
        pairs = self._pairs(ends) if self._with_backward else []
        # A condensed batch holds only largest magnitudes, which cannot start a backward.
        whole = [
            (end, gradient * (scale / self._scale))
            for end, gradient in pairs
            if gradient is not None and end.requires_grad and gradient.shape == end.shape
        ]
        seeds: dict[Edge, Root] = {edge_of(end): (end, gradient) for end, gradient in whole}  # a tensor may occur twice
        inner = edges_below([end for end, _ in whole]) if len(seeds) > 1 else set()
        for edge in inner.intersection(seeds):
            _replace_gradient(*seeds.pop(edge))
        return list(seeds.values())

    @override
    def nonfinite_gradients(self) -> list[torch.Tensor]:
        return (
            [each for each in self._gradients if each is not None and _is_nonfinite(each)]
            if self._with_backward
            else []
        )

    def _pairs(self, ends: list[torch.Tensor]) -> Iterable[tuple[torch.Tensor, torch.Tensor | None]]:
        return zip(ends, self._gradients, strict=True)


def _replace_gradient(end: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Give an output that another output depends on its recorded gradient.

    That gradient already includes the other output's contribution, so a backward cannot start with it. A non-finite
    gradient is left to the backward, which may find the op that made it.
    """
    if not end.is_leaf and not _is_nonfinite(gradient):
        end.register_hook(lambda _: gradient)  # type: ignore[no-untyped-call]  # torch's


def _is_nonfinite(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not tensor.isfinite().all()


def _share_nonfinite_element(end: torch.Tensor, gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool((end.isfinite() | gradient.isfinite()).logical_not().any())


def _attributes(value: Any) -> list[Any]:
    """Return the direct contents of an object that torch's pytree does not handle."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (nn.Module, ModuleType, type)):
        return []
    if is_dataclass(value):
        return [getattr(value, field.name, None) for field in fields(value)]
    return list(getattr(value, "__dict__", {}).values())
