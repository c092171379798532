"""Recommend a policy and a schedule for a device, from its hardware support and measured speed."""

from __future__ import annotations

from dataclasses import dataclass

from castwise._doctor.native_formats import Native
from castwise._doctor.speed import Speed

_SCHEDULES = {
    "bf16": ("Guard", "bf16 has the range of fp32, so it needs no scale; a bad step is skipped and explained."),
    "fp16": ("Dynamic", "fp16 rounds small gradients to zero unless the loss is scaled; Dynamic finds the scale."),
    "fp32": (None, "fp32 needs no scale."),
}


@dataclass(frozen=True)
class Recommendation:
    """A recommended policy and schedule for a device.

    Attributes:
        policy: A name in `castwise.policies`; None to stay in fp32.
        policy_reason: The reason for the policy, in a sentence.
        schedule: A name in `castwise.schedules`; None for no scaler.
        schedule_reason: The reason for the schedule, in a sentence.
    """

    policy: str | None
    policy_reason: str
    schedule: str | None
    schedule_reason: str


def recommend(device_type: str, native: Native, speeds: dict[str, Speed | str]) -> Recommendation:
    """Recommend bf16 for a device if it is faster than fp32, else fp16 if that is faster, else fp32.

    Args:
        device_type: Such as `"cpu"`.
        native: By format, whether the device computes it in hardware; None if unknown.
        speeds: Results of `castwise._doctor.speed.measure`.

    Example:
        >>> recommend("cpu", {"fp32": True, "bf16": False, "fp16": False}, {}).policy_reason
        'bf16 is emulated. fp16 is emulated.'
    """
    against = []
    for name in ("bf16", "fp16"):
        pays, reason = _judge(name, native.get(name), speeds.get(name, "not measured"))
        if pays:
            # On CPUs autocast leaves norms and losses in fp16; on GPUs it does not.
            policy = "fp16_stable" if name == "fp16" and device_type == "cpu" else name
            return Recommendation(policy, reason, *_SCHEDULES[name])
        against.append(reason)
    return Recommendation(None, " ".join(against), *_SCHEDULES["fp32"])


def _judge(name: str, is_native: bool | None, speed: Speed | str) -> tuple[bool, str]:
    """Return whether a format is worth using, and the reason."""
    if isinstance(speed, str):
        return False, f"{name} is emulated." if is_native is False else f"{name}: {speed}."
    pace = f"{speed.times_fp32.median:.2f} times the speed of fp32"
    if is_native is False:
        return False, f"{name} is emulated, at {pace}."
    if speed.verdict == "too noisy to tell":
        if is_native:
            return True, f"There is hardware for {name}; the machine is too busy to tell how much faster it is."
        return False, f"The machine is too busy to tell whether {name} is faster."
    if speed.verdict == "faster":
        return True, f"{name} multiplies matrices at {pace}."
    return False, f"{name} does not pay off: it multiplies matrices at {pace}."
