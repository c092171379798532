"""A region's entry and exit as nodes of a graph that `torch.compile` traces.

Dynamo can trace the setters of autocast state one by one, except inside a higher-order op (activation
checkpointing, an autograd Function), where torch 2.13 fails on them. A function that goes into the graph as one node
works everywhere. Dynamo also runs it while tracing, which gives the following ops their dtypes.
"""

from __future__ import annotations

import torch

from castwise import _torch_private
from castwise.amp._observers import OBSERVERS


@_torch_private.only_inlined
def enter(device_type: str, enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
    """Set the autocast state of a region."""
    _switch(device_type, enabled, dtype, cache_enabled)
    if _torch_private.is_torch_function_mode_enabled():
        _torch_private.record_enter_autocast((device_type, dtype, enabled, cache_enabled))


@_torch_private.only_inlined
def leave(device_type: str, enabled: bool, dtype: torch.dtype, cache_enabled: bool, forget_casts: bool = True) -> None:
    """Restore the autocast state from before a region; `forget_casts` clears autocast's cache after the last region."""
    _switch(device_type, enabled, dtype, cache_enabled)
    if forget_casts:
        # Tracing may stop at any point, so a traced region never counts as a level of nesting.
        torch.autocast_increment_nesting()
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
    if _torch_private.is_torch_function_mode_enabled():
        _torch_private.record_exit_autocast(())


@_torch_private.only_inlined
def _switch(device_type: str, enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(cache_enabled)


@_torch_private.run_while_tracing
def tell_observers(device_type: str, enabled: bool) -> None:
    """Notify observers of a region that is about to be compiled."""
    for observer in OBSERVERS:
        observer.compiled(device_type, enabled)


@_torch_private.run_while_tracing
def prepare(device_type: str) -> None:
    """Register these functions with Dynamo, and restore the autocast state if tracing stops before it reaches `leave`.

    They cannot be registered earlier, because that imports Dynamo.
    """
    for function in (enter, leave):
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]  # torch's
        torch.fx.node.has_side_effect(function)
    outer = (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )
    _torch_private.after_tracing(lambda: _switch(device_type, *outer))
