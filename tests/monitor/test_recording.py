"""`Recording`: a step is diagnosed after it was taken, from what its forwards were given."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import castwise
from castwise import Policy
from castwise.monitor.recording import MOST, Recording


class Calls(nn.Module):
    """A model whose module "inner" calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()

        class Inner(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return function(x)

        self.first, self.inner, self.last = nn.Linear(4, 4), Inner(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return {"logits": [self.last(self.inner(self.first(x)))], "count": torch.tensor(len(x))}


@pytest.fixture
def record() -> Iterator[Callable[[nn.Module], Recording]]:
    made: list[Recording] = []

    def attached(model: nn.Module) -> Recording:
        made.append(Recording(model))
        made[-1].attach()
        return made[-1]

    yield attached
    for recording in made:
        recording.detach()


def step(model: nn.Module, scale: float = 1.0, x: Tensor | None = None) -> None:
    logits = model(torch.ones(2, 4) if x is None else x)["logits"][0]
    (logits.float().sum() * scale).backward()


def test_a_fault_of_the_forward(record: Any) -> None:
    model = Calls(lambda x: x / 0)
    recording = record(model)
    step(model)
    found = recording.diagnose(1.0)
    assert (found.phase, found.module, found.op) == ("forward", "inner", "aten.div")
    recording.clear()
    assert not recording.diagnose(1.0)


def test_a_forward_without_a_backward(record: Any) -> None:
    model = Calls(lambda x: x / 0)
    recording = record(model)
    model(torch.ones(2, 4))
    assert recording.diagnose(1.0).module == "inner"


def test_a_gradient_that_overflows_at_this_scale(record: Any) -> None:
    model = Calls(lambda x: x * 100)
    nn.init.constant_(model.last.weight, 1.0)
    for param in model.first.parameters():
        nn.init.constant_(param, 1e-3)
    recording = record(model)
    for exponent in (2, 10):  # 4 * 100 * 2^10 is more than fp16 holds
        with castwise.autocast("cpu", dtype=torch.float16):
            logits = model(torch.ones(2, 4))["logits"][0]
        (logits.float().sum() * 2.0**exponent).backward()
        found = recording.diagnose(2.0**exponent)
        recording.clear()
        if exponent == 2:
            assert not found
    assert (found.phase, found.module, found.op, found.remedy) == ("backward", "inner", "aten.mul", "scale")


def test_a_gradient_that_overflows_where_the_loss_begins(record: Any) -> None:
    model = Calls()
    recording = record(model)
    with castwise.autocast("cpu", dtype=torch.float16):
        logits = model(torch.ones(2, 4))["logits"][0]
    (logits.float().sum() * 2.0**20).backward()
    found = recording.diagnose(2.0**20)
    assert (found.phase, found.module, found.value) == ("loss", "", "inf")
    assert "or lower the scale" in found.advice


def test_a_fault_of_the_loss(record: Any) -> None:
    model = Calls()
    recording = record(model)
    (model(torch.ones(2, 4))["logits"][0].sum() * torch.nan).backward()
    found = recording.diagnose(1.0)
    assert (found.phase, found.module, found.op, found.value) == ("loss", "", "", "nan")
    assert "the model is innocent" in found.advice


def test_outputs_that_are_masked_are_no_fault(record: Any) -> None:
    model = Calls()
    recording = record(model)
    masked = torch.eye(2, 4) > 0
    model.register_forward_hook(
        lambda _model, _args, output: {"x": output["logits"][0].masked_fill(masked, -torch.inf)}
    )
    model(torch.ones(2, 4))["x"].softmax(-1)[:, 0].sum().backward()
    assert not recording.diagnose(1.0)


def test_the_micro_batch_at_fault_is_found_with_its_random_numbers(record: Any) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3).tolist()
    drawn: list[float] = []

    def noise(x: Tensor) -> Tensor:
        drawn.append(torch.rand(1).item())
        return x / 0 if drawn[-1] == expected[1] else x

    model = Calls(noise)
    recording = record(model)
    torch.manual_seed(0)
    for _ in range(3):
        step(model)
    state = torch.get_rng_state()
    assert recording.diagnose(1.0).module == "inner"
    assert drawn == expected + expected[:2]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["torch", "castwise", "policy", "region in a policy", "none"])
def test_the_regions_of_the_forward_are_those_of_the_replay(record: Any, kind: str) -> None:
    seen: list[Any] = []

    def function(x: Tensor) -> Tensor:
        seen.append((x.dtype, (x @ x.T).dtype, x.softmax(-1).dtype, torch.is_autocast_enabled("cpu")))
        return x

    model = Calls(function)
    policy = Policy("float16", modules={"inner": "bfloat16"}, ops={"softmax": "float32"}).bind(model)
    recording = record(model)
    if kind == "none":
        step(model)
    elif kind == "policy":
        with castwise.autocast("cpu", policy=policy):
            step(model)
    elif kind == "region in a policy":
        with castwise.autocast("cpu", policy=policy), torch.autocast("cpu", dtype=torch.bfloat16):
            step(model)
    else:
        with (torch if kind == "torch" else castwise).autocast("cpu", dtype=torch.bfloat16):
            step(model)
    assert not recording.diagnose(1.0)
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert not torch.is_autocast_enabled("cpu")


def test_only_the_forwards_of_training_are_recorded(record: Any) -> None:
    inner = Calls()
    recording = record(inner)

    def logits(x: Tensor) -> Tensor:
        return inner(x)["logits"][0]  # type: ignore[no-any-return]

    checkpoint(logits, torch.ones(2, 4), use_reentrant=False).sum().backward()  # type: ignore[union-attr]
    with torch.no_grad():
        inner(torch.ones(2, 4))
    with pytest.raises(RuntimeError):
        inner(torch.ones(2, 5))
    recording.diagnose(1.0)
    assert len(recording.take()) == 1


def test_old_steps_are_not_kept_alive(record: Any) -> None:
    model = Calls()
    recording = record(model)

    def one() -> Any:
        before = nn.Linear(4, 4)
        step(model, x=before(torch.ones(2, 4)))
        return weakref.ref(before.weight)

    weight = one()
    gc.collect()
    assert weight() is None  # the graph that leads to the input is gone while the step is recorded
    recording.clear()
    for _ in range(MOST + 10):
        step(model)
    assert len(recording.take()) == MOST
    assert len(recording.take()) == 0


def test_what_is_taken_can_be_diagnosed_later(record: Any) -> None:
    is_bad = [False]
    model = Calls(lambda x: x / 0 if is_bad[0] else x)
    recording = record(model)
    step(model)
    first = recording.take()
    step(model, x=torch.full((2, 4), torch.nan))
    assert not first.diagnose(1.0)
    assert recording.diagnose(1.0).phase == "input"


def test_detached_it_leaves_nothing_behind() -> None:
    model = Calls()
    recording = Recording(model)
    recording.attach()
    recording.attach()
    step(model)
    recording.detach()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert len(recording.take()) == 0
