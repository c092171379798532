"""The watch itself: who is called and when, whose training it looks at, and that it never ends one."""

from __future__ import annotations

import io
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.mistakes.test_no_false_positives import Training, training
from tests.monitor.recorded import records_in

import castwise
from castwise._mistakes import backwards, checkpoints, watch
from castwise._mistakes.scaled_gradients import ScaledGradient, Window
from castwise._mistakes.unscaling import Unscaling
from castwise._mistakes.watch import WATCH
from castwise.amp._observers import Observer
from castwise.monitor._run_files import run_in

__all__ = ["training"]


def steps(training: Training, count: int = 2) -> None:
    for _ in range(count):
        training.backward()
        training.scaler.unscale_(training.optimizer)
        training.finish()


def train_and_look(training: Training) -> None:
    for _ in range(3):
        training.backward()
        torch.nn.utils.get_total_norm([param.grad for param in training.model.parameters()]).item()
        training.finish()
        training.optimizer.state_dict()


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (Unscaling, "backward_starts"),
        (Unscaling, "backward_ended"),
        (backwards, "backward_running"),
        (Window, "_norm_used"),
        (checkpoints, "caller"),
    ],
)
def test_a_finder_that_fails_is_reported_of_once_and_ends_nothing(
    training: Training, monkeypatch: pytest.MonkeyPatch, where: object, name: str
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(where, name, fail)
    before = [param.detach().clone() for param in training.model.parameters()]
    with pytest.warns(
        RuntimeWarning, match=r"castwise's check \w+ failed and is turned off: ZeroDivisionError"
    ) as caught:
        train_and_look(training)
    assert len([each for each in caught if each.category is RuntimeWarning]) == 1
    assert not any(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))


def test_the_first_twelve_iterations_and_the_first_and_the_last_of_every_fifty_are_checked(training: Training) -> None:
    param, hooked, changed = training.model[0].weight, [], []
    for iteration in range(1, 121):
        training.backward()
        hooked += [iteration] if param._post_accumulate_grad_hooks else []
        changed += [iteration] if type(param.grad) is ScaledGradient else []
        training.finish()
    assert changed == [*range(1, 13), 50, 51, 100, 101]
    assert hooked == changed[1:]  # the optimizer is known from its first step on


def test_a_training_in_another_thread_is_not_looked_at_and_disturbs_nothing(training: Training) -> None:
    steps(training)
    ticks, other = WATCH._ticks, Training()
    training.backward()  # looked at, and not unscaled yet
    thread = threading.Thread(target=steps, args=(other, 20))
    thread.start()
    thread.join()
    assert WATCH._ticks == ticks
    torch.nn.utils.clip_grad_value_(training.model.parameters(), 1.0)
    with pytest.warns(castwise.MixedPrecisionMistake, match="clipped here while they are still multiplied"):
        training.finish()


def test_the_last_checkpoint_of_a_script_is_in_the_record(tmp_path: Path) -> None:
    training = Training()
    monitor = castwise.Monitor(training.model, training.optimizer, training.scaler, sinks=[tmp_path])
    with castwise.installed():
        monitor.attach()
        steps(training)
        torch.save({"optimizer": training.optimizer.state_dict()}, io.BytesIO())
        with pytest.warns(castwise.MixedPrecisionMistake, match="without the scaler's"):
            monitor.detach()
    assert mistakes_in(tmp_path) == ["scaler-not-saved"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_what_was_found_before_there_was_a_monitor_is_in_the_record(tmp_path: Path) -> None:
    with castwise.installed(tmp_path):
        with pytest.warns(castwise.MixedPrecisionMistake, match="there is no CUDA"):
            torch.amp.GradScaler("cuda")
        assert not list(tmp_path.iterdir())
        steps(Training())
    (folder,) = (each for each in run_in(tmp_path).iterdir() if each.is_dir())
    assert mistakes_in(folder) == ["scaler-without-cuda"]


def mistakes_in(folder: Path) -> list[str]:
    records = records_in(folder)
    return [record["name"] for record in records if record["kind"] == "mistake"]


def test_every_event_of_a_scaler_and_a_region_reaches_the_finders(monkeypatch: pytest.MonkeyPatch) -> None:
    received = set()

    class Everything(Unscaling):
        """Instead of one of the finders."""

    def receiving(event: str) -> Any:
        return lambda self, *args, **kwargs: received.add(event)

    events = {name for name, value in vars(Observer).items() if not name.startswith("_") and callable(value)}
    for event in events:
        setattr(Everything, event, receiving(event))
    finders = [Everything if finder is Unscaling else finder for finder in watch._FINDERS]
    monkeypatch.setattr(watch, "_FINDERS", finders)
    with castwise.installed():
        model, scaler = torch.nn.Linear(8, 1), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for value in (1.0, math.inf):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.ones(1, 8)).sum() * value
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        scaler.get_scale()
        scaler.load_state_dict(scaler.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        torch.save(model.state_dict(), file := io.BytesIO())
        torch.load(io.BytesIO(file.getvalue()))
    assert events - received == {"compiled"}  # a region that torch.compile traces
