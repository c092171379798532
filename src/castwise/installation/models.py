"""The models of a process, found among its objects."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
import torch.fx
from torch import nn


class Models(nn.Module):
    """Several models as one; names of their modules begin with their classes.

    Args:
        models: In any order.
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
    """Return the outermost module that has these parameters, or any; `Models` if it takes several, None without any."""
    wanted = None if params is None else set(map(id, params))
    having: list[nn.Module] = []
    for value in gc.get_objects():
        # type(), as isinstance asks for __class__, which proxies answer with whatever they stand for.
        if issubclass(type(value), nn.Module) and not isinstance(value, Models) and _has(value, wanted):
            having.append(value)
    # The compiler's graphs have the parameters of what they were made from.
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
    except Exception:  # half made, or one that fails when it is asked
        return False
