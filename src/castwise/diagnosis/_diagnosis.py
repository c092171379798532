"""`diagnose`: find the module and op that made the first inf or NaN of a step, and suggest a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from castwise._frames import new_frame
from castwise._mistakes.script_line import in_names_of_main
from castwise._shown import Block, Code, Shown, Table
from castwise.amp._devices import has_autocast
from castwise.amp._thread_state import THREAD
from castwise.diagnosis._cases import OfLoss, OfOutput
from castwise.diagnosis._fault_search import Case, Found, find
from castwise.diagnosis._op_facts import tensors_of
from castwise.diagnosis._origins import Birth, Phase
from castwise.diagnosis._outlying_rows import has_huge_input, outlying_row
from castwise.diagnosis._ranges import Range, Value, first_not_finite, range_of
from castwise.diagnosis._remedies import Help, Remedy, remedy_of
from castwise.diagnosis._trials import LOWER_RATE, Past, try_remedy
from castwise.policy._module_rules import named_modules
from castwise.tracing._batches import Batch, arguments_of

if TYPE_CHECKING:
    import pandas

_SAMPLES_SHOWN = 4
_CLEAN = "clean: the loss and all gradients are finite"
_OUTSIDE = "no autocast region was active: if training uses one, call diagnose inside it"


@dataclass(frozen=True)
class NonFinite:
    """An inf or NaN that an op of the forward made and that is not blamed for a fault.

    Args:
        module: See `Diagnosis`.
        in_loss: See `Diagnosis`.
        op: Name of the op, such as "aten.convolution".
        value: "nan" or "inf": what the op introduced, as opposed to what it received.
        is_finite_in_float32: Whether the op's result is finite in fp32, so that the low precision overflowed.
        line: See `Diagnosis`.
    """

    module: str
    in_loss: bool
    op: str
    value: Literal[""] | Value
    is_finite_in_float32: bool
    line: str = ""

    def __str__(self) -> str:
        in_float32 = " (finite in fp32)" if self.is_finite_in_float32 else ""
        return f"{_where(self.module, self.in_loss)}: {self.op} gives {self.value}{in_float32}"


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """The origin of the first inf or NaN that reaches the loss or a gradient. Truthy if there is one.

    Args:
        found: Whether a fault was found.
        phase: Where the fault arose: "weight" or "input" if it was non-finite before the replay; "forward", including
            the recomputation of activation checkpointing; "loss", in the loss function or by scaling the loss;
            "backward"; "" if nothing was found.
        module: Qualified name of the innermost module, without wrappers; "" for the model itself, for the loss
            function, and for inputs.
        in_loss: Whether the op belongs to the loss function, in the forward or the backward.
        op: Name of the op, such as "aten.bmm"; "" for weights and inputs.
        gradient_of: Name of the op of the forward whose gradient the op computes; "" if it is not known, or outside a
            backward.
        inputs: Ranges of the op's floating-point inputs, before it ran.
        outputs: Ranges of the op's results, or of the weight or input.
        in_float32: Ranges of the op's results in fp32, if it ran in low precision and can be recomputed.
        parameter: The non-finite weight, or the first parameter with a non-finite gradient; "" if the loss is not
            finite.
        argument: Position or name of the non-finite input.
        index: Index of the first non-finite value in that input or weight.
        value: "nan", "inf" or "-inf": that value, or the kind of value the op made.
        scale: Scale of the loss.
        loss: The loss before scaling; None if it is not known.
        remedy: What to change: lower the "scale" or the "learning rate", run the module in "float32", or fix the
            "input", "weight" or "code".
        advice: The remedy in words.
        code: The remedy as Python code to copy; "" if no code applies.
        tried: What the remedy gave on this batch, such as "finite" or "finite without sample 3"; "untried: " and why if
            it could not be tried. The numerics of one batch are tried, not whether the model then learns.
        samples: Positions in the batch of the samples at fault, from 0, as far as they are known.
        dataset_indices: Their indices in the dataset, if a `DataLoader` over a map-style dataset has loaded the batch
            while castwise was recording.
        line: Where the code of the model or the loss calls the op, or in a backward the op of the forward, such as
            "model.py:31"; "" if it is not known.
        source: The source text of that line.
        harmless: Without a fault: non-finite values from ops of the forward that reach neither the loss nor a
            gradient, such as an overflow before a sigmoid. One entry per module and op.
        also: With a fault: non-finite values from other ops of the forward. This fault may hide others among them, so
            diagnose again after fixing it.
        outside_region: Whether `diagnose` was called outside any autocast region.
        capsule: Path of the `Capsule` that a run has written for this fault; "" if there is none.
        weights_of: The step whose weights were replayed, where those of the batch's own step are lost: on accelerators,
            where a step without a scaler is taken before its fault is known. None otherwise.
    """

    found: bool
    phase: Phase = ""
    module: str = ""
    in_loss: bool = False
    op: str = ""
    gradient_of: str = ""
    inputs: tuple[Range, ...] = ()
    outputs: tuple[Range, ...] = ()
    in_float32: tuple[Range, ...] | None = None
    parameter: str = ""
    argument: str = ""
    index: tuple[int, ...] = ()
    value: Literal[""] | Value = ""
    scale: float = 1.0
    loss: float | None = None
    remedy: Remedy = ""
    advice: str = ""
    code: str = ""
    tried: str = ""
    samples: tuple[int, ...] = ()
    dataset_indices: tuple[Any, ...] = ()
    line: str = ""
    source: str = ""
    harmless: tuple[NonFinite, ...] = ()
    also: tuple[NonFinite, ...] = ()
    outside_region: bool = False
    capsule: str = ""
    weights_of: int | None = None

    def __bool__(self) -> bool:
        return self.found

    def __repr__(self) -> str:
        return f"Diagnosis({self._headline()})"

    def __str__(self) -> str:
        if not self.found:
            harmless = [f"  harmless: {each}" for each in self.harmless]
            hint = [f"  {_OUTSIDE}"] if self.outside_region else []
            return "\n".join([self._headline(), *hint, *harmless])
        lines = [self._headline()]
        lines += [f"  at {self.line}: {self.source}"] if self.line else []
        lines += [f"  input {place}: {found}" for place, found in enumerate(self.inputs)]
        lines += [f"  output: {found}" for found in self.outputs if self.op or self.phase == "loss"]
        lines += [f"  output in fp32: {found}" for found in self.in_float32 or ()]
        lines += [f"  also: {each}; diagnose again after fixing the first" for each in self.also]
        lines += [f"  {text}" for text in [self.sample] if text]
        lines += [f"  capsule: {self.capsule}" for _ in self.capsule[:1]]
        return "\n".join([*lines, self.advice, *([self._tried()] if self.tried else [])])

    def _tried(self) -> str:
        return f"{'' if self.tried.startswith('untried') else 'tried on this batch: '}{self.tried}"

    def _headline(self) -> str:
        loss = "" if self.loss is None else f" (loss {self.loss:.5g}, scale {self.scale:g})"
        headline = f"{self.phase}: {self._what()}" if self.found else _CLEAN
        return f"{headline}{self._weights()}{loss}"

    def _weights(self) -> str:
        return "" if self.weights_of is None else f", with the weights of step {self.weights_of:,}"

    def frame(self) -> pandas.DataFrame:
        """Return a pandas frame with a row for each range: of what ("input", "output", "in float32"), and its fields.

        Raises:
            ImportError: pandas is not installed; it comes with `castwise[pandas]`.
        """
        kinds = {"input": self.inputs, "output": self.outputs, "in float32": self.in_float32 or ()}
        rows = [(kind, *astuple(one)) for kind, ranges in kinds.items() for one in ranges]
        return new_frame(("values", *(field.name for field in fields(Range))), rows)

    def _blocks(self) -> Iterator[Block]:
        yield self._headline()
        if not self.found:
            yield from [_OUTSIDE] if self.outside_region else []
            yield from (f"harmless: {each}" for each in self.harmless)
            return
        if self.line:
            yield Code(f"{self.line}: {self.source}")
        values = [(f"input {place}", str(found)) for place, found in enumerate(self.inputs)]
        values += [("output", str(found)) for found in self.outputs if self.op or self.phase == "loss"]
        values += [("output in fp32", str(found)) for found in self.in_float32 or ()]
        if values:
            yield Table([("values", "range"), *values])
        yield from (f"also: {each}; diagnose again after fixing the first" for each in self.also)
        yield from filter(None, [self.sample, self.capsule and f"capsule: {self.capsule}", self.advice])
        if self.code and self.code not in self.advice:
            yield Code(self.code)
        if self.tried:
            yield self._tried()

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        if not self.found:
            return f"The replay of this batch gave a finite loss and finite gradients{self._weights()}."
        if self.phase == "weight" or not self.op:
            what = self._what()
        else:
            reached = f", which reaches the gradient of {self.parameter}" if self.parameter else ""
            what = f"in the {self.phase}, {self._op()}{self._inside()} {self._gives()}{reached}"
        at = f", at {self.line}" if self.line else ""
        return f"{what[:1].upper()}{what[1:]}{at}{self._weights()}."

    @property
    def sample(self) -> str:
        """The samples at fault, such as "sample 3 of the batch, dataset[217], column 2: inf"; "" if not known."""
        if not self.samples:
            return ""
        numbers, hidden = self.samples[:_SAMPLES_SHOWN], len(self.samples) - _SAMPLES_SHOWN
        more = f" and {hidden} more" if hidden > 0 else ""
        text = f"sample{'s' * (len(self.samples) > 1)} {', '.join(map(str, numbers))}{more} of the batch"
        text += "".join(f", dataset[{index!r}]" for index in self.dataset_indices[:_SAMPLES_SHOWN])
        if not self.argument or len(self.samples) > 1:
            return text
        inner = self.index[1:]
        place = "" if not inner else f", column {inner[0]}" if len(inner) == 1 else f", element {inner}"
        return f"{text}{place}: {self.value}"

    def named_within(self, model: str) -> Diagnosis:
        """Return this diagnosis with a model's name before the names of its modules.

        Args:
            model: Name of the model, one of several.
        """
        module = f"{model}.{self.module}" if self.module else "" if self.in_loss or not self.op else model
        parameter = f"{model}.{self.parameter}" if self.parameter else ""
        return replace(self, module=module, parameter=parameter)

    def _gives(self) -> str:
        reads = not self.outputs and (not self.inputs or any(given.nonfinite for given in self.inputs))
        return f"{'reads' if reads else 'gives'} {self.value}"

    def _what(self) -> str:
        if self.phase == "weight":
            return f"{self.parameter} is {self.value} at {self.index}"
        if self.phase == "input":
            return f"input {self.argument} is {self.value} at {self.index}"
        reached = f", which reaches the gradient of {self.parameter}" if self.parameter else ""
        if not self.op and self.phase == "loss" and self.loss is None:
            return f"the gradient of the model's output is {self.value}"
        if not self.op and self.phase == "forward":
            return "in the run the model's output was inf or NaN"
        if not self.op:
            return f"{self.value or 'a non-finite value'} of unknown origin{reached}"
        return f"{_where(self.module, self.in_loss)}: {self._op()} {self._gives()}{reached}"

    def _inside(self) -> str:
        """Return where the op is called, for the summary; "" if its phase or its line says that."""
        if self.module:
            return f" in module {self.module}"
        is_said = self.in_loss if self.phase == "loss" else self.phase == "forward" and bool(self.line)
        return "" if is_said else f" in {_where(self.module, self.in_loss)}"

    def _op(self) -> str:
        if not self.gradient_of:
            return self.op
        by = "" if self.op == self.gradient_of else f" ({self.op})"
        return f"the gradient of {self.gradient_of}{by}"


def _where(module: str, in_loss: bool) -> str:
    return module or ("the loss function" if in_loss else "the model's own code")


def diagnose(
    model: nn.Module,
    loss_fn: Callable[[Any], torch.Tensor],
    batch: Batch,
    scaler: Any = None,
) -> Diagnosis:
    """Replay one batch and name the module and op that made the first inf or NaN that reaches the loss or a gradient.

    The forward and the loss run in the caller's autocast region and the backward outside it, so call this where the
    training loop calls the model. Weights, buffers, gradients (the same tensors), tensors in `batch`, random states
    and training flags are restored afterwards, even if the model raises. Not restored: other attributes that the
    forward sets (counters, caches, tensors that are not buffers), side effects of hooks and of `loss_fn`, and random
    generators that the program created. Work that overlaps the backward (optimizers in it, DDP's all-reduce) does not
    run. If the forward calls collectives, all ranks must call this.

    Infinities and NaNs that reach neither, such as those in masks or in weights that the batch does not use, are not
    faults. Those made by ops of the forward are listed in `harmless`, or in `also` if there is a fault. Every op syncs
    with the host, so a replay takes several times as long as a step, and twice that if the scale may be the cause.

    Args:
        model: The model, in the mode it trains in. DDP and `torch.compile` are unwrapped: the replay is eager and
            runs on this rank alone.
        loss_fn: Function that maps the model's output to the loss, a tensor with one element.
        batch: The model's inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        scaler: The loss is multiplied by its current scale, or by 1 if None. The scaler does not change.

    Raises:
        TypeError: An argument has the wrong type, or the loss is not a tensor.
        RuntimeError: The loss does not have exactly one element.
        Exception: Whatever the model or the loss raises.

    Example:
        >>> import castwise
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        >>> with torch.no_grad():
        ...     _ = model[1].weight.fill_(1e5)
        >>> with castwise.autocast("cpu", dtype=torch.float16):
        ...     found = diagnose(model, lambda y: y.float().mean(), torch.ones(2, 4))
        >>> found.module, found.op, found.remedy
        ('1', 'aten.to', 'float32')
    """
    model = _unwrapped(model)
    args, kwargs = arguments_of(batch)
    scale = _scale_of(scaler)
    outside_region = not _is_in_region(model, [args, kwargs])
    found = diagnose_loss(OfLoss(model, args, kwargs, loss_fn), scale)
    return replace(found, outside_region=outside_region)


def diagnose_loss(case: OfLoss, scale: float) -> Diagnosis:
    """Diagnose a batch and a loss function.

    Raises:
        Exception: Whatever the model or the loss raises.
    """
    found = find(case, scale)
    return _diagnosis(found, case, scale, case.loss, Past())


def diagnose_replay(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output_gradients: Sequence[torch.Tensor | None],
    *,
    scale: float = 1.0,
    region: Callable[[], AbstractContextManager[Any]] = nullcontext,
    loss_is_finite: bool | None = None,
    with_backward: bool = True,
    past: Past | None = None,
) -> Diagnosis:
    """Diagnose without a loss: start the backward from gradients of the model's output.

    If these gradients are not finite and the output is, either they overflowed or the fault is in the loss. The phase
    is then "loss", without an op.

    Args:
        model: See `diagnose`.
        args: Positional arguments.
        kwargs: Keyword arguments.
        output_gradients: Scaled gradients of the tensors that `cases.outputs_of` lists; None for outputs that the loss
            did not use.
        scale: Scale of these gradients.
        region: Returns the context manager for the forward; called once per replay.
        loss_is_finite: Whether the loss was finite; None if it is not known.
        with_backward: If False, look for faults of the forward only.
        past: The run before this batch.

    Raises:
        Exception: Whatever the model raises.
    """
    case = OfOutput(_unwrapped(model), args, kwargs, output_gradients, scale, region, loss_is_finite, with_backward)
    return _diagnosis(find(case, scale), case, scale, None, past or Past())


def of_other_weights(step: int, scale: float) -> Diagnosis:
    """Return the diagnosis of an output that was not finite in the run and is with the weights of an earlier step."""
    return Diagnosis(
        True,
        "forward",
        scale=scale,
        remedy="learning rate",
        advice=f"the steps since step {step:,} have made it so. {LOWER_RATE}",
        tried=f"finite with the weights of step {step:,}",
    )


def _diagnosis(
    found: Found,
    case: Case,
    scale: float,
    loss: float | None,
    past: Past,
) -> Diagnosis:
    fault, others = found.fault, tuple(map(_non_finite, found.others))
    if fault is None:
        return Diagnosis(False, scale=scale, loss=loss, harmless=others)
    is_huge = fault.birth is not None and has_huge_input(fault.birth.inputs)
    row = outlying_row(case.model) if is_huge else None
    help_ = remedy_of(fault, scale, case.model) if row is None else Help("weight", str(row))
    tried = try_remedy(case, fault, help_, scale, row, past)
    remedy = tried.help.remedy
    advice, code = map(in_names_of_main, (tried.help.advice, tried.help.code))
    birth = fault.birth or Birth("op", 0, _PHASE_WITHOUT_BIRTH.get(fault.reached, "forward"))
    ranges = tuple(seen for tensor in fault.tensors if (seen := range_of(tensor)) is not None)
    at = None if birth.tensor is None else first_not_finite(birth.tensor)
    return Diagnosis(
        found=True,
        phase="loss" if fault.reached == "scaled loss" else birth.phase,
        module="" if birth.kind == "input" else birth.module or "",
        in_loss=birth.module is None and birth.phase in {"loss", "backward"},
        op=birth.op,
        gradient_of=birth.gradient_of,
        inputs=birth.inputs,
        outputs=birth.outputs or (() if birth.op else ranges),
        in_float32=birth.in_float32,
        parameter=birth.name if birth.kind == "weight" else fault.parameter,
        argument=birth.name if birth.kind == "input" else "",
        index=() if at is None else at[0],
        value=_value(birth.outputs or birth.inputs or ranges) if at is None else at[1],
        scale=scale,
        loss=loss,
        remedy=remedy,
        advice=advice if not fault.others else f"{advice}; {fault.others} more weights are not finite",
        code=code,
        tried=tried.result,
        samples=tried.samples,
        line="" if birth.place is None else str(birth.place),
        source="" if birth.place is None else birth.place.source,
        also=others,
    )


def _non_finite(birth: Birth) -> NonFinite:
    line = "" if birth.place is None else str(birth.place)
    in_loss = birth.module is None
    # A NaN counts as a birth only if no input has one, so an op with NaN inputs made infinities.
    value = "inf" if any(found.nan for found in birth.inputs) else _value(birth.outputs)
    return NonFinite(birth.module or "", in_loss, birth.op, value, birth.is_finite_in_float32, line)


_PHASE_WITHOUT_BIRTH: dict[str, Phase] = {
    "scaled loss": "loss",
    "gradient of the output": "loss",
    "gradient": "backward",
}


def _value(ranges: Sequence[Range]) -> Literal[""] | Value:
    if any(found.nan for found in ranges):
        return "nan"
    return "inf" if any(found.inf for found in ranges) else ""


def _unwrapped(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return next(module for _, module in named_modules(model))


def _is_in_region(model: nn.Module, arguments: Any) -> bool:
    """Return True if a policy is active, or an autocast region for a device of the model or its arguments."""
    types = {tensor.device.type for tensor in [*model.parameters(), *tensors_of(arguments)]}
    return THREAD.state is not None or any(torch.is_autocast_enabled(kind) for kind in filter(has_autocast, types))


def _scale_of(scaler: Any) -> float:
    if scaler is None:
        return 1.0
    if not hasattr(scaler, "get_scale"):
        hint = (
            ". Pass several inputs of the model as a tuple, diagnose(model, loss_fn, (x, mask), scaler), and targets "
            "in the loss function: lambda outputs: loss_fn(outputs, targets)"
        )
        is_targets = isinstance(scaler, torch.Tensor)
        raise TypeError(f"scaler must be a GradScaler or None, got {type(scaler).__name__}{hint if is_targets else ''}")
    return float(scaler.get_scale())
