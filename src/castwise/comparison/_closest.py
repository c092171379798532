"""`closest`: which of several policies is closest to the reference, and why, in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from castwise._number_text import joined, percent
from castwise.comparison._errors import FP32_EPS

if TYPE_CHECKING:
    from castwise.comparison._drift import Drift, PolicyDrift

# Errors of the loss that differ by less are equally large: they are means over few batches.
_SAME = 1.2


def closest(drift: Drift) -> tuple[str, str]:
    """Return which policies are closest to the reference by their losses, and why; ("", "") for fewer than two.

    The reason is in units of the loss, with the errors of the gradients if they are known. A policy that computes what
    the reference computes, such as float32 beside it, is no candidate.
    """
    known = [each for each in drift if not each.failure and math.isfinite(each.summary.loss_error)]
    same = [each.name for each in known if _is_reference(each)]
    known = sorted((each for each in known if each.name not in same), key=lambda each: each.summary.loss_error)
    if len(known) + len(same) < 2:
        return "", ""
    compute = "computes" if len(same) == 1 else "compute"
    apart = f"{joined(same)} {compute} the same as {_reference(drift)}" if same else ""
    if not known:
        return apart, "losses and gradients are equal."
    loss = f"{known[0].summary.reference_loss:.4g}"
    if len(known) == 1:
        title = f"{known[0].name} changes the loss by {_losses(known)} of {loss}"
        return title, f"{_gradients(known, 'its gradients are off by ', '; ')}{apart}."
    limit = _limit(drift, known[0].summary.loss_error)
    best = [each for each in known if each.summary.loss_error <= limit]
    others = known[len(best) :]
    is_one = len(best) == 1
    how = "is closest" if is_one else "are closest" if others else "are as close as each other"
    title = f"{joined([each.name for each in best])} {how} to {_reference(drift)}"
    subject, whose = ("its loss is", "its") if is_one else ("their losses are", "their")
    reason = f"{subject} off by {_losses(best)} of {loss}{_gradients(best, f' and {whose} gradients by ')}"
    if others:
        next_one = others[:1]
        reason += f"; {others[0].name}, the next, is off by {_losses(next_one)}{_gradients(next_one, ' and ')}"
    return title, f"{reason}{_other_order(best, others)}{f'; {apart}' if apart else ''}."


def _is_reference(drift: PolicyDrift) -> bool:
    """Return True if all numbers of a policy are known to be those of the reference."""
    outputs = drift.summary.output_errors
    return outputs is not None and not (outputs.relative_rms or drift.summary.loss_error or gradient_error(drift))


def _reference(drift: Drift) -> str:
    return "the reference policy" if drift.reference == "policy" else drift.reference


def _limit(drift: Drift, error: float) -> float:
    """Return the largest error of a loss that cannot be distinguished from the smallest one."""
    noise = math.nan if drift.noise is None else drift.noise.summary.loss_error
    resolution = max(_resolution(next(iter(drift))), noise if math.isfinite(noise) else 0.0)
    return max(_SAME * error, error + resolution)


def _resolution(drift: PolicyDrift) -> float:
    """Return the distance between losses in fp32, in which they are computed."""
    return FP32_EPS * abs(drift.summary.reference_loss)


def _losses(policies: Sequence[PolicyDrift]) -> str:
    least = _resolution(policies[0])
    errors = (policies[0].summary.loss_error, policies[-1].summary.loss_error)
    texts = (f"less than {least:.1g}" if error < least else f"{error:.2g}" for error in errors)
    return " to ".join(dict.fromkeys(texts))


def _gradients(policies: Sequence[PolicyDrift], before: str, after: str = "") -> str:
    """Return the errors of the gradients between two texts; "" if they are not known."""
    errors = _gradient_errors(policies)
    if not errors:
        return ""
    ends = " to ".join(dict.fromkeys(map(percent, (min(errors.values()), max(errors.values())))))
    unknown = [each.name for each in policies if each.name not in errors]
    return f"{before}{ends}{f' (not known for {joined(unknown)})' if unknown else ''}{after}"


def _other_order(best: Sequence[PolicyDrift], others: Sequence[PolicyDrift]) -> str:
    """Return which gradients are closer than those of the policies with the closest losses; "" if none are."""
    of_best, of_others = _gradient_errors(best), _gradient_errors(others)
    if not of_best or not of_others:
        return ""
    name = min(of_others, key=lambda other: of_others[other])
    if _SAME * of_others[name] >= min(of_best.values()):
        return ""
    return f"; but the gradients of {name} are closest, off by {percent(of_others[name])}"


def _gradient_errors(policies: Sequence[PolicyDrift]) -> dict[str, float]:
    errors = {each.name: gradient_error(each) for each in policies}
    return {name: error for name, error in errors.items() if error is not None}


def gradient_error(drift: PolicyDrift) -> float | None:
    """Return the relative error of a policy's gradients; None if it is not known."""
    errors = drift.summary.gradient_errors
    return errors.relative_rms if errors is not None and math.isfinite(errors.relative_rms) else None
