"""Lightning's Trainer with two optimizers, which a module steps by itself, and with one that evaluates by itself."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.plugins.precision as of_trainer
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tests.integrations.lightning_training import (
    QUIET,
    STEPS,
    WEIGHTS,
    MakeOptimizer,
    Tiny,
    fit,
    fused,
    net,
    ours,
    pair_by_hand,
    pair_loss,
    same,
    sgd,
    theirs,
)

import castwise
from castwise.integrations.lightning import MixedPrecision

pytestmark = QUIET


class Pair(pl.LightningModule):
    """Two models with an optimizer each.

    Args:
        how: Each backward is followed by its step (`"in turn"`, or in it by a closure, `"closures"`), or all backwards
            come before the steps (`"after all"`).
        max_norm: What gradients are clipped to.
        make: Makes the optimizers.
    """

    automatic_optimization = False

    def __init__(self, how: str, max_norm: float | None = None, make: MakeOptimizer = sgd) -> None:
        super().__init__()
        self.first, self.second, self.how, self.max_norm, self.make = net(), net(), how, max_norm, make

    def training_step(self, batch: Any, _: int) -> None:
        def backward(place: int) -> None:
            optimizers[place].zero_grad()
            self.manual_backward(pair_loss(models[place], WEIGHTS[place], batch))

        models, optimizers = (self.first, self.second), self.optimizers()
        if self.how == "after all":
            backward(0)
            backward(1)
        for place, optimizer in enumerate(optimizers):
            if self.how == "closures":
                optimizer.step(closure=lambda place=place: backward(place))
                continue
            if self.how == "in turn":
                backward(place)
            if self.max_norm is not None:
                self.clip_gradients(optimizer, self.max_norm, "norm")
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.make(self.first.parameters()), self.make(self.second.parameters())]


@pytest.mark.parametrize("how", ["in turn", "closures"])
def test_optimizers_that_are_stepped_in_turn_are_lightnings_bit_for_bit(how: str) -> None:
    mine = fit(ours("16-mixed"), Pair(how))
    assert same(mine, fit(theirs("16-mixed"), Pair(how)))
    assert 1 < mine["MixedPrecision"]["steps_skipped"] < STEPS


def test_optimizers_that_are_stepped_after_all_backwards_share_a_scale_as_torch_documents_it() -> None:
    mine, reference = fit(ours("16-mixed"), Pair("after all")), pair_by_hand()
    assert same(mine["state_dict"], reference["weights"])
    assert same(mine["MixedPrecision"], reference["scaler"])
    # Lightning's own moves the scale between them, and the second divides by another one than it was multiplied with.
    assert not same(fit(theirs("16-mixed"), Pair("after all"))["state_dict"], reference["weights"])


@pytest.mark.parametrize("make", [sgd, fused], ids=["sgd", "fused adamw"])
def test_manual_clipping_is_of_unscaled_gradients(make: MakeOptimizer) -> None:
    mine, reference = fit(ours("16-mixed"), Pair("after all", 0.1, make)), pair_by_hand(0.1, make)
    assert same(mine["state_dict"], reference["weights"], rtol=1e-4)
    assert not same(pair_by_hand(make=make)["weights"], reference["weights"], rtol=1e-4)


def test_lightnings_own_manual_clipping_is_of_scaled_gradients() -> None:
    mine, other = (fit(plugin("16-mixed"), Pair("in turn", 0.1))["state_dict"] for plugin in (ours, theirs))
    assert not same(mine, other, rtol=1e-2)


def test_a_step_without_a_backward_since_the_last_is_in_an_iteration_of_its_own() -> None:
    class Twice(Pair):
        def training_step(self, batch: Any, _: int) -> None:
            for model in (self.first, self.second):
                self.manual_backward(pair_loss(model, 1e-3, batch))
            first, second = self.optimizers()
            first.step()
            first.step()
            second.step()

    counts = fit(MixedPrecision("16-mixed", "cpu"), Twice("after all"))["MixedPrecision"]
    assert counts["steps_taken"] == 3 * STEPS


def test_a_checkpoint_has_the_last_update_in_it() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", castwise.GradScaler("cpu", init_scale=2.0**-8, growth_interval=1))
    counts = fit(plugin, Pair("after all"))["MixedPrecision"]
    assert counts["scale"] == 2.0 ** (STEPS - 8)
    assert counts["steps_taken"] == 2 * STEPS


@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_lbfgs_is_scaled_which_lightning_refuses(max_norm: float | None) -> None:
    with pytest.raises(MisconfigurationException, match="LBFGS"):
        fit(theirs("16-mixed"), Tiny())
    mine = fit(ours("16-mixed"), Tiny(), gradient_clip_val=max_norm)
    unscaled = fit(of_trainer.Precision(), Tiny(), gradient_clip_val=max_norm)
    # The steps grow without bound here, and the last bit of the coefficient with them.
    assert same(mine["state_dict"], unscaled["state_dict"], rtol=0.0 if max_norm is None else 1e-5)
