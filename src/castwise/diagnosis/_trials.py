"""`try_remedy`: try a remedy on the batch before it is suggested, and look for the samples or the weight at fault."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from typing_extensions import override

from castwise._number_text import several
from castwise._torch_private import TorchDispatchMode, buffers_in, fsdp_mixed_precision, parameters_in
from castwise.amp._devices import has_autocast
from castwise.amp.autocast_mode import autocast
from castwise.diagnosis._cases import outputs_of
from castwise.diagnosis._earlier_weights import WeightsOfStep
from castwise.diagnosis._fault_search import Case, Fault, named_parameters, replay, without_cached_casts
from castwise.diagnosis._op_facts import tensors_of, written_and_read
from castwise.diagnosis._origins import Birth
from castwise.diagnosis._outlying_rows import OutlyingRow
from castwise.diagnosis._ranges import range_of
from castwise.diagnosis._remedies import OF_REGION, Help, keep_in_float32, keep_weights_in_float32, low_precision
from castwise.diagnosis._replay import gradients_of, has_several_ranks, refuse_collective, unchanged
from castwise.policy._casting import cast_floats
from castwise.policy._module_rules import named_modules
from castwise.tracing._op_by_op import call_op

SECONDS = 2.0
STEPS = 10
_FORWARDS_OF_A_STEP = 3  # a backward takes as long as two forwards
SANE = 30.0
"""A cure gives outputs of a sane size: at most so many times as large as those of recent steps."""
GROWN = 3.0
"""Weights that have grown to so many times their norm in a few steps are not what a batch was meant for."""
_MOST_BAD = 8  # samples that are looked for
_MOST_MODULES = 4  # that are kept in fp32 by name; if it takes more, all of the model is
_EARLIER = "untried on this batch: finite on the first one with this fault"
ALL_IN_FP32 = "run all of the model in fp32"
LOWER_RATE = "Lower the learning rate, warm it up, or clip the gradient norm"

Outcome = Literal["finite", "not finite", "unknown"]


@dataclass(frozen=True)
class Tried:
    """A remedy, and what came of it on the batch.

    Args:
        help: The remedy.
        result: "finite", with what was changed; or "untried: " and why.
        samples: Positions in the batch of the samples at fault; empty if they are not known, or all are.
    """

    help: Help
    result: str
    samples: tuple[int, ...] = ()


EarlierTrials = dict[tuple[str, ...], Help]
"""What was tried instead of a remedy, or with it, on the first batch of a run with a fault, by fault."""


@dataclass(frozen=True)
class Past:
    """The run before a batch, as far as it is known.

    Args:
        usual: The largest magnitude of the output in recent steps; None if it is not known.
        trials: Remedies that were tried before, to which more are added.
        weights: The weights of an earlier step; None if none were kept.
    """

    usual: float | None = None
    trials: EarlierTrials = field(default_factory=dict)
    weights: WeightsOfStep | None = None


class _Run(NamedTuple):
    outcome: Outcome
    largest: float = 0.0


class OutOfTimeError(Exception):
    """Trials have taken as long as they may."""


class TimeLimit:
    """The time of 10 steps, or 2 s if that is more, from now on."""

    def __init__(self) -> None:
        self._began, self._limit = time.perf_counter(), SECONDS

    def check(self) -> float:
        """Return the time, in seconds.

        Raises:
            OutOfTimeError: The limit is over.
        """
        now = time.perf_counter()
        if now - self._began > self._limit:
            raise OutOfTimeError("time ran out")
        return now

    def forward_ends(self, began: float) -> None:
        """Note that a forward which began at a time has ended, from which the time of a step follows."""
        self._limit = max(self._limit, STEPS * _FORWARDS_OF_A_STEP * (time.perf_counter() - began))


@contextmanager
def put_back(model: nn.Module, arguments: Any) -> Iterator[None]:
    """Restore everything that forwards and backwards of a model in this context change; see `unchanged`."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        unchanged(model, arguments) as copies,
        without_cached_casts(),
        _Writes(copies.before_write),
    ):
        yield


