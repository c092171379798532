"""One rank of those that agree, and of those that do not; run by `test_agreement.py`."""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from tests.distributed.ranks import join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import castwise

all_reduce = dist.all_reduce
KINDS: dict[str, dict[str, bool]] = {"foreach": {"foreach": True}, "fused": {"fused": True}}


class Training:
    """Parameters, an optimizer for each, and a scaler; the gradients of a rank are its own."""

    def __init__(self, kind: str, optimizers: int = 1, stages: int = 1) -> None:
        self.params = [torch.nn.Parameter(torch.ones(3)) for _ in range(optimizers)]
        self.optimizers = [torch.optim.SGD([param], lr=0.5, **KINDS[kind]) for param in self.params]
        of_ranks: Any = {"process_group": dist.group.WORLD, "pipeline_stages": stages}
        self.scaler = castwise.GradScaler("cpu", 8.0, growth_interval=3, **of_ranks)
        self.collectives: list[int] = []
        dist.all_reduce = self._all_reduce

    def _all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.collectives.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    def backward(self, *infs: int) -> None:
        for index, param in enumerate(self.params):
            param.grad = None
            self.scaler.scale(param.sum() * (math.inf if index in infs else 1.0)).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def weights(self) -> list[float]:
        return [param[0].item() for param in self.params]


def several(rank: int, _: int, kind: str, optimizers: str) -> Any:
    """Each optimizer meets an inf on one rank, except for the first; all are unscaled before any is stepped."""
    training = Training(kind, int(optimizers))
    training.backward(*range(1 + rank, len(training.params), 2))
    for optimizer in training.optimizers:
        training.scaler.unscale_(optimizer)
    before = len(training.collectives)
    training.step()
    return {
        "before": before,
        "collectives": list(training.collectives),
        "weights": training.weights(),
        "scale": training.scaler.get_scale(),
    }


def orders(rank: int, _: int, kind: str) -> Any:
    """The collectives of an iteration in which something is done before `step`."""
    counts = {}
    for name, prepare in {
        "nothing": lambda scaler, optimizer: None,
        "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
        "clip": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 0.1),
        "unscale_, clip": lambda scaler, optimizer: (
            scaler.unscale_(optimizer),
            scaler.clip_grad_norm_(optimizer, 1.0),
        ),
        "clip, unscale_": lambda scaler, optimizer: (
            scaler.clip_grad_norm_(optimizer, 1.0),
            scaler.unscale_(optimizer),
        ),
        "clip by value": lambda scaler, optimizer: scaler.clip_grad_value_(optimizer, 1.0),
    }.items():
        training = Training(kind)
        training.backward()
        prepare(training.scaler, training.optimizers[0])
        training.step()
        counts[name] = list(training.collectives)
    return counts


def backward_after_clipping(rank: int, _: int, kind: str) -> Any:
    """A batch is thrown away after it was clipped, and in the next only the last rank has a gradient, which is inf.

    An error says that it cannot step alone on what the others have not agreed on, and it clips again with them.
    """
    training = Training(kind)
    training.backward()
    if rank == 0:
        training.params[0].grad = None
    training.scaler.clip_grad_norm_(training.optimizers[0], 1.0)
    training.params[0].grad = None
    loss = training.scaler.scale(training.params[0].sum() * math.inf)
    error = ""
    if rank == dist.get_world_size() - 1:
        loss.backward()
        try:
            training.scaler.step(training.optimizers[0])
        except RuntimeError as raised:
            error = str(raised)
    training.scaler.clip_grad_norm_(training.optimizers[0], 1.0)
    training.step()
    return {"weights": training.weights(), "scale": training.scaler.get_scale(), "error": error[:52]}


def lonely_loss(rank: int, _: int, kind: str) -> Any:
    """The first rank scales a loss that the others do not have, between clipping and stepping."""
    training = Training(kind)
    training.backward()
    training.scaler.clip_grad_norm_(training.optimizers[0], 9.0)
    if rank == 0:
        training.scaler.scale(training.params[0].detach().sum())
    training.step()
    return {"weights": training.weights(), "collectives": list(training.collectives)}


