"""`Agreement`: ranks in real processes over gloo, that do the same and that do not."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.sharded_grad_scaler  # a default in it is what the world is when it is imported
from tests.amp.agreement_worker import SCHEDULES
from tests.distributed.ranks import run

import castwise
from castwise.amp._agreement import Agreement

WORKER = Path(__file__).parent / "agreement_worker.py"
KINDS = ["foreach", "fused"]


NAMES = ["a load", "a setting", "an update"]
CALLS = ["unscale_", "2", "step", "skip"]
CLIPS = ["no", "2", "inf"]
# By the number of ranks: all of them are met by the same processes.
CASES = {
    2: [
        *(f"several|{kind}|{optimizers}" for kind in KINDS for optimizers in (2, 4, 40)),
        *(
            f"{name}|{kind}"
            for name in ("orders", "lonely_loss", "stages_without_a_loss", "outside", "blame")
            for kind in KINDS
        ),
        *(f"closure|{kind}|{clip}" for kind in KINDS for clip in ("clip", "no")),
        *(f"only_sparse|{fault}" for fault in ("0", "1", "none")),
        *(f"iteration_left_out|{kind}|{where}" for kind in KINDS for where in ("one", "all")),
        *(f"schedule|{kind}|{name}|{clip}" for kind in KINDS for name in SCHEDULES for clip in ("clip", "no")),
        *(f"in_turn|{kind}|{how}" for kind in KINDS for how in ("stepped", "clipped")),
        *(f"changed_after_clipping|{kind}" for kind in KINDS),
        "norms",
        "copied|fused",
    ],
    3: [
        *(f"{name}|{kind}" for name in ("backward_after_clipping", "left_out") for kind in KINDS),
        *(f"difference|fused|{name}|{clip}" for name in NAMES for clip in CLIPS),
        *(f"different_calls|{name}" for name in CALLS),
        *(f"one_clips_by_five|{kind}|{rank}" for kind in KINDS for rank in range(3)),
    ],
    4: ["several|foreach|9", "submesh"],
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank has to say of a case."""
    met = {}
    for world_size, cases in CASES.items():
        met[world_size] = run(WORKER, world_size, tmp_path_factory.mktemp("gloo") / "store", ";".join(cases))
    return lambda case, world_size=2: [of_rank[case] for of_rank in met[world_size]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("optimizers", "collectives"), [(2, [64]), (4, [64]), (40, [64] * 7)])
def test_optimizers_that_are_stepped_together_share_a_collective(
    ranks: Any, kind: str, optimizers: int, collectives: list[int]
) -> None:
    for rank in ranks(f"several|{kind}|{optimizers}"):
        assert rank["before"] == 0
        assert rank["collectives"] == collectives
        assert rank["weights"] == [0.5] + [1.0] * (optimizers - 1)
        assert rank["scale"] == 4.0


def test_flags_of_four_ranks_are_distinguished(ranks: Any) -> None:
    for rank in ranks("several|foreach|9", 4):
        assert rank["collectives"] == [64, 64]
        assert rank["weights"] == [0.5] + [1.0] * 8


@pytest.mark.parametrize("kind", KINDS)
def test_an_iteration_takes_one_collective_whatever_is_done_before_the_step(ranks: Any, kind: str) -> None:
    for rank in ranks(f"orders|{kind}"):
        assert {name: len(collectives) for name, collectives in rank.items()} == dict.fromkeys(rank, 1)
        assert max(nbytes for collectives in rank.values() for nbytes in collectives) <= 64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["stepped", "clipped"])
