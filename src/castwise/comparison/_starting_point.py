"""The starting point of each run of a model: its buffers and random states before the first run."""

from __future__ import annotations

import torch
from torch import nn

from castwise._torch_private import buffers_in
from castwise.diagnosis._forward_state import RandomState


class StartingPoint:
    """A snapshot of a model's buffers and of the random states.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._names = [(buffers_in(module), dict(buffers_in(module))) for module in modules]
        self._buffer_values = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._random = RandomState()

    def has_drawn(self) -> bool:
        """Return True if random numbers have been drawn since the snapshot."""
        return not self._random.is_current(also_outside_torch=True)

    def restore(self) -> None:
        """Restore the snapshot without changing version counters, which later backwards check."""
        for now, before in self._names:
            now.clear()
            now.update(before)
        for buffer, value in self._buffer_values:
            if not torch.equal(buffer, value):
                buffer.data.copy_(value)
        self._random.restore()
