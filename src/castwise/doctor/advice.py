"""Which policy and schedule suit a device: decided by what it has units for, and by what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from castwise.doctor.formats import Native
from castwise.doctor.speed import Speed

_SCHEDULES = {
    "bf16": ("Guard", "bf16 has the range of fp32: nothing needs scaling, but a bad step is skipped and explained."),
    "fp16": ("Dynamic", "fp16 rounds small gradients to zero unless the loss is scaled; this finds by how much."),
    "fp32": (None, "fp32 needs no scale."),
}


@dataclass(frozen=True)
class Recommendation:
    """What to train with on a device.

    Attributes:
        policy: A name in `castwise.policies`; None to stay in fp32.
        policy_reason: Why, in a sentence.
        schedule: A name in `castwise.schedules`; None for no scaler.
        schedule_reason: Why, in a sentence.
    """

    policy: str | None
    policy_reason: str
    schedule: str | None
    schedule_reason: str


def recommend(device_type: str, native: Native, speeds: dict[str, Speed | str]) -> Recommendation:
    """Return what suits a device: bf16 if it pays, else fp16 if that does, else fp32.

    Args:
        device_type: Such as `"cpu"`.
        native: Whether it has units for a format; None where that is not known.
        speeds: What `castwise.doctor.speed.measure` has found.

    Example:
        >>> recommend("cpu", {"fp32": True, "bf16": False, "fp16": False}, {}).policy_reason
        'bf16 is emulated. fp16 is emulated.'
    """
    against = []
    for name in ("bf16", "fp16"):
        pays, reason = _judge(name, native.get(name), speeds.get(name, "not measured"))
        if pays:
            # CPUs' autocast leaves norms and losses in fp16, which GPUs' does not.
            policy = "fp16_stable" if name == "fp16" and device_type == "cpu" else name
            return Recommendation(policy, reason, *_SCHEDULES[name])
        against.append(reason)
    return Recommendation(None, " ".join(against), *_SCHEDULES["fp32"])


def _judge(name: str, is_native: bool | None, speed: Speed | str) -> tuple[bool, str]:
    """Whether a format pays, and why or why not."""
    if isinstance(speed, str):
        return False, f"{name} is emulated." if is_native is False else f"{name}: {speed}."
    pace = f"{speed.times_fp32.median:.2f} times the speed of fp32"
    if is_native is False:
        return False, f"{name} is emulated, at {pace}."
    if speed.verdict == "too noisy to tell":
        if is_native:
            return True, f"There are units for {name}; the machine is too busy to tell what they gain."
        return False, f"The machine is too busy to tell whether {name} pays."
    if speed.verdict == "faster":
        return True, f"{name} multiplies matrices at {pace}."
    return False, f"{name} does not pay: it multiplies matrices at {pace}."
