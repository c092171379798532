"""Run a model under a `TorchDispatchMode` without changing its results."""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from castwise._torch_private import is_compiler_loaded, never_traced
from castwise.policy._casting import in_native_state, native_state_of

_Mode = TypeVar("_Mode", bound=type)
# The ops that `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call in inference. Their kernels call other ops,
# which autocast must cast for. Inside a mode autocast is off, because it has run already for separate ops.
FUSED = {"aten._transformer_encoder_layer_fwd.default", "aten._native_multi_head_attention.default"}


def call_op(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an op that was dispatched to a mode."""
    if not is_fused(func):
        return func(*args, **kwargs)
    device_type = args[0].device.type
    with torch.overrides.enable_reentrant_dispatch():
        state = native_state_of(device_type)
    with in_native_state(device_type, *state):
        return func(*args, **kwargs)


@functools.cache  # the text of an op takes longer than to call a small one
def is_fused(func: Any) -> bool:
    """Return True for an op in `FUSED`."""
    return str(func) in FUSED


def called_directly(mode: _Mode) -> _Mode:
    """Take the wrapper from a mode's `__torch_dispatch__` that keeps Dynamo out; a mark does the same.

    The wrapper takes 2 us for each op, which a mode that runs whole programs notices. A decorator for such modes.
    """
    dispatch = inspect.unwrap(mode.__torch_dispatch__)  # type: ignore[attr-defined]  # modes have one
    mode.__torch_dispatch__ = never_traced(dispatch)  # type: ignore[attr-defined]
    return mode


def without_compiler() -> AbstractContextManager[Any]:
    """Return a context in which compiled code runs eagerly: under a mode Dynamo would permanently skip that code."""
    if not is_compiler_loaded():
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]  # torch's


def with_compiler() -> AbstractContextManager[Any]:
    """Return a context, inside one of `without_compiler`, in which compiled code runs compiled."""
    if not is_compiler_loaded():
        return nullcontext()
    return torch.compiler.set_stance("default")  # type: ignore[no-any-return]  # torch's
