"""State dicts: whatever is loaded, a scaler takes all of it or refuses it and is what it was."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.damage import JSON, a_share, attempt, changed

import castwise
from castwise.schedules import Dynamic, Guard, Headroom, Schedule, Static

SCHEDULES: list[Schedule] = [
    *(Dynamic(), Dynamic(hysteresis=2, cooldown=3, on_nonfinite_loss="hold"), Headroom(), Static(4.0), Guard())
]
# What checkpoints hold besides JSON's values.
VALUES = JSON | st.sampled_from(
    [
        *(torch.tensor(2.0), torch.tensor([1.0, 2.0]), torch.tensor(3), numpy.float32(2.0), numpy.int64(2), 1j, b"2"),
        *((1, 2), {1, 2}, object(), {1: 2}, {None: {}}, {"name": "Dynamic", "settings": {}, "trackers": {}}),
    ]
)


def trained(kind: type[castwise.GradScaler], schedule: Schedule, losses: tuple[float, ...]) -> castwise.GradScaler:
    """A scaler after some steps."""
    scaler = kind("cpu", schedule=schedule)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.125)
    for loss in losses:
        scaler.scale((weight * loss).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler


def state(scaler: castwise.GradScaler) -> Any:
    """All that a scaler is."""
    tensors = {"scale": scaler._scale, "growth_tracker": scaler._growth_tracker, **scaler._trackers}
    numbers = {name: (None if tensor is None else tensor.tolist()) for name, tensor in tensors.items()}
    return copy.deepcopy(scaler.state_dict()), numbers, scaler.schedule


SAVED = [trained(castwise.GradScaler, schedule, (1.0, torch.inf, 1.0)).state_dict() for schedule in SCHEDULES]
SAVED.append(torch.amp.GradScaler("cpu").state_dict())


def types_in(value: Any) -> set[type]:
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return {type(value)}.union(*map(types_in, inner))


@pytest.mark.parametrize("saved", SAVED)
def test_a_state_holds_only_what_torch_loads_without_running_code(saved: dict[str, Any]) -> None:
    assert types_in(saved) <= {bool, int, float, str, list, dict, type(None)}
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == saved


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", [castwise.GradScaler, castwise.ShardedGradScaler])
@given(
    given=st.sampled_from(SAVED).flatmap(lambda saved: changed(saved, VALUES)) | VALUES,
    schedule=st.sampled_from(SCHEDULES),
)
@a_share(8)
def test_a_scaler_takes_all_of_a_state_or_nothing(
    kind: type[castwise.GradScaler], given: Any, schedule: Schedule
) -> None:
    scaler = trained(kind, schedule, (1.0, torch.inf))
    before = state(scaler)
    _, refusal = attempt(lambda: scaler.load_state_dict(given), TypeError, ValueError, RuntimeError)
    if refusal is not None:
        assert refusal
        assert state(scaler) == before
        return
    saved = scaler.state_dict()
    assert castwise.amp._checks.MIN_SCALE <= scaler.get_scale() <= castwise.amp._checks.MAX_SCALE
    assert scaler.get_scale() == saved["scale"]
    again = kind("cpu", schedule=schedule)
    again.load_state_dict(saved)
    assert again.state_dict() == saved


@given(given=st.sampled_from(SAVED).flatmap(lambda saved: changed(saved, VALUES)))
@a_share(40)
def test_a_scaler_that_is_off_ignores_what_it_is_given(given: Any) -> None:
    scaler = castwise.GradScaler("cpu", enabled=False)
    scaler.load_state_dict(given)
    assert scaler.state_dict() == {}
