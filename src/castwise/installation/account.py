"""What is recorded of code that does not know it: a monitor for each model, mistakes, and the report at the end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import weakref
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from castwise._guard import Guard
from castwise._torch_private import is_dynamo_active, never_traced
from castwise._warnings import warn
from castwise.amp.gradients import params_of
from castwise.amp.observers import OBSERVERS, Observer
from castwise.amp.outcomes import Cause, StepFacts
from castwise.diagnosis.diagnosis import Diagnosis
from castwise.diagnosis.recording import MicroBatches, Recording
from castwise.installation.models import Models, model_with
from castwise.mistakes.mistake import Mistake
from castwise.mistakes.watch import WATCH
from castwise.monitor.monitor import Monitor, check_every
from castwise.monitor.ranks import Ranks, rank_now
from castwise.monitor.shards import is_split_over_ranks
from castwise.monitor.sinks import FILE_NAME, JSONL

if TYPE_CHECKING:
    from castwise.report.summary import Summary

REPORT = "report.html"
# What diagnoses may keep of a step.
MOST_BYTES = 64 << 20
_PROCESSES = "process that was started", "processes that were started"


class Account(Observer):
    """Attaches a `Monitor` to each model before the first step of an optimizer that trains it.

    With several processes each writes its own folders, and none waits for another: what it does not know is whether
    they all train the same. Workers that were forked and are no ranks have the number of their process in the name.

    Args:
        out: The folder; None records nothing, and tells mistakes alone.
        every: Of the monitors.
        diagnoses: How many skipped steps of a model are diagnosed, of each cause.

    Raises:
        ValueError: `every` is not a number of steps.
    """

    def __init__(self, out: str | os.PathLike[str] | None, every: int, diagnoses: float = 0) -> None:
        check_every(every)
        self._diagnoses = diagnoses
        self._recordings: dict[nn.Module, Recording] = {}  # of the first step
        self._has_seen_a_region = False
        self.out, self._every = None if out is None else Path(out), every
        self._monitors: list[weakref.ref[Monitor]] = []
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._guard = Guard()
        self._hook: Any = None
        self._names: list[str] = []
        self._rank: int | None = None
        self._pid = os.getpid()
        self._seen: Counter[tuple[str, str]] = Counter()
        self._has_scaler = False

    def begin(self) -> None:
        """Look for mistakes and for models from now on; models are recorded if there is a folder."""
        for file in [] if self.out is None else self.out.glob(f"*-process*/{FILE_NAME}"):
            file.unlink()  # of workers of an earlier run
        WATCH.begin_telling(self._told, of_gradients=True)
        OBSERVERS.append(self)
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def end(self) -> Summary | None:
        """Record pending results, write the report, and return its summary if there is one."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            OBSERVERS.remove(self)
        for monitor in filter(None, [reference() for reference in self._monitors]):
            with self._guard:
                monitor.detach()
        WATCH.end_telling(self._told)
        if not self.has_recorded or self._rank or self.out is None:
            return None
        from castwise.report.summary import end

        return end(sorted(self.out.glob(f"*/{FILE_NAME}")), self.out / REPORT)

    @property
    def notes(self) -> list[str]:
        """What was asked for and had no effect, in words."""
        if not self._diagnoses or not self.has_recorded or self._has_scaler:
            return []
        return [
            "no step was diagnosed: only steps that a GradScaler skips are, and no enabled one was used. For a batch "
            "that gives inf or NaN call castwise.diagnose(model, loss_fn, batch) inside the autocast region"
        ]

    @property
    def has_recorded(self) -> bool:
        """Whether a model was met."""
        return bool(self._names)

    @property
    def seen(self) -> str:
        """What was seen of a training run, in words; empty if nothing was."""
        counts = {**self._seen, _PROCESSES: _processes_started()}
        return ", ".join(f"{count} {one if count == 1 else more}" for (one, more), count in counts.items() if count)

    # -- what happens -------------------------------------------------------------------------------------------

    def entered(self, region: Any) -> None:
        """Count regions; in the first one of a training step begin to keep what a diagnosis needs."""
        if not self._has_seen_a_region and torch.is_grad_enabled() and not is_dynamo_active():
            self._has_seen_a_region = True
            with self._guard:
                self._record_batches()
        if region._enabled:
            dtype = str(region.fast_dtype).removeprefix("torch.")
            self._seen[f"autocast region in {dtype}", f"autocast regions in {dtype}"] += 1

    def scaled(self, scaler: Any, loss: torch.Tensor, scaled: torch.Tensor) -> None:
        """Count losses."""
        self._seen["scaled loss", "scaled losses"] += 1

    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that is unscaled before its step is met here: its gradients are still scaled."""
        self._meet(optimizer, scaler)

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """A step that is skipped does not call the optimizer: it is met here."""
        self._has_scaler |= scaler.is_enabled()
        self._meet(optimizer, scaler if scaler.is_enabled() else None)

    def updating(self, scaler: Any, *, is_set: bool) -> None:
        """Forget what was kept for models that have not stepped in the first iteration."""
        for recording in self._recordings.values():
            recording.detach()
        self._recordings.clear()

    @never_traced  # a step may be inside compiled code
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._meet(optimizer, None)

    def _record_batches(self) -> None:
        """Keep the batches of models that are about to be trained: the first step may be one that is skipped."""
        optimizers = _optimizers_of(None) if self._diagnoses and self.out is not None else []
        for model in {model_with(params_of(optimizer)) for optimizer in optimizers}:
            if model is not None and not isinstance(model, Models):
                self._recordings[model] = recording = Recording(model, most_bytes=MOST_BYTES)
                recording.attach()

    def _is_worker(self) -> bool:
        """Return True in a process that was forked from the one castwise was installed in, and is no rank."""
        is_rank = torch.distributed.is_available() and torch.distributed.is_initialized()
        return os.getpid() != self._pid and not is_rank

    def _told(self, mistake: Mistake) -> None:
        """The finder warns of them by itself, and looks only while something listens."""

    def _meet(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        if optimizer not in self._met:
            self._met.add(optimizer)
            with self._guard:
                self._monitor(optimizer, scaler)

    def _monitor(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        model = model_with(params_of(optimizer))
        if model is None:
            self._seen["optimizer of parameters of no module", "optimizers of parameters of no module"] += 1
            warn("an optimizer trains parameters that belong to no module: there is nothing to monitor", UserWarning, 2)
            return
        optimizers = [optimizer, *(other for other in _optimizers_of(model) if other not in self._met)]
        self._met.update(optimizers)
        if self.out is None:
            WATCH.model_found(model)
            return
        sink = self._sink(model)
        monitor = _Alone(model, optimizers, scaler, every=self._every, sinks=[sink])
        recording = self._recordings.pop(model, None)
        if self._diagnoses and scaler is not None:
            monitor.diagnose(recording, self._diagnoses)
        elif recording is not None:
            recording.detach()
        monitor.attach()
        # What the optimizer's hooks keep alive: a script may train one model after the other.
        self._monitors.append(weakref.ref(monitor))
        weakref.finalize(monitor, _end_record, sink).atexit = False

    def _sink(self, model: nn.Module) -> JSONL:
        if self._rank is None:
            self._rank = rank_now()
            if not self._is_worker():
                _remove_records(self.out, self._rank)
        inner = getattr(model, "_orig_mod", getattr(model, "module", model))
        parts = [type(each).__name__ for each in model.children()] if isinstance(model, Models) else []
        name = "+".join(parts) or type(inner if isinstance(inner, nn.Module) else model).__name__
        self._names.append(name)
        count = self._names.count(name)
        folder = name + (f"-{count}" if count > 1 else "") + (f"-rank{self._rank}" if self._rank else "")
        folder += f"-process{os.getpid()}" if self._is_worker() else ""
        assert self.out is not None
        return JSONL(self.out / folder / FILE_NAME)


class _Alone(Monitor):
    """A monitor that waits for no other process: nothing is known of what those do."""

    def _make_ranks(self) -> Ranks:
        return Ranks.alone()

    def diagnose(self, recording: Recording | None, most: float) -> None:
        """Diagnose skipped steps from now on.

        Args:
            recording: Of the model, if there is one that has begun.
            most: How many of each cause: the overflows of a search for the scale are not to use up what a later NaN
                needs.
        """
        if is_split_over_ranks(self._model):  # a replay that ends on one rank would keep the others waiting
            return
        assert self._scaler is not None
        scaler: Any = self._scaler
        self._recording = recording or Recording(self._model, most_bytes=MOST_BYTES)
        self._recording.follow(lambda: int(scaler.iteration))
        self._most_diagnoses, self._skips = most, Counter[Cause | None]()

    def _diagnosed(self, facts: StepFacts, batches: MicroBatches | None) -> Diagnosis | None:
        if facts.skipped and self._recording is not None:
            self._skips[facts.cause] += 1
            if self._skips[facts.cause] > self._most_diagnoses:
                return None
        return Monitor._diagnosed(self, facts, batches)


def _processes_started() -> int:
    """Return how many processes Python's multiprocessing has started from this one."""
    if "multiprocessing.process" not in sys.modules:
        return 0
    next_name = multiprocessing.Process().name  # "Process-3", in such a process "Process-1:3"
    return int(next_name.replace(":", "-").rpartition("-")[2]) - 1


