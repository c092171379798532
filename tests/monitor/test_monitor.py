"""What a monitor records of a training, against values that float64 and plain torch give."""

from __future__ import annotations

import gc
import itertools
import math
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.amp import ScaleExhausted
from castwise.amp._readback import Readback
from castwise.monitor import Monitor, Run

SCALE = 2.0**10


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 2)))


class Training:
    """A model that is trained on random numbers, and what a monitor says of it."""

    def __init__(self, scale: float | None = SCALE, **options: Any) -> None:
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = None if scale is None else castwise.GradScaler("cpu", init_scale=scale)
        self.records: list[dict[str, Any]] = []
        self.monitor = Monitor(self.model, self.optimizer, self.scaler, sinks=[self.records.append], **options)
        self._generator = torch.Generator().manual_seed(1)

    def step(self, *, bad: float = 1.0, micro_batches: int = 1, max_norm: float | None = None) -> torch.Tensor:
        self.optimizer.zero_grad()
        for _ in range(micro_batches):
            x = torch.randn(5, 4, generator=self._generator)
            loss = self.model(x).square().mean() * bad
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is None:
            self.optimizer.step()
        else:
            if max_norm is not None:
                self.scaler.clip_grad_norm_(self.optimizer, max_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    def numbers(self, kind: str) -> list[int]:
        return [record["step"] for record in self.of(kind)]


def hooks_of(training: Training) -> int:
    optimizer = training.optimizer
    of_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in training.model.modules())
    return of_modules + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


# -- every step -----------------------------------------------------------------------------------------------------


def test_a_run_begins_with_what_was_trained_and_how() -> None:
    training = Training(every=50)
    with training.monitor:
        pass
    run, end = training.records
    assert (run["kind"], run["format"], run["castwise"], run["device"]) == ("run", 3, castwise.__version__, "cpu")
    settings = run["settings"]
    assert {name: settings[name] for name in ("model", "parameters", "optimizer", "every", "ranks")} == {
        "model": "Sequential",
        "parameters": 44,
        "optimizer": "SGD",
        "every": 50,
        "ranks": 1,
    }
    assert settings["schedule"].startswith("Dynamic(init_scale=1024.0")
    assert end == {"kind": "end", "step": 0}


def test_every_step_is_recorded() -> None:
    training = Training()
    with training.monitor:
        losses = [training.step(max_norm=1e9).item() for _ in range(3)]
    steps = training.of("step")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["loss"] for step in steps] == pytest.approx(losses)
    grads = [parameter.grad for parameter in training.model.parameters()]
    assert steps[-1]["grad_norm"] == pytest.approx(torch.cat([grad.flatten() for grad in grads]).norm().item())
    assert {step["scale"] for step in steps} == {SCALE}
    assert not any(step["skipped"] for step in steps)
    assert steps[0]["seconds"] is None
    assert 0 < steps[1]["seconds"] < 10


@pytest.mark.parametrize(
    ("bad", "cause"), [(math.inf, "non-finite loss"), (math.nan, "non-finite loss"), (3e38, "overflow")]
)
def test_a_skipped_step_says_why(bad: float, cause: str) -> None:
    training = Training()
    with training.monitor:
        training.step()
        training.step(bad=bad)
        training.step()
    _, skipped, after = training.of("step")
    assert (skipped["skipped"], skipped["cause"], skipped["scale"]) == (True, cause, SCALE)
    assert skipped["parameters"] == ["0.weight", "0.bias", "1.1.weight", "1.1.bias"]
    assert (after["skipped"], after["cause"], after["parameters"]) == (False, None, [])
    assert after["scale"] == SCALE / 2


@pytest.mark.parametrize("scaler", [None, castwise.GradScaler("cpu", enabled=False)], ids=["none", "disabled"])
def test_without_scaling_steps_are_those_of_the_optimizer(scaler: castwise.GradScaler | None) -> None:
    training = Training(scale=None)
    monitor = Monitor(training.model, training.optimizer, scaler, every=2, sinks=[training.records.append])
    with monitor:
        for _ in range(3):
            training.step()
    steps = training.of("step")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["scale"] for step in steps] == [None] * 3
    assert [step["loss"] for step in steps] == [None] * 3
    assert training.numbers("sample") == [1, 2]
    assert [sample["scale"] for sample in training.of("sample")] == [1.0, 1.0]
    assert all(sample["weights"] for sample in training.of("sample"))


