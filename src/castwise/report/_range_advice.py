"""Advice from sampled ranges: whether fp16 suffices, at which scale, and how many updates bf16 weights would lose."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from castwise._number_text import bits, joined, percent, power_of_two, several
from castwise.monitor import _causes as causes
from castwise.report._advice import Advice, Measured
from castwise.report._run_facts import Ranges, RunFacts, named, shown
from castwise.report._scale_window import FLUSH_MATTERS, Fit, flush_at
from castwise.report._underflow import MOSTLY

# Fewer samples do not show how ranges change.
ENOUGH_SAMPLES = 3
# A loss of a quarter is no longer confined to the tail of the distribution.
FLUSH_IS_CRITICAL = 0.25
# Outputs are not scaled, so nothing adapts when they grow; unseen batches can easily be twice as large.
ACTIVATION_HEADROOM_BITS = 1.0
# Losing one update in twenty resembles a 5% lower learning rate, applied unevenly: still worth tuning for.
LOST_UPDATES_MATTER = 0.05
# The report's table has the full list.
MODULES_SHOWN = 3


def scale_fit(facts: RunFacts, in_trouble: bool) -> Iterator[Advice]:
    """Report the scales at which gradients fit fp16, and how far to move a scale that is not one of them.

    Args:
        facts: The run's facts.
        in_trouble: Whether other advice rules out calling fp16 safe.
    """
    gradients = facts.gradients.values()
    fit = Fit.of(gradients)
    if fit is None or not _enough(facts):
        return
    if fit.lowest > fit.highest:
        if not fit.is_guess and not _losing(facts):  # otherwise `underflow` reports it
            yield _no_scale_fits(facts, fit)
        return
    is_used = facts.computes_in == "fp16" and facts.is_scaled and facts.scales[-1][1] > 0
    used = facts.scales[-1][1] if is_used else None
    exponent = fit.highest if used is None else fit.nearest(used)
    evidence = _evidence(facts, fit, exponent)
    window = _window(fit)
    if used is None and facts.has_cut_off:
        if not fit.is_guess:
            window = f"nothing overflows up to 2^{fit.highest}"
        text = f"The loss was not scaled, and some gradients became zero in fp16. Scale the loss: {window}."
        yield Advice(text, evidence, "warning")
        return
    if used is None:
        why = "The run computed in bf16" if facts.computes_in == "bf16" else "The loss was not scaled"
        yield Advice(f"{why}. In fp16, {window}.", evidence, "note")
        return
    off = math.log2(used) - exponent
    evidence = {"last_scale": used, **evidence}
    if off >= 1:
        text = f"The scale could be lowered by {bits(off)} bits to 2^{exponent}, for more headroom: {window}."
        yield Advice(text, evidence, "note")
    elif off < 0:
        text = f"The scale should be raised by {bits(-off)} to {bits(fit.highest - math.log2(used))} bits: {window}."
        yield Advice(text, evidence, "note")
    elif coarse := [ranges for ranges in gradients if ranges.mean_subnormal >= MOSTLY or ranges.flush >= FLUSH_MATTERS]:
        yield _coarse(max(coarse, key=lambda ranges: ranges.mean_subnormal), used, fit)
    elif not in_trouble:
        yield Advice(f"fp16 is safe here at scale {power_of_two(used)}: {window}.", evidence, "good")
    else:
        yield Advice(f"The scale of {power_of_two(used)} suits the gradients: {window}.", evidence, "good")


def _evidence(facts: RunFacts, fit: Fit, exponent: int) -> dict[str, Measured]:
    worst = max(facts.gradients.values(), key=lambda ranges: flush_at(ranges, exponent))
    return {
        "headroom_bits": fit.headroom_bits(exponent),
        "largest_gradient_in": shown(fit.largest.module),
        "most_flushed_share": flush_at(worst, exponent),
        "most_flushed_in": shown(worst.module),
        "lowest_safe_scale": 2.0**fit.lowest,
        "highest_safe_scale": 2.0**fit.highest,
        "skipped_steps": facts.skipped,
        "recorded_steps": len(facts.run.steps),
        "finite_samples": fit.largest.samples,
    }


def _window(fit: Fit) -> str:
    """Return in words at which scales gradients fit."""
    if not fit.is_guess:
        return f"gradients fit from 2^{fit.lowest} to 2^{fit.highest}"
    needed = fit.lowest - 1
    return f"{named(fit.neediest.module)} needs more than 2^{needed}, and nothing overflows up to 2^{fit.highest}"


def _coarse(ranges: Ranges, used: float, fit: Fit) -> Advice:
    can_rise = math.log2(used) < fit.highest
    return Advice(
        f"Gradients of {named(ranges.module)} are at the lower end of fp16 at scale {power_of_two(used)}, where they "
        f"lose bits or become zero: "
        f"{f'raise the scale (nothing overflows up to 2^{fit.highest})' if can_rise else 'use bf16'}.",
        {
            "mean_subnormal_share": ranges.mean_subnormal,
            "worst_flushed_share": ranges.flush,
            "worst_step": ranges.flush_step,
            "last_scale": used,
            "highest_safe_scale": 2.0**fit.highest,
            "finite_samples": ranges.samples,
        },
        "warning" if ranges.mean_subnormal >= MOSTLY else "note",
    )


def _no_scale_fits(facts: RunFacts, fit: Fit) -> Advice:
    evidence: dict[str, Measured] = {
        "largest_gradient": fit.largest.largest,
        "largest_gradient_step": fit.largest.largest_step,
        "flushed_there_share": max(flush_at(fit.neediest, fit.highest), fit.neediest.cut_off_share),
        "lowest_safe_scale": 2.0**fit.lowest,
        "highest_safe_scale": 2.0**fit.highest,
        "finite_samples": fit.largest.samples,
    }
    needs = f"{named(fit.neediest.module)} needs at least 2^{fit.lowest}"
    allows = f"{named(fit.largest.module)} allows at most 2^{fit.highest}"
    if facts.computes_in != "fp16":
        return Advice(f"In fp16, no scale would fit all gradients: {needs}, but {allows}.", evidence, "note")
    text = f"No scale fits all gradients into fp16: {needs}, but {allows}. Use bf16, or keep one of them in fp32."
    return Advice(text, evidence, "warning")


def underflow(facts: RunFacts) -> Iterator[Advice]:
    """Name modules whose gradients round to zero, and the remedy."""
    losing = _losing(facts)
    fit = Fit.of(facts.gradients.values())
    if losing and fit is not None:
        yield _underflow_of(losing, fit)


def _losing(facts: RunFacts) -> list[Ranges]:
    """Return the modules that lose gradients in fp16, if the run computed in it, the worst first."""
    if facts.computes_in != "fp16" or not _enough(facts):
        return []
    losing = [
        ranges
        for ranges in facts.gradients.values()
        if ranges.mean_flush >= FLUSH_MATTERS or ranges.flush >= FLUSH_IS_CRITICAL
    ]
    return sorted(losing, key=lambda ranges: -ranges.mean_flush)


def _underflow_of(losing: Sequence[Ranges], fit: Fit) -> Advice:
    worst, *others = losing
    then = max(flush_at(ranges, fit.highest) for ranges in losing)
    share = _lost_share(worst)
    evidence: dict[str, Measured] = {
        "mean_flushed_share": worst.mean_flush,
        "worst_flushed_share": worst.flush,
        "worst_step": worst.flush_step,
        "mean_subnormal_share": worst.mean_subnormal,
        "highest_safe_scale": 2.0**fit.highest,
        "finite_samples": worst.samples,
        **({"modules_like_it": len(others)} if others else {}),
    }
    if worst.cut_off_share >= worst.mean_flush / 2:
        up_to = "up to "
        why = " (they are zero, and the others end at fp16's smallest number)"
        if worst.vanished_samples:
            evidence["vanished_samples"] = worst.vanished_samples
            found = f"{worst.vanished_samples:,} of {several(worst.samples, 'sample')}"
            why = f" (all of them were zero in {found}, while those of other modules were not)"
        can_rise = math.log2(worst.scale) < fit.highest
        remedy = f"use bf16{f' or a higher scale (nothing overflows up to 2^{fit.highest})' if can_rise else ''}"
    else:
        evidence["flushed_at_highest_safe_scale_share"] = then
        up_to, why = "", f" ({percent(worst.flush)} at step {worst.flush_step:,})"
        if then < FLUSH_MATTERS:
            remedy = f"use bf16 or a higher scale; 2^{fit.highest} is safe and loses {percent(then)}"
        else:
            remedy = (
                f"use bf16, because even the highest safe scale, 2^{fit.highest}, loses {percent(then)}; "
                f"{named(fit.largest.module)} allows no higher one"
            )
    like_it = [f"{named(ranges.module)} ({percent(_lost_share(ranges))})" for ranges in others]
    return Advice(
        f"{named(worst.module, begins=True)} loses {up_to}{percent(share)} of its gradients to underflow in "
        f"fp16{why}{f', and so do {_listed(like_it)}' if like_it else ''}: {remedy}.",
        evidence,
        "critical" if any(ranges.mean_flush >= FLUSH_IS_CRITICAL for ranges in losing) else "warning",
    )


def _lost_share(ranges: Ranges) -> float:
    return ranges.flush if ranges.vanished_samples else ranges.mean_flush


def _listed(names: Sequence[str]) -> str:
    """Return names in words, or if there are more than are shown, the first and the number of the others."""
    if len(names) > MODULES_SHOWN:
        names = [*names[: MODULES_SHOWN - 1], several(len(names) - MODULES_SHOWN + 1, "more module")]
    return joined(names)


def outputs(facts: RunFacts) -> Iterator[Advice]:
    """Name the innermost modules whose outputs are near fp16's largest number, with the rule that fixes each."""
    near = innermost([each for each in facts.activations.values() if each.headroom_bits < ACTIVATION_HEADROOM_BITS])
    if near:
        yield _near_the_limit(facts, sorted(near, key=lambda ranges: ranges.headroom_bits))
    since = _diagnosed_fault(facts)
    broken = innermost(
        [
            each
            for each in facts.activations.values()
            # Skipped steps are reported by cause.
            if any(step < since and step not in facts.skipped_steps for step in each.nonfinite_steps)
        ]
    )
    for ranges in broken[:1]:
        yield Advice(
            f"Outputs of {named(ranges.module)} were inf or NaN. It is the first such module in model "
            "order; if weights were inf or NaN by then, the fault is in an earlier step.",
            {
                "nonfinite_samples": ranges.nonfinite_samples,
                "finite_samples": ranges.samples,
                "largest_finite_output": ranges.largest,
                "modules_like_it": len(broken) - 1,
            },
            "warning",
        )


