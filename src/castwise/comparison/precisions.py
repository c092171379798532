"""`Precision`: in which region, and with which weights, a run of a model computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from castwise.amp.autocast_mode import autocast
from castwise.amp.devices import has_autocast
from castwise.amp.thread_state import THREAD
from castwise.comparison.errors import local
from castwise.policy.bound_policy import BoundPolicy, is_bound_to
from castwise.policy.casting import in_native_state, native_state_of
from castwise.policy.policy import Policy
from castwise.recipes.recipe import DEVICES, RECIPES, SETTLED

# An fp16 loss is multiplied by this, as a GradScaler does, and by 1/16 of it where gradients overflow.
_LOSS_SCALE, _BACKOFF, _LEAST_SCALE = 2.0**16, 2.0**-4, 1.0


class Precision:
    """What a run of a model computes in: a policy, or fp32 or fp64 with autocast off.

    Args:
        device: The `type` of the model's device.
        bound: The policy; None leaves autocast off.
        dtype: To what weights, buffers and inputs are cast; None leaves them.
    """

    def __init__(self, device: str, bound: BoundPolicy | None = None, dtype: torch.dtype | None = None) -> None:
        self.bound, self.dtype, self._device = bound, dtype, device
        self._weights: dict[torch.Tensor, nn.Parameter] = {}
        self._buffers: dict[torch.Tensor, torch.Tensor] = {}
        self._originals: dict[Any, torch.Tensor] = {}

    @contextmanager
    def region(self) -> Iterator[None]:
        """Be in the region of a whole run for a while."""
        if not has_autocast(self._device):
            yield
            return
        try:
            with autocast(self._device, enabled=self.bound is not None, policy=self.bound):
                yield
        finally:
            # Within another region torch would keep casts of weights, and give them to a region of another dtype.
            torch.clear_autocast_cache()

    @contextmanager
    def weights(self, module: nn.Module) -> Iterator[None]:
        """Let a module, and those inside, have weights and buffers in this precision for a while.

        They are copies, made once; the module's own are put back as the objects they were.
        """
        with nullcontext() if self.dtype is None else _exchanged(module, self._is_other, self._twin):
            yield

    @contextmanager
    def own_weights(self, module: nn.Module) -> Iterator[None]:
        """Let a module, and those inside, have their own weights and buffers again for a while, within `weights`."""
        with nullcontext() if self.dtype is None else _exchanged(module, self._originals.__contains__, self._original):
            yield

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by at first for a backward: as by a GradScaler where anything computes in fp16."""
        is_narrow = self.bound is not None and torch.float16 in self.bound.low_precisions
        return _LOSS_SCALE if is_narrow else 1.0

    def renew_buffers(self) -> None:
        """Let the next run begin with the buffers that the model has now."""
        self._buffers.clear()
        self._originals = {twin: param for param, twin in self._weights.items()}

    def weight(self, param: torch.Tensor) -> torch.Tensor:
        """Return what stands for a weight in this precision."""
        return self._weights.get(param, param)

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an input in this precision."""
        return tensor.to(self._wanted(tensor)) if self._is_other(tensor) else tensor

    def changes(self, model: nn.Module) -> bool:
        """Return True if it casts any weight or buffer of a model."""
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
    """Put other tensors in the places of some weights and buffers of a module for a while."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    flattened: list[tuple[nn.RNNBase, list[Any]]] = []
    try:
        for each in module.modules():
            if isinstance(each, torch.jit.ScriptModule):
                continue
            for named in (each._parameters, each._buffers):
                if any(map(is_exchanged, named.values())):
                    before.append((named, dict(named)))
                    named.update({name: other(tensor) for name, tensor in named.items()})
            if isinstance(each, nn.RNNBase):  # which keeps its weights in a list as well
                flattened.append((each, each._flat_weights))
                each._flat_weights = [other(weight) for weight in each._flat_weights]
        yield
    finally:
        for named, own in before:
            named.clear()
            named.update(own)
        for rnn, weights in flattened:
            rnn._flat_weights = weights


class Region(NamedTuple):
    """What holds where a module is called: a policy's state in this thread, and autocast's own.

    Args:
        state: Of the policy; None if none is in force.
        native: Whether autocast is on, its dtype, and whether casts are cached.
    """

    state: Any
    native: tuple[bool, torch.dtype, bool] | None

    @classmethod
    def here(cls, device: str) -> Region:
        """Return what holds in this thread."""
        return cls(THREAD.state, native_state_of(device) if has_autocast(device) else None)

    @contextmanager
    def again(self, device: str) -> Iterator[None]:
        """Let it hold in this thread for a while, also in a backward."""
        before = THREAD.state
        mode = None if self.state is None else self.state.bound.mode()
        try:
            # In a backward a module with rules looks up the state of the forward that checkpointing runs again, unless
            # it is told that this is known already.
            THREAD.state = None if self.state is None else self.state._replace(again=True)
            with mode or nullcontext():
                if self.native is None:
                    yield
                else:
                    enabled, dtype, _ = self.native
                    # Casts of weights are not cached: the region around may have cached others.
                    with in_native_state(device, enabled, dtype, False):
                        yield
        finally:
            THREAD.state = before

    def is_plain(self, forward: object) -> bool:
        """Return True if neither autocast nor a rule changes anything in the forward of a module."""
        if self.native is not None and self.native[0]:
            return False
        if self.state is None:
            return True
        bound = self.state.bound
        return not (self.state.ops and bound.op_rules) and bound.key not in getattr(forward, "rules", ())


def _bound_without_warning(policy: Policy, model: nn.Module) -> BoundPolicy:
    """Bind a policy; that recipes are emulated is said in notes."""
    before = set(SETTLED)
    try:
        SETTLED.update(itertools.product(RECIPES.values(), DEVICES))
        return policy.bind(model)
    finally:
        SETTLED.intersection_update(before)


@contextmanager
def bound_for_now(policy: Policy, model: nn.Module) -> Iterator[BoundPolicy]:
    """Bind a policy for a while; one that is bound already stays so."""
    was_bound = is_bound_to(policy, model) is not None
    try:
        yield _bound_without_warning(policy, model)
    finally:
        bound = None if was_bound else is_bound_to(policy, model)
        if bound is not None:
            bound.unbind()


ParamGradients = list[torch.Tensor | None]
"""Of a loss by parameters; None where it does not depend on one."""


def scaled(compute: Callable[[float], ParamGradients], scale: float) -> tuple[ParamGradients, float]:
    """Return gradients of a loss times the largest scale with which they are finite, and this scale.

    Args:
        compute: Makes them, given a scale.
        scale: To begin with.
    """
    while True:
        found = compute(scale)
        if scale <= _LEAST_SCALE or all(each is None or bool(local(each).isfinite().all()) for each in found):
            return found, scale
        scale *= _BACKOFF


def is_sharded(model: nn.Module) -> bool:
    """Return True if a parameter of a model is a DTensor."""
    return any(local(param) is not param for param in model.parameters())