def test_numbers_go_on_where_a_checkpoint_left_off() -> None:
    first = Training()
    with first.monitor:
        first.step()
        first.step()
    second = Training()
    assert first.scaler is not None
    assert second.scaler is not None
    second.scaler.load_state_dict(first.scaler.state_dict())
    with second.monitor:
        second.step()
    assert second.numbers("step") == second.numbers("sample") == second.numbers("end") == [3]


@pytest.mark.parametrize("scale", [SCALE, None], ids=str)
def test_records_carry_the_numbers_that_the_loop_gives(scale: float | None) -> None:
    training = Training(scale=scale, every=1)
    with training.monitor:
        for number in (0, 1, 5, 6):
            training.monitor.step = number
            training.step()
        training.step()
    assert training.numbers("step") == training.numbers("sample") == [0, 1, 5, 6, 7]
    assert training.numbers("end") == [7]
    assert training.monitor.step == 8


def test_a_number_is_that_of_the_next_step_whatever_the_scaler_has_counted() -> None:
    training = Training(every=1, on_nonfinite="diagnose")
    training.step()
    training.monitor.step = 41
    assert training.monitor.step == 41
    with training.monitor:
        training.step()
        training.step(bad=math.inf)
    for kind in ("step", "sample"):
        assert training.numbers(kind) == [41, 42]
    assert training.numbers("diagnosis") == [42]


def test_numbers_wait_for_what_an_accelerator_finds_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Readback, "is_on_host", False)
    training = Training(every=1)
    with training.monitor:
        for number in (10, 20, 30, 40):
            training.monitor.step = number
            training.step()
            assert training.monitor.step == number + 1
        assert training.numbers("step") == [10, 20]
    assert training.numbers("step") == training.numbers("sample") == [10, 20, 30, 40]


def test_the_number_of_a_step_that_was_not_taken_goes_to_the_next() -> None:
    training = Training()
    assert training.scaler is not None
    with training.monitor:
        training.monitor.step = 7
        training.scaler.scale(training.model(torch.ones(5, 4)).sum()).backward()
        training.scaler.unscale_(training.optimizer)
        training.scaler.update()
        training.step()
        training.step()
    assert training.numbers("step") == [7, 8]


def test_with_several_optimizers_each_step_counts() -> None:
    model, records = mlp(), list[dict[str, Any]]()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    with Monitor(model, optimizers, sinks=[records.append]) as monitor:
        for number in (10, 12):
            monitor.step = number
            model(torch.ones(5, 4)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert [record["step"] for record in records if record["kind"] == "step"] == [10, 11, 12, 13]


def test_after_going_back_to_a_checkpoint_the_later_records_are_forgotten(tmp_path: Path) -> None:
    training = Training(every=1)
    with Monitor(training.model, training.optimizer, training.scaler, every=1, sinks=[tmp_path]) as monitor:
        for number in (1, 2, 3, 4, 3):
            monitor.step = number
            training.step()
    run = Run.read(tmp_path)
    assert [step.step for step in run.steps] == [sample.step for sample in run.samples] == [1, 2, 3]


@pytest.mark.parametrize("number", [-1, True, 1.5, None])
def test_what_is_no_number_of_a_step_is_refused(number: Any) -> None:
    monitor = Training().monitor
    with pytest.raises(ValueError, match=rf"an integer >= 0, got {number}"):
        monitor.step = number
    assert monitor.step == 1


# -- samples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "sampled"), [(1, range(1, 25)), (3, [1, 2, *range(3, 25, 3)]), (10, [1, 2, 4, 8, 10, 20])]
)
def test_samples_are_dense_at_the_beginning(every: int, sampled: Sequence[int]) -> None:
    training = Training(every=every)
    with training.monitor:
        for _ in range(24):
            training.step()
    assert training.numbers("sample") == list(sampled)


def test_a_short_run_has_several_samples_by_default() -> None:
    training = Training(every=100)
    with training.monitor:
        for _ in range(20):
            training.step()
    assert training.numbers("sample") == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("fused", [False, True])
