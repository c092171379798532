"""`remedy_of`: suggest a remedy for a fault, in words and in code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import nn

from castwise._mistakes.bounded_ops import line_with_bound
from castwise._mistakes.corrected_code import loss_in_fp32
from castwise._mistakes.script_line import ScriptLine
from castwise._number_text import power_of_two
from castwise._torch_private import fsdp_mixed_precision
from castwise.diagnosis._fault_search import Fault
from castwise.diagnosis._op_remedies import UNKNOWN, advice_on_op
from castwise.diagnosis._origins import Birth
from castwise.diagnosis._ranges import Range

OF_REGION = "# instead of the line of the autocast region:"
Remedy = Literal["", "scale", "float32", "input", "weight", "code", "learning rate"]


class Help(NamedTuple):
    """A remedy for a fault."""

    remedy: Remedy
    advice: str
    code: str = ""
    """Python code to copy; "" if no code applies."""


_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}


def remedy_of(fault: Fault, scale: float, model: nn.Module) -> Help:
    """Return the remedy for a fault in a replay of a model at this scale."""
    birth = fault.birth
    if fault.is_due_to_scale:
        return _lower_scale(birth, scale, fault.tensors[0].device.type)
    if birth is None:
        return _without_birth(fault, scale)
    if birth.kind == "weight":
        return _without_weight(birth, model)
    if birth.kind == "input":
        return Help("input", f"check where input {birth.name} comes from, and drop or repair such samples")
    if birth.kind == "outside":
        what = "an argument of the loss, such as the targets" if birth.phase == "loss" else "a tensor that the op reads"
        return Help("input", f"{what}, was not finite before the forward: check where it comes from")
    if birth.kind == "constant":
        return Help("code", "the code itself sets this value: keep it from reaching the loss")
    if birth.kind == "uninitialised":
        return Help("code", "initialise all of the memory before it is read; if a custom kernel should, check that")
    low = low_precision(birth)
    if low and (birth.in_float32 is None or all(not found.nonfinite for found in birth.in_float32)):
        return _keep_in_float32(birth, low, fault.tensors[0].device.type)
    advice = advice_on_op(birth.op, birth.gradient_of, birth.inputs, birth.outputs)
    code = line_with_bound(ScriptLine(birth.place), birth.op, advice, [given.dtype for given in birth.inputs])
    if birth.gradient_of and advice is not UNKNOWN:
        return Help("code", advice, code)
    if birth.module is None and birth.phase in {"loss", "backward"} and advice is UNKNOWN:
        return Help("code", "this op of the loss is not finite in fp32 either: check the arguments of the loss")
    return Help("code", f"this op is not finite in fp32 either: {advice}", code)


def _without_weight(birth: Birth, model: nn.Module) -> Help:
    checkpoint = f"load a checkpoint in which {birth.name} is finite"
    is_low = birth.tensor is not None and birth.tensor.dtype is torch.float16
    if is_low and torch.float16 in _dtypes_gathered_by_fsdp(model):
        bf16 = "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        return Help(
            "code", f"FSDP2 gathers it in float16: if it is finite in fp32, use {bf16}; if not, {checkpoint}", bf16
        )
    return Help("weight", f"training cannot recover from this: {checkpoint}")


def _dtypes_gathered_by_fsdp(model: nn.Module) -> set[torch.dtype | None]:
    policies = [policy for module in model.modules() if (policy := fsdp_mixed_precision(module)) is not None]
    return {policy.param_dtype for policy in policies}


def low_precision(birth: Birth) -> str:
    """Return the name of an op's low-precision dtype, "" if it has none."""
    return next((found.dtype for found in [*birth.outputs, *birth.inputs] if found.dtype in _LARGEST), "")


