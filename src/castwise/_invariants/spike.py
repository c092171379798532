"""`Spike`: a loss that has left its usual range, its cause, and what a replay of its batch tells of that."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from castwise._invariants.invariant import Violation

IS_BACK = 2.5
"""Sigmas, one step after a bad batch."""
LOOK_BACK = 16
"""Steps before a spike in which its cause is looked for."""


@dataclass(frozen=True)
class Spike:
    """A loss that has left its usual range.

    Args:
        step: The number of the step.
        loss: Its loss.
        usual: The median of the losses before.
        sigmas: How far it is above, in robust standard deviations of the logarithm.
        cause: "written weights", "flipped bit", "learning rate", "gradient element", "batch", "data", "weights" or
            "unknown".
        evidence: A sentence about the cause.
        parameters: The parameters concerned.
        tried: What a remedy has given; empty if none was tried.
    """

    step: int
    loss: float
    usual: float
    sigmas: float
    cause: str
    evidence: str
    parameters: tuple[str, ...] = ()
    tried: str = ""

    @property
    def sigma(self) -> float:
        """One sigma, of logarithms."""
        return math.log(self.loss / self.usual) / self.sigmas

    @property
    def least_rise(self) -> float:
        """How far above the usual the logarithm of a repeated loss is high: half of the rise, and no noise."""
        return max(0.5 * math.log(self.loss / self.usual), IS_BACK * self.sigma)

    def with_cause(self, cause: str, evidence: str, tried: str = "") -> Spike:
        """Return the spike with a cause."""
        return replace(self, cause=cause, evidence=evidence, tried=tried)

    def report(self) -> Violation:
        """Return what is reported."""
        text = (
            f"the loss rose to {self.loss:.4g} at step {self.step:,}, {self.sigmas:.0f} sigmas above the "
            f"{self.usual:.4g} of the steps before. Cause: {self.cause}. {self.evidence}"
        )
        return Violation("loss-spike", text, f"{_LOOK[self.cause]}{self.tried}", parameters=self.parameters)


_LOOK = {
    "written weights": "Look for the code that writes it.",
    "flipped bit": "Go back to the checkpoint before; if it comes back, test the memory of this machine.",
    "learning rate": "Look at the schedule and at what sets the rate.",
    "gradient element": "Look at the backward of that parameter, and at the memory of this machine.",
    "batch": "Look at that batch, and leave it out.",
    "data": "Look at what the data has from that step on.",
    "weights": "Go back to a checkpoint from before.",
    "unknown": "The report (castwise report RUN) draws the loss, the learning rate and, with --spikes, gradient norms "
    "of parameters around that step.",
}


@dataclass(frozen=True)
class SpikeTrial:
    """Losses with the weights of an earlier step, and with those of now.

    Args:
        weights_of: The earlier step.
        loss: That of the spike's batch with its weights.
        usual: That of earlier batches with its weights, their geometric mean.
        usual_now: The same with the weights of now.
        growth: The norm of all weights now over that of the earlier step.
    """

    weights_of: int
    loss: float
    usual: float
    usual_now: float
    growth: float

    def rise(self, loss: float) -> float:
        """Return the logarithm of a loss over the usual one; inf if it is not finite."""
        if not math.isfinite(loss):
            return math.inf
        return math.log(loss / self.usual) if loss > 0.0 else -math.inf


class Replays(Protocol):
    """Repeats losses and gradients. Batches are the micro-batches of a step, None if they were not kept."""

    def before_step(self, optimizer: torch.optim.Optimizer, step: int, rise: float | None) -> None:
        """Note a step that is about to be taken, and of how many times the rate of the step before it has, if so."""

    def note(self, optimizer: torch.optim.Optimizer, step: int, loss: float, batches: Any) -> None:
        """Note a step that is no spike."""

    def with_lower_rate(
        self, optimizer: torch.optim.Optimizer, step: int, loss: float, batches: Any
    ) -> tuple[int, float] | None:
        """Repeat the loss of a spike with the weights that the last step with a risen rate gives without the rise.

        Return the number of that step, and the loss; None if it cannot be repeated.
        """

    def with_earlier_weights(
        self, optimizer: torch.optim.Optimizer, step: int, loss: float, batches: Any, since: int
    ) -> SpikeTrial | None:
        """Repeat the loss of a spike with weights from before a step, `since`; None if it cannot be repeated."""

    def of_spike(self, optimizer: torch.optim.Optimizer, step: int, loss: float, batches: Any) -> SpikeTrial | str:
        """Repeat the loss of a spike; return why not if it cannot be."""

    def of_next(self, trial: SpikeTrial, step: int, loss: float, batches: Any) -> float | None:
        """Return the loss of the batch after a spike with the weights of its trial; None if it cannot be repeated."""

    def gradient(self, param: torch.Tensor, batches: Any) -> torch.Tensor | None:
        """Return a parameter's gradient by a second backward; None if it cannot be repeated."""


