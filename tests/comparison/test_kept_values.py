"""Kept arguments: made again with other tensors, and with copies of objects that modules write to."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch

from castwise.comparison._kept_values import Kept, tensors_in

Pair = namedtuple("Pair", "first second")


class Box:
    def __init__(self, *inside: Any) -> None:
        self.inside = list(inside)


def test_containers_are_made_again_with_other_tensors() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    value = (Pair(a, [b, None]), {"same": a, "number": 3, "dtype": torch.float32})
    kept = Kept(value)
    assert [tensor.shape for tensor in kept.tensors] == [tensor.shape for tensor in tensors_in(value)]
    again = kept.with_tensors([tensor + 1 for tensor in kept.tensors])
    assert isinstance(again[0], Pair)
    assert torch.equal(again[0].second[0], b + 1)
    assert torch.equal(again[1]["same"], a + 1)
    assert again[1]["number"] == 3


def test_an_object_is_copied_as_it_was_and_its_tensors_are_not() -> None:
    weight, layer = torch.ones(2), torch.nn.Linear(2, 2)
    box = Box(weight, layer, Box(weight, "text"))
    kept = Kept((box, 1))
    box.inside.append("later")
    assert tensors_in((box, 1))[0] is weight
    first, second = kept.with_tensors(kept.tensors)[0], kept.with_tensors([torch.zeros(2)])[0]
    assert first is not box
    assert len(first.inside) == 3
    assert first.inside[0].data_ptr() == weight.data_ptr()
    assert first.inside[1] is layer
    assert first.inside[2].inside == [first.inside[0], "text"]
    assert torch.equal(second.inside[0], torch.zeros(2))


def test_what_cannot_be_copied_is_passed_on() -> None:
    class Local:
        pass

    local = Local()
    assert Kept([local]).with_tensors([])[0] is local


def test_writes_are_noticed_and_what_will_be_written_is_copied() -> None:
    value = [torch.ones(2), torch.ones(2)]
    kept, careful = Kept(value), Kept(value, frozenset({1, 7}))
    value[1].add_(1)
    assert kept.overwritten() == {1}
    assert torch.equal(careful.tensors[1], torch.ones(2))
    assert careful.tensors[0].data_ptr() == value[0].data_ptr()
