"""Record code that does not use castwise: a monitor for each model, mistakes, and the report at the end."""

from __future__ import annotations

import multiprocessing
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from castwise._guard import ErrorBoundary, guarded
from castwise._installation.models import Models, model_with, raw_tensors
from castwise._installation.new_optimizers import NewOptimizers
from castwise._installation.run_folder import RunFolder, model_folder
from castwise._installation.saved_files import SavedFiles
from castwise._invariants.invariant import Exemptions
from castwise._invariants.resumed import LOADED_STATES
from castwise._invariants.torch_calls import TORCH_CALLS
from castwise._live_objects import instances_of
from castwise._mistakes.mistake import Mistake
from castwise._mistakes.watch import WATCH
from castwise._torch_private import is_dynamo_active, wraps_compiled
from castwise._warnings import warn_or_print
from castwise._wrapped_optimizers import runs_hooks
from castwise.amp._fp32_steps import steps_in_fp32
from castwise.amp._gradients import params_of
from castwise.amp._observers import OBSERVERS, Observer
from castwise.amp._outcomes import Cause, StepFacts
from castwise.diagnosis._backward_calls import BACKWARD_CALLS
from castwise.diagnosis._capsule import MOST, Capsules
from castwise.diagnosis._diagnosis import Diagnosis
from castwise.diagnosis._earlier_weights import EarlierWeights
from castwise.diagnosis._loaded_batches import LOADED_BATCHES
from castwise.diagnosis._loss_code import LOSS_CODE
from castwise.diagnosis._recording import MicroBatches, Recording, loss_is_finite_of
from castwise.monitor._gathered_weights import can_be_replayed
from castwise.monitor._iterations import MonitoredIteration
from castwise.monitor._monitor import Monitor, check_every
from castwise.monitor._ranks import Ranks, rank_now
from castwise.monitor._record_file import FILE_NAME
from castwise.monitor._records import EndRecord
from castwise.monitor._sinks import JSONL

if TYPE_CHECKING:
    from castwise.report._summary import Summary

REPORT = "report.html"
# Memory limit for the recorded batches of a step.
MOST_BYTES = 64 << 20
# Steps of any optimizers after which a model that has not stepped is not expected to any more.
_STEPS_WAITED = 8
_PROCESSES = "child process", "child processes"