def try_remedy(
    case: Case,
    fault: Fault,
    help_: Help,
    scale: float,
    row: OutlyingRow | None,
    past: Past,
) -> Tried:
    """Try a remedy on the batch of a fault, within the time of 10 steps or 2 s. All state is restored.

    A remedy that does not help is replaced: by fp32 for all of the model, or if that does not help either, by what the
    batch or the weights show. Formats are tried once for each fault in a run, the samples of each batch.

    Args:
        case: The batch.
        fault: The fault of its replay.
        help_: The remedy that the replay suggests.
        scale: The scale of the loss.
        row: A row of a weight that is far larger than the others.
        past: The run before.
    """
    if fault.is_due_to_scale:
        return Tried(help_, "finite at scale 1")
    birth = fault.birth
    if birth is None or help_.remedy in {"", "scale"}:
        return Tried(help_, "untried: no module made it")
    if fault.has_collectives and has_several_ranks():
        return Tried(help_, "untried: the forward exchanges tensors with other ranks", _bad_rows(case, birth))
    try:
        trials, key = _Trials(case, birth, scale, past), (birth.phase, birth.module or "", birth.op, str(birth.place))
        if help_.remedy == "float32" and key in past.trials:
            return trials.after(past.trials[key])
        tried = trials.of(help_, row)
        if help_.remedy == "float32" and (tried.result.startswith("finite") or not tried.help.remedy):
            past.trials[key] = tried.help
        return tried
    except OutOfTimeError:
        return Tried(help_, "untried: time ran out", _bad_rows(case, birth))


