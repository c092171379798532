"""Functions of torch that castwise replaces in several places at once, which begin and end in any order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.compiler import is_dynamo_compiling

Layer = Callable[..., Any]
"""Called with the function below it and the call's arguments; returns the call's result."""


class LayeredFunction:
    """A function of torch while there are layers around it, and afterwards torch's again.

    Code that is being compiled gets torch's function. So do calls of a function that a script has put in its place.

    Args:
        name: The function's name.
        modules: The modules, or the class, that have it under this name.
    """

    def __init__(self, name: str, *modules: ModuleType | type) -> None:
        self._name, self._modules = name, modules
        self._layers: tuple[Layer, ...] = ()
        self.original: Any = None
        """The function below all layers."""
        self.function: Any = None
        """What replaces it."""

    def add(self, layer: Layer) -> None:
        """Put a layer around all others."""
        if not self._layers:
            original = getattr(self._modules[0], self._name)
            if original is not self.original:
                self.original, self.function = original, self._layered(original)
            for module in self._modules:
                setattr(module, self._name, self.function)
        self._layers = (*self._layers, layer)

    def remove(self, layer: Layer) -> None:
        """Take a layer away. With the last one torch's function is back, except where the name was changed since."""
        self._layers = tuple(other for other in self._layers if other != layer)
        if not self._layers:
            for module in self._modules:
                if getattr(module, self._name) is self.function:
                    setattr(module, self._name, self.original)

    def _layered(self, original: Any) -> Any:
        @functools.wraps(original)
        def layered(*args: Any, **kwargs: Any) -> Any:
            function = original
            for layer in () if is_dynamo_compiling() else self._layers:
                function = functools.partial(layer, function)
            return function(*args, **kwargs)

        return layered


BACKWARD = LayeredFunction("backward", torch.autograd)
CLIP_GRAD_NORM = LayeredFunction("clip_grad_norm_", torch.nn.utils, torch.nn.utils.clip_grad)
CHECKPOINT = LayeredFunction("checkpoint", torch.utils.checkpoint)
CLIP_GRAD_VALUE = LayeredFunction("clip_grad_value_", torch.nn.utils, torch.nn.utils.clip_grad)
