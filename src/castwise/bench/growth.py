"""How the cost of a step grows: with the number of parameters, and with the number of tensors that they are in."""

from __future__ import annotations

from dataclasses import dataclass

from castwise.bench.benchmark import Benchmark, Record, Table
from castwise.bench.machine import why_it_does_not_fit
from castwise.bench.pairing import QUICK_S, Rounds
from castwise.bench.step_cost import Case, Shapes, needed_bytes, times_table, timings

OPTIMIZER = "fused AdamW"
TENSORS = 100  # while parameters grow
PARAMETERS = 1_000_000  # while tensors grow
MILLION = 1_000_000


@dataclass(frozen=True)
class Plan:
    """How often, and the sizes: millions of parameters, numbers of tensors."""

    rounds: Rounds
    millions: tuple[int, ...]
    tensors: tuple[int, ...]


def row(parameters: int, tensors: int, device: str, rounds: Rounds) -> Record:
    """Measure so many parameters in so many equal tensors, or say why not."""
    shapes: Shapes = [(parameters // tensors,)] * tensors
    about: Record = {"parameters": parameters, "tensors": tensors, "optimizer": OPTIMIZER}
    reason = why_it_does_not_fit(needed_bytes(shapes, OPTIMIZER), device)
    return {**about, **({"skipped": reason} if reason else timings(Case(shapes, OPTIMIZER, device), rounds))}


def measure(device: str, plan: Plan) -> Record:
    """Measure all sizes."""
    return {
        "parameters": [row(count * MILLION, TENSORS, device, plan.rounds) for count in plan.millions],
        "tensors": [row(PARAMETERS, count, device, plan.rounds) for count in plan.tensors],
    }


def tables(record: Record) -> list[Table]:
    """Show how it grows with either."""
    return [
        times_table(grows, {f"{result[grows]:,}": result for result in record[grows]}, above)
        for grows, above in (
            ("parameters", f"{OPTIMIZER}, parameters in {TENSORS} tensors. "),
            ("tensors", f"{OPTIMIZER}, tensors that {PARAMETERS:,} parameters are in. "),
        )
    ]


BENCHMARK = Benchmark(
    name="growth",
    title="How a step's cost grows",
    about="The same ways to step as above, on equal tensors.",
    quick=Plan(rounds=Rounds(9, QUICK_S), millions=(1, 10), tensors=(10, 100, 1000)),
    full=Plan(rounds=Rounds(15), millions=(1, 3, 10, 30, 100, 250, 500), tensors=(10, 100, 1000, 10_000)),
    measure=measure,
    tables=tables,
)
