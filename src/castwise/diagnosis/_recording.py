"""`Recording`: record the micro-batches of a step, to replay them if it is skipped."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from castwise._guard import ErrorBoundary, guarded
from castwise._torch_private import are_functorch_transforms_active, is_backward_running, number_of_node
from castwise._warnings import warn_or_print
from castwise.amp._gradients import is_plain
from castwise.amp._outcomes import Cause
from castwise.diagnosis._backward_calls import BACKWARD_CALLS
from castwise.diagnosis._cases import outputs_of
from castwise.diagnosis._diagnosis import Diagnosis, NonFinite, diagnose_replay, of_other_weights
from castwise.diagnosis._earlier_weights import WeightsOfStep
from castwise.diagnosis._forward_inputs import ForwardInputs, KeptInputs
from castwise.diagnosis._loaded_batches import LOADED_BATCHES, LoadedBatch
from castwise.diagnosis._loss_code import LOSS_CODE, LossesOfStep
from castwise.diagnosis._loss_function import ModelEdge
from castwise.diagnosis._replay import is_replaying, within_training
from castwise.diagnosis._trials import EarlierTrials, Past
from castwise.tracing._module_hooks import ModuleHooks

MOST = 64  # micro-batches kept per step
GRADIENTS_OF = 8  # the most recent ones, whose output gradients are kept; each is as large as the logits

_MEASURED_FIRST, _MEASURED_EVERY, _SIZES = 4, 16, 5  # forwards whose output is measured, and measurements kept

_LOSS_IS_FINITE = {Cause.OVERFLOW: True, Cause.NONFINITE_GRADIENTS: True, Cause.NONFINITE_LOSS: False}


@dataclass
class MicroBatch:
    """One forward in training, and the gradients of its output.

    Args:
        model: The model that was called.
        name: Its name, if it is one of several.
        inputs: What the forward was given.
        began: Number of autograd nodes at its start.
        outputs: Number of floating-point tensors in the output.
        gradients: Gradients of these tensors by position, summed over several backwards. In a condensed batch only
            their largest magnitudes, shape ().
        is_condensed: Whether the gradients were too large to keep.
        loaded: The batches that data loaders had yielded last.
        usual: The largest magnitudes of the output in some recent forwards, shape () each.
        trials: The remedies that were tried for this model.
        largest: The largest magnitude of the output, shape (), on its device; None if it was not measured.
        edges: The graph edge of each of these outputs, if losses are repeated.
    """

    model: nn.Module
    name: str
    inputs: KeptInputs
    began: int = 0
    outputs: int = 0
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    is_condensed: bool = False
    loaded: tuple[LoadedBatch, ...] = ()
    usual: tuple[torch.Tensor, ...] = ()
    trials: EarlierTrials = field(default_factory=dict)
    largest: torch.Tensor | None = None
    edges: list[ModelEdge] = field(default_factory=list)

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

    def had_bad_output(self) -> bool:
        """Return True if the output is known not to have been finite in the run."""
        return self.largest is not None and not math.isfinite(self.largest.item())

    def is_known_to_be_finite(self) -> bool:
        """Return True if the gradients are condensed and finite, so a replay would show nothing."""
        return self.is_condensed and bool(self.gradients) and not self.has_bad_gradients()

    def can_be_replayed_in_full(self) -> bool:
        """Return True if the backward can be replayed."""
        return bool(self.gradients) and not self.is_condensed

    def diagnose(
        self, scale: float, loss_is_finite: bool | None, with_backward: bool, weights: WeightsOfStep | None = None
    ) -> Diagnosis:
        """Replay the micro-batch with the model's current weights. Remedies are also tried with those of `weights`."""
        gradients = [self.gradients.get(place) for place in range(self.outputs)]
        with within_training():
            diagnosis = diagnose_replay(
                self.model,
                self.inputs.args,
                self.inputs.kwargs,
                gradients,
                scale=scale,
                region=lambda: self.inputs.applied(self.model),
                loss_is_finite=loss_is_finite,
                with_backward=with_backward,
                past=Past(self._usual_size(), self.trials, weights),
            )
        if diagnosis.samples:
            diagnosis = replace(diagnosis, dataset_indices=self.dataset_indices(diagnosis.samples))
        return diagnosis.named_within(self.name) if self.name else diagnosis

    def _usual_size(self) -> float | None:
        sizes = [size for size in (float(one) for one in self.usual) if math.isfinite(size)]
        return statistics.median(sizes) if sizes else None

    def dataset_indices(self, samples: Sequence[int]) -> tuple[Any, ...]:
        """Return the samples' indices in the dataset; empty if one of them is not known."""
        tensors = [tensor for tensor, _ in self.inputs.versions if tensor.dim() and len(tensor) > max(samples)]
        for batch in self.loaded:
            for tensor in tensors:
                places = [batch.index_of(tensor[sample], sample) for sample in samples]
                if None not in places:
                    return tuple(batch.indices[place] for place in places if place is not None)
        return ()