@dataclass(frozen=True)
class NoReplays:
    """Repeats nothing, which `Replays` describes.

    Args:
        why: The reason, as a clause.
    """

    why: str

    def before_step(self, optimizer: torch.optim.Optimizer, step: int, rise: float | None) -> None:
        """Do nothing."""

    def note(self, optimizer: torch.optim.Optimizer, step: int, loss: float, batches: Any) -> None:
        """Do nothing."""

    def with_lower_rate(self, optimizer: torch.optim.Optimizer, step: int, loss: float, batches: Any) -> None:
        """Return None."""

    def with_earlier_weights(
        self, optimizer: torch.optim.Optimizer, step: int, loss: float, batches: Any, since: int
    ) -> None:
        """Return None."""

    def of_spike(self, optimizer: torch.optim.Optimizer, step: int, loss: float, batches: Any) -> str:
        """Return the reason."""
        return self.why

    def of_next(self, trial: SpikeTrial, step: int, loss: float, batches: Any) -> None:
        """Return None."""

    def gradient(self, param: torch.Tensor, batches: Any) -> None:
        """Return None."""

    def end(self) -> None:
        """Do nothing."""


class PendingSpike(NamedTuple):
    """A spike of which the next step tells more.

    Args:
        spike: The spike.
        trial: What a replay has given; None if there was none.
        ruled_out: What is not the cause, and why there was no replay, in words.
        context: What gradients were, in words, which never tells the cause.
    """

    spike: Spike
    trial: SpikeTrial | None
    ruled_out: str
    context: str = ""

    def judged(self, *, is_back: bool, following: float | None) -> Spike:
        """Return the spike with its cause.

        Args:
            is_back: Whether the loss is back.
            following: The loss of the next batch with the weights of the trial, if it is known.
        """
        if self.trial is None:
            if is_back:
                return self.spike.with_cause("batch", f"The loss was back one step later.{self.ruled_out}")
            evidence = "The loss was not back one step later: it is the weights, or the data from here on."
            return self.spike.with_cause("unknown", f"{evidence}{self.ruled_out}{self.context}")
        trial, evidence = self.trial, f"{self.replayed(following)}{self.ruled_out}"
        cause, at = self.cause_by_replay(), f"at the weights of step {trial.weights_of:,}"
        context = (
            f" The norm of all weights is {trial.growth:.4g} times that of step {trial.weights_of:,}.{self.context}"
        )
        if cause == "weights":
            return self.spike.with_cause(cause, f"{evidence}{context}", f" Tried: the loss is {trial.loss:.4g} {at}.")
        if cause == "unknown":
            return self.spike.with_cause(cause, f"{evidence} Neither the batch nor the weights alone make it.{context}")
        if not is_back and (following is None or trial.rise(following) >= self._least()):
            return self.spike.with_cause("data", evidence, f" Tried: the loss is as high {at}.")
        is_left = "The loss was back one step later." if is_back else "Its step has made the weights worse."
        tried = "" if following is None else f" Tried: the loss of the next one is {following:.4g} {at}."
        return self.spike.with_cause("batch", f"{is_left} {evidence}", tried)

    def replayed(self, following: float | None) -> str:
        """Return what the replay has given in words; empty if there was none."""
        if self.trial is None:
            return ""
        step, now = self.trial.weights_of, self.trial.usual_now
        more = "" if following is None else f"; the next batch: {following:.4g}"
        losses = f"loss {self.trial.loss:.4g}, usual {self.trial.usual:.4g}{more}"
        return f"Replayed: the batch at the weights of step {step:,}: {losses}; earlier batches now: {now:.4g}."

    def cause_by_replay(self) -> str:
        """Return "batch" (or the data from there on), "weights" or "unknown"; without a replay "unknown"."""
        if self.trial is None:
            return "unknown"
        if self.trial.rise(self.trial.loss) >= self._least():
            return "batch"
        return "weights" if self.trial.rise(self.trial.usual_now) >= self._least() else "unknown"

    def _least(self) -> float:
        """Return how far above the usual a repeated loss is high: it explains half of the rise, and is no noise.

        If earlier batches have no higher loss than before, it is not the weights, and to be no noise is enough: while
        losses fall, the usual one of earlier weights is so high that that of no batch is far above.
        """
        if self.trial is not None and self.trial.rise(self.trial.usual_now) <= 0.0:
            return IS_BACK * self.spike.sigma
        return self.spike.least_rise
