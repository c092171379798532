"""Steps that an optimizer takes without its scaler's `step`, in scripts that look for infs by themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.amp._readback import DELAY, Readback
from castwise.monitor._step_sources import ScalerSource, ScriptSource

Record = dict[str, Any]


def recorded(spoilt: int = 0, by_scaler: tuple[int, ...] = (), starts_at: int | None = None) -> list[Record]:
    """Train for six iterations; return the records of steps and samples."""
    torch.manual_seed(0)
    model, records = nn.Linear(4, 2), []
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), castwise.GradScaler("cpu", init_scale=64.0)
    with castwise.Monitor(model, optimizer, scaler, every=2, sinks=[records.append]) as monitor:
        monitor.step = monitor.step if starts_at is None else starts_at
        for number in range(1, 7):
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).square().sum()
            scaler.scale(loss * math.nan if number == spoilt else loss).backward()
            if number in by_scaler:
                scaler.step(optimizer)
            else:
                scaler.unscale_(optimizer)
                if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                    optimizer.step()
            scaler.update()
    return [record for record in records if record["kind"] in ("step", "sample")]


def of(kind: str, records: list[Record], *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(record[key] for key in keys) for record in records if record["kind"] == kind]


def test_steps_that_a_script_guards_itself_are_recorded_as_those_of_the_scaler() -> None:
    by_hand, by_scaler = recorded(), recorded(by_scaler=(1, 2, 3, 4, 5, 6))
    assert of("step", by_hand, "step", "scale", "skipped") == [(number, 64.0, False) for number in range(1, 7)]
    assert of("step", by_hand, "loss")[0] == of("step", by_scaler, "loss")[0]
    assert all(math.isfinite(loss) for (loss,) in of("step", by_hand, "loss"))
    assert of("sample", by_hand, "step") == [(1,), (2,), (4,), (6,)]
    one, other = (next(record for record in run if record["kind"] == "sample") for run in (by_hand, by_scaler))
    assert one["gradients"] == other["gradients"]
    assert one["grad_norm"] == other["grad_norm"]
    assert one["weights"].keys() == {"weight", "bias"}


def test_a_step_that_the_script_leaves_out_has_no_record() -> None:
    assert [number for (number,) in of("step", recorded(spoilt=3), "step")] == [1, 2, 3, 4, 5]


def test_steps_by_hand_and_of_the_scaler_are_counted_together_and_once() -> None:
    assert of("step", recorded(by_scaler=(2, 3, 6)), "step") == [(number,) for number in range(1, 7)]
    assert of("step", recorded(by_scaler=(2, 3), starts_at=40), "step") == [(number,) for number in range(40, 46)]


def test_an_accelerator_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Readback, "is_on_host", False)
    optimizer, scaler = torch.optim.SGD([nn.Parameter(torch.ones(1))]), castwise.GradScaler("cpu", init_scale=8.0)
    steps, known = ScriptSource(ScalerSource(scaler), optimizers=1), []
    for _ in range(5):
        scaler.scale(torch.ones(()))
        steps.add(optimizer)
        known.append([facts.iteration for facts in steps.facts()])
        scaler._outcomes.updates += 1
    assert known == [[]] * DELAY + [[1], [2], [3]]
    assert [facts.iteration for facts in steps.facts(all_=True)] == [4, 5]
