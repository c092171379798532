"""Which policy is in force in a thread, and how autocast's native state is set there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from castwise.amp.bound_policy import BoundPolicy


class State(NamedTuple):
    """A policy in force.

    Args:
        policy: The policy.
        device: Type of device of the region.
        enabled: Whether autocast's native lists are on.
        dtype: The low precision they cast to.
        cache: Whether the region keeps casts of weights.
        ops: Whether op rules hold.
        writes: Whether the rule for writes in place holds.
    """

    policy: BoundPolicy
    device: str
    enabled: bool
    dtype: torch.dtype
    cache: bool
    ops: bool
    writes: bool

    def is_native(self) -> bool:
        """Say whether torch's own state is as the policy has set it: else a region inside has changed it."""
        return torch.is_autocast_enabled(self.device) is self.enabled and (
            not self.enabled or torch.get_autocast_dtype(self.device) is self.dtype
        )


class _Thread(threading.local):
    # Set for each instance: torch.compile guards on attributes of a thread-local object, but not on those of its class.
    def __init__(self) -> None:
        self.state: State | None = None
        self.modules: Any = None  # what the rules of modules that run have to put back, the innermost first, linked


THREAD = _Thread()
