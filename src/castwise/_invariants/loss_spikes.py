"""`loss-spike` and `learning-rate-jump`: losses that leave their usual range, and what happened before."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from castwise._invariants.gradient_norms import GradientNorms, NormsAround
from castwise._invariants.invariant import Exemptions, Violation
from castwise._invariants.spike import IS_BACK, LOOK_BACK, NoReplays, PendingSpike, Replays, Spike
from castwise._invariants.written_weights import Written
from castwise.amp._devices import is_capturing
from castwise.amp._gradients import params_of
from castwise.amp._readback import Readback

WINDOW, WARM, QUIET = 64, 40, 24
"""Steps that a loss is compared with, steps before the first verdict, and steps after a spike before the next."""
LOSS_SIGMAS, NORM_SIGMAS = 6.0, 10.0
_NEAR, _NEAR_SIGMAS = 8, 8.0
"""Steps that a loss is compared with where losses fall, and how many sigmas of their differences it is above all."""
FLOOR, _NORM_FLOOR = 0.02, 0.1
"""The smallest sigma of the logarithm of losses, and of gradient norms."""
_RECURS = 256  # steps after a peak of the loss in which others as high are looked for
_RATES, _JUMP = 32, 1.5
_SAME_RISE = 1e-3
_RISEN, _DIVERGED = math.log(10.0), math.log(1000.0)  # a loss that ends as many times as high is a note, a warning
_PROPORTIONAL = {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad}
"""Optimizers whose steps, decay included, are proportional to the rate, which their states do not depend on."""
_SHARE = 0.9
_SAME = 0.01  # of the largest element of a gradient that is computed again
_FEWEST_LOSSES = 20  # of which another run is expected to continue the median
_FEWEST = 100  # elements of a gradient of which one may have the whole norm
_CPU = torch.device("cpu")
_kind_of = operator.attrgetter("__class__", "layout", "device")
_Event = tuple[int, str, str, tuple[str, ...]]
"""What may be the cause of a spike: the step, the cause, the evidence, and the parameters."""
_SIGMA = 1.4826  # of a normal distribution, over its median absolute deviation


def _sigma(usual: Iterable[float], middle: float, floor: float) -> float:
    """Return the standard deviation of values around their middle, robust, and at least `floor`."""
    return max(_SIGMA * median(abs(each - middle) for each in usual), floor)


def _usual_below(value: float, usual: Sequence[float], floor: float, limit: float) -> tuple[float, float] | None:
    """Return the median of usual values and their sigma if a value is more than `limit` sigmas above, else None."""
    if len(usual) < WARM or value - (middle := median(usual)) <= limit * floor:  # takes less than the sigma
        return None
    sigma = _sigma(usual, middle, floor)
    return (middle, sigma) if value - middle > limit * sigma else None


def _usual_below_spike(value: float, usual: Sequence[float]) -> tuple[float, float] | None:
    """Return the same of logarithms of losses; of the last few, with a sigma of differences, if that alone tells.

    While losses fall, the spread of all is mostly the fall, and only differences tell how far one may rise.
    """
    if len(usual) < WARM or value - median(usual) <= LOSS_SIGMAS * FLOOR:  # as most, in one call
        return None
    if (below := _usual_below(value, usual, FLOOR, LOSS_SIGMAS)) is not None:
        return below
    near = [*usual][-_NEAR:]
    sigma = _sigma((after - before for before, after in pairwise(usual)), 0.0, FLOOR)
    return (median(near), sigma) if value - max(near) > _NEAR_SIGMAS * sigma else None


def _recurs(value: float, others: Sequence[float], middle: float) -> bool:
    """Return True if two of others were at least half as far above the middle, as where a script has a rare term."""
    return sum(2.0 * (each - middle) > value - middle for each in others) > 1


def _risen(now: Sequence[float], before: Iterable[Sequence[float]]) -> int | None:
    """Return the first group whose learning rate is far above the largest of the steps before."""
    largest = map(max, zip(*before, strict=True))
    return next(
        (group for group, (rate, most) in enumerate(zip(now, largest, strict=True)) if rate > _JUMP * most), None
    )


def _factor(before: Sequence[float], now: Sequence[float]) -> float | None:
    """Return how many times the rates of the step before all rates are; None if it is not one number."""
    if 0.0 in before:
        return None
    factors = [rate / rate_before for rate, rate_before in zip(now, before, strict=True)]
    return factors[0] if max(factors) - min(factors) <= _SAME_RISE * min(factors) else None


class _Trial(NamedTuple):
    """What going back has given, in words, and whether the loss is as high as before; empty if it was not tried."""

    text: str = ""
    is_as_high: bool = False


@dataclass
class _Losses:
    """The losses of an optimizer's steps.

    Args:
        usual: Logarithms of the losses of the last steps that were no spikes.
        norms: The same of gradient norms.
        quiet, quiet_norm: Steps until another spike is one of its own, and another large norm.
        flagged: Steps in a row that were spikes.
        peaks: The last losses as high as spikes after which the loss was back: the number of each, and its logarithm.
        count: How many losses there were.
        pending: A spike of the step before of which the cause is not yet known.
        levels: Medians of `usual` after each 64 losses: the first, the lowest and the last, with their steps.
    """

    usual: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    quiet: int = 0
    quiet_norm: int = 0
    flagged: int = 0
    peaks: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    count: int = 0
    pending: PendingSpike | None = None
    levels: list[tuple[float, int]] = field(default_factory=list)

    def note_level(self, step: int) -> None:
        """Note what is usual now."""
        level = median(self.usual), step
        self.levels = [self.levels[0], min(self.levels), level] if self.levels else [level]

    def has_as_high(self, value: float) -> bool:
        """Return True if losses as high recur, so that another is no spike."""
        peaks = [peak for number, peak in self.peaks if number > self.count - _RECURS]
        return _recurs(value, [*list(self.usual)[-WARM:], *peaks], median(self.usual))


class LossSpikes:
    """Finds spikes of the loss, and their causes among what was seen in the steps before.

    Args:
        exemptions: What is not reported.
        sees_writes: Returns whether all weights of an optimizer are compared before each step.
        looks_at_gradients: Whether to look for gradients of which one element has the whole norm. On a CPU.
        replays: Repeats losses and gradients.
    """

    def __init__(
        self,
        exemptions: Exemptions,
        sees_writes: Callable[[torch.optim.Optimizer], bool],
        *,
        looks_at_gradients: bool,
        replays: Replays,
    ) -> None:
        self._replays, self._has_replays = replays, not isinstance(replays, NoReplays)
        self._is_exempt = exemptions.has("loss-spike")
        self._sees_writes, self._looks_at_gradients = sees_writes, looks_at_gradients
        self._losses: dict[torch.optim.Optimizer, _Losses] = {}
        self._latest: tuple[torch.optim.Optimizer | None, float] = None, 0.0  # the last loss, and whose
        self._rates: dict[torch.optim.Optimizer, deque[list[float]]] = {}  # of the groups in the last steps
        self._with_large_elements: set[str] = set()  # in gradients that a second backward has given too
        self._norms: dict[torch.optim.Optimizer, GradientNorms] = {}
        self._names: Callable[[], Mapping[int, str]] = dict
        self._events: deque[_Event] = deque(maxlen=WINDOW)

    def note_written(self, written: Sequence[Written]) -> None:
        """Note weights that were written outside the optimizer."""
        for each in written:
            cause = "written weights" if each.flipped is None else "flipped bit"
            self._events.append((each.step, cause, each.sentence, (each.name,)))

    def before_step(
        self, optimizer: torch.optim.Optimizer, step: int, names: Any, batches: object
    ) -> Iterator[Violation]:
        """Look at the learning rate and the gradients of a step.

        Args:
            optimizer: The optimizer.
            step: The number of the step.
            names: Returns the names of parameters by their ids.
            batches: The micro-batches of the step, if they are kept.
        """
        self._names = names
        if self._looks_at_gradients:
            self._note_elements(optimizer, step, names, batches)
        rise = None
        now = _rates_of(optimizer)
        if now is not None:
            rates = self._rates.setdefault(optimizer, deque(maxlen=_RATES))
            if rates and len(rates[-1]) != len(now):
                rates.clear()
            if len(rates) == _RATES and now != rates[-1] and (risen := _risen(now, rates)) is not None:
                rise = _factor(rates[-1], now) if type(optimizer) in _PROPORTIONAL else None
                of_group = f" of group {risen}" if len(now) > 1 and rise is None else ""
                text = (
                    f"he learning rate{of_group} rose from {rates[-1][risen]:.4g} to {now[risen]:.4g} at step {step:,}."
                )
                self._events.append((step, "learning rate", f"T{text}", ()))
                yield Violation("learning-rate-jump", f"t{text}", "Look at the schedule, unless it restarts.", "note")
            rates.append(now)
        if self._has_replays:
            self._replays.before_step(optimizer, step, rise)

    def step_known(
        self,
        optimizer: torch.optim.Optimizer,
        step: int,
        loss: float | None,
        norm: float | None,
        batches: object = None,
    ) -> Iterator[Spike]:
        """Yield a spike of which the cause is known, or known to be unknown: one step late, unless there is evidence.

        Args:
            optimizer: The optimizer.
            step: The number of its step.
            loss: The loss.
            norm: The gradient norm.
            batches: The micro-batches of the step, if they are kept.
        """
        if self._is_exempt or loss is None or not math.isfinite(loss) or loss <= 0.0:
            yield from self._not_back(optimizer, loss)
            return
        if self._latest[0] is not optimizer and self._latest[1] == loss:  # of one backward for several optimizers
            return
        self._latest = optimizer, loss
        losses, value = self._losses.setdefault(optimizer, _Losses()), math.log(loss)
        losses.count += 1
        if losses.pending is not None:
            yield self._judged(losses.pending, losses, step, loss, batches)
            losses.pending = None
        below = _usual_below_spike(value, losses.usual)
        recurs = below is not None and not losses.flagged and losses.has_as_high(value)
        if recurs:
            losses.peaks.append((losses.count, value))
        if below is None or losses.flagged > WINDOW or recurs:
            if losses.flagged > WINDOW:  # no spike but another regime, which is learned afresh
                losses.usual.clear()
            losses.flagged, losses.quiet = 0, losses.quiet - 1
            losses.usual.append(value)
            if losses.count % WINDOW == 0:
                losses.note_level(step)
            if norm is not None and math.isfinite(norm) and norm > 0.0:
                losses.norms.append(math.log(norm))
            if self._has_replays:
                self._replays.note(optimizer, step, loss, batches)
            return
        is_new, losses.quiet, losses.flagged = losses.quiet <= 0, QUIET, losses.flagged + 1
        if is_new:
            if optimizer in self._norms:
                self._norms[optimizer].note_spike(step)
            middle, sigma = below
            spike = Spike(step, loss, math.exp(middle), (value - middle) / sigma, "unknown", "")
            event = self._event_before(spike)
            tried = _Trial() if event is None else self._tried(optimizer, spike, event, batches)
            if event is not None and not tried.is_as_high:
                _, cause, evidence, parameters = event
                more = tried.text and f" Tried: {tried.text}"
                yield replace(spike, cause=cause, evidence=evidence, parameters=parameters, tried=more)
                return
            refuted = "" if event is None else f" {event[2]} That is not it: {tried.text}"
            losses.pending = self._pending(optimizer, spike, batches, refuted)

    def _not_back(self, optimizer: torch.optim.Optimizer, loss: float | None) -> Iterator[Spike]:
        """Yield a spike that an inf or NaN follows."""
        losses = self._losses.get(optimizer)
        if losses is None or losses.pending is None or loss is None or math.isfinite(loss):
            return
        if losses.pending.trial is not None:
            self._replays.of_next(losses.pending.trial, 0, loss, None)  # which has no loss to repeat
        yield losses.pending.judged(is_back=False, following=None)
        losses.pending = None

    def end(self) -> Iterator[Spike]:
        """Yield spikes of the last step, after which nothing is known."""
        for losses in self._losses.values():
            if losses.pending is not None:
                replayed = losses.pending.replayed(None)
                evidence = f"The run ended before the next step.{replayed and f' {replayed}'}"
                yield losses.pending.spike.with_cause(losses.pending.cause_by_replay(), evidence)
                losses.pending = None

    def risen(self) -> Iterator[Violation]:
        """Yield what is found of a loss that ends far above where it was at first and at its lowest."""
        for losses in self._losses.values():
            if len(losses.levels) < 3 or self._is_exempt:
                continue
            first, lowest, last = losses.levels
            rise = last[0] - max(first[0], lowest[0])
            if rise > _RISEN:
                text = (
                    f"the loss has risen: the median of 64 was {math.exp(lowest[0]):.4g} up to step "
                    f"{lowest[1]:,}, and is {math.exp(last[0]):.4g} up to step {last[1]:,}."
                )
                remedy = "Look at the learning rate and the data since then."
                yield Violation("loss-spike", text, remedy, "warning" if rise > _DIVERGED else "note")

    def usual(self, optimizer: torch.optim.Optimizer) -> tuple[float, float] | None:
        """Return the median of an optimizer's last losses, and the sigma of their logarithms; None of few losses."""
        losses = self._losses.get(optimizer)
        if losses is None or len(losses.usual) < _FEWEST_LOSSES:
            return None
        middle = median(losses.usual)
        return math.exp(middle), _sigma(losses.usual, middle, FLOOR)

    def norms_due(self, names: Any, *, is_end: bool = False) -> Iterator[NormsAround]:
        """Yield norms of gradients around spikes, which are complete, or as far as they are known at the end."""
        for norms in self._norms.values():
            yield from norms.due(names, is_end=is_end)

    def of_norm(self, optimizer: torch.optim.Optimizer, step: int, norm: float | None) -> Iterator[Violation]:
        """Yield a note on a gradient norm far above the usual ones, without a spike; called after `step_known`."""
        losses = self._losses.get(optimizer)
        if losses is None or norm is None or not 0.0 < norm < math.inf:
            return
        losses.quiet_norm -= 1
        if max(losses.quiet, losses.quiet_norm) > 0:
            return
        value = math.log(norm)
        below = _usual_below(value, losses.norms, _NORM_FLOOR, NORM_SIGMAS)
        if below is not None and not _recurs(value, list(losses.norms)[-WARM:], below[0]):
            losses.quiet_norm = QUIET
            middle, sigma = below
            usual = f"{(value - middle) / sigma:.0f} sigmas above the {math.exp(middle):.4g} of the steps before"
            text = f"the gradient norm was {norm:.4g} at step {step:,}, {usual}."
            yield Violation("loss-spike", text, "Look at the loss of the next steps.", "note")

    def _events_before(self, spike: Spike) -> list[_Event]:
        return [event for event in self._events if spike.step - LOOK_BACK <= event[0] <= spike.step]

    def _event_before(self, spike: Spike) -> _Event | None:
        """Return what was seen before a spike and may be its cause."""
        near = self._events_before(spike)
        for kinds in (("flipped bit", "written weights"), ("learning rate",), ("gradient element",)):
            events = [event for event in near if event[1] in kinds]
            if events:
                return events[0]
        return None

    def _tried(self, optimizer: torch.optim.Optimizer, spike: Spike, event: _Event, batches: object) -> _Trial:
        """Return what a lower rate gives after a jump, or going back to weights from before an event."""
        given = optimizer, spike.step, spike.loss, batches
        if event[1] == "learning rate":
            found = self._replays.with_lower_rate(*given)
            if found is None:
                return _Trial()
            step, loss = found
            skipped = "" if spike.step == step + 1 else ", and without the steps since"
            text = f"with the rate of before at step {step:,}{skipped}, the loss of that batch is {loss:.4g}."
            return _Trial(text, loss > spike.usual * math.exp(spike.least_rise))
        trial = self._replays.with_earlier_weights(*given, event[0])
        if trial is None:
            return _Trial()
        text = f"the loss of that batch is {trial.loss:.4g} at the weights of step {trial.weights_of:,}."
        return _Trial(text, trial.rise(trial.loss) > spike.least_rise)

    def _pending(self, optimizer: torch.optim.Optimizer, spike: Spike, batches: object, refuted: str) -> PendingSpike:
        """Return a spike of which the cause is not known, with what a replay gives, and what is ruled out."""
        kinds = {event[1] for event in self._events_before(spike)}
        known = {
            "no weight was written outside the optimizer": self._sees_writes(optimizer)
            and not kinds.intersection(("written weights", "flipped bit")),
            "no learning rate rose": len(self._rates.get(optimizer, ())) == _RATES and "learning rate" not in kinds,
            "no element had a whole gradient's norm": self._looks_at_gradients and "gradient element" not in kinds,
        }
        ruled_out = ", ".join(text for text, is_known in known.items() if is_known)
        text = f" Ruled out: {ruled_out}.{refuted}" if ruled_out else refuted
        if not self._sees_writes(optimizer):
            text = f" Weights are not compared before each step, so one may have been written.{text}"
        context = self._context(optimizer)
        trial = self._replays.of_spike(optimizer, spike.step, spike.loss, batches)
        if isinstance(trial, str):
            return PendingSpike(spike, None, f"{text} Not replayed: {trial}.", context)
        return PendingSpike(spike, trial, text, context)

    def _context(self, optimizer: torch.optim.Optimizer) -> str:
        norms, names = self._norms.get(optimizer), self._names()
        ratios = {} if norms is None else norms.beside_second_moments(optimizer)
        named = [(ratio, names[key]) for key, ratio in ratios.items() if key in names]
        if not named:
            return ""
        ratio, name = max(named)
        return f" Beside its second moment, the gradient of {name} was largest: {ratio:.2g} times the root."

    def _judged(self, pending: PendingSpike, losses: _Losses, step: int, loss: float, batches: object) -> Spike:
        """Return the spike of the step before with its cause."""
        following = None
        if pending.trial is not None:
            following = self._replays.of_next(pending.trial, step, loss, batches)
        is_back = math.log(loss / pending.spike.usual) < IS_BACK * pending.spike.sigma
        if is_back:
            losses.peaks.append((losses.count - 1, math.log(pending.spike.loss)))
        return pending.judged(is_back=is_back, following=following)

    def _note_elements(self, optimizer: torch.optim.Optimizer, step: int, names: Any, batches: object) -> None:
        params, gradients = _plain_gradients(optimizer)
        if not gradients or is_capturing(gradients[0]):
            return
        kept = self._norms.setdefault(optimizer, GradientNorms())
        wide = torch.float32 if any(dtype.itemsize < 4 for dtype in {each.dtype for each in gradients}) else None
        of_each = torch._foreach_norm(gradients, 2, wide)
        if gradients[0].device.type != "cpu":  # for which the host does not wait
            kept.note(step, params, Readback(torch.stack(of_each)))
            return
        norms = [*map(torch.Tensor.item, of_each)]  # faster than to stack as many small tensors
        kept.note(step, params, norms)
        total = math.hypot(*norms)
        if not max(norms) > 0.5 * total:
            return
        for param, gradient, norm in zip(params, gradients, norms, strict=True):
            # A gradient with one large element has most of the norm of all.
            if math.isfinite(norm) and norm > 0.5 * total and gradient.numel() >= _FEWEST:
                self._note_element(step, param, gradient, norm, names, batches)

    def _note_element(
        self, step: int, param: torch.Tensor, gradient: torch.Tensor, norm: float, names: Any, batches: object
    ) -> None:
        largest = max(map(abs, (each.item() for each in torch.aminmax(gradient))))
        name = names().get(id(param), "a parameter") if largest > _SHARE * norm else ""
        if not name or name in self._with_large_elements:
            return
        again = self._replays.gradient(param, batches)
        if again is not None and not differs_in_one_element(gradient, again):
            self._with_large_elements.add(name)
            return
        text = f"At step {step:,}, one element had {largest / norm:.3g} of the norm of {name}'s gradient."
        more = "Not replayed." if again is None else "A second backward differs in that element alone."
        self._events.append((step, "gradient element", f"{text} {more}", (name,)))


