"""Trains with frameworks and their clipping on two ranks, with fp32 weights and with a `MasterWeights`.

Run by `test_framework_ranks.py`, once for each rank: `python frameworks_worker.py RANK WORLD_SIZE FILE FOLDER`.

With DDP, ranks have different batches, and gradients are averaged in fp32. FSDP2 rounds averages to the dtype of the
weights, so its ranks have the same batches, whose average needs no rounding.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricParallel
from lightning.pytorch.strategies import ModelParallelStrategy
from tests.distributed.ranks import join
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import castwise
from castwise import MasterWeights
from castwise.integrations.accelerate import prepare
from castwise.integrations.lightning import FabricMixedPrecision, MixedPrecision
from castwise.integrations.transformers import ReportCallback

STEPS, MAX_NORM = 10, 0.5
Result = tuple[list[Any], dict[str, list[float]]]


def net() -> nn.Sequential:
    """A network whose fp32 weights are bf16 numbers, as those are that Lightning's DDP starts from."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 34), nn.GELU(), nn.Linear(34, 9), nn.Linear(9, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.bfloat16())
    return model


def batches(kind: str, rank: int) -> list[torch.Tensor]:
    seeds = [100 * step + (rank if kind == "DDP" else 0) for step in range(STEPS)]
    return [torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.float().square().mean() * 10


def optimizer_of(model: nn.Module, kind: str, *, with_master: bool) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    how = {"accumulate": "compensated"} if kind == "DDP" else {}
    return MasterWeights(optimizer, model, **how) if with_master else optimizer  # type: ignore[arg-type]


def sharded(model: nn.Sequential, mesh: Any = None) -> nn.Sequential:
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norm_and_kind(norm: torch.Tensor) -> tuple[str, float]:
    """A norm, and whether it is a DTensor, as torch's function returns it with FSDP2."""
    return type(norm).__name__, full(norm).item()


def weights(optimizer: Any, model: nn.Module) -> dict[str, list[float]]:
    with_master = isinstance(optimizer, MasterWeights)
    saved = optimizer.fp32_state_dict(model) if with_master else model.state_dict()
    return {name: full(value.detach()).flatten().tolist() for name, value in saved.items()}


def fresh_accelerator(kind: str) -> Accelerator:
    """Return one for bf16; FSDP2, which Accelerate has on accelerators alone, is put into its state."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()
    made = Accelerator(mixed_precision="bf16", cpu=True)
    if kind == "FSDP2":
        of_fsdp = {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}
        PartialState._shared_state.update(of_fsdp)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        AcceleratorState._shared_state.update(of_fsdp, fsdp_plugin=plugin)
    return made


def with_accelerate(kind: str, rank: int, *, guarded: bool, with_master: bool) -> Result:
    accelerator = fresh_accelerator(kind)
    prepare(accelerator, schedule=castwise.schedules.Guard() if guarded else None)
    model: Any = net() if kind == "DDP" else sharded(net())
    inner = optimizer_of(model, kind, with_master=with_master)
    if kind == "DDP":
        prepared, optimizer = accelerator.prepare(model, inner)
    else:
        prepared, optimizer = model, accelerator.prepare_optimizer(inner)
    numbers: list[Any] = []
    for batch in batches(kind, rank):
        with accelerator.autocast():
            loss = loss_of(prepared(batch))
        accelerator.backward(loss)
        numbers += [loss.item(), norm_and_kind(accelerator.clip_grad_norm_(prepared.parameters(), MAX_NORM))]
        optimizer.step()
        optimizer.zero_grad()
    return numbers, weights(inner, model)


class Module(pl.LightningModule):
    def __init__(self, kind: str, *, with_master: bool) -> None:
        super().__init__()
        self.net, self.kind, self.with_master, self.losses = net(), kind, with_master, list[float]()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.net(batch))
        self.losses.append(loss.item())
        return loss

    def configure_model(self) -> None:
        if self.kind == "FSDP2" and not any(isinstance(param, DTensor) for param in self.parameters()):
            sharded(self.net, self.device_mesh["data_parallel"])
        elif self.kind == "DDP" and self.with_master:
            MasterWeights.narrow_(self)

    def configure_optimizers(self) -> Any:
        self.optimizer = optimizer_of(self, self.kind, with_master=self.with_master)
        return self.optimizer

    def on_train_end(self) -> None:
        self.weights = weights(self.optimizer, self)


def with_lightning(kind: str, rank: int, *, guarded: bool, with_master: bool) -> Result:
    strategy: Any = "ddp" if kind == "DDP" else ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    module = Module(kind, with_master=with_master)
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, enable_checkpointing=False, **silent,
        use_distributed_sampler=False, gradient_clip_val=MAX_NORM,
        plugins=MixedPrecision("bf16-mixed", "cpu", guard(kind) if guarded else None),
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(batches(kind, rank), batch_size=None))  # type: ignore[arg-type]
    return [*module.losses], module.weights


def guard(kind: str) -> castwise.GradScaler:
    make = castwise.GradScaler if kind == "DDP" else castwise.ShardedGradScaler
    return make("cpu", schedule=castwise.schedules.Guard())


def with_fabric(kind: str, rank: int, *, guarded: bool, with_master: bool) -> Result:
    parallel = FabricParallel(lambda model, mesh: sharded(model, mesh["data_parallel"]), 2, 1)
    plugin = FabricMixedPrecision("bf16-mixed", "cpu", guard(kind) if guarded else None)
    strategy: Any = "ddp" if kind == "DDP" else parallel
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugin)
    fabric.launch()
    module = net()
    if kind == "DDP":
        inner = optimizer_of(module, kind, with_master=with_master)
        model, optimizer = fabric.setup(module, inner)
        if with_master:
            inner.sum_over_ranks(model)
    else:
        model = fabric.setup_module(module)
        inner = optimizer_of(model, kind, with_master=with_master)
        optimizer = fabric.setup_optimizers(inner)
    numbers: list[Any] = []
    for batch in batches(kind, rank):
        loss = loss_of(model(batch))
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        assert norm is not None
        numbers += [loss.item(), norm_and_kind(norm)]
        optimizer.step()
        optimizer.zero_grad()
    return numbers, weights(inner, module)


def with_the_trainer(folder: Path, how: str, *, with_master: bool) -> Result:
    """Train two micro-batches a step with the Transformers Trainer in DDP, and its default `max_grad_norm`."""
    fresh_accelerator("DDP")
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, initializer_range=0.2, **size))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(16, (32, 8))]
    settings = transformers.TrainingArguments(
        *(str(folder),), max_steps=STEPS, use_cpu=True, bf16=True, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2, ddp_backend="gloo",
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    optimizer = optimizer_of(model, "DDP", with_master=with_master)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    callbacks = [ReportCallback(folder / str(with_master))] if how == "the callback" else []
    trainer = transformers.Trainer(
        model, settings, train_dataset=rows, optimizers=(optimizer, schedule), callbacks=callbacks
    )
    if how == "prepare":
        prepare(trainer.accelerator)
    trainer.train()
    logged = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
    return logged, weights(optimizer, model)


def main() -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    rank, world_size, folder = join(sys.argv)
    size = str(world_size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", ACCELERATE_USE_CPU="true")
    frameworks: dict[str, Callable[..., Result]] = {
        "Accelerate": with_accelerate,
        "Lightning": with_lightning,
        "Fabric": with_fabric,
    }
    results: dict[str, dict[str, Result]] = {}
    for framework, run in frameworks.items():
        for kind in ("DDP", "FSDP2"):
            for guarded in (False, True):
                results[f"{framework}, {kind}, {guarded}"] = {
                    str(with_master): run(kind, rank, guarded=guarded, with_master=with_master)
                    for with_master in (False, True)
                }
    for how in ("prepare", "the callback"):
        of_how = Path(folder) / f"{how} {rank}"
        results[f"Trainer, {how}"] = {
            str(with_master): with_the_trainer(of_how, how, with_master=with_master) for with_master in (False, True)
        }
    dist.barrier()
    dist.destroy_process_group()
    print("\n" + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
