"""An iteration that a rank leaves out: it resets the gradients of a backward, and scales another loss.

To the next collective that rank comes as if it had accumulated gradients, and ranks may do so differently. That the
gradients were reset in between is what tells.
"""

from __future__ import annotations

import weakref

import torch

from castwise._torch_private import never_traced
from castwise.amp.gradients import params_of


class LeftOut:
    """Watches one parameter, which stands for all: a hook tells that a backward has come to it.

    What puts gradients there in other ways is not seen: FSDP, or code that assigns `.grad`.
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
        find = weakref.ref(self)  # the parameter must not keep this alive, nor this the parameter

        @never_traced
        def arrived(_: torch.Tensor) -> None:
            if (watching := find()) is not None:
                watching._has_gradient = True

        self._param = weakref.ref(param)
        handle = param.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]  # torch's
        weakref.finalize(self, handle.remove)

    def is_reset(self) -> bool:
        """Return True if the gradient of a backward of this iteration is gone."""
        param = None if self._param is None else self._param()
        return self._has_gradient and param is not None and param.grad is None

    def begin(self) -> None:
        """Begin an iteration, or another attempt at one."""
        self._has_gradient = False
