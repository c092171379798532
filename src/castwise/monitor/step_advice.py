"""Advice from the records of steps: which were skipped and why, and what became of the scale."""

from __future__ import annotations

from collections.abc import Iterator

from castwise.monitor.advice import Advice, Measured
from castwise.monitor.number_text import percent, power_of_two, several
from castwise.monitor.run_facts import RunFacts, Skips

# Dynamic probes for the highest scale by one overflow in growth_interval (2000) steps, 0.05% of them. Twenty times that
# is work thrown away: at 1% of skips the scale is too high more often than it pays to find out.
OVERFLOWS_MATTER = 0.01
# A first scale of 2^16 that is 2^16 too high needs 16 halvings: that many skips at the very start are the search for
# the scale, not its failure.
WARM_UP_SKIPS = 16
# As many skips in a row as the scaler waits before it warns: 20 halvings, a millionth of the scale.
STREAK_MATTERS = 20
# Below 1 gradients are made smaller than they are: there is no overflow left that a scale could be to blame for.
COLLAPSED_BELOW = 1.0
NAMES_SHOWN = 3


def lost_weights(facts: RunFacts) -> Iterator[Advice]:
    """Say when the weights stopped being numbers."""
    for skips in _of_cause(facts, "non-finite weights"):
        yield Advice(
            f"Training is lost since step {skips.steps[0]:,}: weights are inf or NaN. Go back to a checkpoint "
            "from before it, and look at what is said of the steps before.",
            _evidence(facts, skips),
            "critical",
        )


def bad_losses(facts: RunFacts) -> Iterator[Advice]:
    """Say that losses were not finite: the scale is innocent of that."""
    skipped: set[int] = set()
    for skips in _of_cause(facts, "non-finite loss"):
        skipped.update(skips.steps)
        yield Advice(
            f"The loss was inf or NaN at {several(len(skips.steps), 'step')}, first at step {skips.steps[0]:,}: the "
            "forward or the data is at fault, the scale is innocent. castwise.diagnose on that batch names the module.",
            _evidence(facts, skips),
            "warning",
        )
    taken = [step for step in facts.nonfinite_losses if step not in skipped]
    if taken:
        yield Advice(
            f"The loss was inf or NaN at {several(len(taken), 'more step' if skipped else 'step')} of other causes or "
            "none, where it was not the reason for a skip.",
            {"first_step": taken[0], "affected_steps": len(taken), "recorded_steps": len(facts.run.steps)},
            "warning",
        )


def overflows(facts: RunFacts) -> Iterator[Advice]:
    """Say how many steps the scale cost, and whether that is the usual price."""
    for skips in _of_cause(facts, "overflow"):
        warm_up = sum(step <= WARM_UP_SKIPS for step in skips.steps)
        share = (len(skips.steps) - warm_up) / len(facts.run.steps)
        if share > OVERFLOWS_MATTER:
            text = (
                f"Overflow of gradients cost {percent(share)} of all steps after the first {WARM_UP_SKIPS}: start "
                "lower, grow more rarely, or keep what overflows in fp32."
            )
        else:
            text = f"{several(len(skips.steps), 'step')} skipped for overflow: the usual price of finding the scale."
        yield Advice(text, _evidence(facts, skips), "warning" if share > OVERFLOWS_MATTER else "note")


def other_skips(facts: RunFacts) -> Iterator[Advice]:
    """Say what is left: skips of other ranks and of no known cause."""
    told = {"non-finite weights", "non-finite loss", "overflow"}
    for skips in facts.skips:
        if skips.cause not in told:
            why = "because another rank's gradients were not finite" if skips.cause == "another rank" else skips.cause
            yield Advice(f"{several(len(skips.steps), 'step')} skipped: {why}.", _evidence(facts, skips), "note")


def collapse(facts: RunFacts) -> Iterator[Advice]:
    """Say that the scale went down without end."""
    streak, begun = facts.longest_streak
    scales = facts.scales or [(0, COLLAPSED_BELOW)]
    _, first = scales[0]
    lowest_step, lowest = min(scales, key=lambda pair: pair[1])
    has_collapsed = lowest < COLLAPSED_BELOW and lowest < first
    if not has_collapsed and streak < STREAK_MATTERS:
        return
    if has_collapsed:
        text = f"The scale collapsed to {power_of_two(lowest)} at step {lowest_step:,}: below 1 it can only hurt."
    else:
        text = f"{streak} steps in a row were skipped from step {begun:,} on."
    yield Advice(
        f"{text} No scale helps against what is not finite before it is scaled: see the causes of the skips.",
        {
            "first_scale": first,
            "lowest_scale": lowest,
            "lowest_scale_step": lowest_step,
            "longest_row_of_skipped_steps": streak,
        },
        "critical",
    )


def diagnoses(facts: RunFacts) -> Iterator[Advice]:
    """Repeat what the monitor found out about failing batches, once for each module, op and cause."""
    grouped: dict[tuple[str, str, str, str], list[int]] = {}
    texts: dict[tuple[str, str, str, str], str] = {}
    for record in facts.run.diagnoses:
        key = (record["cause"], record["phase"], record["module"], record["op"])
        grouped.setdefault(key, []).append(record["step"])
        texts.setdefault(key, f"{record['text']} {record['advice']}".strip())
    for (cause, phase, module, op), steps in grouped.items():
        where = {"cause": cause, "phase": phase, "module": module, "op": op}
        yield Advice(
            texts[cause, phase, module, op],
            {**where, "first_step": steps[0], "diagnosed_steps": len(steps)},
            "warning",
        )


def _of_cause(facts: RunFacts, cause: str) -> list[Skips]:
    return [skips for skips in facts.skips if skips.cause == cause]


def _evidence(facts: RunFacts, skips: Skips) -> dict[str, Measured]:
    numbers: dict[str, Measured] = {
        "skipped_steps": len(skips.steps),
        "recorded_steps": len(facts.run.steps),
        "first_step": skips.steps[0],
        "last_step": skips.steps[-1],
    }
    if skips.parameters:
        names = tuple(f"{name} ({count}x)" for name, count in skips.parameters[:NAMES_SHOWN])
        numbers["parameters_named_most"] = names
    return numbers
