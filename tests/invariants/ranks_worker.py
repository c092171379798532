"""Two ranks that train one model after the other, under a monitor; prints what each run breaks, by its name, as JSON.

With an argument, runs only those of this name.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import castwise
from castwise.monitor._run_files import read_runs

STEPS = 31  # so that what is broken at the second check, step 20, is read at 25 and reported at 30


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


@contextlib.contextmanager
def monitored(model: nn.Module, optimizer: Any, **options: Any) -> Iterator[list[dict[str, Any]]]:
    records: list[dict[str, Any]] = []
    options = {"invariants": True, "every": 1000} | options
    with castwise.Monitor(model, optimizer, sinks=[records.append], **options):
        yield records


def wrapped() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    of_rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + of_rank))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
    after: Callable[[int], object] = lambda step: None,
    of_rank: int | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    with monitored(model, optimizer, **options) as records:
        for step in range(1, STEPS + 1):
            (forward or model)(batch(step, of_rank)).square().mean().backward()
            optimizer.step()
            after(step)
            optimizer.zero_grad()
            dist.barrier()  # as where losses are averaged
    return records


def bypassed() -> list[dict[str, Any]]:
    model, optimizer = wrapped()
    # Rank 0 waits for none, and would report before the last has written. So here the others compare at step 15 what it
    # has written at step 10, and then it reads at its step 15 what they have written.
    waits_after = (9, 14) if dist.get_rank() == 0 else (14, 15)
    return train(model, optimizer, model.module, lambda step: dist.barrier() if step in waits_after else None)


def without_the_last_sync() -> list[dict[str, Any]]:
    model, optimizer = wrapped()
    with monitored(model, optimizer) as records:
        for step in range(1, STEPS + 1):
            model(batch(step)).square().mean().backward()
            with model.no_sync():
                model(batch(1000 + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return records


def spiking(*, is_exchanged: bool) -> list[dict[str, Any]]:
    model, optimizer = wrapped()
    net = model.module

    def forward(x: torch.Tensor) -> torch.Tensor:
        if is_exchanged:
            dist.all_reduce(torch.ones(1))
        return Net.forward(net, x)

    net.forward = forward  # type: ignore[method-assign]
    with monitored(model, optimizer, spikes=True) as records:
        for step in range(1, 45):
            x = batch(step) * (30.0 if step == 42 and not dist.get_rank() else 1.0)
            (model(x).square().mean() + 0.1).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [record for record in records if record.get("name") == "loss-spike"]


def spike_on_one_rank() -> list[dict[str, Any]]:
    return spiking(is_exchanged=False)


def spike_of_a_forward_with_a_collective() -> list[dict[str, Any]]:
    return spiking(is_exchanged=True)


def written_on_one_rank() -> list[dict[str, Any]]:
    model, optimizer = wrapped()

    def write(step: int) -> None:
        if step == 12 and dist.get_rank():
            model.module.b.weight.data.mul_(1.01)

    return train(model, optimizer, after=write)


def written_on_one_rank_with_spikes() -> list[dict[str, Any]]:
    model, optimizer = wrapped()

    def write(step: int) -> None:
        if step == 12 and dist.get_rank():
            model.module.b.weight.data.mul_(1.01)

    return train(model, optimizer, after=write, spikes=True)


def written_on_one_rank_with_spikes_and_exempt() -> list[dict[str, Any]]:
    model, optimizer = wrapped()

    def write(step: int) -> None:
        if step in (12, 16) and dist.get_rank():
            (model.module.b.weight if step == 12 else model.module.a.bias).data.mul_(1.01)

    return train(model, optimizer, after=write, invariants={"replicas-differ": ["b.*"]}, spikes=True)


def stepped_on_one_rank_with_spikes() -> list[dict[str, Any]]:
    """One rank steps with another rate."""
    model, optimizer = wrapped()

    def change(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.2 if step == 13 and dist.get_rank() else 0.1

    return train(model, optimizer, after=change, spikes=True)


def unreduced_with_spikes() -> list[dict[str, Any]]:
    model, optimizer = wrapped()

    def forward(x: torch.Tensor) -> torch.Tensor:
        forwards.append(1)
        return model(x) if len(forwards) < 13 else model.module(x)

    forwards: list[int] = []
    return train(model, optimizer, forward, spikes=True)


def spikes_on_one_rank_alone() -> list[dict[str, Any]]:
    model, optimizer = wrapped()

    def write(step: int) -> None:
        if step == 12 and dist.get_rank():
            model.module.b.weight.data.mul_(1.01)

    return train(model, optimizer, after=write, spikes=dist.get_rank() == 0)


def written_on_one_rank_and_exempt() -> list[dict[str, Any]]:
    model, optimizer = wrapped()

    def write(step: int) -> None:
        if step == 12 and dist.get_rank():
            model.module.b.weight.data.mul_(1.01)
            model.module.a.bias.data.mul_(1.01)

    return train(model, optimizer, after=write, invariants={"replicas-differ": ["b.*"]})


def same_batches() -> list[dict[str, Any]]:
    model, optimizer = wrapped()
    return train(model, optimizer, of_rank=0)


def replicated_dtensors() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, mesh = Net(), init_device_mesh("cpu", (2,))
    for module in (model.a, model.b):
        for name, param in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitored(model, optimizer) as records:
        for step in range(1, STEPS + 1):
            for number, param in enumerate(model.parameters()):
                local = torch.full(param.shape, float(dist.get_rank() if step > 10 and number == 2 else 1))
                param.grad = distribute_tensor(local, mesh, [Replicate()], src_data_rank=None)
            optimizer.step()
            dist.barrier()
    return records


def sampler_without_its_epoch() -> list[dict[str, Any]]:
    return sampled(set_epoch=False)


def correct_sampler() -> list[dict[str, Any]]:
    return sampled(set_epoch=True)


def sampled(*, set_epoch: bool) -> list[dict[str, Any]]:
    model, optimizer = wrapped()
    data = TensorDataset(torch.randn(48, 8))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler)
    check = DataLoader(data, 4, sampler=DistributedSampler(data))
    with tempfile.TemporaryDirectory() as out:
        castwise.install(out)
        for epoch in range(3):
            if set_epoch:
                sampler.set_epoch(epoch)
            for (x,) in loader:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for (x,) in check:
                    model.module(x)
        castwise.uninstall()
        return [{"kind": "invariant", **vars(record)} for run in read_runs([Path(out)]) for record in run.invariants]


def correct_accumulation() -> list[dict[str, Any]]:
    model, optimizer = wrapped()
    with monitored(model, optimizer) as records:
        for step in range(1, STEPS + 1):
            with model.no_sync():
                model(batch(1000 + step)).square().mean().backward()
            model(batch(step)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return records


def correct_local_sgd() -> list[dict[str, Any]]:
    model, optimizer = wrapped()
    state = post_localSGD_hook.PostLocalSGDState(None, dist.new_group([dist.get_rank()]), 5)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=7, warmup_steps=5)
    return train(model, optimizer, after=lambda step: averager.average_parameters(model.parameters()))


def correct_experts() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    net = Net()
    net.expert = nn.Linear(4, 4)
    nn.init.normal_(net.expert.weight, dist.get_rank())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["expert.weight", "expert.bias"])
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(model, optimizer, lambda x: net.expert(model(x)))


def correct_fsdp2() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def correct_tensor_parallel() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 4))
    rows = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(net, init_device_mesh("cpu", (2,)), {"0": rows, "1": rows})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = train(net, optimizer, lambda x: net(x.abs().long()), of_rank=0)
    assert not [each for each in caught if issubclass(each.category, RuntimeWarning)], caught[0].message
    return records


def correct_without_wrapper() -> list[dict[str, Any]]:
    torch.manual_seed(dist.get_rank())
    model = Net()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def correct_and_one_rank_not_watched() -> list[dict[str, Any]]:
    model, optimizer = wrapped()
    castwise.Monitor(model, optimizer, invariants=True)
    return train(model, optimizer, invariants=dist.get_rank() == 1)


def main() -> None:
    for category in (UserWarning, RuntimeWarning):
        warnings.simplefilter("ignore", category)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = [name for name, value in globals().items() if callable(value) and _is_run(value)]
    for name in [name for name in names if not sys.argv[1:] or sys.argv[1] in name]:
        records = globals()[name]()
        broken = [record for record in records if record["kind"] == "invariant"]
        found = [[each["name"], each["step"], each["severity"], each["text"] + " " + each["remedy"]] for each in broken]
        print(json.dumps([name, found]), flush=True)
        dist.barrier()
    dist.destroy_process_group()


def _is_run(value: Any) -> bool:
    return getattr(value, "__module__", "") == __name__ and value.__annotations__ == {"return": "list[dict[str, Any]]"}


if __name__ == "__main__":
    main()