def test_the_gradients_of_a_skipped_step_are_sampled(fused: bool) -> None:
    """Those of others are unscaled when the host knows of the skip, those of fused ones on a CPU are not."""
    samples = []
    for every in (100, 1):
        training = Training(every=every)
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1, fused=fused)
        with Monitor(training.model, training.optimizer, training.scaler, every=every, sinks=[training.records.append]):
            for bad in (1.0, 1.0, 2.0**118):
                training.step(bad=bad)
        samples.append(training.of("sample")[-1])
    assert samples[0]["step"] == samples[1]["step"] == 3
    assert samples[0]["activations"] == {}
    assert [samples[0][key] for key in ("gradients", "modules")] == [
        samples[1][key] for key in ("gradients", "modules")
    ]
    assert samples[0]["modules"]["0"]["nonfinite"] > 0


@pytest.mark.parametrize("scale", [SCALE, 3.0, 0.6875, None], ids=str)
def test_gradients_are_described_unscaled_and_judged_as_scaled(scale: float | None) -> None:
    training = Training(scale=scale)
    with training.monitor:
        training.step(bad=2.0**-22)
    (sample,) = training.of("sample")
    assert sample["scale"] == (scale or 1.0)
    exact = {name: parameter.grad.double().abs() for name, parameter in training.model.named_parameters()}
    exact["0"] = torch.cat([exact["0.weight"].flatten(), exact["0.bias"]])
    assert list(sample["gradients"]) == ["0.weight", "0.bias", "1.1.weight", "1.1.bias"]
    assert list(sample["modules"]) == ["0", "1.1"]
    for name, found in {**sample["gradients"], "0": sample["modules"]["0"]}.items():
        values = exact[name]
        above = values[values > 0]
        assert found["numel"] == values.numel()
        assert found["largest"] == pytest.approx(values.max().item())
        assert found["smallest"] == pytest.approx(above.min().item())
        assert found["zero"] == (values == 0).double().mean().item()
        exponents = (torch.frexp(above)[1] - 1).tolist()
        lowest = found["exponents"]["lowest"]
        assert found["exponents"]["counts"] == [exponents.count(e) for e in range(lowest, max(exponents) + 1)]
        scaled = values * sample["scale"]
        fit = found["formats"]["fp16"]
        assert fit["flush"] == ((scaled > 0) & (scaled < 2.0**-25)).double().mean().item()
        coarse = ((scaled > 0) & (scaled < 2.0**-14)).double().mean().item()
        assert fit["subnormal"] == coarse - fit["flush"]
        assert fit["headroom_bits"] == pytest.approx(math.log2(65504 / scaled.max().item()))


@pytest.mark.parametrize("scale", [SCALE, 3.0, None], ids=str)
def test_a_sampled_step_has_the_norm_of_its_gradients_without_clipping(scale: float | None) -> None:
    training = Training(scale=scale)
    with training.monitor:
        training.step()
    (sample,) = training.of("sample")
    exact = torch.cat([parameter.grad.double().flatten() for parameter in training.model.parameters()]).norm().item()
    assert sample["grad_norm"] == pytest.approx(exact, rel=1e-6)


def test_the_norm_of_a_clipped_step_is_known_once() -> None:
    training = Training(every=1)
    with training.monitor:
        training.step(max_norm=1e-3)
        training.step()
    assert [record["grad_norm"] is not None for record in training.of("step")] == [True, False]
    assert [record["grad_norm"] is not None for record in training.of("sample")] == [False, True]


@pytest.mark.parametrize("every", [1, 100])
def test_the_norm_of_a_skipped_step_is_the_one_it_was_skipped_for(every: int) -> None:
    training = Training(every=every)
    with training.monitor:
        for bad in (1.0, 1.0, 3e38, math.nan):
            training.step(bad=bad)
    *_, overflow, nan = (record["grad_norm"] for record in training.of("sample"))
    assert not math.isfinite(overflow)
    assert math.isnan(nan)


