"""The state of a policy while a model's modules run, and the states of earlier forwards, for when they are rerun.

Activation checkpointing reruns a forward inside a backward, outside any region. Torch restores the native state. The
state of the policy is found from the sequence number of the autograd node that is running: regions and rules record
which sequence numbers were assigned while they were active.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from castwise._torch_private import function_modes, graph_node_running, graph_nodes_made, only_inlined
from castwise.amp._thread_state import THREAD
from castwise.policy._casting import native_state_of

_REMEMBERED = 16384  # regions and modules whose forwards may still be rerun


class ActivePolicy(Protocol):
    """What its rules need of a `BoundPolicy`."""

    key: str
    op_rules: dict[Any, Any]
    dtype: torch.dtype | None
    node_ranges: NodeRanges

    def mode(self) -> TorchFunctionMode | None:
        """Return a new mode that applies the op rules, or None if there are none."""


class State(NamedTuple):
    """The settings of a policy in a thread: of the region, or of the module that runs there.

    Args:
        key: The policy's key, a string because torch.compile guards on string values but not on object identity.
        bound: The policy.
        device: Device type of the region.
        enabled: Whether autocast's native lists are on.
        dtype: The low precision they cast to.
        cache: Whether the region caches casts of weights.
        ops: Whether op rules apply.
        writes: Whether the rule for in-place writes applies.
        again: Whether checkpointing is rerunning a forward inside a backward.
        weights: The `WeightCache` of the region, if any.
    """

    key: str
    bound: ActivePolicy
    device: str
    enabled: bool
    dtype: torch.dtype
    cache: bool
    ops: bool = True
    writes: bool = True
    again: bool = False
    weights: Any = None

    @only_inlined
    def is_native(self) -> bool:
        """Return True if torch's own state is the one the policy set, so that no nested region has changed it."""
        return torch.is_autocast_enabled(self.device) is self.enabled and (
            not self.enabled or torch.get_autocast_dtype(self.device) is self.dtype
        )


class NodeRange(NamedTuple):
    """The graph nodes created while a state was active: in a region, or in the forward of a module with a rule."""

    start: int
    stop: int
    thread: object
    device: str
    native: tuple[bool, torch.dtype | None]  # whether autocast is enabled, and its dtype if it is
    state: State | None  # None if the policy was suspended


class NodeRanges:
    """The graph nodes that a policy's latest regions and modules created, each with the state that they ran in."""

    def __init__(self) -> None:
        self._records: deque[NodeRange] = deque(maxlen=_REMEMBERED)

    @only_inlined
    def add(self, start: int | None, device: str, native: tuple[bool, torch.dtype], state: State | None) -> None:
        """Record the state in which the graph nodes since `start` were created.

        Args:
            start: The number of nodes before them; None records nothing.
            device: The `type` of the region's device.
            native: Whether autocast is enabled, and its dtype.
            state: The policy's state; None if the policy is not active.
        """
        if start is not None and start != (stop := graph_nodes_made()):  # without new nodes there is nothing to rerun
            self._records.append(NodeRange(start, stop, THREAD.token, device, _compared(native), state))

    @only_inlined
    def find_rerun_range(self) -> NodeRange | None:
        """Return the nodes of the forward that a backward is rerunning now, if any."""
        node = graph_node_running()
        if node is None:
            return None
        thread, innermost = THREAD.token, None
        for nodes in reversed(self._records.copy()):  # a copy, because other threads may append
            # On a CPU a backward runs in the caller's thread; on other devices, in a thread per device.
            if nodes.thread is not thread and nodes.device == "cpu":
                continue
            if nodes.stop <= node:  # in order of their ends: all earlier ones of this thread end before the node too
                break
            # Of nested records, use the one in which the checkpoint was created: its native state has been restored.
            is_inner = nodes.start <= node and (innermost is None or nodes.start >= innermost.start)
            if is_inner and nodes.native == _compared(native_state_of(nodes.device)[:2]):
                innermost = nodes
        return innermost


@only_inlined
def _compared(native: tuple[bool, torch.dtype]) -> tuple[bool, torch.dtype | None]:
    """Return the native state without a dtype if autocast is off."""
    return native if native[0] else (False, None)


class RerunContext:
    """Activate a state while a checkpointed function is rerun."""

    def __init__(self, state: State | None) -> None:
        self._state = state

    @only_inlined
    def __enter__(self) -> None:
        self._outer, self._mode = THREAD.state, None
        if self._state is not None:
            self._mode = self._state.bound.mode()
            try:
                THREAD.state = self._state._replace(again=True)
                if self._mode is not None:
                    self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
            except BaseException:
                self.__exit__()
                raise

    @only_inlined
    def __exit__(self, *_: object) -> None:
        if self._mode is not None and is_dynamo_compiling():
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
        elif self._mode is not None:
            exit_if_entered(self._mode)
        THREAD.state = self._outer


@only_inlined
def exit_if_entered(mode: TorchFunctionMode) -> None:
    """Exit a mode if it was entered, which is not known after an interrupt."""
    if mode in function_modes():
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
