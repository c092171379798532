"""`Promotion`: a mode in which a program computes in float64 whatever dtypes it asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from castwise._layered_functions import LayeredFunction
from castwise._torch_private import TorchDispatchMode, schema_of, tree_map
from castwise.checking._convolutions import convolution, convolution_backward
from castwise.checking._rounding import RandomRounding
from castwise.tracing._op_by_op import call_op, called_directly, is_fused

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
_OF_SCALERS = ("grad_scale", "found_inf")
_ATTENTION = "scaled_dot_product"
_LOAD = LayeredFunction("load", torch, torch.serialization)
# Replaced rather than caught by a TorchFunctionMode, which would cost a call of Python for each function of torch.
_CONVOLUTIONS = [LayeredFunction(name, torch, functional) for name in ("conv1d", "conv2d", "conv3d")]


_DTYPES = {"int", "Optional[int]"}
"""Types of arguments, as schemas write them, that may be a dtype."""


class _Facts(NamedTuple):
    """What the mode needs to know of an op.

    Args:
        instead: What runs instead of the op; None for the op itself.
        widened: Positions of arguments that are widened.
        kept_names: Names of arguments that are not: those that it writes to, or returns a view of.
    """

    instead: Callable[..., Any] | None
    widened: Sequence[int]
    kept_names: frozenset[str]


@called_directly
class Promotion(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Computes in float64: casts to, and tensors made in, a narrower floating-point dtype are float64 instead.

    Random numbers are drawn in float32 and then widened, so that they are those of a run in float32. Narrow tensors
    made elsewhere, such as those of NumPy, are widened when an op reads them. Use `exact_arithmetic`, which also sets
    the default dtype.

    Args:
        rounding: What moves each result by a rounding, too; as a mode of its own, it would be called for each op.
    """

    def __init__(self, rounding: RandomRounding | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._rounding, self._is_loading = rounding, False

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
        result = func(*args, **(kwargs or {})) if self._is_loading else _run(func, args, kwargs or {})
        return result if self._rounding is None else self._rounding.of_op(func, result)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op in float64."""
    instead, widened, kept_names = _facts_of(func)
    if instead is not None:
        return instead(*args, **kwargs)
    for i in widened:
        if i >= len(args):
            break
        value = args[i]
        if isinstance(value, torch.Tensor) and value.dtype not in WIDE:  # most are wide already
            continue
        wide = _widen_any(value)
        if wide is not value:
            args = (*args[:i], wide, *args[i + 1 :])
    if kwargs:
        kwargs = {name: x if name in kept_names else _widen_any(x) for name, x in kwargs.items()}
    return func(*args, **kwargs)


@functools.cache
def _facts_of(func: Any) -> _Facts:
    schema, name = schema_of(func), str(func)
    if schema is None:
        return _Facts(functools.partial(_run_any, func), (), frozenset())
    is_view = bool(getattr(func, "is_view", False))
    kept = [x.alias_info is not None and (is_view or x.alias_info.is_write) for x in schema.arguments]
    kept_names = frozenset(x.name for x, is_kept in zip(schema.arguments, kept, strict=True) if is_kept)
    instead = _SPECIAL.get(name)
    if name in _HALF_TO_FLOAT:
        instead = functools.partial(_softmax, func)
    elif is_fused(func):
        instead = functools.partial(_run_any, func)
    elif instead is None and torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and _ATTENTION not in name:
        instead = functools.partial(_draw, func, bool(kept_names))
    elif name.partition("_")[2].startswith("fused_"):
        instead = functools.partial(_run_optimizer, func)
    widened = [
        i
        for i, (x, is_kept) in enumerate(zip(schema.arguments, kept, strict=True))
        if not is_kept and ("Tensor" in str(x.type) or str(x.type) in _DTYPES)
    ]
    return _Facts(instead, widened, kept_names)


def widen(value: Any) -> Any:
    """Return a tensor in float64 if it is of a narrower floating-point dtype; anything else as it is."""
    return value.to(WIDE[value.dtype]) if isinstance(value, torch.Tensor) and value.dtype in WIDE else value


def narrow(value: Any) -> Any:
    """Return a float64 tensor in float32; anything else as it is."""
    return value.to(_NARROW[value.dtype]) if isinstance(value, torch.Tensor) and value.dtype in _NARROW else value


def _widen_any(value: Any) -> Any:
    """Widen an argument of an op, be it a tensor, a list of them, or a dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(WIDE[value.dtype]) if value.dtype in WIDE else value
    if isinstance(value, (list, tuple)):
        return list(map(widen, value))
    return WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _run_any(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op of which the arguments are not known, or a fused one."""
    return call_op(func, list(map(_widen_any, args)), {name: _widen_any(x) for name, x in kwargs.items()})


def _run_optimizer(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a fused optimizer, whose kernel takes a scale in float32 only."""
    return func(*args, **{name: narrow(x) if name in _OF_SCALERS else x for name, x in kwargs.items()})


def _softmax(func: Any, values: torch.Tensor, dim: int, _: bool) -> torch.Tensor:
    """Run a softmax without a cast from float16 to float32."""
    return func(widen(values), dim, False)  # type: ignore[no-any-return]  # an op


def _draw(func: Any, is_in_place: bool, *args: Any, **kwargs: Any) -> Any:
    """Run an op that draws random numbers in float32, and return them in float64."""
    name = str(func)
    if name == "aten.native_dropout.default":
        return _native_dropout(func, *args)
    if is_in_place:  # such as normal_(): drawn into a float32 tensor, and copied
        if not isinstance(args[0], torch.Tensor) or args[0].dtype not in _NARROW:
            return func(*args, **kwargs)
        drawn = torch.empty_like(args[0], dtype=_NARROW[args[0].dtype])
        func(drawn, *map(narrow, args[1:]), **kwargs)
        return args[0].copy_(drawn)
    kwargs = {
        name: _NARROW.get(WIDE.get(x, x), x) if isinstance(x, torch.dtype) else narrow(x) for name, x in kwargs.items()
    }
    schema = schema_of(func)
    if kwargs.get("dtype") is None and schema is not None and any(x.name == "dtype" for x in schema.arguments):
        is_like = bool(args) and isinstance(args[0], torch.Tensor)
        if not (is_like and not args[0].is_floating_point()) and "int" not in name and "perm" not in name:
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


def _convolution(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    return convolution(*map(widen, (image, weight, bias)), *rest)


def _convolution_backward(grad: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    return convolution_backward(*map(widen, (grad, image, weight)), *rest)


def _empty(size: Sequence[int], **kwargs: Any) -> Any:
    """Make an uninitialized tensor, in the dtype asked for if it has no elements: it is to be set to other memory.

    So begin tensors that come from another process, as from a worker of a data loader that was not forked.
    """
    named = kwargs if 0 in size else {name: _widen_any(value) for name, value in kwargs.items()}
    return torch.ops.aten.empty.memory_format(size, **named)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "aten.empty.memory_format": _empty,
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
def exact_arithmetic(rounding: RandomRounding | None = None) -> Iterator[None]:
    """Compute in float64 in the block: see `Promotion`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    promotion = Promotion(rounding)
    _LOAD.add(promotion.load)
    for function in _CONVOLUTIONS:
        function.add(_widen_first)
    try:
        with promotion:
            yield
    finally:
        _LOAD.remove(promotion.load)
        for function in _CONVOLUTIONS:
            function.remove(_widen_first)
        torch.set_default_dtype(before)
