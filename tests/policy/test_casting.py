"""Casts that policies make by themselves. What they do around modules is in `test_bound_policy`."""

from __future__ import annotations

import dataclasses
from collections import namedtuple

import pytest
import torch

from castwise.policy._casting import Casts, in_native_state, native_state_of

Pair = namedtuple("Pair", ["first", "second"])  # the kind that many libraries return


@dataclasses.dataclass(slots=True)
class Slots:
    tensor: torch.Tensor
    later: torch.Tensor = dataclasses.field(init=False)


def test_named_tuples_and_dataclasses_with_slots_are_looked_into() -> None:
    casts, x = Casts("cpu", torch.bfloat16), torch.ones(2)
    pair, slots = casts.cast([Pair(x, 3), Slots(x)])
    assert type(pair) is Pair
    assert pair.first.dtype is torch.bfloat16
    assert pair.second == 3
    assert slots.tensor is pair.first, "what is there twice is cast once"
    assert not hasattr(slots, "later")


@pytest.mark.parametrize("cache_enabled", [True, False])
def test_the_state_before_comes_back(cache_enabled: bool) -> None:
    torch.set_autocast_cache_enabled(cache_enabled)
    try:
        before = native_state_of("cpu")
        with in_native_state("cpu", True, torch.float16, not cache_enabled):
            assert native_state_of("cpu") == (True, torch.float16, not cache_enabled)
        assert native_state_of("cpu") == before
    finally:
        torch.set_autocast_cache_enabled(True)
