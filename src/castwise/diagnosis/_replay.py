"""Run another forward and backward, and restore all state afterwards.

State that can change unseen by a dispatch mode (buffers, `.grad` attributes, random states) is saved up front. Weights
and inputs are copied only when an op is about to write to them, so the model need not fit in memory twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from castwise._torch_private import buffers_in, children_in, no_gradient_hooks, parameters_in
from castwise.diagnosis._forward_state import RandomState
from castwise.diagnosis._module_state import ModuleState, UnrepeatableError, no_queues
from castwise.diagnosis._op_facts import is_collective, tensors_of
from castwise.diagnosis._ranges import memory_of
from castwise.tracing._op_by_op import without_compiler

_SCRIPTED = torch.jit.ScriptModule
# Reentrant checkpointing (torch's, and copies of it in other libraries) does not support `torch.autograd.grad`.
_REENTRANT = "CheckpointFunctionBackward"

Root = tuple[torch.Tensor, "torch.Tensor | None"]
"""A starting point of a backward: a tensor and its gradient, None for 1."""

Edge = tuple[Any, int]


class _Thread(threading.local):
    depth = 0
    is_within_training = False


_THREAD = _Thread()


def is_replaying() -> bool:
    """Return True if this thread is replaying a batch, which hooks that observe training must ignore."""
    return _THREAD.depth > 0


@contextmanager
def within_training() -> Iterator[None]:
    """Replay in this context what the run goes on after, and other ranks may not replay.

    An UnrepeatableError ends a replay that would exchange tensors with them, or use up what the model holds.
    """
    before, _THREAD.is_within_training = _THREAD.is_within_training, True
    try:
        yield
    finally:
        _THREAD.is_within_training = before


def refuse_collective(op: Any, types: Iterable[type]) -> None:
    """Raise an UnrepeatableError if an op would exchange tensors with ranks that do not replay.

    An op on DTensors may do so within itself, where no dispatch mode sees it.

    Args:
        op: The op.
        types: The subclasses of its tensors, as a dispatch mode gets them.
    """
    if not _THREAD.is_within_training:
        return
    is_on_dtensors = any(hasattr(kind, "to_local") for kind in types)
    if (is_on_dtensors or is_collective(op)) and has_several_ranks():
        needs = "on DTensors may need" if is_on_dtensors else "needs"
        name = op.name().partition("::")[2]
        raise UnrepeatableError(f"its {name} {needs} the other ranks, which do not replay it")


def has_several_ranks() -> bool:
    """Return True if this process is one of several ranks."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@contextmanager
def unchanged(model: nn.Module, arguments: Any) -> Iterator[CopyOnWrite]:
    """Restore everything that running a model in this context changes, even if it raises.

    That is: weights, buffers, the sets of parameters and buffers, gradients (the same tensors), training flags,
    tensors in `arguments` and random states; `within_training`, plain attributes of modules too, see `ModuleState`.

    Args:
        model: The model.
        arguments: The arguments of its forward.

    Yields:
        The copy-on-write guard, which must be notified of all writes.
    """
    state = ModuleState(model) if _THREAD.is_within_training else None
    kept = tensors_of([list(model.parameters()), tensors_of(arguments), [] if state is None else state.tensors])
    gradients = [(tensor, tensor.grad) for tensor in kept if tensor.is_leaf]
    training = [(module, module.training) for module in model.modules()]
    # A ScriptModule cannot gain or lose parameters and buffers.
    tables = [
        (table, dict(table))
        for module in model.modules()
        if not isinstance(module, _SCRIPTED)
        for table in (parameters_in(module), buffers_in(module), children_in(module))
    ]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    guard = CopyOnWrite(tensors_of([kept, [gradient for _, gradient in gradients]]))
    random = RandomState()
    _THREAD.depth += 1
    try:
        with without_compiler(), ExitStack() as stack:
            if state is not None:
                stack.enter_context(no_queues(is_replaying))
                stack.enter_context(state.no_backward_hooks())
            yield guard
    except SystemExit as exit_:
        raise UnrepeatableError("it called sys.exit") from exit_
    finally:
        _THREAD.depth -= 1
        for tensor, gradient in gradients:
            tensor.grad = gradient
        for module, was_training in training:
            module.training = was_training
        for table, before in tables:
            _fill(table, before)
        if state is not None:
            state.restore()
        guard.put_back()
        for buffer, values in buffers:
            _write(buffer, values)
        random.restore()


def gradients_of(roots: Sequence[Root], params: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of parameters, without what their `.grad` already holds.

    Hooks after gradient accumulation do not run: no optimizers in the backward, no all-reduce of DDP. Nor do those
    before it `within_training`, as they may keep something.
    """
    tensors, seeds = [tensor for tensor, _ in roots], [seed for _, seed in roots]
    with no_gradient_hooks(params, only_after=not _THREAD.is_within_training):
        if not has_reentrant_checkpoint(tensors):
            return list(torch.autograd.grad(tensors, params, seeds, allow_unused=True))
        for param in params:
            param.grad = None
        torch.autograd.backward(tensors, seeds)
    return [param.grad for param in params]


def edge_of(tensor: torch.Tensor) -> Edge:
    """Return the graph edge where a tensor's gradient arrives: the node and the index of its output."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def edges_below(tensors: Sequence[torch.Tensor]) -> set[Edge]:
    """Return the edges of all tensors that the given tensors were computed from."""
    return {(node, place) for above in _nodes_of(tensors) for node, place in above.next_functions}


def has_reentrant_checkpoint(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if any of the tensors was computed by a checkpoint with `use_reentrant=True`."""
    return any(node.name() == _REENTRANT for node in _nodes_of(tensors))


def _nodes_of(tensors: Sequence[torch.Tensor]) -> Iterator[Any]:
    seen: set[Any] = set()
    to_see: list[Any] = [tensor.grad_fn for tensor in tensors]
    while to_see:
        node = to_see.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            to_see += [following for following, _ in node.next_functions]


class CopyOnWrite:
    """Copies of tensors, each made before the first op that writes to its memory.

    Args:
        tensors: The tensors to restore.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._by_memory: dict[int | None, list[torch.Tensor]] = {}
        for tensor in tensors:
            self._by_memory.setdefault(memory_of(tensor), []).append(tensor)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before_write(self, written: Iterable[torch.Tensor]) -> None:
        """Copy the tensors that an op is about to write to."""
        for one in written:
            for tensor in self._by_memory.pop(memory_of(one), []):
                self._copies.append((tensor, tensor.detach().clone()))

    def put_back(self) -> None:
        """Restore all copied tensors."""
        for tensor, copy in self._copies:
            _write(tensor, copy)


def _fill(names: dict[str, Any], before: dict[str, Any]) -> None:
    names.clear()
    names.update(before)


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.data.copy_(values)  # does not bump the version counter
