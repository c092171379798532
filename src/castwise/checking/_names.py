"""Names of the modules and parameters of a running program, which has shown none of its models."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from castwise._live_objects import instances_of
from castwise._torch_private import is_compiled

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "OptimizedModule")
_OF_WRAPPERS = re.compile(r"\b_(?:orig_mod|\w+_wrapped_module)\.")


class Names:
    """Finds the models that own modules and parameters, and names both as their models do.

    The first model's names have no prefix; those of others begin with their class. `is_compiled` is whether a model
    with parts compiled by `torch.compile` is among them.
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.is_compiled = False
        self._modules = WeakIdKeyDictionary()
        self._params = WeakTensorKeyDictionary()
        self._prefixes: set[str] = set()

    def module(self, module: nn.Module) -> str:
        """Return a module's name; `""` for the first model itself."""
        name: str | None = self._modules.get(module)  # type: ignore[no-untyped-call]  # torch's
        if name is None:
            self._adopt_all(lambda model: any(each is module for each in model.modules()))
            if module not in self._modules:
                self._adopt(module)
            name = str(self._modules[module])
        return name

    def find_params(self, params: Iterable[torch.Tensor]) -> None:
        """Name parameters; those of no model are numbered."""
        unknown = [param for param in params if param not in self._params]
        if not unknown:
            return
        wanted = set(map(id, unknown))
        self._adopt_all(lambda model: any(id(param) in wanted for param in model.parameters()))
        for param in unknown:
            if param not in self._params:
                self._params[param] = f"tensor {len(self._params) + 1}"

    def others(self, optimized: Iterable[torch.Tensor], older: Container[nn.Module]) -> dict[str, torch.Tensor]:
        """Return the parameters, by name, that no optimizer has, such as an average of weights.

        Args:
            optimized: What the optimizers have.
            older: Modules of other programs of this process.
        """
        self._adopt_all(lambda model: model not in older and any(True for _ in model.parameters()))
        ids = set(map(id, optimized))
        params = (param for model in self.models if model not in older for param in model.parameters())
        return {self.param(param): param for param in params if id(param) not in ids}

    def knows(self, param: torch.Tensor) -> bool:
        """Return True if a parameter has a name."""
        return param in self._params

    def param(self, param: torch.Tensor) -> str:
        """Return a parameter's name, after `find_params`."""
        return str(self._params[param])

    def _adopt_all(self, is_wanted: Callable[[nn.Module], bool]) -> None:
        modules = instances_of(nn.Module)
        children = {id(child) for module in modules for child in module.children()}
        for module in modules:
            if id(module) not in children and is_wanted(module):
                self.is_compiled |= any(map(is_compiled, module.modules()))
                self._adopt(unwrapped(module))

    def _adopt(self, model: nn.Module) -> None:
        if model in self._modules:
            return
        prefix, number = "", 1
        while prefix in self._prefixes:
            prefix = f"{type(model).__name__}{number if number > 1 else ''}."
            number += 1
        self._prefixes.add(prefix)
        self.models.append(model)
        for name, module in model.named_modules():
            if module not in self._modules:
                self._modules[module] = (prefix + _plain(name + ".")).rstrip(".")
        for name, param in model.named_parameters():
            if param not in self._params:
                self._params[param] = prefix + _plain(name)

    def buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the buffers of all models with their names."""
        for model in self.models:
            prefix = str(self._modules[model])
            for name, buffer in model.named_buffers():
                yield (f"{prefix}." if prefix else "") + _plain(name), buffer


def unwrapped(model: nn.Module) -> nn.Module:
    """Return a model without what wraps it for ranks or compiles it."""
    while type(model).__name__ in _WRAPPERS:
        inner = next(model.children(), None)
        if inner is None:
            break
        model = inner
    return model


def _plain(name: str) -> str:
    return _OF_WRAPPERS.sub("", name)
