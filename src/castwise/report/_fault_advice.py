"""Advice on steps without a scaler whose loss or gradients were inf or NaN."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from castwise._number_text import several
from castwise.monitor import _causes as causes
from castwise.report._advice import Advice, Measured
from castwise.report._diagnosed import Diagnosed, first_and_last
from castwise.report._run_facts import RunFacts
from castwise.report._saturation import saturated_layer
from castwise.report._skips import Finding, Skips

# Losses of many healthy runs do not fall (GANs, fine-tuning), so large updates have to be seen too. At a usual rate an
# update is a hundredth of the weights or less.
LARGE_UPDATE = 0.3
ENOUGH_LOSSES, FIRST_LOSSES = 50, 10
FALLEN = 0.9
_WHAT = {
    causes.NONFINITE_LOSS: "the loss was inf or NaN",
    causes.NONFINITE_WEIGHTS: "weights were inf or NaN",
    causes.NONFINITE_GRADIENTS: "the loss was finite, its gradients were inf or NaN",
}


def taken_steps(facts: RunFacts) -> Iterator[Advice]:
    """Report steps that were taken with an inf or NaN: the first of them, and whether the weights are lost."""
    if not facts.faults or facts.divergence:
        return
    first = facts.faults[0]
    taken = sorted(step for skips in facts.faults for step in skips.steps)
    last = facts.run.steps[-1].step
    is_lost = any(skips.cause == causes.NONFINITE_WEIGHTS for skips in facts.faults) or taken[-1] == last
    why = f"{_WHAT.get(first.cause, 'gradients were inf or NaN')}{first.where}"
    diagnosed = _diagnosed(facts, first)
    if is_lost:
        since = taken[0]
        text = f"Training is lost from step {since:,} on: {why}, and the step was taken. {_resume(since)}"
    else:
        text = f"{several(len(taken), 'step')} with inf or NaN {_were(taken)} taken, first step {taken[0]:,}: {why}."
    split = facts.run.settings.get("parameters split over ranks")
    is_replayable = split in (None, "by fully_shard", "by parallelize_module")
    if not diagnosed:
        text += " The batch of that step could not be" if is_replayable else " Models that are split so are not"
        text += " replayed."
        about = facts.run.about
        if about is not None and about.device != "cpu" and is_replayable:
            text += " On an accelerator, castwise run --snapshots or --guard replays it."
    evidence: dict[str, Measured] = {
        "first_step": taken[0],
        "affected_steps": len(taken),
        "recorded_steps": len(facts.run.steps),
    }
    yield Advice(
        text,
        evidence,
        "critical" if is_lost else "warning",
        diagnosed,
        _prevention(facts, split is not None, is_replayable),
    )


def _prevention(facts: RunFacts, is_split: bool, is_guarded: bool) -> str:
    scaler = guarding_scaler(facts, "ShardedGradScaler" if is_split else "GradScaler")
    on_ranks = " on all ranks" if is_split else ""
    return f"To skip such steps{on_ranks}: {'castwise run --guard, or in code ' if is_guarded else ''}{scaler}."


def guarding_scaler(facts: RunFacts, name: str = "GradScaler") -> str:
    """Return the code of a scaler that skips steps with an inf or NaN, on the device of the run."""
    about = facts.run.about
    device = "cpu" if about is not None and about.device == "cpu" else "cuda"
    return f'castwise.{name}("{device}", schedule=castwise.schedules.Guard())'


def skipped_gradients(facts: RunFacts) -> Iterator[Advice]:
    """Report steps without a scaler that were skipped because of their gradients."""
    for skips in facts.findings[Finding.BAD_GRADIENTS]:
        evidence: dict[str, Measured] = {
            "first_step": skips.steps[0],
            "skipped_steps": len(skips.steps),
            "recorded_steps": len(facts.run.steps),
        }
        text = (
            f"{several(len(skips.steps), 'step')} skipped{skips.where}, first step {skips.steps[0]:,}: gradients were "
            "inf or NaN, and the loss was finite. The cause is in the backward."
        )
        yield Advice(text, evidence, "warning", _diagnosed(facts, skips))


def nothing_learned(facts: RunFacts) -> Iterator[Advice]:
    """Report a loss that has not fallen after large updates, or behind a layer that passes no gradients on."""
    losses = _losses(facts)
    if facts.faults or facts.divergence or len(losses) < ENOUGH_LOSSES:
        return
    # The first updates may already have raised it.
    first, last = (
        min(losses[0], statistics.median(losses[:FIRST_LOSSES])),
        statistics.median(losses[-len(losses) // 4 :]),
    )
    if last < FALLEN * first:
        return
    large = max(
        ((ratio, step) for step, ratio in facts.typical_updates if LARGE_UPDATE < ratio < math.inf), default=None
    )
    layer = saturated_layer(facts.run.samples)
    if large is None and (layer is None or not layer.stops_gradients):
        return
    rate = facts.run.settings.get("learning rate")
    at_rate = f" (initially {rate:g})" if isinstance(rate, (int, float)) else ""
    evidence: dict[str, Measured] = {"first_loss": first, "last_loss": last}
    text = f"The loss has not fallen: it was {first:.4g} at first and is {last:.4g} in the last quarter."
    if large is not None:
        ratio, step = large
        text += f" The update of step {step:,} was {ratio:.2g} times as large as the weights."
        evidence |= {"largest_update": ratio, "largest_update_step": step}
    if layer is not None:
        text += f" {layer}"
        evidence |= {"saturated_layer": layer.name, "saturated_share": layer.share, "saturated_step": layer.step}
    remedy = "Lower" if large is not None else "Begin again with smaller weights, or lower"
    yield Advice(f"{text} {remedy} the learning rate{at_rate}, or warm it up.", evidence, "warning")


def nothing_to_fix(facts: RunFacts) -> Iterator[Advice]:
    """Report a healthy run."""
    steps, skipped = len(facts.run.steps), facts.skipped
    if not steps or facts.run.mistakes:
        return
    while_searching = f", {skipped:,} of them skipped while the scale was found" if skipped else ""
    yield Advice(
        f"Nothing to fix: {several(steps, 'step')}{while_searching}, and no loss or gradient of a step that was taken "
        "was inf or NaN.",
        {"recorded_steps": steps, "skipped_steps": skipped},
        "good",
    )


def _losses(facts: RunFacts) -> list[float]:
    losses = (record.loss for record in facts.run.steps)
    return [loss for loss in losses if loss is not None and math.isfinite(loss)]


def _diagnosed(facts: RunFacts, skips: Skips) -> tuple[Diagnosed, ...]:
    steps = set(skips.steps)
    return first_and_last([known for known in facts.diagnosed if not steps.isdisjoint(known.steps)])


def _resume(since: int) -> str:
    if since == 1:
        return "It is the first step, so start over."
    return f"Resume from a checkpoint of step {since - 1:,} or earlier."


def _were(steps: list[int]) -> str:
    return "was" if len(steps) == 1 else "were"
