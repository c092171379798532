"""`ScalerIteration`, the records of optimizers, and what is kept of an optimizer for good: each made by hand."""

from __future__ import annotations

import copy
import gc
import math
import re
import weakref
from typing import Any

import pytest
import torch
from tests.amp.scalers import Fused, scaled, weight
from torch.amp.grad_scaler import OptState

from castwise.amp._iteration import (
    ClipPending,
    KnownOptimizers,
    OptimizerRecord,
    ScalerIteration,
    SkipCalled,
    Snapshot,
    Stepped,
    Unscaled,
)
from castwise.amp.grad_scaler import GradScaler

CPU = torch.device("cpu")


class TakesScaler(Fused):
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        return grad_scaler


def record_of(*params: torch.nn.Parameter) -> OptimizerRecord:
    optimizer = torch.optim.SGD(params)
    return OptimizerRecord(optimizer, KnownOptimizers().register(optimizer))


@pytest.mark.parametrize(
    ("cls", "fused", "takes_scaler", "takes_grad_scale"),
    [
        (torch.optim.SGD, False, False, False),
        (torch.optim.SGD, True, False, True),
        (Fused, True, False, True),
        (TakesScaler, True, True, False),
        (TakesScaler, False, False, False),
    ],
)
def test_how_an_optimizer_wants_to_step_is_asked_in_each_iteration(
    cls: Any, fused: bool, takes_scaler: bool, takes_grad_scale: bool
) -> None:
    scaler, optimizer = GradScaler("cpu"), cls([weight(1.0)], fused=fused)
    record = scaler._new_record(optimizer)
    assert (record.takes_scaler, record.takes_grad_scale) == (takes_scaler, takes_grad_scale)
    optimizer._step_supports_amp_scaling = False
    record = scaler._new_record(optimizer)
    assert not record.takes_scaler
    assert not record.takes_grad_scale


def test_optimizers_are_known_by_number_and_not_kept() -> None:
    known = KnownOptimizers()
    first, second = torch.optim.SGD([weight(1.0)]), torch.optim.SGD([weight(1.0)])
    assert [known.register(optimizer).number for optimizer in (first, second, first)] == [0, 1, 0]
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    assert known.register(torch.optim.SGD([weight(1.0)])).number == 2


def test_an_optimizer_that_nothing_was_done_with_is_as_torchs_entry() -> None:
    record = record_of(weight(1.0))
    assert (record["stage"], record["found_inf_per_device"]) == (OptState.READY, {})
    assert not record.has_begun()
    record["found_inf_per_device"] = {CPU: torch.ones(())}
    assert record.found_inf_per_device[CPU] == 1.0
    assert record.has_begun()
    with pytest.raises(KeyError, match="norm"):
        record["norm"]
    with pytest.raises(KeyError, match="norm"):
        record["norm"] = None


@pytest.mark.parametrize("written", list(OptState))
def test_a_stage_that_a_tool_writes_becomes_the_matching_state(written: OptState) -> None:
    scaler = scaled(param := weight(1.0))
    optimizer = Fused([param])
    scaler.clip_grad_norm_(optimizer, 1.0)
    record = scaler._iteration.records[id(optimizer)]
    states = {OptState.READY: ClipPending, OptState.UNSCALED: Unscaled, OptState.STEPPED: Stepped}
    scaler._per_optimizer_states[id(optimizer)]["stage"] = written
    assert type(record.state) is states[written]  # clipping is not lost when its own stage is written
    assert record["stage"] is written


@pytest.mark.parametrize("stage", [None, 1, "STEPPED"])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_stage_that_matches_no_state_is_refused(stage: Any, is_known: bool) -> None:
    scaler = scaled(param := weight(1.0))
    optimizer = torch.optim.SGD([param])
    if is_known:
        scaler.unscale_(optimizer)
    states, before = scaler._per_optimizer_states, scaler._per_optimizer_states[id(optimizer)]["stage"]
    text = f"^stage must be one of OptState.READY, OptState.UNSCALED, OptState.STEPPED, got {stage!r}$"
    with pytest.raises(ValueError, match=text):
        states[id(optimizer)]["stage"] = stage
    with pytest.raises(ValueError, match=text):
        states[id(optimizer)] = {"found_inf_per_device": {CPU: torch.ones(())}, "stage": stage}
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is before
    assert bool(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]) is is_known


