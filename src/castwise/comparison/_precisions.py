"""`Precision`: the region and the weights with which a model runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from castwise._full_fp32 import full_fp32, programs_fp32
from castwise._recipes.recipe import DEVICES, RECIPES, SETTLED
from castwise._torch_private import buffers_in, parameters_in
from castwise.amp._devices import has_autocast
from castwise.amp._thread_state import THREAD
from castwise.amp.autocast_mode import autocast
from castwise.comparison._errors import local
from castwise.policy._bound_policy import BoundPolicy, find_bound
from castwise.policy._casting import in_native_state, native_state_of
from castwise.policy._policy import Policy

# The initial scale of an fp16 loss, the same as a GradScaler's; it shrinks by 16 whenever gradients overflow.
_LOSS_SCALE, _BACKOFF, _LEAST_SCALE = 2.0**16, 2.0**-4, 1.0


class Precision:
    """The precision of a run: a policy, or fp32 or fp64 with autocast off.

    Args:
        device: The `type` of the model's device.
        bound: The policy; None turns autocast off.
        dtype: The dtype to cast weights, buffers and inputs to; None leaves them unchanged.
    """

    def __init__(self, device: str, bound: BoundPolicy | None = None, dtype: torch.dtype | None = None) -> None:
        self.bound, self.dtype, self._device = bound, dtype, device
        self._weights: dict[torch.Tensor, nn.Parameter] = {}
        self._buffers: dict[torch.Tensor, torch.Tensor] = {}
        self._originals: dict[Any, torch.Tensor] = {}

    @contextmanager
    def region(self) -> Iterator[None]:
        """Enter the region of a whole run."""
        if not has_autocast(self._device):
            yield
            return
        try:
            with autocast(self._device, enabled=self.bound is not None, policy=self.bound):
                yield
        finally:
            # Inside another region, torch keeps cached casts of weights and would use them in one of another dtype.
            torch.clear_autocast_cache()

    @contextmanager
    def weights(self, module: nn.Module) -> Iterator[None]:
        """Give a module and its submodules weights and buffers in this precision inside the `with` block.

        These are copies that are created once. The original objects are restored afterwards. Without a policy, torch
        computes in full fp32 inside the block, without TF32.
        """
        with (
            full_fp32() if self.bound is None else nullcontext(),
            nullcontext() if self.dtype is None else _exchanged(module, self._is_other, self._twin),
        ):
            yield

    @contextmanager
    def own_weights(self, module: nn.Module) -> Iterator[None]:
        """Give a module and its submodules their original weights and buffers again, inside `weights`.

        Torch computes with the program's settings again, which may allow TF32.
        """
        with (
            programs_fp32(),
            nullcontext() if self.dtype is None else _exchanged(module, self._originals.__contains__, self._original),
        ):
            yield

    @property
    def loss_scale(self) -> float:
        """The initial loss scale of a backward: that of a GradScaler if anything computes in fp16, else 1."""
        is_narrow = self.bound is not None and torch.float16 in self.bound.low_precisions
        return _LOSS_SCALE if is_narrow else 1.0

    def renew_buffers(self) -> None:
        """Start the next run with the current buffers of the model."""
        self._buffers.clear()
        self._originals = {twin: param for param, twin in self._weights.items()}

    def weight(self, param: torch.Tensor) -> torch.Tensor:
        """Return the copy of a weight in this precision, or the weight itself if there is none."""
        return self._weights.get(param, param)

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an input cast to this precision."""
        return tensor.to(self._wanted(tensor)) if self._is_other(tensor) else tensor

    def changes(self, model: nn.Module) -> bool:
        """Return True if this precision casts any weight or buffer of a model."""
        return any(map(self._is_other, [*model.parameters(), *model.buffers()]))

    def _is_other(self, tensor: torch.Tensor | None) -> bool:
        return tensor is not None and self._wanted(tensor) not in (None, tensor.dtype)

    def _wanted(self, tensor: torch.Tensor) -> torch.dtype | None:
        if self.dtype is not None and tensor.is_complex():
            return self.dtype.to_complex()
        return self.dtype if tensor.is_floating_point() else None

    def _twin(self, tensor: Any) -> Any:
        if not self._is_other(tensor):
            return tensor
        if isinstance(tensor, nn.Parameter):
            if tensor not in self._weights:
                self._weights[tensor] = nn.Parameter(tensor.detach().to(self._wanted(tensor)), tensor.requires_grad)
            twin: torch.Tensor = self._weights[tensor]
        else:
            if tensor not in self._buffers:
                self._buffers[tensor] = tensor.detach().to(self._wanted(tensor))
            twin = self._buffers[tensor]
        self._originals[twin] = tensor
        return twin

    def _original(self, tensor: Any) -> Any:
        return self._originals.get(tensor, tensor)


