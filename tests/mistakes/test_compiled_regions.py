"""Disabled regions inside compiled functions whose backwards are right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import castwise
from castwise._mistakes.watch import WATCH

BF16 = torch.bfloat16


class Product(torch.autograd.Function):
    @staticmethod
    @castwise.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @castwise.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        return grad @ b.T, a.T @ grad


def disabled(x: torch.Tensor) -> torch.Tensor:
    with castwise.autocast("cpu", enabled=False):
        return x @ x


def both_inside(x: torch.Tensor) -> torch.Tensor:
    with castwise.autocast("cpu", dtype=BF16):
        return disabled(x @ x)


def enabled(x: torch.Tensor) -> torch.Tensor:
    with castwise.autocast("cpu", dtype=torch.float16):
        return x @ x


def custom(x: torch.Tensor) -> torch.Tensor:
    return Product.apply(x, x * 1)  # type: ignore[no-untyped-call,no-any-return]


def off() -> Any:
    return torch._functorch.config.patch(backward_pass_autocast="off")


@pytest.mark.parametrize(
    ("function", "contexts", "found"),
    [
        (disabled, [lambda: castwise.autocast("cpu", dtype=BF16)], 1),
        (disabled, [], 0),
        (disabled, [off, lambda: castwise.autocast("cpu", dtype=BF16)], 0),
        (disabled, [torch.no_grad, lambda: castwise.autocast("cpu", dtype=BF16)], 0),
        (disabled, [lambda: castwise.autocast("cpu", dtype=BF16), lambda: castwise.autocast("cpu", enabled=False)], 0),
        (both_inside, [], 0),
        (enabled, [lambda: castwise.autocast("cpu", dtype=BF16)], 0),
        (custom, [lambda: castwise.autocast("cpu", dtype=BF16)], 0),
    ],
)
def test_a_disabled_region_is_named_only_if_its_backward_is_cast(
    function: Any, contexts: list[Callable[[], Any]], found: int
) -> None:
    torch._dynamo.reset()
    with castwise.installed():
        WATCH.warns = False
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            compiled(torch.ones(2, 2, requires_grad=True))
        assert [mistake.name for mistake in WATCH.found] == ["disabled-inside-compiled"] * found
