"""A layer whose gradients vanish in fp16 is the one that a sample shows, wherever in a real model it is."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import castwise
from castwise._demo.gpt import GPT, Size, loss
from castwise.monitor import Monitor

SIZE = Size(layers=2, heads=2, width=16, context=8, batch=2)
torch.manual_seed(0)
LAYERS = [name for name, module in GPT(SIZE).named_modules() if isinstance(module, nn.Linear)]


class _Faint(torch.autograd.Function):
    """Hands a gradient on smaller than it came."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


def plant(model: nn.Module, layer: str, factor: float) -> None:
    """Make the gradients of a layer's own weights small, and leave those of all before it as they were."""
    linear = model.get_submodule(layer)

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight, bias = (_Faint.apply(parameter.half(), factor) for parameter in (linear.weight, linear.bias))
        return nn.functional.linear(x, weight, bias)

    linear.forward = forward  # type: ignore[method-assign]


def underflow(statistics: dict[str, Any]) -> float:
    fit = statistics["formats"]["fp16"]
    return float(statistics["zero"] + fit["flush"] + fit["subnormal"])


@settings(max_examples=25)
@given(st.sampled_from(LAYERS), st.integers(0, 3), st.integers(22, 40), st.integers(0, 2**32))
def test_the_layer_that_underflows_is_the_one_with_the_largest_share(
    layer: str, step: int, bits: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model, samples = GPT(SIZE), list[dict[str, Any]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = castwise.GradScaler("cpu", init_scale=2.0**12)
    with Monitor(model, optimizer, scaler, every=1, sinks=[samples.append]):
        for number in range(step + 1):
            if number == step:
                plant(model, layer, 2.0**-bits)
            optimizer.zero_grad()
            tokens = torch.randint(256, (SIZE.batch, SIZE.context))
            with castwise.autocast("cpu", dtype=torch.float16):
                scaler.scale(loss(model(tokens), tokens)).backward()
            scaler.step(optimizer)
            scaler.update()
    last = [record for record in samples if record["kind"] == "sample"][-1]
    shares = {name: underflow(statistics) for name, statistics in last["modules"].items() if name in LAYERS}
    assert max(shares, key=lambda name: shares[name]) == layer
    assert shares[layer] > 0.9
