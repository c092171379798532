"""Verdicts on small training runs that really lose numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from tests.monitor.recorded import Record
from torch import nn

import castwise
from castwise import GradScaler, Monitor
from castwise.monitor import Run
from castwise.monitor._records import SampleRecord, StepRecord
from castwise.report import Verdict, verdict


def underflowing(scale: float, dtype: torch.dtype, factor: float = 1e-6, rate: float = 1e-9) -> Verdict:
    """Of a model in which what reaches the first layer's gradients is `factor` times what its head gets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    model[2].weight.data.mul_(factor)
    return trained(model, GradScaler("cpu", init_scale=scale), lambda _: torch.randn(6, 4) * 0.1, dtype, rate)


def trained(
    model: nn.Module,
    scaler: GradScaler | None,
    batch: Callable[[int], torch.Tensor],
    dtype: torch.dtype,
    rate: float = 1e-3,
    steps: int = 16,
) -> Verdict:
    records: list[Record] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with Monitor(model, optimizer, scaler, every=2, sinks=[records.append]):
        for number in range(1, steps + 1):
            optimizer.zero_grad()
            with castwise.autocast("cpu", dtype=dtype):
                loss = model(batch(number)).float().pow(2).mean()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    steps = [StepRecord.from_json(record) for record in records if record["kind"] == "step"]
    samples = [SampleRecord.from_json(record) for record in records if record["kind"] == "sample"]
    return verdict(Run(Path(), steps=steps, samples=samples))


def test_a_layer_whose_gradients_all_vanish_beside_others_is_named() -> None:
    found = underflowing(2.0, torch.float16)
    worst = next(iter(found))
    assert (worst.severity, worst.evidence["mean_flushed_share"]) == ("critical", 1.0)
    assert worst.text.startswith("Module 0 loses up to 100% of its gradients to underflow in fp16")
    assert "bf16 or a higher scale" in worst.text
    assert "safe" not in str([piece.text for piece in found])
    assert not [piece for piece in underflowing(2.0**12, torch.float16, 1.0) if piece.severity == "critical"]


def test_gradients_at_the_end_of_fp16_are_not_called_safe() -> None:
    found = underflowing(64.0, torch.float16, 1e-5, rate=1e-3)
    assert [piece for piece in found if piece.text.startswith("Module 0 loses up to") or "lower end" in piece.text]
    assert "fp16 is safe" not in str(found)


def test_fp16_without_a_scale_learns_what_it_loses() -> None:
    for factor in (3e-5, 1e-5):
        found = str(underflowing(1.0, torch.float16, factor))
        assert "0 loses up to" in found
        assert "The loss was not scaled. In fp16, gradients fit" not in found


def test_zeros_of_what_a_batch_does_not_use_are_no_underflow() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Flatten(), nn.Linear(16, 1))
    found = trained(model, GradScaler("cpu", init_scale=2.0**10), lambda _: torch.randint(9, (6, 2)), torch.float16)
    assert "underflow" not in str([piece.text for piece in found])


def test_nan_that_nothing_skips_is_the_end_of_training() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)

    def batch(number: int) -> torch.Tensor:
        return torch.full((6, 4), math.nan if number == 8 else 1.0)

    found = trained(model, None, batch, torch.bfloat16)
    assert model.weight.isnan().all()
    worst = next(iter(found))
    assert worst.severity == "critical"
    assert worst.text == (
        "Training is lost: gradients became inf or NaN between step 6 (the last finite sample) and step "
        "8, and steps were taken. Resume from a checkpoint of step 6 or earlier: a later one may contain inf or NaN. "
        'Continue with castwise.GradScaler("cuda", schedule=castwise.schedules.Guard()), which skips such steps.'
    )
    assert worst.evidence["last_finite_sample_step"] == 6
    worst = next(iter(trained(nn.Linear(4, 1), None, lambda _: torch.full((6, 4), math.nan), torch.bfloat16)))
    assert "inf or NaN at step 1, the first sampled step" in worst.text
    assert "No checkpoint of this run is known to be good" in worst.text
    assert "all right" not in str(found)
    assert "gradients fit" not in str(found)


def test_small_bf16_gradients_with_unused_rows_are_not_taken_for_those_of_fp16() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Flatten(), nn.Linear(16, 1))
    model[2].weight.data.mul_(1e-5)
    found = str(trained(model, None, lambda _: torch.randint(9, (6, 2)), torch.bfloat16))
    assert "The run computed in bf16. In fp16, gradients fit" in found
    assert "vanished" not in found


def test_a_learning_rate_that_is_far_too_high_is_divergence() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    found = trained(
        model, GradScaler("cpu", init_scale=2.0**10), lambda _: torch.randn(16, 8), torch.float16, rate=30.0, steps=30
    )
    worst = next(iter(found))
    assert worst.finding.startswith("Training diverged: the loss grew from ")
    assert "normal cost" not in str(found)
    assert "fp32" not in str(found)
