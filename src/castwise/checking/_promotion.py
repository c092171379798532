"""`Promotion`: a mode in which a program computes in float64 whatever dtypes it asks for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from castwise._layered_functions import LayeredFunction
from castwise._torch_private import TorchDispatchMode, schema_of, tree_map
from castwise.tracing._op_by_op import FUSED, call_op

WIDE = {
    dtype: torch.float64
    for name in (
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    )
    if (dtype := getattr(torch, name, None)) is not None
} | {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
"""The dtype in which values of each narrower dtype are computed."""

_NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64}
_HALF_TO_FLOAT = {"aten._softmax.default", "aten._log_softmax.default"}
_COLUMNS = 600_000  # numbers of float64 that a core's cache holds
_ATTENTION = "scaled_dot_product"
_LOAD = LayeredFunction("load", torch, torch.serialization)
# Replaced rather than caught by a TorchFunctionMode, which would cost a call of Python for each function of torch.
_CONVOLUTIONS = [LayeredFunction(name, torch, functional) for name in ("conv1d", "conv2d", "conv3d")]


class _Facts(NamedTuple):
    """What the mode needs to know of an op.

    Args:
        name: The op.
        is_view: Whether it returns a view.
        written: Positions of arguments that it writes to.
        written_names: Their names.
        draws: Whether it draws random numbers.
        is_simple: Whether it is none of this, and needs nothing special: most are.
    """

    name: str
    is_view: bool
    written: frozenset[int]
    written_names: frozenset[str]
    draws: bool
    is_simple: bool


class Promotion(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Computes in float64: casts to, and tensors made in, a narrower floating-point dtype are float64 instead.

    Random numbers are drawn in float32 and then widened, so that they are those of a run in float32. Narrow tensors
    made elsewhere, such as those of NumPy, are widened when an op reads them. Use `exact_arithmetic`, which also sets
    the default dtype.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._is_loading = False

    def load(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `torch.load`, which builds tensors over bytes of a narrower dtype, and widen what it returns."""
        self._is_loading = True
        try:
            loaded = load(*args, **kwargs)
        finally:
            self._is_loading = False
        with torch.no_grad():
            return tree_map(lambda value: value if getattr(value, "requires_grad", False) else widen(value), loaded)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        if self._is_loading:
            return func(*args, **(kwargs or {}))
        facts = _facts_of(func)
        if facts.is_simple and not kwargs:
            return func(*[_widen_any(x) for x in args])
        args, kwargs = tuple(map(_widen_dtype, args)), {name: _widen_dtype(x) for name, x in (kwargs or {}).items()}
        if facts.draws:
            return _draw(func, facts, args, kwargs)
        if facts.name in _SPECIAL:
            return _SPECIAL[facts.name](*args, **kwargs)
        if facts.name in _HALF_TO_FLOAT:
            args = (args[0], args[1], False)
        if facts.name.partition("_")[2].startswith("fused_"):
            kwargs = {name: narrow(x) if name in ("grad_scale", "found_inf") else x for name, x in kwargs.items()}
        elif not facts.is_view:
            args = tuple(x if i in facts.written else _widen_all(x) for i, x in enumerate(args))
            kwargs = {name: x if name in facts.written_names else _widen_all(x) for name, x in kwargs.items()}
        return call_op(func, args, kwargs)


@functools.cache
def _facts_of(func: Any) -> _Facts:
    schema = schema_of(func)
    arguments = [] if schema is None else schema.arguments
    written = {(i, x.name) for i, x in enumerate(arguments) if x.alias_info is not None and x.alias_info.is_write}
    name = str(func)
    draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and _ATTENTION not in name
    is_view = bool(getattr(func, "is_view", False))
    is_special = (
        name in _SPECIAL or name in _HALF_TO_FLOAT or name in FUSED or name.partition("_")[2].startswith("fused_")
    )
    return _Facts(
        name,
        is_view,
        frozenset(i for i, _ in written),
        frozenset(name for _, name in written),
        draws,
        not (is_view or written or draws or is_special),
    )


def widen(value: Any) -> Any:
    """Return a tensor in float64 if it is of a narrower floating-point dtype; anything else as it is."""
    return value.to(WIDE[value.dtype]) if isinstance(value, torch.Tensor) and value.dtype in WIDE else value


def _widen_all(value: Any) -> Any:
    """Widen an argument of an op: a tensor, a list of them, or anything else."""
    return list(map(widen, value)) if isinstance(value, (list, tuple)) else widen(value)


def narrow(value: Any) -> Any:
    """Return a float64 tensor in float32; anything else as it is."""
    return value.to(_NARROW[value.dtype]) if isinstance(value, torch.Tensor) and value.dtype in _NARROW else value