class MicroBatches:
    """The micro-batches of one step: inputs of the last `MOST`, output gradients of the last `GRADIENTS_OF`.

    Args:
        iteration: Number of the scaler's iteration in which they started.
    """

    def __init__(self, iteration: int = 0) -> None:
        self.iteration = iteration
        self.losses: LossesOfStep | None = None
        """To find faults in the code between model and loss."""
        self._batches: deque[MicroBatch] = deque(maxlen=MOST)
        self.at_fault: MicroBatch | None = None
        """The micro-batch that the diagnosis is of."""
        self._diagnosis: Diagnosis | None = None
        self._is_diagnosed = False
        self._weights: WeightsOfStep | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self._batches)

    def with_changed_inputs(self) -> set[nn.Module]:
        """Return the models with an input that was written to after the forward; see `KeptInputs.are_changed`."""
        return {batch.model for batch in self._batches if batch.inputs.are_changed}

    def append(self, batch: MicroBatch) -> None:
        """Add a micro-batch, and drop the oldest if there are more than `MOST`."""
        self._batches.append(batch)
        if len(self._batches) > GRADIENTS_OF:
            self._batches[-1 - GRADIENTS_OF].condense()

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The result of `diagnose`; None if it was not called."""
        return self._diagnosis

    def note_capsule(self, path: str) -> Diagnosis | None:
        """Add a capsule to the diagnosis, and return that."""
        if self._diagnosis is not None:
            self._diagnosis = replace(self._diagnosis, capsule=path)
        return self._diagnosis

    @property
    def is_diagnosed(self) -> bool:
        """Whether `diagnose` was called."""
        return self._is_diagnosed

    def diagnose(
        self,
        scale: float,
        cause: Cause | None = None,
        weights: WeightsOfStep | None = None,
        weights_of: int | None = None,
    ) -> Diagnosis | None:
        """Replay the micro-batches in order until one has a fault. Later calls return the same result.

        If no model is at fault, the fault in the code of the loss is returned, if one is known.

        Args:
            scale: Scale of the step's losses.
            cause: Why the step was skipped, if the scaler knows; it tells whether the losses were finite.
            weights: Weights of an earlier step to try too.
            weights_of: The step whose weights the models have now, if those of the batches' own step are lost.

        Returns:
            None if no fault was found and not every micro-batch could be replayed in full, or if none was recorded.
        """
        if not self._is_diagnosed:
            self._is_diagnosed = True  # even if it raises: it would raise again
            self._weights = weights
            loss_is_finite = loss_is_finite_of(cause)
            self._diagnosis = replayed = self._first_fault(scale, loss_is_finite)
            is_between = self.losses is not None and self.losses.is_between
            is_explained = (
                replayed is not None
                and replayed.found
                and (replayed.op or replayed.phase != "loss" or replayed.remedy == "scale")
                # Such an input is no data: the script has computed it from another model's output.
                and not (replayed.phase == "input" and is_between)
            )
            if not is_explained:
                of_loss = self._fault_of_loss(cause, of_model=True)
                self._diagnosis = of_loss or replayed
                if of_loss and self.at_fault is None:
                    bad = (batch for batch in self._batches if batch.has_bad_gradients())
                    self.at_fault = next(bad, self._batches[-1] if self._batches else None)
            if self._diagnosis is not None and weights_of is not None:
                self._diagnosis = self._with_other_weights(self._diagnosis, scale, weights_of)
        return self._diagnosis

    def diagnose_loss(self, cause: Cause | None) -> Diagnosis | None:
        """Find a fault in the code between model and loss alone, which needs no replay; otherwise as `diagnose`."""
        if not self._is_diagnosed:
            self._is_diagnosed = True
            self._diagnosis = self._fault_of_loss(cause, of_model=False)
        return self._diagnosis

    def _fault_of_loss(self, cause: Cause | None, *, of_model: bool) -> Diagnosis | None:
        if self.losses is None:
            return None
        if loss_is_finite_of(cause):  # the scaled one may not be
            return self.losses.fault_of_backward()
        fault = self.losses.fault(of_model=of_model)
        if fault is not None and fault.samples and len(self._batches) == 1:
            return replace(fault, dataset_indices=self._batches[0].dataset_indices(fault.samples))
        return fault

    def _with_other_weights(self, replayed: Diagnosis, scale: float, step: int) -> Diagnosis:
        """Return what a replay with the weights of another step shows."""
        blames_loss = replayed.found and replayed.phase == "loss" and not replayed.op
        if blames_loss and any(batch.had_bad_output() for batch in self._batches):
            self.at_fault = None
            return of_other_weights(step, scale)
        return replace(replayed, weights_of=step)

    def _first_fault(self, scale: float, loss_is_finite: bool | None) -> Diagnosis | None:
        # A batch whose loss was dropped without a backward (`continue`) is not part of the step.
        batches = [batch for batch in self._batches if batch.gradients] or list(self._batches)
        suspects = [batch for batch in batches if not batch.is_known_to_be_finite()]
        # Several batches may share one loss, and one bad batch then makes the gradients of all non-finite.
        bad = [] if loss_is_finite else [batch for batch in suspects if batch.has_bad_gradients()]
        for batch in bad if len(bad) > 1 else []:
            if diagnosis := batch.diagnose(scale, loss_is_finite, with_backward=False, weights=self._weights):
                self.at_fault = batch
                return diagnosis
        harmless: list[NonFinite] = []
        of_loss: Diagnosis | None = None
        for batch in suspects:
            diagnosis = batch.diagnose(scale, loss_is_finite, with_backward=True, weights=self._weights)
            if diagnosis and (diagnosis.op or diagnosis.phase != "loss"):
                self.at_fault = batch
                return diagnosis
            of_loss = of_loss or diagnosis or None
            harmless += diagnosis.harmless
        if of_loss is not None:  # or of the backward of a model that has read this one's output
            return of_loss
        is_clean = batches and all(batch.can_be_replayed_in_full() for batch in batches)
        return Diagnosis(False, scale=scale, harmless=tuple(dict.fromkeys(harmless))) if is_clean else None


class Recording:
    """Records the inputs of training forwards and the gradients of their outputs until `take` is called.

    Each forward copies the random states and buffers that it changes; no other data is copied and nothing syncs.
    Weights are replayed with the values of that time. So are inputs that were written to after the forward; from the
    next step on, they are copied. Forwards without gradients, recomputations of activation checkpointing, and replays
    are not recorded. Batches of an iteration whose step was never taken are dropped in the next one.

    Args:
        model: The model as the script calls it, with its wrappers. Of a module without a forward of its own, the
            children are recorded.
        iteration: Returns the number of the scaler's current iteration.
        most_bytes: Memory limit for the batches and buffers of a step. Above it, recording stops with a warning.
            Output gradients that do not fit are reduced to their largest magnitudes.
    """

    def __init__(
        self, model: nn.Module, iteration: Callable[[], int] = lambda: 0, most_bytes: float = math.inf
    ) -> None:
        self._model, self._iteration, self._most_bytes = model, iteration, most_bytes
        self._nbytes = 0
        self._inputs = {called: ForwardInputs(called) for called in _called_models(model).values()}
        self._guard = ErrorBoundary()
        self._hooks: ModuleHooks | None = None
        self._begun: list[MicroBatch | None] = []
        self._sizes: dict[nn.Module, deque[torch.Tensor]] = {}
        self._trials: dict[nn.Module, EarlierTrials] = {}
        self._forwards = 0
        self._batches = MicroBatches()
        self.measures_each = False
        """Whether to measure the output of each forward: batches are replayed with the weights of other steps."""

    def attach(self) -> None:
        """Start recording. Does nothing if already started."""
        if self._hooks is None:
            # Hooks rather than a replaced `forward` or the attribute that `model.compile()` sets: a replaced `forward`
            # sees the batch only after other hooks changed it, and Dynamo recompiles the model's callers whenever
            # either is set or removed. Both are also bound to one module, which replicas of DataParallel share.
            self._hooks = ModuleHooks(self._guard)
            BACKWARD_CALLS.follow()
            LOADED_BATCHES.follow()
            # First, before a policy's rule for the model itself sets another state.
            for name, model in _called_models(self._model).items():
                self._hooks.put_on(model, partial(self._before, name), self._after, first=True)

    def detach(self) -> None:
        """Stop recording and drop all recorded batches."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
            BACKWARD_CALLS.leave()
            LOADED_BATCHES.leave()
        self.take()

    def take(self) -> MicroBatches:
        """Return the batches recorded since the last call, and start over. The step's result may arrive later."""
        if self._hooks is not None:
            self._hooks.put_back()
        taken = self._batches
        taken.losses = LOSS_CODE.take(BACKWARD_CALLS.fault)
        for model in taken.with_changed_inputs():
            self._inputs[model].copies_tensors = True
        self._begin(0)
        return taken

    def follow(self, iteration: Callable[[], int]) -> None:
        """Replace the source of iteration numbers. Batches recorded so far count for its current iteration."""
        self._iteration, self._batches.iteration = iteration, iteration()

    def _begin(self, iteration: int) -> None:
        self._batches, self._nbytes = MicroBatches(iteration), 0

    def _before(self, name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = None
        # The tensors of torch.func's transforms do not outlive these.
        is_elsewhere = is_replaying() or is_backward_running() or are_functorch_transforms_active()
        if torch.is_grad_enabled() and not is_elsewhere:
            with self._guard:  # `_after` expects an entry for each forward
                began = LOSS_CODE.forward_begins()
                inputs = self._inputs[model].keep(args, kwargs, self._most_bytes - self._nbytes)
                usual = tuple(self._sizes.get(model, ()))
                trials = self._trials.setdefault(model, {})
                recent = LOADED_BATCHES.recent
                batch = MicroBatch(model, name, inputs, began, loaded=recent, usual=usual, trials=trials)
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
        self._inputs[model].learn(batch.inputs)
        nbytes = batch.inputs.nbytes
        if self._nbytes + nbytes > self._most_bytes:
            self.detach()
            warn_or_print(
                f"recording a step takes more than {self._most_bytes / 2**20:g} MiB, so skipped steps are not "
                "diagnosed any more. castwise.Monitor(..., on_nonfinite='diagnose') has no such limit",
                UserWarning,
            )
            return
        self._nbytes += nbytes
        self._batches.append(batch)
        LOSS_CODE.forward_ends(batch.began, outputs)
        if LOSS_CODE.repeats:
            batch.edges = [(number_of_node(tensor.grad_fn), tensor.output_nr) for tensor in outputs]
        self._measure(batch, outputs)

    def _measure(self, batch: MicroBatch, outputs: list[torch.Tensor]) -> None:
        """Measure the size of the outputs of some forwards, on their device."""
        self._forwards += 1
        is_usual = self._forwards <= _MEASURED_FIRST or self._forwards % _MEASURED_EVERY == 0
        if not (is_usual or self.measures_each):
            return
        peaks = [_peak(output.detach()).float() for output in outputs if is_plain(output) and not output.is_nested]
        if peaks:
            batch.largest = peaks[0] if len(peaks) == 1 else torch.stack(peaks).amax()
            if is_usual:
                self._sizes.setdefault(batch.model, deque(maxlen=_SIZES)).append(batch.largest)

    @guarded
    def _add(self, batch: MicroBatch, place: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:  # of a compiled model, and the loss does not depend on this output
            return
        if self._nbytes + gradient.nbytes > self._most_bytes:
            batch.condense()
        elif not batch.is_condensed:
            self._nbytes += gradient.nbytes
        batch.add(place, gradient)


def loss_is_finite_of(cause: Cause | None) -> bool | None:
    """Return whether the losses of a step with a cause were finite; None if it is not known."""
    return None if cause is None else _LOSS_IS_FINITE.get(cause)


def _called_models(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that a script calls, by name."""
    has_forward = (
        isinstance(model, torch.jit.ScriptModule)  # whose class has no readable `forward`
        or "forward" in vars(model)
        or type(model).forward is not nn.Module.forward
    )
    return {"": model} if has_forward else dict(model.named_children())


def _peak(gradient: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, inf or NaN if any value is. Shape (), on the same device."""
    return torch.stack(gradient.aminmax()).abs().amax() if gradient.numel() else gradient.new_zeros(())
