"""`ShardedGradScaler` in real processes over gloo: models split in every way train as they do in one process."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.ranks import run
from tests.thorough import THOROUGH
from torch.distributed import checkpoint

import castwise
from castwise.amp._agreement import Agreement

WORKER = Path(__file__).parent / "worker.py"
SPLITS = [
    "DDP",
    "FSDP1",
    "FSDP1 with original parameters",
    "FSDP2",
    "TP",
    "replicated and sharded",
    "partial sums",
    "replicated, sharded and plain",
]
KINDS = ["for-loop", "foreach", "fused"]
CLIPS = ["no clip", "clip"]
FAULTS = ["none", "NaN loss of rank 0", "inf in a gradient of rank 0", "inf in a gradient of the last rank"]
SPLITS_OF_FOUR = ["FSDP2 x TP", "HSDP", "FSDP1 HSDP", "FSDP2", "DDP"]


def cases_of(splits: list[str]) -> list[tuple[str, str, str, str]]:
    """Return the cases that are run, as in worker.py."""

    def is_run(split: str, kind: str, clip: str, fault: str) -> bool:
        if split == "replicated, sharded and plain":  # torch's foreach and fused optimizers refuse that
            is_own_path = kind == "for-loop"
        else:
            is_own_path = kind != "for-loop" or split in ("DDP", "FSDP2")
        number = KINDS.index(kind) + CLIPS.index(clip) + FAULTS.index(fault) + split.startswith("FSDP2")
        return is_own_path and (THOROUGH or number % 2 == 0)

    return [case for case in itertools.product(splits, KINDS, CLIPS, FAULTS) if is_run(*case)]


CASES, CASES_OF_FOUR = cases_of(SPLITS), cases_of(SPLITS_OF_FOUR)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What became of every case, on each of two ranks."""
    return run(WORKER, 2, tmp_path_factory.mktemp("gloo") / "store", "matrix castwise torch")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(WORKER, 4, tmp_path_factory.mktemp("gloo") / "store", "matrix castwise")


def differences(ranks: list[dict[str, Any]], library: str, case: tuple[str, str, str, str]) -> list[str]:
    """Say where a case differs from the same training in one process, or between ranks."""
    alone = ranks[0][" | ".join(["alone", *case[1:]])]
    found = []
    for rank, results in enumerate(ranks):
        got = results[" | ".join([library, *case])]
        if isinstance(got, str):
            found.append(f"rank {rank}: {got}")
            continue
        if (got["scales"], got["tracker"]) != (alone["scales"], alone["tracker"]):
            found.append(f"rank {rank}: scales {got['scales']}, alone {alone['scales']}")
        if got["weights"] != pytest.approx(alone["weights"], rel=1e-5, abs=1e-6):
            found.append(f"rank {rank}: weights")
        pairs = zip(got["norms"], alone["norms"], strict=True)
        if any(theirs == theirs and ours != pytest.approx(theirs, rel=1e-6) for ours, theirs in pairs):
            found.append(f"rank {rank}: norms {got['norms']}, alone {alone['norms']}")
    return found


@pytest.mark.parametrize("case", CASES, ids=" | ".join)
def test_every_way_of_splitting_a_model_trains_as_in_one_process(
    ranks: list[dict[str, Any]], case: tuple[str, str, str, str]
) -> None:
    assert differences(ranks, "castwise", case) == []


@pytest.mark.parametrize("case", CASES_OF_FOUR, ids=" | ".join)
def test_meshes_of_two_dimensions_train_as_one_process(
    four_ranks: list[dict[str, Any]], case: tuple[str, str, str, str]
) -> None:
    assert differences(four_ranks, "castwise", case) == []