def _near_the_limit(facts: RunFacts, near: Sequence[Ranges]) -> Advice:
    over = [ranges for ranges in near if ranges.headroom_bits < 0]
    words = ("too large for", "near the limit of")
    limit = words[0] if len(over) == len(near) else f"{words[0]} or {words[1]}" if over else words[1]
    names = _listed([named(ranges.module) for ranges in near])
    rules = ", ".join(f'"{ranges.module}": "float32"' for ranges in near[:MODULES_SHOWN])
    it = "it" if len(near) == 1 else "them"
    alike = ", and others alike" if len(near) > MODULES_SHOWN else ""
    rule = f'keep {it} in fp32 with Policy(compute="float16", modules={{{rules}}}){alike}'
    is_used = facts.computes_in == "fp16"
    text = f"Outputs of {names} are {limit} fp16: {rule}, or use bf16."
    if not is_used:
        text = f"Outputs of {names} would be {limit} fp16. To use fp16, {rule}."
    worst = near[0]
    evidence: dict[str, Measured] = {
        "largest_output": worst.largest,
        "largest_output_step": worst.largest_step,
        "headroom_bits": worst.headroom_bits,
        "finite_samples": worst.samples,
        **({"modules_like_it": len(near) - 1} if len(near) > 1 else {}),
    }
    return Advice(text, evidence, "warning" if is_used else "note")


