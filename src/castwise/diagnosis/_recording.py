"""`Recording`: record the micro-batches of a step, to replay them if it is skipped."""

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

from castwise._guard import Guard, guarded
from castwise._torch_private import buffers_in, is_backward_running, tree_map
from castwise._warnings import warn_or_print
from castwise.amp._outcomes import Cause
from castwise.diagnosis._cases import outputs_of
from castwise.diagnosis._diagnosis import Diagnosis, NonFinite, diagnose_replay
from castwise.diagnosis._forward_state import CastingState, RandomState
from castwise.diagnosis._op_facts import tensors_of
from castwise.diagnosis._replay import is_replaying
from castwise.tracing._module_hooks import ModuleHooks

MOST = 64  # micro-batches kept per step
GRADIENTS_OF = 8  # the most recent ones, whose output gradients are kept; each is as large as the logits

_LOSS_IS_FINITE = {Cause.OVERFLOW: True, Cause.NONFINITE_LOSS: False}


@dataclass
class MicroBatch:
    """One forward in training, and the gradients of its output.

    Args:
        args: Positional arguments, detached; the tensors are the caller's, not copies.
        kwargs: Keyword arguments.
        casting: Autocast regions.
        random: Random state at the start of the forward.
        buffers: Module, name and value of each buffer at the start; a forward may leave non-finite values in them.
        outputs: Number of floating-point tensors in the output.
        gradients: Gradients of these tensors by position, summed over several backwards. In a condensed batch only
            their largest magnitudes, shape ().
        is_condensed: Whether the gradients were too large to keep.
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
        """Add a gradient of the output at `place`."""
        before, gradient = self.gradients.get(place), gradient.detach()
        if self.is_condensed:
            gradient = _peak(gradient)
            self.gradients[place] = gradient if before is None else torch.maximum(before, gradient)
        else:
            self.gradients[place] = gradient if before is None else before + gradient

    def condense(self) -> None:
        """Reduce the gradients to their largest magnitudes. Does not sync with an accelerator."""
        if not self.is_condensed:
            self.is_condensed = True
            self.gradients = {place: _peak(gradient) for place, gradient in self.gradients.items()}

    def has_bad_gradients(self) -> bool:
        """Return True if a gradient of the output is not finite."""
        return not all(gradient.isfinite().all() for gradient in self.gradients.values())

    def is_known_to_be_finite(self) -> bool:
        """Return True if the gradients are condensed and finite, so a replay would show nothing."""
        return self.is_condensed and bool(self.gradients) and not self.has_bad_gradients()

    def can_be_replayed_in_full(self) -> bool:
        """Return True if the backward can be replayed."""
        return bool(self.gradients) and not self.is_condensed

    def diagnose(self, model: nn.Module, scale: float, loss_is_finite: bool | None, with_backward: bool) -> Diagnosis:
        """Replay the micro-batch with the model's current weights."""

        def region() -> AbstractContextManager[None]:
            self.random.restore()  # the replay restores the previous state
            for module, name, before in self.buffers:
                buffers_in(module)[name] = before.clone()
            return self.casting.applied()

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
    """The micro-batches of one step: inputs of the last `MOST`, output gradients of the last `GRADIENTS_OF`.

    Args:
        model: The model that they were passed to.
        iteration: Number of the scaler's iteration in which they started.
    """

    def __init__(self, model: nn.Module, iteration: int = 0) -> None:
        self._model, self.iteration = model, iteration
        self._batches: deque[MicroBatch] = deque(maxlen=MOST)
        self._diagnosis: Diagnosis | None = None
        self._is_diagnosed = False

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, batch: MicroBatch) -> None:
        """Add a micro-batch, and drop the oldest if there are more than `MOST`."""
        self._batches.append(batch)
        if len(self._batches) > GRADIENTS_OF:
            self._batches[-1 - GRADIENTS_OF].condense()

    def diagnose(self, scale: float, cause: Cause | None = None) -> Diagnosis | None:
        """Replay the micro-batches in order until one has a fault. Later calls return the same result.

        Args:
            scale: Scale of the step's losses.
            cause: Why the step was skipped, if the scaler knows; it tells whether the losses were finite.

        Returns:
            None if no fault was found and not every micro-batch could be replayed in full, or if none was recorded.
        """
        if not self._is_diagnosed:
            self._is_diagnosed = True  # even if it raises: it would raise again
            self._diagnosis = self._first_fault(scale, None if cause is None else _LOSS_IS_FINITE.get(cause))
        return self._diagnosis

    def _first_fault(self, scale: float, loss_is_finite: bool | None) -> Diagnosis | None:
        # A batch whose loss was dropped without a backward (`continue`) is not part of the step.
        batches = [batch for batch in self._batches if batch.gradients] or list(self._batches)
        suspects = [batch for batch in batches if not batch.is_known_to_be_finite()]
        # Several batches may share one loss, and one bad batch then makes the gradients of all non-finite.
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
    """Records the inputs of training forwards and the gradients of their outputs until `take` is called.

    Each forward costs about 0.1 ms for the random states and a copy of the model's buffers; no other data is copied
    and nothing syncs. Inputs that are overwritten before the replay (static inputs) are replayed with their new
    values, and so are weights. Forwards without gradients, recomputations of activation checkpointing, and replays are
    not recorded. Batches of an iteration whose step was never taken are dropped in the next one.

    Args:
        model: The model as the script calls it, with its wrappers.
        iteration: Returns the number of the scaler's current iteration.
        most_bytes: Memory limit for the batches and buffers of a step. Above it, recording stops with a warning.
            Output gradients that do not fit are reduced to their largest magnitudes.
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
        """Start recording. Does nothing if already started."""
        if self._hooks is None:
            # Hooks rather than a replaced `forward` or the attribute that `model.compile()` sets: a replaced `forward`
            # sees the batch only after other hooks changed it, and Dynamo recompiles the model's callers whenever
            # either is set or removed. Both are also bound to one module, which replicas of DataParallel share.
            self._hooks = ModuleHooks(self._guard)
            # First, before a policy's rule for the model itself sets another state.
            self._hooks.put_on(self._model, self._before, self._after, first=True)

    def detach(self) -> None:
        """Stop recording and drop all recorded batches."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        self.take()

    def take(self) -> MicroBatches:
        """Return the batches recorded since the last call, and start over. The step's result may arrive later."""
        if self._hooks is not None:
            self._hooks.put_back()
        taken = self._batches
        self._begin(0)
        return taken

    def follow(self, iteration: Callable[[], int]) -> None:
        """Replace the source of iteration numbers. Batches recorded so far count for its current iteration."""
        self._iteration, self._batches.iteration = iteration, iteration()

    def _begin(self, iteration: int) -> None:
        self._batches, self._nbytes = MicroBatches(self._model, iteration), 0

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = None
        if torch.is_grad_enabled() and not (is_replaying() or is_backward_running()):
            with self._guard:  # `_after` expects an entry for each forward
                types = {tensor.device.type for tensor in [*tensors_of([args, kwargs]), *model.parameters()]}
                given = tree_map(_detached, args), tree_map(_detached, kwargs)
                batch = MicroBatch(*given, CastingState(types), RandomState(), self._buffers_of(model))
        self._begun.append(batch)

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        batch = self._begun.pop()
        if batch is None or output is None:  # the forward raised
            return
        outputs = outputs_of(output)
        batch.outputs = len(outputs)
        for place, tensor in enumerate(outputs):
            if tensor.requires_grad and not tensor.is_leaf:  # a hook on a leaf would stay
                tensor.register_hook(partial(self._add, batch, place))  # type: ignore[no-untyped-call]  # torch's
        if self._batches.iteration != self._iteration():
            self._begin(self._iteration())
        kept = [*tensors_of([batch.args, batch.kwargs]), *(copy for _, _, copy in batch.buffers)]
        if not self._fits(kept):
            self.detach()
            warn_or_print(
                f"recording a step takes more than {self._most_bytes / 2**20:g} MiB, so skipped steps are not "
                "diagnosed any more. castwise.Monitor(..., on_skip='diagnose') has no such limit",
                UserWarning,
            )
            return
        self._nbytes += _nbytes(kept)
        self._batches.append(batch)

    @guarded
    def _add(self, batch: MicroBatch, place: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:  # of a compiled model, and the loss does not depend on this output
            return
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
            for name, buffer in nn.Module.named_buffers(module, recurse=False, remove_duplicate=False)
            if self._fits([buffer])
        ]

    def _fits(self, tensors: Iterable[torch.Tensor]) -> bool:
        return self._nbytes + _nbytes(tensors) <= self._most_bytes


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _peak(gradient: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, inf or NaN if any value is. Shape (), on the same device."""
    return torch.stack(gradient.aminmax()).abs().amax() if gradient.numel() else gradient.new_zeros(())


def _detached(value: Any) -> Any:
    """Return a detached tensor with the same memory, so that its graph is not kept alive."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
