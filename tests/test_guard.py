"""A monitor leaves out what it cannot measure, and the training continues."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise._guard import Guard
from castwise.monitor.monitor import Monitor
from castwise.monitor.run import Run

Records = list[dict[str, Any]]


def test_the_first_failure_is_told_and_no_other() -> None:
    guard = Guard()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in (1, 2):
            with guard:
                raise ValueError(number)
    assert [str(each.message) for each in told] == ["the monitor skipped a measurement that failed: ValueError: 1"]


def test_an_interrupt_is_no_failure() -> None:
    with pytest.raises(KeyboardInterrupt), Guard():
        raise KeyboardInterrupt


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
        records = records_of(scripted, torch.full((1, 2), torch.nan), on_skip="diagnose")
    assert [record["kind"] for record in records] == ["run", "step", "sample", "end"]
    assert records[1]["cause"] == "non-finite loss"


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
    assert json.loads((tmp_path / "monitor.jsonl").read_text().splitlines()[0])["settings"]["learning rate"] == written
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
