"""`Recording`: what is needed to replay the micro-batches of a step after it was skipped."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from castwise._guard import Guard
from castwise._torch_private import is_backward_running, tree_map
from castwise._warnings import warn
from castwise.amp.outcomes import Cause
from castwise.diagnosis.cases import outputs_of
from castwise.diagnosis.diagnosis import Diagnosis, NonFinite, diagnose_replay
from castwise.diagnosis.forward_state import CastingState, RandomState
from castwise.diagnosis.op_facts import tensors_of
from castwise.diagnosis.replay import is_replaying
from castwise.tracing.module_hooks import ModuleHooks

MOST = 64  # micro-batches of one step
GRADIENTS_OF = 8  # the last of them, of which the gradients of outputs are kept: such a gradient is as large as logits

_LOSS_IS_FINITE = {Cause.OVERFLOW: True, Cause.NONFINITE_LOSS: False}


@dataclass
class MicroBatch:
    """One forward in training, and the gradients that its output has got.

    Args:
        args: Positional arguments, without their graphs; tensors are the caller's, not copies.
        kwargs: Keyword arguments.
        casting: Autocast regions.
        random: State of random number generators at its beginning.
        buffers: Module, name and value at its beginning: a forward may leave in them what is not finite.
        gradients: Of the floating-point tensors in the output, by place; summed over several backwards. Of a batch
            that is condensed only their largest magnitudes, shape ().
        is_condensed: Its gradients no longer fit.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    casting: CastingState
    random: RandomState
    buffers: list[tuple[nn.Module, str, torch.Tensor]] = field(default_factory=list)
    outputs: int = 0
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    is_condensed: bool = False

    def add(self, place: int, gradient: torch.Tensor) -> None:
        """Add a gradient that has arrived."""
        before, gradient = self.gradients.get(place), gradient.detach()
        if self.is_condensed:
            gradient = _peak(gradient)
            self.gradients[place] = gradient if before is None else torch.maximum(before, gradient)
        else:
            self.gradients[place] = gradient if before is None else before + gradient

    def condense(self) -> None:
        """Keep of its gradients only whether they are finite. Does not sync with an accelerator."""
        if not self.is_condensed:
            self.is_condensed = True
            self.gradients = {place: _peak(gradient) for place, gradient in self.gradients.items()}

    def has_bad_gradients(self) -> bool:
        """Return True if a gradient of its output is not finite."""
        return not all(gradient.isfinite().all() for gradient in self.gradients.values())

    def is_known_to_be_finite(self) -> bool:
        """Return True if its loss was finite, and there is nothing to replay a backward with."""
        return self.is_condensed and bool(self.gradients) and not self.has_bad_gradients()

    def can_be_replayed_in_full(self) -> bool:
        """Return True if there is something to replay a backward with."""
        return bool(self.gradients) and not self.is_condensed

    def diagnose(self, model: nn.Module, scale: float, loss_is_finite: bool | None, with_backward: bool) -> Diagnosis:
        """Replay it with the weights that the model has now."""

        def region() -> AbstractContextManager[None]:
            self.random.restore()  # the replay puts back what it was before
            for module, name, before in self.buffers:
                module._buffers[name] = before.clone()
            return self.casting.in_force()

        gradients = [self.gradients.get(place) for place in range(self.outputs)]
        return diagnose_replay(
            model,
            self.args,
            self.kwargs,
            gradients,
            scale=scale,
            region=region,
            loss_is_finite=loss_is_finite,
            with_backward=with_backward,
        )


class MicroBatches:
    """Those of one step: what the last `MOST` were given, and the gradients that the last `GRADIENTS_OF` have got.

    Args:
        model: That they were given to.
        iteration: The number of the scaler's iteration in which they began.
    """

    def __init__(self, model: nn.Module, iteration: int = 0) -> None:
        self._model, self.iteration = model, iteration
        self._batches: deque[MicroBatch] = deque(maxlen=MOST)
        self._diagnosis: Diagnosis | None = None
        self._is_diagnosed = False

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, batch: MicroBatch) -> None:
        """Add one, and drop the first if there are too many."""
        self._batches.append(batch)
        if len(self._batches) > GRADIENTS_OF:
            self._batches[-1 - GRADIENTS_OF].condense()

    def diagnose(self, scale: float, cause: Cause | None = None) -> Diagnosis | None:
        """Replay them in order until one has a fault, once: what was found is kept, for others of the same backward.

        Args:
            scale: Of the losses of that step.
            cause: Why it was skipped, as far as the scaler knows; it says whether the losses were finite.

        Returns:
            None if nothing was recorded, or there was no fault in what could be replayed in full.
        """
        if not self._is_diagnosed:
            self._is_diagnosed = True  # also if it raises: it would again
            self._diagnosis = self._first_fault(scale, None if cause is None else _LOSS_IS_FINITE.get(cause))
        return self._diagnosis

    def _first_fault(self, scale: float, loss_is_finite: bool | None) -> Diagnosis | None:
        # A batch whose loss was dropped without a backward (`continue`) has no part in the step.
        batches = [batch for batch in self._batches if batch.gradients] or list(self._batches)
        suspects = [batch for batch in batches if not batch.is_known_to_be_finite()]
        # Several may have one loss, which gives all of them bad gradients for the fault of one.
        bad = [] if loss_is_finite else [batch for batch in suspects if batch.has_bad_gradients()]
        for batch in bad if len(bad) > 1 else []:
            if diagnosis := batch.diagnose(self._model, scale, loss_is_finite, with_backward=False):
                return diagnosis
        harmless: list[NonFinite] = []
        for batch in suspects:
            diagnosis = batch.diagnose(self._model, scale, loss_is_finite, with_backward=True)
            if diagnosis:
                return diagnosis
            harmless += diagnosis.harmless
        is_clean = batches and all(batch.can_be_replayed_in_full() for batch in batches)
        return Diagnosis(False, scale=scale, harmless=tuple(dict.fromkeys(harmless))) if is_clean else None


