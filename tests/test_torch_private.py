"""What castwise learns from torch's private names."""

from __future__ import annotations

import copy

import torch
from torch import nn

from castwise._torch_private import is_compiled, wraps_compiled


class Helped(nn.Linear):
    """A layer that calls another function."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.helper = torch.compile(torch.sin, backend="eager")

    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self(x)  # type: ignore[no-any-return]


def test_a_module_is_compiled_in_each_way_torch_has() -> None:
    in_place, forward, method = nn.Linear(2, 2), nn.Linear(2, 2), Helped()
    in_place.compile(backend="eager")
    forward.forward = torch.compile(forward.forward, backend="eager")  # type: ignore[method-assign]
    method.doubled = torch.compile(method.doubled, backend="eager")  # type: ignore[method-assign]
    wrapper = torch.compile(nn.Linear(2, 2), backend="eager")
    assert [is_compiled(module) for module in (in_place, forward, method, wrapper)] == [True] * 4
    assert [wraps_compiled(module) for module in (in_place, forward, method, wrapper)] == [False, False, False, True]


def test_a_module_that_is_not_compiled_is_none_of_these() -> None:
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager")
    for module in (nn.Linear(2, 2), Helped(), copy.deepcopy(compiled), nn.Sequential(compiled)):
        assert not is_compiled(module)
