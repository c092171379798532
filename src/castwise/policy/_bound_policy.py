"""`BoundPolicy`: a policy whose names have been looked up in a model, and its state while the model's modules run.

Each module that a rule changes gets a `_RuledForward` as its `forward` attribute. It does nothing unless the thread is
in a region of the policy and autocast's native state is the one that the policy set. A nested region (castwise's or
torch's) that sets another state suspends the policy. Hooks would not work: torch does not call them after a
`KeyboardInterrupt`, and it runs `nn.TransformerEncoderLayer` by another algorithm if a module has hooks.

Activation checkpointing reruns a forward inside a backward, outside any region. Torch restores the native state. The
state of the policy is found from the sequence number of the autograd node that is running: regions and rules record
which sequence numbers were assigned while they were active.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from castwise._recipes import quantized_linear
from castwise._recipes.listeners import LISTENERS, Telling
from castwise._recipes.recipe import RECIPES, Recipe, kernels_on, warn_if_emulated
from castwise._recipes.torchao_linear import TorchaoLinear
from castwise._torch_private import (
    backwards_without_autocast,
    fsdp_mixed_precision,
    function_modes,
    graph_node_running,
    graph_nodes_made,
    is_backward_running,
    is_dynamo_active,
    only_inlined,
)
from castwise.amp._thread_state import THREAD
from castwise.policy import _op_rules as op_rules
from castwise.policy._casting import Casts, cast_floats, native_state_of, restore_native_state, set_native_state
from castwise.policy._module_rules import Decision, decide, is_never_called

if TYPE_CHECKING:
    from castwise.policy._policy import Policy

_LOW_PRECISION = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_REMEMBERED = 16384  # regions and modules whose forwards may still be rerun
# Modules that in inference may run as one fused op, unless a TorchFunctionMode is active.
_WITH_FAST_PATH = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
_numbers = itertools.count()


class State(NamedTuple):
    """An active policy.

    Args:
        key: The policy's key, a string because torch.compile guards on string values but not on object identity.
        bound: The policy.
        device: Device type of the region.
        enabled: Whether autocast's native lists are on.
        dtype: The low precision they cast to.
        cache: Whether the region caches casts of weights.
        ops: Whether op rules apply.
        writes: Whether the rule for in-place writes applies.
        again: Whether checkpointing is rerunning a forward inside a backward.
        weights: The `WeightCache` of the region, if any.
    """

    key: str
    bound: BoundPolicy
    device: str
    enabled: bool
    dtype: torch.dtype
    cache: bool
    ops: bool = True
    writes: bool = True
    again: bool = False
    weights: Any = None

    @only_inlined
    def is_native(self) -> bool:
        """Return True if torch's own state is the one the policy set, so that no nested region has changed it."""
        return torch.is_autocast_enabled(self.device) is self.enabled and (
            not self.enabled or torch.get_autocast_dtype(self.device) is self.dtype
        )


class _Forward(NamedTuple):
    """The graph nodes created while a state was active: in a region, or in the forward of a module with a rule."""

    start: int
    stop: int
    thread: object
    device: str
    native: tuple[bool, torch.dtype | None]  # whether autocast is enabled, and its dtype if it is
    state: State | None  # None if the policy was suspended


