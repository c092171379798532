"""Steps without a scaler: each is checked before it is taken, and the batch of one with an inf or NaN is replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import castwise
from castwise import Monitor
from castwise.diagnosis._backward_calls import BACKWARD_CALLS
from castwise.diagnosis._loss_code import LOSS_CODE
from castwise.monitor import Run
from castwise.monitor import _checked_steps as checked_steps
from castwise.monitor import _monitor as monitor_module
from castwise.monitor import _step_check as step_check
from castwise.monitor._run_files import run_in

Records = list[dict[str, Any]]


class Gate(nn.Module):
    """Divides by the mean of its input, which is 0 for a batch of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.mean()


LINE_OF_DIVISION = Gate.forward.__code__.co_firstlineno + 1


def gated() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), Gate(), nn.Linear(4, 2))


def batches(bad: set[int], steps: int = 8) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        yield torch.zeros(5, 4) if step in bad else torch.randn(5, 4, generator=generator)


def train(model: nn.Module, optimizer: Optimizer, bad: set[int], **options: Any) -> None:
    for batch in batches(bad, **options):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def of(records: Records, kind: str) -> Records:
    return [record for record in records if record["kind"] == kind]


def watched(model: nn.Module, optimizer: Optimizer, training: Callable[[], object], **options: bool) -> Records:
    records: Records = []
    with Monitor(model, optimizer, sinks=[records.append], on_nonfinite="diagnose", **options):
        training()
    return records


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_the_first_step_with_a_nan_is_replayed_with_the_weights_from_before_it() -> None:
    model = gated()
    optimizer = AdamW(model.parameters(), 0.01)
    records = watched(model, optimizer, lambda: train(model, optimizer, {3}))
    (diagnosis,) = of(records, "diagnosis")  # and the later steps, whose weights are NaN, are not replayed
    assert (diagnosis["step"], diagnosis["module"], diagnosis["op"]) == (3, "1", "aten.div")
    assert f"{Path(__file__).name}:{LINE_OF_DIVISION}" in diagnosis["summary"]
    causes = [record["cause"] for record in of(records, "step")]
    assert causes == [None, None, "non-finite loss", *["non-finite weights"] * 5]
    assert not any(record["skipped"] for record in of(records, "step"))


def test_losses_are_recorded() -> None:
    model = gated()
    optimizer, losses = SGD(model.parameters(), 0.01), []

    def training() -> None:
        for batch in batches(set(), 3):
            optimizer.zero_grad()
            for half in batch[:3], batch[3:]:
                loss = model(half).square().mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()

    records = watched(model, optimizer, training)
    sums = [first + second for first, second in zip(losses[::2], losses[1::2], strict=True)]
    assert [record["loss"] for record in of(records, "step")] == pytest.approx(sums)


def leaves_out_by_loss(optimizer: Optimizer, backward: Callable[[], Tensor]) -> bool:
    optimizer.zero_grad()
    return bool(backward().isfinite())


def leaves_out_by_loss_and_keeps_zeros(optimizer: Optimizer, backward: Callable[[], Tensor]) -> bool:
    optimizer.zero_grad(set_to_none=False)
    return bool(backward().isfinite())


def leaves_out_by_norm(optimizer: Optimizer, backward: Callable[[], Tensor]) -> bool:
    optimizer.zero_grad()
    backward()
    norm = nn.utils.clip_grad_norm_([param for group in optimizer.param_groups for param in group["params"]], 1.0)
    return bool(norm.isfinite())


LEAVE_OUT = [leaves_out_by_loss, leaves_out_by_loss_and_keeps_zeros, leaves_out_by_norm]


@pytest.mark.parametrize("is_good", LEAVE_OUT)
def test_a_step_that_the_script_leaves_out_for_its_loss_was_not_taken_and_is_diagnosed(is_good: Any) -> None:
    model = gated()
    optimizer, losses = SGD(model.parameters(), 0.01), []

    def backward(batch: Tensor) -> Tensor:
        losses.append(model(batch).square().mean())
        losses[-1].backward()
        return losses[-1].detach()

    def training() -> None:
        for batch in batches({3, 6, 7}):
            if is_good(optimizer, lambda batch=batch: backward(batch)):
                optimizer.step()

    records = watched(model, optimizer, training)
    assert [record["loss"] for record in of(records, "step")] == [
        pytest.approx(loss.item()) for loss in losses if loss.isfinite()
    ]
    assert {record["cause"] for record in of(records, "step")} == {None}
    assert of(records, "mistake") == []
    found = [(record["step"], record["cause"], record["module"]) for record in of(records, "diagnosis")]
    assert found == [(3, "left out by the script", "1"), (5, "left out by the script", "1")]


