"""Digests of 16-bit weights: writes that only move values are noticed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn, optim

from castwise import MasterWeights
from castwise.master_weights import _buckets as buckets
from castwise.master_weights._buckets import Layout, Weight


def swapped(values: torch.Tensor, first: int, second: int) -> torch.Tensor:
    other = values.clone()
    other[[first, second]] = values[[second, first]]
    return other


@pytest.mark.parametrize("length", [2, 7, 64, 1001, 20_000, 70_001])
def test_permutations_have_other_digests(length: int) -> None:
    torch.manual_seed(length)
    values = torch.randn(length).bfloat16()
    digest = buckets._digest(values)
    assert buckets._digest(values.clone()) == digest
    assert buckets._digest(torch.cat([values[:1], values])[1:]) == digest  # at another offset
    assert buckets._digest(values.flip(0)) != digest
    assert buckets._digest(values.roll(1)) != digest
    assert buckets._digest(values.roll(length // 2)) != digest
    for _ in range(20):
        first, second = torch.randperm(length)[:2].tolist()
        if values[first] != values[second]:
            assert buckets._digest(swapped(values, first, second)) != digest


def test_signs_and_ones_that_move_have_other_digests() -> None:
    signs = torch.full((64, 64), 0.5).bfloat16()
    signs[0, 3] = -0.5
    moved = signs.clone()
    moved[0, [3, 7]] = moved[0, [7, 3]]  # in the top bits of two words
    eye = torch.eye(64).bfloat16()
    for before, after in ((signs, moved), (eye, eye[torch.randperm(64)]), (eye, swapped(eye, 3, 7))):
        assert buckets._digest(before.flatten()) != buckets._digest(after.flatten())
        assert not torch.equal(of(before).digest(), of(after).digest())


def of(values: torch.Tensor) -> Weight:
    return Weight(values, "weight", Layout.of(values))


def test_digests_of_rows_depend_on_neither_strides_nor_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    values = torch.randn(6, 5, 3, 3).bfloat16()
    rows = of(values).row_digests()
    assert rows.dtype is torch.int32
    assert torch.equal(of(values.to(memory_format=torch.channels_last)).row_digests(), rows)
    assert torch.equal(of(values[2:4]).row_digests(), rows[2:4])
    assert of(values.flip(1)).row_digests().ne(rows).all()
    assert of(values[:0]).row_digests().shape == (0,)
    assert of(values[0, 0, 0, 0]).row_digests().shape == ()
    monkeypatch.setattr(buckets, "_PIECE", 16)
    assert torch.equal(of(values).row_digests(), rows)


@pytest.mark.parametrize("how", ["rows", "two values", "columns"])
@pytest.mark.parametrize("steps", [0, 2])
def test_data_writes_that_permute_values_are_noticed(how: str, steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = MasterWeights(optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    data = model.weight.data
    if how == "two values":
        data[0, 3], data[9, 7] = data[9, 7].item(), data[0, 3].item()
    else:
        data.copy_(data.flip(0 if how == "rows" else 1))
    written = model.weight.detach().clone().float()
    with pytest.warns(UserWarning, match="written since the last step of MasterWeights"):
        assert torch.equal(optimizer.fp32_state_dict(model)["weight"], written)


def test_a_digest_reads_the_weights_once() -> None:
    weights = torch.randn(1 << 18).bfloat16()
    buckets._digest(weights)  # which makes its multipliers
    with torch.profiler.profile(record_shapes=True) as profile:
        buckets._digest(weights)
    events = [event for event in profile.events() if event.cpu_parent is None]
    views = {"aten::view", "aten::slice"}
    computed = [event.name for event in events if event.name not in views]
    expected = {"aten::sum", "aten::add_", "aten::__rshift__", "aten::bitwise_xor", "aten::dot", "aten::item"}
    assert set(computed) == expected
    assert len(computed) == len(expected)


def test_checkpoints_of_0_2_are_loaded_without_their_digests() -> None:
    model = nn.Linear(8, 8)
    optimizer = MasterWeights(optim.SGD(model.parameters(), lr=0.1), model)
    saved: dict[str, Any] = optimizer.state_dict()
    for entries in saved["state"].values():
        del entries["master_weights.row_digests"]
        entries["master_weights.digest"] = torch.tensor(1 << 60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(saved)
        optimizer.fp32_state_dict(model)
