"""What a scaler knows about one optimizer."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.amp.scalers import Fused, weight
from torch import nn

from castwise.amp.optimizer_state import (
    Memory,
    OptState,
    given,
    is_stepped_by_torch,
    is_to_be_skipped,
    last_step,
    new_state,
    no_momentum_of_a_skipped_step,
    readback_of,
    refuse_if_over,
)

CPU = torch.device("cpu")


class TakesScaler(Fused):
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        return grad_scaler


@pytest.mark.parametrize(
    ("cls", "fused", "takes_scaler", "takes_grad_scale", "is_torchs"),
    [
        (torch.optim.SGD, False, False, False, True),
        (torch.optim.SGD, True, False, True, True),
        (Fused, True, False, True, False),
        (TakesScaler, True, True, False, False),
        (TakesScaler, False, False, False, False),
    ],
)
def test_how_an_optimizer_wants_to_step(
    cls: Any, fused: bool, takes_scaler: bool, takes_grad_scale: bool, is_torchs: bool
) -> None:
    optimizer = cls([weight(1.0)], fused=fused)
    memory = Memory(optimizer, 3)
    assert memory.number == 3
    assert memory.last_step is None
    assert memory.takes_scaler(optimizer) is takes_scaler
    assert memory.takes_grad_scale(optimizer) is takes_grad_scale
    assert is_stepped_by_torch(optimizer) is is_torchs
    optimizer._step_supports_amp_scaling = False
    assert not memory.takes_scaler(optimizer)
    assert not memory.takes_grad_scale(optimizer)


def test_an_optimizer_that_nothing_was_done_with() -> None:
    assert new_state() == {"stage": OptState.READY, "found_inf_per_device": {}}


@pytest.mark.parametrize(
    ("name", "skipped", "text"),
    [
        ("unscale_", True, "unscale_() is being called after skip() of the same optimizer: call scaler.update() first"),
        (
            "step",
            False,
            "step() has already been called on this optimizer since the last update(): call scaler.update() once per "
            "iteration, after the last step()",
        ),
        (
            "skip",
            False,
            "skip() is being called after step() of the same optimizer: call it before, or scaler.update() first if a "
            "new iteration begins",
        ),
    ],
)
def test_calls_after_the_step_are_refused(name: str, skipped: bool, text: str) -> None:
    state = new_state()
    refuse_if_over(state, name)
    state["stage"] = OptState.UNSCALED
    refuse_if_over(state, name)
    state["stage"], state["skipped"] = OptState.STEPPED, skipped
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        refuse_if_over(state, name)
    if not skipped:
        del state["skipped"]
        with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
            refuse_if_over(state, name)


def test_whether_a_step_is_skipped_is_what_was_found_now() -> None:
    state = new_state()
    assert is_to_be_skipped(state) is False
    state["found_inf_per_device"] = {CPU: torch.zeros(())}
    assert is_to_be_skipped(state) is False
    before = state["readback"]
    assert is_to_be_skipped(state) is False
    assert state["readback"] is before, "the host asks once"
    state["found_inf_per_device"] = {CPU: torch.ones(())}
    assert is_to_be_skipped(state) is True, "somebody has put another one in its place"
    assert state["readback"] is not before
    assert bool(readback_of({CPU: torch.zeros(()), torch.device("cpu", 0): torch.ones(1)}))


def test_what_a_step_leaves_for_those_who_ask() -> None:
    state = new_state()
    assert (last_step(state, 3).iteration, last_step(state, 3).is_skipped()) == (3, None)
    state["found_inf_per_device"] = {CPU: torch.ones(())}
    is_to_be_skipped(state)
    left = last_step(state, 3)
    assert left.found_infs == [torch.ones(())]
    assert left.is_skipped() is state["readback"]


def test_facts_are_on_an_optimizer_for_its_step_alone() -> None:
    optimizer: Any = torch.optim.SGD([weight(1.0)])
    optimizer.grad_scale = "mine"
    with given(optimizer, grad_scale="ours", found_inf="found"):  # type: ignore[arg-type]  # anything is a fact
        assert (optimizer.grad_scale, optimizer.found_inf) == ("ours", "found")
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    optimizer.grad_scale = "mine"
    error = KeyError("in the step")
    with pytest.raises(KeyError, match="in the step") as caught, given(optimizer, grad_scale=None, found_inf=None):
        raise error
    assert caught.value is error
    assert optimizer.grad_scale == "mine"
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_room_for_a_momentum_that_a_skipped_step_has_made_is_not_left_as_it_is(device: str, found: float) -> None:
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = torch.optim.SGD([third, first, second], momentum=0.9)
    optimizer.state[first]["momentum_buffer"] = torch.full((2,), 5.0)
    found_inf = torch.tensor(found)
    if device == "meta":  # not on the host, so nobody looks at it; it is brought to where the momentum is
        found_inf = OnAnAccelerator(found_inf)
    with no_momentum_of_a_skipped_step(optimizer, found_inf):
        optimizer.state[second]["momentum_buffer"] = torch.full((2,), torch.nan)
    assert optimizer.state[first]["momentum_buffer"].tolist() == [5.0, 5.0]
    assert "momentum_buffer" not in optimizer.state.get(third, {})
    made = optimizer.state.get(second, {}).get("momentum_buffer")
    if not found:
        assert made.isnan().all()
    elif device == "cpu":
        assert made is None
    else:
        assert made.tolist() == [0.0, 0.0]


def test_other_optimizers_are_left_alone() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.RMSprop([param], momentum=0.9)
    with no_momentum_of_a_skipped_step(optimizer, torch.ones(())):
        optimizer.state[param]["momentum_buffer"] = made = torch.zeros(2)
    assert optimizer.state[param]["momentum_buffer"] is made


class OnAnAccelerator(torch.Tensor):
    """A tensor of the host that says it is elsewhere, and cannot be read until it is brought back."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch's is an attribute
        return torch.device("meta")

    def item(self) -> Any:
        raise AssertionError("the host waits for it")

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert args == (torch.device("cpu"),)
        return self.as_subclass(torch.Tensor)
