"""The time that scaling and clipping add to an optimizer step."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import castwise
from benchmarks.benchmark import Benchmark, Record, Table, left_out, shown
from benchmarks.gradient_traffic import Traffic
from benchmarks.machine import why_it_does_not_fit
from benchmarks.pairing import AGAIN, CASTWISE, QUICK_S, TORCH, Rounds, compare, race, ratio

Shapes = list[tuple[int, ...]]
Way = tuple[str, str]


def gpt(width: int, layers: int) -> Shapes:
    """Return the shapes of a GPT's parameters."""
    layer: Shapes = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    layer += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(50257, width), (1024, width), *(layer * layers)]


SIZES: dict[str, Shapes] = {
    "124M": gpt(768, 12),
    "10M": [(1000, 1000), (1000,)] * 10,
    "1000-tiny": [(8, 8), (64,)] * 500,
}
ON_A_GPU = {"1.3B": gpt(2048, 24)}
"""Sizes for which a CPU takes too long."""
OPTIMIZERS: dict[str, tuple[Any, dict[str, bool]]] = {
    "fused AdamW": (torch.optim.AdamW, {"fused": True}),
    "foreach AdamW": (torch.optim.AdamW, {"foreach": True}),
    "fused SGD": (torch.optim.SGD, {"fused": True}),
    "foreach SGD": (torch.optim.SGD, {"foreach": True}),
}
# Peak number of tensors of the parameters' size: parameters, gradients, state, and results of ops.
COPIES = {"fused AdamW": 4, "foreach AdamW": 6, "fused SGD": 2, "foreach SGD": 3}
BARE, CLIPPED, SCALED, BOTH = "step", "clip + step", "scaled step + update", "scaled + clipped step + update"
SCALE = 2.0**16
LARGE = 5_000_000  # with at least this many parameters, a single step is long enough to time


