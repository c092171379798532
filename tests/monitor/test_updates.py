"""What is said of weight updates, against float64 and against weights that really are bf16."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from castwise.monitor import _exponents as exponents
from castwise.monitor._updates import Updates, compare, update_of


def record(before: torch.Tensor, after: torch.Tensor) -> dict[str, float]:
    return update_of(compare(before, after).tolist()).to_json()


def reference(before: torch.Tensor, after: torch.Tensor) -> dict[str, float]:
    old, new = before.double(), after.double()
    change = new - old
    rounded = before.bfloat16()
    changed = change != 0
    lost = changed & ((rounded.double() + change).to(torch.bfloat16) == rounded)
    ratio = change.norm() / old.norm()
    share = (lost.sum() / changed.sum()).nan_to_num(0.0).item() if before.dtype.itemsize >= 4 else math.nan
    return {"update_to_weight": ratio.item(), "lost_in_bf16": share}


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.floats(-12, 1), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_definitions_are_those_of_float64(seed: int, log10_of_change: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(40, 5, generator=generator).to(dtype)
    change = torch.randn(40, 5, generator=generator) * 10**log10_of_change
    after = torch.where(torch.rand(40, 5, generator=generator) < 0.3, before, before + change.to(dtype))
    assert record(before, after) == pytest.approx(reference(before, after), rel=1e-6, nan_ok=True)


def test_what_is_lost_is_what_bf16_weights_would_not_have_seen() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(300, 7))
    in_bf16 = weight.detach().bfloat16()
    before = weight.detach().clone()
    weight.grad = torch.randn_like(weight)
    torch.optim.SGD([weight], lr=3e-3).step()
    change = weight.detach() - before
    stays = (in_bf16.clone().float() + change).bfloat16() == in_bf16
    assert record(before, weight.detach())["lost_in_bf16"] == stays.double().mean().item()
    assert 0.1 < stays.double().mean() < 0.9


def test_many_pieces_are_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    before, after = torch.randn(2, 30, 40)
    whole = record(before, after)
    monkeypatch.setattr(exponents, "_PIECE_ON_CPU", 64)
    assert record(before, after) == pytest.approx(whole)
    assert record(before.t(), after.t()) == pytest.approx(whole)


def test_small_updates_are_not_lost_in_their_squares() -> None:
    before = torch.full((10,), 1e-25)
    assert record(before, before * 2)["update_to_weight"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], (0.0, 0.0)),
        ([0.0], [0.0], (0.0, 0.0)),
        ([0.0], [1.0], (math.inf, 0.0)),
        ([1.0, 1.0], [1.0 + 2**-20, 1.0], (2**-20 / math.sqrt(2), 1.0)),
        ([], [], (0.0, 0.0)),
    ],
)
def test_edges(before: list[float], after: list[float], expected: tuple[float, float]) -> None:
    found = record(torch.tensor(before), torch.tensor(after))
    assert (found["update_to_weight"], found["lost_in_bf16"]) == pytest.approx(expected)


def test_real_and_imaginary_parts_are_elements() -> None:
    before, after = torch.randn(2, 9, dtype=torch.complex64)
    assert record(before, after) == pytest.approx(reference(torch.view_as_real(before), torch.view_as_real(after)))


def test_no_accelerator_is_waited_for() -> None:
    with FakeTensorMode():  # whose tensors on a GPU have no values to read
        found = compare(torch.empty(7, 9, device="cuda"), torch.empty(7, 9, device="cuda"))
    assert (found.device.type, tuple(found.shape)) == ("cuda", (4,))


def test_only_weights_with_a_gradient_are_copied() -> None:
    trained, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([trained, frozen], lr=0.5)
    trained.grad = torch.ones(2)
    watched = Updates()
    watched.keep(optimizer)
    optimizer.step()
    found = watched.compare(optimizer)
    assert {parameter: numbers.tolist() for parameter, numbers in found.items()} == {trained: [0.5, 2.0, 2.0, 0.0]}
    assert watched.compare(optimizer) == {}
