"""Trains small models that are split over ranks in every way, under both libraries, and prints what became of them.

Run by `test_sharded_grad_scaler.py`, once for each rank: `python worker.py RANK WORLD_SIZE FILE WHAT`.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import torch.distributed as dist
from tests.distributed.ranks import join
from tests.thorough import THOROUGH
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Torchs
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import castwise

# torch's foreach and fused optimizers refuse DTensors beside plain tensors.
ONLY_FOR_LOOP = "replicated, sharded and plain"
KINDS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
STEPS, BAD_STEP, MAX_NORM = 4, 2, 0.05


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def ddp(_: int) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model())


@functools.cache
def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """One for all cases: every group of gloo has its own threads."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def fsdp1(use_orig_params: bool) -> Callable[[int], torch.nn.Module]:
    return lambda _: FullyShardedDataParallel(model(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))


def fsdp2(world_size: int) -> torch.nn.Module:
    split = model()
    fully_shard(split, mesh=mesh_of(world_size))
    return split


def tensor_parallel(world_size: int) -> torch.nn.Module:
    mesh = mesh_of(world_size)
    return parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def by_hand(*placements: Any) -> Callable[[int], torch.nn.Module]:
    """Parameters that are each placed by hand, None for a plain one; gathered whole for the forward."""

    def split_model(world_size: int) -> torch.nn.Module:
        mesh = mesh_of(world_size)
        split = model()
        names = [name for name, _ in split.named_parameters()]
        for name, placement in zip(names, placements, strict=True):
            if placement is not None:
                layer, kind = name.split(".")
                whole = getattr(split[int(layer)], kind).detach()
                setattr(split[int(layer)], kind, torch.nn.Parameter(distribute_tensor(whole, mesh, [placement])))

        def forward(x: torch.Tensor) -> torch.Tensor:
            params = [param.full_tensor() if isinstance(param, DTensor) else param for param in split.parameters()]
            return torch.nn.functional.linear(torch.tanh(torch.nn.functional.linear(x, *params[:2])), *params[2:])

        split.forward = forward
        return split

    return split_model


def with_partial_gradients(world_size: int) -> torch.nn.Module:
    """Replicated parameters whose gradients arrive as sums that are yet to be taken, as under sequence parallelism."""
    split = by_hand(Replicate(), Replicate(), Shard(1), Replicate())(world_size)
    for param in list(split.parameters())[:2]:

        def as_a_part(param: torch.nn.Parameter) -> None:
            part = param.grad.to_local() / world_size
            param.grad = DTensor.from_local(part, param.device_mesh, [Partial()], run_check=False)

        param.register_post_accumulate_grad_hook(as_a_part)
    return split


def fsdp2_and_tp(_: int) -> torch.nn.Module:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    split = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(split, mesh=mesh["dp"])
    return split


def hsdp(_: int) -> torch.nn.Module:
    split = model()
    fully_shard(split, mesh=mesh_of(2, 2, names=("replicate", "shard")))
    return split


