"""`resumed-apart`: a run that loads an optimizer's state continues with its learning rate, averages and loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from castwise._invariants.invariant import Violation
from castwise._invariants.loss_spikes import FLOOR, LOSS_SIGMAS, rate_of

_APART = 1.5  # times
_SAME = 0.01  # of the norm of averages
_LOSSES = 3  # after a state was loaded, of which each is compared


class SavedStep(NamedTuple):
    """What an earlier run recorded when it saved a file with the state of an optimizer.

    Args:
        file: The name of the file.
        run: The name of the run's folder.
        step: The last step before.
        loss: The median of its last losses; None if it is not known.
        sigma: The robust standard deviation of their logarithms.
        states: How many parameters have a state.
        averages: The norms of what the optimizer keeps of all parameters, by name.
    """

    file: str
    run: str
    step: int
    loss: float | None
    sigma: float
    states: int
    averages: Mapping[str, float]


class _Loaded(NamedTuple):
    """What an optimizer was given: its largest learning rate, how many parameters have a state, and its file."""

    rate: float | None
    states: int
    saved: SavedStep | None


class LoadedStates:
    """The states that optimizers have loaded, until their next step. They are noted while castwise is installed."""

    def __init__(self) -> None:
        self._loaded: WeakKeyDictionary[torch.optim.Optimizer, _Loaded] = WeakKeyDictionary()
        self.losses: WeakKeyDictionary[torch.optim.Optimizer, tuple[SavedStep, list[float]]] = WeakKeyDictionary()
        """Of optimizers whose first losses are compared: what was saved, and the losses so far in sigmas above it."""

    def note(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], saved: SavedStep | None = None
    ) -> None:
        """Note that an optimizer has loaded a state, and what was recorded of its file when it was saved."""
        states = count_states(state_dict)
        if states:  # of an optimizer that has stepped
            is_of_file = saved is not None and saved.states == states
            self._loaded[optimizer] = _Loaded(rate_of(optimizer), states, saved if is_of_file else None)

    def stepping(self, optimizer: torch.optim.Optimizer, number: Callable[[], int]) -> Iterator[Violation]:
        """Yield what an optimizer's first step after it has loaded a state does not continue.

        Args:
            optimizer: The optimizer.
            number: Returns the number of the step.
        """
        loaded = self._loaded.pop(optimizer, None)
        if loaded is None:
            return
        step = number()
        rate = rate_of(optimizer)
        if rate is not None and loaded.rate and not loaded.rate / _APART <= rate <= loaded.rate * _APART:
            yield Violation(
                "resumed-apart",
                f"step {step:,} is taken with the learning rate {rate:.4g}, and {loaded.rate:.4g} was loaded with the "
                "optimizer's state.",
                "Load the state of the scheduler too, after it is made: making one sets the rate.",
            )
        states = sum(bool(state) for state in optimizer.state.values())
        if states < loaded.states:
            has = f"{type(optimizer).__name__} has a state for {states} parameters"
            yield Violation(
                "resumed-apart",
                f"at step {step:,}, {has}, and {loaded.states} were loaded: the others begin at zero again.",
                "Change the model before the optimizer loads its state, and load it last.",
            )
        elif loaded.saved is not None:
            yield from _other_averages(optimizer, step, loaded.saved)
            if loaded.saved.loss is not None:
                self.losses[optimizer] = loaded.saved, []

    def loss_known(self, optimizer: torch.optim.Optimizer, step: int, loss: float | None) -> Iterator[Violation]:
        """Yield a loss that does not continue that of the run which saved the state, known after a few steps."""
        saved, losses = self.losses.get(optimizer, (None, []))
        if saved is None or saved.loss is None:
            return
        if loss is None or not loss > 0.0:
            del self.losses[optimizer]
            return
        losses.append(math.log(loss / saved.loss) / max(saved.sigma, FLOOR))
        if min(losses) <= LOSS_SIGMAS:
            del self.losses[optimizer]
        elif len(losses) == _LOSSES:
            del self.losses[optimizer]
            yield Violation(
                "resumed-apart",
                f"the loss of the {_LOSSES} steps up to {step:,} is at least {min(losses):.0f} sigmas above the "
                f"{saved.loss:.4g} that it was when {saved.file} was saved, after step {saved.step:,} of {saved.run}.",
                "Load the weights of that file too, and continue with the data and the loss of that run.",
            )


def count_states(state_dict: Mapping[str, Any]) -> int:
    """Return how many parameters have a state in that of an optimizer."""
    return sum(bool(state) for state in state_dict["state"].values())


def averages_of(states: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the norms of an optimizer's averages by name, over all parameters; of DTensors nothing."""
    norms: dict[str, list[torch.Tensor]] = {}
    for state in states:
        for name, value in state.items():
            is_tensor = isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout is torch.strided
            if is_tensor and value.numel() > 1 and not hasattr(value, "to_local"):
                norms.setdefault(name, []).append(torch.linalg.vector_norm(value.detach(), dtype=torch.float32).cpu())
    return {name: float(torch.linalg.vector_norm(torch.stack(of_name))) for name, of_name in norms.items()}


def _other_averages(optimizer: torch.optim.Optimizer, step: int, saved: SavedStep) -> Iterator[Violation]:
    now = averages_of(optimizer.state.values())
    for name, norm in saved.averages.items():
        of_now = now.get(name, 0.0)
        if abs(of_now - norm) > _SAME * norm:
            yield Violation(
                "resumed-apart",
                f"at step {step:,}, {name} of {type(optimizer).__name__} has the norm {of_now:.4g}, and had {norm:.4g} "
                f"when {saved.file} was saved, after step {saved.step:,} of {saved.run}.",
                "Change nothing between loading the optimizer's state and its next step.",
            )
            return


LOADED_STATES = LoadedStates()
"""The states in this process."""
