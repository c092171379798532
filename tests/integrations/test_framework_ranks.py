"""Clipping and sums of `MasterWeights` in frameworks on two real processes, with DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.distributed.ranks import run


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    for name in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("ranks")
    return run(Path(__file__).with_name("frameworks_worker.py"), 2, folder / "store", str(folder), frameworks=True)


@pytest.mark.parametrize("guarded", [False, True], ids=["no scaler", "scaler"])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
@pytest.mark.parametrize("framework", ["Accelerate", "Lightning", "Fabric"])
def test_losses_norms_and_weights_are_those_of_fp32_weights_on_each_rank(
    framework: str, kind: str, guarded: bool, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        (numbers, weights), (ours, same) = (rank[f"{framework}, {kind}, {guarded}"][str(it)] for it in (False, True))
        if (framework, kind, guarded) == ("Fabric", "FSDP2", True):  # the scaler adds squares in another order
            assert losses_and_norms(ours) == pytest.approx(losses_and_norms(numbers), rel=1e-6)
        else:
            assert ours == numbers
            assert same == weights
        if framework == "Fabric":
            assert ours[1][0] == ("DTensor" if kind == "FSDP2" else "Tensor")  # as torch's function returns it


def losses_and_norms(numbers: list[Any]) -> list[float]:
    return [number[1] if isinstance(number, list) else number for number in numbers]


@pytest.mark.parametrize("how", ["prepare", "the callback"])
def test_the_trainer_clips_and_sums_over_micro_batches_and_ranks_as_with_fp32_weights(
    how: str, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        results = rank[f"Trainer, {how}"]
        assert results["True"] == results["False"]
        assert max(norm for _, norm in results["False"][0]) > 1.0
    assert ranks[0][f"Trainer, {how}"] == ranks[1][f"Trainer, {how}"]
