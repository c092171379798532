"""`LossReplays`: repeat losses with the weights of other steps, which tells a bad batch from bad weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace

import torch

from castwise._invariants.spike import LOOK_BACK, SpikeTrial
from castwise.diagnosis._cases import OfOutput, outputs_of
from castwise.diagnosis._earlier_weights import EVERY, EarlierWeights, WeightsOfStep, copy_of
from castwise.diagnosis._fault_search import without_autocast
from castwise.diagnosis._loss_code import LOSS_CODE
from castwise.diagnosis._loss_function import ModelEdge, UnknownLossError
from castwise.diagnosis._module_state import UnrepeatableError
from castwise.diagnosis._recording import MicroBatch, MicroBatches
from castwise.diagnosis._replay import gradients_of, has_several_ranks, within_training
from castwise.diagnosis._trials import OutOfTimeError, TimeLimit, put_back

_OLD = 4  # batches of earlier steps
_MOST = 20  # replays of a kind in a run
_SAME = 0.01  # of a loss that is repeated


class _StepLoss:
    """The micro-batches and the loss code of a step.

    Args:
        step: Its number.
        loss: Its loss, not scaled.
        batches: Its micro-batches.

    Raises:
        UnknownLossError: The loss cannot be repeated.
    """

    def __init__(self, step: int, loss: float, batches: MicroBatches | None) -> None:
        self.step, self.loss = step, loss
        if batches is None or batches.losses is None or not len(batches):
            raise UnknownLossError("its batch was not kept")
        self._functions = batches.losses.as_functions()
        if not self._functions:
            raise UnknownLossError("its loss was not kept")
        reads = {edge for function in self._functions for edge in function.reads}
        # Without what only a diagnosis reads, which may be as large as logits.
        self._batches = [
            replace(batch, gradients={}, loaded=(), trials={}) for batch in batches if reads.intersection(batch.edges)
        ]

    def at(self, weights: WeightsOfStep | None, limit: TimeLimit) -> float:
        """Return the loss with the weights of an earlier step, or those of now.

        Raises:
            UnknownLossError: What it reads was written to since.
            OutOfTimeError: There is no time left.
            Exception: Whatever the model or an op of the loss raises.
        """
        outputs: dict[ModelEdge, torch.Tensor] = {}
        with nullcontext() if weights is None else weights.applied():
            for batch in self._batches:
                outputs |= _outputs_again(batch, limit)
            with without_autocast(self._batches[0].model, []) if self._batches else nullcontext():
                again = sum(function(outputs) for function in self._functions)  # which may read weights, too
        scaled = sum(float(function.loss) for function in self._functions)  # as a scaler has scaled them
        return again * self.loss / scaled if scaled else math.nan


@dataclass
class _Rise:
    """A step with a risen learning rate.

    Args:
        step: Its number.
        factor: How many times the rate of the step before it has.
        before: The weights of its optimizer.
        after: The weights of all optimizers before the same optimizer's next step; None until then.
    """

    step: int
    factor: float
    before: WeightsOfStep
    after: WeightsOfStep | None = None


class LossReplays:
    """Keeps a few batches, and repeats their losses where a spike is suspected. A replay changes no state.

    A loss is repeated only if that of the step whose weights are used comes out as it was. Each rank repeats its own
    losses, alone: a forward that would exchange tensors with other ranks is not repeated.

    Args:
        weights: Copies of the weights.
        optimizers: All optimizers of the model.
    """

    def __init__(self, weights: EarlierWeights, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._weights, self._optimizers = weights, optimizers
        self._rises: dict[torch.optim.Optimizer, _Rise] = {}
        self._old: dict[torch.optim.Optimizer, deque[_StepLoss]] = {}
        self._spikes = self._gradients = 0
        LOSS_CODE.repeats += 1

    def end(self) -> None:
        """Drop all batches."""
        LOSS_CODE.repeats -= 1
        self._old.clear()
        self._rises.clear()

    def before_step(self, optimizer: torch.optim.Optimizer, step: int, rise: float | None) -> None:
        """Copy weights before a step with a risen learning rate and after it, and drop them 16 steps later."""
        last = self._rises.get(optimizer)
        if last is not None and last.after is None:
            others = [other for other in self._optimizers if other is not optimizer]
            last.after = copy_of([optimizer, *others], step)
        if last is not None and step > last.step + LOOK_BACK:
            del self._rises[optimizer]
        if rise is not None:
            self._rises[optimizer] = _Rise(step, rise, copy_of([optimizer], step))

    def note(self, optimizer: torch.optim.Optimizer, step: int, loss: float, batches: MicroBatches | None) -> None:
        """Keep the batch of a step without a spike, if the weights were copied before it, or eight steps earlier."""
        if any(step - copied in (0, EVERY // 2) for copied in self._weights.steps):
            with suppress(UnknownLossError):
                self._old.setdefault(optimizer, deque(maxlen=_OLD)).append(_StepLoss(step, loss, batches))

    def with_lower_rate(
        self, optimizer: torch.optim.Optimizer, step: int, loss: float, batches: MicroBatches | None
    ) -> tuple[int, float] | None:
        """Repeat the loss of a spike with the weights that the last step with a risen rate gives without the rise."""
        rise = self._rises.pop(optimizer, None)
        if rise is None or rise.after is None or self._spikes >= _MOST:
            return None
        self._spikes += 1
        try:
            limit, spike = TimeLimit(), _StepLoss(step, loss, batches)
            self._trusted(step, list(self._old.get(optimizer, ())), limit)
            return rise.step, spike.at(rise.before.towards(rise.after, 1.0 / rise.factor), limit)
        except Exception:
            return None

    def with_earlier_weights(
        self,
        optimizer: torch.optim.Optimizer,
        step: int,
        loss: float,
        batches: MicroBatches | None,
        since: int,
    ) -> SpikeTrial | None:
        """Repeat the loss of a spike and some before it with weights from before a step."""
        if self._spikes >= _MOST:
            return None
        self._spikes += 1
        try:
            return self._tried(_StepLoss(step, loss, batches), list(self._old.get(optimizer, ())), since)
        except Exception:
            return None

    def of_spike(
        self, optimizer: torch.optim.Optimizer, step: int, loss: float, batches: MicroBatches | None
    ) -> SpikeTrial | str:
        """Repeat the loss of a spike and some before it; return why not if they cannot be. Holds back copies."""
        if self._spikes >= _MOST:
            return f"{_MOST} spikes of this run were"
        self._spikes += 1
        try:
            trial = self._tried(_StepLoss(step, loss, batches), list(self._old.get(optimizer, ())), step)
        except (UnknownLossError, OutOfTimeError, UnrepeatableError) as why:
            return str(why)
        except Exception as error:
            return f"it raised {type(error).__name__}"
        self._weights.is_held = True
        return trial

    def of_next(self, trial: SpikeTrial, step: int, loss: float, batches: MicroBatches | None) -> float | None:
        """Return the loss of the batch after a spike with the weights of its trial; None if it cannot be repeated."""
        self._weights.is_held = False
        weights = self._weights.of(trial.weights_of)
        try:
            return None if weights is None else _StepLoss(step, loss, batches).at(weights, TimeLimit())
        except Exception:
            return None

    def _tried(self, spike: _StepLoss, old: Sequence[_StepLoss], since: int) -> SpikeTrial:
        """Repeat losses with the oldest weights, from before a step, of which the step's own loss is known."""
        limit = TimeLimit()
        known, weights, again = self._trusted(since, old, limit)
        of_batch = spike.at(weights, limit)
        there, now = [again], [known.at(None, limit)]
        for each in old:
            if each is not known:
                there.append(each.at(weights, limit))
                now.append(each.at(None, limit))
        usual = _mean(there)
        if not math.isfinite(usual):
            raise UnknownLossError(f"losses are not finite with the weights of step {known.step:,}")
        return SpikeTrial(known.step, of_batch, usual, _mean(now), weights.growth())

    def _trusted(self, step: int, old: Sequence[_StepLoss], limit: TimeLimit) -> tuple[_StepLoss, WeightsOfStep, float]:
        """Return the first loss from before a step whose weights were kept, these, and the loss repeated with them.

        Raises:
            UnknownLossError: None was kept, or the loss is another one when repeated.
        """
        known = next((each for each in old if each.step in self._weights.steps and each.step < step), None)
        weights = None if known is None else self._weights.of(known.step)
        if known is None or weights is None:
            raise UnknownLossError("no earlier batch and weights were kept")
        again = known.at(weights, limit)
        if not abs(again - known.loss) <= _SAME * abs(known.loss):
            raise UnknownLossError(f"the loss of step {known.step:,} was {known.loss:.4g}, and repeated {again:.4g}")
        return known, weights, again

    def gradient(self, param: torch.Tensor, batches: MicroBatches | None) -> torch.Tensor | None:
        """Return a parameter's gradient by a second backward of a step's batches; None if it cannot be repeated.

        Gradients of several ranks are averages, which one rank cannot repeat.
        """
        if batches is None or self._gradients >= _MOST or has_several_ranks():
            return None
        self._gradients += 1
        limit, total = TimeLimit(), None
        try:
            for batch in batches:
                if batch.gradients:
                    gradient = _gradient_again(batch, param, limit)
                    total = gradient if total is None or gradient is None else total + gradient
        except Exception:
            return None
        return total


