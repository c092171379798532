"""Modules and parameters by their names in the original model, without wrappers."""

from __future__ import annotations

import torch
from torch import nn

from castwise.policy._module_rules import named_modules


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by name, each once and without wrappers; the model itself is ``""``."""
    by_module: dict[nn.Module, str] = {}
    for name, module in named_modules(model):
        by_module.setdefault(module, name)
    return {name: module for module, name in by_module.items()}


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters by name, each once."""
    by_parameter: dict[torch.Tensor, str] = {}
    for name, module in named_modules(model):
        for own, parameter in module.named_parameters(recurse=False):
            by_parameter.setdefault(parameter, f"{name}.{own}" if name else own)
    return {name: parameter for parameter, name in by_parameter.items()}
