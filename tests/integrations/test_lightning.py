"""`MixedPrecision` in Lightning's Trainer, beside Lightning's own."""

from __future__ import annotations

import importlib
import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.plugins.precision as of_trainer
import pytest
import pytorch_lightning
import torch
from tests.integrations.lightning_training import (
    PRECISIONS,
    QUIET,
    SCALING,
    SILENT,
    STEPS,
    MakeOptimizer,
    Noting,
    Regression,
    batches,
    dtypes_with,
    fit,
    fused,
    net,
    ours,
    same,
    sgd,
    theirs,
)

import castwise
from castwise.integrations import pytorch_lightning as mirrored
from castwise.integrations.lightning import FabricMixedPrecision, MixedPrecision
from castwise.monitor import Run
from castwise.schedules import Guard

pytestmark = QUIET
FUSED = pytest.mark.parametrize("make", [sgd, fused], ids=["sgd", "fused adamw"])

# -- the same as Lightning's own ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 5},
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
        {"max_epochs": 2, "limit_train_batches": 5},
    ],
    ids=["plain", "accumulated", "clipped by value", "two epochs"],
)
def test_a_training_is_lightnings_bit_for_bit(options: dict[str, Any], precision: str) -> None:
    mine, reference = fit(ours(precision), **options), fit(theirs(precision), **options)
    assert {"state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step"} <= mine.keys()
    assert same(mine, reference)
    if precision == "16-mixed" and not options:
        counts = mine["MixedPrecision"]
        assert counts["steps_skipped"] > 1
        assert counts["scale"] > SCALING["init_scale"] * 0.5 ** counts["steps_skipped"]
        assert mine["global_step"] == STEPS


class Twice(Regression):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) - self.net(0.3 * x)