def stages_without_a_loss(rank: int, world_size: int, kind: str) -> Any:
    """Only the last stage of a pipeline scales anything; the others are given their gradients, two losses in turn."""
    training = Training(kind, 2, stages=world_size)
    for index, optimizer in enumerate(training.optimizers):
        if rank == world_size - 1:
            training.scaler.scale(training.params[index].sum() * (math.inf if index else 1.0)).backward()
        else:
            training.params[index].grad = torch.full((3,), 8.0)
        training.scaler.clip_grad_norm_(optimizer, 9.0)
    training.step()
    return {"weights": training.weights(), "scale": training.scaler.get_scale()}


def closure(rank: int, _: int, kind: str, clip: str) -> Any:
    """The loss that the closure returns is infinite on the first rank, and its gradients are finite."""
    training = Training(kind)
    (param,), (optimizer,) = training.params, training.optimizers

    def evaluate() -> float:
        optimizer.zero_grad()
        training.scaler.scale(param.sum()).backward()
        if clip == "clip":
            training.scaler.clip_grad_norm_(optimizer, 1.0)
        return math.inf if rank == 0 else 1.0

    training.scaler.step(optimizer, evaluate)
    training.scaler.update()
    return {"weights": training.weights(), "scale": training.scaler.get_scale()}


def norms(rank: int, world_size: int) -> Any:
    """Norms of gradients that are split between the ranks, far from 1 and of large orders."""
    found = []
    for value, p in ((3e3, 100.0), (1e20, 20.0), (1e-4, 100.0), (1e-30, 5.0), (2.0, 4.0), (1e38, 3.0)):
        param = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([param], lr=0.0)
        scaler = castwise.GradScaler("cpu", 1.0, process_group=dist.group.WORLD, pipeline_stages=world_size)
        scaler.scale(param.sum())
        param.grad = torch.full((1,), value)
        found.append(scaler.clip_grad_norm_(optimizer, math.inf, p).item() / value)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 1.0
    return found


