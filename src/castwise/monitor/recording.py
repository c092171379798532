"""`Recording`: what is needed to replay the micro-batches of a step after it was skipped."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from castwise._torch_private import is_backward_running, tree_map
from castwise.monitor.casting_state import CastingState
from castwise.monitor.diagnosis import Diagnosis, diagnose_replay, outputs_of
from castwise.monitor.op_facts import tensors_of
from castwise.monitor.random_state import RandomState
from castwise.monitor.replay import is_replaying

MOST = 64  # micro-batches of one step


@dataclass
class MicroBatch:
    """One forward in training, and the gradients that its output has got.

    Args:
        args: Positional arguments, without their graphs; tensors are the caller's, not copies.
        kwargs: Keyword arguments.
        casting: Autocast regions.
        random: State of random number generators at its beginning.
        gradients: Of the floating-point tensors in the output, by place; summed over several backwards.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    casting: CastingState
    random: RandomState
    outputs: int = 0
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, place: int, gradient: torch.Tensor) -> None:
        """Add a gradient that has arrived."""
        before = self.gradients.get(place)
        self.gradients[place] = gradient.detach() if before is None else before + gradient.detach()

    def diagnose(self, model: nn.Module, scale: float) -> Diagnosis:
        """Replay it with the weights that the model has now."""

        def region() -> AbstractContextManager[None]:
            self.random.restore()  # the replay puts back what it was before
            return self.casting.in_force()

        gradients = [self.gradients.get(place) for place in range(self.outputs)]
        return diagnose_replay(model, self.args, self.kwargs, gradients, scale=scale, region=region)


class MicroBatches:
    """Those of one step, the last `MOST` of them.

    Args:
        model: That they were given to.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._batches: deque[MicroBatch] = deque(maxlen=MOST)

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, batch: MicroBatch) -> None:
        """Add one, and drop the first if there are too many."""
        self._batches.append(batch)

    def diagnose(self, scale: float) -> Diagnosis:
        """Replay them in order until one has a fault.

        Args:
            scale: Of the losses of that step.
        """
        for batch in self._batches:
            diagnosis = batch.diagnose(self._model, scale)
            if diagnosis:
                return diagnosis
        return Diagnosis(False, scale=scale)


class Recording:
    """Keeps what forwards in training are given, and the gradients of what they return, until it is cleared.

    A forward costs some 0.1 ms for the state of random number generators; no data is copied, and nothing syncs. What a
    program writes over before the replay (a static input buffer) is replayed as it is then, and so are weights.
    Forwards without gradients, those that checkpointing runs again, and replays are not recorded.

    Args:
        model: As it is called: with its wrappers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self._begun: list[MicroBatch | None] = []
        self._batches = MicroBatches(model)

    def attach(self) -> None:
        """Begin to record; nothing if it has begun."""
        if not self._hooks:
            # First of all, before a policy's rule for the model itself sets another state.
            self._hooks = [
                self._model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
                self._model.register_forward_hook(self._after, always_call=True),
            ]

    def detach(self) -> None:
        """Stop recording, and forget what was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.take()

    def take(self) -> MicroBatches:
        """Return what was recorded since the last time, and forget it: for a step whose verdict comes later."""
        taken, self._batches = self._batches, MicroBatches(self._model)
        return taken

    def diagnose(self, scale: float) -> Diagnosis:
        """Replay what was recorded until there is a fault.

        Args:
            scale: Of the losses.
        """
        return self._batches.diagnose(scale)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or is_replaying() or is_backward_running():
            self._begun.append(None)
            return
        types = {tensor.device.type for tensor in [*tensors_of([args, kwargs]), *model.parameters()]}
        batch = MicroBatch(tree_map(_detached, args), tree_map(_detached, kwargs), CastingState(types), RandomState())
        self._begun.append(batch)

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        batch = self._begun.pop()
        if batch is None or output is None:  # the forward has raised
            return
        outputs = outputs_of(output)
        batch.outputs = len(outputs)
        for place, tensor in enumerate(outputs):
            if tensor.requires_grad:
                tensor.register_hook(partial(batch.add, place))  # type: ignore[no-untyped-call]
        self._batches.append(batch)


def _detached(value: Any) -> Any:
    """Return a tensor in the same memory without its graph, so that none is kept alive."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
