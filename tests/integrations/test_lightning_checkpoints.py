"""Checkpoints of Lightning's Trainer: what is resumed is what was never interrupted, and Lightning's own is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.integrations.lightning_training import PRECISIONS, QUIET, batches, fit, ours, same, theirs

from castwise.integrations.lightning import MixedPrecision

pytestmark = QUIET
PER_EPOCH = 5


class Killed(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, index: int) -> None:
        if trainer.current_epoch == 1 and index == 2:
            raise ConnectionError


def each_epoch(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_run_continues_bit_for_bit(precision: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "data": batches(PER_EPOCH)}
    whole = fit(ours(precision), **options)
    with pytest.raises(ConnectionError):
        fit(ours(precision), callbacks=[each_epoch(tmp_path), Killed()], enable_checkpointing=True, **options)
    # The scale and its history are the checkpoint's, not the new plugin's.
    plugin = MixedPrecision(precision, "cpu")
    resumed = fit(plugin, ckpt_path=tmp_path / "epoch=0.ckpt", **options)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert same(resumed[part], whole[part]), part
    assert resumed["global_step"] == 3 * PER_EPOCH
    if precision == "16-mixed":
        assert resumed["MixedPrecision"] == whole["MixedPrecision"]


@pytest.mark.parametrize(("first", "second"), [(ours, theirs), (theirs, ours)], ids=["to lightning", "from lightning"])
def test_checkpoints_are_lightnings(first: Callable[[str], Any], second: Callable[[str], Any], tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": batches(PER_EPOCH)}
    fit(first("16-mixed"), callbacks=[each_epoch(tmp_path)], enable_checkpointing=True, **options)
    other = second("16-mixed")
    other.scaler.set_growth_interval(1)
    resumed = fit(other, ckpt_path=tmp_path / "epoch=0.ckpt", max_epochs=2, **options)
    whole = fit(theirs("16-mixed"), max_epochs=2, **options)
    assert same(resumed["state_dict"], whole["state_dict"])
    assert same(resumed["MixedPrecision"], whole["MixedPrecision"])


def test_the_state_of_lightnings_own_plugin_for_fsdp_is_found() -> None:
    saved = torch.amp.GradScaler("cpu", init_scale=2.0**5).state_dict()
    plugin = MixedPrecision("16-mixed", "cpu")
    plugin.on_load_checkpoint({"FSDPPrecision": saved})
    assert plugin.state_dict()["scale"] == 2.0**5
    # What is saved under the plugin's own name is loaded by Lightning itself.
    plugin.on_load_checkpoint({"FSDPPrecision": saved | {"scale": 2.0}, "MixedPrecision": saved})
    assert plugin.state_dict()["scale"] == 2.0**5