@pytest.mark.parametrize("weight_cache", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_of_weights_that_are_used_twice_add_up_as_lightnings(precision: str, weight_cache: bool) -> None:
    assert same(fit(ours(precision, weight_cache=weight_cache), Twice()), fit(theirs(precision), Twice()))


@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_what_is_made_and_given_keeps_its_dtype_as_with_lightnings(default: torch.dtype) -> None:
    assert dtypes_with(ours("16-mixed"), default) == dtypes_with(theirs("16-mixed"), default)


@pytest.mark.parametrize("precision", PRECISIONS)
@FUSED
def test_clipped_gradients_are_those_of_float64_arithmetic(make: MakeOptimizer, precision: str) -> None:
    class Looking(pl.Callback):
        """Compares what an optimizer steps on with gradients that it has seen before."""

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            gradients = [parameter.grad.double() for parameter in pl_module.parameters()]
            norm = math.sqrt(sum(float(gradient.pow(2).sum()) for gradient in gradients))
            self.expected = [gradient * min(1.0, 0.5 / (norm + 1e-6)) for gradient in gradients]

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if all(gradient.isfinite().all() for gradient in self.expected):
                got = [parameter.grad.double() for parameter in pl_module.parameters()]
                errors.extend(float((a / b - 1.0).abs().max()) for a, b in zip(got, self.expected, strict=True))

    errors: list[float] = []
    fit(ours(precision), Regression(make), gradient_clip_val=0.5, callbacks=[Looking()])
    assert len(errors) > 4
    assert max(errors) < 4 * torch.finfo(torch.float32).eps


def test_a_training_that_clips_by_the_norm_is_lightnings_up_to_roundings_of_the_norm() -> None:
    mine = fit(ours("16-mixed"), gradient_clip_val=0.5)
    reference = fit(theirs("16-mixed"), gradient_clip_val=0.5)
    assert same(mine["state_dict"], reference["state_dict"], rtol=1e-6)
    assert same(mine["MixedPrecision"], reference["MixedPrecision"])
    assert not same(mine["state_dict"], fit(theirs("16-mixed"))["state_dict"], rtol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_fused_optimizer_can_be_clipped_which_lightning_refuses(precision: str) -> None:
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(theirs(precision), Regression(fused), gradient_clip_val=0.5)
    fit(ours(precision), Regression(fused), gradient_clip_val=0.5)


def test_fp16_by_name_is_bf16_on_a_cpu_and_the_plugin_is_fp16() -> None:
    assert pl.Trainer(accelerator="cpu", precision="16-mixed", **SILENT).precision == "bf16-mixed"
    plugin = MixedPrecision("16-mixed", "cpu")
    assert pl.Trainer(accelerator="cpu", plugins=plugin, **SILENT).precision == "16-mixed"
    with plugin.forward_context():
        assert net()(torch.ones(1, 8)).dtype is torch.float16


# -- hooks ----------------------------------------------------------------------------------------------------------


def note_norm(module: Any) -> None:
    norm = torch.stack([parameter.grad.norm() for parameter in module.parameters()]).norm()
    module.norms = [*getattr(module, "norms", []), float(norm)]


class NormInModule(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        note_norm(self)


class NormInClipping(Regression):
    def configure_gradient_clipping(self, optimizer: Any, *arguments: Any, **options: Any) -> None:
        note_norm(self)
        self.clip_gradients(optimizer, *arguments, **options)


class NormInCallback(pl.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        note_norm(pl_module)


@pytest.mark.parametrize("where", ["module", "clipping", "callback", "function"])
@FUSED
def test_hooks_see_unscaled_gradients(make: MakeOptimizer, where: str) -> None:
    looking = pl.callbacks.LambdaCallback(on_before_optimizer_step=lambda trainer, module, _: note_norm(module))
    callbacks = {"callback": [NormInCallback()], "function": [looking]}.get(where, [])
    seen = []
    for plugin in (MixedPrecision("16-mixed", "cpu", Noting()), of_trainer.Precision()):
        module = {"module": NormInModule, "clipping": NormInClipping}.get(where, Regression)(make)
        fit(plugin, module, gradient_clip_val=1e6, callbacks=callbacks, max_steps=1)
        seen.append(module.norms)
    assert seen[0] == pytest.approx(seen[1], rel=0.01)  # in fp16, and in fp32


def test_lightnings_own_shows_gradients_of_fused_optimizers_scaled() -> None:
    norms = []
    for plugin in (
        of_trainer.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**4)),
        ours("bf16-mixed"),
    ):
        module = NormInModule(fused)
        fit(plugin, module, max_steps=1)
        norms += module.norms
    assert norms[0] / norms[1] == pytest.approx(2.0**4, rel=0.1)


def test_gradients_are_unscaled_by_clipping_alone_if_nobody_looks_at_them() -> None:
    scaler = Noting()
    fit(MixedPrecision("16-mixed", "cpu", scaler), gradient_clip_val=0.5, callbacks=[pl.Callback()])
    assert scaler.calls == ["clip_grad_norm_"] * STEPS
    scaler = Noting()
    fit(MixedPrecision("16-mixed", "cpu", scaler), NormInModule(), gradient_clip_val=0.5)
    assert scaler.calls == ["unscale_", "clip_grad_norm_"] * STEPS


# -- batches without a loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [0, 5])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_without_a_loss_is_skipped_as_by_lightning(accumulate: int, skip: int) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    mine = fit(ours("16-mixed"), Regression(skip=skip), **options)
    assert same(mine, fit(theirs("16-mixed"), Regression(skip=skip), **options))
    clipped = fit(ours("16-mixed"), Regression(skip=skip), gradient_clip_val=1e6, **options)
    assert same(mine["state_dict"], clipped["state_dict"])


def test_the_loss_of_a_skipped_batch_is_not_the_next_steps() -> None:
    class Remembering(Regression):
        def backward(self, loss: torch.Tensor) -> None:  # at a scale of 1
            losses.append(float(loss.detach()))
            super().backward(loss)

    facts: list[Any] = []
    losses: list[float] = []
    plugin = MixedPrecision("16-mixed", "cpu", castwise.GradScaler("cpu", init_scale=1.0))
    plugin.scaler.register_step_hook(facts.append)
    fit(plugin, Remembering(skip=5), accumulate_grad_batches=2)
    assert len(facts) == STEPS // 2 - 1
    # Batch 4 has had a loss, and batch 5, which was to complete the step, none.
    assert facts[2].loss == pytest.approx(losses[5] + losses[6])


def test_no_hook_of_a_step_is_called_for_a_batch_without_a_loss_as_lightnings_own_does() -> None:
    class Counting(pl.Callback):
        calls = 0

        def on_before_optimizer_step(self, *_: Any) -> None:
            self.calls += 1

    mine, reference = Counting(), Counting()
    fit(ours("16-mixed"), Regression(skip=5), callbacks=[mine])
    fit(theirs("16-mixed"), Regression(skip=5), callbacks=[reference])
    assert (mine.calls, reference.calls) == (STEPS - 1, STEPS)


# -- what castwise adds ---------------------------------------------------------------------------------------------


def test_a_guard_skips_a_step_in_bf16() -> None:
    class Poisoned(Regression):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            return loss * torch.nan if index == 3 else loss

    plugin = MixedPrecision("bf16-mixed", "cpu", castwise.GradScaler("cpu", schedule=Guard()))
    guarded = fit(plugin, Poisoned())
    assert guarded["MixedPrecision"]["steps_skipped"] == 1
    assert all(weight.isfinite().all() for weight in guarded["state_dict"].values())
    alone = fit(MixedPrecision("bf16-mixed", "cpu"), Poisoned())
    assert not any(weight.isfinite().all() for weight in alone["state_dict"].values())


def test_a_policy_is_bound_to_the_module() -> None:
    dtypes: dict[str, torch.dtype] = {}

    class Watched(Regression):
        def configure_model(self) -> None:
            for name in ("0", "2"):
                layer = self.net.get_submodule(name)
                layer.register_forward_hook(lambda *call, name=name: dtypes.update({name: call[2].dtype}))

    policy = castwise.Policy(compute="bfloat16", modules={"net.2": "float32"})
    fit(MixedPrecision("bf16-mixed", "cpu", policy=policy), Watched(), max_steps=1)
    assert dtypes == {"0": torch.bfloat16, "2": torch.float32}
    with pytest.raises(RuntimeError, match="a Trainer binds it when it sets up the model"):
        MixedPrecision("bf16-mixed", "cpu", policy=policy).autocast_context_manager()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_weight_cache_casts_once_per_step_and_changes_nothing(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "castwise.weights._weight_cache._MIN_TRAINED", 0
    )  # else small weights are left to autocast in training

    class Reporting(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            reports.append(trainer.precision_plugin._weight_cache.report())

    reports: list[Any] = []
    plugin = ours(precision, weight_cache=True)
    cached = fit(plugin, accumulate_grad_batches=4, callbacks=[Reporting()])
    assert same(cached, fit(theirs(precision), accumulate_grad_batches=4))
    (report,) = reports
    parameters, steps = 4, STEPS // 4
    assert report.refreshes <= parameters * steps
    assert report.hits + report.refreshes == parameters * STEPS
    assert plugin._weight_cache is None  # its memory is given back


def test_a_weight_cache_casts_once_for_all_of_a_validation() -> None:
    class Validated(Regression):
        def validation_step(self, batch: Any, _: int) -> None:
            self(batch[0])

        def on_validation_epoch_end(self) -> None:
            reports.append(self.trainer.precision_plugin._weight_cache.report())

    reports: list[Any] = []
    plugin = ours("bf16-mixed", weight_cache=True)
    pl.Trainer(accelerator="cpu", plugins=plugin, **SILENT).validate(Validated(), batches(), verbose=False)
    assert (reports[0].refreshes, reports[0].hits) == (4, 4 * (STEPS - 1))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: MixedPrecision("16-true", "cpu"), ValueError, "precision must be '16-mixed' or 'bf16-mixed', got "),
        (lambda: FabricMixedPrecision("32", "cpu"), ValueError, "precision must be '16-mixed' or 'bf16-mixed', got "),
        (
            lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")),
            TypeError,
            "scaler must be a castwise.GradScaler or castwise.ShardedGradScaler, got a torch.amp",
        ),
        (
            lambda: MixedPrecision("bf16-mixed", "cpu", policy=castwise.policies.fp16),
            ValueError,
            "precision='bf16-mixed' contradicts the policy, which computes in float16",
        ),
        (
            lambda: MixedPrecision("bf16-mixed", "cpu", policy=castwise.policies.bf16.bind(net())),
            TypeError,
            "policy must be an unbound castwise.Policy, got BoundPolicy",
        ),
    ],
    ids=["precision", "precision of Fabric", "torch's scaler", "contradicting policy", "bound policy"],
)
def test_what_cannot_work_is_refused(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_a_plugin_travels_to_other_processes() -> None:
    assert same(fit(pickle.loads(pickle.dumps(ours("16-mixed")))), fit(ours("16-mixed")))


# -- pytorch_lightning ----------------------------------------------------------------------------------------------


class Mirrored(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.make, self.skip = net(), sgd, None

    forward, training_step = Regression.forward, Regression.training_step
    configure_optimizers = Regression.configure_optimizers


def test_pytorch_lightning_has_plugins_of_its_own(tmp_path: Any) -> None:
    options: Any = {"max_epochs": 1, "enable_checkpointing": False, "gradient_clip_val": 0.5, "accelerator": "cpu"}
    plugin = mirrored.MixedPrecision("16-mixed", "cpu", castwise.GradScaler("cpu", **SCALING))
    report, module = mirrored.ReportCallback(tmp_path), Mirrored()
    pytorch_lightning.Trainer(plugins=plugin, callbacks=[report], **options, **SILENT).fit(module, batches())
    assert same(module.state_dict(), fit(ours("16-mixed"), gradient_clip_val=0.5)["state_dict"])
    assert len(Run.read(tmp_path).steps) == STEPS
    with pytest.raises(pytorch_lightning.utilities.exceptions.MisconfigurationException, match="invalid type"):
        pytorch_lightning.Trainer(plugins=ours("16-mixed"), **options, **SILENT)


@pytest.mark.parametrize(("name", "missing"), [("lightning", "lightning.pytorch"), ("pytorch_lightning",) * 2])
def test_without_lightning_it_is_said_what_to_install(name: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (missing, f"castwise.integrations.{name}"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    text = rf"castwise\.integrations\.{name} needs .*pip install 'castwise\[lightning\]'"
    with pytest.raises(ImportError, match=text):
        importlib.import_module(f"castwise.integrations.{name}")
