"""A loss that does not fall: the layer is named whose outputs are all 0, or at the ends of a tanh or sigmoid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.monitor import Monitor, Run
from castwise.monitor._records import Exponents, SampleRecord, Stats
from castwise.report._saturation import saturated_layer


def finding(tmp_path: Any, kind: type[nn.Module], rate: float, weight: float = 1.0) -> str:
    """Train a classifier, and return the first finding of its verdict."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), kind(), nn.Linear(16, 16), kind(), nn.Linear(16, 4))
    with torch.no_grad():
        model[2].weight.mul_(weight)  # type: ignore[operator, union-attr]
        model[2].bias.sub_(weight - 1)  # type: ignore[operator, union-attr]
    optimizer, target = torch.optim.Adam(model.parameters(), lr=rate), torch.randn(4, 4)
    with Monitor(model, optimizer, sinks=[tmp_path], on_nonfinite="diagnose", every=10):
        for _ in range(80):
            x = torch.randn(16, 4)
            loss = nn.functional.cross_entropy(model(x), (x @ target).argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return castwise.verdict(Run.read(tmp_path / "monitor.jsonl.gz")).advice[0].finding


def test_a_layer_that_died_after_large_updates_is_named(tmp_path: Any) -> None:
    found = finding(tmp_path, nn.Sigmoid, 5.0)
    assert "The update of step 1 was" in found
    assert " of the outputs of 3 are 0, 1 or -1 from step " in found
    assert found.endswith("Lower the learning rate (initially 5), or warm it up.")


def test_a_layer_that_was_dead_from_the_beginning_is_named(tmp_path: Any) -> None:
    found = finding(tmp_path, nn.ReLU, 1e-3, weight=50.0)
    assert "All outputs of 3 are 0 from step 1 on, and most modules get no gradients." in found
    assert found.endswith(
        "Begin again with smaller weights, or lower the learning rate (initially 0.001), or warm it up."
    )


def test_a_loss_that_falls_is_not_reported(tmp_path: Any) -> None:
    assert finding(tmp_path, nn.Sigmoid, 1e-2).startswith("Nothing to fix")


@pytest.mark.parametrize(
    ("largest", "zero", "counts", "share"),
    [
        (0.0, 1.0, [], 1.0),  # ReLU
        (1.0, 0.0, [4, 96], 0.96),  # tanh
        (1.0, 0.6, [0, 40], 1.0),  # sigmoid
        (1.0, 0.5, [30, 20], None),
        (1.5, 0.0, [4, 96], None),  # not bounded
        (0.9, 0.95, [5], None),  # a sparse layer
    ],
)
def test_what_counts_as_saturated(largest: float, zero: float, counts: list[int], share: float | None) -> None:
    stats = Stats(100, largest, 0.5 if counts else None, zero, 0.0, Exponents(-1 if counts else 0, counts), {})
    found = saturated_layer([SampleRecord(step=3, scale=1.0, activations={"a": stats})])
    assert (None if found is None else found.share) == share
