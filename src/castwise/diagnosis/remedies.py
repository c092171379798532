"""What would help against a fault that was found, and the sentence that says so."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from castwise._number_text import power_of_two
from castwise.diagnosis.fault_search import Fault
from castwise.diagnosis.origins import Birth
from castwise.diagnosis.ranges import Range

Remedy = Literal["", "scale", "float32", "input", "weight", "code"]


class Help(NamedTuple):
    """What would help against a fault."""

    remedy: Remedy
    advice: str
    code: str = ""
    """Python that does it, to be copied; "" where words have to do."""


_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}


def remedy_of(fault: Fault, scale: float) -> Help:
    """Return what would help."""
    birth = fault.birth
    if fault.is_due_to_scale:
        return _lower_scale(birth, scale)
    if birth is None:
        return _without_birth(fault, scale)
    if birth.kind == "weight":
        return Help("weight", f"training is lost from here: load a checkpoint in which {birth.name} is finite")
    if birth.kind == "input":
        return Help("input", f"look at where input {birth.name} comes from, and drop or repair such samples")
    if birth.kind == "outside":
        what = "an argument of the loss, such as the targets" if birth.phase == "loss" else "a tensor it reads"
        return Help("input", f"{what}, was not finite before the forward: look at where it comes from")
    if birth.kind == "constant":
        return Help("code", "the code itself asks for this value: keep it from reaching the loss")
    if birth.kind == "uninitialised":
        return Help("code", "write to all of the memory before it is read; if a custom kernel does, look there")
    low = low_precision(birth)
    if low and (birth.in_float32 is None or all(not found.nonfinite for found in birth.in_float32)):
        return _keep_in_float32(birth, low, fault.tensors[0].device.type)
    if birth.module is None and birth.phase in {"loss", "backward"}:
        return Help("code", "this op of the loss has no finite result in fp32 either: look at what the loss is given")
    return Help("code", "this op has no finite result in fp32 either: look at the ranges of its inputs")


def low_precision(birth: Birth) -> str:
    """Return the low precision of an op, "" if it computed in none."""
    return next((found.dtype for found in [*birth.outputs, *birth.inputs] if found.dtype in _LARGEST), "")


def _without_birth(fault: Fault, scale: float) -> Help:
    if fault.reached != "gradient of the output":
        return Help("code", "no op was seen to make it: a kernel that is not an op of torch may have")
    if fault.loss_is_finite is None:
        advice = "the model is not the cause: look at the loss and its targets, or lower the scale if they are fine"
        return Help("code", advice)
    if not fault.loss_is_finite:
        return Help(
            "code", "the model's output is finite and the loss is not: look at the loss function and its targets"
        )
    if scale > 1.0 and any(tensor.dtype is torch.float16 and tensor.isinf().any() for tensor in fault.tensors):
        return Help(
            "scale",
            f"the gradient of the model's output overflowed at scale {power_of_two(scale)} with a finite loss: lower "
            "the scale, or compute the model's last layer and the loss in fp32",
        )
    return Help(
        "code",
        "the model's output and the loss are finite, so the loss's own backward makes it, as that of a square root at "
        "0 does; a lower scale helps only if the loss computes in fp16",
    )


def _keep_in_float32(birth: Birth, low: str, device: str) -> Help:
    if birth.module:
        policy = f'castwise.Policy(compute="{low}", modules={{"{birth.module}": "float32"}})'
        code = f'policy = {policy}\nwith castwise.autocast("{device}", policy=policy.bind(model)):'
        region = f'castwise.autocast("{device}", policy={policy}.bind(model))'
        return Help("float32", f"keep {birth.module} in fp32: {region}", code)
    if birth.module is None:
        return Help(
            "float32",
            "compute the loss in fp32: call .float() on what it is given, outside of the autocast region",
            f'with castwise.autocast("{device}", enabled=False):\n    loss = loss_fn(output.float(), targets)',
        )
    return Help(
        "float32",
        f"run {birth.op} in fp32: the model's own forward calls it; call .float() on its arguments with autocast off, "
        'or move it into its own module with the rule "float32"',
    )


def _lower_scale(birth: Birth | None, scale: float) -> Help:
    advice = f"lower the scale: gradients overflow at {scale:g} and are finite at 1"
    fits = None if birth is None else _largest_scale(birth, scale)
    if fits is None:
        return Help("scale", advice)
    code = f"scaler = castwise.GradScaler(device_type, init_scale=2.0**{fits})"
    return Help("scale", f"{advice}; this op alone needs 2^{fits} or less", code)


def _largest_scale(birth: Birth, scale: float) -> int | None:
    """Return the exponent of the largest power of two at which an op does not overflow; gradients are linear in it."""
    limit = _LARGEST.get(birth.outputs[0].dtype) if birth.outputs else None
    largest = max((magnitude(found) for found in birth.in_float32 or ()), default=0.0)
    return None if limit is None or largest <= limit else math.floor(math.log2(scale * (limit / largest)))


def magnitude(found: Range) -> float:
    """Return the largest magnitude in a range."""
    return math.inf if found.nonfinite else found.largest or 0.0