class _Trials:
    """Forwards of the batch with something changed, and backwards if these are finite and may not be.

    A forward that raises tells nothing.
    """

    def __init__(self, case: Case, birth: Birth, scale: float, past: Past) -> None:
        self._case, self._birth, self._scale = case, birth, scale
        self._usual, self._weights = past.usual, past.weights
        self._time = TimeLimit()
        self._device_types = sorted(
            {tensor.device.type for tensor in [*case.model.parameters(), *tensors_of([case.args, case.kwargs])]}
        )

    @property
    def _device(self) -> str:
        return self._device_types[0] if len(self._device_types) == 1 else "device_type"

    def of(self, help_: Help, row: OutlyingRow | None) -> Tried:
        """Try a remedy."""
        if row is not None:
            return self._without_row(help_, row)
        if help_.remedy == "float32":
            return self._in_float32(help_)
        if help_.remedy == "weight":
            return self._with_earlier_weights(help_) or Tried(help_, "untried: it needs a checkpoint")
        return self._without_samples_or_growth(help_)

    def after(self, help_: Help) -> Tried:
        """Try what remains to be tried after formats were, on another batch with the same fault."""
        return Tried(help_, _EARLIER) if help_.remedy else self._without_samples(help_)

    # -- remedies -----------------------------------------------------------------------------------------------

    def _in_float32(self, help_: Help) -> Tried:
        if self._birth.module is None:
            return Tried(help_, "untried: it changes the code of the loss")
        if any(param.dtype is not torch.float32 for _, _, param in named_parameters(self._case.model)):
            return self._with_weights_in_float32(help_)
        modules = [self._birth.module] if self._birth.module else []
        while modules:
            run = self._run(around=lambda: self._in_fp32(modules))
            if run.outcome == "unknown":
                return Tried(help_, "untried: the forward cannot be run so")
            if run.outcome == "finite" and self._is_sane(run):
                low = low_precision(self._birth)
                return Tried(keep_in_float32(modules, low, self._device), "finite")
            following = self._overflowing_next(modules) if run.outcome == "not finite" else None
            if following is None:
                break
            modules.append(following)
        return self._all_in_float32(help_)

    def _overflowing_next(self, modules: list[str]) -> str | None:
        """Return the module that overflows while others are in fp32; None if there is none, or there are many."""
        self._time.check()
        try:
            fault = replay(_Changed(self._case, lambda: self._in_fp32(modules)), self._scale).fault
        except Exception:
            return None
        birth = None if fault is None else fault.birth
        is_new = birth is not None and birth.module and birth.module not in modules and len(modules) < _MOST_MODULES
        return birth.module if is_new and birth is not None and birth.is_finite_in_float32 else None

    def _all_in_float32(self, help_: Help) -> Tried:
        run = self._run(around=lambda: self._in_fp32([""]))
        if run.outcome == "unknown":
            return Tried(help_, "untried: the forward cannot be run so")
        if run.outcome == "not finite":
            return self._without_samples_or_growth(_no_format_helps(self._birth))
        if not self._is_sane(run):
            return self._diverged(run)
        if not self._birth.module:
            return Tried(help_, "finite with all of the model in fp32")
        advice = f"{ALL_IN_FP32}: {self._birth.module} in fp32 is not enough, as other modules overflow too"
        code = f'{OF_REGION}\nwith torch.autocast("{self._device}", enabled=False):'
        return Tried(Help("float32", advice, code), "finite")

    def _with_weights_in_float32(self, help_: Help) -> Tried:
        """Try all of the model in fp32 where weights are in other formats, which no rule of a policy widens."""
        model, is_cast = self._case.model, False
        of_policy, help_ = help_, keep_weights_in_float32(model, low_precision(self._birth))
        if any(getattr(fsdp_mixed_precision(module), "param_dtype", None) for module in model.modules()):
            return Tried(help_, "untried: FSDP2 casts the inputs of each of its units")
        if self._device_types != ["cpu"]:
            return Tried(of_policy, "untried: some weights are in other formats than fp32")

        @contextmanager
        def widened() -> Iterator[None]:
            nonlocal is_cast
            is_cast = torch.is_autocast_enabled("cpu")
            for module in model.modules():  # `unchanged` puts back what they had
                _widen(parameters_in(module))
                _widen(buffers_in(module))
            with self._in_fp32([name for name, _ in named_modules(model)]):
                yield

        run = self._run(around=widened)
        if is_cast:  # the op may be in low precision for the region, and not for its weights
            return Tried(of_policy, "untried: some weights are in other formats than fp32")
        if run.outcome == "unknown":
            return Tried(help_, "untried: the forward cannot be run so")
        if run.outcome == "not finite":
            return self._without_samples_or_growth(_no_format_helps(self._birth))
        return Tried(help_, "finite") if self._is_sane(run) else self._diverged(run)

    def _diverged(self, run: _Run) -> Tried:
        times = f"{run.largest / (self._usual or 1.0):.2g} times as large as in recent steps"
        too_large = f"a wider format is no cure: in fp32 the output is finite and {times}"
        help_ = Help("learning rate", f"{too_large}. {LOWER_RATE}")
        if self._weights is None:
            return Tried(help_, "untried: it needs steps that cannot be repeated")
        if (tried := self._with_earlier_weights(help_)) is not None:
            return tried
        return self._without_samples(
            Help("input", f"{too_large}, also with the weights of step {self._weights.step:,}: check the batch")
        )

    def _with_earlier_weights(self, help_: Help) -> Tried | None:
        """Return what the weights of an earlier step give, if that is finite and of a sane size."""
        if self._weights is None:
            return None
        run = self._run(around=self._weights.applied)
        if run.outcome != "finite" or not self._is_sane(run):
            return None
        return Tried(help_, f"finite with the weights of step {self._weights.step:,}")

    def _without_samples_or_growth(self, help_: Help) -> Tried:
        """Look for samples at fault, and before that, if the weights have grown since an earlier step, try those."""
        growth = 0.0 if self._weights is None else self._weights.growth()
        if self._weights is not None and growth >= GROWN:
            since = f"the weights have grown to {growth:.2g} times their norm since step {self._weights.step:,}"
            tried = self._with_earlier_weights(Help("learning rate", f"{since}. {LOWER_RATE}"))
            if tried is not None:
                return tried
        tried = self._without_samples(help_)
        return tried if tried.samples else self._with_earlier_weights(help_) or tried

    def _without_row(self, help_: Help, row: OutlyingRow) -> Tried:
        weight = next(param for name, _, param in named_parameters(self._case.model) if name == row.name)

        @contextmanager
        def repaired() -> Iterator[None]:
            before = weight.data[row.row].clone()
            weight.data[row.row] = 0.0  # through `.data`, which bumps no version counter
            try:
                yield
            finally:
                weight.data[row.row] = before

        run = self._run(around=repaired)
        return Tried(
            help_, "finite with zeros in this row" if run.outcome == "finite" else "untried: the row is needed"
        )

    def _without_samples(self, help_: Help) -> Tried:
        bad = _bad_rows(self._case, self._birth)
        if not bad and self._birth.phase == "forward":
            bad = self._bisected()
        if not bad:
            return Tried(
                help_, "untried: it changes the code" if help_.remedy == "code" else "untried: no sample is known"
            )
        count = _batch_size(self._case) or 0
        without = [index for index in range(count) if index not in bad]
        if not without or self._run_rows(without).outcome != "finite":
            return Tried(help_, "untried: no other sample is left", bad)
        samples = f"sample {bad[0]}" if len(bad) == 1 else several(len(bad), "sample")
        return Tried(help_, f"finite without {samples}", bad)

    def _bisected(self) -> tuple[int, ...]:
        """Return the samples without which the forward is finite; empty if they are many, or not known."""
        count = _batch_size(self._case)
        if not count or count < 2:
            return ()
        bad: list[int] = []
        rows = list(range(count))
        parts = [rows[count // 2 :], rows[: count // 2]]  # the replay has judged the whole batch
        while parts:
            rows = parts.pop()
            outcome = self._run_rows(rows).outcome
            if outcome == "unknown" or len(bad) > min(_MOST_BAD, count // 2):
                return ()
            if outcome == "not finite":
                middle = len(rows) // 2
                bad += rows if not middle else []
                parts += [rows[middle:], rows[:middle]] if middle else []
        return tuple(bad) if len(bad) < count else ()

    # -- one trial ----------------------------------------------------------------------------------------------

    def _run_rows(self, rows: list[int]) -> _Run:
        count = _batch_size(self._case)
        args, kwargs = _mapped_rows(self._case.args, rows, count), _mapped_rows(self._case.kwargs, rows, count)
        return self._run(args=args, kwargs=kwargs, is_part=True)

    def _run(
        self,
        *,
        around: Callable[[], AbstractContextManager[Any]] | None = None,
        args: Any = None,
        kwargs: Any = None,
        is_part: bool = False,
    ) -> _Run:
        """Run the forward, and if it is of the whole batch, what follows it."""
        began = self._time.check()
        case = self._case
        args, kwargs = case.args if args is None else args, case.kwargs if kwargs is None else kwargs
        try:
            with put_back(case.model, [case.args, case.kwargs, args, kwargs]):
                with case.region(), ExitStack() as changes:
                    if around is not None:
                        changes.enter_context(around())
                    output = case.model(*args, **kwargs)
                    self._time.forward_ends(began)
                    ends = outputs_of(output) if is_part else case.ends(output)
                return self._judged(output, ends, is_part)
        except Exception:
            return _Run("unknown")

    def _judged(self, output: Any, ends: list[torch.Tensor], is_part: bool) -> _Run:
        ranges = [found for end in ends if (found := range_of(end)) is not None]
        if any(found.nonfinite for found in ranges):
            has_only_masks = all((end.isfinite() | (end == -math.inf)).all() for end in ends)
            return _Run("unknown" if has_only_masks else "not finite")
        sizes = [found.largest or 0.0 for end in outputs_of(output) if (found := range_of(end)) is not None]
        largest = max(sizes, default=0.0)
        if is_part:
            return _Run("finite", largest)
        roots = self._case.roots(ends, self._scale)
        params = [param for _, _, param in named_parameters(self._case.model) if param.requires_grad]
        if not roots or not params or not all(_is_finite(seed) for _, seed in roots):
            return _Run("finite", largest)
        with self._without_autocast():
            seeds = [(end, None if seed is None else seed.to(end.dtype)) for end, seed in roots]
            gradients = gradients_of(seeds, params)
        return _Run("finite" if all(map(_is_finite, gradients)) else "not finite", largest)

    def _is_sane(self, run: _Run) -> bool:
        return self._usual is None or run.largest <= SANE * max(self._usual, 1e-30)

    # -- what is changed ----------------------------------------------------------------------------------------

    @contextmanager
    def _without_autocast(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device_type in filter(has_autocast, self._device_types):
                stack.enter_context(autocast(device_type, enabled=False))
            yield

    @contextmanager
    def _in_fp32(self, names: list[str]) -> Iterator[None]:
        """Run modules as a policy's rule "float32" does: their inputs cast, and autocast off."""
        running: list[ExitStack] = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            running.append(ExitStack())
            running[-1].enter_context(self._without_autocast())
            kind = self._device_types[0]
            return cast_floats(args, kind, torch.float32), cast_floats(kwargs, kind, torch.float32)

        handles: list[Any] = []
        try:
            for module in {module: None for name, module in named_modules(self._case.model) if name in names}:
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(lambda *_: running.pop().close(), always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            while running:
                running.pop().close()


class _Changed:
    """A `Case` in whose region something else is changed too."""

    def __init__(self, case: Case, around: Callable[[], AbstractContextManager[Any]]) -> None:
        self.model, self.args, self.kwargs = case.model, case.args, case.kwargs
        self.loss_is_finite, self._region, self._around = case.loss_is_finite, case.region, around
        self.ends, self.not_finite, self.roots = case.ends, case.not_finite, case.roots
        self.nonfinite_gradients = case.nonfinite_gradients

    @contextmanager
    def region(self) -> Iterator[None]:
        with self._region(), self._around():
            yield


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Calls a function with the tensors that each op is about to write to."""

    supports_higher_order_operators = True

    def __init__(self, before_write: Callable[[list[torch.Tensor]], None]) -> None:
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]  # torch's
        self._before_write = before_write

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refuse_collective(func, types)
        written, _ = written_and_read(func, args, kwargs)
        if written:
            self._before_write(written)
        return call_op(func, args, kwargs)


def _widen(tensors: dict[str, Any]) -> None:
    """Replace floating-point tensors in the table of a module by fp32 ones."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_floating_point():
            tensors[name] = tensor.detach().float().requires_grad_(tensor.requires_grad)


def _no_format_helps(birth: Birth) -> Help:
    where = f"in {birth.module}" if birth.module else "in the model"
    return Help(
        "",
        f"no format helps: with all of the model in fp32 the batch is not finite either. Check what {birth.op} {where} "
        "reads, and the modules before it",
    )


def _is_finite(tensor: torch.Tensor | None) -> bool:
    found = None if tensor is None else range_of(tensor)
    return found is None or not found.nonfinite


def _batch_size(case: Case) -> int | None:
    """Return the number of samples: the first dimension of the first tensor."""
    tensors = tensors_of([case.args, case.kwargs])
    return next((len(tensor) for tensor in tensors if tensor.dim() and tensor.layout is torch.strided), None)


def _mapped_rows(value: Any, rows: list[int], count: int | None) -> Any:
    """Return arguments with only some of the samples."""
    if isinstance(value, torch.Tensor):
        has_samples = value.dim() > 0 and len(value) == count and value.layout is torch.strided
        return value.detach()[rows].requires_grad_(value.requires_grad) if has_samples else value
    if isinstance(value, dict):
        return {key: _mapped_rows(item, rows, count) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped_rows(item, rows, count) for item in value)
    return value


def _bad_rows(case: Case, birth: Birth) -> tuple[int, ...]:
    """Return the samples whose input is not finite."""
    tensor = birth.tensor if birth.kind == "input" else None
    if tensor is None or not tensor.dim() or tensor.layout is not torch.strided or len(tensor) != _batch_size(case):
        return ()
    bad = (~tensor.detach().isfinite()).reshape(len(tensor), -1).any(1).nonzero().flatten().tolist()
    return tuple(bad)