def submesh(rank: int, world_size: int) -> Any:
    """A mesh over some of the ranks has no group of its own: it is reduced along its dimensions."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "x", "y"))
    scaler = castwise.GradScaler("cpu", 8.0, process_group=mesh["x", "y"], pipeline_stages=4)
    wide = castwise.GradScaler("cpu", 8.0, process_group=mesh, pipeline_stages=4)
    found = []
    for case in (scaler, wide):
        param = torch.nn.Parameter(torch.ones(1))
        case.scale(param.sum() * (rank + 1.0)).backward()
        found.append(case.clip_grad_norm_(torch.optim.SGD([param], lr=1.0), math.inf).item())
    return found


def copied(rank: int, _: int, kind: str) -> Any:
    """The first rank continues with a copy of its scaler."""
    training = Training(kind)
    for _ in range(4):
        training.backward()
        training.step()
        if rank == 0:
            training.scaler = copy.deepcopy(training.scaler)
    return training.scaler.get_scale()


def outside(rank: int, _: int, kind: str) -> Any:
    """The last rank is not in the group."""
    group = dist.new_group([0])
    scaler = castwise.ShardedGradScaler("cpu", process_group=group)
    assert not scaler.agrees
    param = torch.nn.Parameter(torch.ones(1))
    scaler.scale(param.sum()).backward()
    try:
        scaler.step(torch.optim.SGD([param], lr=1.0, **KINDS[kind]))
    except RuntimeError as error:
        return str(error)
    return param.item()


def only_sparse(rank: int, _: int, fault: str) -> Any:
    """One rank has only sparse gradients."""
    torch.manual_seed(0)
    model = torch.nn.Embedding(4, 2, sparse=True) if rank == 0 else torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = castwise.ShardedGradScaler("cpu", 8.0)
    loss = model(torch.tensor([1, 1, 3])) if rank == 0 else model(torch.ones(1, 4))
    scaler.scale(loss.sum() * (math.inf if fault == str(rank) else 1.0)).backward()
    before = model.weight.detach().clone()
    norm = scaler.clip_grad_norm_(optimizer, math.inf)
    scaler.step(optimizer)
    scaler.update()
    return {"norm": norm.item(), "moved": not torch.equal(before, model.weight), "scale": scaler.get_scale()}


DIFFERENCES: dict[str, Callable[[castwise.GradScaler], Any]] = {
    "a load": lambda scaler: scaler.load_state_dict(scaler.state_dict()),
    "a setting": lambda scaler: scaler.set_growth_interval(4),
    "an update": lambda scaler: scaler.update(4.0),
}


def different_calls(rank: int, world_size: int, name: str) -> Any:
    """The last rank leaves out one of the calls that the others make; collectives of all kinds meet."""
    training = Training("foreach", 2)
    one, two = training.optimizers
    scaler = training.scaler
    try:
        for iteration in range(3):
            training.backward()
            odd = rank == world_size - 1 and iteration == 1
            if name == "unscale_":
                scaler.unscale_(one)
                if not odd:
                    scaler.unscale_(two)
            elif name == "2":
                if not odd:
                    scaler.clip_grad_norm_(one, 1.0)
            else:
                scaler.unscale_(one)
                scaler.unscale_(two)
            scaler.step(one)
            if odd and name == "skip":
                scaler.skip(two)
            elif not (odd and name == "step"):
                scaler.step(two)
            scaler.update()
    except RuntimeError as error:
        return str(error)
    return None


def difference(rank: int, world_size: int, kind: str, name: str, clip: str) -> Any:
    """The last rank does something that the others do not."""
    training = Training(kind)
    training.backward()
    training.step()
    before = training.weights()
    try:
        if rank == world_size - 1:
            DIFFERENCES[name](training.scaler)
        training.backward()
        if clip != "no":
            training.scaler.clip_grad_norm_(training.optimizers[0], 1.0, float(clip))
        training.step()
    except RuntimeError as error:
        return {"error": str(error), "stepped": training.weights() != before}
    return None


def left_out(rank: int, world_size: int, kind: str) -> Any:
    """The last rank leaves out the step of one of two optimizers, so it comes to the next iteration too early."""
    training = Training(kind, 2)
    try:
        if rank == world_size - 1:
            training.optimizers.pop()
        for _ in range(2):
            training.backward()
            training.step()
    except RuntimeError as error:
        return {"error": str(error), "last": training.params[1][0].item()}
    return None


def iteration_left_out(rank: int, _: int, kind: str, where: str) -> Any:
    """The last rank leaves out one iteration, after its backward, and continues with the next; or all ranks do so."""
    training = Training(kind)
    is_left_out = where == "all" or rank == 1
    try:
        for number in range(4):
            training.backward()
            if number == 2 and is_left_out:
                continue
            training.step()
    except RuntimeError as error:
        return {"error": str(error), "weights": training.weights()}
    return {"error": "", "weights": training.weights()}


def in_turn(rank: int, _: int, kind: str, how: str) -> Any:
    """The collectives of two optimizers that are unscaled and stepped in turn, or clipped one by one."""
    training = Training(kind, 2)
    training.backward()
    for optimizer in training.optimizers:
        if how == "clipped":
            training.scaler.clip_grad_norm_(optimizer, 1.0)
        else:
            training.scaler.unscale_(optimizer)
            training.scaler.step(optimizer)
    if how == "clipped":
        for optimizer in training.optimizers:
            training.scaler.step(optimizer)
    training.scaler.update()
    return list(training.collectives)


def changed_after_clipping(rank: int, _: int, kind: str) -> Any:
    """The last rank changes its gradients after clipping, and steps with the others again in the next iteration."""
    training, errors = Training(kind), []
    for iteration in range(2):
        try:
            training.backward()
            training.scaler.clip_grad_norm_(training.optimizers[0], 1.0)
            if rank == 1 and iteration == 0:
                training.scaler.scale(training.params[0].sum()).backward()
            training.scaler.step(training.optimizers[0])
        except RuntimeError as error:
            errors.append(str(error))
        else:
            errors.append("")
        if iteration == 0:
            training.scaler.update()
    return {"errors": errors, "weights": training.weights()}


def one_clips_by_five(rank: int, _: int, kind: str, one: str) -> Any:
    """One rank alone clips, by p = 5: it needs the maximum over the ranks, where the others need the sum."""
    training = Training(kind)
    training.backward()
    try:
        if rank == int(one):
            training.scaler.clip_grad_norm_(training.optimizers[0], 1.0, 5.0)
        training.step()
    except RuntimeError as error:
        return {"error": str(error), "weights": training.weights()}
    return None


def hang(rank: int, _: int, kind: str) -> Any:
    """The last rank does not come to the step in time."""
    training = Training(kind)
    training.backward()
    if rank == dist.get_world_size() - 1:
        time.sleep(6)
        return None
    try:
        training.step()
    except RuntimeError as error:
        return {"error": str(error), "weights": training.weights()}
    return None


def blame(rank: int, _: int, kind: str) -> Any:
    """A step that is skipped for an inf of rank 1, of DTensors that rank 0 has fewer gradients of."""
    mesh = init_device_mesh("cpu", (2,))
    placements = [Replicate(), Shard(0)]
    params = [torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [placement])) for placement in placements]
    optimizer = torch.optim.AdamW(params, lr=0.5, **KINDS[kind])
    scaler = castwise.GradScaler("cpu", process_group=mesh)
    facts: list[castwise.amp.StepFacts] = []
    scaler.register_step_hook(facts.append)
    scaler.scale(torch.ones(()))
    params[0].grad = DTensor.from_local(torch.ones(4), mesh, [Replicate()], run_check=False) if rank else None
    params[1].grad = DTensor.from_local(torch.full((2,), math.inf if rank else 1.0), mesh, [Shard(0)])
    scaler.step(optimizer)
    scaler.update()
    return {"cause": facts[0].cause, "blamed": [param is params[1] for param in facts[0].parameters]}


SCHEDULES = {
    "headroom": castwise.schedules.Headroom(8.0, headroom_bits=2.0, half_life=3.0),
    "hold": castwise.schedules.Dynamic(8.0, growth_interval=2, on_nonfinite_loss="hold"),
    "hysteresis": castwise.schedules.Dynamic(8.0, growth_interval=2, hysteresis=2, cooldown=1),
    "guard": castwise.schedules.Guard(),
}


def schedule(rank: int, size: int, kind: str, name: str, clip: str) -> Any:
    """Gradients, losses and infs that differ from rank to rank; what each rank then holds."""
    training = Training(kind)
    training.scaler = castwise.GradScaler("cpu", schedule=SCHEDULES[name], process_group=dist.group.WORLD)
    facts: list[castwise.amp.StepFacts] = []
    training.scaler.register_step_hook(facts.append)
    assert training.scaler.agrees
    (param,), (optimizer,) = training.params, training.optimizers
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scales, collectives = [], []
    for step in range(12):
        before = len(training.collectives)
        loss = math.nan if (step, rank) in {(3, 0), (7, 1)} else 1.0
        gradient = math.inf if (step, rank) in {(5, 1), (6, 0)} else 2.0 ** (step * (rank + 1))
        param.grad = None
        training.scaler.scale(param.sum() * 0.0 + loss).backward()
        param.grad = torch.full_like(param, gradient if math.isfinite(loss) else math.nan) * training.scaler.get_scale()
        if clip == "clip":
            training.scaler.clip_grad_norm_(optimizer, 1.0)
        training.scaler.step(optimizer)
        training.scaler.update()
        training.scaler.step_scheduler(scheduler)
        scales.append(training.scaler.get_scale())
        collectives.append(training.collectives[before:])
    return {
        "scales": scales,
        "collectives": collectives,
        "causes": [facts.cause and facts.cause.value for facts in facts],
        "scheduled": scheduler.last_epoch,
        "state": training.scaler.state_dict(),
    }


if __name__ == "__main__":
    rank, world_size, what = join(sys.argv, 2 if "hang" in sys.argv[4] else 20)
    results = {}
    for case in what.split(";"):
        name, *arguments = case.split("|")
        results[case] = globals()[name](rank, world_size, *arguments)
        if name != "hang":
            dist.barrier()
    print(json.dumps(results), flush=True)
