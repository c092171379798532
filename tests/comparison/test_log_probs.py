"""Log-probabilities: the figures of a trainer and a rollout that disagree, as computed by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling

from castwise.comparison import _log_probs as log_probs
from castwise.comparison._log_probs import LogProbSums, token_log_probs


def test_figures_are_those_computed_by_hand() -> None:
    reference = torch.tensor([0.5, 0.25, 0.1, 0.2], dtype=torch.float64).log()
    policy = torch.tensor([0.5, 0.30, 0.05, 0.21], dtype=torch.float64).log()
    sums = LogProbSums((0.8, 1.2))
    sums.add(reference[:2], policy[:2])
    sums.add(reference[2:], policy[2:])
    found = sums.drift()
    assert found is not None
    ratios = [1.0, 1.2, 0.5, 1.05]
    assert found.tokens == 4
    assert found.mean_difference == pytest.approx(sum(abs(math.log(r)) for r in ratios) / 4)
    assert found.largest_difference == pytest.approx(math.log(2))
    assert found.kl_k1 == pytest.approx(sum(-math.log(r) for r in ratios) / 4)
    assert found.kl_k3 == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 4)
    assert found.outside_band in (0.25, 0.5)  # 0.30 / 0.25 may be on either side of 1.2
    assert LogProbSums((0.8, 1.2)).drift() is None


def test_a_probability_that_is_not_a_number_is_outside_of_any_band() -> None:
    sums = LogProbSums((0.8, 1.2))
    sums.add(torch.zeros(2), torch.tensor([0.0, math.nan]))
    found = sums.drift()
    assert found is not None
    assert found.outside_band == 0.5
    assert math.isnan(found.largest_difference)


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: {"logits": x}, lambda x: (x, 1), lambda x: SimpleNamespace(logits=x)]
)
def test_logits_are_found_and_ignored_targets_left_out(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probs, "_ROWS", 3)
    logits, targets = torch.randn(2, 4, 5), torch.randint(5, (2, 4))
    targets[0, 1] = -100
    found = token_log_probs(wrap(logits), targets)
    assert found is not None
    expected = -F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none")
    assert torch.allclose(found, expected[targets.flatten() != -100])


def test_what_is_no_pair_of_logits_and_classes_has_no_log_probabilities() -> None:
    logits = torch.randn(2, 4, 5)
    assert token_log_probs(logits, torch.randint(5, (2, 5))) is None
    assert token_log_probs(logits, torch.randn(2, 4)) is None
    assert token_log_probs(logits, torch.full((2, 4), 5)) is None
    assert token_log_probs({"states": logits}, torch.randint(5, (2, 4))) is None
    assert token_log_probs(logits, None) is None
    assert token_log_probs(logits, torch.full((2, 4), -100)) is None