@contextmanager
def _exchanged(module: nn.Module, is_exchanged: Callable[[Any], bool], other: Callable[[Any], Any]) -> Iterator[None]:
    """Replace some weights and buffers of a module inside the `with` block."""
    # With `setattr`, for which an nn.RNNBase also updates the list from which it computes.
    before: list[tuple[nn.Module, str, torch.Tensor]] = []
    try:
        for part in module.modules():
            if isinstance(part, torch.jit.ScriptModule):
                continue
            for name, tensor in [*parameters_in(part).items(), *buffers_in(part).items()]:
                if tensor is not None and is_exchanged(tensor):
                    before.append((part, name, tensor))
                    setattr(part, name, other(tensor))
        yield
    finally:
        for part, name, tensor in before:
            setattr(part, name, tensor)


class Region(NamedTuple):
    """The state in which a module is called: the policy's in this thread, and autocast's own.

    Args:
        state: The state of the policy; None if no policy is active.
        native: Whether autocast is on, its dtype, and whether casts are cached; None without autocast.
    """

    state: Any
    native: tuple[bool, torch.dtype, bool] | None

    @classmethod
    def here(cls, device: str) -> Region:
        """Return the current state in this thread."""
        return cls(THREAD.state, native_state_of(device) if has_autocast(device) else None)

    @contextmanager
    def again(self, device: str) -> Iterator[None]:
        """Restore this state inside the `with` block, also during a backward."""
        before = THREAD.state
        mode = None if self.state is None else self.state.bound.mode()
        try:
            # In a backward, a module with rules looks up the state of the forward that checkpointing reruns, unless
            # `again` marks the state as known.
            THREAD.state = None if self.state is None else self.state._replace(again=True)
            with mode or nullcontext():
                if self.native is None:
                    yield
                else:
                    enabled, dtype, _ = self.native
                    # Do not cache casts of weights: the outer region may have cached others.
                    with in_native_state(device, enabled, dtype, False):
                        yield
        finally:
            THREAD.state = before

    def is_plain(self, forward: object) -> bool:
        """Return True if neither autocast nor a rule affects the forward of a module."""
        if self.native is not None and self.native[0]:
            return False
        if self.state is None:
            return True
        bound = self.state.bound
        return not (self.state.ops and bound.op_rules) and bound.key not in getattr(forward, "rules", ())


def _bound_without_warning(policy: Policy, model: nn.Module) -> BoundPolicy:
    """Bind a policy without warnings about emulated recipes, which the notes report."""
    before = set(SETTLED)
    try:
        SETTLED.update(itertools.product(RECIPES.values(), DEVICES))
        return policy.bind(model)
    finally:
        SETTLED.intersection_update(before)


@contextmanager
def temporarily_bound(policy: Policy, model: nn.Module) -> Iterator[BoundPolicy]:
    """Bind a policy inside the `with` block; a policy that is already bound stays bound."""
    was_bound = find_bound(policy, model) is not None
    try:
        yield _bound_without_warning(policy, model)
    finally:
        bound = None if was_bound else find_bound(policy, model)
        if bound is not None:
            bound.unbind()


ParamGradients = list[torch.Tensor | None]
"""Gradients of a loss by parameter; None where the loss does not depend on one."""


def scaled(compute: Callable[[float], ParamGradients], scale: float) -> tuple[ParamGradients, float]:
    """Return scaled gradients, and their scale, which is lowered until the gradients are finite or it is 1.

    Args:
        compute: Computes the gradients for a scale.
        scale: The initial scale.
    """
    while True:
        gradients = compute(scale)
        if scale <= _LEAST_SCALE or all(
            gradient is None or bool(local(gradient).isfinite().all()) for gradient in gradients
        ):
            return gradients, scale
        scale *= _BACKOFF


def is_sharded(model: nn.Module) -> bool:
    """Return True if a parameter of a model is a DTensor."""
    return any(local(param) is not param for param in model.parameters())
