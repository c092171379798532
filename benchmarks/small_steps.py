"""Iterations of small models, in which no tensor is large enough to hide call overhead: scale, step and update."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import castwise
from benchmarks.benchmark import Benchmark, Record, Table, shown
from benchmarks.pairing import AGAIN, CASTWISE, QUICK_S, TORCH, Rounds, compare, host_seconds, race, ratio

LIBRARIES: dict[str, Any] = {TORCH: torch.amp, AGAIN: torch.amp, CASTWISE: castwise}
SIZES = {"2 of 16": (2, 16), "10 of 16": (10, 16), "100 of 16": (100, 16), "100 of 10,000": (100, 10_000)}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=1e-6, foreach=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=1e-6, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-6, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-6, fused=True),
}
STEPS = ("scaled", "scaled and clipped", "unscale_ first, then torch's clipping")
CALLS = ("scale(loss)", "scale(loss) and its backward")


@dataclass(frozen=True)
class Plan:
    """Rounds and numbers of tensors."""

    rounds: Rounds
    sizes: tuple[str, ...] = tuple(SIZES)
    repeats: int = 20
    """Number of calls timed together."""


def iteration(library: str, optimizer: str, step: str, size: str, device: str) -> Callable[[], None]:
    """Return one library's iteration without forward and backward; gradients already exist."""
    count, numel = SIZES[size]
    params = [torch.nn.Parameter(torch.ones(numel, device=device)) for _ in range(count)]
    grads = [torch.full_like(param, 2.0**10) for param in params]
    # Gradients are unscaled in place; a scale of 1 keeps them from shrinking at every step.
    stepped, scaler = OPTIMIZERS[optimizer](params), LIBRARIES[library].GradScaler(device, init_scale=1.0)
    loss = torch.ones((), device=device, requires_grad=True)

    def run() -> None:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        scaler.scale(loss)
        if step == STEPS[1] and isinstance(scaler, castwise.GradScaler):
            scaler.clip_grad_norm_(stepped, 1.0)
        elif step != STEPS[0]:
            scaler.unscale_(stepped)
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(stepped)
        scaler.update()

    return run


def single_call(library: str, call: str, device: str) -> Callable[[], object]:
    """Return one of a library's calls, which has stepped once: the first iteration differs from later ones."""
    scaler = LIBRARIES[library].GradScaler(device)
    loss = torch.ones((), device=device, requires_grad=True)
    calls: dict[str, Callable[[], object]] = {
        CALLS[0]: lambda: scaler.scale(loss),
        CALLS[1]: lambda: scaler.scale(loss * 1.0).backward(),
    }
    optimizer = torch.optim.SGD([loss], lr=0.0)
    calls[call]()
    loss.grad = torch.ones_like(loss)
    scaler.step(optimizer)
    scaler.update()
    return calls[call]


def measured(make: Callable[[str], Callable[[], object]], device: str, plan: Plan) -> Record:
    """Time the libraries in turns."""

    def timed(library: str) -> Callable[[], float]:
        run = make(library)

        def several() -> None:
            for _ in range(plan.repeats):
                run()

        return lambda: host_seconds(several, device) / plan.repeats

    times = race({library: timed(library) for library in LIBRARIES}, plan.rounds, warm_up=3)
    return {
        "median_us": {library: statistics.median(values) * 1e6 for library, values in times.items()},
        "castwise / torch": compare(times[CASTWISE], times[TORCH], ratio(times[AGAIN], times[TORCH])),
    }


def measure(device: str, plan: Plan) -> Record:
    """Measure each iteration and each single call."""
    return {
        "iterations": {
            f"{optimizer}, {size}, {step}": measured(
                lambda library, o=optimizer, s=step, n=size: iteration(library, o, s, n, device),  # type: ignore[misc]
                device,
                plan,
            )
            for optimizer in OPTIMIZERS
            for size in plan.sizes
            for step in STEPS
        },
        "calls": {
            call: measured(lambda library, call=call: single_call(library, call, device), device, plan)  # type: ignore[misc]
            for call in CALLS
        },
    }


def tables(record: Record) -> list[Table]:
    """Show one row for each iteration and each call."""
    return [_table(record["iterations"], "Complete iterations:"), _table(record["calls"], "Single calls:")]


def _table(rows: dict[str, Record], above: str) -> Table:
    table = Table(["", "torch.amp", "castwise", "castwise / torch.amp (quartiles)", "verdict"], above=above)
    for name, row in rows.items():
        times = [f"{row['median_us'][library]:,.1f} us" for library in (TORCH, CASTWISE)]
        table.rows.append([name, *times, shown(row["castwise / torch"]), row["castwise / torch"]["verdict"]])
    return table


BENCHMARK = Benchmark(
    name="small_steps",
    title="Small steps",
    about='scale, step and update without forward and backward, on small tensors ("10 of 16": 10 tensors of 16).',
    quick=Plan(rounds=Rounds(9, QUICK_S / 4), sizes=("10 of 16",)),
    full=Plan(rounds=Rounds(50, QUICK_S / 2), repeats=5),
    measure=measure,
    tables=tables,
)
