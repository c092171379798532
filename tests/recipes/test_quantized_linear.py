"""A linear layer by a recipe: torchao's bits, fp64 by hand, and what autograd makes of it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.recipes.kernels import needs_kernels
from torch import nn

from castwise._recipes.quantized_linear import linear
from castwise._recipes.recipe import RECIPES, Recipe
from castwise._recipes.scalings import Scaling

TORCHAOS = [name for name, recipe in RECIPES.items() if recipe.capability]
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def case(seed: int, multiple_of: int = 16) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """A layer, an input and the gradient of its output, of random shapes, magnitudes and dtypes."""
    choice = random.Random(seed)
    torch.manual_seed(seed)
    inputs, outputs = (multiple_of * choice.randint(1, 160 // multiple_of + 1) for _ in range(2))
    dtype = choice.choice([torch.bfloat16, torch.float32, torch.float16])
    layer = nn.Linear(inputs, outputs, bias=choice.random() < 0.5)
    with torch.no_grad():
        layer.weight.mul_(10 ** choice.uniform(-3, 3))
    shape = (2, choice.choice([1, 3, 16, 40, 128]))
    x = torch.randn(*shape, inputs) * 10 ** choice.uniform(-2, 2)
    grad = torch.randn(*shape, outputs) * 10 ** choice.uniform(-2, 2)
    return layer, x.to(dtype), grad.to(dtype)


def results(forward: Any, layer: nn.Linear, x: torch.Tensor, grad: torch.Tensor) -> Results:
    """The output and the gradients of input and weight."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    output = forward(x)
    output.backward(grad)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return output.detach(), x.grad, layer.weight.grad.clone()


def ours(layer: nn.Linear, x: torch.Tensor, grad: torch.Tensor, recipe: str, uses_kernels: bool = False) -> Results:
    return results(lambda x: linear(x, layer.weight, layer.bias, RECIPES[recipe], uses_kernels), layer, x, grad)


