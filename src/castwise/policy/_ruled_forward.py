"""The `forward` that a policy gives to a module which one of its rules changes.

It does nothing unless the thread is in a region of the policy and autocast's native state is the one that the policy
set. A nested region (castwise's or torch's) that sets another state suspends the policy. Hooks would not work: torch
does not call them after a `KeyboardInterrupt`, and it runs `nn.TransformerEncoderLayer` by another algorithm if a
module has hooks.
"""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from castwise._recipes import quantized_linear
from castwise._recipes.listeners import LISTENERS, LayerEvent
from castwise._recipes.recipe import Recipe, kernels_on
from castwise._recipes.torchao_linear import TorchaoLinear
from castwise._torch_private import (
    function_modes,
    graph_nodes_made,
    is_backward_running,
    is_dynamo_active,
    only_inlined,
)
from castwise.amp._thread_state import THREAD
from castwise.policy import _op_rules as op_rules
from castwise.policy._casting import Casts, cast_floats, native_state_of, restore_native_state, set_native_state
from castwise.policy._policy_state import ActivePolicy, State

LOW_PRECISION = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Rule(NamedTuple):
    """One policy's rule for one module.

    Args:
        bound: The policy.
        precision: A dtype by name or "exclude"; None keeps the surrounding precision.
        output: The dtype to cast results to.
        fast_path: For a module that may run as one fused op: True if it still may, because no op rule concerns it;
            False if it may not, because a rule changes something inside it; None to leave the choice to torch.
        recipe: The recipe of a linear layer.
        kernels_on: Device types on which torch's kernels compute the recipe.
        torchao: Computes the recipe if torchao is the backend.
    """

    bound: ActivePolicy
    precision: str | None
    output: torch.dtype | None
    fast_path: bool | None
    recipe: Recipe | None = None
    kernels_on: frozenset[str] = frozenset()
    torchao: TorchaoLinear | None = None

    def computed_by(self, backend: str, recipe: Recipe) -> Rule:
        """Return the rule with the implementation of its recipe filled in."""
        if backend == "torchao":
            return self._replace(torchao=TorchaoLinear(recipe))
        return self._replace(kernels_on=kernels_on(recipe, backend))

    @only_inlined
    def state_inside(self, outer: State) -> State:
        """Return the state in which the module runs."""
        name = self.precision
        if name is None:
            return outer
        if name in LOW_PRECISION:
            return outer._replace(enabled=True, dtype=LOW_PRECISION[name], ops=True, writes=True)
        # Op rules end where a module runs in fp32; write rules end only where it is excluded.
        return outer._replace(enabled=False, ops=False, writes=name != "exclude")

    @only_inlined
    def quantized(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: State,
        weights: Any,
        tell: LayerEvent | None,
    ) -> Any:
        """Return the output of a linear layer by the recipe."""
        assert self.recipe is not None
        input = input.to(state.dtype if state.enabled else torch.float32)
        if self.torchao is not None:
            return self.torchao(input, weight, bias)
        uses_kernels = input.device.type in self.kernels_on
        return quantized_linear.linear(input, weight, bias, self.recipe, uses_kernels, weights, tell)

    @only_inlined
    def cast_output(self, result: Any, outer: State) -> Any:
        """Cast the module's output to the dtype that the policy or the surrounding code expects."""
        output = self.output
        if output is None and not outer.enabled and self.precision in LOW_PRECISION:
            output = torch.float32  # code that runs without autocast expects fp32
        return result if output is None else cast_floats(result, outer.device, output)


def other_forward(module: nn.Module) -> str | None:
    """Return where a module's `forward` attribute comes from; None if it has none, or only a rule's."""
    forward = vars(module).get("forward")
    if isinstance(forward, RuledForward):
        forward = forward.before
    return None if forward is None else getattr(forward, "__module__", type(forward).__name__)


