"""Trains models under FSDP2 and tensor parallelism on two ranks, with and without a monitor, and prints what it found.

Run by `test_sharded_model_ranks.py`, once for each rank: `python joint_worker.py RANK WORLD_SIZE FILE`.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from tests.distributed.ranks import join
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from castwise._invariants.spike import NoReplays
from castwise.diagnosis._loss_graph import is_freed
from castwise.diagnosis._replay import is_replaying
from castwise.monitor import Monitor, _checked_steps, _exchange, _monitor, _sharded_model_ranks
from castwise.monitor._gathered_weights import can_be_gathered
from castwise.monitor._step_sources import OptimizerSource

STEPS = 6


class Block(nn.Module):
    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.linear, self.checkpoints = nn.Linear(8, 8), checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed = checkpoint(self.linear, x, use_reentrant=False) if self.checkpoints else self.linear(x)
        return x + changed.relu()


class Net(nn.Module):
    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(checkpoints=checkpoints) for _ in range(3)))
        self.last, self.raises, self.is_slow, self.sums = nn.Linear(8, 4), False, False, False
        self.reads, self.mesh = False, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises and is_replaying():
            raise KeyError("of a replay")
        if self.is_slow and is_replaying():
            time.sleep(0.7 * _exchange.LIMIT)
        hidden = self.blocks(x)
        assert not self.reads or self.last.weight.kind == "last"
        if self.mesh is not None:
            DTensor.from_local(hidden.detach(), self.mesh, [Shard(0)], run_check=False).softmax(0)  # gathers it first
        if self.sums:
            dist.all_reduce(hidden.detach().clone())
        return self.last(hidden / hidden.norm(dim=-1, keepdim=True))


def made(how: str) -> Any:
    torch.manual_seed(0)
    net: Any = Net(checkpoints=how == "checkpointed")
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    if how == "tensor parallel by Transformers":
        parts = {f"last.{part}": "colwise_gather_output" for part in ("weight", "bias")}
        apply_tensor_parallelism(net, mesh["tensor"], {"last": "colwise_gather_output", **parts})
    elif "tensor parallel" in how:
        plan = {"blocks.*.linear": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(net, mesh["tensor"], {**plan, "last": RowwiseParallel(input_layouts=Replicate())})
    if how.startswith("tensor parallel"):
        return net
    dtype = torch.float16 if how == "too large" else torch.bfloat16
    low = {} if how == "fp32" else {"param_dtype": dtype, "reduce_dtype": torch.float32}
    if "tensor parallel" in how:
        return fully_shard(net, mesh=mesh["data"], mp_policy=MixedPrecisionPolicy(**low, output_dtype=torch.float32))
    for block in net.blocks:
        fully_shard(block, reshard_after_forward=how != "kept", mp_policy=MixedPrecisionPolicy(**low))
    return fully_shard(net, mp_policy=MixedPrecisionPolicy(**low, output_dtype=torch.float32))


def train(how: str, rank: int, records: list[dict[str, Any]] | None, fault: str, **options: Any) -> list[float]:
    """Train, and return the weights. The fault is in step 3, on rank 1; "pending" in the last."""
    net, world = made(how), dist.get_world_size()
    net.sums = how == "tensor parallel, sums"
    net.reads = how == "tensor parallel"
    net.last.weight.kind = "last"
    net.mesh = init_device_mesh("cpu", (world,)) if how == "splits" else None
    net.raises, net.is_slow = how == "raises" and rank == 1, how == "slow" and rank == 1
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    if how == "validated":  # after which the root has all its weights
        with torch.no_grad():
            net(torch.ones(1, 8))
    has_own_data = "tensor parallel" not in how
    generator = torch.Generator().manual_seed(rank if has_own_data else 0)
    watch = contextlib.nullcontext()
    if records is not None:
        watch = Monitor(net, optimizer, sinks=[records.append], on_nonfinite="diagnose", **options)
    with watch as monitor:
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            for part in range(2 if how == "accumulated" else 1):
                if how == "accumulated":
                    net.set_requires_gradient_sync(part == 1)
                x = torch.randn(5, 8, generator=generator)
                is_on_rank = rank == world - 1 or not has_own_data
                is_at_fault = step == (STEPS if how == "pending" else 3) and is_on_rank and part == 0
                if is_at_fault and fault == "sample":
                    x[2, 4] = math.inf
                if is_at_fault and fault == "weight":
                    net.last.weight.to_local().detach()[0, 0] = 1e5  # finite, and inf where it is gathered in fp16
                loss = net(x).square().mean()
                if is_at_fault and fault == "loss":
                    loss = loss + torch.tensor(math.nan)  # and its gradients are finite
                loss.backward()
            if monitor is not None and how == "left" and step == 2 and rank == 1:
                monitor.detach()
            if not (how == "left out" and step == 2 and rank == 1):
                optimizer.step()
    whole = [param.full_tensor() if isinstance(param, DTensor) else param for param in net.parameters()]
    return [value for param in whole for value in param.detach().flatten().tolist()]


def main() -> None:
    rank, world, _ = join(sys.argv)
    out: dict[str, Any] = {"same": {}, "found": {}, "warned": {}}

    def compare(how: str, fault: str, **options: Any) -> None:
        records: list[dict[str, Any]] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watched, plain = (json.dumps(train(how, rank, each, fault, **options)) for each in (records, None))
        out["same"][how] = watched == plain
        out["found"][how] = [record for record in records if record["kind"] == "diagnosis"]
        out["warned"][how] = [str(each.message) for each in caught if each.category is RuntimeWarning]

    compare("too large", "weight")
    if world == 1:
        gathered = torch.ones(2)
        split = DTensor.from_local(gathered, init_device_mesh("cpu", (1,)), [Replicate()])
        out["freed"] = [is_freed(split)]
        gathered.untyped_storage().resize_(0)
        out["freed"].append(is_freed(split))
        net = made("fp32")
        out["repeats losses"] = [
            not isinstance(
                Monitor(model, torch.optim.SGD(model.parameters(), 0.1), spikes=True)._make_replays(), NoReplays
            )
            for model in (net, nn.Linear(1, 1))
        ]
        print(json.dumps(out), flush=True)
        dist.destroy_process_group()
        return
    for how in ("fp32", "bf16", "kept", "accumulated", "checkpointed", "raises", "left", "splits"):
        compare(how, "loss")
    compare("sample", "sample")
    compare("validated", "sample")
    compare("tensor parallel", "sample")
    compare("tensor parallel by Transformers", "sample")
    compare("tensor parallel, sums", "sample")
    compare("fully_shard of tensor parallel", "sample")
    _sharded_model_ranks._LIMIT_OF_STEP = 2.0
    compare("left out", "sample")
    _sharded_model_ranks._LIMIT_OF_STEP = 60.0
    _exchange.LIMIT = 1.5
    compare("slow", "sample")
    _exchange.LIMIT = 10.0
    for module in (_checked_steps, _monitor):
        module.device_of = lambda _: torch.device("cuda")  # type: ignore[attr-defined]  # as if a check were late
    compare("late", "sample", snapshots=True)
    tell: Any = OptimizerSource._tell
    OptimizerSource._tell = lambda self, but: tell(self, 2)  # type: ignore[method-assign]  # as on an accelerator
    OptimizerSource.synchronize = lambda self: tell(self, 0)  # type: ignore[method-assign]
    compare("pending", "sample", snapshots=True)
    net = made("fp32")
    out["gathered"] = [can_be_gathered(net)]
    register_fsdp_forward_method(net.blocks[0], "forward")
    out["gathered"].append(can_be_gathered(net))
    print(json.dumps(out), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