def _without_birth(fault: Fault, scale: float) -> Help:
    if fault.reached != "gradient of the output":
        return Help("code", "no torch op made it: the cause may be a kernel that is not a torch op")
    if fault.loss_is_finite is None:
        advice = "the model is not the cause: check the loss and its targets, or lower the scale if they are correct"
        return Help("code", advice)
    if not fault.loss_is_finite:
        return Help("code", "the model's output is finite and the loss is not: check the loss function and its targets")
    if scale > 1.0 and any(tensor.dtype is torch.float16 and tensor.isinf().any() for tensor in fault.tensors):
        return Help(
            "scale",
            f"the gradient of the model's output overflowed at scale {power_of_two(scale)} with a finite loss: lower "
            "the scale, or compute the model's last layer and the loss in fp32",
        )
    return Help(
        "code",
        "the model's output and the loss are finite, so the value arises in the loss's backward, as for a square root "
        "at 0; a lower scale helps only if the loss computes in fp16",
    )


def keep_in_float32(modules: Sequence[str], low: str, device: str) -> Help:
    """Return a policy that computes these modules in fp32."""
    rules = ", ".join(f'"{module}": "float32"' for module in modules)
    policy = f'castwise.Policy(compute="{low}", modules={{{rules}}})'
    lines = "import castwise", f"policy = {policy}", OF_REGION
    code = "\n".join([*lines, f'with castwise.autocast("{device}", policy=policy.bind(model)):'])
    region = f'castwise.autocast("{device}", policy={policy}.bind(model))'
    return Help("float32", f"keep {' and '.join(modules)} in fp32: {region}", code)


def keep_weights_in_float32(model: nn.Module, low: str) -> Help:
    """Return what keeps the weights of a model in fp32, which are in low precision without autocast."""
    if f"torch.{low}" in map(str, _dtypes_gathered_by_fsdp(model)):
        advice = "gather the weights in fp32: MixedPrecisionPolicy(param_dtype=torch.float32)"
        return Help("float32", f"{advice}, or torch.bfloat16, which has its range" if low == "float16" else advice)
    return Help("float32", f"keep the weights in fp32, not in {low}: model.float()", "model.float()")


def loss_in_float32(line: ScriptLine, device: str) -> Help:
    """Return what computes the loss of a line in fp32."""
    advice = "compute the loss in fp32: call .float() on its arguments, outside the autocast region"
    return Help("float32", advice, loss_in_fp32(line, device))


def _keep_in_float32(birth: Birth, low: str, device: str) -> Help:
    if birth.module:
        return keep_in_float32([birth.module], low, device)
    if birth.module is None:
        return loss_in_float32(ScriptLine(birth.place), device)
    return Help(
        "float32",
        f"run {birth.op}, which the model's forward calls, in fp32: call .float() on its arguments with autocast "
        'disabled, or move it into a separate module with the rule "float32"',
    )


def _lower_scale(birth: Birth | None, scale: float, device: str) -> Help:
    advice = f"lower the scale: gradients overflow at {scale:g} and are finite at 1"
    fits = None if birth is None else _largest_scale(birth, scale)
    if fits is None:
        return Help("scale", advice)
    made = f'scaler = castwise.GradScaler("{device}", init_scale=2.0**{fits})'
    code = f"# where the scaler is made:\nimport castwise\n{made}"
    return Help("scale", f"{advice}; this op alone needs 2^{fits} or less", code)


def _largest_scale(birth: Birth, scale: float) -> int | None:
    """Return the exponent of the largest power-of-two scale at which an op does not overflow; None if it is unknown.

    Gradients are linear in the scale.
    """
    limit = _LARGEST.get(birth.outputs[0].dtype) if birth.outputs else None
    largest = max((magnitude(found) for found in birth.in_float32 or ()), default=0.0)
    return None if limit is None or largest <= limit else math.floor(math.log2(scale * (limit / largest)))


def magnitude(found: Range) -> float:
    """Return the largest magnitude in a range, inf if any value is not finite."""
    return math.inf if found.nonfinite else found.largest or 0.0
