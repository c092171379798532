"""`FabricMixedPrecision` in Lightning's Fabric, beside Lightning's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.fabric.plugins.precision as of_fabric
import pytest
import torch
from lightning.fabric import Fabric
from tests.integrations.lightning_training import (
    PRECISIONS,
    QUIET,
    STEPS,
    WEIGHTS,
    MakeOptimizer,
    Noting,
    Tiny,
    batches,
    dtypes_with,
    fused,
    net,
    ours,
    pair_by_hand,
    pair_loss,
    same,
    sgd,
    theirs,
    weights_of,
)
from torch import nn

import castwise
from castwise.integrations.lightning import FabricMixedPrecision

pytestmark = QUIET


def of_ours(precision: Any) -> FabricMixedPrecision:
    return FabricMixedPrecision(precision, "cpu", ours(precision).scaler)


def of_theirs(precision: Any) -> of_fabric.MixedPrecision:
    return of_fabric.MixedPrecision(precision, "cpu", theirs(precision).scaler)


class Training:
    def __init__(self, plugin: Any, make: MakeOptimizer = sgd) -> None:
        self.plugin, self.fabric = plugin, Fabric(accelerator="cpu", devices=1, plugins=plugin)
        model = net()
        self.model, self.optimizer = self.fabric.setup(model, make(model.parameters()))
        self.state = {"model": self.model, "optimizer": self.optimizer, "precision": plugin}

    def train(self, clip: Callable[[Training], object] | None = None, data: Any = None) -> dict[str, Any]:
        self.run(clip, data)
        return {"model": self.model.state_dict(), "precision": self.plugin.state_dict()}

    def run(self, clip: Callable[[Training], object] | None = None, data: Any = None) -> None:
        for x, y in data or batches():
            self.optimizer.zero_grad()
            self.fabric.backward(100.0 * nn.functional.mse_loss(self.model(x), y))
            if clip is not None:
                clip(self)
            self.optimizer.step()


def by_fabric(training: Training) -> None:
    training.fabric.clip_gradients(training.model, training.optimizer, max_norm=0.5, error_if_nonfinite=False)


def by_value(training: Training) -> None:
    training.fabric.clip_gradients(training.model, training.optimizer, clip_val=0.5)


def in_one_read(training: Training) -> None:
    training.plugin.clip_grad_norm_(training.optimizer, 0.5)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("clip", [None, by_fabric, by_value], ids=["plain", "clipped", "clipped by value"])
def test_a_training_is_lightnings_bit_for_bit(clip: Any, precision: str) -> None:
    mine = Training(of_ours(precision)).train(clip)
    assert same(mine, Training(of_theirs(precision)).train(clip))
    assert precision == "bf16-mixed" or mine["precision"]["steps_skipped"] > 1


@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_what_is_made_and_given_has_the_dtype_of_lightnings(default: torch.dtype) -> None:
    assert dtypes_with(of_ours("16-mixed"), default) == dtypes_with(of_theirs("16-mixed"), default)


@pytest.mark.parametrize("make", [sgd, fused], ids=["sgd", "fused adamw"])
def test_gradients_can_be_clipped_in_one_read(make: MakeOptimizer) -> None:
    scaler = Noting()
    mine = Training(FabricMixedPrecision("16-mixed", "cpu", scaler), make).train(in_one_read)
    assert scaler.calls == ["clip_grad_norm_"] * STEPS
    other = Training(FabricMixedPrecision("16-mixed", "cpu", Noting()), make).train(by_fabric)
    assert same(mine["model"], other["model"], rtol=1e-4)
    assert not same(
        mine["model"], Training(FabricMixedPrecision("16-mixed", "cpu", Noting()), make).train()["model"], 1e-4
    )
    with pytest.raises(RuntimeError, match=r"use fabric\.clip_gradients"):
        Training(of_ours("bf16-mixed"), make).train(in_one_read)


def test_an_overflow_ends_fabrics_clipping_and_is_skipped_by_ours() -> None:
    def strictly(training: Training) -> None:
        training.fabric.clip_gradients(training.model, training.optimizer, max_norm=0.5)

    for plugin in (of_ours("16-mixed"), of_theirs("16-mixed")):
        with pytest.raises(RuntimeError, match="non-finite"):
            Training(plugin).train(strictly)
    assert Training(of_ours("16-mixed")).train(in_one_read)["precision"]["steps_skipped"] > 1


def test_a_saved_training_continues_bit_for_bit(tmp_path: Path) -> None:
    whole = Training(of_ours("16-mixed")).train()
    before = Training(of_ours("16-mixed"))
    before.train(data=batches(5))
    before.fabric.save(tmp_path / "five.ckpt", before.state)
    after = Training(FabricMixedPrecision("16-mixed", "cpu"))
    after.fabric.load(tmp_path / "five.ckpt", after.state)
    resumed = after.train(data=batches(STEPS - 5, first=5))
    assert same(resumed, whole)
    assert resumed["precision"] == whole["precision"]


def pair(plugin: Any, how: str) -> dict[str, Any]:
    """Train two models; each backward is followed by its step, or in a closure of it, or all come before the steps."""
    models = {"first": net(), "second": net()}
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    pairs = [fabric.setup(model, sgd(model.parameters())) for model in models.values()]
    for batch in batches():

        def backward(place: int, batch: Any = batch) -> torch.Tensor:
            model, optimizer = pairs[place]
            optimizer.zero_grad()
            loss = pair_loss(model, WEIGHTS[place], batch)
            fabric.backward(loss)
            return loss

        if how == "after all":
            backward(0)
            backward(1)
        for place, (_, optimizer) in enumerate(pairs):
            if how == "closures":
                optimizer.step(lambda place=place: backward(place))
                continue
            if how == "in turn":
                backward(place)
            optimizer.step()
    return {"weights": weights_of(models), "scaler": plugin.state_dict()}


@pytest.mark.parametrize("how", ["in turn", "closures"])
def test_optimizers_that_are_stepped_in_turn_are_lightnings_bit_for_bit(how: str) -> None:
    # Lightning's own knows no closures.
    assert same(pair(of_ours("16-mixed"), how), pair(of_theirs("16-mixed"), "in turn"))


def test_optimizers_that_are_stepped_after_all_backwards_share_a_scale_as_torch_documents_it() -> None:
    assert same(pair(of_ours("16-mixed"), "after all"), pair_by_hand())
    assert not same(pair(of_theirs("16-mixed"), "after all"), pair_by_hand())


def test_with_one_optimizer_the_scale_moves_with_its_step() -> None:
    training, records = Training(of_ours("16-mixed")), []
    with castwise.Monitor(training.model, training.optimizer.optimizer, training.plugin.scaler, sinks=[records.append]):
        training.run()
    assert [record["kind"] for record in records].count("step") == STEPS


def test_no_iteration_ends_within_the_step_of_a_closure() -> None:
    class Noting(castwise.GradScaler):
        def step(self, *arguments: Any, **options: Any) -> Any:
            calls.append("step")
            returned = super().step(*arguments, **options)
            calls.append("stepped")
            return returned

        def update(self, *arguments: Any) -> None:
            calls.append("update")
            super().update(*arguments)

    calls: list[str] = []
    pair(FabricMixedPrecision("16-mixed", "cpu", Noting("cpu", init_scale=1.0)), "closures")
    assert calls == ["step", "stepped", "update"] * (2 * STEPS)


def test_lbfgs_is_scaled_which_lightning_refuses() -> None:
    def train(plugin: Any) -> torch.Tensor:
        fabric, module = Fabric(accelerator="cpu", devices=1, plugins=plugin), Tiny()
        _, optimizer = fabric.setup(module, module.configure_optimizers())
        for batch in batches():

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = module.training_step(batch, 0)
                fabric.backward(loss)
                return loss

            optimizer.step(closure)
        return module.weight.detach()

    assert torch.equal(train(of_ours("16-mixed")), train(of_fabric.Precision()))
    with pytest.raises(TypeError, match="LBFGS"):
        train(of_theirs("16-mixed"))
