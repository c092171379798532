"""The casts that policies add, and functions that set autocast's native state around them.

Dynamo must inline these functions into the module they serve. If it compiled one separately, the state that it sets
would be reset when the function returns.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import OrderedDict
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from castwise._torch_private import only_inlined
from castwise.amp import _traced_region


class Casts:
    """Casts the floating-point tensors of a device, except fp64, including those nested in containers.

    Tuples, lists, dicts and dataclasses are traversed. A value with nothing to cast is returned as the same object, and
    an object that occurs twice is cast once. Call `give_back` after a call whose arguments were cast.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._device_type, self._dtype = device_type, dtype
        # Pairs of an original and its replacement.
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._containers: list[tuple[Any, Any]] = []

    @only_inlined
    def cast(self, value: Any) -> Any:
        """Return a value with its tensors cast."""
        if isinstance(value, torch.Tensor):
            return self._cast_tensor(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if not isinstance(value, (tuple, list, dict)) and not _has_fields(value):
            return value
        for original, given in self._containers:
            if original is value:
                return given
        before = _contents(value)
        items = [self.cast(item) for item in before]
        if _are_same(before, items):
            return value
        given = _with_contents(value, items)
        self._containers.append((value, given))
        return given

    @only_inlined
    def _cast_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if (
            tensor.dtype is self._dtype
            or tensor.dtype is torch.float64
            or not tensor.is_floating_point()
            or tensor.device.type != self._device_type
        ):
            return tensor
        for original, cast in self._tensors:
            if original is tensor:
                return cast
        cast = tensor.to(self._dtype)
        self._tensors.append((tensor, cast))
        return cast

    @only_inlined
    def give_back(self) -> None:
        """Copy changes that a call made to its replaced lists and dicts back to the caller's originals.

        Layers of Gemma 3n and 4 share keys and values in a dict that is passed to all of them (transformers#45663).
        """
        for original, given in self._containers:
            if type(original) is dict:
                items = {key: self._original(item) for key, item in given.items()}
                original.clear()
                original.update(items)
            elif type(original) is list:
                original[:] = [self._original(item) for item in given]

    @only_inlined
    def _original(self, item: Any) -> Any:
        for original, given in (*self._tensors, *self._containers):
            if given is item:
                return original
        return item


@only_inlined
def cast_floats(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Cast the tensors in one value."""
    return Casts(device_type, dtype).cast(value)


@only_inlined
def _has_fields(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


@only_inlined
def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and not any(map(operator.is_not, some, others))


@only_inlined
def _names(value: Any) -> Any:
    """Return the keys of a dict and the attributes of a dataclass; None for a tuple or list."""
    keys = list(value) if isinstance(value, dict) else []
    attributes = _attributes(value) if _has_fields(value) else []
    return None if isinstance(value, (tuple, list)) else (keys, attributes)


@only_inlined
def _attributes(value: Any) -> list[str]:
    if hasattr(value, "__dict__"):
        return list(value.__dict__)
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


@only_inlined
def _contents(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return list(value)
    values = list(dict.values(value)) if isinstance(value, dict) else []
    return values + ([getattr(value, name) for name in _attributes(value)] if _has_fields(value) else [])


@only_inlined
def _with_contents(value: Any, items: list[Any]) -> Any:
    """Return a container like `value` with other items; `value` itself if its type cannot be rebuilt."""
    if isinstance(value, tuple):
        if hasattr(value, "_make"):
            return value._make(items)
        try:
            return type(value)(items)
        except TypeError:
            return value
    if type(value) is list:
        return items
    if type(value) is dict:
        return dict(zip(value, items, strict=True))
    if isinstance(value, dict):
        given: Any = type(value).__new__(type(value))
        if getattr(value, "__dict__", None) is value:  # a dict whose items are also its attributes
            given.__dict__ = given
        elif hasattr(value, "__dict__"):
            given.__dict__.update(value.__dict__)
        if hasattr(value, "default_factory"):
            given.default_factory = value.default_factory
    else:
        given = copy.copy(value)
    _fill(given, _names(value), items)
    return given


@only_inlined
def _fill(container: Any, names: Any, items: list[Any]) -> None:
    """Replace all items of a list, dict or dataclass."""
    if names is None:
        container[:] = items
        return
    keys, attributes = names
    if isinstance(container, dict):
        kind = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)
        for key, item in zip(keys, items[: len(keys)], strict=True):
            kind.__setitem__(container, key, item)
    for name, item in zip(attributes, items[len(keys) :], strict=True):
        object.__setattr__(container, name, item)


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
    """Set the state that `native_state_of` returns; `restore_native_state` must follow."""
    if is_dynamo_compiling():
        _traced_region.prepare(device_type)
    _traced_region.enter(device_type, enabled, dtype, cache_enabled)


@only_inlined
def restore_native_state(device_type: str, enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
    """Restore the state that `native_state_of` returned before `set_native_state`."""
    _traced_region.leave(device_type, enabled, dtype, cache_enabled, False)


class in_native_state:  # noqa: N801 - reads as a function, like the context managers of torch
    """Set autocast's native state in a `with` block."""

    def __init__(self, device_type: str, enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
        self._device_type, self._inner = device_type, (enabled, dtype, cache_enabled)

    @only_inlined
    def __enter__(self) -> None:
        self._outer = native_state_of(self._device_type)
        set_native_state(self._device_type, *self._inner)

    @only_inlined
    def __exit__(self, *_: object) -> None:
        restore_native_state(self._device_type, *self._outer)
