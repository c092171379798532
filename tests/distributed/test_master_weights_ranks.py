"""`MasterWeights` in two real processes: DDP, FSDP1, FSDP2, tensor parallel, and checkpoints that are resharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.ranks import run


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run(Path(__file__).with_name("master_weights_worker.py"), 2, folder / "store", str(folder))


@pytest.mark.parametrize("how", ["DDP", "FSDP2", "FSDP2 of 16-bit weights", "tensor parallel"])
def test_residues_are_fp32_weights_on_each_rank(how: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        runs = rank["runs"][how]
        assert runs["split"] == runs["fp32"]
        assert runs["split"]["dtypes"] == ["torch.bfloat16"]
    assert ranks[0]["runs"][how]["split"]["weights"] == ranks[1]["runs"][how]["split"]["weights"]


@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
def test_clipping_by_parameters_is_that_of_fp32_gradients_on_each_rank(how: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        runs = rank["clipped"][how]
        assert runs["split"] == runs["fp32"]
        assert min(runs["split"]["norms"]) > 0.05
    assert ranks[0]["clipped"][how] == ranks[1]["clipped"][how]


def test_sums_over_ranks_and_micro_batches_are_those_of_fp32_weights(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["summed"]["compensated"] == rank["summed"]["fp32"]
        assert rank["summed"]["in bf16"] != rank["summed"]["fp32"]
    assert ranks[0]["summed"] == ranks[1]["summed"]


def test_sharded_and_replicated_runs_are_the_same_run(ranks: list[dict[str, Any]]) -> None:
    runs = ranks[0]["runs"]
    for name, values in runs["DDP"]["split"]["weights"].items():
        assert runs["FSDP2"]["split"]["weights"][name] == pytest.approx(values, rel=2e-2, abs=2e-3)


def test_flattened_parameters_are_stepped_by_element(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["fsdp1"]["split"] == rank["fsdp1"]["fp32"]


def test_what_cannot_be_narrowed_is_named(ranks: list[dict[str, Any]]) -> None:
    unit, below_ddp, flattened, shaped, in_fp32 = ranks[0]["errors"]
    assert unit == (
        "FSDP2 gathers the weights of the model in one dtype, and '1.weight', '1.bias' would stay in fp32 beside "
        'torch.bfloat16 ones: put these in a separate unit (fully_shard), or use narrow="all"'
    )
    assert below_ddp.startswith("'module.0.weight' is in DistributedDataParallel, whose buckets are for fp32")
    assert "is flattened by FSDP1 in torch.float32: make the model torch.bfloat16 before wrapping it" in flattened
    assert "is flattened by FSDP1, which works only with optimizers that step each element independently" in shaped
    if hasattr(torch.Tensor, "grad_dtype"):
        assert in_fp32.startswith("'0.weight' is a DTensor, whose gradients torch keeps in its own dtype: omit grad_")


def test_checkpoints_are_resharded_without_losing_a_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["resharded"]["same"]
        uninterrupted, resumed = rank["resharded"]["losses"]
        assert resumed == uninterrupted


def test_a_model_of_another_step_is_noticed_on_each_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        same, other = rank["other step"]["FSDP2"]
        assert same == []
        assert other == ["6 weights were written"]
        same, other = rank["other step"]["tensor parallel"]
        assert same == []
        assert other == ["5 weights were written"]  # no rank has rows of the weight that is sharded by columns
