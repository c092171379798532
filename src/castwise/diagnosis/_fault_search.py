"""`find`: find the first cause of a non-finite loss or gradient in a replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from castwise.amp._devices import has_autocast
from castwise.amp.autocast_mode import autocast
from castwise.diagnosis._op_facts import tensors_of
from castwise.diagnosis._origins import Birth, Origins
from castwise.diagnosis._ranges import range_of
from castwise.diagnosis._replay import CopyOnWrite, Root, gradients_of, unchanged
from castwise.policy._module_rules import named_modules
from castwise.tracing._module_of_op import ModuleOfOp

Reached = Literal["loss", "scaled loss", "gradient of the output", "gradient"]


class Case(Protocol):
    """A replayable batch, and what follows the model's output."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_is_finite: bool | None
    """Whether the loss was finite; None if it is not known."""

    def region(self) -> AbstractContextManager[Any]:
        """Return the context manager for the forward."""

    def ends(self, output: Any) -> list[torch.Tensor]:
        """Return the final tensors of the forward. Called inside the region."""

    def not_finite(self, ends: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the ends that should be finite and are not."""

    def roots(self, ends: list[torch.Tensor], scale: float) -> list[Root]:
        """Return the scaled roots of the backward."""

    def nonfinite_gradients(self) -> list[torch.Tensor]:
        """Return the non-finite gradients among those that the backward starts from."""


class Fault(NamedTuple):
    """A value that should be finite and is not, and its cause.

    Args:
        reached: The kind of value.
        birth: Its first cause; None if no op or tensor was seen to cause it.
        tensors: The non-finite tensors: losses, gradients, ...
        parameter: The parameter with the non-finite gradient.
        is_due_to_scale: Whether the gradients are finite without scaling.
        loss_is_finite: Whether the loss was finite; None if it is not known.
        others: If a weight is to blame, the number of other non-finite weights.
        has_collectives: Whether the replay has exchanged tensors with other ranks, which a trial on one rank must not.
    """

    reached: Reached
    birth: Birth | None
    tensors: list[torch.Tensor]
    parameter: str = ""
    is_due_to_scale: bool = False
    loss_is_finite: bool | None = None
    others: int = 0
    has_collectives: bool = False


class Found(NamedTuple):
    """The result of a replay.

    Args:
        fault: The fault; None if there is none.
        others: Other non-finite values that ops made in the forward. They are harmless if there is no fault. If there
            is one, this is unknown: the values it made hide where the others went, and no backward runs after a fault
            in the forward.
    """

    fault: Fault | None
    others: list[Birth]


def find(case: Case, scale: float) -> Found:
    """Replay a case, and replay it again without scaling if the backward has a fault.

    Raises:
        Exception: Whatever the model or the loss raises.
    """
    found = replay(case, scale)
    fault = found.fault
    if fault is None and (lost := case.nonfinite_gradients()):
        fault = Fault("gradient of the output", None, lost, loss_is_finite=case.loss_is_finite)
        return Found(fault, found.others)
    if fault is None or scale <= 1.0 or fault.reached not in {"scaled loss", "gradient"}:
        return found
    if fault.birth is not None and fault.birth.phase not in {"loss", "backward"}:
        return found
    # A fault that no scale fixes takes precedence, even if the scale is too high too.
    unscaled = replay(case, 1.0)
    return found._replace(fault=fault._replace(is_due_to_scale=True)) if unscaled.fault is None else unscaled


def named_parameters(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (name, module name, tensor) of every parameter once. Names are without wrappers."""
    seen: set[torch.Tensor] = set()
    for module_name, module in named_modules(model):
        for name, param in nn.Module.named_parameters(module, recurse=False):
            if param not in seen:
                seen.add(param)
                yield f"{module_name}.{name}" if module_name else name, module_name, param


@contextmanager
def replaying(case: Case) -> Iterator[tuple[CopyOnWrite, ModuleOfOp]]:
    """Restore all state after a replay of a case in this context, which follows the module of each op."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        unchanged(case.model, [case.args, case.kwargs]) as copies,
        ModuleOfOp(case.model) as module_of_op,
        without_cached_casts(),
    ):
        yield copies, module_of_op


def replay(case: Case, scale: float) -> Found:
    """Replay a case once. Whether the scale is the cause is not looked at."""
    with replaying(case) as (copies, module_of_op):
        origins = Origins(module_of_op, copies.before_write)
        with case.region():
            _expect(case, origins)  # inside, where buffers are as they were before the forward
            with origins:
                output = case.model(*case.args, **case.kwargs)
                origins.phase = "loss"
                ends = case.ends(output)
        not_finite = case.not_finite(ends)
        if not_finite:
            fault: Fault | None = _fault("loss", case, origins, not_finite)
        else:
            with without_autocast(case.model, ends):
                fault = _replay_backward(case, scale, ends, module_of_op, origins)
        if fault is None:
            return Found(None, origins.others((), None))
        return Found(fault, origins.others(fault.tensors, fault.birth))


def _replay_backward(
    case: Case, scale: float, ends: list[torch.Tensor], module_of_op: ModuleOfOp, origins: Origins
) -> Fault | None:
    with origins:  # a product with the scale may overflow
        roots = case.roots(ends, scale)
    trained = [(name, param) for name, _, param in named_parameters(case.model) if param.requires_grad]
    if not roots or not trained:
        return None
    for tensor, seed in roots:
        if seed is None and not _is_finite(tensor):
            return _fault("scaled loss", case, origins, [tensor])
        if seed is not None and not _is_finite(seed):
            return None  # a backward from this seed shows nothing
    origins.phase = "backward"
    module_of_op.begin_backward()
    with origins:
        gradients = gradients_of(roots, [param for _, param in trained])
    named = zip((name for name, _ in trained), gradients, strict=True)
    lost = [(name, gradient) for name, gradient in named if gradient is not None and not _is_finite(gradient)]
    return _fault("gradient", case, origins, [gradient for _, gradient in lost], lost[0][0]) if lost else None


def _fault(reached: Reached, case: Case, origins: Origins, tensors: list[torch.Tensor], parameter: str = "") -> Fault:
    birth, others = origins.blamed(tensors), 0
    if birth is not None and birth.kind == "weight":
        weights = (param for _, _, param in named_parameters(case.model) if param.requires_grad)
        others = sum(param is not birth.tensor and not _is_finite(param) for param in weights)
    return Fault(
        reached,
        birth,
        tensors,
        parameter,
        loss_is_finite=case.loss_is_finite,
        others=others,
        has_collectives=origins.has_collectives,
    )


def _expect(case: Case, origins: Origins) -> None:
    """Register non-finite weights, buffers and inputs, which may be intended or reach nothing."""
    for name, module, param in named_parameters(case.model):
        origins.expect("weight", name, module, param)
    for module, owner in named_modules(case.model):
        for name, buffer in nn.Module.named_buffers(owner, recurse=False):
            origins.expect("weight", f"{module}.{name}" if module else name, module, buffer)
    for name, value in [*((str(place), value) for place, value in enumerate(case.args)), *case.kwargs.items()]:
        for tensor in tensors_of(value):
            origins.expect("input", name, None, tensor)


def _is_finite(tensor: torch.Tensor) -> bool:
    found = range_of(tensor)
    return found is None or not found.nonfinite


@contextmanager
def without_cached_casts() -> Iterator[None]:
    """Keep casts of weights from being shared by the graph of the replay and one of the caller's region."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def without_autocast(model: nn.Module, ends: list[torch.Tensor]) -> Iterator[None]:
    """Disable the caller's autocast region, because a backward runs outside it."""
    types = {tensor.device.type for tensor in [*model.parameters(), *ends]}
    with ExitStack() as stack:
        for device_type in filter(has_autocast, types):
            stack.enter_context(autocast(device_type, enabled=False))
        yield
