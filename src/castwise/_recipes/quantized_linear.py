"""A linear layer with a recipe: its three products of quantized operands, with autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from castwise._full_fp32 import full_fp32_products
from castwise._recipes.listeners import LayerEvent, Operand
from castwise._recipes.recipe import Recipe
from castwise._recipes.scalings import Quantized, Scaling

# A backward that torch 2.11 compiles returns zeros instead of a tensor that `out=` has filled; 2.13 does not.
_LOSES_OUT = torch.__version__ < "2.13"

Weights = Callable[[torch.Tensor, Scaling, bool], Quantized]
"""Returns a quantized weight, computed or cached; the third argument tells whether it is transposed."""


def quantize_weight(weight: torch.Tensor, scaling: Scaling, is_transposed: bool) -> Quantized:
    """Quantize a weight, or its transpose."""
    return scaling.quantize(weight.t() if is_transposed else weight)


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    uses_kernels: bool,
    weights: Weights = quantize_weight,
    tell: LayerEvent | None = None,
) -> torch.Tensor:
    """Return `input @ weight.t() + bias`, computed with a recipe.

    Args:
        input: Of shape (..., inputs), in the dtype of the output.
        weight: Of shape (outputs, inputs), of any floating-point dtype.
        bias: Of shape (outputs,), or None.
        recipe: The recipe, which must support these numbers of inputs and outputs.
        uses_kernels: Whether `torch.nn.functional.scaled_mm` computes the products. Otherwise they are computed from
            the dequantized operands, in fp32, or in bf16 if it holds them.
        weights: Quantizes the weight.
        tell: Notifies listeners, if there are any.
    """
    if input.numel() == 0 or weight.numel() == 0:  # an empty operand has no largest number
        return functional.linear(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))
    # Reshaped here, because in-place ops such as nn.ReLU(inplace=True) must not get a view from inside a Function.
    arguments = input.reshape(-1, input.shape[-1]), weight, recipe, uses_kernels, weights, tell
    output: torch.Tensor = _Products.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's
    output = output.view(*input.shape[:-1], -1)
    return output if bias is None else output + bias.to(output.dtype)


class _Products(torch.autograd.Function):
    """The three matrix products."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        recipe: Recipe,
        uses_kernels: bool,
        weights: Weights,
        tell: LayerEvent | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.recipe, ctx.uses_kernels, ctx.weights, ctx.tell = recipe, uses_kernels, weights, tell
        of_input, of_weight = recipe.output
        with nullcontext() if tell is None else tell.products("forward", input, weight):
            left = _notify("input", input, of_input, of_input.quantize(input), tell)
            right = _notify("weight", weight, of_weight, weights(weight, of_weight, False), tell)
            return _product(left, of_input, right, of_weight, input.dtype, uses_kernels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        recipe, uses_kernels, tell, dtype = ctx.recipe, ctx.uses_kernels, ctx.tell, input.dtype
        with nullcontext() if tell is None else tell.products("backward", input, weight, grad_output):
            grad_input = grad_weight = None
            if ctx.needs_input_grad[0]:
                of_grad, of_weight = recipe.grad_input
                left = _notify("grad_output", grad_output, of_grad, of_grad.quantize(grad_output), tell)
                right = _notify("weight_t", weight, of_weight, ctx.weights(weight, of_weight, True), tell)
                grad_input = _product(left, of_grad, right, of_weight, dtype, uses_kernels)
            if ctx.needs_input_grad[1]:
                if recipe.grad_weight is None:
                    grad_weight = _mm(grad_output.t(), input)
                else:
                    of_grad, of_input = recipe.grad_weight
                    grads_t, input_t = _padded(grad_output, recipe).t(), _padded(input, recipe).t()
                    left = _notify("grad_output_t", grad_output, of_grad, of_grad.quantize(grads_t), tell)
                    right = _notify("input_t", input, of_input, of_input.quantize(input_t), tell)
                    grad_weight = _product(left, of_grad, right, of_input, dtype, uses_kernels)
        return grad_input, grad_weight, None, None, None, None


def _notify(name: Operand, operand: torch.Tensor, by: Scaling, to: Quantized, tell: LayerEvent | None) -> Quantized:
    if tell is not None:
        tell.quantized(name, operand, by, to)
    return to


def _padded(operand: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Add rows of zeros until a recipe can contract over the rows."""
    missing = -operand.shape[0] % recipe.multiple_of
    return functional.pad(operand, (0, 0, 0, missing)) if missing else operand


def _product(
    left: Quantized, of_left: Scaling, right: Quantized, of_right: Scaling, dtype: torch.dtype, uses_kernels: bool
) -> torch.Tensor:
    """Return the product of a quantized operand and the transpose of another."""
    if uses_kernels:
        return _scaled_mm(_as_stored(left, of_left), _as_stored(right, of_right), dtype)
    numbers, others = of_left.dequantize_(left), of_right.dequantize_(right).t()
    if dtype is torch.bfloat16 and of_left.fits_bf16 and of_right.fits_bf16:
        return _mm(numbers.bfloat16(), others.bfloat16())
    if is_dynamo_compiling():  # which cannot trace the settings, so that compiled code keeps those of the program
        return _mm(numbers, others).to(dtype)
    with full_fp32_products():
        return _mm(numbers, others).to(dtype)


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    # With `out=`, which autocast does not cast: a backward may run inside a region.
    product = torch.mm(left, right, out=left.new_empty(left.shape[0], right.shape[1]))
    return product.clone() if _LOSES_OUT and is_dynamo_compiling() else product


def _as_stored(quantized: Quantized, by: Scaling) -> Quantized:
    """Return an operand with its values in the 8-bit dtype that kernels accept."""
    assert by.numbers.dtype is not None
    return quantized._replace(values=quantized.values.to(by.numbers.dtype))


def _scaled_mm(left: Quantized, right: Quantized, dtype: torch.dtype) -> torch.Tensor:
    is_by_row = left.scale.ndim > 0 or right.scale.ndim > 0
    kind = functional.ScalingType.RowWise if is_by_row else functional.ScalingType.TensorWise
    # A kernel needs the same kind of scales for both operands: of rows, or of the tensor.
    of_left, of_right = (
        operand.scale.reciprocal().expand(*((operand.values.shape[0], 1) if is_by_row else (1,))).contiguous()
        for operand in (left, right)
    )
    by_row_on_gpu = is_by_row and left.values.is_cuda  # where the kernels return only bf16
    return functional.scaled_mm(
        left.values.contiguous(),
        right.values.contiguous().t(),
        of_left,
        kind,
        of_right.t() if is_by_row else of_right,
        kind,
        output_dtype=torch.bfloat16 if by_row_on_gpu else dtype,
    ).to(dtype)
