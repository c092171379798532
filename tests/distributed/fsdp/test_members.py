"""Members of torch's class that scripts call by name: ours are there, and do the same, in a group of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import castwise
from castwise.distributed.fsdp import sharded_grad_scaler as ours


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_the_group_is_all_ranks_or_the_one_that_was_given() -> None:
    assert castwise.ShardedGradScaler("cpu").process_group is torch.distributed.group.WORLD
    group = torch.distributed.new_group([0])
    assert castwise.ShardedGradScaler("cpu", process_group=group).process_group is group


def test_gradients_are_unscaled_and_the_scale_moved_by_the_names_that_torch_has() -> None:
    scaler = castwise.ShardedGradScaler("cpu", 8.0)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    scaler.scale(weight.sum()).backward()
    found = scaler._unscale_grads_(optimizer, torch.tensor(0.125), torch.zeros(()))
    assert [value.item() for value in found.values()] == [0.0]
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]
    scaler._amp_update_scale_cpu_(torch.ones(()))
    assert scaler._get_scale_async().item() == 4.0  # type: ignore[union-attr]


def test_a_replicator_takes_the_devices_that_torch_shards_on() -> None:
    master = torch.ones(1)
    assert ours._is_supported_device(master)
    assert not ours._is_supported_device(torch.ones(1, device="meta"))
    replicator = ours._GeneralMultiDeviceReplicator(master)
    assert replicator.get(torch.device("cpu")).item() == 1.0
    with pytest.raises(ValueError, match="meta"):
        ours._GeneralMultiDeviceReplicator(torch.ones(1, device="meta"))


def test_a_loss_of_low_precision_stays_in_it() -> None:
    loss = torch.ones(2, dtype=torch.bfloat16)
    assert castwise.ShardedGradScaler("cpu", 8.0).scale(loss).dtype is torch.bfloat16
