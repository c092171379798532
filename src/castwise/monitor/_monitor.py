"""`Monitor`: record the numerics of a training run while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from typing_extensions import Self

from castwise._guard import ErrorBoundary, guarded
from castwise._invariants.checks import Checks
from castwise._invariants.gradient_norms import NormsAround
from castwise._invariants.invariant import Exemptions, Violation
from castwise._invariants.loss_spikes import rate_of
from castwise._invariants.spike import NoReplays
from castwise._mistakes.mistake import Mistake
from castwise._mistakes.watch import WATCH
from castwise._torch_private import is_compiled, without_modes, wraps_compiled
from castwise._warnings import warn_or_print
from castwise._wrapped_optimizers import unwrapped
from castwise.amp._outcomes import Cause, StepFacts
from castwise.diagnosis._replay import is_replaying
from castwise.monitor import _module_names as names
from castwise.monitor._activations import Activations
from castwise.monitor._checked_steps import device_of
from castwise.monitor._exchange import NoExchangeError
from castwise.monitor._gathered_weights import can_be_gathered, can_be_replayed
from castwise.monitor._iterations import Iterations, MonitoredIteration
from castwise.monitor._quantized_layers import QuantizedLayers
from castwise.monitor._ranks import Ranks
from castwise.monitor._records import (
    LEFT_OUT,
    AloneRecord,
    DiagnosisRecord,
    EndRecord,
    InvariantRecord,
    MistakeRecord,
    NormsRecord,
    Record,
    StepRecord,
)
from castwise.monitor._run_header import run_record
from castwise.monitor._sample import Sample, sample_record
from castwise.monitor._scaler_steps import ScalerObserver
from castwise.monitor._sharded_model_ranks import ShardedModelRanks
from castwise.monitor._sinks import Sink, Sinks
from castwise.monitor._skips import PARAMETERS_NAMED, StepFault, agreed
from castwise.monitor._step_numbers import StepNumbers
from castwise.monitor._step_sources import OptimizerSource, ScalerSource, ScriptSource, steps_of
from castwise.tracing._module_hooks import ModuleHooks

if TYPE_CHECKING:
    from castwise.diagnosis._diagnosis import Diagnosis
    from castwise.diagnosis._earlier_weights import EarlierWeights
    from castwise.diagnosis._recording import MicroBatches, Recording
    from castwise.monitor._loss_replays import LossReplays
    from castwise.monitor._step_check import Checked

_BY_PHASE = {
    "weight": Cause.NONFINITE_WEIGHTS,
    "input": Cause.NONFINITE_LOSS,
    "forward": Cause.NONFINITE_LOSS,
    "loss": Cause.NONFINITE_LOSS,
    "backward": Cause.OVERFLOW,
}


class Monitor:
    """Records the numerics of a training run: a few numbers for each step, detailed statistics for sampled steps.

    Each step: the scale, whether the step was skipped and why, which gradients were not finite, the loss (the sum of
    the losses passed to `scaler.scale`, on the first rank), the norm computed by `scaler.clip_grad_norm_`, and the
    seconds since the previous step. Sampled steps: the norm of all gradients, if they were not clipped; magnitudes, and
    their fit into fp16, bf16, e4m3 and e5m2, for each parameter's gradient, each module's gradients together and each
    module's output; and the size of each parameter's update. The manual's page on formats defines each number.

    The monitor samples steps 1, 2, 4, 8, ... up to `every`, then every `every` steps. It also samples the gradients
    of each skipped step, except where the device skips it (a fused step on an accelerator) or ranks skip independently.

    Format statistics refer to scaled gradients, magnitudes to unscaled ones. Outputs come from one forward. Gradients
    are read before they are unscaled or clipped.

    The monitor also finds mixed-precision mistakes in the script and warns about each once, with file and line
    (`MixedPrecisionMistake`). The manual's page on `castwise run` lists them, including those found only there. This
    hooks the parameters in the first iterations and in two of every 50 after, and puts one hook on the model (three
    with `on_nonfinite`). Other modules have hooks in samples only. Gradients stay plain tensors.
    Module hooks are removed where they would change what torch does: in a `nn.TransformerEncoderLayer` that runs as one
    kernel, and for `torch.compile`. So outputs of compiled modules are not recorded, and to replay batches of a model
    that is compiled as a whole, pass the object that `torch.compile` returns.

    A sampled step reads every output once on its device and every gradient twice (three times on a CPU if the scale is
    not a power of two), and copies and compares the weights. The host never waits for an accelerator: results from
    there are recorded two steps later. The monitor's memory does not grow with the run. The monitor never ends the run:
    if it cannot measure something, it warns and leaves it out, and does not try again after ten failures in a row.

    With several processes, each measures its own part. They combine their results at sampled steps, and at skipped
    steps if the scalers of all agree, and the first process writes them. All processes attach together, with the same
    `every` and the same step numbers. A process waits at most 10 s in `attach`, and once for about 10 s in a step;
    where faults of a model that is split over ranks are diagnosed, twice as long in `attach`, in each step up to a
    minute, and up to 10 minutes for ranks that replay. After that, each warns with the cause, and the first records
    itself alone. The manual's page on ranks has details.

    Args:
        model: The trained model, or its wrapper; records use the names without wrappers.
        optimizer: The model's optimizer or optimizers, also as wrapped by Lightning, Fabric, Accelerate or DeepSpeed.
            An iteration ends when one of them steps again. Gradients that a closure computes are not seen before the
            step.
        scaler: A scaler of castwise, or None. Without a scaler, or with a disabled one, the optimizers' steps are
            recorded, and losses are unknown unless `on_nonfinite` is set. With one, the steps of `scaler.step` are
            recorded, and steps that an optimizer takes on its own after `scaler.unscale_`, in a script that skips by
            hand. Steps that such a script skips are not recorded.
        every: Steps between two samples, >= 1; samples are denser at the start of a run.
        sinks: Where records go: paths, each opened as a `sinks.JSONL`, functions that accept one record as a dict, or
            other sinks (`sinks.RecordSink`). A sink that fails is dropped with a warning.
        on_nonfinite: `"diagnose"` replays the batch of a step with an inf or NaN and records the module and op that
            made the first. The last result is in `diagnosis`. Without a scaler, each step is checked and replayed
            before it is taken, except on an accelerator, where only the cause is recorded unless `snapshots` is set;
            losses are read where `backward` is called. This keeps the inputs of a step's last 64 forwards, and the
            gradients of the outputs of the last 8 (each as large as the model's output, such as logits), until the
            outcome of the step is known; on an accelerator that takes two more steps. Forwards before these 8 are
            replayed only if the gradients of their outputs are not finite.
        invariants: True checks what holds in every correct run, such as that each parameter with a gradient is in an
            optimizer and changes. What is broken is recorded and reported once, as a RuntimeWarning. A mapping from
            invariants to patterns of parameter names (`fnmatch`) exempts these: `{"never-updated": ["experts.*"]}`.
            The manual's page on invariants lists them.
        spikes: Whether to look for what makes the loss rise suddenly; checks invariants too. Losses are read, as with
            `on_nonfinite`. On a CPU, a copy of the weights is kept, which tells the element and the bit that something
            else than the optimizer has written, and the gradient of each step is searched for single large elements. In
            one process, weights are copied as with `snapshots`, and the inputs of a step's forwards and of those of
            four earlier steps are kept: the loss of a spike is repeated with the weights of an earlier step, which
            takes at most 2 s or the time of 10 steps, and changes no state. Of ranks that train one model, digests of
            the weights are computed in each step, which tell from which step on they differ.
        snapshots: Whether to copy the trained weights to the host's memory every 16 steps, and keep two such copies. On
            an accelerator the batch of the first step that is taken with an inf or NaN is then replayed with the
            weights of the latest copy from before it. Everywhere, remedies are tried with the weights of the older
            copy, which tells a fault of the batch from one that training has led to. For `on_nonfinite`.
        check: A golden file to record from the first three steps, for `castwise check`; nothing is recorded if there is
            one. The run cannot be repeated in float64, so a check tells only whether the bits are the same, and if
            not, whether rounding explains the difference. Waits for the device in these steps. For one process.

    Raises:
        FileExistsError: A sink's file exists and is not a record.
        TypeError: `optimizer` is not an optimizer, the scaler does not report its steps (torch's does not), a sink is
            neither a path nor a function, or `invariants` is neither a bool nor a mapping to lists of patterns.
        ValueError: `every` or `on_nonfinite` is out of range, `snapshots` is set without `on_nonfinite`, there is no
            optimizer, or no invariant of a name.

    Example:
        >>> import castwise
        >>> model = nn.Linear(4, 1)
        >>> optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), castwise.GradScaler("cpu")
        >>> records = []
        >>> with Monitor(model, optimizer, scaler, sinks=[records.append]):
        ...     scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        >>> [record["kind"] for record in records]
        ['run', 'step', 'sample', 'end']
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None = None,
        *,
        every: int = 100,
        sinks: Sequence[Sink | str | os.PathLike[str]] = (),
        on_nonfinite: Literal["diagnose"] | None = None,
        invariants: bool | Mapping[str, Sequence[str]] = False,
        spikes: bool = False,
        snapshots: bool = False,
        check: str | os.PathLike[str] | None = None,
    ) -> None:
        _check(every, on_nonfinite, snapshots)
        self._exemptions = Exemptions(invariants) if invariants is not False or spikes else None
        self._spikes, self._golden = spikes, check
        self._model, self._scaler, self._every = model, scaler, every
        self._optimizers = _unwrapped(optimizer)
        self._source = steps_of(scaler, self._optimizers)
        self._sinks = Sinks([sinks] if isinstance(sinks, (str, os.PathLike)) or callable(sinks) else list(sinks))
        self._activations = Activations(model)
        self._quantized = QuantizedLayers(model)
        self._recording = self._new_recording() if on_nonfinite else None
        self._weights = _earlier_weights() if snapshots else None
        self._diagnoses = on_nonfinite is not None
        self._replays: LossReplays | NoReplays = NoReplays("the monitor is not attached")
        self._checks_steps = (on_nonfinite is not None or spikes) and not self._source.is_scaled
        self._skips_faults = self._is_late = self._has_lost_weights = False  # the first is set by `_LocalMonitor`
        self._guard = ErrorBoundary()
        self._model_hooks = ModuleHooks(self._guard)
        self._handles: list[Any] = []
        self._invariant_checks: Checks | None = None
        self._joint: ShardedModelRanks | None = None
        self._numbers = StepNumbers()
        self.diagnosis: Diagnosis | None = None
        """With `on_nonfinite`, the diagnosis of the last step with an inf or NaN; None if it was not replayed."""

    def __repr__(self) -> str:
        if "_numbers" not in vars(self):  # `__init__` has not finished
            return object.__repr__(self)
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        diagnoses = ", on_nonfinite='diagnose'" if self._diagnoses else ""
        return (
            f"{type(self).__name__}({type(self._model).__name__}, [{optimizers}], {self._scaler!r}, "
            f"every={self._every}, sinks={self._sinks}{diagnoses})"
        )

    @property
    def step(self) -> int:
        """The number of the next step, an integer >= 0. Set it to use your own step numbers in the records.

        Set it to the loop's counter, once or before each step; the monitor continues from there. If a trainer counts
        completed steps, set it to that count plus one. Skipped steps count, and so does every step of each of several
        optimizers. If it is set to a number that was recorded before, as after returning to a checkpoint, `Run.read`
        drops the earlier records from that number on.

        If it is never set, steps are counted from 1, or from the step count of a scaler that loaded its state. Reading
        it then gives the last recorded step plus one.

        Raises:
            ValueError: The new value is not an integer >= 0.
        """
        return self._numbers.next

    @step.setter
    def step(self, number: int) -> None:
        self._numbers.next = number

    # -- beginning and end --------------------------------------------------------------------------------------

    def attach(self) -> Self:
        """Start recording and counting steps.

        Raises:
            RuntimeError: The monitor is already attached.
            ValueError: `on_nonfinite="diagnose"` is set and the model is split over ranks in other ways than by
                `fully_shard` and `parallelize_module`: a replay that stops on one rank would block the others. FSDP1 is
                refused on one, too.
        """
        if self._handles:
            raise RuntimeError("this monitor is already attached: call detach() first")
        if self._recording is not None and not can_be_replayed(self._model):
            raise ValueError(
                'on_nonfinite="diagnose" replays a batch on each rank alone, and the forward of this model needs other '
                "ranks: remove on_nonfinite. The cause of a skip and the parameters are recorded without it"
            )
        self._has_begun = is_attached = False
        with self._guard, without_modes():
            self._start()
            is_attached = True
        if not is_attached:
            self._remove()
        return self

    def _start(self) -> None:
        on_accelerator = any(device_of(optimizer).type != "cpu" for optimizer in self._optimizers)
        # Whether steps are taken before it is known that a loss or a gradient is not finite.
        self._is_late = self._checks_steps and not self._skips_faults and on_accelerator
        self._joint = self._make_joint()
        self._ranks = self._make_ranks()
        if self._ranks.is_apart:
            self._sinks.set_apart(self._ranks.rank)
        self._iterations = Iterations(len(self._optimizers), self._begin)
        self._numbers.start(self._source.steps)
        source, optimizers = self._source, self._optimizers
        self._by_hand = ScriptSource(source, len(optimizers)) if isinstance(source, ScalerSource) else None
        scaler = self._scaler if source.is_scaled else None
        self._scaler_steps = ScalerObserver(self._sample_skipped, self._model, optimizers, scaler, self._guard)
        self._replays = self._make_replays()
        self._invariant_checks = self._make_checks()
        self._handles = [self._scaler_steps]  # from here on _remove has something to undo
        self._write(run_record(self._model, self._optimizers, self._scaler, self._every, self._ranks.world_size))
        self._has_begun = True
        self._note_alone(self._numbers.next)
        self._handles += [
            # Before _on_step, which without a scaler is such a hook too and records the sample.
            *(optimizer.register_step_post_hook(self._after_step) for optimizer in self._optimizers),
            self._source.register_gradients_hook(self._before_step),
            self._source.register_step_hook(self._on_step),
        ]
        if self._checks_steps and isinstance(source, OptimizerSource):
            check = source.register_check(self._on_fault, skips=self._skips_faults, joint=self._joint)
            self._handles.append(check)
        if self._recording is not None:
            self._recording.measures_each = self._weights is not None and self._is_late
            with self._guard:  # steps are recorded without diagnoses
                self._recording.attach()
        with self._guard:  # and without outputs, as those of scripted modules
            self._activations.watch()
            self._quantized.watch()
        self._put_on_model()
        if self._golden is not None:
            self._record_golden(self._golden)
        WATCH.subscribe(self._on_mistake)
        WATCH.model_found(self._model)

    def _record_golden(self, path: str | os.PathLike[str]) -> None:
        """Begin to record the file for `castwise check`."""
        if self._ranks.world_size > 1:
            text = "a Monitor records no golden file on several ranks: use `castwise check record --ranks N SCRIPT`"
            warn_or_print(text, RuntimeWarning)
            return
        from castwise.checking._run_recording import RunRecording

        with self._guard:
            self._handles.append(RunRecording(path))

    def _make_replays(self) -> LossReplays | NoReplays:
        """Return what repeats losses of spikes, and keep what it needs."""
        if not self._spikes:
            with_spikes = "--spikes also looks at gradients, and at weights before each step"
            return NoReplays(f"only --spikes repeats losses; {with_spikes}")
        from castwise.monitor._loss_replays import LossReplays

        if can_be_gathered(self._model) or not can_be_replayed(self._model):
            return NoReplays("a forward exchanges tensors with other ranks")
        self._recording = self._recording or self._new_recording()
        self._weights = self._weights or _earlier_weights()
        return LossReplays(self._weights, self._optimizers)

    def _new_recording(self) -> Recording:
        """Return a recording of the model that has not started."""
        from castwise.diagnosis._recording import Recording

        return Recording(self._model, lambda: self._source.iteration)

    def _make_checks(self) -> Checks | None:
        if self._exemptions is None:
            return None
        parameters = partial(names.parameters, self._model)

        given = self._model, parameters, self._optimizers, self._exemptions
        reports = self._on_broken, self._on_norms
        return Checks(*given, *reports, self._step_to_take, spikes=self._spikes, replays=self._replays)

    def _make_joint(self) -> ShardedModelRanks | None:
        """Return what ranks need to replay batches of a model that is split over them; without it, record none."""
        replays = self._diagnoses and not (self._is_late and self._weights is None)
        if not (replays or (self._checks_steps and self._skips_faults)):
            return None
        if not can_be_gathered(self._model):
            return None
        try:
            return ShardedModelRanks(self._model)
        except NoExchangeError as why:
            warn_or_print(f"batches of this model, which is split over ranks, are not replayed: {why}", RuntimeWarning)
            if self._recording is not None:
                self._recording.detach()
            self._recording = None
            return None

    def _put_on_model(self) -> None:
        """Hook the model's forward for the checks, if it can have hooks."""
        is_compiled_in_place = is_compiled(self._model) and not wraps_compiled(self._model)
        if self._invariant_checks is not None and not (
            is_compiled_in_place or isinstance(self._model, torch.jit.ScriptModule)
        ):
            with self._guard:  # modes are checked at steps alone
                forward = self._forward if self._spikes else self._invariant_checks.forward
                self._model_hooks.put_on(self._model, forward)

    def _forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._invariant_checks is not None and not is_replaying():
            self._invariant_checks.forward(model, args, kwargs)

    def _make_ranks(self) -> Ranks:
        model = type(names.modules(self._model)[""]).__name__  # the class inside the wrappers
        return Ranks.together(model, self._every, agrees=self._source.agrees or self._joint is not None)

    def detach(self) -> None:
        """Record pending results, which waits for the device, and remove all hooks."""
        if not self._handles:
            return
        if self._joint is not None:
            self._joint.close()  # first: other ranks may not detach at the same time, so nothing pending is replayed
        try:
            self._source.synchronize()  # may raise ScaleExhausted, which is the schedule's
        finally:
            for end in (partial(self._record_steps_by_hand, all_=True), partial(self._finish, all_=True), self._remove):
                with self._guard, without_modes():  # one that fails must not keep the others
                    end()

    def _remove(self) -> None:
        removals: list[Callable[[], object]] = [
            *(handle.remove for handle in self._handles),
            lambda: WATCH.unsubscribe(self._on_mistake),
            self._activations.stop,
            self._quantized.stop,
            self._model_hooks.remove,
            *([] if self._invariant_checks is None else [self._invariant_checks.stop]),
            lambda: self._iterations.clear(),  # which a failed `attach` may not have made
            self._replays.end,
            *([] if self._recording is None else [self._recording.detach]),
            *([] if self._joint is None else [self._joint.close]),
            self._write_end,
            self._sinks.close,
            lambda: self._ranks.close(),
        ]
        self._handles = []  # first, so that a second detach() does nothing
        for remove in removals:
            with self._guard:  # one that fails must not keep the others
                remove()

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.detach()
        elif self._handles and self._ranks.combines_samples:
            self._remove()  # ranks that did not fail would not join in combining results
        else:
            with suppress(Exception):  # raise the training's error, not this one
                self.detach()

    # -- during a step, in this order ---------------------------------------------------------------------------

    @guarded
    def _before_step(self, optimizer: torch.optim.Optimizer, scale: torch.Tensor) -> None:
        """Measure gradients before anything changes them."""
        optimizer = unwrapped(optimizer)
        if not self._knows(optimizer):
            return
        self._numbers.begin(self._source.iteration)
        iteration = self._iterations.note_gradients(optimizer, self._source.iteration)
        if self._recording is not None:
            iteration.note_batches(optimizer, self._recording.take())
            # An optimizer without batches steps with the gradients of the one before.
            if self._weights is not None and (len(self._optimizers) == 1 or iteration.batches.get(optimizer)):
                self._weights.keep(self._step_to_take(), self._optimizers, optimizer)
        if self._invariant_checks is not None:
            self._model_hooks.put_back()
            self._invariant_checks.before_step(optimizer, iteration.batches.get(optimizer))
            iteration.rates[optimizer] = rate_of(optimizer)
        if iteration.sample is not None:
            iteration.sample.measure_gradients(optimizer, scale)
            iteration.sample.keep_weights(optimizer)

    def _step_to_take(self) -> int:
        """Return the number of the step that is about to be taken; facts of those before may not have arrived."""
        return self._numbers.current(self._source.iteration, self._source.steps)

    def _begin(self, iteration: MonitoredIteration) -> None:
        self._finish()  # the previous iteration is over now, even if some optimizers took no part
        if self._is_sampled(iteration.number):
            iteration.is_combined = True  # even if this rank fails to measure: the others wait for it
            outputs, dtypes = self._activations.stop(), self._activations.dtypes
            iteration.sample = Sample(self._model, outputs, self._quantized.stop(), dtypes)
        if self._is_sampled(iteration.number + 1):  # its forward runs before its first gradients are seen
            with self._guard:  # this iteration is measured anyway
                self._activations.watch()
                self._quantized.watch()

    def _is_sampled(self, number: int) -> bool:
        is_power_of_two = number & (number - 1) == 0
        return self._ranks.is_recorded and (number % self._every == 0 or (number < self._every and is_power_of_two))

    def _sample_skipped(self, scaler: Any, optimizer: torch.optim.Optimizer, *, is_scaled: bool) -> None:
        """Sample the gradients of a step that the host is about to skip, unless they are sampled anyway."""
        iteration, scale = self._iterations.current, scaler._get_scale_async()
        optimizer = unwrapped(optimizer)
        if self._scaler is not scaler or iteration is None or not self._knows(optimizer):
            return
        is_wanted = self._ranks.combines_faults if self._ranks.combines_samples else self._ranks.is_recorded
        if iteration.sample is None and is_wanted:
            iteration.sample = Sample(self._model, {})  # gradients only: it is too late for this step's outputs
            iteration.sample.measure_gradients(optimizer, scale, is_scaled=is_scaled)

    def _on_fault(self, optimizer: torch.optim.Optimizer, checked: Checked) -> None:
        """Replay the batch of a step without a scaler, while the weights are those of its forward."""
        iteration, batches = self._iterations.current, None
        if iteration is not None and self._recording is not None:
            iteration.note_batches(optimizer, self._recording.take())  # those of a closure
            batches = None if checked.follows_earlier_fault else iteration.batches[optimizer]
        facts = StepFacts(self._numbers.next, optimizer, 1.0, skipped=True, cause=checked.cause)
        diagnosis = self._replay(facts, batches)
        if checked.left_out:
            if diagnosis is not None:
                self._record_left_out(facts.number, diagnosis)
        elif not _is_explained(diagnosis):
            WATCH.judged(checked.loss, not checked.has_nonfinite_gradients)

    @guarded
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        iteration = self._iterations.current
        if self._invariant_checks is not None and self._knows(optimizer):
            self._invariant_checks.after_step(optimizer)
        if iteration is not None and iteration.sample is not None:
            with self._guard:  # a step by hand is recorded anyway
                iteration.sample.measure_update(optimizer)
        if self._by_hand is None or iteration is None or self._scaler_steps.is_stepping:
            return
        if iteration.expects(optimizer, self._source.iteration):
            self._by_hand.add(optimizer)
            self._record_steps_by_hand()

    @guarded
    def _record_steps_by_hand(self, *, all_: bool = False) -> None:
        for facts in () if self._by_hand is None else self._by_hand.facts(all_=all_):
            self._record(replace(facts, number=self._numbers.of(facts.iteration)))

    @guarded
    def _on_step(self, facts: StepFacts) -> Diagnosis | None:
        """Record a step whose outcome is known. Return its diagnosis for the warning about an exhausted scale."""
        optimizer = unwrapped(facts.optimizer)
        if not self._knows(optimizer):
            return None
        return self._record(replace(facts, number=self._numbers.of(facts.iteration, facts.number), optimizer=optimizer))

    def _record(self, facts: StepFacts) -> Diagnosis | None:
        optimizer = facts.optimizer
        assert optimizer is not None
        iteration = self._iterations.note_facts(optimizer, facts)
        batches = None if iteration is None else iteration.batches.pop(optimizer, None)
        facts = self._agree(facts)
        if self._source.is_scaled:
            diagnosis = self._replay(facts, batches)
            if not _is_explained(diagnosis):
                WATCH.judged(facts.loss, facts.cause is None)
        elif self._is_late:
            diagnosis = self._replay_late(facts, batches)
        else:  # `_on_fault` has replayed them
            diagnosis = None if batches is None or facts.cause is None else batches.diagnosis
        if diagnosis and facts.cause is Cause.UNKNOWN:  # several losses: the replay shows which one
            facts = replace(facts, cause=_BY_PHASE.get(diagnosis.phase, facts.cause))
        self._record_step(facts, iteration, diagnosis, batches)
        self._finish()
        return diagnosis

    def _record_step(
        self,
        facts: StepFacts,
        iteration: MonitoredIteration | None,
        diagnosis: Diagnosis | None,
        batches: MicroBatches | None,
    ) -> None:
        skip = self._combine_fault(facts, iteration, diagnosis)
        self._write(
            StepRecord(
                step=facts.number,
                scale=facts.scale if self._source.is_scaled else None,
                skipped=facts.skipped,
                cause=skip.cause if skip else None,
                rank=skip.rank if skip else None,
                parameters=skip.parameters[:PARAMETERS_NAMED] if skip else (),
                grad_norm=facts.grad_norm,
                loss=facts.loss,
                seconds=iteration.seconds if iteration else None,
                lr=iteration.rates.get(facts.optimizer) if iteration and facts.optimizer else None,
            )
        )
        if self._invariant_checks is not None and facts.optimizer is not None:
            self._invariant_checks.step_known(facts.optimizer, facts.number, facts.loss, facts.grad_norm, batches)
        for record in skip.diagnoses if skip else ():
            self._write(record)

    def _record_left_out(self, step: int, diagnosis: Diagnosis) -> None:
        """Record why the loss was not finite in a step that the script has left out before another."""
        self._write(DiagnosisRecord.of(step, LEFT_OUT, diagnosis))

    # -- results -------------------------------------------------------------------------------------------

    def _finish(self, *, all_: bool = False) -> None:
        """Record complete samples."""
        with self._guard:  # the step that completes them is recorded anyway
            for iteration in self._iterations.over(all_=all_):
                # A rank without a sample joins as well, because the others wait for it.
                if iteration.sample is not None or (iteration.is_combined and self._ranks.combines_samples):
                    self._record_sample(iteration.sample, list(iteration.facts.values()))

    def _record_sample(self, sample: Sample | None, facts: list[StepFacts]) -> None:
        first, mine = facts[0], None  # the record has the number and the scale of the first optimizer's step
        with self._guard:
            if sample is not None:
                mine = sample.measured(first.scale, [fact.optimizer for fact in facts if not fact.skipped])
        measured = self._ranks.reduce_sample(first.number, mine)
        self._note_alone(first.number)
        if self._ranks.is_first:
            is_clipped = any(fact.grad_norm is not None for fact in facts)
            self._write(sample_record(first.number, first.scale, measured, is_clipped=is_clipped))

    def _write_end(self) -> None:
        if self._has_begun:
            self._write(EndRecord(self._numbers.last))

    def _combine_fault(
        self, facts: StepFacts, iteration: MonitoredIteration | None, diagnosis: Diagnosis | None
    ) -> StepFault | None:
        if facts.cause is None:
            return None
        mine = StepFault(facts.cause.value, ())
        with self._guard:  # so that this rank joins the others in any case
            bad = set(facts.parameters)
            named = tuple(name for name, parameter in names.parameters(self._model).items() if parameter in bad)
            cause = facts.cause.value
            diagnoses = () if diagnosis is None else (DiagnosisRecord.of(facts.number, cause, diagnosis),)
            mine = StepFault(cause, named, diagnoses)
        has_sample = iteration is not None and iteration.sample is not None
        known, is_sampled = self._ranks.gather_faults(facts.number, mine, is_sampled=has_sample)
        self._note_alone(facts.number)
        if iteration is not None and is_sampled:
            iteration.is_combined = True
        return agreed(known, self._ranks.world_size)

    def _diagnose(self, facts: StepFacts, batches: MicroBatches | None, weights_of: int | None) -> Diagnosis | None:
        if batches is not None:
            # Copies of parts of weights would not reach gathered ones.
            weights = self._weights if self._joint is None else None
            earlier = None if weights is None else weights.earlier(facts.number)
            try:
                self.diagnosis = batches.diagnose(facts.scale, facts.cause, earlier, weights_of)
            except Exception as error:
                text = f"step {facts.number} could not be diagnosed: {type(error).__name__}: {error}"
                warn_or_print(text, RuntimeWarning)
        return self.diagnosis

    def _replay_late(self, facts: StepFacts, batches: MicroBatches | None) -> Diagnosis | None:
        """Diagnose the first step that was taken with an inf or NaN.

        Its batch is replayed with weights from before it, if they are kept. The code of the loss needs no replay.
        """
        if self._has_lost_weights or facts.cause is None or not self._diagnoses:
            return None if batches is None else batches.diagnosis  # of optimizers that share them
        self._has_lost_weights = True
        kept = None if self._weights is None else self._weights.latest(facts.number)
        if kept is not None:
            with kept.applied():
                return self._replay(facts, batches, weights_of=kept.step)
        if batches is None:
            return None
        with self._guard:  # the step is recorded anyway
            self.diagnosis = batches.diagnose_loss(facts.cause)
        return batches.diagnosis

    def _agree(self, facts: StepFacts) -> StepFacts:
        """Return the facts of a step with what other ranks of a split model know, if they arrive after the step."""
        if self._joint is None or not (self._source.is_scaled or self._is_late):
            return facts
        (has_fault,) = self._joint.any(facts.cause is not None)
        return replace(facts, cause=Cause.ANOTHER_RANK) if has_fault and facts.cause is None else facts

    def _replay(
        self, facts: StepFacts, batches: MicroBatches | None, weights_of: int | None = None
    ) -> Diagnosis | None:
        """Diagnose a step; if the model is split over ranks, all call this at once and lend each other their parts."""
        if facts.cause is None:
            return None
        if batches is not None:
            self.diagnosis = None
        is_wanted = batches is not None and self._is_wanted(facts.cause)
        if self._joint is None:
            return self._diagnose(facts, batches, weights_of) if is_wanted else None
        is_wanted = is_wanted and facts.cause is not Cause.ANOTHER_RANK
        with self._joint.gathered(is_wanted) as is_gathered:
            return self._diagnose(facts, batches, weights_of) if is_wanted and is_gathered else None

    def _is_wanted(self, cause: Cause) -> bool:
        """Return True if a step with this cause is to be diagnosed; under `castwise run` only some are."""
        return self._diagnoses

    def _note_alone(self, step: int) -> None:
        """Record once from which step on, and why, the ranks' results are not combined."""
        why, self._ranks.why_alone = self._ranks.why_alone, None
        if why is not None:
            self._write(AloneRecord(step, why))

    def _write(self, record: Record) -> None:
        if self._ranks.is_first:
            self._sinks(record)

    @guarded
    def _on_mistake(self, mistake: Mistake) -> None:
        self._write(MistakeRecord.of(mistake))

    def _on_broken(self, broken: Violation) -> None:
        step = self._numbers.next
        self._write(InvariantRecord(step, broken.name, broken.text, broken.remedy, broken.severity, broken.parameters))
        if broken.severity == "warning":
            warn_or_print(f"{broken.name}: {broken.text} {broken.remedy}", RuntimeWarning)

    def _on_norms(self, norms: NormsAround) -> None:
        self._write(NormsRecord(norms.step, norms.steps, norms.norms))

    def _knows(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer in self._optimizers


def _is_explained(diagnosis: Diagnosis | None) -> bool:
    """Return True if an op is known that made the loss infinite; a sum may have got it from what is not trained."""
    return diagnosis is not None and diagnosis.op not in {"", "aten.add", "aten.sum", "aten.mean"}


def check_every(every: int) -> None:
    """Raise a ValueError unless `every` is an integer >= 1."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be an integer >= 1, got {every!r}")


def _check(every: int, on_nonfinite: object, snapshots: bool) -> None:
    check_every(every)
    if on_nonfinite not in (None, "diagnose"):
        raise ValueError(f'on_nonfinite must be "diagnose" or None, got {on_nonfinite!r}')
    if snapshots and on_nonfinite is None:
        raise ValueError('snapshots=True is for the replay of batches: pass on_nonfinite="diagnose" too')


def _unwrapped(given: Any) -> list[torch.optim.Optimizer]:
    several = isinstance(given, Iterable) and not isinstance(given, torch.optim.Optimizer)
    optimizers: list[torch.optim.Optimizer] = []
    for optimizer in map(unwrapped, given if several else [given]):
        if not any(optimizer is other for other in optimizers):  # a wrapper and its optimizer may both be given
            optimizers.append(optimizer)
    if not optimizers:
        raise ValueError("optimizer must be the model's optimizer or several, got an empty sequence")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer or a sequence of them, got {type(optimizer).__name__}"
            )
    return optimizers


def _earlier_weights() -> EarlierWeights:
    from castwise.diagnosis._earlier_weights import EarlierWeights

    return EarlierWeights()
