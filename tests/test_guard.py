"""A monitor leaves out what it cannot measure, and the training continues."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.recorded import records_in
from torch import nn

import castwise
from castwise._guard import MOST_IN_A_ROW, ErrorBoundary
from castwise.amp._observers import OBSERVERS
from castwise.monitor import Monitor, Run

Records = list[dict[str, Any]]


def test_the_first_failure_is_reported_and_no_other() -> None:
    guard = ErrorBoundary()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in (1, 2):
            with guard:
                raise ValueError(number)
    assert [str(each.message) for each in caught] == ["the monitor skipped a measurement that failed: ValueError: 1"]


def test_an_interrupt_is_no_failure() -> None:
    with pytest.raises(KeyboardInterrupt), ErrorBoundary():
        raise KeyboardInterrupt


def fail(*_: object, **__: object) -> None:
    raise OSError("no such device")


def test_a_door_that_fails_again_and_again_is_closed_and_the_others_stay_open() -> None:
    guard, calls = ErrorBoundary(), list[int]()

    def fails(number: int) -> None:
        calls.append(number)
        raise ValueError(number)

    door, other = guard.door(fails), guard.door(lambda: 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2 * MOST_IN_A_ROW):
            assert door(number) is None
            assert other() == 1
    assert calls == list(range(MOST_IN_A_ROW))
    assert [str(warned.message) for warned in caught] == [
        "the monitor skipped a measurement that failed: ValueError: 0",
        "the monitor skipped a measurement that failed: 10 times in a row, and is not tried again",
    ]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_door_that_succeeds_in_between_stays_open() -> None:
    guard, calls = ErrorBoundary(), list[int]()

    def fails_if_odd(number: int) -> None:
        calls.append(number)
        if number % 2:
            raise ValueError(number)

    for number in range(3 * MOST_IN_A_ROW):
        guard.door(fails_if_odd)(number)
    assert calls == list(range(3 * MOST_IN_A_ROW))


def test_the_first_failure_of_a_final_guard_closes_all_its_doors() -> None:
    closed: list[str] = []
    guard = ErrorBoundary("the check failed", is_final=True, on_closed=lambda: closed.append("closed"))
    assert guard.door(lambda: 1)() == 1
    with pytest.warns(RuntimeWarning, match="^the check failed: OSError: no such device$"):
        guard.door(fail)()
    assert guard.door(lambda: 1)() is None
    assert closed == ["closed"]


def test_a_failure_is_printed_where_warnings_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ErrorBoundary().door(fail)()
    assert capsys.readouterr().err == (
        "castwise: the monitor skipped a measurement that failed: OSError: no such device\n"
    )


def test_an_attach_that_fails_half_way_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, records = nn.Linear(2, 1), Records()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), castwise.GradScaler("cpu")
    monitor = Monitor(model, optimizer, scaler, sinks=[records.append])
    before = list(OBSERVERS)
    monkeypatch.setattr("castwise.monitor._monitor.WATCH.model_found", fail)
    with pytest.warns(RuntimeWarning, match="that failed: OSError: no such device"):
        monitor.attach()
    assert before == OBSERVERS
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == (0, 0)
    assert len(optimizer._optimizer_step_post_hooks) == len(scaler._outcomes.hooks) == len(scaler._gradients_hooks) == 0
    monkeypatch.undo()
    with monitor:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [record["kind"] for record in records] == ["run", "end", "run", "step", "sample", "end"]


def records_of(model: nn.Module, x: torch.Tensor, steps: int = 1, **options: Any) -> Records:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, records = castwise.GradScaler("cpu"), Records()
    with Monitor(model, optimizer, scaler, sinks=[records.append], every=1, **options):
        for _ in range(steps):
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    return records


def sample_in(records: Records) -> dict[str, Any]:
    (sample,) = (record for record in records if record["kind"] == "sample")
    return sample


@pytest.mark.filterwarnings("error::RuntimeWarning", "ignore::DeprecationWarning")
def test_scripted_modules_are_left_out() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    sample = sample_in(records_of(nn.Sequential(nn.Linear(2, 2), scripted), torch.ones(1, 2)))
    assert list(sample["activations"]) == ["0", ""]
    assert list(sample["gradients"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_that_is_scripted_as_a_whole_is_not_recorded() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.warns(RuntimeWarning, match="that failed: RuntimeError: register_forward_pre_hook is not"):
        records = records_of(scripted, torch.full((1, 2), torch.nan), on_nonfinite="diagnose")
    assert [record["kind"] for record in records] == ["run", "step", "diagnosis", "sample", "end"]
    assert records[1]["cause"] == "non-finite loss"
    assert records[2]["advice"].startswith("not all inputs of this op are known")  # in the graph of the loss


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_left_out(layout: torch.layout) -> None:
    class Nests(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.nested.nested_tensor([x, x[:1]], layout=layout)
            return torch.nested.to_padded_tensor(self.linear(rows), 0.0)

    sample = sample_in(records_of(Nests(), torch.ones(3, 2)))
    assert {name: found["numel"] for name, found in sample["activations"].items()} == {"": 12}
    assert list(sample["gradients"]) == ["linear.weight", "linear.bias"]


@pytest.mark.parametrize(
    ("lr", "written"), [(torch.tensor(0.5), 0.5), (torch.tensor(0.5, device="meta"), "a tensor on meta")]
)
def test_a_learning_rate_may_be_a_tensor(lr: torch.Tensor, written: float | str, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["lr"] = lr
    with Monitor(model, optimizer, castwise.GradScaler("cpu"), sinks=[tmp_path]):
        pass
    assert records_in(tmp_path)[0]["settings"]["learning rate"] == written
    assert Run.read(tmp_path).ended


def test_layers_that_have_no_weights_yet_are_left_out() -> None:
    class WithSpare(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.spare = nn.LazyLinear(3)

    model, records = WithSpare(), Records()
    optimizer, scaler = torch.optim.SGD([model.weight, model.bias], lr=0.1), castwise.GradScaler("cpu")
    with Monitor(model, optimizer, scaler, sinks=[records.append]):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert records[0]["settings"]["parameters"] == 3
    assert list(sample_in(records)["gradients"]) == ["weight", "bias"]
