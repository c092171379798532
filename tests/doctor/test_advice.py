"""What is recommended for what was found."""

from __future__ import annotations

import pytest

from castwise import policies, schedules
from castwise._doctor.machine_advice import recommend
from castwise._doctor.native_formats import Native
from castwise._doctor.speed import Quartiles, Speed


def runs_at(low: float, high: float | None = None) -> Speed:
    """The speed of a format that runs at so many times fp32's."""
    high = low if high is None else high
    return Speed(512, Quartiles(1.0, 1.0, 1.0), Quartiles(low, (low + high) / 2, high))


FAST, SLOW, NOISY = runs_at(2.0), runs_at(0.06), runs_at(0.5, 2.0)
H100: Native = {"fp32": True, "tf32": True, "bf16": True, "fp16": True, "fp8": True}
T4: Native = {"fp32": True, "tf32": False, "bf16": False, "fp16": True, "fp8": False}
ZEN4: Native = {"fp32": True, "bf16": True, "fp16": False}
OLD: Native = {"fp32": True, "bf16": False, "fp16": False}
FP16_UNITS: Native = {"fp32": True, "bf16": False, "fp16": True}
UNKNOWN: Native = {"fp32": True, "bf16": None, "fp16": None}

CASES = [
    ("an H100", "cuda", H100, FAST, FAST, "bf16", "Guard", "bf16 multiplies matrices at 2.00 times the speed of fp32."),
    (
        "a T4",
        "cuda",
        T4,
        runs_at(0.4),
        FAST,
        "fp16",
        "Dynamic",
        "fp16 multiplies matrices at 2.00 times the speed of fp32.",
    ),
    ("zen 4", "cpu", ZEN4, FAST, SLOW, "bf16", "Guard", "bf16 multiplies matrices at 2.00 times the speed of fp32."),
    (
        "units that are slow",
        "cpu",
        ZEN4,
        runs_at(0.9),
        SLOW,
        None,
        None,
        "bf16 does not pay off: it multiplies matrices at 0.90 times",
    ),
    (
        "units that gain nothing",
        "cpu",
        ZEN4,
        runs_at(1.05),
        SLOW,
        None,
        None,
        "bf16 does not pay off: it multiplies matrices at 1.05 times",
    ),
    (
        "an old CPU",
        "cpu",
        OLD,
        runs_at(0.37),
        SLOW,
        None,
        None,
        "bf16 is emulated, at 0.37 times the speed of fp32. fp16 is",
    ),
    ("emulated but fast", "cpu", OLD, FAST, FAST, None, None, "bf16 is emulated, at 2.00 times the speed of fp32."),
    (
        "a CPU for fp16",
        "cpu",
        FP16_UNITS,
        SLOW,
        FAST,
        "fp16_stable",
        "Dynamic",
        "fp16 multiplies matrices at 2.00 times",
    ),
    (
        "busy, with units",
        "cpu",
        ZEN4,
        NOISY,
        SLOW,
        "bf16",
        "Guard",
        "There is hardware for bf16; the machine is too busy",
    ),
    ("busy, without", "cpu", OLD, NOISY, SLOW, None, None, "bf16 is emulated, at 1.25 times"),
    (
        "busy, not known",
        "mps",
        UNKNOWN,
        NOISY,
        NOISY,
        None,
        None,
        "The machine is too busy to tell whether bf16 is faster.",
    ),
    ("not known, fast", "mps", UNKNOWN, FAST, FAST, "bf16", "Guard", "bf16 multiplies matrices at 2.00 times"),
    (
        "no kernel for bf16",
        "mps",
        UNKNOWN,
        "no kernel",
        FAST,
        "fp16",
        "Dynamic",
        "fp16 multiplies matrices at 2.00 times",
    ),
    ("no kernels", "mps", UNKNOWN, "no kernel", "none", None, None, "bf16: no kernel. fp16: none."),
]


@pytest.mark.parametrize(
    ("device_type", "native", "bf16", "fp16", "policy", "schedule", "reason"),
    [pytest.param(*case, id=name) for name, *case in CASES],
)
def test_what_is_recommended(
    device_type: str,
    native: Native,
    bf16: Speed | str,
    fp16: Speed | str,
    policy: str | None,
    schedule: str | None,
    reason: str,
) -> None:
    found = recommend(device_type, native, {"fp32": runs_at(1.0), "bf16": bf16, "fp16": fp16})
    assert (found.policy, found.schedule) == (policy, schedule)
    assert found.policy_reason.startswith(reason)
    assert found.policy is None or found.policy in policies.__all__
    assert found.schedule is None or isinstance(getattr(schedules, found.schedule)(), schedules.Schedule)
    assert found.policy_reason.endswith(".")
    assert found.schedule_reason.endswith(".")