def hybrid_fsdp1(_: int) -> torch.nn.Module:
    mesh = mesh_of(2, 2, names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(
        model(), device_mesh=mesh, sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu")
    )


SPLITS: dict[str, Callable[[int], torch.nn.Module]] = {
    "DDP": ddp,
    "FSDP1": fsdp1(False),
    "FSDP1 with original parameters": fsdp1(True),
    "FSDP2": fsdp2,
    "TP": tensor_parallel,
    "replicated and sharded": by_hand(Replicate(), Shard(0), Shard(1), Replicate()),
    "partial sums": with_partial_gradients,
    "replicated, sharded and plain": by_hand(Replicate(), Shard(0), None, None),
}
SPLITS_OF_FOUR = {"FSDP2 x TP": fsdp2_and_tp, "HSDP": hsdp, "FSDP1 HSDP": hybrid_fsdp1, "FSDP2": fsdp2, "DDP": ddp}
FAULTS = ["none", "NaN loss of rank 0", "inf in a gradient of rank 0", "inf in a gradient of the last rank"]


def spoil(split: torch.nn.Module) -> None:
    """Put an inf into one element of a gradient that this rank holds."""
    for param in split.parameters():
        grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        if grad is not None and grad.numel() and not isinstance_replicated(param):
            grad.view(-1)[0] = math.inf
            return


def isinstance_replicated(param: torch.Tensor) -> bool:
    return isinstance(param, DTensor) and all(placement.is_replicate() for placement in param.placements)


def whole(split: torch.nn.Module) -> list[float]:
    """All weights of a model, the same numbers however it is split."""
    if isinstance(split, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(split):
            return torch.cat([param.detach().flatten().clone() for param in split.parameters()]).tolist()
    params = [param.full_tensor() if isinstance(param, DTensor) else param for param in split.parameters()]
    return torch.cat([param.detach().flatten() for param in params]).tolist()


class Collectives(TorchDispatchMode):
    """Notes the bytes of every collective."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [tensor for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)]
            self.seen.append((func._opname, sum(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))


def train(split: torch.nn.Module, scaler: Any, kind: str, clip: bool, fault: str, rank: int, world_size: int) -> Any:
    optimizer = torch.optim.AdamW(split.parameters(), lr=0.1, **KINDS[kind])
    draw = torch.Generator().manual_seed(1)
    scales, norms = [], []
    for step in range(STEPS):
        x = torch.randn(5, 6, generator=draw)
        optimizer.zero_grad()
        loss = split(x).pow(2).mean()
        bad = step == BAD_STEP
        if bad and fault == "NaN loss of rank 0" and rank == 0:
            loss = loss * math.nan
        scaler.scale(loss).backward()
        if bad and fault == "inf in a gradient of rank 0" and rank == 0:
            spoil(split)
        if bad and fault == "inf in a gradient of the last rank" and rank == world_size - 1:
            spoil(split)
        with Collectives() if step == STEPS - 1 and isinstance(scaler, castwise.GradScaler) else nullcontext() as count:
            if clip:
                norms.append(clipped(split, scaler, optimizer))
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    return {
        "scales": scales,
        "norms": norms,
        "weights": whole(split),
        "tracker": scaler._get_growth_tracker(),
        "collectives": [] if count is None else count.seen,
    }


class Stages:
    """Some stages of a pipeline; each has its own loss, and the model's is their sum."""

    def __init__(self, stages: list[int], kind: str, scaler: Any) -> None:
        self.stages, self.scaler, self.scales, self.norms = {}, scaler, [], []
        for stage in stages:
            torch.manual_seed(stage)
            self.stages[stage] = torch.nn.Linear(3 + stage, 2)
        params = [param for module in self.stages.values() for param in module.parameters()]
        self.optimizer = torch.optim.AdamW(params, lr=0.1, **KINDS[kind])

    def train(self, clip: bool, fault: str, last: int) -> dict[str, Any]:
        for step in range(STEPS):
            self.optimizer.zero_grad()
            for stage, module in self.stages.items():
                loss = module(torch.ones(1, 3 + stage)).pow(2).sum()
                is_met = step == BAD_STEP and fault.endswith("last rank" if stage == last else f"rank {stage}")
                scaled = self.scaler.scale(loss * math.nan if is_met and fault.startswith("NaN") else loss)
                if not (fault == "no gradients of rank 0" and stage == 0):
                    scaled.backward()
                if is_met and fault.startswith("inf"):
                    spoil(module)
            if clip:
                self.norms.append(self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM).item())
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scales.append(self.scaler.get_scale())
        weights = {
            stage: [weight for param in module.parameters() for weight in param.flatten().tolist()]
            for stage, module in self.stages.items()
        }
        return {"scales": self.scales, "norms": self.norms, "weights": weights}


def pipeline(kind: str, clip: bool, fault: str, rank: int, world_size: int) -> dict[str, Any]:
    """Every rank has a stage and its own optimizer, beside all stages in one process."""
    settings = {"init_scale": 1024.0, "growth_interval": 2}
    group = castwise.GradScaler("cpu", **settings, process_group=dist.group.WORLD, pipeline_stages=world_size)
    last = world_size - 1
    return {
        "split": Stages([rank], kind, group).train(clip, fault, last),
        "alone": Stages(list(range(world_size)), kind, castwise.GradScaler("cpu", **settings)).train(clip, fault, last),
    }


class Side:
    """A library's half of a lockstep: a split model, its optimizer and its scaler."""

    def __init__(self, scaler: Any, split: str, kind: str, world_size: int) -> None:
        self.scaler, self.split = scaler, SPLITS[split](world_size)
        self.optimizer = torch.optim.AdamW(self.split.parameters(), lr=0.01, **KINDS[kind])

    def take(self, call: str, value: Any) -> Any:
        if call == "backward":
            self.scaler.scale(self.split(value).pow(2).mean()).backward()
        elif call == "spoil":
            spoil(self.split)
        elif call == "clip":
            if isinstance(self.split, FullyShardedDataParallel):
                self.split.clip_grad_norm_(MAX_NORM)
            else:
                torch.nn.utils.clip_grad_norm_(self.split.parameters(), MAX_NORM)
        elif call == "zero_grad":
            self.optimizer.zero_grad()
        elif call == "round trip":
            self.scaler.load_state_dict(self.scaler.state_dict())
        elif call == "update":
            self.scaler.update(value)
        else:
            getattr(self.scaler, call)(self.optimizer)
        local = [param.to_local() if isinstance(param, DTensor) else param for param in self.split.parameters()]
        bits = [param.detach().clone().view(torch.int32) for param in local]
        return self.scaler.get_scale(), self.scaler._get_growth_tracker(), bits


def lockstep(split: str, kind: str, rank: int, world_size: int) -> dict[str, Any]:
    """The same 50 random steps with both libraries: where they first differ in a bit, and how many were skipped."""
    settings = {"init_scale": 2.0**10, "growth_interval": 3, "process_group": dist.group.WORLD}
    sides = [Side(make("cpu", **settings), split, kind, world_size) for make in (Torchs, castwise.ShardedGradScaler)]
    draw, inputs = random.Random(0), torch.Generator().manual_seed(1)
    skipped = 0
    for step in range(50):
        calls: list[tuple[str, Any]] = [("zero_grad", None)]
        calls += [("backward", torch.randn(5, 6, generator=inputs)) for _ in range(draw.choice([1, 1, 2]))]
        bad = draw.choice([None, None, None, *range(world_size)])
        calls += [("spoil", None)] if bad == rank else []
        if draw.random() < 0.5:
            calls.append(("unscale_", None))
            calls += [("clip", None)] if draw.random() < 0.5 else []
        calls.append(("step", None))
        calls.append(("update", 2.0 ** draw.randint(0, 20) if draw.random() < 0.1 else None))
        calls += [("round trip", None)] if draw.random() < 0.1 else []
        for call, value in calls:
            (*theirs, their_bits), (*ours, our_bits) = (side.take(call, value) for side in sides)
            if theirs != ours or any(not torch.equal(*pair) for pair in zip(their_bits, our_bits, strict=True)):
                return {"difference": f"{call} in step {step}: {theirs} {ours}", "skipped": skipped}
        skipped += bad is not None
    return {"difference": None, "skipped": skipped}


def resumable(folder: str, moment: str, rank: int, world_size: int) -> dict[str, Any]:
    """Go on from the last checkpoint in a folder; the last rank is killed at some moment of a step, if at all."""
    split, last, of_step = fsdp2(world_size), 5, {"before": 2, "inside": 3, "after": 4}
    optimizer = torch.optim.AdamW(split.parameters(), lr=0.1, fused=True)
    scaler = castwise.ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=2)
    saved = sorted(path.parent for path in Path(folder).glob("*/.metadata"))
    begin = 0
    if saved:
        state = {"model": get_model_state_dict(split), "scaler": scaler, "step": 0}
        state["optimizer"] = get_optimizer_state_dict(split, optimizer)
        dcp.load(state, checkpoint_id=saved[-1])
        set_model_state_dict(split, state["model"])
        set_optimizer_state_dict(split, optimizer, state["optimizer"])
        begin = state["step"] + 1
    loaded = scaler.state_dict()

    def die_if(now: str, step: int) -> None:
        if moment == now and step == of_step[now] and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(begin, last):
        optimizer.zero_grad()
        loss = split(torch.randn(5, 6, generator=torch.Generator().manual_seed(step))).pow(2).mean()
        scaler.scale(loss * (math.inf if step == 1 and rank == 0 else 1.0)).backward()
        die_if("before", step)
        with optimizer.register_step_pre_hook(lambda *_, step=step: die_if("inside", step)):  # type: ignore[misc]
            scaler.clip_grad_norm_(optimizer, MAX_NORM)
            scaler.step(optimizer)
        die_if("after", step)
        scaler.update()
        state = {"model": get_model_state_dict(split), "scaler": scaler, "step": step}
        state["optimizer"] = get_optimizer_state_dict(split, optimizer)
        dcp.save(state, checkpoint_id=Path(folder, str(step)))
    bits = torch.tensor(whole(split)).view(torch.int32).tolist()
    return {"begin": begin, "loaded": loaded, "scaler": scaler.state_dict(), "bits": bits}


