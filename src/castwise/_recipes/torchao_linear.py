"""The backend "torchao": the recipes of its `Float8Linear`, computed by torchao."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from castwise._recipes.recipe import Recipe


class _Layer(NamedTuple):
    """Stands in for a `Float8Linear` in its forward, with the layer's weights in this call."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    linear_mm_config: Any
    config: Any


class TorchaoLinear:
    """Computes linear layers as torchao's `Float8Linear` does with a recipe.

    Args:
        recipe: A recipe that torchao supports.

    Raises:
        ImportError: torchao is not installed.
    """

    def __init__(self, recipe: Recipe) -> None:
        try:
            from torchao.float8 import Float8LinearConfig
            from torchao.float8.float8_linear import Float8Linear
        except ImportError as error:
            raise ImportError("backend=\"torchao\" needs torchao: pip install 'castwise[torchao]'") from error
        self._config = Float8LinearConfig.from_recipe_name(recipe.name.removeprefix("float8_"))
        self._forward = Float8Linear.forward
        with torch.device("meta"):
            self._mm_config = Float8Linear(16, 16, bias=False, config=self._config).linear_mm_config

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the output of the layer, in the dtype of `input`."""
        if input.numel() == 0 or weight.numel() == 0:  # an empty operand has no largest number
            return functional.linear(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))
        output: torch.Tensor = self._forward(_Layer(weight, bias, self._mm_config, self._config), input)
        return output
