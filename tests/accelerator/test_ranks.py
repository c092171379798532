"""Ranks with tensors on an accelerator take the same steps, and no iteration waits for its own checks.

They meet over gloo, or over NCCL where there are two GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.accelerator.availability import DEVICE
from tests.accelerator.training import CLIPPING, Counted, Training, batches, counted_step
from tests.forked import Python

import castwise
from castwise.schedules import Dynamic, Headroom, Schedule


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes have computed."""
    folder, root = tmp_path_factory.mktemp("ranks"), Path(__file__).parents[2]
    ranks = [Python(["-m", "tests.accelerator.ranks_worker", rank, folder], root) for rank in (0, 1)]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_an_inf_on_one_rank_skips_the_step_on_all(of_ranks: list[dict[str, Any]]) -> None:
    one, other = of_ranks
    assert len(one) == 37
    for case in one.keys() - {"diverged"}:
        assert one[case] == other[case], case
        scales = one[case][1]
        assert "hold" in case or scales[2] <= scales[1]


def test_kinds_of_step_agree(of_ranks: list[dict[str, Any]]) -> None:
    for case, (weights, scales, norms) in [(case, of_ranks[0][case]) for case in of_ranks[0] if case[:5] == "fused"]:
        for kind in ("foreach", "loop"):
            other = of_ranks[0][case.replace("fused", kind)]
            assert other[1] == scales
            assert other[2] == pytest.approx(norms, rel=1e-6, nan_ok=True)
            for mine, its in zip(weights, other[0], strict=True):
                assert its == pytest.approx(mine, rel=1e-6, abs=1e-8)


def test_ranks_that_diverge_raise_on_all_before_any_steps(of_ranks: list[dict[str, Any]]) -> None:
    errors = [of_rank["diverged"] for of_rank in of_ranks]
    assert errors[0] == errors[1]
    assert errors[0].startswith("[-1.0, -1.0, -1.0] the ranks no longer use their scalers in the same way")


@pytest.mark.usefixtures("fake_ranks")
@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize(
    "schedule",
    [Dynamic(2.0**10), Dynamic(2.0**10, on_nonfinite_loss="hold"), Headroom()],
    ids=["default", "hold", "headroom"],
)
def test_a_fused_iteration_waits_only_for_earlier_collectives(schedule: Schedule, clipping: str) -> None:
    class Sharded(Training):
        def __init__(self) -> None:
            super().__init__(castwise, "fused", clipping)
            self.scaler = castwise.ShardedGradScaler(DEVICE, schedule=schedule)

    counted = counted_step(Sharded(), warm=6)
    assert set(counted.waits) <= {"event"}, counted.lines


@pytest.mark.usefixtures("fake_ranks")
def test_norms_that_take_two_collectives_do_not_wait_for_the_first() -> None:
    training = Training(castwise, "fused")
    training.scaler = castwise.ShardedGradScaler(DEVICE)
    for batch in batches(1):
        training.backward(batch)
        with Counted() as counted:
            training.scaler.clip_grad_norm_(training.optimizer, 0.1, 5.0)
            training.scaler.step(training.optimizer)
            training.scaler.update()
        assert counted.waits == {}, counted.lines
