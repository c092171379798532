"""`EarlierWeights`: copies of the weights from earlier steps, to replay a batch with."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from castwise.amp._devices import copies_asynchronously
from castwise.amp._gradients import params_of

EVERY = 16


@dataclass(frozen=True)
class WeightsOfStep:
    """The weights as they were before a step.

    Args:
        step: Number of the step.
        weights: The parameters (of DTensors this rank's parts), with their values then, in the host's memory.
    """

    step: int
    weights: Sequence[tuple[torch.Tensor, torch.Tensor]]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the parameters these values within the context. Changes no version counter.

        The present values are copied meanwhile.
        """
        params = [param for param, _ in self.weights]
        now = [param.detach().clone() for param in params]
        try:
            _write(params, [value.to(param.device) for param, value in self.weights])
            yield
        finally:
            _write(params, now)

    def towards(self, later: WeightsOfStep, share: float) -> WeightsOfStep:
        """Return weights that are a share of the way from these to later ones, and those that are only among the later.

        Waits for the device.

        Args:
            later: The weights of a later step, which begin with the same parameters.
            share: In [0, 1].
        """
        _wait_for(later)
        same, others = later.weights[: len(self.weights)], later.weights[len(self.weights) :]
        pairs = zip(self.weights, same, strict=True)
        return WeightsOfStep(
            later.step, [*((param, before.lerp(then, share)) for (param, before), (_, then) in pairs), *others]
        )

    def growth(self) -> float:
        """Return the norm of all weights now over their norm then; inf if that was 0, nan if one is not finite."""
        floats = [(param.detach().cpu(), then) for param, then in self.weights if param.is_floating_point()]
        before = float(get_total_norm([then.float() for _, then in floats]))
        now = float(get_total_norm([param.float() for param, _ in floats]))
        return now / before if before else float("inf")


class EarlierWeights:
    """Copies of weights in the host's memory, from two steps that are at least 16 apart.

    Of several optimizers with batches of their own, each has its turn. On an accelerator the copies are asynchronous,
    into pinned memory.
    """

    def __init__(self) -> None:
        self._kept: list[WeightsOfStep] = []  # the older one first
        self._of: deque[torch.optim.Optimizer | None] = deque(maxlen=2)  # those before whose steps they were made
        self.is_held = False
        """Whether to take no more copies for now."""

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps before which weights were copied."""
        return [kept.step for kept in self._kept]

    def keep(
        self,
        step: int,
        optimizers: Sequence[torch.optim.Optimizer],
        stepping: torch.optim.Optimizer | None = None,
    ) -> None:
        """Copy weights, if the last copy is 16 steps old.

        Args:
            step: Number of the step that is about to be taken; those of all optimizers of a model count.
            optimizers: Those whose parameters are copied.
            stepping: That which is about to step.
        """
        # Before the same optimizer's step again only if all others have had a chance.
        least = EVERY if stepping not in self._of else EVERY + len(optimizers) - 1
        if self.is_held or (self._kept and 0 <= step - self._kept[-1].step < least):
            return
        self._of.append(stepping)
        unused = self._kept.pop(0) if len(self._kept) == 2 else None
        self._kept.append(copy_of(optimizers, step, [] if unused is None else [copy for _, copy in unused.weights]))

    def latest(self, step: int) -> WeightsOfStep | None:
        """Return the latest copy that is not from after a step; None if there is none. Waits for the device."""
        return self._arrived([kept for kept in self._kept if kept.step <= step][-1:])

    def earlier(self, step: int) -> WeightsOfStep | None:
        """Return the older copy from before a step; None if there is none. Waits for the device."""
        return self._arrived([kept for kept in self._kept if kept.step < step][:1])

    def of(self, step: int) -> WeightsOfStep | None:
        """Return the copy from before a step; None if there is none. Waits for the device."""
        return self._arrived([kept for kept in self._kept if kept.step == step])

    def _arrived(self, found: Sequence[WeightsOfStep]) -> WeightsOfStep | None:
        if not found:
            return None
        _wait_for(found[0])
        return found[0]


def copy_of(
    optimizers: Sequence[torch.optim.Optimizer], step: int, buffers: Sequence[torch.Tensor] = ()
) -> WeightsOfStep:
    """Start to copy the weights of optimizers to the host before a step, into buffers where they fit."""
    local = [_local(param) for optimizer in optimizers for param in params_of(optimizer)]
    pairs = itertools.zip_longest(local, buffers[: len(local)])
    return WeightsOfStep(step, [(param, _copied(param, buffer)) for param, buffer in pairs])


def _wait_for(weights: WeightsOfStep) -> None:
    for device in {param.device for param, _ in weights.weights}:
        if copies_asynchronously(device.type):
            torch.accelerator.synchronize(device)


def _local(param: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, which shares its memory; any other tensor itself."""
    return param.detach().to_local() if hasattr(param, "to_local") else param  # type: ignore[no-any-return]  # a tensor


@torch.no_grad()
def _copied(param: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    """Start to copy a parameter to the host, into a buffer if it fits."""
    if buffer is None or (buffer.shape, buffer.dtype) != (param.shape, param.dtype):
        is_pinned = copies_asynchronously(param.device.type)
        buffer = torch.empty_like(param, device="cpu", pin_memory=is_pinned, requires_grad=False)
    return buffer.copy_(param.detach(), non_blocking=True)


@torch.no_grad()
def _write(params: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.data.copy_(value)  # which bumps no version counter
