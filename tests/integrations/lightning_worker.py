"""Trains with Lightning's Trainer and Fabric on several ranks, and prints what became of the weights.

Run by `test_lightning.py`, once for each rank: `python lightning_worker.py RANK WORLD_SIZE FILE WHAT`.
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
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision as LightningsMixedPrecision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from tests.distributed.ranks import join
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp import MixedPrecision as FSDPDtypes
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import DataLoader, TensorDataset

import castwise
from castwise.integrations.lightning import FabricMixedPrecision, MixedPrecision, ReportCallback

CPU = torch.device("cpu")
SPOILT = 3  # the step whose gradients are not finite on rank 1
STEPS, SCALE, LR = 6, 2.0**8, 0.05
SILENT = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def data(rank: int) -> DataLoader[Any]:
    """Batches of this rank alone, and in each whether it spoils the gradients."""
    draw = torch.Generator().manual_seed(1 + rank)
    spoils = (torch.arange(1, STEPS + 1) == SPOILT) & (rank == 1)
    rows = TensorDataset(torch.randn(STEPS, 4, 4, generator=draw), torch.randn(STEPS, 4, 1, generator=draw), spoils)
    return DataLoader(rows, batch_size=None)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


class Module(pl.LightningModule):
    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], spoil: bool = False) -> None:
        super().__init__()
        self.net, self.make, self.spoil = net(), make, spoil

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y, self.is_spoilt = batch
        output = self.net(x)
        self.dtype_of_output = output.dtype
        return nn.functional.mse_loss(output.float(), y.float())

    def on_after_backward(self) -> None:
        if self.spoil and self.is_spoilt:
            next(self.parameters()).grad.view(-1)[0] = torch.inf

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.trainer.model.parameters())


class InParts(Module):
    """Has FSDP wrapped around a part of it, and keeps the norm of this rank's gradients."""

    def configure_model(self) -> None:
        self.net = fsdp_on_cpu(self.net, self.trainer.strategy.mixed_precision_config)

    def on_train_end(self) -> None:
        self.norm = torch.stack([each.grad.norm() for each in self.parameters() if each.grad is not None]).norm()


class Sharded(Module):
    """Split as FSDP2 does it."""

    def configure_model(self) -> None:
        if not any(isinstance(parameter, torch.distributed.tensor.DTensor) for parameter in self.parameters()):
            for layer in (self.net[0], self.net[2]):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def on_after_backward(self) -> None:
        if self.spoil and self.is_spoilt:
            next(self.parameters()).grad.to_local().view(-1)[0] = torch.inf


class Keep(pl.Callback):
    """Keeps what this rank holds, from before everything is taken down, and which steps have moved it."""

    def __init__(self) -> None:
        self.moved: list[bool] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = held(trainer.model)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        before, self.weights = self.weights, held(trainer.model)
        self.moved.append(before != self.weights)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.scale = None if trainer.scaler is None else trainer.scaler.get_scale()


def held(model: nn.Module) -> list[float]:
    """All numbers, of FSDP1 this rank's."""
    whole = (getattr(parameter, "full_tensor", parameter.detach)() for parameter in model.parameters())
    return [number for parameter in whole for number in parameter.flatten().tolist()]


def fit(rank: int, strategy: Any, plugin: Any, module: pl.LightningModule, **options: Any) -> dict[str, Any]:
    keep, checkpoint = Keep(), options.pop("ckpt_path", None)
    callbacks = [keep, *options.pop("callbacks", [])]
    options = {"max_epochs": 1, "enable_checkpointing": False, **SILENT, **options}
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, plugins=plugin, callbacks=callbacks, **options
    )
    trainer.fit(module, data(rank), ckpt_path=checkpoint)
    return {"weights": keep.weights, "scale": keep.scale, "moved": keep.moved, "scaler": type(plugin.scaler).__name__}


def ours(precision: Any) -> MixedPrecision:
    """With a scaler for models that are split, which others may use as well."""
    scaler = castwise.ShardedGradScaler("cpu", init_scale=SCALE) if precision == "16-mixed" else None
    return MixedPrecision(precision, "cpu", scaler)