class Case:
    """Parameters with gradients, an optimizer, and every way to step it."""

    def __init__(self, shapes: Shapes, optimizer: str, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        # A small learning rate: it barely moves the weights, and avoids any special case for zero.
        kind, options = OPTIMIZERS[optimizer]
        self.optimizer = kind(self.params, lr=1e-6, **options)
        # One per shape instead of one per parameter, which halves the memory.
        fresh = {shape: torch.randn(shape, device=device) * SCALE for shape in set(shapes)}
        self.fresh = [fresh[shape] for shape in shapes]
        self.gradients = [torch.empty_like(param) for param in self.params]
        for param, gradient in zip(self.params, self.gradients, strict=True):
            param.grad = gradient
        self.scalers = {
            library: scaler(device, init_scale=SCALE)
            for library, scaler in {TORCH: torch.amp.GradScaler, CASTWISE: castwise.GradScaler}.items()
        }
        for scaler in self.scalers.values():
            scaler.scale(torch.ones((), device=device))

    def ways(self) -> dict[Way, Callable[[], object]]:
        """Return the timed calls, by library and name."""
        return {
            (TORCH, BARE): self.optimizer.step,
            (TORCH, CLIPPED): self._clip_and_step,
            (TORCH, SCALED): lambda: self._step_scaled(TORCH),
            (AGAIN, SCALED): lambda: self._step_scaled(TORCH),
            (TORCH, BOTH): self._clip_and_step_scaled_as_torch,
            (AGAIN, BOTH): self._clip_and_step_scaled_as_torch,
            (CASTWISE, SCALED): lambda: self._step_scaled(CASTWISE),
            (CASTWISE, BOTH): self._clip_and_step_scaled,
        }

    def _clip_and_step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()

    def _step_scaled(self, library: str) -> None:
        self.scalers[library].step(self.optimizer)
        self.scalers[library].update()

    def _clip_and_step_scaled_as_torch(self) -> None:
        self.scalers[TORCH].unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self._step_scaled(TORCH)

    def _clip_and_step_scaled(self) -> None:
        scaler = self.scalers[CASTWISE]
        assert isinstance(scaler, castwise.GradScaler)
        scaler.clip_grad_norm_(self.optimizer, 1.0)
        self._step_scaled(CASTWISE)

    def refill(self) -> None:
        """Replace gradients that a step has unscaled with scaled ones."""
        torch._foreach_copy_(self.gradients, self.fresh)

    def seconds(self, way: Callable[[], object]) -> float:
        """Return the seconds that the device takes for a way to step."""
        self.refill()
        if self.device != "cuda":
            start = time.perf_counter()
            way()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.synchronize()
        begin.record()
        way()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3


@dataclass(frozen=True)
class Plan:
    """Rounds, and pairs of a size and an optimizer."""

    rounds: Rounds
    cases: tuple[tuple[str, str], ...]


def needed_bytes(shapes: Shapes, optimizer: str) -> int:
    """Return the approximate memory of a case, in bytes."""
    return 4 * (COPIES[optimizer] * sum(map(math.prod, shapes)) + sum(map(math.prod, set(shapes))))


def timings(case: Case, rounds: Rounds) -> Record:
    """Time all ways to step in turns, and compute their ratios."""
    is_large = sum(param.numel() for param in case.params) >= LARGE
    repeats = 1 if is_large else 5

    def timed(way: Callable[[], object]) -> Callable[[], float]:
        return lambda: statistics.median(case.seconds(way) for _ in range(repeats))

    times = race({name: timed(way) for name, way in case.ways().items()}, rounds)
    bare = times[TORCH, BARE]
    return {
        "median_ms": {" ".join(name): statistics.median(values) * 1e3 for name, values in times.items()},
        "relative_to_step": {" ".join(name): ratio(values, bare) for name, values in times.items()},
        "castwise_to_torch": {
            way: compare(times[CASTWISE, way], times[TORCH, way], ratio(times[AGAIN, way], times[TORCH, way]))
            for way in (SCALED, BOTH)
        },
        "castwise_clipped_to_torch_clipped_without_scaling": ratio(times[CASTWISE, BOTH], times[TORCH, CLIPPED]),
    }


def traffic(case: Case, optimizer: str) -> dict[str, dict[str, float]]:
    """Return the bytes read, written and allocated before the optimizer, in multiples of the gradients' bytes."""
    case.refill()
    case.optimizer.step()  # creates its state
    if "fused" not in optimizer:
        case.optimizer.step = lambda: None
    total = sum(gradient.nbytes for gradient in case.gradients)
    found = {}
    for name, way in case.ways().items():
        if name[0] == AGAIN:
            continue
        case.refill()
        with Traffic(case.gradients) as counted:
            way()
        found[" ".join(name)] = {
            "reads": counted.read / total,
            "writes": counted.written / total,
            "allocated": counted.allocated / total,
        }
    return found


def result_of(shapes: Shapes, optimizer: str, device: str, rounds: Rounds) -> Record:
    """Measure one case, or return the reason why it was skipped."""
    reason = why_it_does_not_fit(needed_bytes(shapes, optimizer), device)
    if reason is not None:
        return {"skipped": reason}
    case = Case(shapes, optimizer, device)
    return {**timings(case, rounds), "gradient_traffic_before_the_optimizer": traffic(case, optimizer)}


def measure(device: str, plan: Plan) -> Record:
    """Measure each case that fits in memory."""
    return {
        "results": {
            f"{size}, {optimizer}": result_of((SIZES | ON_A_GPU)[size], optimizer, device, plan.rounds)
            for size, optimizer in plan.cases
            if device != "cpu" or size in SIZES
        }
    }


def tables(record: Record) -> list[Table]:
    """Return tables of times and of memory traffic."""
    results = record["results"]
    traffic_table = Table(
        ["", *(f"{library}: {way}" for way in ("scaled", "scaled + clipped") for library in (TORCH, CASTWISE))],
        above="Gradient bytes read / written / allocated before the optimizer, in multiples of the gradients:",
    )
    for name, result in results.items():
        if "skipped" not in result:
            found = result["gradient_traffic_before_the_optimizer"]
            counts = [found[f"{library} {way}"] for way in (SCALED, BOTH) for library in (TORCH, CASTWISE)]
            cells = [f"{c['reads']:.2f} / {c['writes']:.2f} / {c['allocated']:.3f}" for c in counts]
            traffic_table.rows.append([name, *cells])
    return [times_table("", results), traffic_table]


def times_table(first: str, results: dict[str, Record], above: str = "") -> Table:
    """Build a table from results of `timings`, by name, with reasons for skipped cases."""
    columns = [first, "step alone", "what", "torch", "castwise", "castwise / torch (quartiles)", "verdict"]
    about = f"{above}Medians, in multiples of the time of `optimizer.step()` alone in the same round:"
    table = Table(columns, above=about, below=left_out(results))
    for name, result in results.items():
        if "skipped" in result:
            continue
        times, bare = result["relative_to_step"], f"{result['median_ms'][f'{TORCH} {BARE}']:,.2f} ms"
        table.rows.append([name, bare, CLIPPED, f"{times[f'{TORCH} {CLIPPED}']['median']:.2f}", "-", "-", "-"])
        for way in (SCALED, BOTH):
            found = result["castwise_to_torch"][way]
            cells = [f"{times[f'{library} {way}']['median']:.2f}" for library in (TORCH, CASTWISE)]
            table.rows.append(["", "", way, *cells, shown(found), found["verdict"]])
    return table


BENCHMARK = Benchmark(
    name="step_cost",
    title="A step's cost",
    about="What scaling and clipping add to an optimizer's step, and the gradient bytes they read and write before it.",
    quick=Plan(
        rounds=Rounds(9, QUICK_S),
        cases=(
            ("124M", "fused AdamW"),
            ("10M", "fused AdamW"),
            ("1000-tiny", "fused AdamW"),
            ("1000-tiny", "foreach SGD"),
        ),
    ),
    full=Plan(
        rounds=Rounds(25),
        cases=(*((size, optimizer) for size in SIZES for optimizer in OPTIMIZERS), ("1.3B", "fused AdamW")),
    ),
    measure=measure,
    tables=tables,
)
