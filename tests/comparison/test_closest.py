"""The sentence over a comparison of several policies."""

from __future__ import annotations

import json
import math

import pytest

from castwise.comparison import Drift, Errors, PolicyDrift, Summary
from castwise.comparison._closest import closest


def of_errors(reference: str = "float32", **errors: tuple[float, float | None]) -> Drift:
    """A comparison of policies by their errors of the loss and of the gradients."""

    def drift(name: str, loss: float, gradient: float | None) -> PolicyDrift:
        gradients = None if gradient is None else Errors(gradient, 0.0, 1.0, 0.0, 0.0)
        summary = Summary(loss + 2.5, 2.5, loss / 2.5, None, None, gradients, 1.0, None, loss_error=loss)
        return PolicyDrift(name, None, summary, (), "cannot be run" if math.isnan(loss) else "")

    return Drift({name: drift(name, *pair) for name, pair in errors.items()}, reference, 4)


@pytest.mark.parametrize(
    ("drift", "expected"),
    [
        (
            of_errors(bf16=(2.7e-5, 2.2e-3), fp16=(4.1e-6, 2.6e-4), e4m3=(1e-2, 0.1)),
            "fp16 is closest to float32: its loss is off by 4.1e-06 of 2.5 and its gradients by 0.026%; bf16, the "
            "next, is off by 2.7e-05 and 0.22%.",
        ),
        (
            of_errors("float64", bf16=(2.7e-5, None), eager=(1e-7, None), compiled=(1.1e-7, None)),
            "eager and compiled are closest to float64: their losses are off by 1e-07 to 1.1e-07 of 2.5; bf16, the "
            "next, is off by 2.7e-05.",
        ),
        (
            of_errors("policy", a=(1e-4, 0.02), b=(3e-4, 0.01)),
            "a is closest to the reference policy: its loss is off by 0.0001 of 2.5 and its gradients by 2%; b, the "
            "next, is off by 0.0003 and 1%; but the gradients of b are closest, off by 1%.",
        ),
        (
            of_errors(a=(0.0, 0.0), b=(0.0, 0.0)),
            "a and b are equally close to float32: their losses are off by 0 of 2.5 and their gradients by 0%.",
        ),
        (of_errors(a=(1e-4, 0.02), broken=(math.nan, None)), ""),
    ],
)
def test_the_closest_policy_is_said_with_its_error_in_units_of_the_loss(drift: Drift, expected: str) -> None:
    assert drift.result() == expected
    assert json.loads(json.dumps(drift.as_dict()))["result"] == expected
    assert expected in drift._repr_html_()
    assert not expected or expected in str(drift).splitlines()
    assert closest(drift)[0] == expected.partition(":")[0]