def kind_of(advice: Advice, outputs_of: Collection[str]) -> str:
    """Return "gradients" or "outputs", whichever a piece of advice is about; "" if it is about neither.

    Args:
        advice: Advice of any rule.
        outputs_of: Names of the modules whose outputs were sampled.
    """
    named_by = [found.module for found in advice.diagnosed if found.cause == causes.NONFINITE_LOSS]
    if any(module and module in outputs_of for module in named_by):  # "" is also the loss and the data
        return "outputs"
    if any(name.startswith(("largest_output", "largest_finite_output")) for name in advice.evidence):
        return "outputs"
    is_of_gradients = any("flushed" in name or name.startswith("largest_gradient") for name in advice.evidence)
    return "gradients" if is_of_gradients else ""


def _diagnosed_fault(facts: RunFacts) -> float:
    """Return the first step that was taken with an inf or NaN and is diagnosed; later ones are its consequence."""
    taken = {step for skips in facts.faults for step in skips.steps}
    return min((step for found in facts.diagnosed for step in found.steps if step in taken), default=math.inf)


def innermost(modules: list[Ranges]) -> list[Ranges]:
    """Drop modules that contain another of the modules, because a parent often returns what its child returns."""
    return [each for each in modules if not any(_inside(other.module, each.module) for other in modules)]


