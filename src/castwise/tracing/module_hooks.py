"""`ModuleHooks`: hooks that watch a model's modules without changing what torch does with it.

Torch looks at the hooks of modules in two places, and does something else when there are any. An
`nn.TransformerEncoderLayer` in evaluation leaves its fused kernel, which under autocast returns other values in another
dtype. And `torch.compile` puts hooks into its graphs, guards on them, and compiles forwards of torch.nn that it leaves
alone otherwise. So hooks are taken off just before torch looks, and put back when it has looked: not where a
module has hooks of the user's, which torch.compile guards on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from castwise._torch_private import (
    is_dynamo_active,
    never_traced,
    only_inlined,
    tell_of_compilations,
    tell_of_no_more_compilations,
)

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[nn.Module, tuple[Any, ...], Any], None]

# What an nn.TransformerEncoderLayer asks for requires_grad before it takes its fused kernel, besides its input.
_FUSED = {
    *("self_attn.in_proj_weight", "self_attn.in_proj_bias", "self_attn.out_proj.weight", "self_attn.out_proj.bias"),
    *(f"{name}.{kind}" for name in ("norm1", "norm2", "linear1", "linear2") for kind in ("weight", "bias")),
}


class ModuleHooks:
    """Hooks on modules: a function before a forward, and one after it.

    Neither is called for a forward that Dynamo compiles, or of a layer that is about to take torch's fused kernel.
    Models are not kept alive. A copy of a module, and one that is unpickled, has hooks that do nothing.

    Example:
        >>> layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        >>> calls = []
        >>> hooks = ModuleHooks()
        >>> hooks.put_on(layer, lambda *_: calls.append("before"), lambda *_: calls.append("after"))
        >>> x = torch.ones(1, 2, 4)
        >>> _ = layer(x)
        >>> with torch.no_grad():
        ...     _ = layer.eval()(x)  # which looks at its hooks
        >>> calls
        ['before', 'after']
        >>> hooks.remove()
    """

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []
        self._in_the_way: list[_Pair] = []
        self._are_all_on = True
        self._has_compiled = False

    def put_on(
        self, module: nn.Module, before: Before, after: After | None = None, *, first: bool = False, later: bool = False
    ) -> None:
        """Call functions before and after each forward of a module.

        Args:
            module: Not a ScriptModule, which takes no hooks.
            before: Called with the module, positional and keyword arguments.
            after: Called with the module, positional arguments, and the output; also if the forward raises, with None.
                Where torch's fused kernel is about to be taken, neither is called; without an `after`, `before` is.
            first: Call `before` before the hooks that are there already.
            later: Begin with the next `put_back`.
        """
        pair = _Pair(module, before, after, first)
        if later:
            self._are_all_on = False
        else:
            self._put_on(pair)
        self._pairs.append(pair)
        _watch_compiler(self)

    def put_back(self) -> None:
        """Put on again what was taken off for torch's sake."""
        if not self._are_all_on:
            self._are_all_on = True
            for pair in self._pairs:
                self._put_on(pair)
        if self._pairs:
            _watch_compiler(self)  # torch.compiler.reset() forgets its callbacks

    def remove(self) -> None:
        """Take all off."""
        for pair in self._pairs:
            pair.take_off()
        self._pairs.clear()
        self._in_the_way.clear()
        self._are_all_on = True
        _stop_watching_compiler(self)

    def take_off(self, modules: Collection[nn.Module]) -> None:
        """Take off those of some modules until `put_back`."""
        for pair in self._pairs:
            if pair.module() in modules:
                pair.take_off()
                self._are_all_on = False

    def make_way(self) -> None:
        """Take off all but those of modules that are running, which have something to call when they end."""
        self._has_compiled = True
        for pair in self._pairs:
            if pair.is_on and not pair.running:
                pair.take_off()
                self._in_the_way.append(pair)

    def come_back(self) -> None:
        """Undo `make_way`."""
        while self._in_the_way:
            self._put_on(self._in_the_way.pop())

    def _put_on(self, pair: _Pair) -> None:
        if not (self._has_compiled and pair.has_company):
            pair.put_on(self._enter)

    def _enter(self, pair: _Pair, args: tuple[Any, ...], kwargs: dict[str, Any], under_dynamo: bool) -> None:
        module = pair.module()
        if module is None:
            return
        if under_dynamo and type(module).__module__.startswith(("torch.nn.", "torch.ao.")):
            # Dynamo is passing through code that it could not compile. It leaves forwards of torch's own modules
            # alone there, unless they have hooks.
            self.take_off([module])
            return
        is_fused = may_be_fused(module, args, kwargs)
        if is_fused:
            self.take_off(set(module.modules()))
        if pair.after is None:
            pair.before(module, args, kwargs)
        elif not is_fused:
            pair.running += 1
            pair.before(module, args, kwargs)


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
    def has_company(self) -> bool:
        """Whether the module has hooks of the user's.

        Then Dynamo guards on how many there are, and would compile its caller again at each call if ours came back.
        """
        module = self.module()
        hooks = [] if module is None else [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        return any(not isinstance(hook, _Hook) for hook in hooks)

    def put_on(self, enter: Callable[[_Pair, tuple[Any, ...], dict[str, Any], bool], None]) -> None:
        module = self.module()
        if self._handles or module is None:
            return
        before = _Hook(lambda under_dynamo, _, args, kwargs: enter(self, args, kwargs, under_dynamo))
        self._handles.append(module.register_forward_pre_hook(before, prepend=self._first, with_kwargs=True))
        if self.after is not None:
            after = _Hook(lambda under_dynamo, *given: self._leave(*given))
            self._handles.append(module.register_forward_hook(after, always_call=True))

    def take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.running = 0

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.running and self.after is not None:
            self.running -= 1
            self.after(module, args, output)


class _Hook:
    """Calls a function as a hook of a module; a copy of the module has one that does nothing.

    So has one that is unpickled, also where castwise is not installed.

    Args:
        function: Called with whether Dynamo is looking on, and then with what hooks of its kind take.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    @only_inlined
    def __call__(self, *args: Any) -> None:
        """Call the function."""
        if not is_dynamo_compiling():
            self._call(is_dynamo_active(), *args)

    @never_traced
    def _call(self, *args: Any) -> None:
        self._function(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # which takes any arguments, and returns None


def inside_fused_layers(model: nn.Module) -> set[nn.Module]:
    """Return the modules of a model at whose hooks an `nn.TransformerEncoderLayer` looks, itself included."""
    layers = [each for each in model.modules() if isinstance(each, nn.TransformerEncoderLayer)]
    return {inner for layer in layers for inner in layer.modules()}


def may_be_fused(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a module may be an `nn.TransformerEncoderLayer` that runs as one kernel, as of torch 2.13."""
    if not isinstance(module, nn.TransformerEncoderLayer) or module.training:
        return False
    if not torch.is_grad_enabled():
        return True
    tensors = [*args[:1], kwargs.get("src"), *(param for name, param in module.named_parameters() if name in _FUSED)]
    return not any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)


_WATCHING: weakref.WeakSet[ModuleHooks] = weakref.WeakSet()


def _watch_compiler(hooks: ModuleHooks) -> None:
    _WATCHING.add(hooks)
    tell_of_compilations(_make_way, _come_back)


def _stop_watching_compiler(hooks: ModuleHooks) -> None:
    _WATCHING.discard(hooks)
    if not _WATCHING:
        tell_of_no_more_compilations(_make_way, _come_back)


def _make_way(*_: object) -> None:
    for hooks in tuple(_WATCHING):
        hooks.make_way()


def _come_back(*_: object) -> None:
    for hooks in tuple(_WATCHING):
        hooks.come_back()
