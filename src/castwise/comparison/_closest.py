"""`closest`: which of several policies is closest to the reference, and why, in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from castwise._number_text import joined, percent

if TYPE_CHECKING:
    from castwise.comparison._drift import Drift, PolicyDrift

# Errors of the loss that differ by less are equally large: they are means over few batches.
_SAME = 1.2


def closest(drift: Drift) -> tuple[str, str]:
    """Return which policies are closest to the reference by their losses, and why; ("", "") for fewer than two.

    The reason is in units of the loss, with the errors of the gradients if they are known.
    """
    known = [each for each in drift if not each.failure and math.isfinite(each.summary.loss_error)]
    if len(known) < 2:
        return "", ""
    known.sort(key=lambda each: each.summary.loss_error)
    best = [each for each in known if each.summary.loss_error <= _SAME * known[0].summary.loss_error]
    others = known[len(best) :]
    is_one = len(best) == 1
    how = "is closest" if is_one else "are closest" if others else "are equally close"
    title = f"{joined([each.name for each in best])} {how} to {_reference(drift)}"
    losses = f"{'its loss is' if is_one else 'their losses are'} off by {_losses(best)} of "
    reason = f"{losses}{best[0].summary.reference_loss:.4g}{_gradients(best, 'its ' if is_one else 'their ')}"
    if others:
        reason += f"; {others[0].name}, the next, is off by {_losses(others[:1])}{_gradients(others[:1])}"
    return title, f"{reason}{_other_order(best, others)}."


def _reference(drift: Drift) -> str:
    return "the reference policy" if drift.reference == "policy" else drift.reference


def _losses(policies: Sequence[PolicyDrift]) -> str:
    errors = (policies[0].summary.loss_error, policies[-1].summary.loss_error)
    return " to ".join(dict.fromkeys(f"{error:.2g}" for error in errors))


def _gradients(policies: Sequence[PolicyDrift], whose: str = "") -> str:
    errors = _gradient_errors(policies)
    if not errors:
        return ""
    ends = " to ".join(dict.fromkeys(map(percent, (min(errors.values()), max(errors.values())))))
    return f" and {whose}gradients by {ends}" if whose else f" and {ends}"


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
