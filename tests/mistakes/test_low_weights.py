"""The share of lost updates, and 16-bit weights of which nothing is said."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise._mistakes.low_weights import _SAMPLED, _sample
from castwise._mistakes.watch import WATCH

BF16 = torch.bfloat16


pytestmark = pytest.mark.filterwarnings("ignore:an optimizer trains parameters that belong to no module")


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with castwise.installed():
        WATCH.warns = False
        yield


def weight_of(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values).to(BF16))


def step(optimizer: torch.optim.Optimizer, weight: torch.Tensor, *grads: float) -> None:
    weight.grad = torch.tensor(grads).to(BF16)
    optimizer.step()


def test_the_share_is_that_of_gradients_that_move_no_weight() -> None:
    weight = weight_of(256.0, 256.0, 1.0, 256.0, 256.0)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    step(optimizer, weight, 1.0, 4.0, 1.0, 0.0, 1.0)
    (mistake,) = WATCH.found
    assert weight.tolist() == [256.0, 254.0, 0.5, 256.0, 256.0]
    assert mistake.text.startswith("SGD steps bfloat16 weights here, and 50% of the updates of step 1 were lost")
    assert "castwise.MasterWeights(optimizer, model, dtype=torch.bfloat16)" in mistake.corrected


def test_later_steps_are_measured_more_rarely() -> None:
    weight = weight_of(256.0)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    grads = [1.0 if step in (3, 5, 99, 101, 200) else 4.0 for step in range(1, 201)]
    for grad in grads:
        with torch.no_grad():
            weight.fill_(256.0)
        step(optimizer, weight, grad)
    (mistake,) = WATCH.found
    assert "100% of the updates of step 200" in mistake.text


@pytest.mark.parametrize(
    ("lost", "is_measured"),
    [*((step, True) for step in (1, 2, 4, 64, 100, 200)), *((step, False) for step in (3, 63, 96, 128, 150))],
)
def test_powers_of_two_below_a_hundred_and_every_hundredth_step_are_measured(lost: int, is_measured: bool) -> None:
    weight = weight_of(256.0)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for number in range(1, 201):
        with torch.no_grad():
            weight.fill_(256.0)
        step(optimizer, weight, 1.0 if number == lost else 4.0)
    assert len(WATCH.found) == is_measured


@pytest.mark.parametrize(("size", "is_reported"), [(20, True), (21, False)])
def test_one_lost_update_of_twenty_is_reported(size: int, is_reported: bool) -> None:
    weight = weight_of(256.0, *[1.0] * (size - 1))
    step(torch.optim.SGD([weight], lr=0.5), weight, *[1.0] * size)
    assert len(WATCH.found) == is_reported


def test_large_updates_are_not_lost() -> None:
    weight = weight_of(1.0, -1.0)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(4):
        step(optimizer, weight, 1.0, 1.0)
    assert WATCH.found == []


def test_a_rate_of_zero_loses_nothing() -> None:
    weight = weight_of(1.0, -1.0)
    step(torch.optim.SGD([weight], lr=0.0), weight, 1.0, 1.0)
    assert WATCH.found == []


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, castwise.GradScaler])
def test_a_skipped_step_of_a_fused_optimizer_loses_nothing(scaler: Callable[..., Any]) -> None:
    weight, other = weight_of(1.0, -1.0), weight_of(1.0, 1.0)
    optimizer = torch.optim.SGD([weight, other], lr=0.1, fused=True)
    scaling = scaler("cpu")
    scaling.scale(weight.sum() + other.sum() * math.inf).backward()
    scaling.step(optimizer)
    scaling.update()
    assert weight.tolist() == [1.0, -1.0]
    assert WATCH.found == []


def test_an_optimizer_that_may_compensate_is_left_alone() -> None:
    class Kahan(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    weight = weight_of(256.0)
    step(Kahan([weight], lr=1e-3), weight, 1.0)
    assert WATCH.found == []


def test_a_sample_of_a_large_weight_has_all_of_its_columns() -> None:
    wide = torch.arange(4096).expand(4096, 4096)
    assert len(_sample(wide)) == pytest.approx(_SAMPLED, rel=0.01)
    assert len(_sample(wide).unique()) > 0.9 * _SAMPLED
    assert _sample(torch.zeros(())).shape == (1,)


def state_of(dtype: torch.dtype) -> dict[str, Any]:
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    weight.grad = torch.ones(3, dtype=dtype)
    optimizer = torch.optim.Adam([weight], lr=0.1)
    optimizer.step()
    return optimizer.state_dict()


def test_state_that_is_16_bit_already_is_not_narrowed() -> None:
    torch.optim.Adam([weight_of(1.0, 1.0, 1.0)], lr=0.1).load_state_dict(state_of(BF16))
    assert WATCH.found == []


def test_fp32_weights_keep_fp32_state() -> None:
    torch.optim.Adam([nn.Parameter(torch.ones(3))], lr=0.1).load_state_dict(state_of(torch.float32))
    assert WATCH.found == []


def test_an_optimizer_that_restores_its_state_is_left_alone() -> None:
    class Restoring(torch.optim.Adam):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for number, param in enumerate(self.param_groups[0]["params"]):
                self.state[param] = dict(state_dict["state"][number])

    Restoring([weight_of(1.0, 1.0, 1.0)], lr=0.1).load_state_dict(state_of(torch.float32))
    assert WATCH.found == []


def test_any_optimizer_that_inherits_the_cast_is_reported_of() -> None:
    class Own(torch.optim.Optimizer):
        pass

    Own([weight_of(1.0, 1.0, 1.0)], {}).load_state_dict({**state_of(torch.float32), "param_groups": [{"params": [0]}]})
    (mistake,) = WATCH.found
    assert mistake.text.startswith("the checkpoint has 'exp_avg' in fp32, and load_state_dict casts it to bfloat16")


@pytest.mark.parametrize("narrow", [None, "all"])
def test_master_weights_lose_nothing(narrow: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = castwise.MasterWeights(torch.optim.Adam(model.parameters(), lr=1e-5), model, narrow=narrow)
    for _ in range(3):
        with castwise.autocast("cpu", dtype=BF16):
            loss = model(torch.randn(2, 4)).float().square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert WATCH.found == []


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float16, {"eps": 1e-4}),
        (torch.float16, {"eps": 1e-7}),
        (torch.float16, {"fused": True}),  # computes in fp32
        (BF16, {}),
        (torch.float32, {}),
    ],
)
def test_an_epsilon_that_is_kept_is_not_reported(dtype: torch.dtype, options: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = torch.optim.Adam([weight], lr=0.5, **options)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert weight.isfinite().all()
    assert not [mistake for mistake in WATCH.found if mistake.name == "epsilon-lost"]


def test_optimizers_with_other_epsilons_are_watched_as_well(recwarn: pytest.WarningsRecorder) -> None:
    weight = nn.Parameter(torch.full((4, 4), 256.0, dtype=BF16))
    optimizer = torch.optim.Adafactor([weight], lr=1e-9)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert [mistake.name for mistake in WATCH.found] == ["updates-lost"]
    assert not [warning for warning in recwarn if "is turned off" in str(warning.message)]


def test_an_epsilon_that_is_0_in_fp16_is_reported_where_it_makes_nan() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = torch.optim.Adam([weight], lr=0.5)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert weight.isnan().all()
    (mistake,) = WATCH.found
    assert "eps=1e-08, which is 0 in float16, so it divides by 0" in mistake.text