def test_losses_of_gradients_that_a_script_keeps_elsewhere_are_not_left_out() -> None:
    """As PCGrad and DP-SGD do."""
    model = gated()
    optimizer = SGD(model.parameters(), 0.01)

    def training() -> None:
        for first, second in zip(batches({3}), batches(set()), strict=True):
            kept = []
            for batch in first, second:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                kept.append([param.grad for param in model.parameters()])
            for param, *gradients in zip(model.parameters(), *kept, strict=True):
                param.grad = sum(gradients)
            optimizer.step()

    records = watched(model, optimizer, training)
    assert [record["cause"] for record in of(records, "step")][:4] == [
        *[None] * 2,
        "non-finite loss",
        "non-finite weights",
    ]
    assert [record["cause"] for record in of(records, "diagnosis")] == ["non-finite loss"]


def test_watching_changes_no_bit_and_leaves_nothing_behind() -> None:
    plain, seen = gated(), gated()
    backward, clip = torch.autograd.backward, torch.nn.utils.clip_grad_norm_
    train(plain, AdamW(plain.parameters(), 0.01), {6})
    optimizer = AdamW(seen.parameters(), 0.01)
    watched(seen, optimizer, lambda: train(seen, optimizer, {6}))
    assert torch.equal(
        weights(plain),
        weights(seen),
    ) or weights(seen).isnan().equal(weights(plain).isnan())
    assert torch.autograd.backward is backward
    assert torch.nn.utils.clip_grad_norm_ is torch.nn.utils.clip_grad.clip_grad_norm_ is clip
    assert not optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]  # torch's
    assert not BACKWARD_CALLS.losses


def test_an_inf_before_a_batch_norm_is_blamed_and_not_the_statistics_that_it_has_spoilt() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), 0.01)

    def training() -> None:
        for number, batch in enumerate(batches(set())):
            optimizer.zero_grad()
            model(batch.index_fill(0, torch.tensor([1]), math.inf) if number == 4 else batch).sum().backward()
            optimizer.step()

    (diagnosis,) = of(watched(model, optimizer, training), "diagnosis")
    assert (diagnosis["step"], diagnosis["phase"]) == (5, "input")
    assert diagnosis["summary"] == "Input 0 is inf at (1, 0)."
    assert not model[0].running_mean.isfinite().all()  # type: ignore[union-attr]  # the replay leaves it as it was


def test_the_bad_one_of_several_micro_batches_is_found() -> None:
    model = gated()
    optimizer = SGD(model.parameters(), 0.01)

    def training() -> None:
        for batch in (torch.ones(2, 4), torch.zeros(2, 4), torch.ones(2, 4)):
            (model(batch).square().mean() / 3).backward()
        optimizer.step()

    (diagnosis,) = of(watched(model, optimizer, training), "diagnosis")
    assert "input 0: float32 (2, 4), 0 .. 0" in diagnosis["text"]


def test_of_two_models_that_one_optimizer_trains_the_one_at_fault_is_named(tmp_path: Path) -> None:
    class Encoder(nn.Sequential): ...

    class Decoder(nn.Sequential): ...

    encoder, decoder = Encoder(nn.Linear(4, 4)), Decoder(Gate(), nn.Linear(4, 2))
    optimizer = SGD([*encoder.parameters(), *decoder.parameters()], 0.01)
    nn.init.zeros_(encoder[0].bias)
    with castwise.installed(tmp_path, on_nonfinite="diagnose"):
        for batch in batches({3}):
            optimizer.zero_grad()
            decoder(encoder(batch)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                encoder[0].bias.zero_()
    (diagnosis,) = Run.read(run_in(tmp_path) / "Decoder+Encoder").diagnoses
    assert (diagnosis.step, diagnosis.module, diagnosis.op) == (3, "Decoder.0", "aten.div")


def test_a_batch_in_memory_that_the_script_uses_again_is_copied_from_the_next_step_on() -> None:
    model = gated()
    optimizer = SGD(model.parameters(), 0.0)
    static = torch.empty(5, 4)

    def training() -> None:
        for batch in batches({5}):
            optimizer.zero_grad()
            static.copy_(batch)
            loss = model(static).square().mean()
            loss.backward()
            static.fill_(1.0)
            optimizer.step()

    first, *_ = of(watched(model, optimizer, training), "diagnosis")
    assert (first["step"], first["module"]) == (5, "1")


def test_the_norm_that_clips_is_enough_if_it_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    norms = step_check._norms
    monkeypatch.setattr(step_check, "_norms", lambda gradients: read.append(1) or norms(gradients))
    model = gated()
    optimizer = SGD(model.parameters(), 0.01)

    def training(parameters: Callable[[], Any]) -> None:
        for batch in batches(set(), 3):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(parameters(), 1.0)
            optimizer.step()

    watched(model, optimizer, lambda: training(model.parameters))
    assert not read
    watched(model, optimizer, lambda: training(lambda: [model[0].weight]))  # type: ignore[index]  # of others, it is not
    assert len(read) == 3


def test_a_norm_that_overflows_alone_is_no_fault() -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = SGD(model.parameters(), 0.0)
    records = watched(
        model, optimizer, lambda: ((model(torch.full((1, 4), 3e30)) * 1e-3).sum().backward(), optimizer.step())
    )
    assert of(records, "step")[0]["cause"] is None


def test_finite_gradients_of_a_loss_that_is_not_finite_are_reported() -> None:
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), 0.01)
    records = watched(
        model, optimizer, lambda: ((model(torch.ones(1, 4)).sum() + math.inf).backward(), optimizer.step())
    )
    assert of(records, "step")[0]["cause"] == "non-finite loss"
    assert weights(model).isfinite().all()