def test_a_norm_is_that_of_all_optimizers_of_an_iteration() -> None:
    model, records = mlp(), list[dict[str, Any]]()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    with Monitor(model, optimizers, sinks=[records.append]):
        model(torch.ones(5, 4)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    (sample,) = (record for record in records if record["kind"] == "sample")
    exact = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item()
    assert sample["grad_norm"] == pytest.approx(exact)


def test_gradients_are_those_that_the_backward_left_whatever_was_done_to_them_since() -> None:
    plain, clipped = Training(), Training()
    with plain.monitor, clipped.monitor:
        plain.step()
        clipped.step(max_norm=1e-6)
    assert plain.of("sample")[0]["gradients"] == clipped.of("sample")[0]["gradients"]


def test_outputs_are_those_of_the_first_micro_batch_and_gradients_of_all() -> None:
    training = Training()
    with training.monitor:
        training.step(micro_batches=3)
    (sample,) = training.of("sample")
    assert {name: found["numel"] for name, found in sample["activations"].items()} == {
        "0": 30,
        "1.0": 30,
        "1.1": 10,
        "1": 10,
        "": 10,
    }
    assert sample["dtypes"] == dict.fromkeys(sample["activations"], "float32")
    exact = training.model[0].weight.grad.abs().max().item()
    assert sample["gradients"]["0.weight"]["largest"] == pytest.approx(exact)


def test_updates_of_weights_are_compared_with_the_weights_before() -> None:
    training = Training(every=4)
    with training.monitor:
        training.step()
        before = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
        training.step()
    weights = training.of("sample")[1]["weights"]
    for name, parameter in training.model.named_parameters():
        change = parameter.detach() - before[name]
        assert weights[name]["update_to_weight"] == pytest.approx((change.norm() / before[name].norm()).item())


@pytest.mark.parametrize("fused", [False, True])
def test_of_a_skipped_step_there_are_no_updates(fused: bool) -> None:
    training = Training()
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1, fused=fused)
    training.optimizer = optimizer
    with Monitor(training.model, optimizer, training.scaler, sinks=[training.records.append]):
        training.step(bad=math.inf)
    (sample,) = training.of("sample")
    assert sample["weights"] == {}
    assert sample["gradients"]["0.weight"]["nonfinite"] > 0
    assert sample["gradients"]["0.weight"]["formats"]["fp16"]["headroom_bits"] == -math.inf


def test_names_are_those_of_the_model_however_it_is_wrapped() -> None:
    training = Training()
    wrapped = torch.compile(nn.DataParallel(training.model), backend="eager")
    with Monitor(wrapped, training.optimizer, training.scaler, sinks=[training.records.append]):  # type: ignore[arg-type]
        training.step()
    assert list(training.of("sample")[0]["gradients"]) == ["0.weight", "0.bias", "1.1.weight", "1.1.bias"]
    assert training.of("run")[0]["settings"]["model"] == "Sequential"


@pytest.mark.parametrize("one_update", [True, False], ids=["one update", "an update for each"])
def test_several_optimizers_share_a_sample(one_update: bool) -> None:
    model, records = mlp(), list[dict[str, Any]]()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    scaler = castwise.GradScaler("cpu", init_scale=SCALE)
    with Monitor(model, optimizers, scaler, every=4, sinks=[records.append]):
        for _ in range(3):
            scaler.scale(model(torch.ones(5, 4)).square().mean()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                if not one_update:
                    scaler.update()
            if one_update:
                scaler.update()
    assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    samples = [record for record in records if record["kind"] == "sample"]
    assert [sample["step"] for sample in samples] == [1, 3]
    for sample in samples:
        assert list(sample["gradients"]) == list(sample["weights"]) == [name for name, _ in model.named_parameters()]


def test_an_optimizer_that_steps_less_often_is_sampled_when_it_does() -> None:
    model, records = mlp(), list[dict[str, Any]]()
    often, seldom = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    scaler = castwise.GradScaler("cpu", init_scale=SCALE)
    with Monitor(model, [often, seldom], scaler, every=1, sinks=[records.append]):
        for number in range(3):
            scaler.scale(model(torch.ones(5, 4)).square().mean()).backward()
            scaler.step(often)
            if number == 1:
                scaler.step(seldom)
            scaler.update()
    samples = [record for record in records if record["kind"] == "sample"]
    assert [list(sample["modules"]) for sample in samples] == [["0"], ["0", "1.1"], ["0"]]


def test_another_optimizer_of_the_scaler_is_none_of_the_monitors_business() -> None:
    training = Training()
    assert training.scaler is not None
    other = nn.Linear(1, 1)
    of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    with training.monitor:
        training.scaler.scale(other(torch.ones(1, 1)).sum()).backward()
        training.scaler.step(of_other)
        training.step()
    assert training.numbers("step") == [1]
    assert list(training.of("sample")[0]["modules"]) == ["0", "1.1"]


@pytest.mark.parametrize("says_so", [True, False], ids=["skip", "no step"])
def test_a_step_that_the_user_leaves_out_is_left_out(says_so: bool) -> None:
    training = Training(every=1)
    scaler, optimizer = training.scaler, training.optimizer
    assert scaler is not None
    largest = []
    with training.monitor:
        for power in range(6):
            training.optimizer.zero_grad()
            scaler.scale(training.model(torch.ones(5, 4)).sum() * 2.0**power).backward()
            scaler.unscale_(optimizer)
            if power in (1, 3):
                if says_so:
                    scaler.skip(optimizer)
            else:
                largest.append(training.model[0].weight.grad.abs().max().item())
                scaler.step(optimizer)
            scaler.update()
    assert training.numbers("sample") == training.numbers("step") == [1, 2, 3, 4]
    assert [sample["gradients"]["0.weight"]["largest"] for sample in training.of("sample")] == largest


# -- being there and not being there --------------------------------------------------------------------------------


def test_between_samples_no_hook_is_on_a_module() -> None:
    training = Training(every=5)
    with training.monitor:
        seen = []
        for _ in range(7):
            seen.append(sum(len(module._forward_hooks) for module in training.model.modules()))
            training.step()
    assert seen == [5, 5, 0, 5, 5, 0, 0]


def test_leaving_removes_every_hook() -> None:
    training = Training(every=1)
    with training.monitor:
        assert hooks_of(training) == 2 * 5 + 2  # one of the model is for good, and one of the optimizer
        training.step()
    assert hooks_of(training) == 0
    records = list(training.records)
    training.step()
    assert training.records == records


def copies_of(weight: torch.Tensor) -> int:
    """How many tensors beside a weight and its gradient have its shape, which no other has."""
    gc.collect()
    known = {weight.data_ptr(), 0 if weight.grad is None else weight.grad.data_ptr()}
    alike = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.shape == weight.shape]
    return sum(each.data_ptr() not in known for each in alike)


