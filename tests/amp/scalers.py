"""What tests of a scaler's layers begin with, and an agreement of ranks that needs no ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from castwise import GradScaler
from castwise.amp._agreement import Agreement


def weight(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def scaled(*params: nn.Parameter, scaler: GradScaler | None = None, **options: Any) -> GradScaler:
    """A scaler, and gradients of 1 times its scale, 4 by default."""
    scaler = GradScaler("cpu", init_scale=4.0, **options) if scaler is None else scaler
    scaler.scale(sum(param.float().sum() for param in params)).backward()  # type: ignore[union-attr]  # no empty sum
    return scaler


class Fused(torch.optim.SGD):
    """A fused SGD with a step of 1 that remembers how it was called."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, lr=1.0, **{"fused": True, **options})

    def step(self, closure: Any = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self.called_with = closure, args, kwargs
        return super().step(closure)


class Rank(Agreement):
    """The only rank of each pipeline stage, without a process group; it records its calls."""

    def __init__(self, stages: int) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.collectives: list[str] = []
        self.norms: list[torch.Tensor] = []
        self.started: list[tuple[float, ...]] = []
        super().__init__(None, "cpu", stages)

    def start(self, *state: float) -> None:
        super().start(*state)
        self.started.append(state)

    def size(self) -> int:
        return self._stages

    def is_of_all_ranks(self) -> bool:
        return True

    def note_call(self, *call: object) -> None:
        self.calls.append(call)

    def any_(self, flags: Sequence[torch.Tensor], call: str) -> None:
        self.collectives.append(call)

    def norm(self, norm: torch.Tensor, norm_type: float, call: str, share: float = 1.0) -> torch.Tensor:
        self.collectives.append(call)
        return norm

    def maxima(self, numbers: Sequence[torch.Tensor], call: str) -> list[torch.Tensor]:
        self.collectives.append(call)
        self.norms.append(numbers[1])
        return list(numbers)


def agreeing(scaler: GradScaler, stages: int = 1) -> Rank:
    """Give a scaler an agreement of one rank per pipeline stage, and return it."""
    scaler._set_agreement(rank := Rank(stages))
    return rank
