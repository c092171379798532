"""`BACKWARD_CALLS`: which losses a script calls `backward` on, and which gradient norms it computes by clipping."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook

from castwise._guard import Guard, guarded
from castwise._torch_private import is_backward_running
from castwise.amp._observers import OBSERVERS, Observer
from castwise.diagnosis._diagnosis import Diagnosis
from castwise.diagnosis._loss_code import LOSS_CODE
from castwise.diagnosis._replay import is_replaying

_MOST_LOSSES = 1024  # kept of a step; a script may call `backward` and never step


class BackwardCalls(Observer):
    """Replaces `torch.autograd.backward`, which `Tensor.backward` calls, and `clip_grad_norm_` while they are followed.

    Calls in a backward (of activation checkpointing), in a replay, and in code that is being compiled are left out. A
    script that imported `clip_grad_norm_` before keeps torch's.
    """

    def __init__(self) -> None:
        self._followers = 0
        self._guard = Guard()
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._hook: Any = None
        self._losses: deque[torch.Tensor] = deque(maxlen=_MOST_LOSSES)
        self._previous: list[torch.Tensor] = []
        self._fault: Diagnosis | None = None
        self._previous_fault: Diagnosis | None = None
        self._clipped: tuple[set[int], torch.Tensor] | None = None

    def follow(self) -> None:
        """Start to follow the calls. The first call of this replaces torch's functions."""
        self._followers += 1
        if self._followers == 1:
            self._replace(torch.autograd, "backward", self._observed_backward)
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                self._replace(module, "clip_grad_norm_", self._observed_clip)
            self._hook = register_optimizer_step_post_hook(self._guard.door(self._after_step))
            OBSERVERS.append(self)

    def leave(self) -> None:
        """Undo one `follow`. The last one puts torch's functions back, except where a name was changed since."""
        self._followers -= 1
        if self._followers:
            return
        self._hook.remove()
        OBSERVERS.remove(self)
        LOSS_CODE.forget()
        self._losses.clear()
        self._previous, self._clipped = [], None
        self._fault = self._previous_fault = None
        while self._replaced:
            module, name, old, new = self._replaced.pop()
            if getattr(module, name) is new:
                setattr(module, name, old)

    @property
    def losses(self) -> list[torch.Tensor]:
        """The losses, detached, since the previous step of any optimizer; if there are none, those before that step.

        Optimizers that step after one backward share its losses.
        """
        return list(self._losses) or self._previous

    @property
    def fault(self) -> Diagnosis | None:
        """The origin of the first of these losses that is not finite, in the code between model and loss."""
        return self._fault if self._losses else self._previous_fault

    def norm_of(self, params: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Return the norm that the script has computed since the last backward, if these parameters are part of it."""
        if self._clipped is None:
            return None
        ids, norm = self._clipped
        return norm if all(id(param) in ids for param in params) else None

    @guarded
    def updating(self, scaler: Any, *, is_set: bool) -> None:
        """End a step that a scaler may have skipped."""
        self._after_step()

    def _replace(self, module: Any, name: str, observed: Callable[[Any], Any]) -> None:
        old = getattr(module, name)
        new = next((new for _, _, other, new in self._replaced if other is old), None) or observed(old)
        self._replaced.append((module, name, old, new))
        setattr(module, name, new)

    def _observed_backward(self, backward: Any) -> Any:
        @functools.wraps(backward)
        def observed(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not is_dynamo_compiling():
                self._guard.call(self._before_backward, tensors)
            backward(tensors, *args, **kwargs)

        return observed

    def _observed_clip(self, clip: Any) -> Any:
        @functools.wraps(clip)
        def observed(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return clip(parameters, *args, **kwargs)
            if isinstance(parameters, Iterator):  # torch would use it up
                parameters = list(parameters)
            norm = clip(parameters, *args, **kwargs)
            self._guard.call(self._after_clip, parameters, norm)
            return norm

        return observed

    def _before_backward(self, tensors: Any) -> None:
        if is_replaying() or is_backward_running():
            return
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self._clipped = None
        for loss in [loss for loss in given if isinstance(loss, torch.Tensor) and loss.numel() == 1]:
            self._losses.append(loss.detach())
            # A look at one on an accelerator would wait for it.
            is_finite = loss.device.type != "cpu" or math.isfinite(loss.item())
            fault = LOSS_CODE.backward_begins(loss, is_finite=is_finite)
            self._fault = self._fault or fault

    def _after_clip(self, params: torch.Tensor | Iterable[torch.Tensor], norm: torch.Tensor) -> None:
        clipped = [params] if isinstance(params, torch.Tensor) else params
        self._clipped = set(map(id, clipped)), norm

    def _after_step(self, *_: object) -> None:
        LOSS_CODE.step_ends()
        if self._losses:
            self._previous, self._previous_fault = list(self._losses), self._fault
            self._losses.clear()
            self._fault = None


BACKWARD_CALLS = BackwardCalls()
"""The calls in this process."""
