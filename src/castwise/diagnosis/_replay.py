"""Run another forward and backward, and restore all state afterwards.

State that can change unseen by a dispatch mode (buffers, `.grad` attributes, random states) is saved up front. Weights
and inputs are copied only when an op is about to write to them, so the model need not fit in memory twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from castwise._torch_private import buffers_in, no_post_accumulate_hooks, parameters_in
from castwise.diagnosis._forward_state import RandomState
from castwise.diagnosis._op_facts import tensors_of
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


_THREAD = _Thread()


def is_replaying() -> bool:
    """Return True if this thread is replaying a batch, which hooks that observe training must ignore."""
    return _THREAD.depth > 0


@contextmanager
def unchanged(model: nn.Module, arguments: Any) -> Iterator[CopyOnWrite]:
    """Restore everything that running a model in this context changes, even if it raises.

    That is: weights, buffers, the sets of parameters and buffers, gradients (the same tensors), training flags,
    tensors in `arguments`, and random states.

    Args:
        model: The model.
        arguments: The arguments of its forward.

    Yields:
        The copy-on-write guard, which must be notified of all writes.
    """
    given = tensors_of(arguments)
    kept = tensors_of([list(model.parameters()), given])
    gradients = [(tensor, tensor.grad) for tensor in kept if tensor.is_leaf]
    training = [(module, module.training) for module in model.modules()]
    # A ScriptModule cannot gain or lose parameters and buffers.
    names = [(m, dict(parameters_in(m)), dict(buffers_in(m))) for m in model.modules() if not isinstance(m, _SCRIPTED)]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    guard = CopyOnWrite(tensors_of([kept, [gradient for _, gradient in gradients]]))
    random = RandomState()
    _THREAD.depth += 1
    try:
        with without_compiler():
            yield guard
    finally:
        _THREAD.depth -= 1
        for tensor, gradient in gradients:
            tensor.grad = gradient
        for module, was_training in training:
            module.training = was_training
        for module, params, of_module in names:
            _fill(parameters_in(module), params)
            _fill(buffers_in(module), of_module)
        guard.put_back()
        for buffer, before in buffers:
            _write(buffer, before)
        random.restore()


def gradients_of(roots: Sequence[Root], params: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of parameters, without what their `.grad` already holds.

    Callbacks after gradient accumulation do not run: no optimizers in the backward, no all-reduce of DDP.
    """
    tensors, seeds = [tensor for tensor, _ in roots], [seed for _, seed in roots]
    if not has_reentrant_checkpoint(tensors):
        return list(torch.autograd.grad(tensors, params, seeds, allow_unused=True))
    for param in params:
        param.grad = None
    with no_post_accumulate_hooks(params):
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
