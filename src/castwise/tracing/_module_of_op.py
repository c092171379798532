"""`ModuleOfOp`: the module to which an op seen by a `TorchDispatchMode` belongs.

In the forward it is the innermost running module. In the backward it is the module whose forward created the autograd
node that is running: autograd numbers nodes in the order of their creation. Activation checkpointing reruns modules
inside a backward. Reentrant checkpointing also builds another graph there, whose nodes are numbered by the thread that
runs the backward.
"""

from __future__ import annotations

import bisect
from functools import partial

import torch
from torch import nn

from castwise._torch_private import backward_running, graph_node_running, graph_nodes_made, leaf_running
from castwise.policy._module_rules import named_modules
from castwise.tracing._module_hooks import ModuleHooks


class _Numbers:
    """The innermost module that ran at each of autograd's sequence numbers; None for no module."""

    def __init__(self) -> None:
        self._first: list[int] = []
        self._modules: list[str | None] = []

    def note(self, module: str | None) -> None:
        self._first.append(graph_nodes_made())
        self._modules.append(module)

    def module_of(self, number: int) -> str | None:
        position = bisect.bisect_right(self._first, number) - 1
        return self._modules[position] if position >= 0 else None


class ModuleOfOp:
    """Tracks the running modules of a model inside a `with` block, with hooks on all of them.

    Ops of an `nn.TransformerEncoderLayer` that runs as torch's fused kernel belong to the module that calls it.

    Args:
        model: The model. Module names do not include wrappers (DDP, FSDP, `torch.compile`, checkpointing).
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks = ModuleHooks()
        self._running: list[str] = []
        self._forward, self._again = _Numbers(), _Numbers()
        self._outermost: int | None = None  # the autograd task that runs the forward's graph
        owners = ((name, param) for name, module in named_modules(model) for param in module.parameters(recurse=False))
        self._owners: list[tuple[torch.Tensor, str]] = [(param, name) for name, param in owners]

    def __enter__(self) -> ModuleOfOp:
        names: dict[nn.Module, str] = {}
        for name, module in named_modules(self._model):
            if not isinstance(module, torch.jit.ScriptModule):  # does not accept hooks
                names.setdefault(module, name)
        try:
            for module, name in names.items():
                self._hooks.put_on(module, partial(self._enter, name), self._leave, first=True)
        except BaseException:
            self._hooks.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.remove()

    def begin_backward(self) -> None:
        """Mark the next backward as the one of the tracked forward."""
        self._outermost = None

    def is_forward_running(self) -> bool:
        """Return True if a module is running, including a rerun inside a backward."""
        return bool(self._running)

    def name(self) -> str | None:
        """Return the module of the running op: "" for the model itself, None for an op outside it, as in a loss.

        While the gradient of a parameter is accumulated and its hooks run, it is the module that owns the parameter.
        """
        if self._running:
            return self._running[-1]
        leaf = leaf_running()
        if leaf is not None:
            return next((name for param, name in self._owners if param is leaf), None)
        node = graph_node_running()
        if node is None:
            return None
        return (self._forward if self._is_outermost() else self._again).module_of(node)

    def _enter(self, name: str, *_: object) -> None:
        self._running.append(name)
        self._note()

    def _leave(self, *_: object) -> None:
        self._running.pop()
        self._note()

    def _note(self) -> None:
        numbers = self._forward if backward_running() is None else self._again
        self._is_outermost()
        numbers.note(self._running[-1] if self._running else None)

    def _is_outermost(self) -> bool:
        """Return True if the running backward is not nested in another one; the first one seen is the outermost."""
        backward = backward_running()
        if self._outermost is None:
            self._outermost = backward
        return backward == self._outermost
