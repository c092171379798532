"""The processes that train together, what they tell each other, and why a step was skipped as they see it together."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
        self._count()
        self.size, self.is_first = self.world_size, self.rank == 0
        self._group: Any = None
        if self.size > 1 and dist.get_backend() != "gloo" and dist.is_gloo_available():
            self._group = dist.new_group(backend="gloo")

    @classmethod
    def alone(cls) -> Ranks:
        """Return this process by itself, whatever others there are: it hears of none, and writes what it knows."""
        alone = cls.__new__(cls)
        alone._count()
        alone.size, alone.is_first, alone._group = 1, True, None
        return alone

    def _count(self) -> None:
        is_alone = not (dist.is_available() and dist.is_initialized())
        self.world_size = 1 if is_alone else dist.get_world_size()
        self.rank = 0 if is_alone else dist.get_rank()

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
    """A skipped step, as one rank knows it or as they know it together.

    Args:
        cause: A value of `Cause`.
        parameters: The names of those whose gradients were not finite.
        diagnoses: The fields of diagnoses; what ranks know together says of each whose batch it is of.
        rank: The one that is at fault, if it is one alone of several.
    """

    cause: str
    parameters: tuple[str, ...]
    diagnoses: tuple[dict[str, Any], ...] = ()
    rank: int | None = None

    @classmethod
    def of(cls, facts: StepFacts, model: nn.Module, diagnosis: Diagnosis | None) -> Skip | None:
        """Return what this rank knows; None if the step was taken."""
        if facts.cause is None:
            return None
        bad = set(facts.parameters)
        named = tuple(name for name, parameter in names.parameters(model).items() if parameter in bad)
        return cls(facts.cause.value, named, () if diagnosis is None else (diagnosis.record(),))


def agreed(ranks: Mapping[int, Skip], size: int) -> Skip:
    """Return what ranks know together: a rank whose batch is at fault knows more than one that meets its gradients.

    Args:
        ranks: What each knows, by its number.
        size: How many ranks there are; nothing may be known of some.
    """
    cause = min((skip.cause for skip in ranks.values()), key=_place)
    at_fault = [rank for rank, skip in ranks.items() if skip.cause == cause]
    are_all_known = len(ranks) == size
    if cause == Cause.ANOTHER_RANK and are_all_known:
        # There is no other one left. All losses and gradients were finite, but what they had to be multiplied with to
        # be unscaled and clipped was not.
        cause = Cause.OVERFLOW.value
    named = dict.fromkeys(name for skip in ranks.values() for name in skip.parameters)
    return Skip(
        cause,
        tuple(named),
        tuple(_diagnoses({rank: ranks[rank] for rank in at_fault}, size)),
        at_fault[0] if are_all_known and len(at_fault) == 1 < size else None,
    )


def _place(cause: str) -> int:
    return _BY_WEIGHT.index(Cause(cause) if cause in set(map(str, Cause)) else Cause.UNKNOWN)


def _diagnoses(at_fault: Mapping[int, Skip], size: int) -> list[dict[str, Any]]:
    """Return what was found, each place once; if nothing was, the first replay of all."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for rank, skip in at_fault.items():
        for fields in skip.diagnoses:
            place = tuple(fields[name] for name in ("phase", "module", "op"))
            found.setdefault(place, {**fields, "rank": rank if size > 1 else None})
    return [fields for fields in found.values() if fields["phase"]] or list(found.values())