def a_dying_rank(kind: str, rank: int, world_size: int) -> dict[str, Any]:
    """The last rank ends before the step; what error the others raise, and what they have done."""
    split = model()
    optimizer = torch.optim.AdamW(split.parameters(), lr=0.1, **KINDS[kind])
    scaler = castwise.ShardedGradScaler("cpu")
    before = whole(split)
    scaler.scale(split(torch.ones(1, 6)).sum()).backward()
    dist.barrier()
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        return {"error": str(error), "stepped": whole(split) != before, "tracker": scaler._get_growth_tracker()}
    return {"error": "", "stepped": True}


def clipped(split: torch.nn.Module, scaler: Any, optimizer: torch.optim.Optimizer) -> float:
    if isinstance(scaler, castwise.GradScaler):
        return float(scaler.clip_grad_norm_(optimizer, MAX_NORM))
    scaler.unscale_(optimizer)
    if isinstance(split, FullyShardedDataParallel):
        return float(split.clip_grad_norm_(MAX_NORM))
    norm = torch.nn.utils.clip_grad_norm_(split.parameters(), MAX_NORM)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def is_run(split: str, kind: str, clip: bool, fault: str) -> bool:
    """Return whether a case is run: the scaler does the same for steps by for-loop and foreach.

    `make test` runs half of the cases: each fault with each kind of optimizer, either clipped or not.
    """
    is_own_path = kind == "for-loop" if split == ONLY_FOR_LOOP else kind != "for-loop" or split in ("DDP", "FSDP2")
    number = list(KINDS).index(kind) + clip + FAULTS.index(fault) + split.startswith("FSDP2")
    return is_own_path and (THOROUGH or number % 2 == 0)