class BoundPolicy:
    """A policy for one model, to pass to `castwise.autocast(..., policy=...)`. Created by `Policy.bind`.

    Args:
        policy: The policy.
        model: The model. Its modules get new `forward` attributes; no reference to the model is kept.
    """

    def __init__(self, policy: Policy, model: nn.Module) -> None:
        self.policy = policy
        self.op_rules = op_rules.rules_of(policy)
        self.dtype = _LOW_PRECISION.get(policy.compute)
        names = {policy.compute, *policy.modules.values(), *policy.ops.values()}
        self.low_precisions = [dtype for name, dtype in _LOW_PRECISION.items() if name in names]
        self.output = None if policy.output is None else getattr(torch, policy.output)
        decisions = decide(policy, model)
        _check_what_fsdp_gathers(decisions)
        self.recipes = list(dict.fromkeys(decision.recipe for decision in decisions if decision.recipe))
        self.key = f"policy {next(_numbers)}"
        self.is_bound = True
        self._has_rules = bool(policy.modules or self.op_rules)
        self._forwards: deque[_Forward] = deque(maxlen=_REMEMBERED)
        self._ruled: list[_RuledForward] = []
        rules = list(self._rules(decisions))  # first, so that a backend error leaves the model unchanged
        for decision in decisions:
            if decision.recipe:
                warn_if_emulated(RECIPES[decision.recipe], policy.backend, decision.device_of_weight)
        for decision, rule in rules:
            if rule.recipe is not None and (whose := _other_forward(decision.module)):
                self.unbind()  # undoes what earlier turns of this loop have set
                raise ValueError(
                    f"`forward` of {decision.name!r} is overridden on the instance (by {whose}), and "
                    f"{decision.recipe} would bypass it: bind the policy first, or give the module another rule"
                )
            if not isinstance(decision.module, torch.jit.ScriptModule):
                forward = vars(decision.module).get("forward")
                if not isinstance(forward, _RuledForward):
                    forward = vars(decision.module)["forward"] = _RuledForward(decision.module, forward)
                forward.rules[self.key] = rule
                forward.note_dtypes()
                self._ruled.append(forward)
            elif rule.precision or rule.output or rule.recipe:
                self.unbind()
                raise ValueError(f"{decision.name!r} is a ScriptModule, whose forward is fixed: remove its rule")

    def _rules(self, decisions: list[Decision]) -> Iterator[tuple[Decision, _Rule]]:
        """Yield each module that the policy changes, once, with its rule."""
        dtype_names = {decision.name: decision.effective for decision in decisions}
        # Rules that repeat what the region does are needed only inside a module with a different rule.
        needed = set(dtype_names.values()) - {None, "inherit", self.policy.compute if self.dtype else None}
        seen: set[nn.Module] = set()
        unfused: list[str] = []
        for decision in decisions:
            name, module, effective, compute = decision.name, decision.module, decision.effective, decision.compute
            if module in seen:
                continue
            seen.add(module)
            # No rule differs from the region, so none is needed.
            precision = None if effective == "inherit" or not needed else effective
            output = self.output if name == "" else None  # "" is the model itself
            # When checkpointing reruns a forward, the module itself activates op rules.
            calls_ops = bool(self.op_rules) and not op_rules.calls_no_rule(module, self.op_rules)
            fast_path = None
            if isinstance(module, _WITH_FAST_PATH):
                prefix = f"{name}." if name else ""
                inside = [
                    inner for inner in decisions if inner.name.startswith(prefix) and not is_never_called(inner.module)
                ]
                if any(inner.compute != compute or inner.recipe for inner in inside):
                    fast_path = False
                elif self.op_rules and not name.startswith(tuple(unfused)):
                    fast_path = all(op_rules.calls_no_rule(part, self.op_rules) for part in module.modules())
                if fast_path is False:
                    unfused.append(prefix)
            recipe = RECIPES[decision.recipe] if decision.recipe else None
            if precision or output or calls_ops or fast_path is not None or recipe:
                rule = _Rule(self, precision, output, fast_path, recipe)
                yield decision, rule if recipe is None else rule.computed_by(self.policy.backend, recipe)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.policy!r})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a bound policy cannot be pickled or copied: pickle or copy the policy and the model, and bind again"
        )

    def unbind(self) -> None:
        """Remove the rules from the model and restore the `forward` of its modules.

        After this, entering a region with the bound policy raises, also for other callers of `bind` that got the
        same object.
        """
        self.is_bound = False
        for forward in self._ruled:
            forward.take_off(self.key)
        self._ruled.clear()

    @only_inlined
    def check_is_bound(self) -> None:
        """Raise a RuntimeError if the rules are no longer on the model."""
        if not self.is_bound:
            raise RuntimeError("the policy was unbound, or bound again after the model changed: bind it again")

    def is_on(self, model: nn.Module) -> bool:
        """Return True if the policy is bound to modules of this model, or has no rules for any module.

        Args:
            model: Any module.
        """
        forwards = {
            forward for module in model.modules() if isinstance(forward := vars(module).get("forward"), _RuledForward)
        }
        return not self._ruled or not forwards.isdisjoint(self._ruled)

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts for `torch.utils.checkpoint` that reactivate the policy when a function is rerun.

        Pass this method as `context_fn`. Module rules do not need it, nor do op rules inside modules. Without it, ops
        that a checkpointed function calls directly are rerun without their rules.

        Example:
            >>> import castwise
            >>> from torch.utils.checkpoint import checkpoint
            >>> bound = castwise.Policy(compute="bfloat16", ops={"softmax": "float32"}).bind(nn.Linear(4, 4))
            >>> x = torch.ones(4, requires_grad=True)
            >>> with castwise.autocast("cpu", policy=bound):
            ...     y = checkpoint(lambda x: x.bfloat16().softmax(0) ** 2, x, use_reentrant=False,
            ...                    context_fn=bound.checkpoint_contexts)
            >>> y.sum().backward()
        """
        state = THREAD.state
        return nullcontext(), _Again(state if state is not None and state.bound is self else None)

    @only_inlined
    def mode(self) -> op_rules.OpRuleMode | None:
        """Return a new mode that applies the op rules, or None if there are none."""
        return op_rules.OpRuleMode(self) if self.op_rules else None

    @only_inlined
    def cast_output(self, value: Any, device: str) -> Any:
        """Cast the output of a function that a region with this policy decorates.

        Args:
            value: The output.
            device: The `type` of the region's device.
        """
        return value if self.output is None else cast_floats(value, device, self.output)

    @only_inlined
    def enter(self, region: Any) -> Any:
        """Activate the policy in this thread for a region, and return the token for `leave`.

        Args:
            region: The `castwise.autocast` being entered, with its settings resolved.
        """
        self.check_is_bound()
        weights = (
            next((extension for extension in region._extensions if extension is not self), None)
            if self.recipes
            else None
        )
        state = State(
            self.key, self, region.device, region._enabled, region.fast_dtype, region._caches, weights=weights
        )
        mode = self.mode()
        if is_dynamo_compiling():
            THREAD.state = state
            if mode is not None:
                mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
            return state, mode, None, None
        # Rules must act the same in compiled and eager code. Otherwise torch runs the backward of a module with a
        # "float32" rule in the dtype of the outer region (pytorch#179804).
        backwards = backwards_without_autocast() if self._has_rules else None
        try:
            THREAD.state = state
            if mode is not None:
                mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
            if backwards is not None:
                backwards.__enter__()
            return state, mode, backwards, graph_nodes_made()
        except BaseException:
            # It returns None once the setting is no longer the default, so the context was entered.
            if backwards is not None and backwards_without_autocast() is None:
                backwards.__exit__(None, None, None)
            if mode is not None:
                op_rules.exit_if_entered(mode)
            THREAD.state = None  # as before: the region has put the state of an outer one away
            raise

    @only_inlined
    def leave(self, token: Any) -> None:
        """Deactivate the policy.

        Args:
            token: The return value of `enter`.
        """
        state, mode, backwards, start = token
        if backwards is not None:
            backwards.__exit__(None, None, None)
        if mode is not None:
            mode.__exit__(None, None, None)
        self.remember(start, state.device, (state.enabled, state.dtype), state)
        THREAD.state = None  # the region puts back the state of an outer one

    @only_inlined
    def remember(self, start: int | None, device: str, native: tuple[bool, torch.dtype], state: State | None) -> None:
        """Record the state in which the graph nodes since `start` were created.

        Args:
            start: The number of nodes before them; None records nothing.
            device: The `type` of the region's device.
            native: Whether autocast is enabled, and its dtype.
            state: The policy's state; None if the policy is not active.
        """
        if start is not None and start != (stop := graph_nodes_made()):  # without new nodes there is nothing to rerun
            self._forwards.append(_Forward(start, stop, THREAD.token, device, _compared(native), state))

    @only_inlined
    def forward_again(self) -> _Forward | None:
        """Return the record of the forward that a backward is rerunning, if any."""
        node = graph_node_running()
        if node is None:
            return None
        thread, innermost = THREAD.token, None
        for forward in reversed(self._forwards.copy()):  # a copy, because other threads may append
            # On a CPU a backward runs in the caller's thread; on other devices, in a thread per device.
            if forward.thread is not thread and forward.device == "cpu":
                continue
            if forward.stop <= node:  # in order of their ends: all earlier ones of this thread end before the node too
                break
            # Of nested records, use the one in which the checkpoint was created: its native state has been restored.
            is_inner = forward.start <= node and (innermost is None or forward.start >= innermost.start)
            if is_inner and forward.native == _compared(native_state_of(forward.device)[:2]):
                innermost = forward
        return innermost


@only_inlined
def _compared(native: tuple[bool, torch.dtype]) -> tuple[bool, torch.dtype | None]:
    """Return the native state without a dtype if autocast is off."""
    return native if native[0] else (False, None)


class _Again:
    """Activate a state while a checkpointed function is rerun."""

    def __init__(self, state: State | None) -> None:
        self._state = state

    @only_inlined
    def __enter__(self) -> None:
        self._outer, self._mode = THREAD.state, None
        if self._state is not None:
            self._mode = self._state.bound.mode()
            try:
                THREAD.state = self._state._replace(again=True)
                if self._mode is not None:
                    self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
            except BaseException:
                self.__exit__()
                raise

    @only_inlined
    def __exit__(self, *_: object) -> None:
        if self._mode is not None and is_dynamo_compiling():
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
        elif self._mode is not None:
            op_rules.exit_if_entered(self._mode)
        THREAD.state = self._outer


class _Rule(NamedTuple):
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

    bound: BoundPolicy
    precision: str | None
    output: torch.dtype | None
    fast_path: bool | None
    recipe: Recipe | None = None
    kernels_on: frozenset[str] = frozenset()
    torchao: TorchaoLinear | None = None

    def computed_by(self, backend: str, recipe: Recipe) -> _Rule:
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
        if name in _LOW_PRECISION:
            return outer._replace(enabled=True, dtype=_LOW_PRECISION[name], ops=True, writes=True)
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
        tell: Telling | None,
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
        if output is None and not outer.enabled and self.precision in _LOW_PRECISION:
            output = torch.float32  # code that runs without autocast expects fp32
        return result if output is None else cast_floats(result, outer.device, output)


def _other_forward(module: nn.Module) -> str | None:
    """Return where a module's `forward` attribute comes from; None if it has none, or only a rule's."""
    forward = vars(module).get("forward")
    if isinstance(forward, _RuledForward):
        forward = forward.before
    return None if forward is None else getattr(forward, "__module__", type(forward).__name__)


class _Seen(TorchFunctionMode):
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
    return arg.float() if isinstance(arg, nn.Parameter) and arg.dtype in _LOW_PRECISION.values() else arg


def _call(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


class _RuledForward:
    """The `forward` of a module that policies have rules for.

    Args:
        module: The module that gets this as an attribute; only a weak reference is kept.
        before: The module's previous `forward` attribute, if any.
    """

    def __init__(self, module: Any, before: Any) -> None:
        self._module, self.before = weakref.ref(module), before
        self.rules: dict[str, _Rule] = {}
        self.has_low_weights = False

    def note_dtypes(self) -> None:
        """Update whether the module has 16-bit weights, which a "float32" rule must cast."""
        module: Any = self._module()
        self.has_low_weights = any(param.dtype in _LOW_PRECISION.values() for param in module.parameters())

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

    def __deepcopy__(self, memo: dict[int, Any]) -> _RuledForward:
        module = self._module()
        twin = _RuledForward(memo.get(id(module), module), copy.deepcopy(self.before, memo))
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
                outer.bound.remember(start, outer.device, native[:2], None)
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
    def _outer_state(self) -> tuple[State | None, op_rules.OpRuleMode | None]:
        """Return the state around the module; when checkpointing reruns it, that of its forward, and a mode for it."""
        outer = THREAD.state
        if (outer is None or not outer.again) and is_backward_running():
            # Of several policies on the module, the one whose record began last.
            forwards = [forward for rule in self.rules.values() if (forward := rule.bound.forward_again())]
            state = max(forwards, key=lambda forward: forward.start).state if forwards else None
            if state is not None:
                return state._replace(again=True), state.bound.mode()
        return outer, None

    @only_inlined
    def _eager(
        self,
        forward: Any,
        args: Any,
        kwargs: Any,
        rule: _Rule,
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
                    mode = _Seen()
                elif rule.fast_path and mode is None:  # and is hidden here, because it would block it
                    changes.hide(op_rules.innermost_mode(outer.bound))
                THREAD.state = state
                if mode is not None:
                    changes.enter(mode)
                if rule.precision == "float32" and self.has_low_weights:
                    changes.enter(_Fp32Weights())
                if rule.precision is not None:
                    _set_native(outer, state)
                is_entered = True
                return forward(*args, **kwargs)
            finally:
                changes.put_back(is_entered, sets_native=rule.precision is not None)
                # Otherwise the state is the one around it, whose record covers these nodes.
                if rule.precision is not None:
                    outer.bound.remember(start, outer.device, (state.enabled, state.dtype), state)
        except BaseException:
            changes.put_back()  # an interrupt may have come while they were put back
            raise

    @only_inlined
    def _compiled(
        self,
        forward: Any,
        args: Any,
        kwargs: Any,
        rule: _Rule,
        outer: State,
        state: State,
    ) -> Any:
        """Call a forward in another state, while Dynamo traces."""
        cuda = seen = widening = None
        if rule.fast_path is False and outer.device != "cuda":
            # Torch checks for a mode, which Dynamo does not see, and for CUDA autocast on any device, which it does.
            cuda = native_state_of("cuda")
        elif rule.fast_path is False and not outer.bound.op_rules:
            seen = _Seen()
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
                _set_native(outer, state)
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
    def _by_recipe(self, input: torch.Tensor, rule: _Rule, outer: State) -> Any:
        """Return the output of a linear layer that has a recipe."""
        assert rule.recipe is not None
        module: Any = self._module()
        state, weights, tell = rule.state_inside(outer), quantized_linear.quantize_weight, None
        if not is_dynamo_compiling():
            if state.weights is not None:
                weights = functools.partial(state.weights.quantized, module)
            if LISTENERS:
                is_emulated = input.device.type not in rule.kernels_on
                tell = Telling(module, rule.recipe, is_emulated, torch.is_grad_enabled())
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
                _set_native(outer, outer._replace(enabled=False))
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
        self._state, self._device, self._native = THREAD.state, device, native_state_of(device)
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
            restore_native_state(self._device, *self._native)
        for mode in reversed(self._entered):
            if is_complete or mode in function_modes():
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
        if self._hidden is not None and (is_complete or self._hidden not in function_modes()):
            self._hidden.__enter__()  # type: ignore[no-untyped-call]  # torch's
        THREAD.state = self._state


@only_inlined
def _set_native(outer: State, state: State) -> None:
    """Set torch's switches to a rule's state."""
    _, dtype, cache = native_state_of(outer.device)
    if state.enabled:
        # Torch caches one cast per weight, whatever its dtype, so cache only casts to the region's dtype.
        dtype, cache = state.dtype, outer.cache and state.dtype is outer.bound.dtype
    set_native_state(outer.device, state.enabled, dtype, cache)


def note_dtypes(model: nn.Module) -> None:
    """Tell the rules on a model that the dtypes of its parameters have changed."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, _RuledForward):
            forward.note_dtypes()


