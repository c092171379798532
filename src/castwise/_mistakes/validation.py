"""Validation in a different precision than training."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from castwise._mistakes.corrected_code import in_region
from castwise._mistakes.finder import Finder
from castwise._mistakes.mistake import caller, passes_through
from castwise._torch_private import is_compiled, is_jit_tracing, tree_leaves, wraps_compiled
from castwise.tracing._module_hooks import ModuleHooks

# Modules of torch that run a model once to trace it.
_EXPORTS = ("torch/jit/_trace.py", "torch/export/__init__.py", "torch/onnx/__init__.py")


class Validation(Finder):
    """Finds forwards in evaluation mode outside autocast, for a model that trains inside autocast.

    Hooks the model, unless it is compiled in place.
    """

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._hooks = ModuleHooks(self._guard)
        self._models: WeakSet[nn.Module] = WeakSet()
        self._regions = threading.local()
        self._trains_in_autocast = False
        self._dtype: torch.dtype | None = None

    def model_found(self, model: nn.Module) -> None:
        """Hook the model's forward."""
        is_compiled_in_place = is_compiled(model) and not wraps_compiled(model)
        if model not in self._models and not is_compiled_in_place and not isinstance(model, torch.jit.ScriptModule):
            self._models.add(model)
            self._hooks.put_on(model, self._look)

    def entered(self, region: Any) -> None:
        """Count active regions, because disabling autocast for validation is deliberate."""
        self._regions.depth = getattr(self._regions, "depth", 0) + 1

    def left(self, region: Any) -> None:
        """Count active regions."""
        self._regions.depth = getattr(self._regions, "depth", 1) - 1

    def _look(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if is_jit_tracing():
            return
        given = args if args and isinstance(args[0], torch.Tensor) else tree_leaves((args, kwargs))
        device = next((leaf.device.type for leaf in given if isinstance(leaf, torch.Tensor)), None)
        if device is None:
            return
        is_cast, is_in_region = torch.is_autocast_enabled(device), getattr(self._regions, "depth", 0) > 0
        if model.training:
            if is_cast:
                self._trains_in_autocast, self._dtype = True, torch.get_autocast_dtype(device)
        elif self._trains_in_autocast and not (is_cast or is_in_region or passes_through(*_EXPORTS)):
            place = caller()
            self.watch.report(
                "validation-outside-autocast",
                "the model trains inside autocast and is evaluated outside it here: this is slower, and its results "
                "differ from those in training",
                partial(in_region, region=f'torch.autocast("{device}", dtype={self._dtype})'),
                place,
            )

    def ticked(self) -> None:
        """Restore hooks that were removed temporarily because torch's fused kernels or compiler need it."""
        self._hooks.put_back()

    def stop(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()
        self._models.clear()
