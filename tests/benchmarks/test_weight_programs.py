"""`benchmarks/weight_programs.py`: programs with 16-bit weights have the bits of fp32 weights, and others are found."""

from __future__ import annotations

import re

import pytest
import torch

import castwise
from benchmarks import weight_programs


def test_programs_have_the_bits_of_fp32_weights() -> None:
    assert [weight_programs.attempt(seed, "loop") for seed in range(20)] == [None] * 20


@pytest.mark.parametrize(
    ("kind", "package"),
    [("Accelerate", "accelerate"), ("Fabric", "lightning"), ("Lightning", "lightning"), ("Trainer", "transformers")],
)
def test_programs_of_frameworks_have_the_bits_of_fp32_weights(kind: str, package: str) -> None:
    pytest.importorskip(package)
    assert [weight_programs.attempt(seed, kind) for seed in range(4)] == [None] * 4


def test_one_wrong_bit_is_found_and_the_program_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    step = castwise.MasterWeights.step

    def wrong(self: castwise.MasterWeights, closure: None = None) -> None:
        step(self, closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].view(-1)[0].nextafter_(torch.tensor(9.0))

    monkeypatch.setattr(castwise.MasterWeights, "step", wrong)
    answers = [weight_programs.attempt(seed, "loop") for seed in range(3)]
    assert all(answer is not None and re.match("differs: seed=", answer) for answer in answers)