@pytest.mark.parametrize("clip", CLIPS)
def test_a_step_takes_one_collective_of_64_bytes(
    ranks: list[dict[str, Any]], four_ranks: list[dict[str, Any]], clip: str
) -> None:
    for results, cases in ((ranks, CASES), (four_ranks, CASES_OF_FOUR)):
        for case in cases:
            if case[2] != clip:
                continue
            for of_rank in results:
                collectives = of_rank[" | ".join(["castwise", *case])]["collectives"]
                if case[0] == "partial sums":  # they have to be taken
                    collectives = [(name, nbytes) for name, nbytes in collectives if name == "allreduce_"]
                assert [name for name, _ in collectives] == ["allreduce_"], case
                assert all(nbytes == 64 for _, nbytes in collectives)


@pytest.mark.parametrize("world_size", [2, 4])
def test_stages_of_a_pipeline_train_as_in_one_process(world_size: int, tmp_path: Path) -> None:
    skipped, finite = [1024.0, 2048.0, 1024.0, 1024.0], [1024.0, 2048.0, 2048.0, 4096.0]
    for rank, cases in enumerate(run(WORKER, world_size, tmp_path / "store", "pipeline")):
        assert len(cases) == 30
        for case, result in cases.items():
            split, alone = result["split"], result["alone"]
            assert split["scales"] == alone["scales"], case
            assert split["scales"] == (finite if case.endswith(("none", "no gradients of rank 0")) else skipped), case
            assert split["norms"] == pytest.approx(alone["norms"], rel=1e-6, nan_ok=True), case
            assert split["weights"][str(rank)] == pytest.approx(alone["weights"][str(rank)], rel=1e-5), case


@pytest.mark.parametrize("kind", KINDS)
def test_when_a_rank_dies_the_others_raise_and_have_not_stepped(kind: str, tmp_path: Path) -> None:
    survivor, dead = run(WORKER, 2, tmp_path / "store", f"death {kind}")
    assert dead is None
    assert "rank 0 could not agree with the other ranks of process group" in survivor["error"]
    assert "on whether to take step 1, so it has not stepped" in survivor["error"]
    assert "ranks [0] report: step() with " in survivor["error"]
    assert "; no report within 5 s from ranks [1], which ended, hang or have not noticed it yet. " in survivor["error"]
    assert not survivor["stepped"]


def test_fifty_random_steps_are_those_of_torchs_class_where_it_is_right(tmp_path: Path) -> None:
    for rank in run(WORKER, 2, tmp_path / "store", "lockstep"):
        assert {case: result["difference"] for case, result in rank.items()} == dict.fromkeys(rank)
        assert all(result["skipped"] > 7 for result in rank.values())


def test_a_run_killed_at_any_moment_of_a_step_resumes_to_the_same_bits(tmp_path: Path) -> None:
    undisturbed, _ = run(WORKER, 2, tmp_path / "store", f"resumable {tmp_path / 'undisturbed'} never")
    assert (undisturbed["scaler"]["scale"], undisturbed["scaler"]["_growth_tracker"]) == (1024.0, 1)
    for moment in ("before", "inside", "after"):  # of a step each, and each continues from where the last one has ended
        survivor, dead = run(WORKER, 2, tmp_path / f"store {moment}", f"resumable {tmp_path / 'killed'} {moment}")
        assert dead is None
        assert isinstance(survivor, str)  # an error
    for rank in run(WORKER, 2, tmp_path / "store of the last", f"resumable {tmp_path / 'killed'} never"):
        assert rank["begin"] == 4
        assert rank["scaler"] == undisturbed["scaler"]
        assert rank["bits"] == undisturbed["bits"]
    for rank in run(WORKER, 4, tmp_path / "store of four", f"resumable {tmp_path / 'undisturbed'} never"):
        assert (rank["begin"], rank["loaded"]) == (5, undisturbed["scaler"])


def test_the_faults_are_met(ranks: list[dict[str, Any]]) -> None:
    for case in cases_of(["FSDP2"]):
        scales = ranks[0][" | ".join(["castwise", *case])]["scales"]
        assert scales == [1024.0, 2048.0, 2048.0, 4096.0] if case[3] == "none" else [1024.0, 2048.0, 1024.0, 1024.0]


