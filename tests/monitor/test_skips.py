"""Of several ranks the one that is at fault is believed."""

from __future__ import annotations

import itertools
import json

import pytest

from castwise import Cause
from castwise.monitor import _causes as causes
from castwise.monitor._records import DiagnosisRecord
from castwise.monitor._skips import StepFault, agreed

OVERFLOW, ELSEWHERE = StepFault("overflow", ()), StepFault("another rank", ())


def together(*ranks: StepFault) -> StepFault:
    return agreed(dict(enumerate(ranks)), len(ranks))


def diagnosis(phase: str, module: str = "") -> DiagnosisRecord:
    return DiagnosisRecord(1, "overflow", phase, module, op="", text="", advice="")


def ranks_of(*ranks: StepFault) -> dict[str, int | None]:
    """The rank that each place is of."""
    return {found.module: found.rank for found in together(*ranks).diagnoses}


def test_records_spell_causes_as_the_scaler_does() -> None:
    assert {name: value for name, value in vars(causes).items() if name.isupper()} == {
        cause.name: cause.value for cause in Cause
    }


@pytest.mark.parametrize(
    ("named", "agreed_on"),
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
def test_what_a_rank_knows_outweighs_what_others_suppose(named: list[str], agreed_on: str) -> None:
    for order in itertools.permutations(named):
        assert together(*(StepFault(cause, ()) for cause in order)).cause == agreed_on


def test_parameters_of_all_ranks_are_named_once() -> None:
    ranks = StepFault("overflow", ("a", "b")), StepFault("another rank", ()), StepFault("overflow", ("b", "c"))
    assert together(*ranks).parameters == ("a", "b", "c")


def test_the_rank_is_named_that_is_at_fault_alone() -> None:
    assert together(OVERFLOW, StepFault("non-finite loss", ()), OVERFLOW).rank == 1
    assert together(ELSEWHERE, ELSEWHERE, OVERFLOW).rank == 2
    assert together(OVERFLOW, OVERFLOW).rank is None
    assert together(ELSEWHERE, ELSEWHERE).rank is None
    assert together(OVERFLOW).rank is None  # there is no other one


def test_no_rank_is_named_while_nothing_is_known_of_some() -> None:
    known = agreed({0: ELSEWHERE, 2: OVERFLOW}, size=3)
    assert (known.cause, known.rank) == ("overflow", None)
    assert agreed({0: ELSEWHERE}, size=2).cause == "another rank"


def test_diagnoses_are_those_of_the_ranks_at_fault_each_place_once() -> None:
    clean, head, body = diagnosis(""), diagnosis("forward", "head"), diagnosis("forward", "body")
    loss = StepFault("non-finite loss", (), (clean,))
    assert ranks_of(StepFault("overflow", (), (head,)), loss) == {"": 1}
    assert ranks_of(StepFault("overflow", (), (clean,)), StepFault("overflow", (), (head,))) == {"head": 1}
    assert ranks_of(*(StepFault("overflow", (), (found,)) for found in (head, body, head))) == {"head": 0, "body": 1}
    assert ranks_of(StepFault("overflow", (), (head,))) == {"head": None}
    assert ranks_of(OVERFLOW, OVERFLOW) == {}


def test_a_rank_sends_numbers_and_text() -> None:
    skip = StepFault("overflow", tuple(f"layer.{number}" for number in range(20)), (diagnosis("loss"),))
    cause, text = skip.to_numbers()
    assert json.loads(text)[1] == [diagnosis("loss").to_json()]
    received = StepFault.from_numbers(cause, text + b"   ")
    assert (received.cause, received.diagnoses) == ("overflow", skip.diagnoses)
    assert received.parameters == skip.parameters[:8]
    assert ELSEWHERE.to_numbers()[1] == b""
    assert StepFault.from_numbers(*ELSEWHERE.to_numbers()) == ELSEWHERE
