"""`Watch`: pass every call of a model's modules to a handler, which calls the module or answers for it.

While a model is watched, the `forward` of each module is a `Tap`. (Hooks would not work: they disable the fused path of
`nn.TransformerEncoderLayer`.) The comparison of a batch uses three handlers:

1. `ReferenceRun.call` (reference_run.py) runs in the forward of the reference. It keeps the arguments and the output of
   each module as a `Call`, and listens for the gradients of the tensors that the module's own ops create.
2. `PolicyRun.call` (policy_run.py) runs in the forward of a policy. It compares each module's output with its `Call`,
   and runs the module in isolation with `call_again`.
3. `call_again` (call_again.py) runs a module on the reference's inputs. Its calls to other modules are answered with
   their outputs in the reference, so that only its own ops contribute errors, and all modules together cost one more
   forward. It runs in the forward of a policy, and again in the backward of the reference, when the gradients of the
   module's results have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from castwise.policy._module_rules import named_modules

_ONLY_CALLS_CHILDREN = {nn.Sequential.forward}


class Tap:
    """The `forward` of a module while it is watched.

    Args:
        name: Name of the module, without wrappers.
        module: The module that gets this as an attribute.
        watch: The watch, which knows the handler.
    """

    def __init__(self, name: str, module: nn.Module, watch: Watch) -> None:
        self.name, self.module = name, module
        self.forward: Callable[..., Any] = module.forward
        self._before, self._watch = vars(module).get("forward"), watch
        self.params = [param for param in module.parameters() if param.requires_grad]
        self.has_own_ops = type(module).forward not in _ONLY_CALLS_CHILDREN

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward of the module, for `inspect.signature`."""
        return self.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the call to the handler, or call the module if there is none."""
        self._watch.on_call()
        handler = self._watch.handler
        return self.forward(*args, **kwargs) if handler is None else handler(self, args, kwargs)

    def put_on(self) -> None:
        """Set this as the module's forward."""
        vars(self.module)["forward"] = self

    def take_off(self) -> None:
        """Restore the module's forward."""
        if self._before is None:
            vars(self.module).pop("forward", None)
        else:
            vars(self.module)["forward"] = self._before


Handler = Callable[[Tap, tuple[Any, ...], dict[str, Any]], Any]
"""Gets a call with its arguments, and returns its output, from `tap.forward` or another source."""


class Watch:
    """Taps on all modules of a model inside a `with` block.

    Args:
        model: The model, unwrapped.
        on_call: Called before each module; may raise.
    """

    def __init__(self, model: nn.Module, on_call: Callable[[], None] = lambda: None) -> None:
        self.handler: Handler | None = None
        self.on_call = on_call
        named = {module: name for name, module in reversed(list(named_modules(model)))}
        self.taps = [
            Tap(name, module, self)
            for module, name in reversed(named.items())
            if not isinstance(module, torch.jit.ScriptModule)
        ]

    def __enter__(self) -> Watch:
        for tap in self.taps:
            tap.put_on()
        return self

    def __exit__(self, *_: object) -> None:
        for tap in self.taps:
            tap.take_off()

    @contextmanager
    def handling(self, handler: Handler | None) -> Iterator[None]:
        """Use a handler for calls inside the `with` block, or none."""
        before, self.handler = self.handler, handler
        try:
            yield
        finally:
            self.handler = before
