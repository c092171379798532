"""`compare` keeps the activations of one run at a time, and beside them little more than the largest module's."""

from __future__ import annotations

import torch

import castwise
from benchmarks import comparison_cost
from castwise._demo import gpt


def test_beside_one_forward_there_are_at_most_three_times_the_largest_activations() -> None:
    model, batches = comparison_cost.task(gpt.Size(layers=3, heads=2, width=128, context=128, batch=16), "cpu")
    inputs, targets = batches[0]

    def step() -> None:
        torch.autograd.grad(gpt.loss(model(inputs), targets), list(model.parameters()))

    def comparison(*policies: castwise.Policy) -> None:
        named = {str(place): policy for place, policy in enumerate(policies)}
        castwise.compare(model, batches[:1], named, loss=gpt.loss)

    one_forward = comparison_cost.peak(lambda: comparison_cost.keeping_outputs(model, step))
    largest = comparison_cost.largest_output(model, inputs)
    # Weights are copied to be put back, and cast by the region; sums are taken in parts of 1 MiB.
    weights = 1.5 * sum(param.nbytes for param in model.parameters())
    parts = 4 * 2**20
    found = comparison_cost.peak(lambda: comparison(castwise.policies.bf16, castwise.policies.bf16_stable))
    assert found <= one_forward + weights + 3 * largest + parts
