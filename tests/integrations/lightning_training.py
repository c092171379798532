"""A small training with Lightning's Trainer, with castwise's plugin or Lightning's own, and the comparison of two."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.plugins.precision as of_trainer
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import castwise
from castwise.integrations.lightning import MixedPrecision

# Lightning's advice: so many workers, so many steps before it logs, types of PyTorch that it should not ask for.
QUIET = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore:.*LeafSpec.*")]
for _name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
    logging.getLogger(_name).setLevel(logging.ERROR)

PRECISIONS = ["16-mixed", "bf16-mixed"]
STEPS = 12
# From here the first steps overflow, and then the scale grows several times.
SCALING = {"init_scale": 2.0**12, "growth_interval": 2}
SILENT = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batches(steps: int = STEPS, first: int = 0) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(4 * STEPS, 8, generator=draw), torch.randn(4 * STEPS, 1, generator=draw)
    rows = slice(4 * first, 4 * (first + steps))
    return DataLoader(TensorDataset(x[rows], y[rows]), batch_size=4)


class Regression(pl.LightningModule):
    """Its losses are so large that gradients overflow at first.

    Args:
        make: Makes the optimizer.
        skip: Of this batch there is no loss.
    """

    def __init__(self, make: MakeOptimizer = sgd, skip: int | None = None) -> None:
        super().__init__()
        self.net, self.make, self.skip = net(), make, skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        x, y = batch
        return None if index == self.skip else 100.0 * nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Tiny(pl.LightningModule):
    """Has no op that autocast would run in a low precision, and an optimizer that evaluates several times a step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, -1.0]))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return ((batch[0][:, :2] * self.weight).tanh() - batch[1]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)


class Noting(castwise.GradScaler):
    """Notes how gradients are unscaled."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=2.0**4)
        self.calls: list[str] = []

    def unscale_(self, optimizer: Any) -> None:
        self.calls.append("unscale_")
        super().unscale_(optimizer)

    def clip_grad_norm_(self, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        self.calls.append("clip_grad_norm_")
        return super().clip_grad_norm_(optimizer, *arguments, **options)


def ours(precision: Any, **options: Any) -> MixedPrecision:
    scaler = castwise.GradScaler("cpu", **SCALING) if precision == "16-mixed" else None
    return MixedPrecision(precision, "cpu", scaler, **options)


def theirs(precision: Any) -> of_trainer.MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", **SCALING) if precision == "16-mixed" else None
    return of_trainer.MixedPrecision(precision, "cpu", scaler)


def fit(plugin: Any, module: pl.LightningModule | None = None, **options: Any) -> dict[str, Any]:
    """Train, and return the checkpoint of the end: weights, optimizers, learning rates, counters, scaler."""
    data, checkpoint = options.pop("data", batches()), options.pop("ckpt_path", None)
    options = {"max_epochs": 1, "enable_checkpointing": False, **SILENT, **options}
    trainer = pl.Trainer(accelerator="cpu", devices=1, plugins=plugin, **options)
    trainer.fit(module or Regression(), data, ckpt_path=checkpoint)
    with TemporaryDirectory() as folder:
        trainer.save_checkpoint(Path(folder, "last.ckpt"))
        saved: dict[str, Any] = torch.load(Path(folder, "last.ckpt"), weights_only=False)
    return saved


def dtypes_with(plugin: Any, default: torch.dtype) -> list[torch.dtype]:
    """What tensors and modules are made in, and what becomes of those that a model is given and returns."""
    torch.set_default_dtype(default)
    try:
        with plugin.tensor_init_context():
            found = [torch.ones(1).dtype]
        with plugin.module_init_context():
            found.append(plugin.convert_module(nn.Linear(1, 1)).weight.dtype)
        for dtype in (torch.int64, torch.float16, torch.float32, torch.float64):
            given = plugin.convert_input(torch.ones(1, dtype=dtype))
            found += [given.dtype, plugin.convert_output(given).dtype]
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def same(first: Any, second: Any, rtol: float = 0.0) -> bool:
    """Whether all there is is equal; what the state of castwise's scaler has more than torch's does not count."""
    if isinstance(first, torch.Tensor):
        return first.shape == second.shape and torch.allclose(first, second, rtol=rtol, atol=0.0)
    if isinstance(first, dict):
        extra = {"steps_taken", "steps_skipped", "skips_in_a_row"}
        keys = [set(each) - extra for each in (first, second)]
        return keys[0] == keys[1] and all(same(first[key], second[key], rtol) for key in keys[0])
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(same(a, b, rtol) for a, b in zip(first, second, strict=True))
    return bool(first == second)


# -- two models, an optimizer each ----------------------------------------------------------------------------------

# Of their losses: the gradients of the first overflow where those of the second do not.
WEIGHTS = (100.0, 1.0)


def pair_loss(model: nn.Module, weight: float, batch: Any) -> torch.Tensor:
    return weight * nn.functional.mse_loss(model(batch[0]), batch[1])


def pair_by_hand(max_norm: float | None = None, make: MakeOptimizer = sgd) -> dict[str, Any]:
    """Train both with torch alone, as it documents several optimizers: one update after all steps."""
    models = {"first": net(), "second": net()}
    optimizers = [make(model.parameters()) for model in models.values()]
    scaler = torch.amp.GradScaler("cpu", **SCALING)
    for batch in batches():
        for model, optimizer, weight in zip(models.values(), optimizers, WEIGHTS, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = pair_loss(model, weight, batch)
            scaler.scale(loss).backward()
        for model, optimizer in zip(models.values(), optimizers, strict=True):
            if max_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
        scaler.update()
    return {"weights": weights_of(models), "scaler": scaler.state_dict()}


def weights_of(models: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    return {f"{name}.{key}": value for name, model in models.items() for key, value in model.state_dict().items()}
