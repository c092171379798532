"""The sentence over a comparison of several policies."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import castwise
from castwise.comparison import Drift, Errors, PolicyDrift, Summary
from castwise.comparison._closest import closest


def of_errors(reference: str = "float32", **errors: tuple[float, float | None]) -> Drift:
    """A comparison of policies, and of the reference's noise, by their errors of the loss and of the gradients."""

    def drift(name: str, loss: float, gradient: float | None) -> PolicyDrift:
        gradients = None if gradient is None else Errors(gradient, 0.0, 1.0, 0.0, 0.0)
        summary = Summary(loss + 2.5, 2.5, loss / 2.5, None, None, gradients, 1.0, None, loss_error=loss)
        return PolicyDrift(name, None, summary, (), "cannot be run" if math.isnan(loss) else "")

    policies = {name: drift(name, *pair) for name, pair in errors.items()}
    noise = policies.pop("noise", None)
    return Drift(policies, reference, 4, noise)


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
            "eager and compiled are closest to float64: their losses are off by less than 3e-07 of 2.5; bf16, the "
            "next, is off by 2.7e-05.",
        ),
        (  # the loss, a number of fp32 near 2.5, has steps of 2.4e-07
            of_errors("float64", eager=(0.0, 3e-8), compiled=(2.4e-7, 5e-8)),
            "eager and compiled are as close as each other to float64: their losses are off by less than 3e-07 of 2.5 "
            "and their gradients by under 0.0001%.",
        ),
        (
            of_errors("float64", eager=(2e-7, None), compiled=(6e-7, None)),
            "eager is closest to float64: its loss is off by less than 3e-07 of 2.5; compiled, the next, is off by "
            "6e-07.",
        ),
        (
            of_errors("float64", noise=(5e-7, None), eager=(2e-7, None), compiled=(6e-7, None)),
            "eager and compiled are as close as each other to float64: their losses are off by less than 3e-07 to "
            "6e-07 of 2.5.",
        ),
        (
            of_errors("policy", a=(1e-4, 0.02), b=(3e-4, 0.01)),
            "a is closest to the reference policy: its loss is off by 0.0001 of 2.5 and its gradients by 2%; b, the "
            "next, is off by 0.0003 and 1%; but the gradients of b are closest, off by 1%.",
        ),
        (
            of_errors(a=(0.0, 0.0), b=(0.0, 0.0)),
            "a and b are as close as each other to float32: their losses are off by less than 3e-07 of 2.5 and their "
            "gradients by 0%.",
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


def test_a_policy_that_is_the_reference_is_no_candidate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    batches = [(torch.randn(5, 8), torch.randn(5, 4))]
    policies = {"fp32": castwise.Policy("float32"), "bf16": castwise.policies.bf16, "fp16": castwise.policies.fp16}
    several = castwise.compare(model, batches, policies, loss=nn.functional.mse_loss).result()
    assert several.startswith("fp16 is closest to float32: its loss is off by ")
    assert several.endswith("; fp32 computes the same as float32.")
    one = castwise.compare(model, batches, {**policies, "fp16": policies["fp32"]}, loss=nn.functional.mse_loss)
    assert one.result().startswith("bf16 changes the loss by ")
    assert one.result().endswith("; fp32 and fp16 compute the same as float32.")
    same = castwise.compare(model, batches, {"a": policies["fp32"], "b": policies["fp32"]}, loss=nn.functional.mse_loss)
    assert same.result() == "a and b compute the same as float32: losses and gradients are equal."
    assert same["a"].summary.output_errors == same["a"][""].total
    assert "" in same["a"]
    assert "not a module" not in same["a"]
    assert repr(same["a"]) == f"PolicyDrift(a: loss off by 0 of itself, {len(same['a'].modules)} modules)"


def test_a_drift_has_its_policies_by_name_and_in_order() -> None:
    drift = of_errors(bf16=(1e-4, None), noise=(1e-7, None), fp16=(1e-5, None))
    assert len(drift) == 2
    assert [policy.name for policy in drift] == ["bf16", "fp16"]
    assert "bf16" in drift
    assert "noise" not in drift
    assert drift["fp16"] in drift
    assert drift.noise not in drift