@pytest.mark.parametrize("recipe", TORCHAOS)
def test_emulation_has_the_bits_of_torchaos(recipe: str) -> None:
    float8 = pytest.importorskip("torchao.float8")
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe.removeprefix("float8_")), emulate=True)
    for seed in range(200):
        layer, x, grad = case(seed)
        theirs = float8.float8_linear.Float8Linear.from_float(layer, config)
        for mine, other in zip(ours(layer, x, grad, recipe), results(theirs, layer, x, grad), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("recipe", TORCHAOS)
def test_nan_and_inf_give_what_torchao_gives(recipe: str, value: float) -> None:
    float8 = pytest.importorskip("torchao.float8")
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe.removeprefix("float8_")), emulate=True)
    layer, x, grad = case(3)
    x[0, 0, 0] = value
    theirs = float8.float8_linear.Float8Linear.from_float(layer, config)
    for mine, other in zip(ours(layer, x, grad, recipe), results(theirs, layer, x, grad), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("recipe", TORCHAOS)
def test_torchs_kernels_compute_the_same_products(recipe: str) -> None:
    """Both add up in fp32, in other orders, and round the result once to the dtype of the output."""
    for seed in range(20):
        layer, x, grad = case(seed)
        both = zip(ours(layer, x, grad, recipe), ours(layer, x, grad, recipe, uses_kernels=True), strict=True)
        for emulated, computed in both:
            # Of 200 products in another order, sums differ by some roundings to fp32.
            bound = 2 * torch.finfo(x.dtype).eps + 16 * torch.finfo(torch.float32).eps
            torch.testing.assert_close(computed, emulated, rtol=bound, atol=bound * emulated.abs().max().item())


def in_fp64(scaling: Scaling, operand: torch.Tensor) -> torch.Tensor:
    return scaling.dequantize_(scaling.quantize(operand)).double()


def by_hand(layer: nn.Linear, x: torch.Tensor, grad: torch.Tensor, recipe: Recipe) -> Results:
    """The three products in fp64, of operands that each were quantized along their contraction."""
    rows, grads, weight = x.flatten(0, -2), grad.flatten(0, -2), layer.weight.detach()
    output = in_fp64(recipe.output[0], rows) @ in_fp64(recipe.output[1], weight).t()
    if layer.bias is not None:
        output = output.to(x.dtype).double() + layer.bias.detach().to(x.dtype).double()
    grad_input = in_fp64(recipe.grad_input[0], grads) @ in_fp64(recipe.grad_input[1], weight.t()).t()
    if recipe.grad_weight is None:
        grad_weight = grads.double().t() @ rows.double()
    else:
        missing = -len(rows) % recipe.multiple_of
        rows, grads = (torch.cat([each, each.new_zeros(missing, each.shape[1])]) for each in (rows, grads))
        grad_weight = in_fp64(recipe.grad_weight[0], grads.t()) @ in_fp64(recipe.grad_weight[1], rows.t()).t()
    return output.view(grad.shape), grad_input.view(x.shape), grad_weight


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_the_quantized_operands(recipe: str) -> None:
    for seed in range(20):
        layer, x, grad = case(seed, RECIPES[recipe].multiple_of)
        both = zip(ours(layer, x, grad, recipe), by_hand(layer, x, grad, RECIPES[recipe]), strict=True)
        for mine, expected in both:
            eps = max(torch.finfo(x.dtype).eps, 1e-5)
            torch.testing.assert_close(mine.double(), expected, rtol=eps, atol=eps * expected.abs().max().item())


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_exact_where_the_formats_are(recipe: str) -> None:
    """Of numbers that a format holds together with the largest of its block nothing is rounded: all is as in fp32."""
    torch.manual_seed(0)
    layer = nn.Linear(128, 128, bias=False)
    largest = 6.0 if recipe == "nvfp4" else 3.5  # of which 448 and 57344 are multiples by powers of two

    def exact(*shape: int) -> torch.Tensor:
        numbers = torch.randint(-3, 4, shape).float()
        numbers[..., ::4] = largest  # in every row, column and block
        numbers[::4] = largest
        return numbers

    with torch.no_grad():
        layer.weight.copy_(exact(128, 128))
    x, grad = exact(128, 128), exact(128, 128)
    for mine, expected in zip(ours(layer, x, grad, recipe), results(layer, layer, x, grad), strict=True):
        torch.testing.assert_close(mine, expected, rtol=2e-6, atol=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_gradients_that_are_wanted_are_computed(recipe: str) -> None:
    layer = nn.Linear(128, 128).requires_grad_(False)
    x = torch.randn(4, 128, requires_grad=True)
    linear(x, layer.weight, layer.bias, RECIPES[recipe], False).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    layer.requires_grad_()
    linear(x.detach(), layer.weight, layer.bias, RECIPES[recipe], False).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_input_without_rows_has_an_output_without_rows(recipe: str, dtype: torch.dtype) -> None:
    layer = nn.Linear(128, 128)
    x = torch.empty(0, 128, dtype=dtype, requires_grad=True)
    output = linear(x, layer.weight, layer.bias, RECIPES[recipe], False)
    output.sum().backward()
    assert output.shape == (0, 128)
    assert output.dtype is dtype
    assert (layer.weight.grad == 0).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_without_outputs_has_none(recipe: str) -> None:
    layer, x = nn.Linear(128, 0), torch.randn(4, 128, requires_grad=True)
    output = linear(x, layer.weight, layer.bias, RECIPES[recipe], False)
    output.sum().backward()
    assert output.shape == (4, 0)
    assert x.grad is not None
    assert (x.grad == 0).all()


@pytest.mark.parametrize("shape", [(16,), (4, 16), (2, 3, 16)])
def test_its_output_may_be_written_in_place(shape: tuple[int, ...]) -> None:
    layer, x = nn.Linear(16, 16, bias=False), torch.randn(shape)
    grads = []
    for inplace in (False, True):
        layer.zero_grad()
        output = linear(x, layer.weight, None, RECIPES["float8_rowwise"], False)
        nn.functional.relu(output, inplace=inplace).sum().backward()
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad.clone())
    assert torch.equal(*grads)


def test_a_second_derivative_is_refused() -> None:
    layer, x = nn.Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    output = linear(x, layer.weight, layer.bias, RECIPES["float8_rowwise"], False)
    (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_backward_in_a_region_has_the_same_gradients(recipe: str) -> None:
    layer, x, grad = case(2, 128)
    x, grad = x.float(), grad.float()
    expected = ours(layer, x, grad, recipe)
    with torch.autocast("cpu", torch.bfloat16):
        again = results(lambda x: linear(x, layer.weight, layer.bias, RECIPES[recipe], False), layer, x, grad)
    for mine, other in zip(expected[1:], again[1:], strict=True):
        assert torch.equal(mine, other)