def test_a_state_without_an_optimizer_refuses_what_is_none_of_torchs() -> None:
    state = scaled(weight(1.0))._per_optimizer_states[0]
    with pytest.raises(ValueError, match="stage must be one of"):
        state.update(stage="STEPPED", found_inf_per_device={CPU: torch.ones(())})
    with pytest.raises(KeyError, match="norm"):
        state["norm"] = 1.0
    with pytest.raises(TypeError, match="stage cannot be deleted from an optimizer's state: set it instead"):
        del state["stage"]
    assert state == {"stage": OptState.READY, "found_inf_per_device": {}}


@pytest.mark.parametrize(
    ("name", "skipped", "text"),
    [
        ("unscale_", True, "unscale_() is being called after skip() of the same optimizer: call scaler.update() first"),
        (
            "step",
            False,
            "step() has already been called since the last update(). Call scaler.update() once per "
            "iteration, after the last step()",
        ),
        (
            "skip",
            False,
            "skip() is being called after step() of the same optimizer: call it before step(), or call "
            "scaler.update() first to begin a new iteration",
        ),
    ],
)
def test_the_words_for_calls_after_the_step(name: str, skipped: bool, text: str) -> None:
    record = record_of(weight(1.0))
    record.state = SkipCalled() if skipped else Stepped()
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        record.refuse(name)


def test_an_iteration_knows_whether_anything_happened_but_skips() -> None:
    iteration, record = ScalerIteration(), record_of(weight(1.0))
    assert not iteration.has_begun()
    assert not iteration.has_only_skip_calls()
    iteration.records[id(record.optimizer)] = record
    assert not iteration.has_begun()
    record.state = SkipCalled()
    assert iteration.has_begun()
    assert iteration.has_only_skip_calls()
    other = record_of(weight(1.0))
    other.state = Unscaled()
    iteration.records[id(other.optimizer)] = other
    assert not iteration.has_only_skip_calls()


@pytest.mark.parametrize("losses", [[], [1.5], [1.5, 2.0], [1.0, math.inf]])
def test_losses_add_up_without_their_graphs(losses: list[float]) -> None:
    iteration = ScalerIteration()
    for loss in losses:
        iteration.note_loss(torch.full((2,), loss / 2, dtype=torch.float64, requires_grad=True) * 1.0)
    iteration.note_loss(torch.ones((), dtype=torch.int64))
    total = iteration.loss(CPU)
    assert len(iteration.seen_losses()) == len(losses)
    if not losses:
        assert total is None
    else:
        assert total is not None
        assert (total.item(), total.dtype, total.shape) == (sum(losses), torch.float32, ())
        assert not total.requires_grad
    assert iteration.loss_is_nonfinite(torch.zeros(())).item() == float(math.inf in losses)


def test_a_snapshot_tells_writes_from_replacements() -> None:
    kept, written, replaced = torch.ones(2), torch.ones(2), torch.ones(2)
    snapshot = Snapshot([kept, written, replaced])
    assert snapshot.matches([kept, written, replaced])
    assert snapshot.changed([kept, written, replaced]) == ([], [])
    written.mul_(1.0)
    for _ in range(50):  # the memory of the old one must not come to be that of the new one
        replaced = torch.ones(2)
        assert snapshot.changed([kept, written, replaced]) == ([1], [2])
    assert not snapshot.matches([kept, written, replaced])
    assert not snapshot.matches([kept])


def test_update_replaces_the_iteration_as_a_whole() -> None:
    scaler = scaled(param := weight(1.0))
    optimizer = Fused([param])
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    before = scaler._iteration
    assert id(optimizer) in before.records
    scaler.update()
    assert scaler._iteration is not before
    assert not scaler._iteration.records
    assert not scaler._iteration.losses
    copy.deepcopy(scaler)