# Bound policies by model and policy, each with the modules the model had, by name, including wrapped ones.
_Modules = list[tuple[str, "weakref.ref[nn.Module]", type]]
_BOUND: weakref.WeakKeyDictionary[nn.Module, dict[Policy, tuple[BoundPolicy, _Modules]]] = weakref.WeakKeyDictionary()


def bind(policy: Policy, model: nn.Module) -> BoundPolicy:
    """Bind a policy to a model, or return the result of an earlier call if the model has not changed."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    bound = is_bound_to(policy, model)
    if bound is not None:
        return bound
    new = BoundPolicy(policy, model)
    modules = [(name, weakref.ref(module), type(module)) for name, module in _named(model)]
    bound_to_model = _BOUND.setdefault(model, {})
    if policy in bound_to_model:
        bound_to_model[policy][0].unbind()
    bound_to_model[policy] = (new, modules)
    return new


def is_bound_to(policy: Policy, model: nn.Module) -> BoundPolicy | None:
    """Return the bound policy of an earlier call of `bind`, if it is still bound and the model has not changed."""
    bound, modules = _BOUND.get(model, {}).get(policy, (None, []))
    if bound is None or not bound.is_bound:
        return None
    now = _named(model)
    same = len(now) == len(modules) and all(
        # The type too, because fully_shard changes a module's class in place.
        name == name_then and then() is module and type_then is type(module)
        for (name, module), (name_then, then, type_then) in zip(now, modules, strict=True)
    )
    return bound if same else None


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules(remove_duplicate=False))


def _check_what_fsdp_gathers(decisions: list[Decision]) -> None:
    """Raise a ValueError for a module whose weights FSDP gathers in a dtype other than the one it computes in."""
    units: dict[str, tuple[str, torch.dtype | None]] = {}
    for name, module, _, _, compute, _, _, recipe, _ in decisions:
        mixed_precision = fsdp_mixed_precision(module)
        if mixed_precision is None:
            # Without fully_shard of its own, a module belongs to the unit around it.
            units[name] = units.get(name.rpartition(".")[0], ("", None))
        else:
            units[name] = name, mixed_precision.param_dtype
        unit, dtype = units[name]
        owns = any(param.is_floating_point() for param in module.parameters(recurse=False))
        if owns and recipe and dtype not in (None, *{param.dtype for param in module.parameters(recurse=False)}):
            raise ValueError(
                f"the policy quantizes the weight of {name!r} by {recipe}, but FSDP gathers the weights of {unit!r} "
                f"already rounded to {dtype}: shard with the policies that Policy.fsdp(...) yields"
            )
        if owns and not recipe and dtype is not None and dtype is not getattr(torch, compute):
            raise ValueError(
                f"the policy runs {name!r} in {compute}, but FSDP gathers the weights of {unit!r} in {dtype}: "
                "shard with the policies that Policy.fsdp(...) yields, or give the module a rule"
            )