def test_gradients_of_a_closure_are_checked_after_it() -> None:
    model = gated()
    optimizer = SGD(model.parameters(), 0.01)

    def training() -> None:
        for batch in batches({3}):

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    (diagnosis,) = of(watched(model, optimizer, training), "diagnosis")
    assert (diagnosis["step"], diagnosis["module"]) == (3, "1")


# -- guard ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda params: AdamW(params, 0.01),
        lambda params: AdamW(params, 0.01, fused=True),
        lambda params: SGD(params, 0.01, momentum=0.9, weight_decay=0.1),
        lambda params: torch.optim.Adagrad(params, 0.01),
    ],
)
def test_guarded_steps_give_the_bits_that_a_guarding_scaler_gives(make: Any, tmp_path: Path) -> None:
    expected, got = gated(), gated()
    optimizer, scaler = make(expected.parameters()), castwise.GradScaler("cpu", schedule=castwise.schedules.Guard())
    for batch in batches({3, 4, 7}):
        optimizer.zero_grad()
        scaler.scale(expected(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    with castwise.installed(tmp_path, guard=True):
        train(got, make(got.parameters()), {3, 4, 7})
    assert weights(got).isfinite().all()
    assert torch.equal(weights(got), weights(expected))
    steps = Run.read(run_in(tmp_path) / "Sequential").steps
    assert [step.step for step in steps if step.skipped] == [3, 4, 7]
    assert {step.cause for step in steps if step.skipped} == {"non-finite loss"}


def test_gradients_are_the_scripts_again_after_a_skipped_step(tmp_path: Path) -> None:
    model = gated()
    optimizer = SGD(model.parameters(), 0.01)
    with castwise.installed(tmp_path, guard=True):
        model(torch.zeros(5, 4)).square().mean().backward()
        gradients = [param.grad for param in model.parameters()]
        optimizer.step()
    assert all(param.grad is before for param, before in zip(model.parameters(), gradients, strict=True))


def test_an_optimizer_that_needs_all_gradients_is_not_guarded_and_that_is_said(tmp_path: Path) -> None:
    class Plain(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                param.sub_(param.grad, alpha=0.01)

    model = gated()
    with (
        pytest.warns(
            RuntimeWarning, match="steps of Plain with an inf or NaN are not skipped: its code does not check"
        ),
        castwise.installed(tmp_path, guard=True),
    ):
        train(model, Plain(model.parameters()), {3})
    assert weights(model).isnan().any()


def test_a_guard_that_a_scaler_makes_unnecessary_is_pointed_out(tmp_path: Path) -> None:
    from castwise._installation import _INSTALLED

    with castwise.installed(tmp_path, guard=True):
        model = gated()
        optimizer, scaler = SGD(model.parameters(), 0.01), torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(5, 4)).sum()).backward()
        scaler.step(optimizer)
        (note,) = _INSTALLED[0][1].notes
    assert note.startswith("--guard had no effect")


# -- before the first step, and without a module ----------------------------------------------------------------------


def test_the_first_step_of_a_run_in_fp32_is_replayed(tmp_path: Path) -> None:
    with castwise.installed(tmp_path, on_nonfinite="diagnose"):
        model = gated()
        train(model, AdamW(model.parameters(), 0.01), {1}, steps=3)
    (diagnosis,) = Run.read(run_in(tmp_path) / "Sequential").diagnoses
    assert (diagnosis.step, diagnosis.module) == (1, "1")


def test_tensors_of_no_module_are_recorded_under_the_names_of_their_variables(tmp_path: Path) -> None:
    slope, offset = torch.ones(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    with castwise.installed(tmp_path, on_nonfinite="diagnose"):
        optimizer = SGD([slope, offset], 0.01)
        for batch in batches({3}, 4):
            optimizer.zero_grad()
            (batch / batch.abs().max() * slope + offset).sum().backward()
            optimizer.step()
    run = Run.read(run_in(tmp_path) / "RawTensors")
    assert [step.cause for step in run.steps] == [None, None, "non-finite loss", "non-finite weights"]
    assert run.steps[2].parameters == ("slope",)


# -- accelerators -----------------------------------------------------------------------------------------------------


def call_it_an_accelerator(monkeypatch: Any) -> None:
    """Call a CPU an accelerator, so that no step waits for its check."""
    for module in (checked_steps, monitor_module):
        monkeypatch.setattr(module, "device_of", lambda optimizer: torch.device("cuda"))
    monkeypatch.setattr(LOSS_CODE, "backward_begins", lambda loss, is_finite: None)  # no loss is read there


def test_on_an_accelerator_the_cause_comes_later_and_spoilt_weights_are_not_blamed(monkeypatch: Any) -> None:
    call_it_an_accelerator(monkeypatch)
    model = gated()
    optimizer = SGD(model.parameters(), 0.01)
    records = watched(model, optimizer, lambda: train(model, optimizer, {3}))
    assert [record["cause"] for record in of(records, "step")][:4] == [None, None, *["non-finite loss"] * 2]
    assert not of(records, "diagnosis")


def test_on_an_accelerator_the_batch_is_replayed_with_kept_weights_and_nothing_changes(monkeypatch: Any) -> None:
    call_it_an_accelerator(monkeypatch)
    trained = []
    for is_watched in (True, False):
        model = gated()
        optimizer = AdamW(model.parameters(), 0.01)
        if is_watched:
            records = watched(model, optimizer, lambda: train(model, optimizer, {20, 22}, steps=24), snapshots=True)  # noqa: B023
        else:
            train(model, optimizer, {20, 22}, steps=24)
        trained.append(weights(model))
    assert torch.equal(trained[0].view(torch.int32), trained[1].view(torch.int32))
    (diagnosis,) = of(records, "diagnosis")
    assert (diagnosis["step"], diagnosis["module"], diagnosis["op"]) == (20, "1", "aten.div")
    assert diagnosis["summary"].endswith(f":{LINE_OF_DIVISION}, with the weights of step 17.")


@pytest.mark.parametrize("rate", [0.01, 1e30])
def test_on_an_accelerator_a_loss_is_blamed_only_if_the_output_was_finite_in_the_run(
    rate: float, monkeypatch: Any
) -> None:
    call_it_an_accelerator(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), rate)

    def training() -> None:
        for step, batch in enumerate(batches(set(), steps=6), 1):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            (loss.sub(loss.detach()).log().mul(0.0) if step == 4 else loss).backward()
            optimizer.step()

    (diagnosis,) = of(watched(model, optimizer, training, snapshots=True), "diagnosis")
    if rate < 1:
        assert (diagnosis["step"], diagnosis["phase"]) == (4, "loss")
        assert "the loss is not: check the loss function" in diagnosis["advice"]
    else:
        assert (diagnosis["phase"], diagnosis["remedy"]) == ("forward", "learning rate")
        assert diagnosis["tried"] == "finite with the weights of step 1"
        assert diagnosis["summary"] == "In the run the model's output was inf or NaN."


def test_snapshots_are_for_diagnoses(tmp_path: Path) -> None:
    model = gated()
    with pytest.raises(ValueError, match='snapshots=True is for the replay of batches: pass on_nonfinite="diagnose"'):
        Monitor(model, SGD(model.parameters(), 0.1), snapshots=True)
    with pytest.raises(ValueError, match='snapshots=True is for the replay of batches: pass on_nonfinite="diagnose"'):
        castwise.install(tmp_path, snapshots=True)


def test_a_sum_of_squares_in_fp16_does_not_overflow() -> None:
    assert step_check._norm([torch.full((100,), 6e4, dtype=torch.float16)]).isfinite()
