"""Where a monitor learns of steps: from a scaler, from optimizers without one, or from a script that guards itself."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from castwise._guard import ErrorBoundary, guarded
from castwise.amp._outcomes import StepFacts
from castwise.amp._readback import DELAY, Readback
from castwise.monitor._checked_steps import CheckedSteps, OnFault, device_of
from castwise.monitor._sharded_model_ranks import ShardedModelRanks
from castwise.monitor._step_check import LateCheck


class Handle(Protocol):
    """Removes what was registered."""

    def remove(self) -> None:
        """Remove it."""


class StepSource(Protocol):
    """Reports the steps of optimizers."""

    is_scaled: bool
    """Whether losses are scaled, so that steps have a scale and may be skipped."""

    @property
    def agrees(self) -> bool:
        """Whether all ranks take and skip the same steps."""

    @property
    def iteration(self) -> int:
        """The number of the current iteration, from 1."""

    @property
    def steps(self) -> int:
        """The number of steps so far, those before a checkpoint included."""

    def register_gradients_hook(self, hook: Callable[[torch.optim.Optimizer, torch.Tensor], object]) -> Handle:
        """Call a function with each optimizer and the scale, before the gradients of its step are changed."""

    def register_step_hook(self, hook: Callable[[StepFacts], object]) -> Handle:
        """Call a function with the facts of each step, once the host knows them."""

    def synchronize(self) -> None:
        """Report all pending steps, which waits for the device."""


class ScalerSource:
    """The steps of an enabled scaler.

    Args:
        scaler: A `castwise.GradScaler`.
    """

    is_scaled = True

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def register_gradients_hook(self, hook: Callable[[torch.optim.Optimizer, torch.Tensor], object]) -> Handle:
        """Call a function with each optimizer and the scale, before the gradients of its step are changed."""
        handle: Handle = self._scaler.register_gradients_hook(hook)
        return handle

    def register_step_hook(self, hook: Callable[[StepFacts], object]) -> Handle:
        """Call a function with the facts of each step, once the host knows them."""
        handle: Handle = self._scaler.register_step_hook(hook)
        return handle

    def synchronize(self) -> None:
        """Report all pending steps, which waits for the device."""
        self._scaler.synchronize()

    @property
    def agrees(self) -> bool:
        """Whether all ranks take and skip the same steps."""
        return bool(self._scaler.agrees)

    @property
    def iteration(self) -> int:
        """The number of the current iteration."""
        return int(self._scaler.iteration)

    @property
    def steps(self) -> int:
        """The number of steps so far, those before a checkpoint and those of pending outcome included."""
        return int(self._scaler._outcomes.steps)

    def scale_and_loss(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scale, and the sum of this iteration's losses if there are any: fp32, shape (), on its device."""
        scale = self._scaler._existing_scale()
        return scale, self._scaler._iteration.loss(scale.device)


class OptimizerSource:
    """The steps of optimizers without a scaler, observed with hooks. The scale is 1.

    Losses are unknown unless steps are checked.

    Args:
        optimizers: The optimizers to observe.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers, self.steps = optimizers, 0
        self._step_hooks: OrderedDict[int, Callable[[StepFacts], object]] = OrderedDict()
        self._waiting: deque[tuple[StepFacts, LateCheck | None]] = deque()
        self._checked_steps: CheckedSteps | None = None
        self._guard = ErrorBoundary()

    is_scaled = False
    agrees = False
    """False, because ranks do not agree on the steps to skip."""

    @property
    def iteration(self) -> int:
        """The number of the next step. Each step is an iteration."""
        return self.steps + 1

    def register_gradients_hook(self, hook: Callable[[torch.optim.Optimizer, torch.Tensor], object]) -> Handle:
        """Call a function with each optimizer and a scale of 1 before it steps."""

        one = functools.cache(lambda device: torch.ones((), device=device))

        def call(optimizer: torch.optim.Optimizer, *_: object) -> None:
            hook(optimizer, one(device_of(optimizer)))

        door = self._guard.door(call)
        return _Handles([optimizer.register_step_pre_hook(door) for optimizer in self._optimizers])

    def register_check(
        self, on_fault: OnFault, *, skips: bool = False, joint: ShardedModelRanks | None = None
    ) -> Handle:
        """Check each step before it is taken; see `CheckedSteps`. Register it after the hook of gradients."""
        self._checked_steps = CheckedSteps(self._optimizers, on_fault, skips, self._guard, joint)
        return self._checked_steps

    def register_step_hook(self, hook: Callable[[StepFacts], object]) -> Handle:
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
        self.steps += 1
        facts = StepFacts(self.steps, optimizer, scale=1.0, skipped=False, iteration=self.steps)
        late = None
        if self._checked_steps is not None:
            checked, late = self._checked_steps.result_of(optimizer)
            facts = checked.added_to(facts)
        self._waiting.append((facts, late))
        self._tell(0 if device_of(optimizer).type == "cpu" else DELAY * len(self._optimizers))

    def _tell(self, but: int) -> None:
        while len(self._waiting) > but:
            facts, late = self._waiting.popleft()
            if late is not None:
                facts = late.wait().added_to(facts)
            for hook in tuple(self._step_hooks.values()):
                hook(facts)


class ScriptSource:
    """Steps that a script takes itself although it has a scaler, as scripts do that check for inf and NaN themselves.

    None is skipped. They reach the host as late as the scaler's.

    Args:
        source: The scaler's own steps.
        optimizers: Number of optimizers.
    """

    def __init__(self, source: ScalerSource, optimizers: int) -> None:
        self._source, self._optimizers = source, optimizers
        self._waiting: deque[tuple[torch.optim.Optimizer, int, bool, Readback]] = deque()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a step in the current iteration."""
        scale, loss = self._source.scale_and_loss()
        # Stacked, and so copied: the scale moves in place; it also stands in for a missing loss.
        numbers = torch.stack([scale, scale if loss is None else loss])
        self._waiting.append((optimizer, self._source.iteration, loss is not None, Readback(numbers)))

    def facts(self, *, all_: bool = False) -> Iterator[StepFacts]:
        """Yield the facts that have arrived, each once; with `all_` wait for the rest. They have no numbers yet."""
        while self._waiting:
            optimizer, iteration, has_loss, readback = self._waiting[0]
            # Counted, not asked of the device, so that all ranks record at the same time.
            if not all_ and not readback.is_on_host and len(self._waiting) <= DELAY * self._optimizers:
                return
            self._waiting.popleft()
            scale, loss = readback.wait().tolist()
            yield StepFacts(0, optimizer, scale, skipped=False, loss=loss if has_loss else None, iteration=iteration)


def steps_of(scaler: Any, optimizers: list[torch.optim.Optimizer]) -> StepSource:
    """Return the source of steps: the scaler, or the optimizers if there is no enabled scaler.

    Raises:
        TypeError: The scaler does not report its steps.
    """
    if scaler is None or not scaler.is_enabled():
        return OptimizerSource(optimizers)
    if not hasattr(scaler, "register_step_hook"):
        raise TypeError(
            f"a monitor needs a scaler that reports its steps, got {type(scaler).__module__}.{type(scaler).__name__}: "
            "use castwise.GradScaler or castwise.ShardedGradScaler, which accept the same arguments"
        )
    return ScalerSource(scaler)


class _Handles:
    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