@pytest.mark.parametrize("left_out", [False, True], ids=["skipped", "left out"])
def test_copies_of_weights_are_gone_when_it_is_known_that_there_is_no_step(left_out: bool) -> None:
    model = nn.Linear(4, 97)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, copies = castwise.GradScaler("cpu"), []
    monitor = Monitor(model, optimizer, scaler, every=5)
    with monitor:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((5, 4), math.inf)).sum()).backward()
            scaler.unscale_(optimizer)
            copies.append(copies_of(model.weight))
            (scaler.skip if left_out else scaler.step)(optimizer)
            scaler.update()
            copies.append(copies_of(model.weight))
    assert copies == ([1, 1, 1, 1, 0, 0] if left_out else [1, 0, 1, 0, 0, 0])
    assert copies_of(model.weight) == 0
    assert not monitor._handles  # it is still there, and holds nothing


def test_the_last_steps_are_recorded_also_if_an_error_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    # An accelerator tells of a step two updates later, which a CPU can be made to do.
    monkeypatch.setattr(Readback, "is_on_host", property(lambda _: False))
    training = Training(every=1)

    def fail() -> None:
        with training.monitor:
            for _ in range(3):
                training.step()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert training.numbers("step") == training.numbers("sample") == [1, 2, 3]
    assert training.numbers("end") == [3]


def test_facts_that_a_loaded_checkpoint_has_dropped_are_missed_by_no_other_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Readback, "is_on_host", property(lambda _: False))
    training = Training(every=1)
    scaler = training.scaler
    assert scaler is not None
    saved, largest = scaler.state_dict(), []
    with training.monitor:
        for number in range(6):
            if number == 3:
                scaler.load_state_dict(saved)
                training.records.clear()
                largest.clear()
            training.step(bad=2.0**number)
            largest.append(training.model[0].weight.grad.abs().max().item())
    assert training.numbers("sample") == training.numbers("step") == [1, 2, 3]
    assert [sample["gradients"]["0.weight"]["largest"] for sample in training.of("sample")] == largest


def test_an_error_in_the_training_ends_the_record_in_order(tmp_path: Path) -> None:
    training = Training(on_nonfinite="diagnose")
    monitor = Monitor(training.model, training.optimizer, training.scaler, sinks=[tmp_path])

    def fail() -> None:
        with monitor:
            training.step()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert hooks_of(training) == 0
    run = Run.read(tmp_path)
    assert run.ended
    assert [step.step for step in run.steps] == [sample.step for sample in run.samples] == [1]


