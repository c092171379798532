"""`diagnose`: which module and op made the first inf or NaN of a step, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from castwise.amp.devices import has_autocast
from castwise.amp.thread_state import THREAD
from castwise.diagnosis.cases import OfLoss, OfOutput
from castwise.diagnosis.fault_search import Found, find
from castwise.diagnosis.op_facts import tensors_of
from castwise.diagnosis.origins import Birth, Phase
from castwise.diagnosis.ranges import Range, Value, first_not_finite, range_of
from castwise.diagnosis.remedies import Remedy, remedy_of
from castwise.policy.module_rules import named_modules
from castwise.tracing.batches import Batch, arguments_of

_OUTSIDE = "no autocast region was active: if training uses one, call diagnose inside it"


@dataclass(frozen=True)
class NonFinite:
    """An inf or NaN that an op of the forward made, and that no fault is blamed on.

    Args:
        module: See `Diagnosis`.
        in_loss: See `Diagnosis`.
        op: As "aten.convolution".
        value: "nan" or "inf": what the op made, not what it was given.
        is_finite_in_float32: Whether the op has a finite result in fp32: it overflowed in a low precision.
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


@dataclass(frozen=True)
class Diagnosis:
    """The origin of the first inf or NaN that reaches the loss or a gradient; true if there is one.

    Args:
        found: Whether there is one.
        phase: Where it came in: "weight" and "input" were not finite before; "forward", also where activation
            checkpointing runs it again in the backward; "loss", in the loss function or by scaling the loss;
            "backward"; "" if nothing was found.
        module: Qualified name of the innermost module, without wrappers; "" for the model itself, for the loss
            function, and for inputs.
        in_loss: Whether the op is one of the loss function, in the forward or the backward.
        op: As "aten.bmm"; "" for weights and inputs.
        inputs: Ranges of the op's floating-point inputs, before it ran.
        outputs: Ranges of its results, or of the weight or input.
        in_float32: Ranges of the results that the op has in fp32, if it computed in a low precision and can be
            computed again.
        parameter: The weight that is not finite, or the first whose gradient is not; of a loss that is not finite "".
        argument: The input that is not finite: its position, or its name.
        index: Of the first value that is not finite, in that input or weight.
        value: "nan", "inf" or "-inf": that value, or what the op made.
        scale: Of the loss.
        loss: Its value before scaling; None if it is not known.
        remedy: What would help: a lower "scale", the module in "float32", another "input" or "weight", other "code".
        advice: The same in words.
        code: The same as Python to be copied; "" where words have to do.
        line: Where the code of the model, or of the loss, calls the op: "model.py:31"; "" if that is not known, as in
            the backward.
        source: That line itself.
        harmless: If there is no fault, what ops of the forward made that is not finite, such as an overflow before a
            sigmoid: it reaches neither the loss nor a gradient. Of each module and op one.
        also: If there is a fault, what other ops of the forward made that is not finite. Each may be a fault, too, that
            this one hides: diagnose again after the first is repaired.
        outside_region: Whether `diagnose` was called outside of any autocast region.
    """

    found: bool
    phase: Phase = ""
    module: str = ""
    in_loss: bool = False
    op: str = ""
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
    line: str = ""
    source: str = ""
    harmless: tuple[NonFinite, ...] = ()
    also: tuple[NonFinite, ...] = ()
    outside_region: bool = False

    def __bool__(self) -> bool:
        return self.found

    def __str__(self) -> str:
        loss = "" if self.loss is None else f" (loss {self.loss:.5g}, scale {self.scale:g})"
        if not self.found:
            harmless = [f"  seen and harmless: {each}" for each in self.harmless]
            hint = [f"  {_OUTSIDE}"] if self.outside_region else []
            return "\n".join([f"clean: the loss and all gradients are finite{loss}", *hint, *harmless])
        lines = [f"{self.phase}: {self._what()}{loss}"]
        lines += [f"  at {self.line}: {self.source}"] if self.line else []
        lines += [f"  input {place}: {found}" for place, found in enumerate(self.inputs)]
        lines += [f"  output: {found}" for found in self.outputs if self.op or self.phase == "loss"]
        lines += [f"  output in fp32: {found}" for found in self.in_float32 or ()]
        lines += [f"  also: {each}; look again after the first is repaired" for each in self.also]
        return "\n".join([*lines, self.advice])

    @property
    def summary(self) -> str:
        """What was found, in one sentence."""
        if not self.found:
            return "Replayed, this batch gave a finite loss and finite gradients."
        if self.phase == "weight" or not self.op:
            what = self._what()
        else:
            phase = "" if self.phase == "loss" else f"in the {self.phase}, "
            reached = f", which reaches the gradient of {self.parameter}" if self.parameter else ""
            where = f"module {self.module}" if self.module else _where(self.module, self.in_loss)
            what = f"{phase}{self.op} in {where} {self._gives()}{reached}"
        at = f", at {self.line}" if self.line else ""
        return f"{what[:1].upper()}{what[1:]}{at}."

    def record(self) -> dict[str, str]:
        """Return what a run records of it; see "diagnosis" in the manual's page on formats."""
        names = ("phase", "module", "op", "advice", "summary", "remedy", "code")
        return {**{name: getattr(self, name) for name in names}, "text": str(self)}

    def _gives(self) -> str:
        return f"{'gives' if self.outputs else 'reads'} {self.value}"

    def _what(self) -> str:
        if self.phase == "weight":
            return f"{self.parameter} is {self.value} at {self.index}"
        if self.phase == "input":
            return f"input {self.argument} is {self.value} at {self.index}"
        reached = f", which reaches the gradient of {self.parameter}" if self.parameter else ""
        if not self.op and self.phase == "loss" and self.loss is None:
            return f"the gradient of the model's output is {self.value}"
        if not self.op:
            return f"{self.value or 'a value that is not finite'} of unknown origin{reached}"
        return f"{_where(self.module, self.in_loss)}: {self.op} {self._gives()}{reached}"


