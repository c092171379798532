"""Detect an iteration that a rank leaves out: it resets the gradients of a backward and scales another loss.

At the next collective the rank looks as if it had accumulated gradients, which ranks may do differently. Only the reset
of the gradients shows the difference.
"""

from __future__ import annotations

import weakref

import torch

from castwise._torch_private import never_traced
from castwise.amp._gradients import params_of


class LeftOut:
    """Watches one parameter as a proxy for all: a hook notes when a backward reaches it.

    Gradients that arrive in other ways are not seen: from FSDP, or from code that assigns `.grad`.
    """

    def __init__(self) -> None:
        self._param: weakref.ref[torch.Tensor] | None = None
        self._has_gradient = False

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch the first parameter that an optimizer trains, unless one is watched already."""
        if self._param is not None:
            return
        param = next((param for param in params_of(optimizer) if param.requires_grad and param.is_leaf), None)
        if param is None:
            return
        find = weakref.ref(self)  # neither object may keep the other alive

        @never_traced
        def arrived(_: torch.Tensor) -> None:
            if (watching := find()) is not None:
                watching._has_gradient = True

        self._param = weakref.ref(param)
        handle = param.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]  # torch's
        weakref.finalize(self, handle.remove)

    def is_reset(self) -> bool:
        """Return True if a backward of this iteration set a gradient that has been reset since."""
        param = None if self._param is None else self._param()
        return self._has_gradient and param is not None and param.grad is None

    def begin(self) -> None:
        """Begin an iteration, or another attempt at one."""
        self._has_gradient = False
