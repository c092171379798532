"""A sampled step is measured without a look at any value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from castwise.amp import readback
from castwise.monitor.exponents import count, tally
from castwise.monitor.sample import Measured, OfGradient, Sample, combined, sample_record
from castwise.monitor.tally import Tally


class Histograms(TorchDispatchMode):
    """Counts those that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket is torch.ops.aten.histc
        return func(*args, **kwargs or {})


def test_an_accelerator_is_not_waited_for_and_counts_each_gradient_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readback, "_WITH_EVENTS", ())  # the copies themselves need a real GPU
    with FakeTensorMode():  # whose tensors on a GPU have no values to read
        model = nn.ParameterDict({"weight": torch.empty(3, 2, device="cuda"), "bias": torch.empty(3, device="cuda")})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        sample = Sample(model, {"": [count(torch.empty(5, 2, device="cuda"))]})
        with Histograms() as of_gradients:
            sample.measure_gradients(optimizer, torch.empty((), device="cuda"))
        assert of_gradients.number == 2
        sample.measure_update(optimizer)


def test_a_norm_counts_copies_once_and_parts_of_ranks_together() -> None:
    ranks = [
        Measured(
            {
                "half": OfGradient(of(1.0), of(1.0), 2, squares),
                "copy": OfGradient(of(1.0), of(1.0), 1, 4.0),
                "own": OfGradient(of(1.0), of(1.0), None, squares),
            }
        )
        for squares in (1.0, 5.0)
    ]
    assert sample_record(1, 1.0, combined(ranks))["grad_norm"] == 4.0
    assert sample_record(1, 1.0, combined(ranks), is_clipped=True)["grad_norm"] is None
    assert sample_record(1, 1.0, Measured())["grad_norm"] is None


def of(*numbers: float) -> Tally:
    return tally(count(torch.tensor(numbers)))


def test_parts_add_up_and_copies_count_once() -> None:
    halves = [(of(1.0, 0.0), 2), (of(4.0), 2)]
    copies = [(of(8.0, 2.0), 1), (of(8.0, 2.0), 1)]
    own = [(of(1.0), None), (of(2.0), None)]
    ranks = [
        Measured(
            gradients={
                name: OfGradient(part[0], part[0], part[1])
                for name, part in (("half", half), ("copy", copy), ("own", mine))
            },
            activations={"": part},
            updates={"half": numbers},
        )
        for half, copy, mine, part, numbers in zip(
            halves, copies, own, (of(1.0), of(2.0)), ([1.0, 4.0, 2.0, 1.0], [3.0, 12.0, 2.0, 0.0]), strict=True
        )
    ]
    together = combined(ranks)
    assert together.gradients["half"].scaled == of(1.0, 0.0, 4.0)
    assert together.gradients["copy"].unscaled == of(8.0, 2.0)
    assert together.gradients["own"].scaled == of(1.0, 2.0)
    assert together.activations[""] == of(1.0, 2.0)
    assert sample_record(7, 1.0, together)["weights"] == {"half": {"update_to_weight": 0.5, "lost_in_bf16": 0.25}}


def test_what_only_some_ranks_have_is_not_lost() -> None:
    stages = [Measured(activations={"first": of(1.0)}), Measured(activations={"second": of(2.0)})]
    assert combined(stages).activations == {"first": of(1.0), "second": of(2.0)}