def test_it_can_be_attached_once_at_a_time_and_again(tmp_path: Path) -> None:
    training = Training()
    monitor = Monitor(training.model, training.optimizer, training.scaler, sinks=str(tmp_path))  # type: ignore[arg-type]
    monitor.attach()
    with pytest.raises(RuntimeError, match=r"already attached: call detach\(\) first"):
        monitor.attach()
    training.step()
    monitor.detach()
    monitor.detach()
    with monitor:
        training.step()
    run = Run.read(tmp_path)
    assert [step.step for step in run.steps] == [sample.step for sample in run.samples] == [1, 2]


@pytest.mark.parametrize("scale", [SCALE, None], ids=["scaled", "unscaled"])
def test_the_training_is_the_same_bit_for_bit(scale: float | None) -> None:
    watched, alone = Training(scale, every=2), Training(scale)
    with watched.monitor:
        for number in range(5):
            for training in (watched, alone):
                training.step(bad=math.inf if number == 2 and scale else 1.0)
    for mine, theirs in zip(watched.model.parameters(), alone.model.parameters(), strict=True):
        assert mine.equal(theirs)


def test_memory_does_not_grow_with_the_run() -> None:
    training = Training(every=5)
    monitor = Monitor(training.model, training.optimizer, training.scaler, every=5, sinks=[lambda record: None])

    def used() -> tuple[int, int]:
        gc.collect()
        return tracemalloc.get_traced_memory()[0], sum(
            issubclass(type(each), torch.Tensor) for each in gc.get_objects()
        )

    tracemalloc.start()
    try:
        with monitor:
            for _ in range(50):
                training.step(bad=math.inf if _ == 3 else 1.0)
            rounds = [used()]
            for _ in range(5):  # what leaks, leaks in each round; what something else of this process keeps, in one
                for _ in range(75):
                    training.step()
                rounds.append(used())
    finally:
        tracemalloc.stop()
    assert min(after[0] - before[0] for before, after in itertools.pairwise(rounds)) < 75 * 40
    assert min(after[1] - before[1] for before, after in itertools.pairwise(rounds)) <= 0


# -- on_nonfinite ------------------------------------------------------------------------------------------------------


def test_a_skipped_step_is_diagnosed_if_asked_for() -> None:
    training = Training(on_nonfinite="diagnose")
    with training.monitor:
        training.step()
        training.model[1][1].weight.data[0, 0] = math.nan
        training.step()
    (found,) = training.of("diagnosis")
    assert (found["step"], found["cause"], found["module"]) == (2, "non-finite weights", "1.1")
    assert training.monitor.diagnosis is not None
    assert found["text"] == str(training.monitor.diagnosis)
    assert found["advice"] == training.monitor.diagnosis.advice
    assert training.of("step")[1]["cause"] == "non-finite weights"


def test_optimizers_of_one_backward_share_its_diagnosis() -> None:
    calls: list[int] = []
    model, records = mlp(), list[dict[str, Any]]()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    scaler = castwise.GradScaler("cpu", init_scale=SCALE)
    monitor = Monitor(model, optimizers, scaler, on_nonfinite="diagnose", sinks=[records.append])
    model.register_forward_pre_hook(lambda *_: calls.append(0))
    with monitor:
        scaler.scale(model(torch.full((5, 4), math.nan)).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert [found["phase"] for found in records if found["kind"] == "diagnosis"] == ["input", "input"]
    assert len(calls) == 2  # one replay
    assert monitor.diagnosis is not None
    assert monitor.diagnosis.phase == "input"


def test_optimizers_of_backwards_of_their_own_have_their_own_diagnoses() -> None:
    model, records = mlp(), list[dict[str, Any]]()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    scaler = castwise.GradScaler("cpu", init_scale=SCALE)
    with Monitor(model, optimizers, scaler, on_nonfinite="diagnose", sinks=[records.append]):
        for optimizer, factor in zip(optimizers, (1.0, math.nan), strict=True):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(5, 4)).sum() * factor).backward()
            scaler.step(optimizer)
        scaler.update()
    first, second = (record for record in records if record["kind"] == "step")
    (diagnosis,) = (record for record in records if record["kind"] == "diagnosis")
    assert (first["skipped"], second["skipped"]) == (False, True)
    assert (diagnosis["step"], diagnosis["phase"]) == (2, "loss")