def refusal(train: Callable[[], object]) -> str:
    try:
        train()
    except RuntimeError as error:
        return str(error)
    return ""


# -- strategies -----------------------------------------------------------------------------------------------------


def ddp(rank: int, folder: Path) -> dict[str, Any]:
    scaling = {"init_scale": SCALE, "growth_interval": 2}
    mine = MixedPrecision("16-mixed", "cpu", castwise.GradScaler("cpu", **scaling))
    theirs = LightningsMixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **scaling))
    report = ReportCallback(folder / f"rank {rank}", every=2)
    policy = MixedPrecision("bf16-mixed", "cpu", policy=castwise.Policy("bfloat16", modules={"net.2": "float32"}))
    module = Module(sgd)
    with warnings.catch_warnings(record=True) as caught:
        watched = fit(rank, "ddp", mine, Module(sgd), callbacks=[report], accumulate_grad_batches=2)
    done: dict[str, Any] = {
        "ddp, ours": watched,
        "ddp, complaints": [str(each.message) for each in caught if each.category is RuntimeWarning],
        "ddp, theirs": fit(rank, "ddp", theirs, Module(sgd), accumulate_grad_batches=2),
        "ddp, default": fit(rank, "ddp", MixedPrecision("16-mixed", "cpu"), Module(sgd)),
        "ddp, spoilt": fit(rank, "ddp", ours("16-mixed"), Module(fused, spoil=True)),
        "ddp, policy": fit(rank, "ddp", policy, module),
    }
    done["ddp, policy"]["dtype"] = str(module.dtype_of_output)
    return done


class FSDPOnCPU(FSDPStrategy):
    """Lightning refuses its own class on a CPU, and would not tell torch that it is one."""

    def __init__(self) -> None:
        super().__init__(state_dict_type="sharded")  # a full one lets torch 2.13 crash on a CPU

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            return model
        return fsdp_on_cpu(model, self.mixed_precision_config)


def fsdp_on_cpu(model: nn.Module, dtypes: FSDPDtypes | None) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, mixed_precision=dtypes, device_id=CPU, use_orig_params=True)


def fsdp_by_hand(rank: int, dtype: torch.dtype, max_norm: float | None) -> dict[str, Any]:
    """Train without Lightning and castwise."""
    model = fsdp_on_cpu(net(), FSDPDtypes(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype))
    optimizer = sgd(model.parameters())
    scaler = ShardedGradScaler("cpu", init_scale=SCALE, enabled=dtype is torch.float16)
    for x, y, _ in data(rank):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
            # Lightning gives FSDP the whole batch, and FSDP rounds all that it is given.
            loss = nn.functional.mse_loss(model(x).float(), y.to(dtype).float())
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(max_norm)
        scaler.step(optimizer)
        scaler.update()
    return {"weights": held(model)}


