"""`CastingState`: in which autocast regions, torch's or castwise's, a thread is, to be there again later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from castwise.amp.autocast_mode import autocast
from castwise.amp.casting import native_state_of
from castwise.amp.devices import has_autocast
from castwise.amp.in_force import THREAD


class CastingState:
    """The state there is when it is made. A `WeightCache` is not in it: casts are the same without.

    Args:
        device_types: Types of device whose regions matter.
    """

    def __init__(self, device_types: Iterable[str]) -> None:
        self._native = {kind: native_state_of(kind) for kind in device_types if has_autocast(kind)}
        self._policy = THREAD.state

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Be in these regions for a while, and in no others.

        Raises:
            RuntimeError: A policy among them is not bound any more.
        """
        policy = self._policy
        with ExitStack() as stack:
            for kind, (enabled, dtype, cache) in self._native.items():
                stack.enter_context(autocast(kind, dtype, enabled, cache))
            if policy is not None:
                stack.enter_context(autocast(policy.device, policy=policy.bound, cache_enabled=policy.cache))
                enabled, dtype, cache = self._native[policy.device]
                if (enabled, dtype) != (policy.bound.dtype is not None, torch.get_autocast_dtype(policy.device)):
                    # A region of torch's own that suspends the policy, or a module's rule.
                    stack.enter_context(torch.autocast(policy.device, dtype, enabled, cache))
            yield
