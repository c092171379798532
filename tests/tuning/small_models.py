"""Models of a few layers, and the best policy of all that there are for them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from torch import Tensor, nn

import castwise
from castwise import Policy
from castwise.tuning._costs import FLOP_WEIGHTS
from castwise.tuning._precision_search import FORMATS


@dataclass(frozen=True)
class Case:
    """A model, batches, and a tolerance between what uniform policies give."""

    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    tolerance: float

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.float(), target)


def case(seed: int, layers: tuple[int, ...] = (3, 4, 5)) -> Case:
    """Return layers of drawn widths and scales; some overflow fp16."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    count = draw.choice(layers)
    widths = [draw.choice([4, 8, 16, 24]) for _ in range(count)] + [5]
    model = nn.Sequential()
    for place, (inside, outside) in enumerate(itertools.pairwise(widths)):
        layer = nn.Linear(inside, outside)
        with torch.no_grad():
            layer.weight.mul_(draw.choice([1.0, 1.0, 3.0, 10.0]))
            if draw.random() < 0.1:
                layer.bias.add_(1e5)
        model.append(layer)
        if place < count - 1:
            model.append(draw.choice([nn.Tanh, nn.GELU])())
    batches = [(torch.randn(8, widths[0]), torch.randint(5, (8,))) for _ in range(8)]
    return Case(model, batches, 10 ** draw.uniform(-4.5, -2))


def errors(case: Case, policy: Policy) -> tuple[float, float]:
    """Return the mean relative errors of the loss on the batches that are searched with, and on those held out."""
    bound = policy.bind(case.model)
    found = []
    try:
        for inputs, target in case.batches:
            expected = float(case.loss(case.model(inputs), target).detach())
            with castwise.autocast("cpu", policy=bound):
                loss = float(case.loss(case.model(inputs), target).detach())
            error = abs(loss - expected) / abs(expected)
            found.append(error if error == error else float("inf"))
    finally:
        bound.unbind()
    return sum(found[::2]) / 4, sum(found[1::2]) / 4


def cheapest(case: Case) -> float:
    """Return the least cost, over float32, of all policies that are within the tolerance on both halves."""
    layers = {name: module for name, module in case.model.named_modules() if isinstance(module, nn.Linear)}
    flops: dict[str, int] = {name: layer.weight.numel() for name, layer in layers.items()}
    choices: list[tuple[float, Any]] = []
    for formats in itertools.product(FORMATS, repeat=len(layers)):
        cost = sum(flops[name] * FLOP_WEIGHTS[chosen] for name, chosen in zip(layers, formats, strict=True))
        choices.append((cost / sum(flops.values()), formats))
    for cost, formats in sorted(choices):
        policy = Policy(compute="float32", modules=dict(zip(layers, formats, strict=True)))
        if max(errors(case, policy)) <= case.tolerance:
            return cost
    raise AssertionError("float32 is always within the tolerance")
