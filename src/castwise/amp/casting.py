"""Casts that policies make by themselves, and the setting of autocast's native state around them.

Functions here run in hooks, which Dynamo may call by themselves: it must not compile them apart from the module they
belong to, or the state they set would end with them.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from castwise._torch_private import only_inlined, version
from castwise.amp import _traced_region


class Lent:
    """What a call was given in the place of mutable arguments, to give back to the caller what it has done to them."""

    def __init__(self) -> None:
        self.lists: list[tuple[Any, Any, list[Any], list[Any]]] = []
        self.tensors: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    @only_inlined
    def give_back(self) -> None:
        """Write to the caller's lists, dicts and tensors what has been written to those in their place."""
        for original, lent, before, items in self.lists:
            now = list(lent.values()) if isinstance(lent, dict) else list(lent)
            keys = list(lent) if isinstance(lent, dict) else None
            if (keys is not None and keys != list(original)) or not _are(now, items):
                given = [_replaced(item, items, before) for item in now]
                if keys is None:
                    original[:] = given
                else:
                    original.clear()
                    original.update(zip(keys, given, strict=True))
        for tensor, cast, count in self.tensors:
            if version(cast) != count:
                tensor.copy_(cast)


@only_inlined
def _are(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and not any(map(operator.is_not, some, others))


@only_inlined
def _replaced(item: Any, items: list[Any], by: list[Any]) -> Any:
    for one, other in zip(items, by, strict=True):
        if one is item:
            return other
    return item


@only_inlined
def cast_floats(value: Any, device_type: str, dtype: torch.dtype, lent: Lent | None = None) -> Any:
    """Cast the floating-point tensors of a device in a value, except fp64.

    Tuples, lists, dicts and dataclasses are looked into; what has nothing to cast in it stays the same object.
    """
    if isinstance(value, torch.Tensor):
        if (
            value.dtype is dtype
            or value.dtype is torch.float64
            or not value.is_floating_point()
            or value.device.type != device_type
        ):
            return value
        cast = value.to(dtype)
        if lent is not None and not is_dynamo_compiling():
            lent.tensors.append((value, cast, version(cast)))
        return cast
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        cast_fields = {name: cast_floats(item, device_type, dtype, lent) for name, item in fields.items()}
        return value if _are(list(fields.values()), list(cast_fields.values())) else _with_fields(value, cast_fields)
    if not isinstance(value, (tuple, list, dict)):
        return value
    before = list(value.values()) if isinstance(value, dict) else list(value)
    items = [cast_floats(item, device_type, dtype, lent) for item in before]
    if _are(before, items):
        return value
    if isinstance(value, tuple):
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    result = copy.copy(value)
    if isinstance(result, dict):
        result.update(zip(list(value), items, strict=True))
    else:
        result[:] = items
    if lent is not None:
        lent.lists.append((value, result, before, items))
    return result


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    return dataclasses.replace(value, **fields)


@only_inlined
def cast_arguments(
    args: Any, kwargs: Any, device_type: str, dtype: torch.dtype, lent: Lent | None = None
) -> tuple[Any, Any]:
    """Cast the arguments of a call."""
    return (
        tuple([cast_floats(arg, device_type, dtype, lent) for arg in args]),
        {name: cast_floats(arg, device_type, dtype, lent) for name, arg in kwargs.items()},
    )


@only_inlined
def native_state_of(device_type: str) -> tuple[bool, torch.dtype, bool]:
    """Return whether autocast is enabled for a device in this thread, its dtype, and whether casts are cached."""
    return (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )


@only_inlined
def set_native_state(device_type: str, enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
    """Set what `native_state_of` returns; `restore_native_state` has to follow."""
    if is_dynamo_compiling():
        _traced_region.prepare(device_type)
    _traced_region.enter(device_type, enabled, dtype, cache_enabled)


@only_inlined
def restore_native_state(device_type: str, enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
    """Set what `native_state_of` returned before `set_native_state`."""
    _traced_region.leave(device_type, enabled, dtype, cache_enabled, False)


class in_native_state:  # noqa: N801 - reads as a function, like the context managers of torch
    """Hold autocast's native state for a while."""

    def __init__(self, device_type: str, enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
        self._device_type, self._inner = device_type, (enabled, dtype, cache_enabled)

    @only_inlined
    def __enter__(self) -> None:
        self._outer = native_state_of(self._device_type)
        set_native_state(self._device_type, *self._inner)

    @only_inlined
    def __exit__(self, *_: object) -> None:
        restore_native_state(self._device_type, *self._outer)
