"""One more forward and backward, after which everything is as it was.

Copies are made of what can change without a trace in the ops (buffers, gradients' places, random states); of weights
and inputs only when an op is about to write to them, which a dispatch mode sees: a model need not fit in memory twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from castwise._torch_private import no_post_accumulate_hooks
from castwise.diagnosis.forward_state import RandomState
from castwise.diagnosis.op_facts import tensors_of
from castwise.diagnosis.ranges import memory_of
from castwise.tracing.op_by_op import without_compiler

_SCRIPTED = torch.jit.ScriptModule
# Reentrant checkpointing, of torch and of libraries that have copied it, refuses `torch.autograd.grad`.
_REENTRANT = "CheckpointFunctionBackward"

Root = tuple[torch.Tensor, "torch.Tensor | None"]
"""Where a backward begins: a tensor, and its gradient; None is 1."""

Edge = tuple[Any, int]


class _Thread(threading.local):
    depth = 0


_THREAD = _Thread()


def is_replaying() -> bool:
    """Return True if this thread replays a batch: hooks that watch training must ignore it."""
    return _THREAD.depth > 0


@contextmanager
def unchanged(model: nn.Module, arguments: Any) -> Iterator[CopyOnWrite]:
    """Put back what runs of a model inside have changed, also when one raises; yield what has to see their writes.

    That is weights, buffers, which parameters and buffers there are, gradients (the same tensors), whether modules
    are in training, tensors in `arguments`, and the state of random number generators.

    Args:
        model: The model.
        arguments: Of its forward.
    """
    given = tensors_of(arguments)
    kept = tensors_of([list(model.parameters()), given])
    gradients = [(tensor, tensor.grad) for tensor in kept if tensor.is_leaf]
    training = [(module, module.training) for module in model.modules()]
    # A ScriptModule cannot get others.
    names = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules() if not isinstance(m, _SCRIPTED)]
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
            _fill(module._parameters, params)
            _fill(module._buffers, of_module)
        guard.put_back()
        for buffer, before in buffers:
            _write(buffer, before)
        random.restore()


def gradients_of(roots: Sequence[Root], params: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of parameters, without those that the parameters have already.

    What is called after gradients were accumulated does not run: optimizers in the backward, the all-reduce of DDP.
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
    """Return where in its graph a tensor's gradient arrives: the node, and at which of the node's outputs."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def edges_below(tensors: Sequence[torch.Tensor]) -> set[Edge]:
    """Return all edges that gradients of tensors go on to, at which are the tensors that they were computed from."""
    return {(node, place) for above in _nodes_of(tensors) for node, place in above.next_functions}


def has_reentrant_checkpoint(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if tensors were computed with a checkpoint of `use_reentrant=True`."""
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
        tensors: That are to be put back.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._by_memory: dict[int | None, list[torch.Tensor]] = {}
        for tensor in tensors:
            self._by_memory.setdefault(memory_of(tensor), []).append(tensor)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before_write(self, written: Iterable[torch.Tensor]) -> None:
        """Note that an op is about to write to some tensors."""
        for one in written:
            for tensor in self._by_memory.pop(memory_of(one), []):
                self._copies.append((tensor, tensor.detach().clone()))

    def put_back(self) -> None:
        """Write the copies back."""
        for tensor, copy in self._copies:
            _write(tensor, copy)


def _fill(names: dict[str, Any], before: dict[str, Any]) -> None:
    names.clear()
    names.update(before)


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.data.copy_(values)  # without a trace in its count of writes
