"""Measure how often `compare` names the faulty module first, and how close `tune` comes to the best policy.

    python -m benchmarks.planted_precision [--cases 200] [--models 100]

The tests run a few of the same cases. Writes benchmarks/results/planted_precision-cpu.json and the table in
benchmarks/README.md. It contains no times.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from typing import Any

from tests.comparison import planted
from tests.tuning import small_models

import castwise
from benchmarks import recording
from benchmarks.recording import headline
from castwise.comparison import ModuleDrift

NAME = "planted_precision-cpu"
NEAR = 1.05
LAYERS = (3, 4, 5, 6, 7)


def _relative_error(module: ModuleDrift) -> float:
    found = module.introduced
    return -1.0 if found is None else math.inf if math.isnan(found.relative_rms) else found.relative_rms


def faults(cases: int) -> dict[str, dict[str, int]]:
    """Return, by fault, how many were planted, and how many are ranked first by effect and by relative error."""
    counts: dict[str, Counter[str]] = {}
    for seed in range(cases):
        case = planted.case(seed)
        drift = castwise.compare(case.model, [case.batch], {"p": case.policy}, loss=case.loss, gradients=False)["p"]
        of_fault = counts.setdefault(planted.FAULTS[seed % len(planted.FAULTS)].__name__, Counter())
        by_error = max(drift.modules, key=_relative_error)
        of_fault["planted"] += 1
        of_fault["by effect"] += planted.is_named(case.culprit, drift.modules[0].name)
        of_fault["by relative error"] += planted.is_named(case.culprit, by_error.name)
    return {name: dict(found) for name, found in counts.items()}


def optima(models: int) -> dict[str, Any]:
    """Return for how many models the tuned policy costs at most 5% more than the cheapest policy."""
    near = within = 0
    ratios = []
    for seed in range(models):
        case = small_models.case(seed, LAYERS)
        best = castwise.tune(case.model, case.batches, loss=case.loss, tolerance=case.tolerance)
        cheapest = small_models.cheapest(case)
        ratios.append(best.cost / cheapest)
        within += best.is_within_tolerance
        near += best.is_within_tolerance and best.cost <= NEAR * cheapest
    return {"models": models, "within tolerance": within, "near": near, "largest ratio": max(ratios)}


def table(record: dict[str, Any]) -> str:
    """Return a table with a row for each fault, and a sentence about the optima."""
    rows = [
        f"| {name.replace('_', ' ')} | {found['planted']} | {found['by effect']} | {found['by relative error']} |"
        for name, found in record["faults"].items()
    ]
    optima = record["optima"]
    return "\n".join(
        [
            headline(record["machine"]),
            "",
            "| fault | planted | named first by effect | by relative error |",
            "|---|---|---|---|",
            *rows,
            "",
            f"Of {optima['models']} models of {LAYERS[0]} to {LAYERS[-1]} layers, with three formats, "
            f"{optima['within tolerance']} had a tuned policy within the tolerance, and {optima['near']} had one that "
            "cost at most 5% more than the cheapest policy within the tolerance.",
        ]
    )


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--models", type=int, default=100)
    options = parser.parse_args()
    record = {"machine": recording.machine(), "faults": faults(options.cases), "optima": optima(options.models)}
    recording.write(NAME, record, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