def fsdp(rank: int, folder: Path) -> dict[str, Any]:
    done: dict[str, Any] = {}
    for precision, dtype in (("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)):
        for max_norm in (None, 0.1):
            name = f"fsdp, {precision}, {max_norm}"
            done[f"{name}, ours"] = fit(rank, FSDPOnCPU(), ours(precision), Module(sgd), gradient_clip_val=max_norm)
            done[f"{name}, by hand"] = fsdp_by_hand(rank, dtype, max_norm)
    done["fsdp, default"] = fit(rank, FSDPOnCPU(), MixedPrecision("16-mixed", "cpu"), Module(sgd))
    done["fsdp, spoilt"] = fit(rank, FSDPOnCPU(), ours("16-mixed"), Module(fused, spoil=True), gradient_clip_val=0.1)
    bf16 = MixedPrecision("bf16-mixed", "cpu")
    done["fsdp, parts"] = refusal(lambda: fit(rank, FSDPOnCPU(), bf16, InParts(sgd), gradient_clip_val=0.1))
    scaler = castwise.ShardedGradScaler("cpu", schedule=castwise.schedules.Guard())
    parts = InParts(sgd)
    fit(rank, FSDPOnCPU(), MixedPrecision("bf16-mixed", "cpu", scaler), parts, gradient_clip_val=0.1)
    done["fsdp, norm of parts"] = float(parts.norm)
    # Interrupted after the first epoch, and gone on with.
    checkpoints = ModelCheckpoint(folder / "fsdp", filename="{epoch}", save_top_k=-1)
    options = {"max_epochs": 2, "enable_checkpointing": True, "callbacks": [checkpoints]}
    done["fsdp, at once"] = fit(rank, FSDPOnCPU(), ours("16-mixed"), Module(sgd), **options)
    options = {"max_epochs": 2, "ckpt_path": folder / "fsdp" / "epoch=0.ckpt"}
    done["fsdp, resumed"] = fit(rank, FSDPOnCPU(), MixedPrecision("16-mixed", "cpu"), Module(sgd), **options)
    saved = torch.load(folder / "fsdp" / "epoch=0.ckpt" / "meta.pt", weights_only=False)
    done["fsdp, saved"] = [saved["MixedPrecision"], saved["FSDPPrecision"]]
    return done


def fsdp2(rank: int) -> dict[str, Any]:
    def split() -> ModelParallelStrategy:
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)

    done: dict[str, Any] = {}
    for precision in ("16-mixed", "bf16-mixed"):
        for max_norm in (None, 0.1):
            name, options = f"fsdp2, {precision}, {max_norm}", {"gradient_clip_val": max_norm}
            done[f"{name}, ours"] = fit(rank, split(), ours(precision), Sharded(sgd), **options)
            done[f"{name}, ddp"] = fit(rank, "ddp", ours(precision), Module(sgd), **options)
    done["fsdp2, default"] = fit(rank, split(), MixedPrecision("16-mixed", "cpu"), Sharded(sgd))
    done["fsdp2, spoilt"] = fit(rank, split(), ours("16-mixed"), Sharded(fused, spoil=True))
    alone = MixedPrecision("16-mixed", "cpu", castwise.GradScaler("cpu"))
    done["fsdp2, refused"] = refusal(lambda: fit(rank, split(), alone, Sharded(sgd)))
    return done


# -- Fabric ---------------------------------------------------------------------------------------------------------


class FabricFSDPOnCPU(FabricFSDPStrategy):
    def setup_module(self, module: nn.Module) -> nn.Module:
        return fsdp_on_cpu(module, self.mixed_precision_config)


def fabric_fit(rank: int, strategy: Any, plugin: FabricMixedPrecision, *, by_fabric: bool) -> dict[str, Any]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugin)
    fabric.launch()
    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(sgd(model.parameters()))
    for x, y, _ in data(rank):
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(x), y))
        if by_fabric:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
        else:
            plugin.clip_grad_norm_(optimizer, 0.1)
        optimizer.step()
    return {"weights": held(model), "scale": plugin.state_dict()["scale"], "scaler": type(plugin.scaler).__name__}


def with_fabric(rank: int) -> dict[str, Any]:
    def plugin(kind: Any = castwise.ShardedGradScaler) -> FabricMixedPrecision:
        return FabricMixedPrecision("16-mixed", "cpu", kind("cpu", init_scale=SCALE))

    done: dict[str, Any] = {}
    for by_fabric in (True, False):
        done[f"fabric, ddp, {by_fabric}"] = fabric_fit(rank, "ddp", plugin(), by_fabric=by_fabric)
        done[f"fabric, fsdp, {by_fabric}"] = fabric_fit(rank, FabricFSDPOnCPU(), plugin(), by_fabric=by_fabric)
    default = FabricMixedPrecision("16-mixed", "cpu")
    done["fabric, default"] = fabric_fit(rank, FabricFSDPOnCPU(), default, by_fabric=False)
    alone = plugin(castwise.GradScaler)
    done["fabric, refused"] = refusal(lambda: fabric_fit(rank, FabricFSDPOnCPU(), alone, by_fabric=False))
    return done


def main() -> None:
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", RuntimeWarning)  # castwise's
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ["LOCAL_RANK"] = sys.argv[1]  # so that Lightning starts no processes
    rank, _, folder = join(sys.argv)
    done = ddp(rank, Path(folder)) | fsdp(rank, Path(folder)) | fsdp2(rank) | with_fabric(rank)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