class Account(Observer):
    """Attaches a `Monitor` to each model before the first step of an optimizer that trains it.

    Each run has a folder of its own (`castwise._installation.run_folder`). With several processes, each writes its own
    folders in it, and none waits for another, because they may not train the same model; those that train one FSDP2
    model do. Folders of forked workers that are not ranks have the process id in their name.

    Args:
        out: The folder of runs; None records nothing, and only reports mistakes.
        every: Steps between two samples of the monitors.
        diagnoses: Largest number of diagnosed steps with an inf or NaN per model and cause.
        skips: Whether to skip such steps where there is no scaler.
        invariants: Whether monitors check invariants, or what is exempt from them; see `Monitor`.
        spikes: Whether monitors look for spikes of the loss; see `Monitor`.
        snapshots: Whether monitors keep weights of earlier steps; see `Monitor`.
        capsules: Largest number of capsules of faults.
        shared_script: Whether the report loads plotly.js from a file in the folder of runs.

    Raises:
        TypeError, ValueError: `every` is not an integer >= 1, or `invariants` is not what `Monitor` accepts.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | None,
        every: int,
        diagnoses: float = 0,
        *,
        skips: bool = False,
        invariants: bool | Mapping[str, Sequence[str]] = True,
        spikes: bool = False,
        snapshots: bool = False,
        capsules: int = MOST,
        shared_script: bool = False,
    ) -> None:
        check_every(every)
        Exemptions(invariants)
        self._invariants, self._spikes, self._snapshots = invariants, spikes, snapshots
        self._diagnoses, self._skips, self._capsules = diagnoses, skips, capsules
        self._recordings: dict[nn.Module, Recording] = {}  # for the first step
        self._has_seen_a_region = False
        self._shares_script = shared_script
        self.out, self._every = None if out is None else _absolute(Path(out)), every
        self._folder = None if self.out is None else RunFolder(self.out)
        self._files = None if self.out is None or invariants is False else SavedFiles(self.out)
        self.failure = ""
        """Why nothing is recorded; empty if there was no error."""
        self.say: Callable[[str], object] = lambda text: warn_or_print(text, RuntimeWarning)
        """Called with what must not wait for the report: why nothing is recorded, and where an inf or NaN begins."""
        self._monitors: list[weakref.ref[_LocalMonitor]] = []
        self._registered: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._guard = ErrorBoundary()
        self._new_optimizers = NewOptimizers(self._record_batches_of, self._guard)
        self._hook: Any = None
        self._names: list[str] = []
        self._rank: int | None = None
        self._pid = os.getpid()
        self._seen: Counter[torch.dtype | tuple[str, str]] = Counter()  # regions by their dtype
        self._has_checked = self._follows_backward = self._follows_calls = False
        self._steps = 0

    def begin(self) -> None:
        """Start looking for mistakes and models. Models are recorded if there is a folder."""
        OBSERVERS.append(self)
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        self._new_optimizers.begin()
        if self._diagnoses and self.out is not None:
            BACKWARD_CALLS.follow()
            LOADED_BATCHES.follow()
            self._follows_backward = True
        if self._invariants is not False and self.out is not None:
            TORCH_CALLS.follow()
            self._follows_calls = True
        with self._guard:  # models are recorded anyway
            WATCH.subscribe(self._on_mistake, of_gradients=True)

    def stop(self) -> None:
        """Stop looking for models; those that were found are still recorded."""
        self._new_optimizers.end()
        self._drop_recordings()
        if self._follows_backward:
            self._follows_backward = False
            BACKWARD_CALLS.leave()
            LOADED_BATCHES.leave()
        if self._follows_calls:
            self._follows_calls = False
            TORCH_CALLS.leave()
        if self in OBSERVERS:
            OBSERVERS.remove(self)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def end(self) -> Summary | None:
        """Record pending results, write the report and return its summary; None if there is none."""
        self.stop()
        for monitor in filter(None, [reference() for reference in self._monitors]):
            with self._guard:
                monitor.detach()
        with self._guard:
            WATCH.unsubscribe(self._on_mistake)
        return self.report()

    def report(self) -> Summary | None:
        """Write the report of what is recorded so far, without waiting. Return its summary; None if there is none."""
        if not self.has_recorded or self._rank or self._folder is None:
            return None
        from castwise.report._summary import end

        run = self._folder.run
        if run is None:  # it was deleted
            return None
        return end([run], run / REPORT, self.out if self._shares_script and self.out is not None else False)

    @property
    def run(self) -> Path | None:
        """The folder of this run; None if nothing was recorded."""
        return None if self._folder is None else self._folder.run

    @property
    def notes(self) -> list[str]:
        """A message after `end`, if steps were to be skipped and the scaler of the script does that anyway."""
        if not self._skips or self._has_checked or not self.has_recorded:
            return []
        return ["--guard had no effect: each optimizer steps with a GradScaler, which skips such steps anyway"]

    @property
    def has_recorded(self) -> bool:
        """Whether a model was recorded."""
        return bool(self._names)

    @property
    def seen(self) -> str:
        """Counts of observed events in words; empty if there were none."""
        counts = {**self._seen, _PROCESSES: _processes_started()}
        return ", ".join(f"{count} {_named(event, count)}" for event, count in counts.items() if count)

    # -- events -------------------------------------------------------------------------------------------------

    @guarded
    def entered(self, region: Any) -> None:
        """Count regions. In the first one of a training step, start recording batches for a diagnosis."""
        if not self._has_seen_a_region and torch.is_grad_enabled() and not is_dynamo_active():
            self._has_seen_a_region = True
            self._record_batches()
        if region._enabled:
            self._seen[region.fast_dtype] += 1

    @guarded
    def scaled(self, scaler: Any, loss: torch.Tensor, scaled: torch.Tensor) -> None:
        """Count losses."""
        self._seen["scaled loss", "scaled losses"] += 1

    @guarded
    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Attach a monitor to an optimizer that is unscaled before its step, while gradients are still scaled."""
        self._register(optimizer, scaler)

    @guarded
    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Attach a monitor before a step of the scaler, which does not call the optimizer if it skips."""
        self._register(optimizer, scaler if scaler.is_enabled() else None)

    @guarded
    def updating(self, scaler: Any, *, is_set: bool) -> None:
        """Drop the recordings of models that did not step in the first iteration."""
        self._drop_recordings()

    @guarded
    def file_saved(self, saved: object) -> None:
        """Have monitors compare the dtypes of a file with those of their models."""
        for monitor in filter(None, [reference() for reference in self._monitors]):
            monitor.note_file(saved)

    @guarded
    def state_loaded(self, optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
        """Note a state that an optimizer has loaded, for its next step."""
        own = "" if self.run is None else self.run.name
        LOADED_STATES.note(optimizer, state_dict, None if self._files is None else self._files.loaded(own))

    @guarded
    def file_read(self, path: object) -> None:
        """Note a file, from which an optimizer's state may come."""
        if self._files is not None:
            self._files.read(path)

    @guarded
    def file_written(self, saved: object, path: object) -> None:
        """Record the last step and its loss with a file, for runs that resume from it."""
        monitors = [monitor for monitor in (reference() for reference in self._monitors) if monitor is not None]
        if self._files is not None and self.run is not None and len(monitors) == 1:
            known = monitors[0].last_step()
            if known is not None:
                self._files.written(self.run, saved, path, *known)

    @guarded
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._register(optimizer, None)
        self._steps += 1
        if self._steps == _STEPS_WAITED:
            self._drop_recordings()

    def _drop_recordings(self) -> None:
        for recording in self._recordings.values():
            recording.detach()
        self._recordings.clear()

    def _record_batches(self) -> None:
        """Start recording the batches of all models with an optimizer, because the first step may be skipped."""
        for optimizer in _optimizers_of(None) if self._diagnoses and self.out is not None else []:
            self._record_batches_of(optimizer)

    def _record_batches_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Start recording the batches of an optimizer's model, before its first step, and following checkpoints."""
        if self._follows_calls:
            TORCH_CALLS.follow_checkpoints()
        if not self._diagnoses or self.out is None or optimizer in self._registered:
            return
        model = model_with(params_of(optimizer))
        if model is None:
            LOSS_CODE.read_lines()
        if model is None or isinstance(model, Models) or model in self._recordings:
            return  # several models have an object of their own at each look-up
        for inner in [inner for inner in self._recordings if any(inner is module for module in model.modules())]:
            self._recordings.pop(inner).detach()  # the model has been wrapped since
        self._recordings[model] = recording = Recording(model, most_bytes=MOST_BYTES)
        recording.attach()

    def _is_worker(self) -> bool:
        """Return True in a process that is not a rank and was forked from the one where castwise was installed."""
        is_rank = torch.distributed.is_available() and torch.distributed.is_initialized()
        return os.getpid() != self._pid and not is_rank

    def _on_mistake(self, mistake: Mistake) -> None:
        """Do nothing. The watch issues the warnings, but runs only while it has a subscriber."""

    def _register(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        if optimizer not in self._registered:
            self._registered.add(optimizer)
            self._monitor(optimizer, scaler)
            if self._follows_calls:
                TORCH_CALLS.follow_checkpoints()

    def _monitor(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        model = model_with(params_of(optimizer))
        if model is None:
            model = raw_tensors(params_of(optimizer))
        optimizers = [optimizer, *(other for other in _optimizers_of(model) if other not in self._registered)]
        self._registered.update(optimizers)
        if self.out is None:
            WATCH.model_found(model)
            return
        sink = self._make_sink(model)
        if sink is None:
            WATCH.model_found(model)
            return
        watched: dict[str, Any] = {"invariants": self._invariants, "spikes": self._spikes}
        monitor = _LocalMonitor(model, optimizers, scaler, every=self._every, sinks=[sink], **watched)
        recording = self._recording_of(model)
        self._has_checked |= scaler is None
        monitor.check(scaler, recording, self._diagnoses, skips=self._skips, snapshots=self._snapshots)
        monitor.say = self.say
        if self._capsules and self.run is not None:
            monitor.capsules = Capsules(sink.path.parent, self.run, self._capsules)
        monitor.attach()
        # A weak reference: the optimizer's hooks keep the monitor alive. A script may train several models in turn.
        self._monitors.append(weakref.ref(monitor))
        weakref.finalize(monitor, _end_record, sink).atexit = False

    def _recording_of(self, model: nn.Module) -> Recording | None:
        """Return the recording that was started before the model's first step, of the model or of what it wraps."""
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        return self._recordings.pop(model, None) or self._recordings.pop(inner, None)

    def _make_sink(self, model: nn.Module) -> JSONL | None:
        """Create the folder of a model's record; None if that fails, and from then on nothing is recorded."""
        assert self._folder is not None
        try:
            return self._sink(model, self._folder.make())
        except OSError as error:
            self.failure = f"nothing is recorded, because {self.out} cannot be written: {error}"
            self.out = None
            if not self.has_recorded:
                self._folder = None
            self.say(self.failure)
            self._drop_recordings()
            return None

    def _sink(self, model: nn.Module, records: Path) -> JSONL:
        if self._rank is None:
            self._rank = rank_now()
        inner = next(model.children()) if wraps_compiled(model) else getattr(model, "module", model)
        parts = [type(each).__name__ for each in model.children()] if isinstance(model, Models) else []
        name = "+".join(parts) or type(inner if isinstance(inner, nn.Module) else model).__name__
        name = model_folder(name, self._names)
        of_rank = f"-rank{self._rank}" if self._rank else ""
        of_process = f"-process{os.getpid()}" if self._is_worker() else ""
        file = records / f"{name}{of_rank}{of_process}" / FILE_NAME
        file.parent.mkdir(exist_ok=True)
        self._names.append(name)
        return JSONL(file)


class _LocalMonitor(Monitor):
    """A monitor that does not combine records with other processes, which may do something else."""

    capsules: Capsules | None = None
    say: Callable[[str], object]

    def _make_ranks(self) -> Ranks:
        return Ranks.alone()

    def note_file(self, saved: object) -> None:
        """Note an object that is about to be written to a file."""
        if self._invariant_checks is not None:
            self._invariant_checks.file_saved(saved)

    def last_step(self) -> tuple[int, tuple[float, float] | None] | None:
        """Return the last step of the only optimizer, and what losses it has; None if there are several."""
        if self._invariant_checks is None or len(self._optimizers) != 1:
            return None
        return self._numbers.last, self._invariant_checks.usual_loss(self._optimizers[0])

    def check(self, scaler: Any, recording: Recording | None, most: float, *, skips: bool, snapshots: bool) -> None:
        """Set what is done with steps with an inf or NaN, before `attach`.

        Args:
            scaler: The scaler; None if steps are not scaled.
            recording: A recording of the model that has already started, if there is one.
            most: Largest number of diagnoses per cause, so that overflows during the search for the scale leave some
                for a later NaN.
            skips: Whether to skip them if there is no scaler.
            snapshots: Whether to keep weights of earlier steps to replay them with.
        """
        self._checks_steps, self._skips_faults = scaler is None and (most > 0 or skips or self._spikes), skips
        self._most_diagnoses, self._faults = most, Counter[Cause | None]()
        self._diagnoses = most > 0
        self._origins_said = set[tuple[str, str, str]]()
        if not most or not can_be_replayed(self._model):  # one that stops on one rank would block the others
            if recording is not None:
                recording.detach()
            return
        if recording is not None:
            recording.follow(lambda: self._source.iteration)
        self._recording = recording or self._new_recording()
        self._weights = EarlierWeights() if snapshots else None

    def _record_step(
        self,
        facts: StepFacts,
        iteration: MonitoredIteration | None,
        diagnosis: Diagnosis | None,
        batches: MicroBatches | None,
    ) -> None:
        with self._guard:  # the step is recorded anyway
            self._say_origin(facts, diagnosis)
        Monitor._record_step(self, facts, iteration, diagnosis, batches)

    def _record_left_out(self, step: int, diagnosis: Diagnosis) -> None:
        Monitor._record_left_out(self, step, diagnosis)
        self._say_once(f"left out by the script before step {step:,}", diagnosis)

    def _say_origin(self, facts: StepFacts, diagnosis: Diagnosis | None) -> None:
        """Say where an inf or NaN begins, once for each place, while the run goes on; a scale too high is none."""
        if diagnosis and diagnosis.remedy != "scale":
            self._say_once(f"step {facts.number:,}", diagnosis)
        elif facts.cause is not None and not facts.skipped and not self._origins_said and rank_now() == 0:
            self._origins_said.add(("", "", ""))
            self.say(f"step {facts.number:,}: taken with an inf or NaN ({facts.cause})")

    def _say_once(self, when: str, diagnosis: Diagnosis) -> None:
        origin = diagnosis.module, diagnosis.op, diagnosis.line
        if origin not in self._origins_said:
            self._origins_said.add(origin)
            sample = f" {diagnosis.sample[:1].upper()}{diagnosis.sample[1:]}." if diagnosis.sample else ""
            self.say(f"{when}: {diagnosis.summary}{sample}")

    def _new_recording(self) -> Recording:
        return Recording(self._model, lambda: self._source.iteration, most_bytes=MOST_BYTES)

    def _is_wanted(self, cause: Cause) -> bool:
        if not self._diagnoses:
            return False
        self._faults[cause] += 1
        return self._faults[cause] <= self._most_diagnoses

    def _diagnose(self, facts: StepFacts, batches: MicroBatches | None, weights_of: int | None) -> Diagnosis | None:
        diagnosis = Monitor._diagnose(self, facts, batches, weights_of)
        if diagnosis and batches is not None and batches.at_fault is not None and self.capsules is not None:
            with self._guard:  # the step is recorded anyway
                finite = loss_is_finite_of(facts.cause)
                path = self.capsules.write(facts.number, batches.at_fault, diagnosis, facts.scale, finite)
                if path:
                    self.diagnosis = batches.note_capsule(path)
        return self.diagnosis


def _absolute(path: Path) -> Path:
    """Return an absolute path, because scripts may change folders; a relative one where the current folder is gone."""
    try:
        return path.absolute()
    except OSError:
        return path


def _named(event: torch.dtype | tuple[str, str], count: int) -> str:
    """Return what was counted in words."""
    if isinstance(event, torch.dtype):
        return f"autocast region{'' if count == 1 else 's'} in {str(event).removeprefix('torch.')}"
    one, more = event
    return one if count == 1 else more


def _processes_started() -> int:
    """Return the number of processes that this one started with multiprocessing."""
    if "multiprocessing.process" not in sys.modules:
        return 0
    next_name = multiprocessing.Process().name  # "Process-3", or "Process-1:3" in a child process
    return int(next_name.replace(":", "-").rpartition("-")[2]) - 1


def _optimizers_of(model: nn.Module | None) -> list[torch.optim.Optimizer]:
    """Return the existing optimizers of a model's parameters, or of any model, without wrapped ones.

    Of `MasterWeights` and its inner optimizer, return `MasterWeights`, whose `step` the script calls.
    """
    wanted = None if model is None else set(map(id, model.parameters()))
    found, inner = [], set()
    for value in instances_of(torch.optim.Optimizer):
        if steps_in_fp32(type(value)):  # the object may not be finished
            inner.add(id(getattr(value, "inner", None)))
        elif "param_groups" not in vars(value) or not runs_hooks(value):
            continue
        if wanted is None or any(id(param) in wanted for group in value.param_groups for param in group["params"]):
            found.append(value)
    return [optimizer for optimizer in found if id(optimizer) not in inner]


def _end_record(sink: JSONL) -> None:
    """End the record of a model that was garbage-collected."""
    with suppress(OSError):
        sink.write_record(EndRecord())
        sink.close()
