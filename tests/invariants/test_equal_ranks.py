"""The inputs of a forward, whose digests ranks compare."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from castwise._invariants.equal_ranks import _tensors

TENSOR = torch.ones(2)


@pytest.mark.parametrize(
    "value", [TENSOR, [TENSOR], {"x": (TENSOR,)}, ({"x": {"y": [TENSOR, "text"]}}, 3)], ids=lambda value: ""
)
def test_tensors_in_nested_inputs_are_found(value: Any) -> None:
    assert [tensor is TENSOR for tensor in _tensors(value)] == [True]


def test_an_iterator_among_the_inputs_is_not_used_up() -> None:
    batches = iter([TENSOR, TENSOR])
    assert list(_tensors((batches,))) == []
    assert len(list(batches)) == 2
