"""What is recorded of code that knows nothing of it: a monitor for each model, mistakes, and the report at the end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import weakref
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from castwise._guard import Guard
from castwise._torch_private import never_traced
from castwise._warnings import warn
from castwise.amp.gradients import params_of
from castwise.amp.observers import OBSERVERS, Observer
from castwise.installation.models import Models, model_with
from castwise.mistakes.mistake import Mistake
from castwise.mistakes.watch import WATCH
from castwise.monitor.monitor import Monitor, check_every
from castwise.monitor.ranks import Ranks, rank_now
from castwise.monitor.sinks import FILE_NAME, JSONL

REPORT = "report.html"
_PROCESSES = "process that was started", "processes that were started"


class Account(Observer):
    """Attaches a `Monitor` to each model after the first step of an optimizer that trains it.

    With several processes each writes folders of its own, and none waits for another: what it does not know is whether
    they all train the same. Workers that were forked and are no ranks have the number of their process in the name.

    Args:
        out: The folder; None records nothing, and tells mistakes alone.
        every: Of the monitors.

    Raises:
        ValueError: `every` is no number of steps.
    """

    def __init__(self, out: str | os.PathLike[str] | None, every: int) -> None:
        check_every(every)
        self.out, self._every = None if out is None else Path(out), every
        self._monitors: list[weakref.ref[Monitor]] = []
        self._scaler: Any = None
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._guard = Guard()
        self._hook: Any = None
        self._names: list[str] = []
        self._rank: int | None = None
        self._pid = os.getpid()
        self._seen: Counter[tuple[str, str]] = Counter()

    def begin(self) -> None:
        """Look for mistakes and for models from now on; models are recorded if there is a folder."""
        for file in [] if self.out is None else self.out.glob(f"*-process*/{FILE_NAME}"):
            file.unlink()  # of workers of an earlier run
        WATCH.begin_telling(self._told, of_gradients=True)
        OBSERVERS.append(self)
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def end(self) -> Path | None:
        """Record what is still on its way, and write the report; return where it is if there is one."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            OBSERVERS.remove(self)
        for monitor in filter(None, [reference() for reference in self._monitors]):
            with self._guard:
                monitor.detach()
        WATCH.end_telling(self._told)
        return self._write_report() if self.has_recorded and not self._rank else None

    def _write_report(self) -> Path | None:
        from castwise.report.report import write_report_or_warn

        assert self.out is not None
        return write_report_or_warn(sorted(self.out.glob(f"*/{FILE_NAME}")), self.out / REPORT)

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
        """Count regions."""
        if region._enabled:
            dtype = str(region.fast_dtype).removeprefix("torch.")
            self._seen[f"autocast region in {dtype}", f"autocast regions in {dtype}"] += 1

    def scaled(self, scaler: Any, loss: torch.Tensor, scaled: torch.Tensor) -> None:
        """Count losses."""
        self._seen["scaled loss", "scaled losses"] += 1

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Remember whose step it is."""
        self._scaler = scaler if scaler.is_enabled() else None

    def stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """A step that was skipped has not called the optimizer: it is met here."""
        with self._guard:
            self._meet(optimizer)
        self._scaler = None

    @never_traced
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._scaler is None:
            with self._guard:
                self._meet(optimizer)

    def _is_worker(self) -> bool:
        """Return True in a process that was forked from the one castwise was installed in, and is no rank."""
        is_rank = torch.distributed.is_available() and torch.distributed.is_initialized()
        return os.getpid() != self._pid and not is_rank

    def _told(self, mistake: Mistake) -> None:
        """The finder warns of them by itself, and looks only while something listens."""

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._met:
            return
        self._met.add(optimizer)
        model = model_with(params_of(optimizer))
        if model is None:
            self._seen["optimizer of parameters of no module", "optimizers of parameters of no module"] += 1
            warn("an optimizer trains parameters of no module: there is nothing to monitor", UserWarning, 2)
            return
        optimizers = [optimizer, *(other for other in _optimizers_of(model) if other not in self._met)]
        self._met.update(optimizers)
        if self.out is None:
            WATCH.model_found(model)
            return
        sink = self._sink(model)
        monitor = _Alone(model, optimizers, self._scaler, every=self._every, sinks=[sink])
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


def _processes_started() -> int:
    """Return how many processes Python's multiprocessing has started from this one."""
    if "multiprocessing.process" not in sys.modules:
        return 0
    next_name = multiprocessing.Process().name  # "Process-3", in such a process "Process-1:3"
    return int(next_name.replace(":", "-").rpartition("-")[2]) - 1


def _optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers there are for a model's parameters, without those that wrap another one."""
    wanted = set(map(id, model.parameters()))
    found = []
    for value in gc.get_objects():
        if not issubclass(type(value), torch.optim.Optimizer) or "param_groups" not in vars(value):
            continue
        if any(id(param) in wanted for group in value.param_groups for param in group["params"]):
            found.append(value)
    return found


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
