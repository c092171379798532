"""Find code that depends on the magnitude of gradients while they are still multiplied by the scale.

For a few iterations, the class of a gradient's Python object is changed between a scaled backward and the unscaling.
The new class intercepts every torch function called with the gradient or with a tensor computed from it. Tensors,
memory and results do not change. The scale matters only where a number is read from such a tensor, or a bound applied.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from castwise._guard import ErrorBoundary, guarded
from castwise._mistakes.mistake import Place, caller
from castwise._torch_private import PlainFunctions, tree_leaves

# Functions that apply a bound.
_CLIPS = frozenset(
    [name + suffix for name in ("clamp", "clip", "clamp_min", "clamp_max") for suffix in ("", "_")]
    + ["_foreach_clamp_max_", "_foreach_clamp_min_", "_foreach_clamp_max", "_foreach_clamp_min"]
)
# Functions that return values to Python.
_READS = frozenset(["item", "tolist", "numpy", "__array__", "__float__", "__repr__", "__format__"])
# Comparisons, which depend on the scale unless they are with 0.
_COMPARISONS = frozenset(["gt", "ge", "lt", "le", "__gt__", "__ge__", "__lt__", "__le__"])
# Functions that may unscale a gradient in place, by hand.
_SCALINGS = frozenset(["mul_", "div_", "__imul__", "__itruediv__", "copy_", "_foreach_mul_", "_foreach_div_", "set_"])
_DIVISIONS = frozenset(["div", "true_divide", "divide", "__truediv__", "__rtruediv__", "_foreach_div"])
_QUOTIENTS = _DIVISIONS - {"_foreach_div"} | {"cosine_similarity", "sign"}


class ScaledGradient(torch.Tensor):
    """A gradient that is still scaled, or a tensor computed from one, while a `Window` is open."""

    window: Window | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with PlainFunctions():
            result = func(*args, **(kwargs or {}))
        if cls.window is not None and not is_dynamo_compiling():
            cls.window.note(func, args, result)
        return result

    # Copies and saved tensors are plain.

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's

    def _plain(self) -> torch.Tensor:
        with PlainFunctions():
            return self.as_subclass(torch.Tensor)


class Window:
    """The time between a scaled backward and the unscaling.

    Args:
        params: The parameters that received gradients in the backward.
        guard: Catches errors of the checks.
        scale: The scale of the gradients, as the tensor that the scaler returns.
    """

    def __init__(self, params: Iterable[torch.Tensor], guard: ErrorBoundary, scale: torch.Tensor) -> None:
        self._guard, self._scale = guard, scale
        self.clipped: Place | None = None
        self.measured: Place | None = None
        self.kept: Place | None = None
        """Line that computed a norm which was still unused, but alive, when the window closed."""
        self._norms: dict[int, tuple[weakref.ref[torch.Tensor], Place | None]] = {}
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        for param in params:
            self._take(param.grad)
        ScaledGradient.window = self

    @guarded
    def note(self, func: Any, args: Any, result: Any) -> None:
        """Check a torch function that was called with a scaled gradient."""
        name = getattr(func, "__name__", "")
        if name == "__get__" and not isinstance(result, torch.Tensor):
            return  # an attribute, such as its device
        norm = self._norm_used(args) or (caller() if "norm" in name else None)
        if name in _CLIPS:
            self.clipped = self.clipped or caller()
        elif name in _READS or (name in _COMPARISONS and not _is_zero(args[-1])):
            self.measured = self.measured or caller()
        elif name in _SCALINGS:
            for leaf in tree_leaves(args):
                _put_back(leaf)
            return
        elif name in _DIVISIONS and any(leaf is self._scale for leaf in tree_leaves(args)):
            return  # unscaled by hand
        elif name in _QUOTIENTS and sum(type(leaf) is ScaledGradient for leaf in tree_leaves(args)) != 1:
            return  # a quotient of two scaled tensors does not depend on the scale
        for leaf in tree_leaves(result):
            self._take(leaf)
            if norm is not None and type(leaf) is ScaledGradient and leaf.dim() == 0:
                self._norms[id(leaf)] = weakref.ref(leaf), norm

    def _norm_used(self, args: Any) -> Place | None:
        """Forget the norms among a function's arguments, whose result replaces them. Return where one was computed."""
        used_at = None
        for leaf in tree_leaves(args) if self._norms else ():
            reference, place = self._norms.pop(id(leaf), (None, None))
            used_at = used_at or (place if reference is not None and reference() is leaf else None)
        return used_at

    def close(self) -> None:
        """Restore the class of all tensors."""
        ScaledGradient.window = None
        self.kept = next((place for reference, place in self._norms.values() if reference() is not None), None)
        for reference in self._tensors:
            _put_back(reference())
        self._tensors.clear()

    def _take(self, tensor: Any) -> None:
        if PlainFunctions is None:  # missing in this version of torch
            return
        if type(tensor) is torch.Tensor and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.__class__ = ScaledGradient
            self._tensors.append(weakref.ref(tensor))


def is_one(scaler: Any) -> bool:
    """Return True if the scale is known to be 1 without a sync."""
    scale = scaler._get_scale_async()
    return scale is not None and scale.device.type == "cpu" and scale.item() == 1.0


def _is_zero(value: object) -> bool:
    return isinstance(value, (int, float)) and value == 0


def _put_back(tensor: Any) -> None:
    if type(tensor) is ScaledGradient:
        tensor.__class__ = torch.Tensor  # type: ignore[assignment]  # both classes have the same layout