def _optimizers_of(model: nn.Module | None) -> list[torch.optim.Optimizer]:
    """Return the optimizers there are for a model's parameters, or all, without those that wrap another one.

    Of `MasterWeights` and its inner optimizer it is the former whose `step` is called.
    """
    wanted = None if model is None else set(map(id, model.parameters()))
    found, inner = [], set()
    for value in gc.get_objects():
        if not issubclass(type(value), torch.optim.Optimizer):
            continue
        if hasattr(type(value), "_steps_in_fp32") and getattr(value, "inner", None) is not None:
            inner.add(id(value.inner))
        elif "param_groups" not in vars(value):
            continue
        if wanted is None or any(id(param) in wanted for group in value.param_groups for param in group["params"]):
            found.append(value)
    return [optimizer for optimizer in found if id(optimizer) not in inner]


def _remove_records(out: Path | None, rank: int) -> None:
    """Remove what an earlier run of this rank has left: the first one removes that of all ranks but the others."""
    for file in [] if out is None else out.glob(f"*/{FILE_NAME}"):
        _, dash, of_rank = file.parent.name.rpartition("-rank")
        if (of_rank == str(rank)) if rank else not (dash and of_rank.isdigit()):
            file.unlink()


def _end_record(sink: JSONL) -> None:
    """End the record of a model that is no more."""
    with suppress(OSError):
        sink({"kind": "end"})
        sink.close()
