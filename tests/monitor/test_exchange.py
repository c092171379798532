"""Monitors on three real processes, one of which does not do what the others do: training keeps its bits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.ranks import run

from castwise.monitor._exchange import ranks_text

Result = dict[str, Any]
WORKER = Path(__file__).with_name("exchange_worker.py")
SAMPLED = [1, 2, 4, 5, 6, 8]  # the fifth because it is skipped
ALONE = "the monitor of rank {} records this rank alone: "
OVER = "the monitors of the ranks no longer work together, and {}: "
OVER_ON = [OVER.format("rank 0 records itself alone")]
OVER_ON += [OVER.format(f"rank {rank} is no longer recorded") for rank in (1, 2)]
DO = "; if it was busy alone, as with a validation, let the other ranks wait for it: torch.distributed.barrier()"
GUARDED = "the monitor skipped a measurement that failed: OSError: no such device"
OF_ALL, OF_ONE, OF_TWO = 168, 56, 112  # elements of activations

CASES = [
    *("none", "healthy", "every", "step", "no monitor", "late to attach", "too late to attach", "late", "detached"),
    "forked",
    *("sample fails", "sample is not made", "silent", "busy", "fails in between"),
]
TWO_MODELS = ["none of two", "another order", "other shapes", "one of two"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Result]]:
    cases = "; ".join([*CASES, *TWO_MODELS, "attached again", "maxima"])
    results = run(WORKER, 3, tmp_path_factory.mktemp("ranks") / "store", cases)
    assert None not in results
    return results


def of(ranks: list[dict[str, Result]], case: str, key: str) -> list[Any]:
    return [rank[case][key] for rank in ranks]


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_with_the_same_bits_on_all_ranks(case: str, ranks: list[dict[str, Result]]) -> None:
    assert of(ranks, case, "weights") == [ranks[0]["none"]["weights"]] * 3


@pytest.mark.parametrize("case", TWO_MODELS)
def test_two_models_train_with_the_same_bits(case: str, ranks: list[dict[str, Result]]) -> None:
    for rank, name in itertools.product(ranks, ("first", "second")):
        assert rank[case][name]["weights"] == ranks[0]["none of two"][name]["weights"] or case == "another order"
        assert rank[case][name]["weights"] == ranks[0][case][name]["weights"]


@pytest.mark.parametrize("case", ["healthy", "late to attach", "late", "forked"])
def test_ranks_that_come_in_time_are_recorded_together(case: str, ranks: list[dict[str, Result]]) -> None:
    assert of(ranks, case, "sample") == [SAMPLED, [], []]
    assert of(ranks, case, "messages") == [[], [], []]
    assert ranks[0][case]["elements"] == [OF_ALL, OF_ALL, OF_ALL, 0, OF_ALL, OF_ALL]
    assert ranks[0][case]["causes"] == [["non-finite loss", 1]]


def test_a_rank_without_a_sample_is_left_out_of_the_others(ranks: list[dict[str, Result]]) -> None:
    assert ranks[0]["sample fails"]["elements"] == [OF_ALL, OF_ALL, OF_TWO, 0, OF_TWO, OF_TWO]
    for case in ("sample fails", "sample is not made"):
        assert of(ranks, case, "sample") == [SAMPLED, [], []]
        assert of(ranks, case, "messages") == [[], [GUARDED], []]
        assert ranks[0][case]["causes"] == [["non-finite loss", 1]]  # skips are still combined


@pytest.mark.parametrize(
    ("case", "why", "combined"),
    [
        ("busy", f"no answer from rank 1 for 1 s at step 4{DO}", 2),
        ("every", "every is 2 on rank 0 and 4 on rank 1: pass the same", 0),
        ("step", "rank 1 did not exchange the same as rank 0: rank 0 is at step 1, rank 1 at step 101", 0),
        ("detached", "rank 1 stopped monitoring before step 4", 2),
        ("silent", f"no answer from rank 1 for 1 s at step 4{DO}", 2),
        ("fails in between", "rank 1 failed at step 4: OSError: no such device", 2),
    ],
)
def test_after_a_failure_all_ranks_name_the_cause_and_rank_0_records_itself_alone(
    case: str, why: str, combined: int, ranks: list[dict[str, Result]]
) -> None:
    messages = of(ranks, case, "messages")
    if case in ("detached", "silent"):  # rank 1 has no monitor that could say it
        assert set(messages.pop(1)) <= {GUARDED}
        assert messages == [[OVER_ON[rank] + why] for rank in (0, 2)]
    else:
        assert messages == [[over + why] for over in OVER_ON]
    assert of(ranks, case, "alone") == [[[SAMPLED[combined], why]], [], []]
    assert of(ranks, case, "sample") == [SAMPLED, [], []]
    first, second, third, *_ = ranks[0][case]["elements"]
    assert [first, second, third] == [OF_ALL] * combined + [OF_ONE] * (3 - combined)
    assert ranks[0][case]["step"] == list(range(1, 9))
    assert ranks[0][case]["causes"] == [["overflow", None]]  # what rank 0 knows


def test_maxima_of_steps_wait_as_long_as_they_were_asked_to_and_name_the_rank_that_did_not_come(
    ranks: list[dict[str, Result]],
) -> None:
    why = f"no answer from rank 1 for 4 s at step 3{DO}"
    assert [rank["maxima"]["maximum"] for rank in ranks] == [[2]] * 3
    assert of(ranks, "maxima", "step") == [3, 3, 3]
    assert of(ranks, "maxima", "why") == [why] * 3


@pytest.mark.parametrize(("case", "until"), [("every", 1), ("silent", 3), ("busy", 3), ("fails in between", 3)])
def test_a_rank_that_is_no_longer_recorded_measures_nothing(
    case: str, until: int, ranks: list[dict[str, Result]]
) -> None:
    first, *_, last = of(ranks, case, "made")
    assert (first, last) == (len(SAMPLED), until)


@pytest.mark.parametrize("case", ["no monitor", "too late to attach"])
def test_ranks_that_do_not_meet_record_alone_and_name_those_that_did_not_come(
    case: str, ranks: list[dict[str, Result]]
) -> None:
    for rank in (0, 2):
        assert ranks[rank][case]["messages"] == [ALONE.format(rank) + "rank 1 did not come within 0.9 s"]
        assert (ranks[rank][case]["sample"], ranks[rank][case]["elements"][0]) == (SAMPLED, OF_ONE)
        assert ranks[rank][case]["alone"] == [[1, "rank 1 did not come within 0.9 s"]]
    late = ranks[1]["too late to attach"]
    assert late["messages"] == [ALONE.format(1) + "ranks 0 and 2 did not come within 0.9 s"]
    assert (late["sample"], late["causes"]) == (SAMPLED, [["non-finite loss", None]])
    assert ranks[1]["no monitor"]["messages"] == []


def test_monitors_of_different_models_do_not_mix(ranks: list[dict[str, Result]]) -> None:
    different = "the ranks have different models: attach monitors in the same order on all ranks"
    for number, rank in enumerate(ranks):
        assert rank["another order"]["messages"] == [ALONE.format(number) + different] * 2
        assert rank["another order"]["first"]["elements"] == rank["another order"]["second"]["elements"] == [OF_ONE] * 3
    assert [OVER_ON[0] in message for message in ranks[0]["other shapes"]["messages"]] == [True, True]
    for case in ("other shapes", "one of two"):
        assert ranks[0][case]["first"]["elements"] == ranks[0][case]["second"]["elements"] == [OF_ONE] * 3
    assert ALONE.format(0) + "rank 1 did not come within 0.9 s" in ranks[0]["one of two"]["messages"]


def test_after_a_rank_has_attached_alone_all_meet_again(ranks: list[dict[str, Result]]) -> None:
    assert of(ranks, "attached again", "samples") == [[[1], [2], [3]], [[], [], []], [[], [], []]]
    assert ranks[1]["attached again"]["messages"] == [ALONE.format(1) + "ranks 0 and 2 did not come within 0.9 s"]
    assert ranks[0]["attached again"]["messages"] == ranks[2]["attached again"]["messages"] == []


@pytest.mark.parametrize(
    ("case", "why", "combined"),
    [
        ("dies", "no answer from rank 1 at step 4", 2),
        ("dies after attach", f"no answer from rank 1 for 1 s at step 1{DO}", 0),
    ],
)
def test_a_rank_that_is_killed_ends_monitoring_only(case: str, why: str, combined: int, tmp_path: Path) -> None:
    first, second, third = run(WORKER, 3, tmp_path / "store", case)
    assert second is None
    assert [first[case]["messages"], third[case]["messages"]] == [[OVER_ON[0] + why], [OVER_ON[2] + why]]
    assert first[case]["elements"] == [OF_ALL] * combined + [OF_ONE] * (5 - combined)
    assert first[case]["weights"] == third[case]["weights"]
    assert all(torch.tensor(first[case]["weights"]).isfinite())


def test_at_most_ten_ranks_are_named() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8 and 9"
    assert ranks_text(range(1000)) == "1000 ranks (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...)"
