"""`benchmarks/fidelity.py`: its statistics are scipy's, and it sees whether two libraries did the same."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import castwise

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def fidelity() -> Any:
    return importlib.import_module("benchmarks.fidelity")


def task(fidelity: Any) -> Any:
    return replace(fidelity.TASKS[-1], steps=3)


def test_the_interval_of_a_difference_is_that_of_students_t(fidelity: Any) -> None:
    stats = importlib.import_module(
        "scipy.stats"
    )  # here, because it takes seconds and other processes of tests do without
    low, fp32 = np.random.default_rng(0).normal(size=(2, 5))
    found = fidelity.difference(list(low), list(fp32))
    expected = stats.ttest_rel(low, fp32).confidence_interval(0.95)
    assert found["interval"] == pytest.approx([expected.low, expected.high])
    assert found["mean"] == pytest.approx((low - fp32).mean())


def test_the_spread_is_that_of_a_sample(fidelity: Any) -> None:
    assert fidelity.spread([1.0, 2.0, 6.0]) == {"mean": 3.0, "sd": pytest.approx(7**0.5), "values": [1.0, 2.0, 6.0]}


def test_two_seeds_of_a_training_in_all_precisions(fidelity: Any) -> None:
    result = fidelity.measure(task(fidelity), [0, 1])
    assert result["steps"] == 3
    assert len(set(result["fp32"]["values"])) == 2
    for precision in ("bf16", "fp16"):
        row = result[precision]
        assert row["seeds identical to torch.amp"] == 2
        assert row["values"] == pytest.approx(result["fp32"]["values"], rel=0.05)
        assert row["minus fp32"]["mean"] != 0  # it was not fp32 once more
        assert max(row["values"]) < max(result["untrained"]["values"])


def test_a_library_that_does_something_else_is_seen(fidelity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(device: str, dtype: torch.dtype | None, enabled: bool) -> castwise.autocast:
        return castwise.autocast(device, enabled=False)

    monkeypatch.setitem(fidelity.LIBRARIES, "castwise", (never, castwise.GradScaler))
    assert fidelity.measure(task(fidelity), [0, 1])["bf16"]["seeds identical to torch.amp"] == 0


def test_held_out_rows_are_never_trained_on(fidelity: Any) -> None:
    data = task(fidelity).data(0)
    held_out = {tuple(row.tolist()) for row in data.held_out[0][0]}
    trained = {tuple(row.tolist()) for step in range(30) for row in data.batch(step)[0]}
    assert len(held_out) == 88  # of 442
    assert held_out.isdisjoint(trained)


def test_the_committed_table_is_that_of_the_committed_results(fidelity: Any) -> None:
    record = json.loads((BENCHMARKS / "results" / "fidelity-cpu.json").read_text())
    begin, end = ("<!-- fidelity-cpu begins -->\n", "\n<!-- fidelity-cpu ends -->")
    assert (BENCHMARKS / "README.md").read_text().partition(begin)[2].partition(end)[0] == fidelity.table(record)