def _where(module: str, in_loss: bool) -> str:
    return module or ("the loss function" if in_loss else "the model itself")


def diagnose(
    model: nn.Module,
    loss_fn: Callable[[Any], torch.Tensor],
    batch: Batch,
    scaler: Any = None,
) -> Diagnosis:
    """Replay one batch and name the module and op that made the first inf or NaN that reaches the loss or a gradient.

    The forward and the loss run in the caller's autocast region, and the backward outside it, so call this where the
    training loop calls the model. Afterwards weights, buffers, gradients (the same tensors), tensors in `batch`, the
    state of random number generators and training flags are restored, also when the model raises. Not restored are
    other attributes that the forward sets (counters, caches, tensors that are no buffers), what hooks and `loss_fn` do,
    and generators that the program has made. What overlaps the backward (optimizers in it, DDP's all-reduce) does not
    run; collectives that the forward calls need all ranks to call this.

    Infinities and NaNs that reach neither are not faults: those of masks, or of a weight that the batch does not use.
    Without a fault `harmless` lists those that an op of the forward made; beside a fault `also` lists them. Every op
    syncs with the host: a replay takes several times a step, and twice that if the scale may be the cause.

    Args:
        model: The model, in the mode it trains in. DDP and `torch.compile` are unwrapped: the replay is eager and
            runs on this rank alone.
        loss_fn: Function of the model's output that returns the loss: one element.
        batch: The model's inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        scaler: Its current scale multiplies the loss; None is 1. The scaler is not changed.

    Raises:
        TypeError: An argument has the wrong type, or the loss is not a tensor.
        RuntimeError: The loss has more elements than one.
        Exception: What the model or the loss raises.

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
    case = OfLoss(model, args, kwargs, loss_fn)
    scale = _scale_of(scaler)
    outside_region = not _is_in_region(model, [args, kwargs])
    return replace(_diagnosis(find(case, scale), scale, case.loss), outside_region=outside_region)


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
) -> Diagnosis:
    """Do what `diagnose` does without a loss: the backward begins with gradients of the model's output.

    If these are not finite and the output is, they overflowed or the fault is one of the loss: phase "loss", without
    an op.

    Args:
        model: As for `diagnose`.
        args: Positional arguments.
        kwargs: Keyword arguments.
        output_gradients: Gradients, scaled, of the tensors in the output that `cases.outputs_of` lists; None of those
            that the loss did not use.
        scale: Of these gradients.
        region: Makes what the forward runs in; it is called for each replay.
        loss_is_finite: Whether the loss was; None if it is not known.
        with_backward: False looks for faults of the forward only.

    Raises:
        Exception: What the model raises.
    """
    case = OfOutput(_unwrapped(model), args, kwargs, output_gradients, scale, region, loss_is_finite, with_backward)
    return _diagnosis(find(case, scale), scale, None)


def _diagnosis(found: Found, scale: float, loss: float | None) -> Diagnosis:
    fault, others = found.fault, tuple(map(_non_finite, found.others))
    if fault is None:
        return Diagnosis(False, scale=scale, loss=loss, harmless=others)
    remedy, advice, code = remedy_of(fault, scale)
    birth = fault.birth or Birth("op", 0, _PHASE_WITHOUT_BIRTH.get(fault.reached, "forward"))
    ranges = tuple(seen for tensor in fault.tensors if (seen := range_of(tensor)) is not None)
    at = None if birth.tensor is None else first_not_finite(birth.tensor)
    return Diagnosis(
        found=True,
        phase="loss" if fault.reached == "scaled loss" else birth.phase,
        module="" if birth.kind == "input" else birth.module or "",
        in_loss=birth.module is None and birth.phase in {"loss", "backward"},
        op=birth.op,
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
        line="" if birth.place is None else str(birth.place),
        source="" if birth.place is None else birth.place.source,
        also=others,
    )


def _non_finite(birth: Birth) -> NonFinite:
    line = "" if birth.place is None else str(birth.place)
    in_loss = birth.module is None
    # NaN is born of no NaN, so an op that was given some has made infinities.
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
    """Return True if an autocast region is active for a device of the model or its arguments, or a policy is."""
    types = {tensor.device.type for tensor in [*model.parameters(), *tensors_of(arguments)]}
    return THREAD.state is not None or any(torch.is_autocast_enabled(kind) for kind in filter(has_autocast, types))


def _scale_of(scaler: Any) -> float:
    if scaler is None:
        return 1.0
    if not hasattr(scaler, "get_scale"):
        hint = ". loss_fn takes the model's output alone: lambda out: loss_fn(out, targets)"
        is_targets = isinstance(scaler, torch.Tensor)
        raise TypeError(f"scaler must be a GradScaler or None, got {type(scaler).__name__}{hint if is_targets else ''}")
    return float(scaler.get_scale())