class Recording:
    """Keeps what forwards in training are given, and the gradients of what they return, until it is taken.

    A forward costs some 0.1 ms for the state of random number generators; of the model's buffers copies are made, of no
    other data, and nothing syncs. What a program writes over before the replay (a static input) is replayed as it is
    then, and so are weights.
    Forwards without gradients, those that checkpointing runs again, and replays are not recorded. What an iteration of
    the scaler has left, as its step was left out, is forgotten in the next one.

    Args:
        model: As it is called: with its wrappers.
        iteration: Says in which iteration the scaler is.
        most_bytes: What the batches and buffers of a step may take; beyond that nothing is recorded any more, with a
            warning. Gradients of outputs for which there is no space left are reduced to their largest magnitudes.
    """

    def __init__(
        self, model: nn.Module, iteration: Callable[[], int] = lambda: 0, most_bytes: float = math.inf
    ) -> None:
        self._model, self._iteration, self._most_bytes = model, iteration, most_bytes
        self._nbytes = 0
        self._guard = Guard()
        self._hooks: ModuleHooks | None = None
        self._begun: list[MicroBatch | None] = []
        self._batches = MicroBatches(model)

    def attach(self) -> None:
        """Begin to record; nothing if it has begun."""
        if self._hooks is None:
            # Hooks, not a `forward` of the model's own or what `model.compile()` sets: the one sees what the hooks of
            # others have made of the batch, and Dynamo compiles again what calls the model when either comes and goes.
            # Both are bound to one module, and replicas of DataParallel share them.
            self._hooks = ModuleHooks()
            # First of all, before a policy's rule for the model itself sets another state.
            self._hooks.put_on(self._model, self._before, self._after, first=True)

    def detach(self) -> None:
        """Stop recording, and forget what was."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        self.take()

    def take(self) -> MicroBatches:
        """Return what was recorded since the last time, and forget it: for a step whose verdict comes later."""
        if self._hooks is not None:
            self._hooks.put_back()
        taken = self._batches
        self._begin(0)
        return taken

    def follow(self, iteration: Callable[[], int]) -> None:
        """Let something else say from now on in which iteration the scaler is; what was recorded counts as of that."""
        self._iteration, self._batches.iteration = iteration, iteration()

    def _begin(self, iteration: int) -> None:
        self._batches, self._nbytes = MicroBatches(self._model, iteration), 0

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = None
        if torch.is_grad_enabled() and not (is_replaying() or is_backward_running()):
            with self._guard:
                types = {tensor.device.type for tensor in [*tensors_of([args, kwargs]), *model.parameters()]}
                given = tree_map(_detached, args), tree_map(_detached, kwargs)
                batch = MicroBatch(*given, CastingState(types), RandomState(), self._buffers_of(model))
        self._begun.append(batch)

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        batch = self._begun.pop()
        if batch is None or output is None:  # the forward has raised
            return
        with self._guard:
            outputs = outputs_of(output)
            batch.outputs = len(outputs)
            for place, tensor in enumerate(outputs):
                if tensor.requires_grad and not tensor.is_leaf:  # the hook of a weight would stay
                    tensor.register_hook(partial(self._add, batch, place))  # type: ignore[no-untyped-call]  # torch's
            if self._batches.iteration != self._iteration():
                self._begin(self._iteration())
            kept = [*tensors_of([batch.args, batch.kwargs]), *(copy for _, _, copy in batch.buffers)]
            if not self._fits(kept):
                self.detach()
                warn(
                    f"the batch, random states and buffers of a step take more than {self._most_bytes / 2**20:g} MiB: "
                    "skipped steps are not diagnosed; castwise.Monitor(..., on_skip='diagnose') has no limit",
                    UserWarning,
                    2,
                )
                return
            self._nbytes += _nbytes(kept)
            self._batches.append(batch)

    def _add(self, batch: MicroBatch, place: int, gradient: torch.Tensor) -> None:
        with self._guard:
            if not self._fits([gradient]):
                batch.condense()
            elif not batch.is_condensed:
                self._nbytes += gradient.nbytes
            batch.add(place, gradient)

    def _buffers_of(self, model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
        return [
            (module, name, buffer.detach().clone())
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)
            for name, buffer in module._buffers.items()
            if buffer is not None and self._fits([buffer])
        ]

    def _fits(self, tensors: Iterable[torch.Tensor]) -> bool:
        return self._nbytes + _nbytes(tensors) <= self._most_bytes


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _peak(gradient: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, which is inf or NaN if any is: shape (), on the same device."""
    return torch.stack(gradient.aminmax()).abs().amax() if gradient.numel() else gradient.new_zeros(())


def _detached(value: Any) -> Any:
    """Return a tensor in the same memory without its graph, so that none is kept alive."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
