"""Lightning's Trainer and Fabric with castwise's plugins on two real processes: DDP, FSDP1 and FSDP2."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tests.distributed.ranks import run

import castwise

Ranks = list[dict[str, Any]]

PRECISIONS = ["16-mixed", "bf16-mixed"]
CLIPPING = pytest.mark.parametrize("max_norm", [None, 0.1], ids=["plain", "clipped"])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")
    done = run(Path(__file__).with_name("lightning_worker.py"), 2, folder / "store", str(folder), frameworks=True)
    for place, rank in enumerate(done):
        rank["report"] = (folder / f"rank {place}" / "report.html").is_file()
    return done


def assert_same_weights(ranks: Ranks, one: str, other: str, rtol: float = 0.0) -> None:
    for rank in ranks:
        assert rank[one]["weights"] == pytest.approx(rank[other]["weights"], rel=rtol, abs=0.0)


def test_ddp_is_lightnings_bit_for_bit(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["ddp, ours"] == rank["ddp, theirs"] == ranks[0]["ddp, ours"]
        assert any(rank["ddp, ours"]["moved"])
        assert rank["ddp, policy"]["dtype"] == "torch.float32"


def test_the_first_rank_writes_the_report(ranks: Ranks) -> None:
    assert [rank["report"] for rank in ranks] == [True, False]
    assert [rank["ddp, complaints"] for rank in ranks] == [[], []]


@CLIPPING
@pytest.mark.parametrize("precision", PRECISIONS)
def test_fsdp_is_torchs(precision: str, max_norm: float | None, ranks: Ranks) -> None:
    name = f"fsdp, {precision}, {max_norm}"
    # With a scaler the norm is the scaler's, which is rounded once.
    rtol = 1e-6 if max_norm and precision == "16-mixed" else 0.0
    assert_same_weights(ranks, f"{name}, ours", f"{name}, by hand", rtol)
    assert all(ranks[0][f"{name}, ours"]["moved"])


@CLIPPING
@pytest.mark.parametrize("precision", PRECISIONS)
def test_fsdp2_is_ddp(precision: str, max_norm: float | None, ranks: Ranks) -> None:
    name = f"fsdp2, {precision}, {max_norm}"
    assert_same_weights(ranks, f"{name}, ours", f"{name}, ddp", 1e-6 if max_norm else 0.0)
    assert all(ranks[0][f"{name}, ours"]["moved"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_an_inf_on_one_rank_skips_a_fused_step_on_all(strategy: str, ranks: Ranks) -> None:
    for rank in ranks:
        assert rank[f"{strategy}, spoilt"]["moved"] == [True, True, False, True, True, True]
        assert rank[f"{strategy}, spoilt"]["scale"] == 2.0**7


def test_a_model_that_is_split_has_a_scaler_whose_ranks_agree(ranks: Ranks) -> None:
    scalers = {
        name: [rank[f"{name}, default"]["scaler"] for rank in ranks] for name in ("ddp", "fsdp", "fsdp2", "fabric")
    }
    assert scalers == {
        "ddp": ["GradScaler"] * 2,
        "fsdp": ["ShardedGradScaler"] * 2,
        "fsdp2": ["ShardedGradScaler"] * 2,
        "fabric": ["ShardedGradScaler"] * 2,
    }


@pytest.mark.parametrize("name", ["fsdp2", "fabric"])
def test_ranks_that_could_disagree_are_refused(name: str, ranks: Ranks) -> None:
    for rank in ranks:
        assert "pass scaler=castwise.ShardedGradScaler('cpu') to the plugin" in rank[f"{name}, refused"]


def test_with_fsdp_around_parts_a_scaler_clips_to_the_norm_of_all(ranks: Ranks) -> None:
    assert math.hypot(*(rank["fsdp, norm of parts"] for rank in ranks)) == pytest.approx(0.1, rel=1e-4)
    for rank in ranks:
        assert (
            "schedule=castwise.schedules.Guard()) to the plugin, which clips partly wrapped models too"
            in rank["fsdp, parts"]
        )


def test_a_resumed_training_with_fsdp_continues_bit_for_bit(ranks: Ranks) -> None:
    assert_same_weights(ranks, "fsdp, resumed", "fsdp, at once")
    for rank in ranks:
        assert rank["fsdp, resumed"]["scale"] == rank["fsdp, at once"]["scale"]
        # Also where Lightning's own plugin for FSDP looks for it.
        assert rank["fsdp, saved"][0] == rank["fsdp, saved"][1]


def test_lightnings_own_plugin_for_fsdp_takes_no_scaler_and_does_not_clip() -> None:
    with pytest.raises(ValueError, match="does not use a scaler"):
        FSDPPrecision("16-mixed", castwise.ShardedGradScaler("cpu"))
    with pytest.raises(MisconfigurationException, match="not supported for `FSDPPrecision`"):
        FSDPPrecision("bf16-mixed").clip_grad_by_norm()
    with pytest.raises(ValueError, match="requires a GPU"):
        pl.Trainer(accelerator="cpu", strategy="fsdp")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_fabric_clips_in_one_read_to_the_norm_over_all_ranks(strategy: str, ranks: Ranks) -> None:
    assert_same_weights(ranks, f"fabric, {strategy}, False", f"fabric, {strategy}, True", rtol=1e-6)
