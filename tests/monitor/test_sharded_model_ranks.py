"""FSDP2 and tensor parallelism on two real processes: ranks agree on faults, and each replays its batch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.distributed.ranks import run
from torch import nn

from castwise.monitor._gathered_weights import can_be_gathered, can_be_replayed

CASES = (
    *(
        "fp32",
        "bf16",
        "kept",
        "accumulated",
        "checkpointed",
        "raises",
        "left",
        "sample",
        "validated",
        "slow",
        "late",
        "left out",
    ),
    *("splits", "too large", "tensor parallel", "tensor parallel by Transformers", "tensor parallel, sums"),
    *("left out", "fully_shard of tensor parallel"),
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(
        Path(__file__).with_name("joint_worker.py"), 2, tmp_path_factory.mktemp("ranks") / "store", "", frameworks=True
    )


@pytest.mark.parametrize("how", CASES)
def test_training_has_the_same_bits_after_a_replay(how: str, ranks: list[dict[str, Any]]) -> None:
    assert [rank["same"][how] for rank in ranks] == [True, True]


def test_a_weight_that_is_too_large_for_the_format_it_is_gathered_in_is_not_called_lost(
    ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    (alone,) = run(Path(__file__).with_name("joint_worker.py"), 1, tmp_path / "store", "", frameworks=True)
    for rank, row in ((alone, 0), (ranks[0], 2)):
        found = rank["found"]["too large"][0]
        assert (found["step"], found["summary"]) == (3, f"Last.weight is inf at ({row}, 0).")
        assert found["advice"].startswith("FSDP2 gathers it in float16: if it is finite in fp32, use MixedPrecision")
    assert alone["same"]["too large"]
    assert alone["repeats losses"] == [False, True]
    assert alone["freed"] == [False, True]  # where FSDP2 gathers what tensor parallelism has split


def test_what_is_pending_when_a_run_ends_is_not_replayed(ranks: list[dict[str, Any]]) -> None:
    """One rank may end while others do not."""
    for rank in ranks:
        assert rank["same"]["pending"]
        assert rank["found"]["pending"] == []
        assert not any("could not be diagnosed" in text for text in rank["warned"]["pending"])


def test_methods_that_gather_weights_beside_the_forward_are_not_replayed(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["gathered"] == [True, False]


@pytest.mark.parametrize("how", ["fp32", "bf16", "kept", "accumulated", "checkpointed"])
def test_a_fault_of_one_rank_is_found_there(how: str, ranks: list[dict[str, Any]]) -> None:
    (found,) = ranks[0]["found"][how]
    assert (found["step"], found["rank"], found["summary"]) == (3, 1, "In the loss, aten.add gives nan.")


def test_the_sample_is_named_also_with_weights_of_an_earlier_step(ranks: list[dict[str, Any]]) -> None:
    cases = {"sample": "", "validated": "", "slow": "", "late": ", with the weights of step 1"}
    for how, weights in cases.items():
        assert ranks[0]["warned"][how] == ranks[1]["warned"][how] == []
        (found,) = ranks[0]["found"][how]
        assert (found["step"], found["rank"]) == (3, 1)
        assert found["summary"] == f"Input 0 is inf at (2, 4){weights}."
        assert found["sample"] == "sample 2 of the batch, column 4: inf"
        assert found["tried"] == "finite without sample 2"


@pytest.mark.parametrize(
    "how", ["tensor parallel", "tensor parallel by Transformers", "fully_shard of tensor parallel"]
)
def test_the_sample_is_named_under_tensor_parallelism(how: str, ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["warned"][how] == ranks[1]["warned"][how] == []
    (found,) = ranks[0]["found"][how]
    assert (found["step"], found["summary"]) == (3, "Input 0 is inf at (2, 4).")
    assert found["sample"] == "sample 2 of the batch, column 4: inf"
    assert found["tried"] == "finite without sample 2"


def test_a_model_that_calls_collectives_itself_is_not_replayed(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["found"]["tensor parallel, sums"] == []
        (said,) = rank["warned"]["tensor parallel, sums"]
        assert said.startswith("step 3 could not be diagnosed: UnrepeatableError: its allreduce_ needs the other ranks")


def test_an_op_that_would_exchange_tensors_within_itself_ends_the_replay(ranks: list[dict[str, Any]]) -> None:
    """A dispatch mode does not see that an op on DTensors gathers them, and no other rank would join in."""
    (said,) = ranks[1]["warned"]["splits"]
    assert "its _softmax on DTensors may need the other ranks, which do not replay it" in said
    assert ranks[0]["warned"]["splits"] == []


def test_a_replay_that_raises_on_one_rank_blocks_no_other(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["warned"]["raises"] == ["step 3 could not be diagnosed: KeyError: 'of a replay'"]
    assert ranks[0]["found"]["raises"] == ranks[0]["warned"]["raises"] == []


def test_a_rank_that_leaves_a_step_out_stalls_the_others_for_a_moment_alone(ranks: list[dict[str, Any]]) -> None:
    said = [text for rank in ranks for text in rank["warned"]["left out"]]
    assert any(text.startswith("batches of this model, which is split over ranks, are not replayed") for text in said)


def test_a_rank_that_leaves_ends_the_replays_of_all(ranks: list[dict[str, Any]]) -> None:
    said = ranks[0]["warned"]["left"][0]
    assert said.startswith("batches of this model, which is split over ranks, are not replayed any more, nor steps")
    assert "rank 1 stopped monitoring" in said
    assert ranks[1]["warned"]["left"] == ranks[0]["found"]["left"] == []


def test_a_model_of_one_process_needs_nothing_gathered() -> None:
    assert can_be_replayed(nn.Linear(1, 1))
    assert not can_be_gathered(nn.Linear(1, 1))
    assert not can_be_gathered(nn.Sequential(nn.SyncBatchNorm(1), nn.Linear(1, 1)))