def matrix(libraries: list[str], rank: int, world_size: int) -> dict[str, Any]:
    results = {}
    splits = SPLITS if world_size == 2 else SPLITS_OF_FOUR
    for library, split, kind, clip, fault in itertools.product(libraries, splits, KINDS, [False, True], FAULTS):
        if not is_run(split, kind, clip, fault):
            continue
        make = {"castwise": castwise.ShardedGradScaler, "torch": Torchs}[library]
        group: Any = dist.group.WORLD
        if split.endswith("HSDP"):
            group = mesh_of(2, 2, names=("replicate", "shard"))

        def run(
            split: str = split,
            kind: str = kind,
            clip: bool = clip,
            fault: str = fault,
            make: Any = make,
            group: Any = group,
        ) -> Any:
            scaler = make("cpu", init_scale=1024.0, growth_interval=2, process_group=group)
            return train(splits[split](world_size), scaler, kind, clip, fault, rank, world_size)

        results[" | ".join([library, split, kind, "clip" if clip else "no clip", fault])] = outcome(run)
        dist.barrier()
    for kind, clip, fault in itertools.product(KINDS, [False, True], FAULTS):
        alone = castwise.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        results[" | ".join(["alone", kind, "clip" if clip else "no clip", fault])] = train(
            model(), alone, kind, clip, fault, 0, 1
        )
    return results


def main(rank: int, world_size: int, what: str) -> None:
    results: Any
    warnings.simplefilter("ignore", UserWarning)
    if what.startswith("matrix"):
        results = matrix(what.split()[1:], rank, world_size)
    elif what == "pipeline":
        results = {
            f"{kind} | {clip} | {fault}": pipeline(kind, clip, fault, rank, world_size)
            for kind in KINDS
            for clip in (False, True)
            for fault in (*FAULTS, "no gradients of rank 0")
        }
    elif what.startswith("lockstep"):
        results = {
            f"{split} | {kind}": lockstep(split, kind, rank, world_size)
            for split in (*list(SPLITS)[:5], "replicated and sharded")
            for kind in ("for-loop", "foreach")
            if kind == "foreach" or split in ("DDP", "FSDP2")  # the scaler does the same for both
        }
    elif what.startswith("resumable"):
        results = outcome(lambda: resumable(*what.split()[1:], rank, world_size))
    else:
        results = a_dying_rank(what.removeprefix("death "), rank, world_size)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*join(sys.argv))
