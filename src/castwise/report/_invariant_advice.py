"""Advice on invariants that did not hold."""

from __future__ import annotations

from collections.abc import Iterator

from castwise.monitor._recorded_run import distinct_invariants
from castwise.report._advice import Advice, Measured
from castwise.report._run_facts import RunFacts


def broken_invariants(facts: RunFacts) -> Iterator[Advice]:
    """Report each invariant that did not hold, with its remedy."""
    for record in distinct_invariants([facts.run]):
        evidence: dict[str, Measured] = {"invariant": record.name, "first_step": record.step}
        if record.parameters:
            evidence["broken_for"] = record.parameters
        yield Advice(record.with_remedy, evidence, "note" if record.severity == "note" else "warning")
