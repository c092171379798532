"""`ModuleHooks`: hooks that watch a model's modules without changing what torch does with it.

Torch behaves differently in two places if a module has hooks. In evaluation, `nn.TransformerEncoderLayer` does not use
its fused kernel, which under autocast returns other values in another dtype. And `torch.compile` traces hooks into its
graphs, guards on them, and compiles `torch.nn` forwards that it otherwise skips. So hooks are removed before torch
checks for them, and put back afterwards. The exception is a module whose number of hooks torch.compile guards on, such
as one with hooks of the user.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from castwise._guard import ErrorBoundary
from castwise._registered_hooks import hooks_of
from castwise._torch_private import (
    is_called_when_compiling,
    is_compiled,
    is_dynamo_active,
    never_traced,
    only_inlined,
    tell_of_compilations,
    tell_of_no_more_compilations,
)

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[nn.Module, tuple[Any, ...], Any], None]

_GUARDS_REPLACED_FORWARDS = torch.__version__ >= "2.14"

# The tensors whose requires_grad nn.TransformerEncoderLayer checks, besides its input, before using its fused kernel.
_FUSED = {
    *("self_attn.in_proj_weight", "self_attn.in_proj_bias", "self_attn.out_proj.weight", "self_attn.out_proj.bias"),
    *(f"{name}.{kind}" for name in ("norm1", "norm2", "linear1", "linear2") for kind in ("weight", "bias")),
}


class ModuleHooks:
    """Calls one function before and one after the forwards of modules.

    Neither is called for a forward that Dynamo compiles, or for a layer that is about to use torch's fused kernel.
    Models are not kept alive. The hooks on copied and unpickled modules do nothing.

    Args:
        guard: Catches errors of the functions; without one they reach the caller of the module.

    Example:
        >>> layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        >>> calls = []
        >>> hooks = ModuleHooks()
        >>> hooks.put_on(layer, lambda *_: calls.append("before"), lambda *_: calls.append("after"))
        >>> x = torch.ones(1, 2, 4)
        >>> _ = layer(x)
        >>> with torch.no_grad():
        ...     _ = layer.eval()(x)  # which checks its hooks
        >>> calls
        ['before', 'after']
        >>> hooks.remove()
    """

    def __init__(self, guard: ErrorBoundary | None = None) -> None:
        self._guard = guard
        self._pairs: list[_Pair] = []
        self._suspended: list[_Pair] = []
        self._are_all_on = True
        self._has_compiled = False

    def put_on(
        self, module: nn.Module, before: Before, after: After | None = None, *, first: bool = False, later: bool = False
    ) -> None:
        """Call functions before and after each forward of a module.

        Args:
            module: The module, which must not be a ScriptModule.
            before: Called with the module, the positional and the keyword arguments.
            after: Called with the module, the positional arguments, and the output, or None if the forward raised.
                Without an `after`, `before` is called even if torch's fused kernel is about to run.
            first: Call `before` before the module's existing hooks.
            later: Start with the next `put_back`.
        """
        pair = _Pair(module, before, after, first)
        if later:
            self._are_all_on = False
        else:
            self._put_on(pair)
        self._pairs.append(pair)
        _watch_compiler(self)

    def put_back(self) -> None:
        """Put back the hooks that were temporarily removed."""
        if not self._are_all_on:
            self._are_all_on = True
            for pair in self._pairs:
                self._put_on(pair)
        if self._pairs and not is_called_when_compiling(_DOORS[0]):  # torch.compiler.reset() forgets its callbacks
            _watch_compiler(self)

    def remove(self) -> None:
        """Remove all hooks."""
        for pair in self._pairs:
            pair.take_off()
        self._pairs.clear()
        self._suspended.clear()
        self._are_all_on = True
        _stop_watching_compiler(self)

    def take_off(self, modules: Collection[nn.Module]) -> None:
        """Remove the hooks of some modules until `put_back`."""
        for pair in self._pairs:
            if pair.module() in modules:
                pair.take_off()
                self._are_all_on = False

    def suspend(self) -> None:
        """Remove the hooks of all modules that are not running; a running module still needs its `after`."""
        self._has_compiled = True
        for pair in self._pairs:
            if pair.is_on and not pair.running:
                pair.take_off()
                self._suspended.append(pair)

    def resume(self) -> None:
        """Undo `suspend`."""
        while self._suspended:
            self._put_on(self._suspended.pop())

    def _put_on(self, pair: _Pair) -> None:
        if not (self._has_compiled and pair.is_guarded):
            pair.put_on(self._enter, self._guard)

    def _enter(
        self, pair: _Pair, under_dynamo: bool, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        module = pair.module()  # a replica of `nn.DataParallel` has the hooks of its original
        if module is None:
            return
        if under_dynamo and type(module).__module__.startswith(("torch.nn.", "torch.ao.")):
            # Dynamo is running code that it could not compile. There it skips the forwards of torch's own modules,
            # unless they have hooks.
            self.take_off([module])
            return
        is_fused = may_be_fused(module, args, kwargs)
        if is_fused:
            self.take_off(set(module.modules()))
        if pair.after is None:
            pair.before(module, args, kwargs)
        elif not is_fused:
            pair.before(module, args, kwargs)
            pair.running += 1  # `after` is called if `before` did not fail


class _Pair:
    """The hooks of one module."""

    def __init__(self, module: nn.Module, before: Before, after: After | None, first: bool) -> None:
        self.module = weakref.ref(module)
        self.before, self.after, self._first = before, after, first
        self.running = 0
        self._handles: list[RemovableHandle] = []

    @property
    def is_on(self) -> bool:
        return bool(self._handles)

    @property
    def is_guarded(self) -> bool:
        """Whether Dynamo guards on the number of the module's hooks, and would recompile if ours were put back.

        It does if the module has hooks of the user. From torch 2.14 on, it also does if the module's own `forward`
        replaces that of its class, or if `module.compile()` was called.
        """
        module = self.module()
        if module is None:
            return False
        if _GUARDS_REPLACED_FORWARDS and ("forward" in vars(module) or is_compiled(module)):
            return True
        methods = (module.register_forward_pre_hook, module.register_forward_hook)
        return any(not isinstance(hook, _Hook) for register in methods for hook in hooks_of(register).values())

    def put_on(self, enter: Callable[..., None], guard: ErrorBoundary | None) -> None:
        module = self.module()
        if self._handles or module is None:
            return
        before = _Hook(functools.partial(enter, self), guard)
        self._handles.append(module.register_forward_pre_hook(before, prepend=self._first, with_kwargs=True))
        if self.after is not None:
            after = _Hook(self._leave, guard)
            self._handles.append(module.register_forward_hook(after, always_call=True))

    def take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.running = 0

    def _leave(self, under_dynamo: bool, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.running and self.after is not None:
            self.running -= 1
            self.after(module, args, output)


class _Hook:
    """Calls a function as a module hook; its copies do nothing.

    The hook of an unpickled module also does nothing, and can be loaded without castwise.

    Args:
        function: Called with whether Dynamo is active, followed by the arguments of the hook.
        guard: Catches its errors.
    """

    def __init__(self, function: Callable[..., None], guard: ErrorBoundary | None) -> None:
        def call(*args: Any) -> None:
            function(*args)

        self._call = never_traced(call) if guard is None else guard.door(function)

    @only_inlined
    def __call__(self, *args: Any) -> None:
        """Call the function."""
        if not is_dynamo_compiling():
            self._call(is_dynamo_active(), *args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # accepts any arguments and returns None


def inside_fused_layers(model: nn.Module) -> set[nn.Module]:
    """Return all `nn.TransformerEncoderLayer` modules of a model and their submodules, whose hooks torch checks."""
    layers = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    return {inner for layer in layers for inner in layer.modules()}


def may_be_fused(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a module may be about to run as the fused kernel of `nn.TransformerEncoderLayer` (torch 2.13)."""
    if not isinstance(module, nn.TransformerEncoderLayer) or module.training:
        return False
    if not torch.is_grad_enabled():
        return True
    tensors = [*args[:1], kwargs.get("src"), *(param for name, param in module.named_parameters() if name in _FUSED)]
    return not any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)


_WATCHING: weakref.WeakSet[ModuleHooks] = weakref.WeakSet()
_GUARD = ErrorBoundary()


def _watch_compiler(hooks: ModuleHooks) -> None:
    _WATCHING.add(hooks)
    tell_of_compilations(*_DOORS)


def _stop_watching_compiler(hooks: ModuleHooks) -> None:
    _WATCHING.discard(hooks)
    if not _WATCHING:
        tell_of_no_more_compilations(*_DOORS)


def _suspend(*_: object) -> None:
    for hooks in tuple(_WATCHING):
        hooks.suspend()


def _resume(*_: object) -> None:
    for hooks in tuple(_WATCHING):
        hooks.resume()


_DOORS = _GUARD.door(_suspend), _GUARD.door(_resume)
