"""Trains a model with `MasterWeights` over ranks, and prints what became of it.

Run by `test_master_weights_ranks.py`, once for each rank: `python master_weights_worker.py RANK WORLD_SIZE FILE WHERE`.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from tests.distributed.ranks import join
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import castwise
from castwise import MasterWeights
from castwise.master_weights import _parameter_clipping as parameter_clipping

STEPS = 4


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 34), nn.GELU(), nn.Linear(34, 8), nn.Linear(8, 3))


def adamw(params: Any) -> optim.Optimizer:
    return optim.AdamW(params, lr=1e-2)


def train(model: nn.Module, optimizer: optim.Optimizer, rank: int, steps: int = STEPS, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x, target = torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)
        with castwise.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Fp32Copies:
    """Steps an fp32 copy of each weight, and rounds it to 16 bits: what `MasterWeights` must be equal to."""

    def __init__(self, model: nn.Module) -> None:
        self.copies = {name: nn.Parameter(param.detach().float().clone()) for name, param in model.named_parameters()}
        MasterWeights.narrow_(model)
        self.params = dict(model.named_parameters())
        self.inner = adamw(self.copies.values())

    def clip(self, max_norm: float) -> torch.Tensor:
        self.copy_grads()
        return nn.utils.clip_grad_norm_(self.copies.values(), max_norm)

    def copy_grads(self) -> None:
        for name, copied in self.copies.items():
            grad = self.params[name].grad
            copied.grad = None if grad is None else grad.float()

    def step(self) -> None:
        if all(copied.grad is None for copied in self.copies.values()):
            self.copy_grads()
        self.inner.step()
        self.inner.zero_grad()
        with torch.no_grad():
            for name, copied in self.copies.items():
                self.params[name].copy_(copied)

    def zero_grad(self) -> None:
        for param in self.params.values():
            param.grad = None

    def fp32_state_dict(self, model: nn.Module) -> dict[str, Any]:
        return {**self.copies}


def made(model: nn.Module, method: str) -> Any:
    return MasterWeights(adamw(model.parameters()), model) if method == "split" else Fp32Copies(model)


def weights_of(optimizer: MasterWeights, model: nn.Module) -> dict[str, list[float]]:
    saved = optimizer.fp32_state_dict(model)
    return {
        name.removeprefix("module."): (value.full_tensor() if hasattr(value, "full_tensor") else value)
        .flatten()
        .tolist()
        for name, value in saved.items()
    }


def ddp(rank: int, method: str) -> tuple[nn.Module, MasterWeights]:
    model = net()
    optimizer = made(model, method)
    return nn.parallel.DistributedDataParallel(model), optimizer


def fsdp2(rank: int, method: str) -> tuple[nn.Module, MasterWeights]:
    model = net()
    fully_shard(model[0])
    fully_shard(model)
    return model, made(model, method)


def fsdp2_of_16_bit(rank: int, method: str) -> tuple[nn.Module, MasterWeights]:
    model = net().bfloat16()
    fully_shard(model[0])
    fully_shard(model)
    return model, made(model, method)


def tensor_parallel(rank: int, method: str) -> tuple[nn.Module, MasterWeights]:
    model = net()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return model, made(model, method)


HOW: dict[str, Callable[[int, str], tuple[nn.Module, MasterWeights]]] = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    "FSDP2 of 16-bit weights": fsdp2_of_16_bit,
    "tensor parallel": tensor_parallel,
}


def clipped(how: str, rank: int, method: str) -> dict[str, Any]:
    """Clip by parameters, as frameworks do."""
    model, optimizer = HOW[how](rank, method)
    norms = []
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        with castwise.autocast("cpu", dtype=torch.bfloat16):
            model(x).float().square().mean().backward()
        if method == "split":
            norm: Any = parameter_clipping.clip_grad_norm_([*model.parameters()], 0.05)
        else:
            norm = optimizer.clip(0.05)
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "weights": weights_of(optimizer, model)}


def summed_in_fp32(rank: int, *, with_master: bool, hooked: bool = True) -> dict[str, Any]:
    """Train with DDP on two micro-batches a step, the first without a reduction."""
    model = net()
    inner: Any = MasterWeights(adamw(model.parameters()), model, accumulate="compensated") if with_master else None
    optimizer = inner or adamw(model.parameters())
    parallel = nn.parallel.DistributedDataParallel(model)
    if with_master and hooked:
        inner.sum_over_ranks(parallel)
    norms = []
    for step in range(STEPS):
        for micro_batch, context in enumerate((parallel.no_sync, nullcontext)):
            seed = 100 * step + 10 * micro_batch + rank
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            with context(), castwise.autocast("cpu", dtype=torch.bfloat16):
                parallel(x).float().square().mean().backward()
        clip: Any = parameter_clipping.clip_grad_norm_ if with_master else nn.utils.clip_grad_norm_
        norms.append(clip([*model.parameters()], 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = inner.fp32_state_dict(model) if with_master else model.state_dict()
    return {"norms": norms, "weights": {name: value.flatten().tolist() for name, value in weights.items()}}


def run(how: str, rank: int, method: str) -> dict[str, Any]:
    model, optimizer = HOW[how](rank if how != "tensor parallel" else 0, method)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        losses = train(model, optimizer, rank if how != "tensor parallel" else 0)
    dtypes = sorted({str(param.dtype) for param in model.parameters()})
    return {"losses": losses, "weights": weights_of(optimizer, model), "dtypes": dtypes}


def fsdp1(rank: int) -> dict[str, Any]:
    losses = {}
    for method in ("split", "fp32"):
        model = FullyShardedDataParallel(net().bfloat16(), device_id=torch.device("cpu"))
        optimizer = made(model, method)
        losses[method] = train(model, optimizer, rank)
    return losses


def refused(make: Callable[[], object]) -> str:
    try:
        make()
    except ValueError as error:
        return str(error)
    return ""


def errors() -> list[str]:
    def of_one_unit() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        fully_shard(model)
        MasterWeights(adamw(model.parameters()), model)

    def below_ddp() -> None:
        model = nn.parallel.DistributedDataParallel(net())
        MasterWeights(adamw(model.parameters()), model)

    def flattened() -> None:
        model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
        MasterWeights(adamw(model.parameters()), model, narrow="all")

    def flattened_and_shaped() -> None:
        model = FullyShardedDataParallel(net().bfloat16(), device_id=torch.device("cpu"))
        MasterWeights(optim.Adafactor(model.parameters()), model, narrow="all")

    def with_fp32_gradients() -> None:
        model = net()
        fully_shard(model)
        MasterWeights(adamw(model.parameters()), model, grad_dtype=torch.float32)

    return [*map(refused, (of_one_unit, below_ddp, flattened, flattened_and_shaped, with_fp32_gradients))]


def resharded(rank: int, folder: Path) -> dict[str, Any]:
    """Save with `torch.distributed.checkpoint` in one rank, load in two and save there, load in one."""
    import torch.distributed.checkpoint as dcp

    def optimized(*, sharded: bool) -> tuple[nn.Module, MasterWeights]:
        model = net()
        if sharded:
            fully_shard(model)
        return model, MasterWeights(adamw(model.parameters()), model)

    def save(model: nn.Module, optimizer: MasterWeights, name: str, **options: Any) -> None:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder / name, **options)

    def load(model: nn.Module, optimizer: MasterWeights, name: str, **options: Any) -> None:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder / name, **options)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])

    alone = {"no_dist": True}
    model, optimizer = optimized(sharded=False)
    train(model, optimizer, 0)
    if rank == 0:
        save(model, optimizer, "one", **alone)
    dist.barrier()
    sharded, of_sharded = optimized(sharded=True)
    load(sharded, of_sharded, "one")
    between = weights_of(of_sharded, sharded)
    save(sharded, of_sharded, "two")
    dist.barrier()
    again, of_again = optimized(sharded=False)
    load(again, of_again, "two", **alone)
    expected = weights_of(optimizer, model)
    same = weights_of(of_again, again) == between == expected
    losses = [train(each, of_each, 0, start=STEPS) for each, of_each in ((model, optimizer), (again, of_again))]
    return {"same": same, "losses": losses}


def of_another_step(how: str, rank: int) -> list[list[str]]:
    """What is warned of when the model of an optimizer's step is loaded, and that of an earlier one."""
    saved = []
    model, optimizer = HOW[how](rank, "split")
    for start in (0, STEPS):
        train(model, optimizer, 0, start=start)
        saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    warned = []
    for step in (1, 0):
        again, of_again = HOW[how](rank, "split")
        of_again.load_state_dict(saved[1][1])
        again.load_state_dict(saved[step][0])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            of_again.fp32_state_dict(again)
        warned.append([str(warning.message).partition(" since")[0] for warning in caught])
    return warned


def main() -> None:
    rank, _, folder = join(sys.argv)
    report = {how: {method: run(how, rank, method) for method in ("split", "fp32")} for how in HOW}
    result = {"runs": report, "fsdp1": fsdp1(rank), "errors": errors(), "resharded": resharded(rank, Path(folder))}
    result["other step"] = {how: of_another_step(how, rank) for how in ("FSDP2", "tensor parallel")}
    result["clipped"] = {
        how: {method: clipped(how, rank, method) for method in ("split", "fp32")} for how in ("DDP", "FSDP2")
    }
    result["summed"] = {
        "fp32": summed_in_fp32(rank, with_master=False),
        "compensated": summed_in_fp32(rank, with_master=True),
        "in bf16": summed_in_fp32(rank, with_master=True, hooked=False),
    }
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
