"""`MasterWeights` in Lightning, Accelerate and Transformers: the numbers of a loop by hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
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


@pytest.fixture
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its state in the process, and refuses another precision until it is reset."""
    accelerate: Any = pytest.importorskip("accelerate.state")
    yield
    accelerate.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.GradientState._reset_state()


@pytest.mark.usefixtures("_fresh_accelerate")
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


@pytest.mark.usefixtures("_fresh_accelerate")
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("by_value", [False, True])
def test_accelerate_clips_as_with_fp32_weights(by_value: bool, guarded: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    from castwise.integrations.accelerate import prepare

    def run(*, with_master: bool) -> tuple[list[float], dict[str, Any]]:
        schedule = castwise.schedules.Guard() if guarded else None
        accelerator = prepare(accelerate.Accelerator(cpu=True, mixed_precision="bf16"), schedule=schedule)
        model = net()
        inner: Any = MasterWeights(adamw(model.parameters()), model) if with_master else adamw(model.parameters())
        prepared, optimizer = accelerator.prepare(model, inner)
        numbers = []
        for batch in batches(STEPS):
            loss = nn.functional.cross_entropy(prepared(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            if by_value:
                accelerator.clip_grad_value_(prepared.up.parameters(), 0.02)  # some of the optimizer's
                accelerator.clip_grad_value_(prepared.parameters(), 0.01)
            else:
                numbers.append(float(accelerator.clip_grad_norm_(prepared.parameters(), 0.5)))
                numbers.append(float(accelerator.clip_grad_norm_(prepared.up.parameters(), 0.05)))
            optimizer.step()
            optimizer.zero_grad()
            numbers.append(loss.item())
        return numbers, inner.fp32_state_dict(model) if with_master else model.state_dict()

    (numbers, weights), (ours, same) = run(with_master=False), run(with_master=True)
    assert ours == numbers
    assert same_bits(same, weights)


@pytest.mark.usefixtures("_fresh_accelerate")
@pytest.mark.parametrize("guarded", [False, True])
def test_accelerate_clips_several_optimizers_together_as_with_fp32_weights(guarded: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    from castwise.integrations.accelerate import prepare

    def run(*, with_master: bool) -> list[float]:
        schedule = castwise.schedules.Guard() if guarded else None
        accelerator = prepare(accelerate.Accelerator(cpu=True, mixed_precision="bf16"), schedule=schedule)
        model = net()
        inner: list[Any] = [adamw(model.up.parameters()), adamw([*model.down.parameters(), *model.norm.parameters()])]
        if with_master:
            inner[0] = MasterWeights(inner[0], model)
        prepared, *optimizers = accelerator.prepare(model, *inner)
        numbers = []
        for batch in batches(STEPS):
            loss = nn.functional.cross_entropy(prepared(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            trained = [*model.up.parameters(), *model.norm.parameters(), *model.down.parameters()]
            numbers += [loss.item(), float(accelerator.clip_grad_norm_(trained, 0.1))]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return numbers

    assert run(with_master=True) == run(with_master=False)


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


@pytest.mark.parametrize("plugin", ["castwise", "castwise with a scaler", "Lightning"])
@pytest.mark.parametrize("by_value", [False, True])
def test_lightning_clips_as_with_fp32_weights(by_value: bool, plugin: str, tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("lightning")
    from castwise.integrations.lightning import MixedPrecision

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, *, with_master: bool) -> None:
            super().__init__()
            self.net, self.with_master, self.losses = net(), with_master, list[float]()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = loss_of(self.net, batch)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = adamw(self.parameters())
            return MasterWeights(optimizer, self) if self.with_master else optimizer

    def run(*, with_master: bool) -> tuple[list[float], dict[str, Any]]:
        module = Module(with_master=with_master)
        guard = castwise.GradScaler("cpu", schedule=castwise.schedules.Guard()) if "scaler" in plugin else None
        given = {} if plugin == "Lightning" else {"plugins": MixedPrecision("bf16-mixed", "cpu", guard)}
        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        clip = {
            "gradient_clip_val": 0.01 if by_value else 0.5,
            "gradient_clip_algorithm": "value" if by_value else "norm",
        }
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, enable_checkpointing=False, **options, **clip, **given
        )
        with castwise.installed() if plugin == "Lightning" else nullcontext():  # in fp32: the module has its own region
            trainer.fit(module, torch.utils.data.DataLoader([*batches(STEPS)], batch_size=None))
        optimizer = trainer.optimizers[0]
        return module.losses, optimizer.fp32_state_dict(module) if with_master else module.state_dict()

    (losses, weights), (ours, same) = run(with_master=False), run(with_master=True)
    assert ours == losses
    assert same_bits(same, weights)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_fabric_clips_as_with_fp32_weights(fused: bool, by_value: bool, guarded: bool) -> None:
    lightning: Any = pytest.importorskip("lightning")
    from castwise.integrations.lightning import FabricMixedPrecision

    def run(*, with_master: bool) -> tuple[list[float], dict[str, Any]]:
        guard = castwise.GradScaler("cpu", schedule=castwise.schedules.Guard()) if guarded else None
        plugin = FabricMixedPrecision("bf16-mixed", "cpu", guard)
        fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
        module = net()
        inner: Any = optim.AdamW(module.parameters(), lr=1e-2, fused=fused)
        inner = MasterWeights(inner, module) if with_master else inner
        model, optimizer = fabric.setup(module, inner)
        numbers = []
        for batch in batches(STEPS):
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            fabric.backward(loss)
            bound = {"clip_val": 0.01} if by_value else {"max_norm": 0.5}
            norm = fabric.clip_gradients(model, optimizer, **bound)
            numbers += [loss.item(), 0.0 if norm is None else norm.item()]
            optimizer.step()
            optimizer.zero_grad()
        return numbers, inner.fp32_state_dict(module) if with_master else module.state_dict()

    (numbers, weights), (ours, same) = run(with_master=False), run(with_master=True)
    assert ours == numbers
    assert same_bits(same, weights)


def test_the_plugin_of_fabric_clips_without_a_scaler() -> None:
    pytest.importorskip("lightning")
    from castwise.integrations.lightning import FabricMixedPrecision

    model, optimizer = wrapped(adamw)
    loss_of(model, next(batches(1))).backward()
    expected = nn.utils.get_total_norm([param.grad.float() for param in model.parameters() if param.grad is not None])
    assert torch.equal(FabricMixedPrecision("bf16-mixed", "cpu").clip_grad_norm_(optimizer, 0.5), expected)
    assert optimizer.clip_grad_norm_(torch.inf).item() == pytest.approx(0.5, rel=1e-5)


class Adapted(nn.Module):
    """LoRA, as peft does it without dropout: a frozen layer, and two small ones that are trained."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 2.0 * self.up(self.down(x))  # type: ignore[no-any-return]


def llama(*, with_lora: bool) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, initializer_range=0.2, **size))
    if with_lora:
        model.requires_grad_(False)
        attention = model.model.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(attention, name, Adapted(getattr(attention, name)))
        model.enable_input_require_grads()  # as peft does, for gradient checkpointing
    return model


TRAINER_STEPS = 50


def trained_by_the_trainer(
    folder: Path, how: str, *, with_master: bool, with_lora: bool
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], list[str]]:
    """Train with the Trainer's own clipping; return losses and norms, weights, and warnings about `MasterWeights`."""
    transformers: Any = pytest.importorskip("transformers")
    from castwise.integrations.accelerate import prepare
    from castwise.integrations.transformers import ReportCallback

    tokens = torch.randint(16, (16, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    model = llama(with_lora=with_lora)
    settings = transformers.TrainingArguments(
        *(str(folder),), max_steps=TRAINER_STEPS, use_cpu=True, bf16=True, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_steps=1, per_device_train_batch_size=4, gradient_checkpointing=True,
        learning_rate=1e-2,
    )  # fmt: skip
    # The Trainer's own, whose parameters are in another order than the model's, because norms are not decayed.
    optimizer = transformers.Trainer(model, settings, train_dataset=rows).create_optimizer()
    if with_master:
        optimizer = MasterWeights(optimizer, model)
    schedule = optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    callbacks = [ReportCallback(folder / "report")] if how == "the callback" else []
    with castwise.installed() if how == "installed" else nullcontext(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = transformers.Trainer(
            model, settings, train_dataset=rows, optimizers=(optimizer, schedule), callbacks=callbacks
        )
        if how == "prepare":
            prepare(trainer.accelerator)
        trainer.train()
    logged = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
    weights = optimizer.fp32_state_dict(model) if with_master else model.state_dict()
    warned = [str(warning.message) for warning in caught if "MasterWeights" in str(warning.message)]
    return logged, {name: value.detach() for name, value in weights.items()}, warned


@pytest.mark.usefixtures("_fresh_accelerate")
@pytest.mark.parametrize("with_lora", [False, True], ids=["all weights", "LoRA"])
def test_transformers_trainer_clips_as_with_fp32_weights(with_lora: bool, tmp_path: Path) -> None:
    def run(how: str, *, with_master: bool = True) -> tuple[list[Any], dict[str, Any], list[str]]:
        return trained_by_the_trainer(tmp_path / how, how, with_master=with_master, with_lora=with_lora)

    logged, weights, _ = run("alone", with_master=False)
    norms = [norm for _, norm in logged]
    assert len(norms) == TRAINER_STEPS
    assert max(norms) > 1.0  # max_grad_norm
    for how in ("prepare", "the callback", "installed"):
        ours, same, warned = run(how)
        assert ours == logged, how
        assert same_bits(same, weights), how
        assert warned == [], how
    rounded, others, warned = run("not integrated")
    assert rounded != logged
    assert not same_bits(others, weights)
    assert len(warned) == 1
    assert "call castwise.integrations.accelerate.prepare(accelerator)" in warned[0]


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
