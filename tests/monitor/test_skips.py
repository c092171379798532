"""Of several ranks the one that is at fault is believed."""

from __future__ import annotations

import itertools

import pytest

from castwise.monitor.ranks import Skip, agreed


@pytest.mark.parametrize(
    ("causes", "agreed_on"),
    [
        (["another rank", "overflow"], "overflow"),
        (["overflow", "non-finite loss"], "non-finite loss"),
        (["unknown", "another rank"], "unknown"),
        (["unknown", "overflow", "another rank"], "overflow"),
        (["non-finite loss", "non-finite weights"], "non-finite weights"),
        (["another rank", "another rank"], "overflow"),
        (["overflow"], "overflow"),
    ],
)
def test_what_a_rank_knows_outweighs_what_others_suppose(causes: list[str], agreed_on: str) -> None:
    for order in itertools.permutations(causes):
        assert agreed([Skip(cause, ()) for cause in order]).cause == agreed_on


def test_parameters_of_all_ranks_are_named_once() -> None:
    ranks = [Skip("overflow", ("a", "b")), Skip("another rank", ()), Skip("overflow", ("b", "c"))]
    assert agreed(ranks).parameters == ("a", "b", "c")


def test_the_diagnosis_that_found_something_counts() -> None:
    nothing = Skip("overflow", (), {"module": ""})
    found = Skip("overflow", (), {"module": "head"}, is_found=True)
    assert agreed([nothing, found]).diagnosis == agreed([found, nothing]).diagnosis == {"module": "head"}
    assert agreed([Skip("overflow", ()), nothing]).diagnosis == {"module": ""}
    assert agreed([Skip("overflow", ())]).diagnosis is None
