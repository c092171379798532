"""Which policy is in force in a thread, and how autocast's native state is set there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from castwise._torch_private import only_inlined

if TYPE_CHECKING:
    from castwise.amp.bound_policy import BoundPolicy


class State(NamedTuple):
    """A policy in force.

    Args:
        bound: The policy.
        device: Type of device of the region.
        enabled: Whether autocast's native lists are on.
        dtype: The low precision they cast to.
        cache: Whether the region keeps casts of weights.
        ops: Whether op rules hold.
        writes: Whether the rule for writes in place holds.
        again: Whether checkpointing runs a forward again, within a backward.
    """

    bound: BoundPolicy
    device: str
    enabled: bool
    dtype: torch.dtype
    cache: bool
    ops: bool = True
    writes: bool = True
    again: bool = False

    @only_inlined
    def is_native(self) -> bool:
        """Say whether torch's own state is as the policy has set it: else a region inside has changed it."""
        return torch.is_autocast_enabled(self.device) is self.enabled and (
            not self.enabled or torch.get_autocast_dtype(self.device) is self.dtype
        )


class _Thread(threading.local):
    # Set for each instance: torch.compile guards on attributes of a thread-local object, but not on those of its class.
    def __init__(self) -> None:
        self.token = object()  # of this thread alone: idents are given again to later threads
        self.state: State | None = None
        self.modules: Any = None  # what the hooks of modules that run have to put back, the innermost first, linked


THREAD = _Thread()


@only_inlined
def suspend() -> tuple[State, Any] | None:
    """Put no policy in force; return what `resume` takes, if there was one."""
    if THREAD.state is None:
        return None
    outer = THREAD.state, THREAD.modules
    THREAD.state = THREAD.modules = None
    return outer


@only_inlined
def resume(outer: tuple[State | None, Any]) -> None:
    """Put in force what was before."""
    THREAD.state, THREAD.modules = outer
