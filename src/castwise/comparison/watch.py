"""`Watch`: every call of a model's modules is told to a function, which calls the module or answers for it.

While a model is watched, the `forward` of each module is a `Tap`. (Hooks would not do: where a module has some, torch
leaves the fused path of `nn.TransformerEncoderLayer`.) A comparison of a batch goes through three such functions:

1. `ReferenceRun.call` (reference_run.py) runs in the forward of the reference. It keeps what each module is given and
   returns as a `Call`, and listens to the gradients of what the module's own ops make.
2. `PolicyRun.call` (policy_run.py) runs in the forward of a policy. It compares what each module returns with its
   `Call`, and has `call_again` run the module by itself.
3. `call_again` (call_again.py) gives a module the reference's inputs. Calls that its code makes to other modules are
   answered with what these returned in the reference: so each module answers for its own ops alone, and all modules
   together cost one more forward. It runs in the forward of a policy, and once more in the backward of the reference,
   when the gradients of what the module makes have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from castwise.policy.module_rules import named_modules

_ONLY_CALLS_CHILDREN = {nn.Sequential.forward}


class Tap:
    """The `forward` of a module while it is watched.

    Args:
        name: Of the module, without wrappers.
        module: The module, of which this becomes an attribute.
        watch: Knows who is told.
    """

    def __init__(self, name: str, module: nn.Module, watch: Watch) -> None:
        self.name, self.module = name, module
        self.forward: Callable[..., Any] = module.forward
        self._before, self._watch = vars(module).get("forward"), watch
        self.params = [param for param in module.parameters() if param.requires_grad]
        self.has_own_ops = type(module).forward not in _ONLY_CALLS_CHILDREN

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward of the module: `inspect.signature` asks for it."""
        return self.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, or let the function that is told do so."""
        self._watch.on_call()
        told = self._watch.told
        return self.forward(*args, **kwargs) if told is None else told(self, args, kwargs)

    def put_on(self) -> None:
        """Become the module's forward."""
        vars(self.module)["forward"] = self

    def take_off(self) -> None:
        """Give the module back what it had."""
        if self._before is None:
            vars(self.module).pop("forward", None)
        else:
            vars(self.module)["forward"] = self._before


Told = Callable[[Tap, tuple[Any, ...], dict[str, Any]], Any]
"""Is told of a call with its arguments, and returns what it returns: of `tap.forward` or from elsewhere."""


class Watch:
    """Taps on all modules of a model, on from `with` on.

    Args:
        model: The model, unwrapped.
        on_call: Is called before each module; may raise.
    """

    def __init__(self, model: nn.Module, on_call: Callable[[], None] = lambda: None) -> None:
        self.told: Told | None = None
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
    def telling(self, told: Told | None) -> Iterator[None]:
        """Tell a function of calls for a while, or none."""
        before, self.told = self.told, told
        try:
            yield
        finally:
            self.told = before
