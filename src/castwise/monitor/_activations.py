"""Count the exponents of modules' outputs in one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from castwise._guard import ErrorBoundary
from castwise._torch_private import (
    are_functorch_transforms_active,
    is_backward_running,
    is_compiled,
    is_jit_tracing,
    tree_leaves,
)
from castwise.amp._gradients import is_plain
from castwise.diagnosis._replay import is_replaying
from castwise.monitor import _module_names as names
from castwise.monitor._exponents import Counter
from castwise.monitor._local_shards import is_dtensor, is_partial, local_shard
from castwise.tracing._module_hooks import ModuleHooks, inside_fused_layers


class Activations:
    """Counts the exponents of modules' outputs, with hooks that exist only while it is watching.

    Each module is counted in one forward of the model, in all of its calls. Not counted: later forwards (further
    micro-batches), forwards without gradients (validation), and forwards repeated by a backward (activation
    checkpointing). Also not counted: compiled code, functorch transforms, modules that torch runs as one fused kernel,
    scripted modules (which have no hooks), nested tensors, and other outputs without floating-point values.

    Args:
        model: The model with the modules.

    Attributes:
        dtypes: The dtype of each module's first output tensor, such as "bfloat16", since the last `watch`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.dtypes: dict[str, str] = {}
        self._guard = ErrorBoundary()
        self._hooks = ModuleHooks(self._guard)
        self._inside: set[nn.Module] = set()
        self._counter, self._counted = Counter(), list[str]()
        self._in_this_forward: set[str] = set()
        self._done: set[str] = set()
        self._depth = 0
        self._counts = False

    def watch(self) -> None:
        """Start counting with the next forward."""
        self.dtypes = {}
        compiled = {inner for module in self._model.modules() if is_compiled(module) for inner in module.modules()}
        modules = names.modules(self._model)
        # A copy or pickle of the model made between forwards must not have hooks that torch checks for either.
        self._inside = inside_fused_layers(self._model) - {modules.get("")}
        for name, module in modules.items():
            if module in compiled or isinstance(module, torch.jit.ScriptModule):
                continue
            self._hooks.put_on(module, self._enter, self._leave(name), later=module in self._inside)

    def stop(self) -> dict[str, list[torch.Tensor]]:
        """Remove all hooks and return, by module, a result of `count` for each output tensor."""
        self._hooks.remove()
        self._done.clear()
        self._in_this_forward.clear()
        self._depth = 0
        found: dict[str, list[torch.Tensor]] = {}
        for name, (counts, _) in zip(self._counted, self._counter.results(), strict=True):
            found.setdefault(name, []).append(counts)
        self._counter, self._counted = Counter(), []
        return found

    def _enter(self, *_: object) -> None:
        if self._depth == 0:
            is_repeated = is_backward_running() or is_replaying()
            self._counts = torch.is_grad_enabled() and not (is_repeated or is_jit_tracing())
            if self._counts:
                self._hooks.put_back()
        self._depth += 1

    def _leave(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._depth == 0:
                return
            # Without an output, the forward raised or there is nothing to count.
            has_output = output is not None and not are_functorch_transforms_active()
            if self._counts and has_output and name not in self._done:
                self._in_this_forward.add(name)
                with self._guard:  # the depth is counted anyway
                    for tensor in _tensors(output):
                        self._counter.add(tensor)
                        self._counted.append(name)
                        self.dtypes.setdefault(name, str(tensor.dtype).removeprefix("torch."))
            self._depth -= 1
            if self._depth == 0:
                self._hooks.take_off(self._inside)
                self._done |= self._in_this_forward
                self._in_this_forward.clear()

        return leave


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point and complex tensors in a module's output; of DTensors this rank's part.

    Partial sums are left out, because only a collective could complete them.
    """
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()) and not leaf.is_meta:
            if is_dtensor(leaf):
                if not is_partial(leaf):
                    yield local_shard(leaf).local
            elif is_plain(leaf) and not leaf.is_nested:
                yield leaf