def differs_in_one_element(gradient: torch.Tensor, again: torch.Tensor) -> bool:
    """Return True if two gradients differ in the largest element of the first alone, up to a factor, as of clipping."""
    first, second = gradient.detach().double().flatten(), again.detach().double().flatten()
    at = int(first.abs().argmax())
    others = torch.ones_like(first)
    others[at] = 0.0
    square = float((second.square() * others).sum())
    factor = float((first * second * others).sum()) / square if square else 1.0
    apart = (first - factor * second).abs()
    is_apart = float(apart[at]) > 0.5 * float(first[at].abs())
    return is_apart and float((apart * others).max()) <= _SAME * abs(factor) * float(second.abs().max())


def rate_of(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the largest learning rate of an optimizer's groups; None if it is on an accelerator or there is none."""
    rates = _rates_of(optimizer)
    return None if rates is None else max(rates)


def _rates_of(optimizer: torch.optim.Optimizer) -> list[float] | None:
    """Return the learning rates of an optimizer's groups; None if one is on an accelerator or there is none."""
    rates: list[float] = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if rate is None or getattr(rate, "device", _CPU).type != "cpu":
            return None
        rates.append(float(rate))
    return rates or None


def _plain_gradients(optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters with gradients that can be looked at together, on the first one's device, and these."""
    params = [param for param in params_of(optimizer) if param.grad is not None]
    gradients: list[Any] = [param.grad for param in params]
    kinds = set(map(_kind_of, gradients))
    if len(kinds) == 1 and _is_plain(*kinds):
        return params, gradients
    device = next((gradient.device for gradient in gradients if _is_plain(_kind_of(gradient))), None)
    found = [
        (param, gradient)
        for param, gradient in zip(params, gradients, strict=True)
        if _is_plain(_kind_of(gradient)) and gradient.device == device
    ]
    return [param for param, _ in found], [gradient for _, gradient in found]


def _is_plain(kind: tuple[type, torch.layout, torch.device]) -> bool:
    return kind[:2] == (torch.Tensor, torch.strided) and kind[2].type != "meta"
