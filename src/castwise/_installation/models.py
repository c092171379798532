"""Find the models of a process among its objects."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import FrameType

import torch
import torch.fx
from torch import nn

from castwise._live_objects import instances_of


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


class RawTensors(Models):
    """Trained tensors that belong to no module, as the parameters of one that is never called.

    Args:
        tensors: The tensors, by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(())
        self._parameters.update(tensors)  # type: ignore[arg-type]  # not instances of nn.Parameter


def raw_tensors(params: Iterable[torch.Tensor]) -> RawTensors:
    """Return tensors under the names of the variables that the running functions and the script have for them."""
    names: dict[int, str] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
            if isinstance(value, torch.Tensor):
                names.setdefault(id(value), name)
        frame = frame.f_back
    tensors: dict[str, torch.Tensor] = {}
    for number, param in enumerate(params):
        name = names.get(id(param), str(number))
        tensors[name if name not in tensors else str(number)] = param
    return RawTensors(tensors)


def model_with(params: Iterable[torch.Tensor] | None = None) -> nn.Module | None:
    """Return the outermost module with any of these parameters, `Models` if there are several, None if there is none.

    Args:
        params: The parameters; None accepts all modules with parameters.
    """
    wanted = None if params is None else set(map(id, params))
    having = [each for each in instances_of(nn.Module) if not isinstance(each, Models) and _has(each, wanted)]
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
