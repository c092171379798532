"""A monitor on two real processes: what they find together is what one process finds, and the first one writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.distributed.ranks import run

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(Path(__file__).with_name("ranks_worker.py"), 2, tmp_path_factory.mktemp("ranks") / "store", "")


def of(records: Records, kind: str) -> Records:
    return [record for record in records if record["kind"] == kind]


def test_only_the_first_rank_writes(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["runs"] for rank in ranks)
    for name, records in second.items():
        assert [record["kind"] for record in first[name]][:3] == ["run", "step", "sample"]
        assert records == [] or name == "alone"


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_together_ranks_find_what_one_process_finds(how: str, ranks: list[dict[str, Any]]) -> None:
    runs = ranks[0]["runs"]
    together, alone = of(runs[f"{how}, none"], "sample"), of(runs["alone"], "sample")
    assert [sample["step"] for sample in together] == [1, 2]
    for mine, whole in zip(together, alone, strict=True):
        assert mine["gradients"] == whole["gradients"]
        assert mine["modules"] == whole["modules"]
        assert mine["grad_norm"] == whole["grad_norm"] > 0
        assert mine["activations"] == whole["activations"]
        assert mine["weights"] == {name: pytest.approx(facts) for name, facts in whole["weights"].items()}
    assert of(runs[f"{how}, none"], "run")[0]["settings"]["ranks"] == 2
    assert [step["skipped"] for step in of(runs[f"{how}, none"], "step")] == [False] * 3


@pytest.mark.parametrize(
    ("run", "cause", "at_fault", "parameters"),
    [
        ("ddp, data of rank 1", "non-finite loss", 1, ["0.weight", "2.weight"]),
        ("fsdp2, data of rank 1", "non-finite loss", 1, ["0.weight", "2.weight"]),
        ("fsdp2, gradient of rank 1", "overflow", 1, ["2.weight"]),
        ("ddp, scale", "overflow", None, None),
        ("fsdp2, scale", "overflow", None, None),
    ],
)
def test_a_skip_has_the_cause_that_the_rank_at_fault_knows_and_names_it(
    run: str, cause: str, at_fault: int | None, parameters: list[str] | None, ranks: list[dict[str, Any]]
) -> None:
    good, skipped, after = of(ranks[0]["runs"][run], "step")
    assert (good["skipped"], skipped["skipped"], after["skipped"]) == (False, True, False)
    assert (skipped["cause"], skipped["rank"]) == (cause, at_fault)
    assert good["rank"] is None
    assert parameters is None or skipped["parameters"] == parameters


@pytest.mark.parametrize("run", ["apart, data of rank 1", "apart, diagnosed"])
def test_ranks_that_do_not_agree_skip_alone_and_no_rank_waits_for_them(run: str, ranks: list[dict[str, Any]]) -> None:
    records = ranks[0]["runs"][run]
    assert [step["skipped"] for step in of(records, "step")] == [False] * 3
    assert [sample["step"] for sample in of(records, "sample")] == [1, 2]
    assert of(records, "diagnosis") == []


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_the_diagnosis_is_that_of_the_rank_at_fault(how: str, ranks: list[dict[str, Any]]) -> None:
    (found,) = of(ranks[0]["runs"][f"{how}, diagnosed"], "diagnosis")
    assert (found["step"], found["cause"], found["rank"], found["phase"]) == (2, "non-finite loss", 1, "input")


def test_a_model_under_fsdp1_cannot_be_replayed(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "the forward of this model needs other ranks: remove on_nonfinite" in rank["refused"]


def test_a_partial_sum_is_left_out_because_no_rank_knows_it_alone(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["parts"] for rank in ranks)
    assert (first["split"], second["split"]) == ([[0, 1], 2], [[2], 2])
    assert first["copied"] == second["copied"] == first["plain"] == [[0, 1, 2], 1]
    assert set(first) == {"split", "copied", "plain"}
