"""How `custom_fwd` casts the inputs of autograd Functions, and how it finds their contexts.

A `torch.autograd.Function` may or may not pass a context to its `forward`. If it sets up its context separately, the
autocast state is recorded there. User arguments are never written to.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import get_autocast_dtype, is_autocast_enabled

from castwise._torch_private import is_forward_recorded, record_forward


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Cast a device's floating-point tensors except fp64, including those in containers.

    Lists, tuples and named tuples keep their type, mappings become dicts, and other iterables become generators.
    Strings, numpy arrays and other objects without tensors are returned unchanged.
    """
    if isinstance(value, torch.Tensor):
        eligible = value.is_floating_point() and value.device.type == device_type and value.dtype is not torch.float64
        return value.to(dtype) if eligible else value
    if isinstance(value, (str, bytes)) or _is_numpy_array(value):
        return value
    if isinstance(value, Mapping):
        return {_cast(k, device_type, dtype): _cast(v, device_type, dtype) for k, v in value.items()}
    if isinstance(value, Iterable):
        items = (_cast(item, device_type, dtype) for item in value)
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make(items)
        return type(value)(items) if isinstance(value, (list, tuple)) else items
    return value


def _is_numpy_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")  # without the import there are no arrays
    return numpy is not None and isinstance(value, numpy.ndarray)


def record_autocast(ctx: Any, device_type: str, cast_inputs: torch.dtype | None) -> None:
    """Record the forward's autocast state on a context."""
    record_forward(ctx, cast_inputs is None and is_autocast_enabled(device_type), get_autocast_dtype(device_type))


class SeparateContexts:
    """Records the autocast state for Functions whose `forward` does not receive the context.

    A decorator of `forward` cannot know its class yet, so the class is looked up when `forward` first runs.
    Autograd then calls `setup_context` with the context, in the same autocast state.
    """

    def __init__(self, device_type: str, cast_inputs: torch.dtype | None) -> None:
        self.device_type = device_type
        self.cast_inputs = cast_inputs
        self.owners: weakref.WeakSet[type[Any]] = weakref.WeakSet()
        self.functions = 0
        self.lock = threading.Lock()

    def record_for(self, forward: Callable[..., Any]) -> None:
        """Wrap the `setup_context` of every Function that has this `forward`, once."""
        with self.lock:
            functions = len(type.__subclasses__(torch.autograd.Function))
            # A search of all Functions takes as long as an op. Unless there are new ones, search only known owners.
            roots = list(self.owners) if functions == self.functions else [torch.autograd.Function]
            self.functions = functions
            for cls in _with_subclasses(roots):
                if _is_decorated(cls.forward, forward):
                    self.owners.add(cls)
                    self._wrap(cls)

    def _wrap(self, cls: type[Any]) -> None:
        setup_context = cls.setup_context
        recorder = getattr(setup_context, "recorder", None)
        if recorder is self or setup_context is torch.autograd.Function.setup_context:
            return
        if recorder is not None:
            # Inherited from a Function whose forward is decorated differently.
            setup_context = setup_context.__wrapped__
        device_type, cast_inputs = self.device_type, self.cast_inputs

        @functools.wraps(setup_context)
        def record_and_set_up(ctx: Any, inputs: Any, output: Any) -> Any:
            if is_forward_recorded(ctx):  # called by the setup_context that overrides this one
                return setup_context(ctx, inputs, output)
            record_autocast(ctx, device_type, cast_inputs)
            if cast_inputs is not None and is_autocast_enabled(device_type):
                inputs = _cast(inputs, device_type, cast_inputs)
            return setup_context(ctx, inputs, output)

        record_and_set_up.recorder = self  # type: ignore[attr-defined]  # our mark
        cls.setup_context = staticmethod(record_and_set_up)


def _is_decorated(function: Any, inner: Callable[..., Any]) -> bool:
    """Return True if a function is `inner` or a decorated version of it."""
    while function is not None and function is not inner:
        function = getattr(function, "__wrapped__", None)
    return function is inner


def _with_subclasses(roots: Iterable[type[Any]]) -> Iterator[type[Any]]:
    for cls in roots:
        yield cls
        yield from _with_subclasses(cls.__subclasses__())
