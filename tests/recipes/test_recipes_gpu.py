"""torch's kernels for recipes on a GPU, beside the same products emulated there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from castwise._recipes.quantized_linear import linear
from castwise._recipes.recipe import RECIPES, runs_natively

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe.capability])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 17, 256])
def test_kernels_compute_what_is_emulated(recipe: str, dtype: torch.dtype, rows: int) -> None:
    if not runs_natively(RECIPES[recipe], "cuda"):
        pytest.skip("this GPU has no units for it")
    torch.manual_seed(0)
    layer = nn.Linear(256, 512, device="cuda")
    grad = torch.randn(rows, 512, device="cuda", dtype=dtype)
    results = []
    for uses_kernels in (False, True):
        layer.zero_grad()
        torch.manual_seed(1)
        x = torch.randn(rows, 256, device="cuda", dtype=dtype).requires_grad_()
        output = linear(x, layer.weight, layer.bias, RECIPES[recipe], uses_kernels)
        output.backward(grad)
        results.append((output.detach(), x.grad, layer.weight.grad.clone()))
    for emulated, computed in zip(*results, strict=True):
        # Kernels for scales of rows return bf16, and fast accumulation is off.
        bound = 2 * torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(computed, emulated, rtol=bound, atol=bound * emulated.abs().max().item())
