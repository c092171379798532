"""Find the models of a process among its objects."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
import torch.fx
from torch import nn


class Models(nn.Module):
    """Several models as one. Names of modules start with the model's class.

    Args:
        models: The models, in any order.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        for model in models:
            name = number = type(model).__name__
            count = 1
            while number in self._modules:
                count += 1
                number = f"{name}_{count}"
            self.add_module(number, model)


def model_with(params: Iterable[torch.Tensor] | None = None) -> nn.Module | None:
    """Return the outermost module with any of these parameters, `Models` if there are several, None if there is none.

    Args:
        params: The parameters; None accepts all modules with parameters.
    """
    wanted = None if params is None else set(map(id, params))
    having: list[nn.Module] = []
    for value in gc.get_objects():
        # type(), because isinstance reads __class__, which proxies forward to their target.
        if issubclass(type(value), nn.Module) and not isinstance(value, Models) and _has(value, wanted):
            having.append(value)
    # The compiler's graph modules share the parameters of their model.
    having = [each for each in having if not isinstance(each, torch.fx.GraphModule)] or having
    inner = {id(child) for module in having for child in module.modules() if child is not module}
    outermost = sorted((module for module in having if id(module) not in inner), key=lambda each: type(each).__name__)
    if len(outermost) == 1:
        return outermost[0]
    return Models(outermost) if outermost else None


def _has(module: nn.Module, wanted: set[int] | None) -> bool:
    try:
        parameters = module.parameters()
        return any(wanted is None or id(parameter) in wanted for parameter in parameters)
    except Exception:  # not fully initialised, or a module whose `parameters` fails
        return False
