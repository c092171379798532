"""What a rank holds of distributed tensors: in a fake group, where collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import castwise
from castwise.amp import _sharded_gradients as shards

RANKS = 6


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Rank 0 of a mesh of 2 x 3."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (2, 3))
    torch.distributed.destroy_process_group()


def local(copies: int, *params: torch.Tensor) -> tuple[list[torch.Tensor], list[float]]:
    return shards.local(list(params), [param.grad for param in params], RANKS, copies)


def of_ones(
    mesh: DeviceMesh, placements: list[Placement], grad_placements: list[Placement] | None = None
) -> torch.Tensor:
    param = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, placements, run_check=False))
    param.grad = DTensor.from_local(torch.ones(2, 2), mesh, grad_placements or placements, run_check=False)
    return param


@pytest.mark.parametrize(
    ("placements", "share"),
    [
        ([Replicate(), Replicate()], 1 / 6),
        ([Shard(0), Replicate()], 2 / 6),
        ([Replicate(), Shard(1)], 3 / 6),
        ([Shard(0), Shard(1)], 1.0),
    ],
)
def test_a_rank_counts_its_share_of_what_several_hold(
    mesh: DeviceMesh, placements: list[Placement], share: float
) -> None:
    param = of_ones(mesh, placements)
    tensors, shares = local(1, param)
    assert shares == [share]
    (tensor,) = tensors
    assert type(tensor) is torch.Tensor
    assert isinstance(param.grad, DTensor)
    assert tensor.data_ptr() == param.grad.to_local().data_ptr()


def test_a_partial_sum_is_summed_first_also_in_grad(mesh: DeviceMesh) -> None:
    param = of_ones(mesh, [Replicate(), Shard(0)], [Partial(), Shard(0)])
    tensors, shares = local(1, param)
    assert isinstance(param.grad, DTensor)
    assert param.grad.placements == (Replicate(), Shard(0))
    assert shares == [3 / 6]
    assert tensors[0].data_ptr() == param.grad.to_local().data_ptr()


def test_plain_gradients_are_the_same_on_all_ranks_beside_distributed_ones_and_alone(mesh: DeviceMesh) -> None:
    plain = torch.nn.Parameter(torch.ones(3))
    plain.grad = torch.ones(3)
    alone, share = local(2, plain)
    beside, shares = local(2, plain, of_ones(mesh, [Shard(0), Shard(1)]))
    assert share == [1 / 6]
    assert shares == [1 / 6, 1.0]
    assert beside[0] is alone[0] is plain.grad


def test_what_fsdp_has_flattened_is_held_by_as_many_as_hold_copies(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    flattened = torch.nn.Parameter(torch.ones(3))
    flattened.grad = torch.ones(3)
    monkeypatch.setattr(shards, "is_fsdp_flattened", lambda param: param is flattened)
    assert local(1, flattened)[1] == [1.0]  # also if every rank holds all of it, as with NO_SHARD
    assert local(2, flattened)[1] == [1 / 2]
    assert local(2, flattened, of_ones(mesh, [Shard(0), Shard(1)]))[1] == [1 / 2, 1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_gradients_are_clipped_whatever_their_dtype(mesh: DeviceMesh, dtype: torch.dtype, norm_type: float) -> None:
    def made(value: float) -> DTensor:
        return DTensor.from_local(torch.full((2, 2), value, dtype=dtype), mesh, [Replicate()] * 2, run_check=False)

    params = [torch.nn.Parameter(made(1.0)) for _ in range(2)]
    optimizer, scaler = (
        torch.optim.SGD(params, lr=1.0),
        castwise.GradScaler("cpu", init_scale=4.0, allow_fp16_gradients=True),
    )
    scaler.scale(torch.ones(()))
    for param in params:
        param.grad = made(12.0)
    norm = scaler.clip_grad_norm_(optimizer, 1.0, norm_type=norm_type)
    assert norm.item() == pytest.approx(72.0**0.5 if norm_type == 2.0 else 3.0)
