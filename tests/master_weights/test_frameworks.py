"""`MasterWeights` in Lightning, Accelerate and Transformers: the numbers of a loop by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.master_weights.training import Net, batches, net, same_bits, train, wrapped
from torch import nn, optim

import castwise
from castwise import MasterWeights

STEPS = 4


def adamw(params: Any) -> optim.Optimizer:
    return optim.AdamW(params, lr=1e-2)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    model, optimizer = wrapped(adamw)
    train(model, optimizer, STEPS)
    return optimizer.fp32_state_dict(model)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with castwise.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def test_accelerate(expected: dict[str, Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, inner = wrapped(adamw)
    schedule = optim.lr_scheduler.ConstantLR(inner, 1.0)
    prepared, optimizer, schedule = accelerator.prepare(model, inner, schedule)
    for batch in batches(STEPS):
        accelerator.backward(loss_of(prepared, batch))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert same_bits(inner.fp32_state_dict(model), expected)


def test_lightning(expected: dict[str, Any], tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net: Net = net()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> MasterWeights:
            return MasterWeights(adamw(self.parameters()), self)

    module = Module()
    data = torch.utils.data.DataLoader([*batches(STEPS)], batch_size=None)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=tmp_path, **options)
    trainer.fit(module, data)
    optimizer = trainer.optimizers[0]
    assert same_bits(optimizer.fp32_state_dict(module.net), expected)
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    again = Module()
    further = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=tmp_path, **options)
    further.fit(again, data, ckpt_path=tmp_path / "it.ckpt", weights_only=False)
    assert same_bits(further.optimizers[0].fp32_state_dict(again.net), expected)


def test_transformers_trainer(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": loss_of(self.net, tokens)}

    def run(*, with_master: bool) -> dict[str, Any]:
        model = Wrapped()
        optimizer: Any = adamw(model.parameters())
        if with_master:
            optimizer = MasterWeights(optimizer, model)
        settings = transformers.TrainingArguments(
            *(str(tmp_path),), max_steps=STEPS, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
            max_grad_norm=0.0, per_device_train_batch_size=4, remove_unused_columns=False,
        )  # fmt: skip
        rows = [{"tokens": row} for batch in batches(STEPS) for row in batch]
        schedule = optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        trainer = transformers.Trainer(model, settings, train_dataset=rows, optimizers=(optimizer, schedule))
        trainer.train()
        return optimizer.fp32_state_dict(model) if with_master else model.state_dict()

    assert same_bits(run(with_master=True), run(with_master=False))