class _BlocksFastPath(TorchFunctionMode):
    """A mode that does nothing: its presence keeps modules from taking their fast path."""

    @only_inlined
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Fp32Weights(TorchFunctionMode):
    """Casts 16-bit parameters to fp32 when they are passed to functions, which disabled autocast does not do."""

    @only_inlined
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Reading an attribute, such as .dtype, must not see a copy's.
        if func.__name__ != "__get__":  # of an attribute
            args = [_widened(arg) for arg in args]
            kwargs = {name: _widened(arg) for name, arg in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


@only_inlined
def _widened(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)) and any(isinstance(value, nn.Parameter) for value in arg):  # as for torch.stack
        return type(arg)([_widened(value) for value in arg])
    return arg.float() if isinstance(arg, nn.Parameter) and arg.dtype in LOW_PRECISION.values() else arg


def _call(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


class RuledForward:
    """The `forward` of a module that policies have rules for.

    Args:
        module: The module that gets this as an attribute; only a weak reference is kept.
        before: The module's previous `forward` attribute, if any.
    """

    def __init__(self, module: Any, before: Any) -> None:
        self._module, self.before = weakref.ref(module), before
        self.rules: dict[str, Rule] = {}
        self.has_low_weights = False

    def note_dtypes(self) -> None:
        """Update whether the module has 16-bit weights, which a "float32" rule must cast."""
        module: Any = self._module()
        self.has_low_weights = any(param.dtype in LOW_PRECISION.values() for param in module.parameters())

    @property
    def __wrapped__(self) -> Any:
        """The forward without rules, for `inspect.signature`."""
        module: Any = self._module()
        return self.before or type(module).forward.__get__(module)

    @only_inlined
    def _traced(self) -> Any:
        """Return the forward without rules in a form that Dynamo traces; before torch 2.13, that is not `__get__`."""
        module: Any = self._module()
        return self.before or functools.partial(type(module).forward, module)

    @only_inlined
    def _without_rules(self) -> Any:
        """Return what computes the module without rules: `__wrapped__`, or a function that Dynamo compiles.

        Dynamo compiles no frame from torch's own files. `torch.compile` therefore adds a frame around a root such as
        `nn.Sequential`, but not if its `forward` is an attribute, as this one is.
        """
        forward = self.__wrapped__
        module = getattr(forward, "__globals__", {}).get("__name__", "")
        is_skipped = module.startswith("torch.") and is_dynamo_active()
        return functools.partial(_call, forward) if is_skipped else forward

    def take_off(self, key: str) -> None:
        """Remove a policy's rule, and restore the module's own forward if it was the last rule."""
        self.rules.pop(key, None)
        module = self._module()
        if not self.rules and module is not None and vars(module).get("forward") is self:
            if self.before is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = self.before

    def __deepcopy__(self, memo: dict[int, Any]) -> RuledForward:
        module = self._module()
        twin = RuledForward(memo.get(id(module), module), copy.deepcopy(self.before, memo))
        twin.has_low_weights = self.has_low_weights
        twin.rules.update(self.rules)  # a copy of the model follows the policies too
        return twin

    def __reduce__(self) -> Any:
        """Pickle as the original forward: an unpickled model is bound to no policy and does not need castwise."""
        return (getattr, (self._module(), "forward")) if self.before is None else self.before.__reduce_ex__(4)

    @only_inlined
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiling = is_dynamo_compiling()
        outer, again = (THREAD.state, None) if compiling else self._outer_state()
        rule = None if outer is None else self.rules.get(outer.key)
        forward = self._traced() if compiling else self._without_rules()
        if outer is None or rule is None:
            return forward(*args, **kwargs)
        if not outer.is_native():
            # The cache switch ([2]) does not count when records are compared.
            start, native = None if compiling else graph_nodes_made(), native_state_of(outer.device)
            try:
                return forward(*args, **kwargs)
            finally:
                outer.bound.node_ranges.add(start, outer.device, native[:2], None)
        if rule.recipe is not None and len(args) + len(kwargs) == 1:
            input = args[0] if args else kwargs.get("input")  # None has nn.Linear raise its own error
            # Integer and fp64 inputs run as without a recipe.
            if isinstance(input, torch.Tensor) and input.is_floating_point() and input.dtype is not torch.float64:
                return rule.cast_output(self._by_recipe(input, rule, outer), outer)
        state, casts = rule.state_inside(outer), None
        if rule.precision is not None and not state.enabled:
            casts = Casts(outer.device, torch.float32)
            args = tuple([casts.cast(arg) for arg in args])
            kwargs = {name: casts.cast(arg) for name, arg in kwargs.items()}
        try:
            if compiling:
                result = self._compiled(forward, args, kwargs, rule, outer, state)
            else:
                result = self._eager(forward, args, kwargs, rule, outer, state, again)
        finally:
            if casts is not None:
                casts.give_back()
        return rule.cast_output(result, outer)

    @only_inlined
    def _outer_state(self) -> tuple[State | None, TorchFunctionMode | None]:
        """Return the state around the module; when checkpointing reruns it, that of its forward, and a mode for it."""
        outer = THREAD.state
        if (outer is None or not outer.again) and is_backward_running():
            # Of several policies on the module, the one whose nodes begin last.
            ranges = [nodes for rule in self.rules.values() if (nodes := rule.bound.node_ranges.find_rerun_range())]
            state = max(ranges, key=lambda nodes: nodes.start).state if ranges else None
            if state is not None:
                return state._replace(again=True), state.bound.mode()
        return outer, None

    @only_inlined
    def _eager(
        self,
        forward: Any,
        args: Any,
        kwargs: Any,
        rule: Rule,
        outer: State,
        state: State,
        mode: TorchFunctionMode | None,
    ) -> Any:
        """Call a forward in another state, which an interrupt at any line does not leave behind."""
        start, changes, is_entered = graph_nodes_made(), _ThreadChanges(outer.device), False
        try:
            try:
                # Op rules have a mode of their own, which blocks the fast path as well.
                if rule.fast_path is False and not outer.bound.op_rules:
                    mode = _BlocksFastPath()
                elif rule.fast_path and mode is None:  # no op rule concerns the module: its fast path may run
                    changes.hide(op_rules.innermost_mode(outer.bound))
                THREAD.state = state
                if mode is not None:
                    changes.enter(mode)
                if rule.precision == "float32" and self.has_low_weights:
                    changes.enter(_Fp32Weights())
                if rule.precision is not None:
                    _set_native(outer, state, changes.native)
                is_entered = True
                return forward(*args, **kwargs)
            finally:
                changes.put_back(is_entered, sets_native=rule.precision is not None)
                # Otherwise the state is the one around it, whose record covers these nodes.
                if rule.precision is not None:
                    outer.bound.node_ranges.add(start, outer.device, (state.enabled, state.dtype), state)
        except BaseException:
            changes.put_back()  # an interrupt may have come while they were put back
            raise

    @only_inlined
    def _compiled(
        self,
        forward: Any,
        args: Any,
        kwargs: Any,
        rule: Rule,
        outer: State,
        state: State,
    ) -> Any:
        """Call a forward in another state, while Dynamo traces."""
        cuda = seen = widening = None
        if rule.fast_path is False and outer.device != "cuda":
            # Torch checks for a mode, which Dynamo does not see, and for CUDA autocast on any device, which it does.
            cuda = native_state_of("cuda")
        elif rule.fast_path is False and not outer.bound.op_rules:
            seen = _BlocksFastPath()
        if rule.precision == "float32" and self.has_low_weights:
            widening = _Fp32Weights()
        before, native = THREAD.state, native_state_of(outer.device)
        try:
            THREAD.state = state
            if seen is not None:
                seen.__enter__()  # type: ignore[no-untyped-call]  # torch's
            if widening is not None:
                widening.__enter__()  # type: ignore[no-untyped-call]  # torch's
            if rule.precision is not None:
                _set_native(outer, state, native)
            if cuda is not None:
                set_native_state("cuda", True, cuda[1], torch.is_autocast_cache_enabled())
            return forward(*args, **kwargs)
        finally:
            if cuda is not None:
                restore_native_state("cuda", *cuda)
            if rule.precision is not None:
                restore_native_state(outer.device, *native)
            if widening is not None:
                widening.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
            if seen is not None:
                seen.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
            THREAD.state = before

    @only_inlined
    def _by_recipe(self, input: torch.Tensor, rule: Rule, outer: State) -> Any:
        """Return the output of a linear layer that has a recipe."""
        assert rule.recipe is not None
        module: Any = self._module()
        state, weights, tell = rule.state_inside(outer), quantized_linear.quantize_weight, None
        if not is_dynamo_compiling():
            if state.weights is not None:
                weights = functools.partial(state.weights.quantized, module)
            if LISTENERS:
                is_emulated = input.device.type not in rule.kernels_on
                tell = LayerEvent(module, rule.recipe, is_emulated, torch.is_grad_enabled())
        weight, bias = module.weight, module.bias  # read inside the region, because a parametrization computes them
        if is_dynamo_compiling():
            # No op rule and no autocast may change the recipe's own ops.
            hidden, native = op_rules.innermost_mode(outer.bound), native_state_of(outer.device)
            try:
                if hidden is not None:
                    hidden.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
                set_native_state(outer.device, False, native[1], native[2])
                return rule.quantized(input, weight, bias, state, weights, tell)
            finally:
                restore_native_state(outer.device, *native)
                if hidden is not None:
                    hidden.__enter__()  # type: ignore[no-untyped-call]  # torch's
        changes, is_entered = _ThreadChanges(outer.device), False
        try:
            try:
                changes.hide(op_rules.innermost_mode(outer.bound))
                _set_native(outer, outer._replace(enabled=False), changes.native)
                is_entered = True
                return rule.quantized(input, weight, bias, state, weights, tell)
            finally:
                changes.put_back(is_entered)
        except BaseException:
            changes.put_back()
            raise


class _ThreadChanges:
    """What a rule changes in the thread's state. `put_back` may be called again if an interrupt has ended it.

    Args:
        device: The `type` of the region's device.
    """

    @only_inlined
    def __init__(self, device: str) -> None:
        self._state, self._device, self.native = THREAD.state, device, native_state_of(device)
        self._entered: list[TorchFunctionMode] = []
        self._hidden: TorchFunctionMode | None = None

    @only_inlined
    def enter(self, mode: TorchFunctionMode) -> None:
        """Enter a mode."""
        self._entered.append(mode)
        mode.__enter__()  # type: ignore[no-untyped-call]  # torch's

    @only_inlined
    def hide(self, mode: TorchFunctionMode | None) -> None:
        """Exit the innermost mode, if it is given."""
        self._hidden = mode  # noted before the exit, so that put_back can undo an interrupted one
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's

    @only_inlined
    def put_back(self, is_complete: bool = False, *, sets_native: bool = True) -> None:
        """Put back the state of the thread before the changes.

        Args:
            is_complete: Whether all changes were made. If not, an interrupt may have come between any two steps, and
                torch is asked which modes are active.
            sets_native: Whether torch's own switches are among the changes.
        """
        if sets_native:
            restore_native_state(self._device, *self.native)
        for mode in reversed(self._entered):
            if is_complete or mode in function_modes():
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
        if self._hidden is not None and (is_complete or self._hidden not in function_modes()):
            self._hidden.__enter__()  # type: ignore[no-untyped-call]  # torch's
        THREAD.state = self._state


@only_inlined
def _set_native(outer: State, state: State, native: tuple[bool, torch.dtype, bool]) -> None:
    """Set torch's switches, which are as `native` says, to a rule's state."""
    _, dtype, cache = native
    if state.enabled:
        # Torch caches one cast per weight, whatever its dtype, so cache only casts to the region's dtype.
        dtype, cache = state.dtype, outer.cache and state.dtype is outer.bound.dtype
    set_native_state(outer.device, state.enabled, dtype, cache)


def note_dtypes(model: nn.Module) -> None:
    """Tell the rules on a model that the dtypes of its parameters have changed."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, RuledForward):
            forward.note_dtypes()
