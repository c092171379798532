"""Host time per tensor, measured on 1,000 tensors of one element each, so that there is little other work."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import castwise
from castwise.bench.benchmark import Benchmark, Record, Table, shown
from castwise.bench.pairing import AGAIN, CASTWISE, QUICK_S, TORCH, Rounds, compare, host_seconds, race, ratio

SCALERS: dict[str, Any] = {TORCH: torch.amp.GradScaler, AGAIN: torch.amp.GradScaler, CASTWISE: castwise.GradScaler}
OPTIMIZERS: dict[str, dict[str, bool]] = {"foreach SGD": {"foreach": True}, "fused SGD": {"fused": True}}
CALLS = ("scale a loss", "unscale_", "step + update", "unscale_, then step + update")


@dataclass(frozen=True)
class Plan:
    """Rounds and number of tensors."""

    rounds: Rounds
    tensors: int = 1000


class Host:
    """Tiny parameters with gradients, and one library's scaler for them."""

    def __init__(self, library: str, optimizer: str, tensors: int, device: str) -> None:
        self.device = device
        self.params = [torch.nn.Parameter(torch.ones(1, device=device)) for _ in range(tensors)]
        self.gradients = [torch.ones_like(param) for param in self.params]
        for param, gradient in zip(self.params, self.gradients, strict=True):
            param.grad = gradient
        self.optimizer = torch.optim.SGD(self.params, lr=1e-6, **OPTIMIZERS[optimizer])
        self.scaler = SCALERS[library](device, init_scale=2.0**16)
        self.loss = torch.ones((), device=device, requires_grad=True)
        self.scaler.scale(self.loss)

    def seconds(self, call: str) -> float:
        """Return the seconds that a call blocks the host; work required before or after it is not timed."""
        with torch.no_grad():
            torch._foreach_add_(self.gradients, 1.0)
        if call == "scale a loss":
            return host_seconds(lambda: self.scaler.scale(self.loss), self.device)
        if call == "unscale_":
            taken = host_seconds(self._unscale, self.device)
            self._step_and_update()
            return taken
        if call == "step + update":
            return host_seconds(self._step_and_update, self.device)
        return host_seconds(self._unscale_step_and_update, self.device)

    def _unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def _unscale_step_and_update(self) -> None:
        self._unscale()
        self._step_and_update()

    def _step_and_update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


def race_of(optimizer: str, call: str, tensors: int, device: str, rounds: Rounds) -> Record:
    """Time one call of both libraries in turns."""

    def timed(library: str) -> Callable[[], float]:
        host = Host(library, optimizer, tensors, device)
        return lambda: host.seconds(call)

    times = race({library: timed(library) for library in SCALERS}, rounds, warm_up=3)
    return {
        "tensors": tensors,
        "median_us": {library: statistics.median(values) * 1e6 for library, values in times.items()},
        "castwise / torch": compare(times[CASTWISE], times[TORCH], ratio(times[AGAIN], times[TORCH])),
    }


def measure(device: str, plan: Plan) -> Record:
    """Measure each call with each optimizer."""
    return {
        "rows": {
            f"{optimizer}: {call}": race_of(optimizer, call, plan.tensors, device, plan.rounds)
            for optimizer in OPTIMIZERS
            for call in CALLS
        }
    }


def tables(record: Record) -> list[Table]:
    """Return a table with one row per call."""
    return [times_table(record["rows"])]


def times_table(rows: dict[str, Record], above: str = "") -> Table:
    """Build a table from results of `race_of`, by name."""
    table = Table(["", "tensors", "torch.amp", "castwise", "castwise / torch.amp (quartiles)", "verdict"], above=above)
    for name, row in rows.items():
        times = [f"{row['median_us'][library]:,.1f} us" for library in (TORCH, CASTWISE)]
        found = row["castwise / torch"]
        table.rows.append([name, f"{row['tensors']:,}", *times, shown(found), found["verdict"]])
    return table


BENCHMARK = Benchmark(
    name="host_time",
    title="Host time",
    about="How long calls occupy the host, with tensors of one number each. On a GPU, kernels are not waited for.",
    quick=Plan(rounds=Rounds(15, QUICK_S)),
    full=Plan(rounds=Rounds(100)),
    measure=measure,
    tables=tables,
)
