"""Gradients that are already unscaled and must not be unscaled again.

Most belong to a parameter that two optimizers share: its gradient is unscaled once, by the optimizer that comes first.

Shared parameters are found when the second optimizer is first seen. From then on, a hook on each of them notes when a
backward adds a scaled gradient. In the iteration in which an optimizer is first seen, all its parameters have that
hook, because the optimizer that shares them may come later; after that, a single optimizer costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary


class SharedParams:
    """Which gradients of shared parameters were unscaled since the last `update()`."""

    def __init__(self) -> None:
        self._shared = WeakTensorKeyDictionary()
        self._newcomers: dict[torch.Tensor, RemovableHandle] = {}
        self.unscaled: dict[torch.Tensor, torch.Tensor | None] = {}
        """By parameter: None, or the found_inf (fp32, one element) of a step that unscaled it only if that is 0."""
        self.watches = False
        """Whether there are parameters for `note_unscaled` to note, or for `begin_iteration` to forget."""

    def add(self, params: list[torch.Tensor], of_others: Iterable[list[torch.Tensor]]) -> None:
        """Find which parameters of a new optimizer belong to known ones too, and watch all the others for now."""
        known = {param for others in of_others for param in others}
        for param in params:
            if not isinstance(param, torch.Tensor):
                continue  # is refused when gradients are collected
            if param in self._shared or not (param.requires_grad and param.is_leaf):
                continue
            if param in known:
                handle = self._newcomers.pop(param, None)
                if handle is None:  # not watched so far: its gradient counts as scaled, as it does in torch
                    self.unscaled.pop(param, None)
                self._shared[param] = handle or _register(param, self._accumulated)
            elif param not in self._newcomers:
                self._newcomers[param] = _register(param, self._accumulated)
        self.watches = True

    def _accumulated(self, param: torch.Tensor) -> None:
        self.forget([param])

    def note_unscaled(self, params: list[torch.Tensor], unless: torch.Tensor | None = None) -> None:
        """Note that gradients are unscaled, or with `unless` (fp32, one element), that they are if it is zero."""
        for param in params:
            if param in self._newcomers or param in self._shared:
                self.unscaled[param] = unless

    def mark(self, params: list[torch.Tensor]) -> None:
        """Note that gradients are unscaled, although others of the same optimizer are not."""
        self.unscaled.update(dict.fromkeys(params))
        self.watches = True

    def forget(self, params: list[torch.Tensor]) -> None:
        """Note that gradients are scaled."""
        for param in params:
            self.unscaled.pop(param, None)

    def begin_iteration(self) -> None:
        """Begin an iteration, in which all gradients are scaled."""
        self.unscaled.clear()
        for handle in self._newcomers.values():
            handle.remove()
        self._newcomers.clear()
        self.watches = bool(self._shared)


def _register(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    return param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call,no-any-return]  # torch's
