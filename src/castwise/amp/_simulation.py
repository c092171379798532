"""Replay a recorded training run through a schedule, to learn which steps it would have skipped."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from castwise import _files
from castwise.amp._checks import at_least, check_scale, count, integer
from castwise.amp._schedules import IterationFacts, Schedule, on_device

_EXPONENT = re.compile(r"0|-?[1-9][0-9]{0,3}")
_FP16 = torch.finfo(torch.float16)
_FP16_LARGEST = _FP16.max
_FP16_FLUSHED = _FP16.smallest_normal * _FP16.eps / 2.0  # it rounds half of its smallest subnormal number to zero


@dataclass(frozen=True)
class GradientRange:
    """The recorded magnitudes of one step's unscaled gradients.

    Args:
        largest: The largest magnitude of all gradients computed in the low precision.
        exponents: For each e, the number of gradients with a magnitude in [2**e, 2**(e + 1)), without zeros.
        loss_is_finite: Whether the loss was finite; if not, no scale could have saved the step.

    Raises:
        TypeError: `largest` is not a number, or an exponent is not an integer.
        ValueError: `largest` is not a finite number >= 0, or an exponent is outside fp64's range, [-1074, 1023].
    """

    largest: float
    exponents: Mapping[int, int] | None = None
    loss_is_finite: bool = True

    def __post_init__(self) -> None:
        at_least("largest", self.largest, 0.0)
        for exponent in self.exponents or ():
            if not -1074 <= integer("an exponent", exponent) <= 1023:
                raise ValueError(f"an exponent must be in [-1074, 1023], got {exponent!r}")


def write_trace(path: str | os.PathLike[str], trace: Iterable[GradientRange]) -> None:
    """Write a trace to a file atomically, one line of JSON per step.

    Args:
        path: The file; an existing trace is replaced.
        trace: The steps in order.

    Raises:
        FileExistsError: The file exists and is not a trace.
        OSError: The file cannot be written.
    """
    lines = (json.dumps([step.largest, step.loss_is_finite, step.exponents]) for step in trace)
    _files.replace(Path(path), "".join(f"{line}\n" for line in lines).encode(), "a trace", _is_trace)


def _is_trace(head: bytes) -> bool:
    return re.match(rb"\[[\d.eE+-]+, (true|false), [n{]", head) is not None


def read_trace(path: str | os.PathLike[str]) -> list[GradientRange]:
    """Read a trace that `write_trace` has written.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a trace.
    """
    trace = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        try:
            trace.append(_step(json.loads(line)))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is not a step of a trace: {error}") from None
    return trace


def _step(read: Any) -> GradientRange:
    if not isinstance(read, list) or len(read) != 3:
        raise TypeError("expected a list of the largest gradient, whether the loss is finite, and exponents")
    largest, loss_is_finite, exponents = read
    if not isinstance(loss_is_finite, bool):
        raise TypeError(f"loss_is_finite must be true or false, got {loss_is_finite!r}")
    if exponents is None:
        return GradientRange(largest, None, loss_is_finite)
    if not isinstance(exponents, dict):
        raise TypeError(f"exponents must be an object or null, got {exponents!r}")
    for exponent in exponents:
        if not _EXPONENT.fullmatch(exponent):
            raise ValueError(f"an exponent must be written as an integer in [-1074, 1023], got {exponent!r}")
    counts = {int(exponent): count("a count of exponents", n, 0, bits=63) for exponent, n in exponents.items()}
    return GradientRange(largest, counts, loss_is_finite)


@dataclass(frozen=True)
class Simulation:
    """What a schedule would have done."""

    scales: tuple[float, ...]
    """The scale during each step."""
    skipped: tuple[int, ...]
    """The indices of the skipped steps, from 0."""
    wasted_steps: int
    """The number of skipped steps that a lower scale would have saved: those whose loss was finite."""
    flushed: float | None
    """The share of the taken steps' nonzero gradients that the format flushes to zero; None if not recorded."""

    @property
    def skips(self) -> int:
        """The number of skipped steps."""
        return len(self.skipped)


def simulate(
    trace: Iterable[GradientRange],
    schedule: Schedule,
    *,
    largest_number: float = _FP16_LARGEST,
    flushed_below: float = _FP16_FLUSHED,
) -> Simulation:
    """Replay recorded ranges of gradients through a schedule.

    A step overflows if scale * largest > largest_number. Each step's gradients are used as recorded, even if the
    schedule has skipped earlier steps.

    Args:
        trace: The steps in order.
        schedule: The schedule; its `advance_` runs on the CPU.
        largest_number: The largest number of the format that gradients are computed in; 65504 for fp16.
        flushed_below: The largest magnitude that the format rounds to zero; 2**-25 for fp16.

    Raises:
        TypeError: `trace` contains something else, or `schedule` is not a schedule.
        ValueError: A number is out of its range.

    Example:
        >>> from castwise.schedules import Dynamic, GradientRange, simulate
        >>> run = simulate([GradientRange(3.0), GradientRange(2.0), GradientRange(1.5)], Dynamic())
        >>> run.scales, run.skipped
        ((65536.0, 32768.0, 16384.0), (0, 1))
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be one of castwise.schedules, such as Dynamic(), got {schedule!r}")
    largest_number = check_scale("largest_number", largest_number)
    flushed_below = at_least("flushed_below", flushed_below, 0.0)
    scale = torch.full((), schedule.init_scale, dtype=torch.float32, device="cpu")
    trackers = on_device({"growth_tracker": 0, **schedule.trackers()}, scale.device)
    scales: list[float] = []
    skipped: list[int] = []
    wasted, seen, flushed = 0, 0, 0
    for index, step in enumerate(trace):
        if not isinstance(step, GradientRange):
            raise TypeError(f"trace must contain GradientRange, got {step!r} at index {index}")
        now = scale.item()
        scales.append(now)
        overflows = step.loss_is_finite and now * step.largest > largest_number
        is_skipped = overflows or not step.loss_is_finite
        if is_skipped:
            skipped.append(index)
            wasted += overflows
        elif step.exponents is not None:
            seen += sum(step.exponents.values())
            flushed += sum(
                count for e, count in step.exponents.items() if now * 2.0 ** min(e + 1, 1023) <= flushed_below
            )
        facts = torch.tensor([is_skipped, not step.loss_is_finite, step.largest], dtype=torch.float32, device="cpu")
        schedule.advance_(scale, trackers, IterationFacts(*facts.unbind()))
    return Simulation(tuple(scales), tuple(skipped), wasted, flushed / seen if seen else None)
