"""Weights of earlier steps tell a fault of the batch from one that training has led to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from castwise import Monitor
from castwise.diagnosis._earlier_weights import EarlierWeights


def test_two_copies_are_kept_that_are_16_steps_apart() -> None:
    param = nn.Parameter(torch.zeros(3))
    optimizer = SGD([param], 0.1)
    kept = EarlierWeights()
    buffers = set()
    for step in range(1, 51):
        with torch.no_grad():
            param.fill_(step)
        kept.keep(step, [optimizer])
        earlier, latest = kept.earlier(step), kept.latest(step)
        assert latest is not None
        assert latest.step == (step - 1) // 16 * 16 + 1
        assert latest.weights[0][1].tolist() == [latest.step] * 3
        assert (earlier.step if earlier else None) == (None if step == 1 else max(1, latest.step - 16))
        buffers.add(latest.weights[0][1].data_ptr())
    assert len(buffers) == 2
    assert kept.latest(40).step == 33  # type: ignore[union-attr]


def test_weights_are_put_back_bit_for_bit_even_after_an_error() -> None:
    param = nn.Parameter(torch.tensor([1.0, -0.0, float("nan")]))
    kept = EarlierWeights()
    kept.keep(1, [SGD([param], 0.1)])
    with torch.no_grad():
        param.copy_(torch.tensor([3.0, 4.0, 0.0]))
    version, memory = param._version, param.data_ptr()
    then = kept.latest(1)
    assert then is not None
    seen: list[float] = []

    def fail() -> None:
        with then.applied():
            seen.append(param[0].item())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [1.0]
    assert (param.tolist(), param._version, param.data_ptr()) == ([3.0, 4.0, 0.0], version, memory)


def test_the_growth_is_that_of_the_norm_of_all_weights() -> None:
    params = [nn.Parameter(torch.tensor([3.0])), nn.Parameter(torch.tensor([4.0]).bfloat16())]
    kept = EarlierWeights()
    kept.keep(1, [SGD([param], 0.1) for param in params])
    with torch.no_grad():
        params[0].fill_(6.0)
        params[1].fill_(8.0)
    then = kept.earlier(2)
    assert then is not None
    assert then.growth() == 2.0


class Exponential(nn.Module):
    """An op that overflows in fp32 too."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


def diagnosed(rate: float, batch_of: Any, *, snapshots: bool, steps: int = 20) -> dict[str, Any]:
    """Train with a rate, and return the first diagnosis."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Exponential(), nn.Linear(4, 1))
    optimizer = SGD(model.parameters(), rate)
    records: list[dict[str, Any]] = []
    with Monitor(model, optimizer, sinks=[records.append], on_nonfinite="diagnose", snapshots=snapshots):
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            model(batch_of(step)).square().mean().backward()
            optimizer.step()
    return next(record for record in records if record["kind"] == "diagnosis")


def usual(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def with_a_bad_sample(step: int) -> Tensor:
    batch = usual(step)
    batch[5] *= 1e4 if step == 19 else 1.0
    return batch


def test_where_the_weights_have_grown_the_learning_rate_is_named() -> None:
    found = diagnosed(3.0, usual, snapshots=True)
    assert (found["op"], found["remedy"]) == ("aten.exp", "learning rate")
    assert found["advice"].startswith("the weights have grown to ")
    assert found["tried"] == "finite with the weights of step 1"
    assert diagnosed(3.0, usual, snapshots=False)["remedy"] == "code"


@pytest.mark.parametrize("snapshots", [True, False])
def test_a_sample_at_fault_is_named_with_and_without_earlier_weights(snapshots: bool) -> None:
    found = diagnosed(0.01, with_a_bad_sample, snapshots=snapshots)
    assert (found["step"], found["remedy"], found["tried"]) == (19, "code", "finite without sample 5")


def test_a_weight_that_was_written_is_tried_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), 0.01)
    records: list[dict[str, Any]] = []
    with Monitor(model, optimizer, sinks=[records.append], on_nonfinite="diagnose", snapshots=True):
        for step in range(1, 6):
            if step == 4:
                with torch.no_grad():
                    model.weight[0, 2] = torch.nan
            optimizer.zero_grad()
            model(usual(step)).square().mean().backward()
            optimizer.step()
    found = next(record for record in records if record["kind"] == "diagnosis")
    assert (found["step"], found["phase"], found["tried"]) == (4, "weight", "finite with the weights of step 1")
