"""Where each run of a model begins: the buffers and random states that there were before the first."""

from __future__ import annotations

import torch
from torch import nn

from castwise.diagnosis.forward_state import RandomState


class StartingPoint:
    """Buffers and random states of a model when it is made.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [each for each in model.modules() if not isinstance(each, torch.jit.ScriptModule)]
        self._names = [(each._buffers, dict(each._buffers)) for each in modules]
        self._buffer_values = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._random = RandomState()

    def has_drawn(self) -> bool:
        """Return True if random numbers were drawn since it was made."""
        return not self._random.is_current(also_outside_torch=True)

    def restore(self) -> None:
        """Put them back; their counts of writes stay, as backwards that are still to come look at them."""
        for now, before in self._names:
            now.clear()
            now.update(before)
        for buffer, value in self._buffer_values:
            if not torch.equal(buffer, value):
                buffer.data.copy_(value)
        self._random.restore()
