"""Progress of the training runs: live bars in a terminal, occasional lines in a log or pipe."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from typing_extensions import Self

from castwise.demo.settings import FP32, Training
from castwise.demo.training import Step

LINE_EVERY_S = 5.0


class Display(Protocol):
    """A context manager that shows training runs, one at a time."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def start(self, training: Training, steps_done: int) -> None:
        """Start showing a run that has completed `steps_done` steps."""

    def step(self, step: Step) -> None:
        """Show a completed step."""


def display_for(console: Console) -> Display:
    """Return bars for a terminal, else lines."""
    return _Bars(console) if console.is_interactive else _Lines(console)


class _Bars:
    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            console=console,
            refresh_per_second=4,  # redrawing competes with training for a core
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def start(self, training: Training, steps_done: int) -> None:
        self._training = training
        self._task: TaskID = self._progress.add_task(
            _name(training), total=training.steps, completed=steps_done, facts=""
        )

    def step(self, step: Step) -> None:
        self._progress.update(self._task, completed=step.number, facts=_facts(self._training, step))


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def start(self, training: Training, steps_done: int) -> None:
        self._training, self._last_line = training, time.monotonic()

    def step(self, step: Step) -> None:
        now = time.monotonic()
        if step.number < self._training.steps and now - self._last_line < LINE_EVERY_S:
            return
        self._last_line = now
        progress = f"{step.number}/{self._training.steps}"
        self._console.print(f"{_name(self._training)} {progress} {_facts(self._training, step)}")


def _name(training: Training) -> str:
    name = f"{training.precision} {training.library:9}"
    return name if training.weights == FP32 else f"{name} {training.weights}"


def _facts(training: Training, step: Step) -> str:
    speed = training.size.tokens / step.seconds / 1000
    return f"loss {step.loss:.3f} {speed:5.1f}k tok/s scale {step.scale:g} skipped {step.skipped}"
