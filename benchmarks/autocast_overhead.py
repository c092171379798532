"""The cost of an autocast region: entering, leaving, and each op inside."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import castwise
from benchmarks.benchmark import Benchmark, Record, Table, shown
from benchmarks.pairing import AGAIN, CASTWISE, QUICK_S, TORCH, Rounds, compare, race, ratio, seconds

LIBRARIES: dict[str, Any] = {TORCH: torch.autocast, CASTWISE: castwise.autocast, AGAIN: torch.autocast}
EMPTY = ("make, enter and leave a region", "enter and leave a region made before", "call a decorated function")
OPS = 50
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Plan:
    """Numbers of rounds and of repetitions per round; calls that contain ops are repeated less often."""

    rounds: Rounds
    repetitions: int


def cases(autocast: Any, device: str) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the timed calls, each with the number of times that it does the named work."""
    ready = autocast(device, dtype=BF16)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).to(device)
    tiny = nn.Sequential(*(nn.Linear(8, 8).requires_grad_(False) for _ in range(OPS))).to(device)
    x, y = torch.randn(8, 256, device=device), torch.randn(4, 8, device=device)

    def make_and_enter() -> None:
        with autocast(device, dtype=BF16):
            pass

    def enter() -> None:
        with ready:
            pass

    @ready  # type: ignore[untyped-decorator]  # from either library
    def decorated() -> None:
        pass

    def many_ops() -> None:
        with ready:
            tiny(y)

    def forward() -> Tensor:
        with autocast(device, dtype=BF16):
            result: Tensor = model(x)
        return result

    def forward_and_backward() -> None:
        forward().float().sum().backward()  # type: ignore[no-untyped-call]  # torch's

    return {
        **{name: (call, 1) for name, call in zip(EMPTY, (make_and_enter, enter, decorated), strict=True)},
        f"a linear layer of 8 x 8, one of {OPS} in a region": (many_ops, OPS),
        "forward of a small MLP": (forward, 1),
        "forward and backward of a small MLP": (forward_and_backward, 1),
    }


def measure(device: str, plan: Plan) -> Record:
    """Measure each case."""
    of_library = {library: cases(autocast, device) for library, autocast in LIBRARIES.items()}
    results: Record = {}
    for name in of_library[TORCH]:
        repetitions = plan.repetitions if name in EMPTY else max(1, plan.repetitions // 25)

        def timed(library: str, name: str = name, repetitions: int = repetitions) -> Callable[[], float]:
            call, parts = of_library[library][name]
            return lambda: seconds(call, device, repetitions) / parts

        taken = race({library: timed(library) for library in LIBRARIES}, plan.rounds, warm_up=3)
        results[name] = {
            "median_us": {library: statistics.median(values) * 1e6 for library, values in taken.items()},
            "ratio": compare(taken[CASTWISE], taken[TORCH], ratio(taken[AGAIN], taken[TORCH])),
        }
    return {"results": results}


def tables(record: Record) -> list[Table]:
    """Return a table with one row per case."""
    table = Table(["", "torch.amp", "castwise", "castwise / torch.amp (quartiles)", "verdict"])
    for name, result in record["results"].items():
        times = [f"{result['median_us'][library]:,.2f} us" for library in (TORCH, CASTWISE)]
        table.rows.append([name, *times, shown(result["ratio"]), result["ratio"]["verdict"]])
    return [table]


BENCHMARK = Benchmark(
    name="autocast_overhead",
    title="A region's cost",
    about="The cost of entering and leaving a region in bf16, and of a tiny op inside it, which is mostly overhead.",
    quick=Plan(rounds=Rounds(15, QUICK_S), repetitions=1000),
    full=Plan(rounds=Rounds(60), repetitions=2000),
    measure=measure,
    tables=tables,
)