def _widen_dtype(value: Any) -> Any:
    return WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _widen_any(value: Any) -> Any:
    """Widen an argument of an op, be it a tensor, a list of them, or a dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(WIDE[value.dtype]) if value.dtype in WIDE else value
    if isinstance(value, (list, tuple)):
        return list(map(widen, value))
    return WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _draw(func: Any, facts: _Facts, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op that draws random numbers in float32, and return them in float64."""
    if facts.name == "aten.native_dropout.default":
        return _native_dropout(func, *args)
    if facts.written:  # such as normal_(): drawn into a float32 tensor, and copied
        if not isinstance(args[0], torch.Tensor) or args[0].dtype not in _NARROW:
            return func(*args, **kwargs)
        drawn = torch.empty_like(args[0], dtype=_NARROW[args[0].dtype])
        func(drawn, *map(narrow, args[1:]), **kwargs)
        return args[0].copy_(drawn)
    kwargs = {name: _NARROW.get(x, x) if isinstance(x, torch.dtype) else narrow(x) for name, x in kwargs.items()}
    schema = schema_of(func)
    if kwargs.get("dtype") is None and schema is not None and any(x.name == "dtype" for x in schema.arguments):
        is_like = bool(args) and isinstance(args[0], torch.Tensor)
        if not (is_like and not args[0].is_floating_point()) and "int" not in facts.name and "perm" not in facts.name:
            kwargs["dtype"] = torch.float32
    return tree_map(widen, func(*map(narrow, args), **kwargs))


def _native_dropout(func: Any, input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop elements of a float64 tensor that would be dropped in float32."""
    _, mask = func(torch.ones_like(input, dtype=torch.float32), p, train)
    kept = 1.0 if train is False or p == 1 else 1 / (1 - p)
    return input * mask * kept, mask


def _unscale(grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Replace an op of gradient scaling whose kernel takes a float32 scale only."""
    for grad in grads:
        found_inf.logical_or_(~torch.isfinite(grad).all())
        grad.mul_(inv_scale)


def _update_scale(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> torch.Tensor:
    """Replace the op that moves the scale, whose kernel takes a float32 scale only."""
    narrow_scale = scale.float()
    torch._amp_update_scale_(
        narrow_scale, growth_tracker, found_inf.float(), growth_factor, backoff_factor, growth_interval
    )
    return scale.copy_(narrow_scale)


def _samples(image: torch.Tensor, weight: torch.Tensor, stride: list[int]) -> int:
    """Return how many samples of a batch to convolve at once.

    In float64, torch's only kernel on a CPU copies all that each output reads before it multiplies. It is several times
    slower if these copies of a batch do not fit into the cache.
    """
    columns = math.prod(image.shape[1:]) * math.prod(weight.shape[2:]) // math.prod(stride)
    return max(1, _COLUMNS // max(columns, 1)) if image.device.type == "cpu" else max(1, image.shape[0])


def _convolution(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    """Convolve some samples after the others."""
    image, weight, bias = map(widen, (image, weight, bias))
    parts = torch.split(image, _samples(image, weight, rest[0]))
    results = [torch.ops.aten.convolution(part, weight, bias, *rest) for part in parts]
    return results[0] if len(results) == 1 else torch.cat(results)


def _convolution_backward(grad: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    """Return the gradients of a convolution's input, weight and bias, of some samples after the others."""
    grad, image, weight = map(widen, (grad, image, weight))
    count = _samples(image, weight, rest[1])
    pairs = zip(torch.split(grad, count), torch.split(image, count), strict=True)
    results = [torch.ops.aten.convolution_backward(*pair, weight, *rest) for pair in pairs]
    if len(results) == 1:
        return results[0]
    of_images, *of_params = zip(*results, strict=True)
    of_image = None if of_images[0] is None else torch.cat(of_images)
    return of_image, *(None if parts[0] is None else functools.reduce(torch.add, parts) for parts in of_params)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "aten._amp_foreach_non_finite_check_and_unscale_.default": _unscale,
    "aten._amp_update_scale_.default": _update_scale,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.lift_fresh.default": widen,  # torch.tensor(...), which torch counts as a view
}


def _widen_first(convolution: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a convolution, which refuses a bias of another dtype than the input before `Promotion` is asked."""
    return convolution(*map(widen, args), **{name: widen(value) for name, value in kwargs.items()})


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Compute in float64 in the block: see `Promotion`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    promotion = Promotion()
    _LOAD.add(promotion.load)
    for convolution in _CONVOLUTIONS:
        convolution.add(_widen_first)
    try:
        with promotion:
            yield
    finally:
        _LOAD.remove(promotion.load)
        for convolution in _CONVOLUTIONS:
            convolution.remove(_widen_first)
        torch.set_default_dtype(before)
