"""`BACKWARD_CALLS`: which losses a script calls `backward` on, and which gradient norms it computes by clipping."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from castwise._guard import ErrorBoundary, guarded
from castwise._layered_functions import BACKWARD, CLIP_GRAD_NORM
from castwise._torch_private import is_backward_running
from castwise.amp._gradients import params_of
from castwise.amp._observers import OBSERVERS, Observer
from castwise.diagnosis._diagnosis import Diagnosis
from castwise.diagnosis._loss_code import LOSS_CODE
from castwise.diagnosis._replay import is_replaying

_MOST_LOSSES = 1024  # kept of a step; a script may call `backward` and never step


class BackwardCalls(Observer):
    """Layers around `torch.autograd.backward`, which `Tensor.backward` calls, and `clip_grad_norm_` while followed.

    Calls in a backward (of activation checkpointing), in a replay, and in code that is being compiled are left out. A
    script that imported `clip_grad_norm_` before keeps torch's, unless castwise is installed.
    """

    def __init__(self) -> None:
        self._followers = 0
        self._guard = ErrorBoundary()
        self._hook: Any = None
        self._losses: deque[torch.Tensor] = deque(maxlen=_MOST_LOSSES)
        self._previous: list[torch.Tensor] = []
        self._fault: Diagnosis | None = None
        self._previous_fault: Diagnosis | None = None
        self._clipped: tuple[set[int], torch.Tensor] | None = None
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._left_out = 0

    def follow(self) -> None:
        """Start to follow the calls."""
        self._followers += 1
        if self._followers == 1:
            BACKWARD.add(self._backward)
            CLIP_GRAD_NORM.add(self._clip)
            self._hook = register_optimizer_step_post_hook(self._guard.door(self._after_step))
            OBSERVERS.append(self)

    def leave(self) -> None:
        """Undo one `follow`."""
        self._followers -= 1
        if self._followers:
            return
        self._hook.remove()
        OBSERVERS.remove(self)
        LOSS_CODE.forget()
        self._losses.clear()
        self._optimizers.clear()
        self._previous, self._clipped, self._left_out = [], None, 0
        self._fault = self._previous_fault = None
        BACKWARD.remove(self._backward)
        CLIP_GRAD_NORM.remove(self._clip)

    @property
    def losses(self) -> list[torch.Tensor]:
        """The losses, detached, since the previous step of any optimizer; if there are none, those before that step.

        Optimizers that step after one backward share its losses.
        """
        return list(self._losses) or self._previous

    @property
    def left_out(self) -> int:
        """How many of these losses, the first ones, are of steps that the script seems to have left out.

        Before the next `backward`, no parameter of an optimizer had a gradient. Some scripts keep gradients elsewhere,
        so this is to be believed only of losses that are not finite, in a step whose gradients are.
        """
        return self._left_out if self._losses else 0

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

    def _backward(self, backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        self._guard.call(self._before_backward, tensors)
        backward(tensors, *args, **kwargs)

    def _clip(self, clip: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, Iterator):  # torch would use it up
            parameters = list(parameters)
        norm = clip(parameters, *args, **kwargs)
        self._guard.call(self._after_clip, parameters, norm)
        return norm

    def _before_backward(self, tensors: Any) -> None:
        if is_replaying() or is_backward_running():
            return
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self._clipped = None
        if self._losses and self._have_no_gradients():
            self._left_out = len(self._losses)
        for loss in [loss for loss in given if isinstance(loss, torch.Tensor) and loss.numel() == 1]:
            self._losses.append(loss.detach())
            # A look at one on an accelerator would wait for it.
            is_finite = loss.device.type != "cpu" or math.isfinite(loss.item())
            fault = LOSS_CODE.backward_begins(loss, is_finite=is_finite)
            self._fault = self._fault or fault

    def _have_no_gradients(self) -> bool:
        """Return True if no optimizer has gradients. Zeros count only on CPUs, after a loss that is not finite."""
        loss, params = self._losses[-1], (param for known in self._optimizers for param in params_of(known))
        looks = loss.device.type == "cpu" and not math.isfinite(loss.item())
        # FSDP2 keeps the gradients of micro-batches elsewhere.
        return not any(
            hasattr(param, "to_local") or (param.grad is not None and (not looks or bool(param.grad.any())))
            for param in params
        )

    def _after_clip(self, params: torch.Tensor | Iterable[torch.Tensor], norm: torch.Tensor) -> None:
        clipped = [params] if isinstance(params, torch.Tensor) else params
        self._clipped = set(map(id, clipped)), norm

    def _after_step(self, optimizer: torch.optim.Optimizer | None = None, *_: object) -> None:
        LOSS_CODE.step_ends()
        if self._losses:
            self._previous, self._previous_fault = list(self._losses), self._fault
            self._losses.clear()
            self._fault, self._left_out = None, 0
        if optimizer is not None:
            self._optimizers.add(optimizer)  # last, as a class without a hash raises


BACKWARD_CALLS = BackwardCalls()
"""The calls in this process."""
