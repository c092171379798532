"""Casts that policies make by themselves, and the switching of autocast's native state around them."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from castwise._torch_private import tree_flatten, tree_unflatten
from castwise.amp import _traced_region


def cast_floats(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of a device in a value, except fp64.

    Containers that `torch.utils._pytree` knows of are looked into, and stay the same objects if there is nothing to
    cast in them.
    """
    if isinstance(value, torch.Tensor):
        return _cast(value, device_type, dtype)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    leaves, spec = tree_flatten(value)
    cast = [_cast(leaf, device_type, dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if all(new is old for new, old in zip(cast, leaves, strict=True)):
        return value
    return tree_unflatten(cast, spec)


def cast_arguments(args: Any, kwargs: Any, device_type: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Cast the arguments of a call, one by one: what is not cast is what the caller has."""
    return (
        tuple([cast_floats(arg, device_type, dtype) for arg in args]),
        {name: cast_floats(arg, device_type, dtype) for name, arg in kwargs.items()},
    )


def _cast(tensor: torch.Tensor, device_type: str, dtype: torch.dtype) -> torch.Tensor:
    if (
        tensor.dtype is dtype
        or tensor.dtype is torch.float64
        or not tensor.is_floating_point()
        or tensor.device.type != device_type
    ):
        return tensor
    return tensor.to(dtype)


def native_state_of(device_type: str) -> tuple[bool, torch.dtype, bool]:
    """Return whether autocast is enabled for a device in this thread, its dtype, and whether casts are cached."""
    return (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )


def switch(device_type: str, enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
    """Set what `native_state_of` returns; `switch_back` has to follow."""
    if is_dynamo_compiling():
        _traced_region.prepare(device_type)
    _traced_region.enter(device_type, enabled, dtype, cache_enabled)


def switch_back(device_type: str, enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
    """Set what `native_state_of` returned before `switch`."""
    _traced_region.leave(device_type, enabled, dtype, cache_enabled, False)


class native_state:  # noqa: N801 - reads as a function, like the context managers of torch
    """Hold autocast's native state for a while."""

    def __init__(self, device_type: str, enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
        self._device_type, self._inner = device_type, (enabled, dtype, cache_enabled)

    def __enter__(self) -> None:
        self._outer = native_state_of(self._device_type)
        switch(self._device_type, *self._inner)

    def __exit__(self, *_: object) -> None:
        switch_back(self._device_type, *self._outer)