def _inside(module: str, other: str) -> bool:
    return module != other and (not other or module.startswith(f"{other}."))


def bf16_weights(facts: RunFacts) -> Iterator[Advice]:
    """Report the updates that bf16 weights without fp32 master weights would lose, unless some weights are 16-bit."""
    lost, sizes = facts.lost_in_bf16, facts.sizes
    if not lost or not _enough(facts) or facts.has_16_bit_weights:
        return
    weights = {name: sizes.get(name, 1) for name in lost}
    mean = sum(lost[name] * size for name, size in weights.items()) / sum(weights.values())
    worst = max(lost, key=lambda name: lost[name])
    matters = mean >= LOST_UPDATES_MATTER
    yield Advice(
        (
            f"Keep the weights in fp32: bf16 weights would lose {percent(mean)} of updates. To save memory without "
            "such losses, use optimizer = castwise.MasterWeights(optimizer, model)."
            if matters
            else f"bf16 weights would lose {percent(mean)} of updates: pure bf16 weights are fine here."
        ),
        {
            "lost_updates_share": mean,
            "worst_parameter": worst,
            "lost_there_share": lost[worst],
            "parameters": len(lost),
            "taken_samples": len(facts.run.samples),
        },
        "note",
    )


def too_little(facts: RunFacts) -> Iterator[Advice]:
    """Report that there are too few finite samples to judge a format."""
    finite, taken, steps = facts.finite_samples, len(facts.run.samples), len(facts.run.steps)
    if _enough(facts):
        return
    if taken >= ENOUGH_SAMPLES:
        text = (
            f"No format can be judged: of {taken:,} samples, {finite or 'none'} had only finite gradients, and "
            f"{ENOUGH_SAMPLES} such samples are needed. First find where inf and NaN come from."
        )
    else:
        text = (
            f"Too little was recorded to judge a format: {several(finite, 'finite sample')} in "
            f"{several(steps, 'step')}, but {ENOUGH_SAMPLES} are needed. Train longer, or give Monitor "
            "a smaller `every`."
        )
    yield Advice(text, {"finite_samples": finite, "taken_samples": taken, "recorded_steps": steps}, "note")


def _enough(facts: RunFacts) -> bool:
    return facts.finite_samples >= ENOUGH_SAMPLES
