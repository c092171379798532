"""Report the steps of optimizers without a scaler in the same way as a scaler does."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from castwise._guard import Guard, guarded
from castwise.amp.gradients import params_of
from castwise.amp.outcomes import DELAY, StepFacts


class UnscaledSteps:
    """The steps of optimizers without a scaler, observed with hooks. The scale is 1 and losses are unknown.

    Args:
        optimizers: The optimizers to observe.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers, self._steps = optimizers, 0
        self._step_hooks: OrderedDict[int, Callable[[StepFacts], object]] = OrderedDict()
        self._waiting: deque[StepFacts] = deque()
        self._guard = Guard()

    agrees = False
    """False, because no step is ever skipped."""

    @property
    def iteration(self) -> int:
        """The number of the next step. Each step is an iteration."""
        return self._steps + 1

    def register_gradients_hook(self, hook: Callable[[torch.optim.Optimizer, torch.Tensor], object]) -> _Handles:
        """Call a function with each optimizer and a scale of 1 before it steps."""

        def call(optimizer: torch.optim.Optimizer, *_: object) -> None:
            hook(optimizer, torch.ones((), device=_device_of(optimizer)))

        door = self._guard.door(call)
        return _Handles([optimizer.register_step_pre_hook(door) for optimizer in self._optimizers])

    def register_step_hook(self, hook: Callable[[StepFacts], object]) -> _Handles:
        """Call a function with the facts of each step, with the same delay as a scaler."""
        key = RemovableHandle(self._step_hooks)
        self._step_hooks[key.id] = hook
        return _Handles([key, *(optimizer.register_step_post_hook(self._on_step) for optimizer in self._optimizers)])

    @guarded
    def synchronize(self) -> None:
        """Report all pending steps."""
        self._tell(0)

    @guarded
    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._steps += 1
        self._waiting.append(StepFacts(self._steps, optimizer, scale=1.0, skipped=False, iteration=self._steps))
        self._tell(0 if _device_of(optimizer).type == "cpu" else DELAY * len(self._optimizers))

    def _tell(self, but: int) -> None:
        while len(self._waiting) > but:
            facts = self._waiting.popleft()
            for hook in tuple(self._step_hooks.values()):
                hook(facts)


def steps_of(scaler: Any, optimizers: list[torch.optim.Optimizer]) -> Any:
    """Return the source of steps: the scaler, or the optimizers if there is no enabled scaler.

    Raises:
        TypeError: The scaler does not report its steps.
    """
    if scaler is None or not scaler.is_enabled():
        return UnscaledSteps(optimizers)
    if not hasattr(scaler, "register_step_hook"):
        raise TypeError(
            f"a monitor needs a scaler that reports its steps, got {type(scaler).__module__}.{type(scaler).__name__}: "
            "use castwise.GradScaler or castwise.ShardedGradScaler, which accept the same arguments"
        )
    return scaler


class _Handles:
    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    return next((parameter.device for parameter in params_of(optimizer)), torch.device("cpu"))
