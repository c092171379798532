"""`resumed-apart`: a run that loads an optimizer's state continues with its learning rate and its averages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from castwise._invariants.invariant import Violation
from castwise._invariants.loss_spikes import rate_of

_APART = 1.5  # times


class _Loaded(NamedTuple):
    """What an optimizer was given: its largest learning rate, and how many parameters have a state."""

    rate: float | None
    states: int


class LoadedStates:
    """The states that optimizers have loaded, until their next step. They are noted while castwise is installed."""

    def __init__(self) -> None:
        self._loaded: WeakKeyDictionary[torch.optim.Optimizer, _Loaded] = WeakKeyDictionary()

    def note(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Note that an optimizer has loaded a state."""
        states = sum(bool(state) for state in state_dict["state"].values())
        if states:  # of an optimizer that has stepped
            self._loaded[optimizer] = _Loaded(rate_of(optimizer), states)

    def stepping(self, optimizer: torch.optim.Optimizer, step: int) -> Iterator[Violation]:
        """Yield what an optimizer's first step after it has loaded a state does not continue."""
        loaded = self._loaded.pop(optimizer, None)
        if loaded is None:
            return
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


LOADED_STATES = LoadedStates()
"""The states in this process."""
