"""`ModuleOfOp`: which module of a model an op belongs to that a `TorchDispatchMode` sees.

In the forward it is the innermost module that runs. In the backward it is that of the forward's op whose gradient the
op takes part in: autograd numbers the nodes of its graph in the order in which the forward made them. Activation
checkpointing calls modules again within a backward, and a reentrant one makes another graph of them there, whose nodes
are numbered by the thread that the backward runs in.
"""

from __future__ import annotations

import bisect
from functools import partial

import torch
from torch import nn

from castwise._torch_private import backward_running, graph_node_running, graph_nodes_made, leaf_running
from castwise.policy.module_rules import named_modules
from castwise.tracing.module_hooks import ModuleHooks


class _Numbers:
    """From which of autograd's numbers on which module ran, innermost; None is none."""

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
    """Follows the modules of a model while it is entered, by hooks on all of them.

    Ops of an `nn.TransformerEncoderLayer` that runs as one kernel of torch's belong to the module that calls it.

    Args:
        model: Names are those of its modules without wrappers (DDP, FSDP, `torch.compile`, checkpointing).
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks = ModuleHooks()
        self._running: list[str] = []
        self._forward, self._again = _Numbers(), _Numbers()
        self._outermost: int | None = None  # autograd's task that runs the graph of the forward
        owners = ((name, param) for name, module in named_modules(model) for param in module.parameters(recurse=False))
        self._owners: list[tuple[torch.Tensor, str]] = [(param, name) for name, param in owners]

    def __enter__(self) -> ModuleOfOp:
        names: dict[nn.Module, str] = {}
        for name, module in named_modules(self._model):
            if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                names.setdefault(module, name)
        for module, name in names.items():
            self._hooks.put_on(module, partial(self._enter, name), self._leave, first=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.remove()

    def begin_backward(self) -> None:
        """Note that the next backward is that of the forward that has been followed."""
        self._outermost = None

    def is_forward_running(self) -> bool:
        """Return True if a module runs, be it again within a backward."""
        return bool(self._running)

    def name(self) -> str | None:
        """Return the module of the op that runs, "" for the model itself; None for an op outside of it, as of a loss.

        Where the gradient of a parameter arrives, and its hooks run, it is the module that has the parameter.
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
        """Return True if the backward that runs is not one within another; the first one seen is."""
        backward = backward_running()
        if self._outermost is None:
            self._outermost = backward
        return backward == self._outermost