def test_torchs_own_class_lets_ranks_disagree(ranks: list[dict[str, Any]]) -> None:
    wrong = [case for case in CASES if differences(ranks, "torch", case)]
    fused_with_a_fault_on_one_rank = [
        (split, "fused", "no clip", "inf in a gradient of rank 0") for split in ("DDP", "FSDP1")
    ]
    assert set(fused_with_a_fault_on_one_rank) <= set(wrong)
    assert len(wrong) / len(CASES) > 30 / 136
    agrees = ("FSDP2", "foreach", "no clip", "inf in a gradient of rank 0")
    assert agrees in set(CASES) - set(wrong)


# -- without other ranks ----------------------------------------------------------------------------------------------


def test_instances_and_arguments_are_torchs() -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Torchs

    scaler = castwise.ShardedGradScaler("cpu", 8.0, 0.25, 3.0, 7)
    assert isinstance(scaler, Torchs)
    assert isinstance(scaler, castwise.GradScaler)
    assert scaler.state_dict() == {
        "scale": 8.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 0,
        "steps_taken": 0,
        "steps_skipped": 0,
        "skips_in_a_row": 0,
    }
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (castwise.ShardedGradScaler, Torchs))
    assert list(ours) == [*theirs, "schedule", "pipeline_stages"]
    assert all(ours[name].default == theirs[name].default for name in theirs)
    members = {name for name, value in vars(Torchs).items() if inspect.isroutine(value)}
    for name in members:
        assert inspect.getattr_static(castwise.ShardedGradScaler, name).__module__.startswith("castwise."), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_scaled_losses_keep_their_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    scaler = castwise.ShardedGradScaler("cpu", init_scale=4.0)
    loss = torch.ones(shape, dtype=dtype)
    for scaled in (scaler.scale(loss), scaler.scale([loss])[0]):
        assert scaled.dtype is dtype
        assert torch.equal(scaled, loss * 4.0)


def test_without_a_process_group_a_step_says_what_to_call_and_changes_nothing() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    for fused in (False, True):
        optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
        for make in (castwise.ShardedGradScaler, lambda device: castwise.GradScaler(device, process_group=None)):
            scaler = make("cpu")
            scaler.scale(torch.ones(()))
            param.grad = torch.full((2,), 65536.0)
            if isinstance(scaler, castwise.ShardedGradScaler):
                with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) first"):
                    scaler.step(optimizer)
                assert param.grad.tolist() == [65536.0, 65536.0]
    assert param.tolist() == [1.0, 1.0]


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(TypeError, match="process_group must be a ProcessGroup or a DeviceMesh, got str"):
        castwise.GradScaler("cpu", process_group="WORLD")  # type: ignore[arg-type]
    assert Agreement(None, "cpu").ranks is None


def test_a_scaler_is_saved_and_loaded_by_distributed_checkpoints(tmp_path: Path) -> None:
    saved = castwise.ShardedGradScaler("cpu", 8.0, 0.25, 3.0, 7)
    checkpoint.save({"scaler": saved}, checkpoint_id=tmp_path)
    loaded = castwise.GradScaler("cpu")
    checkpoint.load({"scaler": loaded}, checkpoint_id=tmp_path)
    assert loaded.state_dict() == saved.state_dict()
    assert loaded.get_scale() == 8.0


def test_a_torch_without_distributed_can_import_castwise_and_says_what_is_missing() -> None:
    code = """
import torch
torch.distributed.is_available = lambda: False
import castwise
castwise.GradScaler("cpu")
for use in (lambda: castwise.ShardedGradScaler, lambda: castwise.GradScaler("cpu", process_group=3)):
    try:
        use()
    except (ImportError, RuntimeError) as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        "ShardedGradScaler needs a build of torch that has torch.distributed",
        "this build of torch has no torch.distributed, so there are no ranks to agree with",
    ]