def test_a_step_of_which_no_forward_was_recorded_is_diagnosed_by_the_graph_of_its_loss() -> None:
    training = Training(on_nonfinite="diagnose")
    assert training.scaler is not None
    with training.monitor:
        training.scaler.scale(training.model[0](torch.ones(5, 4)).sum() * math.inf).backward()  # past the model
        training.scaler.step(training.optimizer)
        training.scaler.update()
    assert training.of("step")[0]["skipped"]
    (found,) = training.of("diagnosis")
    assert (found["phase"], found["op"]) == ("loss", "aten.mul")


def test_a_step_that_was_left_out_has_no_part_in_the_diagnosis_of_the_next() -> None:
    training = Training(on_nonfinite="diagnose")
    assert training.scaler is not None
    with training.monitor:
        training.scaler.scale(training.model(torch.full((5, 4), math.nan)).sum()).backward()
        training.scaler.skip(training.optimizer)
        training.scaler.update()
        training.step(bad=math.inf)
    (diagnosis,) = training.of("diagnosis")
    assert diagnosis["phase"] == "loss"


def test_an_exhausted_scale_carries_the_diagnosis() -> None:
    training = Training()
    schedule = castwise.schedules.Dynamic(init_scale=SCALE, patience=2, on_exhausted="raise")
    training.scaler = castwise.GradScaler("cpu", schedule=schedule)
    monitor = Monitor(training.model, training.optimizer, training.scaler, on_nonfinite="diagnose")
    training.step()
    with monitor:
        training.step(bad=math.inf)
        with pytest.raises(ScaleExhausted) as caught:
            training.step(bad=math.inf)
    assert caught.value.diagnosis is monitor.diagnosis is not None


def test_a_replay_is_not_sampled() -> None:
    training = Training(on_nonfinite="diagnose", every=1)
    with training.monitor:
        training.step(bad=math.inf)
        training.step()
    assert [sample["activations"][""]["numel"] for sample in training.of("sample")] == [10, 10]


def test_a_diagnosis_that_fails_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(on_nonfinite="diagnose")

    def cannot_run_twice(*_: object) -> None:
        if training.of("step"):
            raise OSError("the data are gone")

    handle = training.model[0].register_forward_pre_hook(cannot_run_twice)
    with training.monitor:
        training.step()
        handle.remove()
        loss = training.model(torch.ones(5, 4)).sum() * math.inf
        assert training.scaler is not None
        training.scaler.scale(loss).backward()
        training.model[0].register_forward_pre_hook(cannot_run_twice)
        training.scaler.step(training.optimizer)
        with pytest.warns(RuntimeWarning, match="step 2 could not be diagnosed: OSError: the data are gone"):
            training.scaler.update()
    assert training.of("diagnosis") == []
    assert training.of("step")[1]["skipped"]


# -- arguments ------------------------------------------------------------------------------------------------------


def test_a_scaler_that_does_not_tell_of_its_steps_is_refused() -> None:
    training = Training()
    with pytest.raises(TypeError, match=r"got torch\.amp\.grad_scaler\.GradScaler: use castwise\.GradScaler"):
        Monitor(training.model, training.optimizer, torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be an integer >= 1, got 0"),
        ({"every": 2.5}, "every must be an integer >= 1, got 2.5"),
        ({"on_nonfinite": "raise"}, "on_nonfinite must be \"diagnose\" or None, got 'raise'"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Training(**options)


def test_no_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer must be the model's optimizer or several, got an empty sequence"):
        Monitor(mlp(), [])
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer or a sequence of them, got Linear"):
        Monitor(mlp(), [nn.Linear(1, 1)])  # type: ignore[list-item]


def test_a_repr_shows_the_settings(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), castwise.GradScaler("cpu")
    monitor = castwise.Monitor(model, optimizer, scaler, every=5, sinks=[tmp_path], on_nonfinite="diagnose")
    file = str(tmp_path / "monitor.jsonl.gz")
    assert (
        repr(monitor) == f"Monitor(Linear, [SGD], {scaler}, every=5, sinks=[JSONL({file!r})], on_nonfinite='diagnose')"
    )
    assert "Monitor object at" in repr(castwise.Monitor.__new__(castwise.Monitor))
