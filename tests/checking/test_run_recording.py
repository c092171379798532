"""Golden files that a Monitor records while a script runs: what checks tell by them, and that runs are unchanged."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import castwise
from castwise import Monitor
from castwise.checking import Golden, check

Weights = list[torch.Tensor]


def train(
    path: Path | None = None, *, eps: float = 1e-5, rate: float = 0.1, scale: float = 1.0, steps: int = 5
) -> Weights:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, eps), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scaler = castwise.GradScaler("cpu", init_scale=scale)
    with Monitor(model, optimizer, scaler, check=path):
        for _ in range(steps):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(5, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    return [tensor.detach() for tensor in model.state_dict().values()]


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    path = tmp_path / "golden.cwcheck"
    assert all(map(torch.equal, train(path), train()))
    return path


def test_of_a_recorded_run_the_same_bits_are_identical(golden: Path) -> None:
    assert check(train, golden).kind == "identical"
    before = golden.read_bytes()
    assert check(partial(train, golden), golden).kind == "identical"  # as in the script that has recorded it
    assert golden.read_bytes() == before
    assert Golden.load(golden).steps == 3


def test_of_a_recorded_run_rounding_is_told_from_another_function(golden: Path) -> None:
    scaled = check(partial(train, scale=3.0), golden)  # not a power of two: gradients round otherwise
    assert (scaled.kind, scaled.verdict) == ("cannot tell", "cannot tell: no more than rounding explains")
    assert any("recorded by a Monitor, so it has no float64" in note for note in scaled.notes)
    changed = check(partial(train, eps=1e-3), golden)
    assert (changed.kind, changed.exit_code) == ("different", 1)
    assert changed.verdict.startswith("different function, or less accurate when recorded: gradient ")
    assert "lr 0.1 is now 0.2 (SGD, step 1)" in check(partial(train, rate=0.2), golden).notes


def test_a_recording_that_fails_or_ends_early_leaves_run_and_files_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.write_text("mine")
    expected = train()
    assert all(map(torch.equal, train(notes), expected))
    assert notes.read_text() == "mine"
    with pytest.warns(RuntimeWarning, match="no golden file is recorded, because a part of it failed"):
        assert all(map(torch.equal, train(tmp_path / "none" / "golden"), expected))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path / "short", steps=2)
        train(tmp_path / "next")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["next", "notes"]
    assert check(train, tmp_path / "next").kind == "identical"