def test_optimizers_that_are_stepped_in_turn_or_clipped_one_by_one_take_a_collective_each(
    ranks: Any, kind: str, how: str
) -> None:
    assert ranks(f"in_turn|{kind}|{how}") == [[64, 64]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_whose_gradients_change_after_clipping_raises_and_the_others_fail_in_the_next_collective(
    ranks: Any, kind: str
) -> None:
    first, second = ranks(f"changed_after_clipping|{kind}")
    assert first["errors"][0] == ""
    assert "a backward has added to gradients that were already clipped" in second["errors"][0]
    assert first["weights"][0] < 1.0  # it has stepped
    assert second["weights"] == [1.0]
    for rank in (first, second):
        assert "the ranks no longer use their scalers in the same way" in rank["errors"][1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_after_clipping_is_looked_at_by_all_ranks(ranks: Any, kind: str) -> None:
    *others, last = ranks(f"backward_after_clipping|{kind}", 3)
    for rank in others:
        assert rank == {"weights": [1.0], "scale": 4.0, "error": ""}
    assert last == {"weights": [1.0], "scale": 4.0, "error": "the gradients have changed since clip_grad_norm_() m"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_one_rank_alone_scales_changes_nothing(ranks: Any, kind: str) -> None:
    for rank in ranks(f"lonely_loss|{kind}"):
        assert rank == {"weights": [0.5], "collectives": [64]}


@pytest.mark.parametrize("kind", KINDS)
def test_stages_of_a_pipeline_need_no_loss_of_their_own(ranks: Any, kind: str) -> None:
    for rank in ranks(f"stages_without_a_loss|{kind}"):
        assert rank == {"weights": [0.5, 1.0], "scale": 4.0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", ["clip", "no"])
def test_a_closures_loss_that_is_infinite_on_one_rank_skips_the_step_of_all(ranks: Any, kind: str, clip: str) -> None:
    for rank in ranks(f"closure|{kind}|{clip}"):
        assert rank == {"weights": [1.0], "scale": 4.0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", ["clip", "no"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_holds_the_same_scale_on_all_ranks(ranks: Any, kind: str, name: str, clip: str) -> None:
    first, second = ranks(f"schedule|{kind}|{name}|{clip}")
    assert first["scales"] == second["scales"]
    assert first["state"] == second["state"]
    assert first["state"]["steps_taken"] == first["scheduled"] == second["scheduled"] == 8
    # What a schedule wants to know besides takes its own collective.
    assert first["collectives"] == [[64, 64] if name in {"headroom", "hold"} else [64]] * 12
    causes = {3: ("non-finite loss", "another rank"), 5: ("another rank", "overflow")}
    causes |= {6: ("overflow", "another rank"), 7: ("another rank", "non-finite loss")}
    assert [first["causes"], second["causes"]] == [
        [causes[step][rank] if step in causes else None for step in range(12)] for rank in range(2)
    ]
    if name == "hold":  # at step 3 it is rank 0's loss alone that is not finite
        assert first["scales"][2:4] == [16.0, 16.0]
    if name == "headroom":  # rank 1 alone has gradients of 4**11
        assert first["scales"][-1] * 2.0 ** (22 + 2) <= 65504.0


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_to_blame_is_asked_of_no_other_rank(ranks: Any, kind: str) -> None:
    assert ranks(f"blame|{kind}") == [
        {"cause": "another rank", "blamed": []},
        {"cause": "overflow", "blamed": [True]},
    ]


def test_norms_of_any_order_are_those_of_one_process(ranks: Any) -> None:
    expected = [2 ** (1 / p) for p in (100, 20, 100, 5, 4, 3)]
    for rank in ranks("norms"):
        assert rank == pytest.approx(expected, rel=1e-6)


def test_a_mesh_is_reduced_over_all_of_its_dimensions(ranks: Any) -> None:
    for rank in ranks("submesh", 4):
        assert rank == pytest.approx([30**0.5] * 2, rel=1e-6)


def test_a_copy_is_as_good_as_the_original(ranks: Any) -> None:
    assert ranks("copied|fused") == [16.0, 16.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_outside_of_the_group_has_a_scaler_but_no_steps(ranks: Any, kind: str) -> None:
    assert ranks(f"outside|{kind}") == [
        0.0,
        "rank 1 is not in the process group of its scaler: use the scaler only on ranks of the group",
    ]


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_one_rank_leaves_out_are_found_out_by_the_next_collective(ranks: Any, name: str) -> None:
    for rank in ranks(f"different_calls|{name}", 3):
        assert "the ranks no longer use their scalers in the same way" in rank
        assert "ranks [0, 1] report: " in rank
        assert "ranks [2] report: " in rank


@pytest.mark.parametrize("one", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_alone_clips_by_a_norm_of_high_order_is_named(ranks: Any, kind: str, one: int) -> None:
    others = [rank for rank in range(3) if rank != one]
    for rank in ranks(f"one_clips_by_five|{kind}|{one}", 3):
        assert f"ranks [{one}] report: clip_grad_norm_(1.0, 5.0) with " in rank["error"]
        assert f"ranks {others} report: step() with " in rank["error"]
        assert rank["weights"] == [1.0]


@pytest.mark.parametrize("fault", ["0", "1", "none"])
def test_a_rank_may_have_only_sparse_gradients(ranks: Any, fault: str) -> None:
    found = ranks(f"only_sparse|{fault}")
    for rank in found:
        assert rank["moved"] == (fault == "none")
        assert rank["scale"] == (8.0 if fault == "none" else 4.0)
        if fault == "none":
            assert rank["norm"] == pytest.approx(math.sqrt((4 + 4 + 1 + 1 + 8 + 2) / WHOLE))


WHOLE = 2  # a plain gradient counts as a copy that both ranks hold


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_do_not_do_the_same_raise_before_any_has_stepped(ranks: Any, name: str, clip: str) -> None:
    for rank in ranks(f"difference|fused|{name}|{clip}", 3):
        assert "the ranks no longer use their scalers in the same way" in rank["error"]
        assert "ranks [0, 1] report: " in rank["error"]
        assert "ranks [2] report: " in rank["error"]
        assert not rank["stepped"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_iteration_that_one_rank_leaves_out_is_found_out_before_another_step(ranks: Any, kind: str) -> None:
    for rank in ranks(f"iteration_left_out|{kind}|one"):
        assert "ranks [0] report: step() with " in rank["error"]
        assert " after 2 updates (" in rank["error"]
        assert "ranks [1] report: step() with " in rank["error"]
        assert " after 2 updates, 1 of its iterations left out" in rank["error"]
        assert rank["weights"] == [0.0]  # of two steps


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_may_leave_out_an_iteration(ranks: Any, kind: str) -> None:
    assert [rank["error"] for rank in ranks(f"iteration_left_out|{kind}|all")] == ["", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_a_rank_leaves_out_is_found_out(ranks: Any, kind: str) -> None:
    for rank in ranks(f"left_out|{kind}", 3):
        assert "ranks [0, 1] report: step() with " in rank["error"]
        assert " after 0 updates" in rank["error"]
        assert " after 1 updates" in rank["error"]
        assert rank["last"] == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_does_not_come_is_reported_within_the_timeout(kind: str, tmp_path: Path) -> None:
    survivor, _ = (rank[f"hang|{kind}"] for rank in run(WORKER, 2, tmp_path / "store", f"hang|{kind}"))
    assert "rank 0 could not agree with the other ranks of process group" in survivor["error"]
    assert "on whether to take step 1, so it has not stepped" in survivor["error"]
    assert "ranks [0] report: step() with " in survivor["error"]
    assert "; no report within 5 s from ranks [1], which ended, hang or have not noticed it yet. " in survivor["error"]
    assert "imed out" in survivor["error"]
    assert survivor["weights"] == [1.0]


# -- in one process ---------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_a_scaler_with_a_group_can_be_copied_and_says_why_it_cannot_be_pickled(alone: Any) -> None:
    scaler = castwise.ShardedGradScaler("cpu", 8.0, process_group=alone)
    twin = copy.deepcopy(scaler)
    assert twin.process_group is alone
    assert twin.state_dict() == scaler.state_dict()
    with pytest.raises(RuntimeError, match=r"a process group cannot be pickled.*save its state_dict\(\)"):
        pickle.dumps(scaler)
    whole = pickle.loads(pickle.dumps(castwise.ShardedGradScaler("cpu", 8.0)))
    assert whole.process_group is alone


@pytest.mark.parametrize("norm", [0.0, 1e-300, 3.0, 1.7e308, math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_a_norm_of_one_rank_comes_back(alone: Any, norm: float, norm_type: float) -> None:
    total = Agreement(alone, "cpu").norm(torch.tensor(norm, dtype=torch.float64), norm_type, "test")
    assert total.item() == pytest.approx(norm, rel=1e-10, abs=0.0, nan_ok=True)


def test_stages_that_make_no_sense_are_refused(alone: Any) -> None:
    for stages, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="pipeline_stages must be an integer"):
            castwise.GradScaler("cpu", process_group=alone, pipeline_stages=stages)  # type: ignore[arg-type]
    scaler, param = castwise.ShardedGradScaler("cpu", pipeline_stages=2), torch.nn.Parameter(torch.ones(1))
    scaler.scale(param.sum()).backward()
    with pytest.raises(ValueError, match="pipeline_stages must divide the number of ranks, 1, got 2"):
        scaler.step(torch.optim.SGD([param], lr=1.0))
    assert param.grad is not None
    assert (param.item(), param.grad.item()) == (1.0, 65536.0)
