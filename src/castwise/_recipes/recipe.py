"""The recipes by name: how each operand of each product is quantized, the supported shapes, and what runs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from castwise._patches import patch_of
from castwise._recipes.scalings import E4M3, E5M2, Float8, Mxfp8, Nvfp4, Scaling
from castwise._warnings import warn

BACKENDS = ("auto", "emulated", "torch", "torchao")
DEVICES = ("cpu", "cuda", "mps", "xpu", "meta")
"""Types of devices on which the backend "torch" calls `scaled_mm`, whether or not the device supports it."""

WITHOUT_KERNELS = frozenset({"cpu"} if torch.__version__ < "2.12" else ())
"""Types of devices on which this release of torch has no `scaled_mm`, so that the backend "torch" is off."""

Scalings = tuple[Scaling, Scaling]
"""The scalings of the two operands of a product."""


@dataclass(frozen=True)
class Recipe:
    """How a linear layer computes its output and the two gradients.

    Args:
        name: The name in a policy.
        output: The scalings of `input` and `weight`, whose product is the output.
        grad_input: The scalings of `grad_output` and of the transpose of `weight`.
        grad_weight: The scalings of the transposes of `grad_output` and `input`; None does not quantize this product.
        multiple_of: The number that must divide the numbers of inputs and outputs: 16 or the block size. A batch may
            have any number of rows: where these are contracted, zeros are added, which change nothing.
        capability: The lowest compute capability of an NVIDIA GPU on which `torch.nn.functional.scaled_mm` runs the
            recipe; None if the backends "torch" and "torchao" do not support it.
    """

    name: str
    output: Scalings
    grad_input: Scalings
    grad_weight: Scalings | None
    multiple_of: int
    capability: tuple[int, int] | None = None


_TENSOR, _GRAD_TENSOR = Float8(E4M3, (None, None)), Float8(E5M2, (None, None))
_ROW, _TENSOR_BY_2 = Float8(E4M3, (1, None), power_of_2=True), Float8(E4M3, (None, None), power_of_2=True)
_ROW_OF_128, _SQUARE = Float8(E4M3, (1, 128)), Float8(E4M3, (128, 128))
_MXFP8, _NVFP4 = Mxfp8(), Nvfp4()

RECIPES = {
    recipe.name: recipe
    for recipe in (
        # The first three are those of torchao's `Float8LinearConfig.from_recipe_name`. Tensor cores for fp8 need
        # capability 8.9, torch's kernels for row scales 9.0.
        Recipe("float8_tensorwise", (_TENSOR, _TENSOR), (_GRAD_TENSOR, _TENSOR), (_GRAD_TENSOR, _TENSOR), 16, (8, 9)),
        Recipe("float8_rowwise", (_ROW, _ROW), (_ROW, _ROW), (_ROW, _ROW), 16, (9, 0)),
        Recipe("float8_rowwise_with_gw_hp", (_ROW, _ROW), (_ROW, _TENSOR_BY_2), None, 16, (9, 0)),
        Recipe("float8_blockwise", (_ROW_OF_128, _SQUARE), (_ROW_OF_128, _SQUARE), (_ROW_OF_128, _ROW_OF_128), 128),
        Recipe("mxfp8", (_MXFP8, _MXFP8), (_MXFP8, _MXFP8), (_MXFP8, _MXFP8), 32),
        Recipe("nvfp4", (_NVFP4, _NVFP4), (_NVFP4, _NVFP4), (_NVFP4, _NVFP4), 16),
    )
}


def named(rule: str) -> Recipe | None:
    """Return the recipe that a rule names, with or without a trailing "?"; None for other rules."""
    return RECIPES.get(rule.removesuffix("?"))


def why_not_for(module: nn.Module, rule: str) -> str | None:
    """Return why a module cannot use the recipe of a rule, or None if it can."""
    recipe = RECIPES[rule.removesuffix("?")]
    if not isinstance(module, nn.Linear):
        return f"its type is {type(module).__name__}, but recipes are for nn.Linear"
    if type(module).forward is not nn.Linear.forward:
        return f"this {type(module).__name__} has its own forward"
    if (patch := patch_of(nn.Linear, "forward")) is not None:
        return f"{patch}, which the recipe would bypass"
    if isinstance(module.weight, nn.UninitializedParameter):
        return "its weight has no shape before the first batch"
    if module.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its weight is {module.weight.dtype}, but recipes quantize fp32, bf16 and fp16"
    outputs, inputs = module.weight.shape if module.weight.ndim == 2 else (module.out_features, module.in_features)
    if inputs % recipe.multiple_of or outputs % recipe.multiple_of:
        return (
            f"its weight has the shape ({outputs}, {inputs}), but {recipe.name} needs multiples of {recipe.multiple_of}"
        )
    return None


def runs_natively(recipe: Recipe, device: str | torch.device) -> bool:
    """Return True if torch has kernels for a recipe on a device, and the device has units for it.

    torch's CPU kernels compute the same products, but many times slower than in bf16.

    Args:
        recipe: The recipe.
        device: A device, or its `type`.
    """
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return recipe.capability is not None and torch.cuda.get_device_capability(device) >= recipe.capability


def kernels_on(recipe: Recipe, backend: str) -> frozenset[str]:
    """Return the types of devices on which a backend runs a recipe with torch's kernels; on others it is emulated."""
    if backend == "torch":
        return frozenset(DEVICES) - WITHOUT_KERNELS
    return frozenset({"cuda"} if backend == "auto" and runs_natively(recipe, "cuda") else ())


def labelled(recipe: Recipe, backend: str, device: str) -> str:
    """Return the name of a recipe with what computes it on a device.

    Example:
        >>> labelled(RECIPES["mxfp8"], "auto", "cpu")
        'mxfp8 (emulated)'
    """
    by = backend if backend == "torchao" else "torch" if device in kernels_on(recipe, backend) else "emulated"
    return f"{recipe.name} ({by})"


SETTLED: set[tuple[Recipe, str]] = set()
"""Recipes and types of devices that were already checked, so they do not warn again."""


def warn_if_emulated(recipe: Recipe, backend: str, device: str) -> None:
    """Warn once per process, recipe and type of device that the backend "auto" or "torch" emulates a recipe.

    Args:
        recipe: The recipe.
        backend: The backend of the policy.
        device: The `type` of a device.

    Warns:
        UserWarning: The recipe does not run natively on the device, or torch has no kernels for the backend "torch".
    """
    if backend not in ("auto", "torch") or (recipe, device) in SETTLED:
        return
    if backend == "torch":
        is_emulated, why = device in WITHOUT_KERNELS, f", as torch {torch.__version__} has no kernels for it there"
    else:
        is_emulated, why = not runs_natively(recipe, device), ""
    SETTLED.add((recipe, device))
    if is_emulated:
        warn(
            f"{recipe.name} is emulated on this {device}{why}: the results are those of the recipe, but not the speed. "
            'Pass backend="emulated" to silence this warning, or see `castwise doctor` for what runs natively',
            UserWarning,
        )
