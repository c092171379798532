"""`find`: the first thing in a replay that is to blame for a loss or a gradient that is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from castwise.amp.autocast_mode import autocast
from castwise.amp.devices import has_autocast
from castwise.diagnosis.op_facts import tensors_of
from castwise.diagnosis.origins import Birth, Origins
from castwise.diagnosis.ranges import range_of
from castwise.diagnosis.replay import Root, gradients_of, unchanged
from castwise.policy.module_rules import named_modules
from castwise.tracing.module_of_op import ModuleOfOp

Reached = Literal["loss", "scaled loss", "gradient of the output", "gradient"]


class Case(Protocol):
    """What is replayed: a batch, and what becomes of the model's output."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_is_finite: bool | None
    """Whether the loss is known to be; None if it is not known."""

    def region(self) -> AbstractContextManager[Any]:
        """Return what the forward runs in."""

    def ends(self, output: Any) -> list[torch.Tensor]:
        """Return what the forward leads to, within the region."""

    def not_finite(self, ends: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of the ends that are not finite and should be."""

    def roots(self, ends: list[torch.Tensor], scale: float) -> list[Root]:
        """Return where the backward begins, scaled."""

    def lost_gradients(self) -> list[torch.Tensor]:
        """Return the gradients, of those the backward begins with, that are not finite."""


class Fault(NamedTuple):
    """What is not finite and should be, and why.

    Args:
        reached: What that is.
        birth: The first thing that has led to it; None if no op and no tensor was seen to.
        tensors: What is not finite: losses, gradients, ...
        parameter: Whose gradient, or the weight.
        is_due_to_scale: Whether the gradients are finite without scaling.
        loss_is_finite: Whether the loss is known to be; None if it is not known.
        others: If a weight is to blame, how many more are not finite.
    """

    reached: Reached
    birth: Birth | None
    tensors: list[torch.Tensor]
    parameter: str = ""
    is_due_to_scale: bool = False
    loss_is_finite: bool | None = None
    others: int = 0


class Found(NamedTuple):
    """What came of a replay.

    Args:
        fault: None if there is none.
        others: What else ops made in the forward that is not finite. It is harmless if there is no fault. If there is
            one, that is not known: what the fault has made hides where the rest went, and no backward ran if the fault
            is in the forward.
    """

    fault: Fault | None
    others: list[Birth]


def find(case: Case, scale: float) -> Found:
    """Replay a case once, and if its backward has a fault once more without scaling.

    Raises:
        Exception: What the model or the loss raises.
    """
    found = _replay(case, scale)
    fault = found.fault
    if fault is None and (lost := case.lost_gradients()):
        fault = Fault("gradient of the output", None, lost, loss_is_finite=case.loss_is_finite)
        return Found(fault, found.others)
    if fault is None or scale <= 1.0 or fault.reached not in {"scaled loss", "gradient"}:
        return found
    if fault.birth is not None and fault.birth.phase not in {"loss", "backward"}:
        return found
    # What no scale would cure is the graver fault, also if the scale is too high besides.
    unscaled = _replay(case, 1.0)
    return found._replace(fault=fault._replace(is_due_to_scale=True)) if unscaled.fault is None else unscaled


def named_parameters(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield name, name of the module and tensor of every parameter, each once; names are those without wrappers."""
    seen: set[torch.Tensor] = set()
    for module_name, module in named_modules(model):
        for name, param in module._parameters.items():
            if param is not None and param not in seen:
                seen.add(param)
                yield f"{module_name}.{name}" if module_name else name, module_name, param


def _replay(case: Case, scale: float) -> Found:
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        unchanged(case.model, [case.args, case.kwargs]) as copies,
        ModuleOfOp(case.model) as module_of_op,
        _without_cached_casts(),
    ):
        origins = Origins(module_of_op, copies.before_write)
        _expect(case, origins)
        with case.region(), origins:
            output = case.model(*case.args, **case.kwargs)
            origins.phase = "loss"
            ends = case.ends(output)
        not_finite = case.not_finite(ends)
        if not_finite:
            fault: Fault | None = _fault("loss", case, origins, not_finite)
        else:
            with _without_autocast(case.model, ends), origins:
                fault = _replay_backward(case, scale, ends, module_of_op, origins)
        if fault is None:
            return Found(None, origins.others((), None))
        return Found(fault, origins.others(fault.tensors, fault.birth))


def _replay_backward(
    case: Case, scale: float, ends: list[torch.Tensor], module_of_op: ModuleOfOp, origins: Origins
) -> Fault | None:
    roots = case.roots(ends, scale)
    trained = [(name, param) for name, _, param in named_parameters(case.model) if param.requires_grad]
    if not roots or not trained:
        return None
    for tensor, seed in roots:
        if seed is None and not _is_finite(tensor):
            return _fault("scaled loss", case, origins, [tensor])
        if seed is not None and not _is_finite(seed):
            return None  # there is nothing to learn of the backward
    origins.phase = "backward"
    module_of_op.begin_backward()
    gradients = gradients_of(roots, [param for _, param in trained])
    named = zip((name for name, _ in trained), gradients, strict=True)
    lost = [(name, gradient) for name, gradient in named if gradient is not None and not _is_finite(gradient)]
    return _fault("gradient", case, origins, [gradient for _, gradient in lost], lost[0][0]) if lost else None


def _fault(reached: Reached, case: Case, origins: Origins, tensors: list[torch.Tensor], parameter: str = "") -> Fault:
    birth, others = origins.blamed(tensors), 0
    if birth is not None and birth.kind == "weight":
        weights = (param for _, _, param in named_parameters(case.model) if param.requires_grad)
        others = sum(param is not birth.tensor and not _is_finite(param) for param in weights)
    return Fault(reached, birth, tensors, parameter, loss_is_finite=case.loss_is_finite, others=others)


def _expect(case: Case, origins: Origins) -> None:
    """Tell of weights, buffers and inputs; what is not finite of them may be meant to be, or reach nothing."""
    for name, module, param in named_parameters(case.model):
        origins.expect("weight", name, module, param)
    for module, owner in named_modules(case.model):
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                origins.expect("weight", f"{module}.{name}" if module else name, module, buffer)
    for name, value in [*((str(place), value) for place, value in enumerate(case.args)), *case.kwargs.items()]:
        for tensor in tensors_of(value):
            origins.expect("input", name, None, tensor)


def _is_finite(tensor: torch.Tensor) -> bool:
    found = range_of(tensor)
    return found is None or not found.nonfinite


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Let no cast of a weight be in two graphs, that of the replay and one of the caller's region."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _without_autocast(model: nn.Module, ends: list[torch.Tensor]) -> Iterator[None]:
    """Leave the caller's region for a while, as the backward does."""
    types = {tensor.device.type for tensor in [*model.parameters(), *ends]}
    with ExitStack() as stack:
        for device_type in filter(has_autocast, types):
            stack.enter_context(autocast(device_type, enabled=False))
        yield
