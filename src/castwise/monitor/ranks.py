"""The processes that train together, what they tell each other, and why a step was skipped as they see it together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import nn

from castwise.amp.outcomes import Cause, StepFacts
from castwise.monitor import names

if TYPE_CHECKING:
    from castwise.diagnosis.diagnosis import Diagnosis

_T = TypeVar("_T")

# What one rank knows for certain outweighs what others have to suppose.
_BY_WEIGHT = (Cause.NONFINITE_WEIGHTS, Cause.NONFINITE_LOSS, Cause.OVERFLOW, Cause.UNKNOWN, Cause.ANOTHER_RANK)


def rank_now() -> int:
    """Return the number of this process among those that train together; before they have met, that of `torchrun`."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    said = os.environ.get("RANK", "")
    return int(said) if said.isdecimal() else 0


class Ranks:
    """All processes of `torch.distributed`, or this one alone if it is not initialised.

    What they say to each other goes through the host's memory, by a gloo group of their own where the default group is
    another one: nothing of it is put into the streams of devices. So all of them have to make theirs at the same time.
    """

    def __init__(self) -> None:
        is_alone = not (dist.is_available() and dist.is_initialized())
        self.size = 1 if is_alone else dist.get_world_size()
        self.is_first = is_alone or dist.get_rank() == 0
        self._group: Any = None
        if self.size > 1 and dist.get_backend() != "gloo" and dist.is_gloo_available():
            self._group = dist.new_group(backend="gloo")

    @classmethod
    def alone(cls) -> Ranks:
        """Return this process by itself, whatever others there are."""
        alone = cls.__new__(cls)
        alone.size, alone.is_first, alone._group = 1, True, None
        return alone

    def gather(self, mine: _T) -> list[_T]:
        """Return what each rank has given, in their order; all of them have to call it."""
        if self.size == 1:
            return [mine]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, mine, group=self._group)
        return gathered

    def close(self) -> None:
        """Leave the group, if it was made for this."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


@dataclass(frozen=True)
class Skip:
    """A skipped step.

    Args:
        cause: A value of `Cause`.
        parameters: The names of those whose gradients were not finite.
        diagnosis: The fields of a diagnosis, if there is one.
        is_found: Whether that names a module.
    """

    cause: str
    parameters: tuple[str, ...]
    diagnosis: dict[str, Any] | None = None
    is_found: bool = False

    @classmethod
    def of(cls, facts: StepFacts, model: nn.Module, diagnosis: Diagnosis | None) -> Skip | None:
        """Return what this rank knows; None if the step was taken."""
        if facts.cause is None:
            return None
        bad = set(facts.parameters)
        named = tuple(name for name, parameter in names.parameters(model).items() if parameter in bad)
        fields = None if diagnosis is None else diagnosis.record()
        return cls(facts.cause.value, named, fields, is_found=diagnosis is not None and diagnosis.found)


def agreed(ranks: Sequence[Skip]) -> Skip:
    """Return what ranks know together: a rank whose batch is at fault knows more than one that meets its gradients."""
    cause = next(cause for cause in _BY_WEIGHT if any(rank.cause == cause.value for rank in ranks))
    if cause is Cause.ANOTHER_RANK:
        # There is no other one left. All losses and gradients were finite, but what they had to be multiplied with to
        # be unscaled and clipped was not.
        cause = Cause.OVERFLOW
    named = dict.fromkeys(name for rank in ranks for name in rank.parameters)
    diagnosed = [rank for rank in ranks if rank.is_found] or [rank for rank in ranks if rank.diagnosis] or list(ranks)
    return Skip(cause.value, tuple(named), diagnosed[0].diagnosis, diagnosed[0].is_found)
