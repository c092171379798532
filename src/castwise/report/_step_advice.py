"""Advice from step records: which steps were skipped and why, and how the scale moved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from castwise._number_text import percent, power_of_two, several
from castwise.monitor import _causes as causes
from castwise.monitor._records import LEFT_OUT
from castwise.report._advice import Advice, Measured, Severity
from castwise.report._diagnosed import Diagnosed, first_and_last
from castwise.report._fault_advice import guarding_scaler
from castwise.report._range_advice import innermost
from castwise.report._ranks import on_ranks
from castwise.report._run_facts import RunFacts, shown
from castwise.report._skips import COLLAPSED_BELOW, STREAK_MATTERS, Finding, Skips, by_cause, is_endless

# Dynamic probes the scale with at most one overflow per growth_interval (2000) steps, 0.05% of them. At twenty times
# that, 1%, the skipped work is worth more than the higher scale.
OVERFLOWS_MATTER = 0.01
# A scale that backs off now and then is at its limit, where it should be, also in a short run.
LATE_OVERFLOWS_MATTER = 5
# An initial scale of 2^16 that is too high by 2^16 needs 16 halvings: that many skips at the start are a normal search.
WARM_UP_SKIPS = 16
NAMES_SHOWN = 3


def divergence(facts: RunFacts) -> Iterator[Advice]:
    """Report numbers that grew by orders of magnitude before steps failed: the format is not at fault."""
    if not facts.divergence:
        return
    evidence: dict[str, Measured] = {}
    for growth in facts.divergence:
        name = growth.name.replace(" ", "_")
        evidence |= {f"{name}_before": growth.first[1], f"{name}_after": growth.last[1]}
    growth = facts.divergence[0]
    first, last = growth.first[0], growth.last[0]
    evidence |= {"growth_steps": last - first, "failed_steps": growth.failed, "recorded_steps": len(facts.run.steps)}
    rate, at_rate = facts.run.settings.get("learning rate"), ""
    if isinstance(rate, (int, float)):
        evidence["learning_rate"], at_rate = rate, f" (initially {rate:g})"
    found = tuple(each.without_remedy() for each in first_and_last(facts.diagnosed_in_divergence))
    overflowed = f" As a consequence, this overflowed first{' and last' * (len(found) > 1)}:" if found else ""
    yield Advice(
        f"Training diverged: {' and '.join(map(str, facts.divergence))}, and {several(growth.failed, 'step')} failed "
        f"from step {growth.since:,} on. Lower the learning rate{at_rate}, warm it up, or clip the gradient "
        f"norm.{overflowed}",
        evidence,
        "critical",
        found,
    )


def lost_weights(facts: RunFacts) -> Iterator[Advice]:
    """Report when weights became inf or NaN."""
    for skips in facts.findings[Finding.LOST_WEIGHTS]:
        yield Advice(
            f"Training is lost from step {skips.steps[0]:,} on: weights are inf or NaN{skips.where}. Resume from an "
            "earlier checkpoint, and see the findings for the steps before.",
            _evidence(facts, skips),
            "critical",
            _diagnosed(facts, causes.NONFINITE_WEIGHTS),
        )


def poisoned_weights(facts: RunFacts) -> Iterator[Advice]:
    """Report steps that were taken with non-finite gradients; without a scaler nothing skips them."""
    if not facts.poisoned or facts.faults or facts.findings[Finding.LOST_WEIGHTS]:
        return
    first = facts.poisoned[0]
    later = [sample.step for sample in facts.run.samples if sample.step > first]
    before = {sample.step for sample in facts.run.samples if sample.step < first} - facts.skipped_steps
    last_finite = max(before, default=0)
    is_lost = set(later) <= set(facts.poisoned)
    guard = guarding_scaler(facts)
    yield Advice(
        f"Training is lost: {_since(last_finite, first)} Continue with {guard}, which skips such steps."
        if is_lost
        else f"A step was taken with inf or NaN gradients, first at step {first:,}. {guard} skips such steps.",
        {
            "first_step": first,
            "last_finite_sample_step": last_finite,
            "nonfinite_samples": len(facts.poisoned),
            "taken_samples": len(facts.run.samples),
        },
        "critical" if is_lost else "warning",
    )


def _since(last_finite: int, first: int) -> str:
    """Describe when gradients stopped being finite, as far as samples show, and which checkpoint is safe."""
    if not last_finite:
        return (
            f"gradients were inf or NaN at step {first:,}, the first sampled step, and steps were taken. "
            "No checkpoint of this run is known to be good: resume from one made before this run, or start over."
        )
    if first == last_finite + 1:
        since = f"gradients became inf or NaN at step {first:,}"
    else:
        since = f"gradients became inf or NaN between step {last_finite:,} (the last finite sample) and step {first:,}"
    return (
        f"{since}, and steps were taken. Resume from a checkpoint of step {last_finite:,} or earlier: a later one "
        "may contain inf or NaN."
    )


def bad_losses(facts: RunFacts) -> Iterator[Advice]:
    """Report non-finite losses, which are not due to the scale."""
    for skips in facts.findings[Finding.BAD_LOSSES]:
        found = _diagnosed(facts, causes.NONFINITE_LOSS)
        evidence = _evidence(facts, skips)
        bad = set(skips.steps)
        broken = innermost([each for each in facts.activations.values() if not bad.isdisjoint(each.nonfinite_steps)])
        if broken and not found:
            evidence["first_module_not_finite"] = shown(broken[0].module)
        yield Advice(
            f"The loss was inf or NaN{skips.where} at {several(len(skips.steps), 'step')}, first at step "
            f"{skips.steps[0]:,}: the cause is the forward or the data, not the scale."
            + ("" if found else " castwise.diagnose on that batch names the module."),
            evidence,
            "warning",
            found,
        )
    since = facts.divergence[0].since if facts.divergence else math.inf
    taken = [step for step in facts.nonfinite_losses if step not in facts.skipped_steps and step < since]
    if taken and not facts.faults:
        yield Advice(
            f"The loss was inf or NaN at {several(len(taken), 'step')} that nothing skipped, first at step "
            f"{taken[0]:,}: the cause is the forward or the data.",
            {"first_step": taken[0], "affected_steps": len(taken), "recorded_steps": len(facts.run.steps)},
            "warning",
        )


def overflows(facts: RunFacts) -> Iterator[Advice]:
    """Report how many steps were lost to overflow, and whether that is normal."""
    unfinished = {record.step for record in facts.skips_to_the_end}
    for skips in facts.findings[Finding.OVERFLOWS]:
        found = _diagnosed(facts, causes.OVERFLOW)
        late = sum(step > WARM_UP_SKIPS for step in skips.steps)
        share = late / len(facts.run.steps)
        skipped = f"{several(len(skips.steps), 'step')} skipped for overflow{skips.where}"
        severity: Severity = "note"
        if any(each.advice and not each.is_due_to_scale for each in found):
            text, severity = f"{skipped}, and a lower scale does not help.", "warning"
        elif share > OVERFLOWS_MATTER and late >= LATE_OVERFLOWS_MATTER:
            text, severity = _cost_of_overflows(facts, skips.steps, share), "warning"
        elif unfinished.issuperset(skips.steps):
            text = f"{skipped}, and none was taken since: the right scale is not known yet."
        else:
            text = f"{skipped}: the normal cost of finding the scale."
            found = tuple(each.without_remedy() for each in found)  # the scaler has already applied it
        yield Advice(text, _evidence(facts, skips), severity, found)


def _cost_of_overflows(facts: RunFacts, skipped: Sequence[int], share: float) -> str:
    records = facts.run.steps
    if list(skipped) == [record.step for record in records[: len(skipped)]]:
        scale = records[len(skipped)].scale
        fits = math.nan if scale is None else scale
        return (
            f"The first {several(len(skipped), 'step')} were skipped for overflow, until the scale had dropped to "
            f"{power_of_two(fits)}: start with a lower scale."
        )
    return (
        f"Gradient overflow cost {percent(share)} of all steps after the first {WARM_UP_SKIPS}: start with a lower "
        "scale, grow it less often, or keep the overflowing modules in fp32."
    )


def other_skips(facts: RunFacts) -> Iterator[Advice]:
    """Report all other skips: those due to another rank and those of unknown cause."""
    for skips in facts.findings[Finding.OTHER]:
        is_elsewhere = skips.cause == causes.ANOTHER_RANK
        why = "because another rank's gradients were not finite" if is_elsewhere else skips.cause
        text = f"{several(len(skips.steps), 'step')} skipped{skips.where}: {why}."
        yield Advice(text, _evidence(facts, skips), "note", _diagnosed(facts, skips.cause))


def collapse(facts: RunFacts) -> Iterator[Advice]:
    """Report that the scale collapsed, or that every recent step was skipped."""
    if not facts.findings[Finding.ENDLESS_ROW]:
        if not (facts.divergence or is_endless(facts.run.steps)):
            yield from _long_rows(facts)
        return
    skips = facts.skips_to_the_end
    met = {record.why_skipped for record in skips}
    found = _diagnosed(facts, *met)
    scales = [record.scale for record in skips if record.scale is not None]
    lowest = min((scale for scale in scales if math.isfinite(scale)), default=COLLAPSED_BELOW)
    first = facts.scales[0][1] if facts.scales else lowest
    begun, last = skips[0].step, skips[-1].step
    no_scale = "No scale helps when numbers are inf or NaN before scaling"
    if met == {causes.NONFINITE_LOSS}:
        no_scale += f": the loss was inf or NaN{on_ranks(skips)}, so the cause is the forward or the data."
    else:
        no_scale += "." if found else ": see the causes of the skips."
    if lowest < COLLAPSED_BELOW and lowest < first:
        text = f"The scale collapsed to {power_of_two(lowest)} at step {last:,}; below 1 it can only hurt. {no_scale}"
    elif met == {causes.OVERFLOW} and lowest > COLLAPSED_BELOW:
        text = (
            f"{len(skips)} steps in a row were skipped for overflow from step {begun:,} on, down to a scale of "
            f"{power_of_two(lowest)}: start with a much lower scale. If steps are also skipped below 1, no scale helps."
        )
    else:
        text = f"{len(skips)} steps in a row were skipped from step {begun:,} on. {no_scale}"
    if found and found[0].advice and not found[0].is_due_to_scale:
        text = f"{found[0].sentences} {text}"
    evidence: dict[str, Measured] = {
        "first_scale": first,
        "lowest_scale": lowest,
        "longest_row_of_skipped_steps": len(skips),
        "row_begins_at_step": begun,
    }
    if not met <= {causes.NONFINITE_LOSS, causes.OVERFLOW}:  # the text does not name them
        evidence["causes"] = tuple(f"{group.cause} ({len(group.steps)}x)" for group in by_cause(skips))
    yield Advice(text, evidence, "critical", found)


def _long_rows(facts: RunFacts) -> Iterator[Advice]:
    """Report a long run of skips that ended; `overflows` reports runs of overflows."""
    streak, begun = facts.longest_streak
    overflowed = {step for skips in facts.findings[Finding.OVERFLOWS] for step in skips.steps}
    if streak >= STREAK_MATTERS and not overflowed.issuperset(range(begun, begun + streak)):
        yield Advice(
            f"{streak} steps in a row were skipped from step {begun:,} on: see the causes of the skips.",
            {"longest_row_of_skipped_steps": streak, "first_step": begun},
            "warning",
        )
    lowest_step, lowest = min(facts.scales, key=lambda pair: pair[1], default=(0, COLLAPSED_BELOW))
    if lowest < COLLAPSED_BELOW and lowest < facts.scales[0][1]:
        is_overflow = facts.skips and facts.skips[0].cause == causes.OVERFLOW
        yield Advice(
            f"The scale fell to {power_of_two(lowest)} at step {lowest_step:,}, and steps were taken after that: "
            + (
                "gradients are too large for fp16 even unscaled, or the backward occasionally produces inf or NaN. "
                "Divide the loss, for example by using a mean instead of a sum, or use bf16."
                if is_overflow
                else "see the causes of the skips."
            ),
            {"first_scale": facts.scales[0][1], "lowest_scale": lowest, "lowest_scale_step": lowest_step},
            "warning",
        )


def other_diagnoses(facts: RunFacts) -> Iterator[Advice]:
    """Report diagnoses of steps that have no record, because the script left them out or the process was killed."""
    if facts.divergence:
        return
    recorded = {skips.cause for skips in [*facts.skips, *facts.faults]}
    for cause in dict.fromkeys(each.cause for each in facts.diagnosed if each.cause not in recorded):
        found = [each for each in facts.diagnosed if each.cause == cause]
        count = sum(len(each.steps) for each in found)
        evidence: dict[str, Measured] = {"module": shown(found[0].module), "op": found[0].op, "diagnosed_steps": count}
        text = f"Steps were skipped: {cause}."
        if cause == LEFT_OUT:
            text = f"The script left out {several(count, 'step')} that had an inf or NaN."
        yield Advice(text, evidence, "warning", first_and_last(found))


def _diagnosed(facts: RunFacts, *causes: str) -> tuple[Diagnosed, ...]:
    return first_and_last([each for each in facts.diagnosed_before_divergence if each.cause in causes])


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
