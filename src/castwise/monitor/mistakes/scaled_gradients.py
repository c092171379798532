"""Who looks at gradients while they are still multiplied by the scale.

Between a scaled backward and the unscaling a gradient's Python object is, for a few iterations, of a class that is
told of each torch function it is given to. The tensor, its memory and what is computed from it stay the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from castwise._torch_private import PlainFunctions, tree_leaves
from castwise.monitor.mistakes.mistake import Place, caller, passes_through

# What depends on how large gradients are, and not on their sum alone, by which one looks for an inf.
_MEASURES = frozenset(
    {
        *("norm", "vector_norm", "linalg_vector_norm", "matrix_norm", "linalg_norm", "_foreach_norm", "dist", "dot"),
        *("abs", "abs_", "absolute", "max", "min", "amax", "amin", "aminmax", "topk", "quantile", "median"),
        *("pow", "pow_", "__pow__", "square", "std", "var", "mean", "histc", "histogram", "log", "log2", "log10"),
        *("clamp", "clamp_", "clip", "clip_", "clamp_max_", "clamp_min_", "clamp_max", "clamp_min"),
        *("_foreach_clamp_max_", "_foreach_clamp_min_", "_foreach_abs", "_foreach_pow", "_foreach_max"),
        *("gt", "ge", "lt", "le", "__gt__", "__ge__", "__lt__", "__le__"),
        *("item", "tolist", "numpy", "__array__", "__repr__", "__format__", "__float__"),
    }
)
_CLIPS = frozenset(name for name in _MEASURES if "clamp" in name or "clip" in name)
# What hands on the same numbers.
_SAME = frozenset(
    {
        *("data", "detach", "clone", "view", "view_as", "reshape", "flatten", "ravel", "contiguous", "squeeze"),
        *("unsqueeze", "float", "double", "to", "cpu", "cuda", "cat", "concat", "stack", "__getitem__", "T"),
    }
)
# What may be an unscaling by hand.
_SCALINGS = frozenset({"mul_", "div_", "__imul__", "__itruediv__", "copy_", "_foreach_mul_", "_foreach_div_", "set_"})


class ScaledGradient(torch.Tensor):
    """A gradient that is still scaled, while a `Window` is open."""

    window: Window | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with PlainFunctions():
            result = func(*args, **(kwargs or {}))
        if cls.window is not None and not is_dynamo_compiling():
            cls.window.note(func, args, result)
        return result


class Window:
    """The time between a scaled backward and the unscaling.

    Args:
        params: Those whose gradients the backward has brought.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self.clipped: Place | None = None
        self.measured: Place | None = None
        self._gradients: list[weakref.ref[torch.Tensor]] = []
        for param in params:
            self._take(param.grad)
        ScaledGradient.window = self

    def note(self, func: Any, args: Any, result: Any) -> None:
        """Look at a torch function that was called with a scaled gradient."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _MEASURES:
            is_clipping = name in _CLIPS or passes_through("nn/utils/clip_grad.py", "_fully_sharded_data_parallel.py")
            if is_clipping:
                self.clipped = self.clipped or caller()
            else:
                self.measured = self.measured or caller()
        elif name in _SAME:
            self._take(result)
        elif name in _SCALINGS:
            for leaf in tree_leaves(args):
                _put_back(leaf)

    def close(self) -> None:
        """Make gradients what they were."""
        ScaledGradient.window = None
        for reference in self._gradients:
            _put_back(reference())
        self._gradients.clear()

    def _take(self, tensor: Any) -> None:
        if type(tensor) is torch.Tensor:
            tensor.__class__ = ScaledGradient
            self._gradients.append(weakref.ref(tensor))


def _put_back(tensor: Any) -> None:
    if type(tensor) is ScaledGradient:
        tensor.__class__ = torch.Tensor  # type: ignore[assignment]  # it is an object of either


def is_one(scaler: Any) -> bool:
    """Say whether nothing is scaled, as far as the host knows without waiting."""
    scale = scaler._get_scale_async()
    return scale is not None and scale.device.type == "cpu" and scale.item() == 1.0