def _outputs_again(batch: MicroBatch, limit: TimeLimit) -> dict[ModelEdge, torch.Tensor]:
    inputs, began = batch.inputs, limit.check()
    if inputs.are_changed:
        raise UnknownLossError("its input was written to since")
    with within_training(), put_back(batch.model, [inputs.args, inputs.kwargs]):
        with inputs.applied(batch.model), torch.no_grad():
            outputs = outputs_of(batch.model(*inputs.args, **inputs.kwargs))
        limit.forward_ends(began)
    return dict(zip(batch.edges, outputs, strict=True))


def _gradient_again(batch: MicroBatch, param: torch.Tensor, limit: TimeLimit) -> torch.Tensor | None:
    inputs, began = batch.inputs, limit.check()
    if inputs.are_changed or not batch.can_be_replayed_in_full():
        raise UnknownLossError("its input or its gradient was not kept")
    gradients = [batch.gradients.get(place) for place in range(batch.outputs)]
    case = OfOutput(
        batch.model, inputs.args, inputs.kwargs, gradients, 1.0, lambda: inputs.applied(batch.model), True, True
    )
    with within_training(), put_back(batch.model, [inputs.args, inputs.kwargs]), ExitStack() as regions:
        with case.region():
            ends = case.ends(batch.model(*inputs.args, **inputs.kwargs))
        limit.forward_ends(began)
        regions.enter_context(without_autocast(batch.model, ends))
        return gradients_of(case.roots(ends, 1.0), [param])[0]


def _mean(losses: Sequence[float]) -> float:
    """Return the geometric mean; inf if one is not finite."""
    if not all(math.isfinite(loss) for loss in losses):
        return math.inf
    if min(losses) <= 0.0:
        raise UnknownLossError("a repeated loss is not above 0")
    return math.exp(sum(map(math.log, losses)) / len(losses))
