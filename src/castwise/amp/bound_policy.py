"""`BoundPolicy`: a policy with its names looked up in a model, and what holds while the modules of the model run.

Rules of modules are forward hooks. They do nothing unless the thread is in a region of their policy, and autocast's
native state is as the policy has set it: a region within, ours or torch's, that sets another state suspends the policy.

Activation checkpointing runs a forward again, within a backward and outside of any region. Torch puts back the native
state; in which state of the policy the forward ran first is found by the number that autograd has given to the node
of the graph whose turn it is: regions and rules note which numbers were given while they held.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from castwise._torch_private import (
    compile_anew,
    fsdp_mixed_precision,
    graph_node_running,
    graph_nodes_made,
    is_backward_running,
    only_inlined,
)
from castwise.amp import op_rules
from castwise.amp.casting import (
    Casts,
    cast_floats,
    native_state_of,
    restore_native_state,
    set_native_state,
)
from castwise.amp.in_force import THREAD, State, resume
from castwise.amp.module_rules import Decision, decide

if TYPE_CHECKING:
    from castwise.amp.policy import Policy

_LOW_PRECISION = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_REMEMBERED = 16384  # regions and modules whose forwards may still be run again


class _Forward(NamedTuple):
    """The graph nodes made while a state held: in a region, or in the forward of a module that has hooks."""

    start: int
    stop: int
    thread: object
    device: str
    native: tuple[bool, torch.dtype | None]  # enabled, and if so the dtype
    state: State | None  # None where the policy was suspended


class BoundPolicy:
    """A policy for one model: what `castwise.autocast(..., policy=...)` takes. Made by `Policy.bind`.

    Args:
        policy: The policy.
        model: The model, which gets hooks; it is not referenced.
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
        self.is_bound = True
        self._forwards: deque[_Forward] = deque(maxlen=_REMEMBERED)
        to_hook: dict[nn.Module, _ModuleHook] = {}
        for decision in decisions:
            module = decision.module
            rule = None if decision.in_force in {None, "inherit"} else decision.in_force
            output = self.output if decision.name == "" else None
            # Where checkpointing runs a forward again, hooks are what puts op rules in force.
            may_call = bool(self.op_rules) and not op_rules.calls_no_rule(module, self.op_rules)
            if module in to_hook or not (rule or output or may_call):
                continue
            if not isinstance(module, torch.jit.ScriptModule):
                to_hook[module] = _ModuleHook(self, rule, output)
            elif rule or output:
                raise ValueError(f"{decision.name!r} is a ScriptModule, which takes no hooks: give it no rule")
        self._hooks: list[Any] = []
        for module, hook in to_hook.items():
            compile_anew(type(module).forward)  # the guards of what is compiled do not look at whether there are hooks
            self._hooks += [
                module.register_forward_pre_hook(hook.enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(hook.leave, always_call=True),
            ]
        if self._hooks:
            compile_anew(type(model).forward)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.policy!r})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a bound policy cannot be pickled or copied: do so with the policy and the model, and bind again"
        )

    def unbind(self) -> None:
        """Take the hooks off the model, so that it can be pickled for where castwise is not installed.

        No region can be entered with it any more, by whoever has bound an equal policy to the model and got this.
        """
        self.is_bound = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @only_inlined
    def check_is_bound(self) -> None:
        """Say so if its hooks are not on the model any more.

        Raises:
            RuntimeError: They are not.
        """
        if not self.is_bound:
            raise RuntimeError("the policy was unbound, or bound anew after the model had changed: bind it again")

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Put the policy in force, as it is now, when a checkpointed function is run again.

        Not needed for rules of modules, nor for op rules in modules that are called. Without it, ops that a
        checkpointed function calls by itself are run again without their rules.

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
        """Return what applies the rules for ops, if there are any."""
        return op_rules.OpRuleMode(self) if self.op_rules else None

    @only_inlined
    def enter(self, device: str, enabled: bool, dtype: torch.dtype, cache: bool) -> Any:
        """Put the policy in force in this thread, and return what `leave` takes; a region does that.

        Args:
            device: The `type` of the region's device.
            enabled: Whether autocast is.
            dtype: That of the region.
            cache: Whether autocast keeps casts of weights.
        """
        _drop_what_an_interrupted_backward_left()
        outer = THREAD.state, THREAD.modules
        THREAD.state = state = State(self, device, enabled, dtype, cache)
        THREAD.modules = None
        mode = self.mode()
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
        return outer, mode, state, None if is_dynamo_compiling() else graph_nodes_made()

    @only_inlined
    def leave(self, entered: Any) -> None:
        """Put in force what was before.

        Args:
            entered: What `enter` has returned.
        """
        outer, mode, state, start = entered
        if mode is not None:
            mode.__exit__(None, None, None)
        self.remember(start, state.device, (state.enabled, state.dtype), state)
        resume(outer)

    @only_inlined
    def remember(self, start: int | None, device: str, native: tuple[bool, torch.dtype], state: State | None) -> None:
        """Note in which state the nodes of the graph were made that there are since a number of them.

        Args:
            start: That number; None notes nothing.
            device: The `type` of the region's device.
            native: Whether autocast is enabled, and its dtype.
            state: The policy's; None where it is not in force.
        """
        if start is not None and start != (stop := graph_nodes_made()):
            self._forwards.append(_Forward(start, stop, THREAD.token, device, _compared(native), state))

    @only_inlined
    def state_of_forward(self) -> State | None:
        """Return in which state the forward ran first that a backward runs again, if any."""
        node = graph_node_running()
        if node is None:
            return None
        thread, found = THREAD.token, None
        for forward in reversed(self._forwards.copy()):
            # On a CPU a backward runs where it is called, elsewhere in a thread of its device.
            if forward.thread is not thread and forward.device == "cpu":
                continue
            if forward.stop <= node:
                break
            # Of those around each other it is that in which the checkpoint was made: torch has put back its state.
            is_inner = forward.start <= node and (found is None or forward.start >= found.start)
            if is_inner and forward.native == _compared(native_state_of(forward.device)[:2]):
                found = forward
        return None if found is None or found.state is None else found.state._replace(again=True)


@only_inlined
def _compared(native: tuple[bool, torch.dtype]) -> tuple[bool, torch.dtype | None]:
    """Leave out the dtype of an autocast that is off."""
    return native if native[0] else (False, None)


class _Again:
    """Puts a state in force while a checkpointed function is run again."""

    def __init__(self, state: State | None) -> None:
        self._state = state

    @only_inlined
    def __enter__(self) -> None:
        self._outer = THREAD.state, THREAD.modules
        self._mode = None
        if self._state is not None:
            THREAD.state, THREAD.modules = self._state._replace(again=True), None
            self._mode = self._state.bound.mode()
            if self._mode is not None:
                self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's

    @only_inlined
    def __exit__(self, *_: object) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
        resume(self._outer)


@only_inlined
def _drop_what_an_interrupted_backward_left() -> None:
    """Hooks are not called after a KeyboardInterrupt; a region cleans up after them, but a backward has none."""
    state = THREAD.state
    if state is not None and state.again and not is_dynamo_compiling() and not is_backward_running():
        THREAD.state = THREAD.modules = None


class _Entered(NamedTuple):
    """What a hook has to put back when its module's forward ends."""

    hook: _ModuleHook
    before: State | None
    outer: State  # the same, or what was found for a forward that is run again
    native: tuple[bool, torch.dtype, bool]
    start: int | None
    state: State | None  # None where the policy is suspended, and nothing is done
    mode: Any
    casts: Casts | None
    link: Any


class _ModuleHook:
    """The forward hooks of one module."""

    def __init__(self, bound: BoundPolicy | None, rule: str | None, output: torch.dtype | None) -> None:
        self._bound, self._rule, self._output = bound, rule, output

    def __deepcopy__(self, memo: Any) -> _ModuleHook:
        return self  # a copy of the model follows the policy as well

    def __reduce__(self) -> Any:
        return _ModuleHook, (None, None, None)  # one that never does anything

    @only_inlined
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward: set the native state that the rule says, and cast the arguments if it says so."""
        bound, rule, mode, casts = self._bound, self._rule, None, None
        compiling = is_dynamo_compiling()
        if bound is None:
            return None
        _drop_what_an_interrupted_backward_left()
        before = outer = THREAD.state
        if not compiling and (outer is None or not outer.again) and is_backward_running():
            again = bound.state_of_forward()
            if again is not None:
                outer, mode = again, bound.mode()
        if outer is None or outer.bound is not bound:
            return None
        device = outer.device
        native = native_state_of(device)
        start = None if compiling else graph_nodes_made()
        if not outer.is_native():
            THREAD.modules = _Entered(self, before, outer, native, start, None, None, None, THREAD.modules)
            return None
        state = outer if rule is None else self._state_inside(outer)
        if not state.enabled and rule is not None:
            casts = Casts(device, torch.float32)
            args = tuple([casts.cast(arg) for arg in args])
            kwargs = {name: casts.cast(arg) for name, arg in kwargs.items()}
        THREAD.modules = _Entered(self, before, outer, native, start, state, mode, casts, THREAD.modules)
        THREAD.state = state
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
        if rule is None:
            return None
        if state.enabled:
            # Torch keeps one cast of a weight, whatever its dtype: only those of the region's dtype are to be kept.
            set_native_state(device, True, state.dtype, outer.cache and state.dtype is bound.dtype)
            return None
        set_native_state(device, False, native[1], native[2])
        return args, kwargs

    @only_inlined
    def _state_inside(self, outer: State) -> State:
        rule = self._rule
        if rule in _LOW_PRECISION:
            return State(outer.bound, outer.device, True, _LOW_PRECISION[rule], outer.cache, True, True, outer.again)
        return State(outer.bound, outer.device, False, outer.dtype, outer.cache, False, rule != "exclude", outer.again)

    @only_inlined
    def leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        """After the forward, also one that raised: put back what was, and cast the results if the policy says so."""
        entered = THREAD.modules
        if entered is None or entered.hook is not self:
            return None
        _, THREAD.state, outer, native, start, state, mode, casts, THREAD.modules = entered
        rule = self._rule
        if start is not None and (rule is not None or state is None):
            set_inside = native[:2] if state is None else (state.enabled, state.dtype)
            outer.bound.remember(start, outer.device, set_inside, state)
        if state is None:
            return None
        if mode is not None:
            mode.__exit__(None, None, None)
        if rule is not None:
            restore_native_state(outer.device, *native)
        if casts is not None:
            casts.give_back()
        output = self._output
        if output is None and not outer.enabled and rule in _LOW_PRECISION:
            output = torch.float32  # what runs without autocast could not use anything else
        return result if output is None else cast_floats(result, outer.device, output)


# By model and policy; with each what there was by name, wrapped modules and their types included.
_Modules = list[tuple[str, "weakref.ref[nn.Module]", type]]
_BOUND: weakref.WeakKeyDictionary[nn.Module, dict[Policy, tuple[BoundPolicy, _Modules]]] = weakref.WeakKeyDictionary()


def bind(policy: Policy, model: nn.Module) -> BoundPolicy:
    """Bind a policy to a model, or return what an earlier call has bound if the model is the same."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    bound = is_bound_to(policy, model)
    if bound is not None:
        return bound
    new = BoundPolicy(policy, model)
    modules = [(name, weakref.ref(module), type(module)) for name, module in _named(model)]
    of_model = _BOUND.setdefault(model, {})
    if policy in of_model:
        of_model[policy][0].unbind()
    of_model[policy] = (new, modules)
    return new


def is_bound_to(policy: Policy, model: nn.Module) -> BoundPolicy | None:
    """Return what a policy has been bound to a model as, if neither has changed since."""
    bound, modules = _BOUND.get(model, {}).get(policy, (None, []))
    if bound is None or not bound.is_bound:
        return None
    now = _named(model)
    same = len(now) == len(modules) and all(
        name == name_then and then() is module and type_then is type(module)
        for (name, module), (name_then, then, type_then) in zip(now, modules, strict=True)
    )
    return bound if same else None


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules(remove_duplicate=False))


def _check_what_fsdp_gathers(decisions: list[Decision]) -> None:
    """Refuse a module that would not get its weights in the dtype it computes in."""
    units: dict[str, tuple[str, torch.dtype | None]] = {}
    for name, module, _, _, compute, _, _ in decisions:
        mixed_precision = fsdp_mixed_precision(module)
        if mixed_precision is None:
            units[name] = units.get(name.rpartition(".")[0], ("", None))
        else:
            units[name] = name, mixed_precision.param_dtype
        unit, dtype = units[name]
        owns = any(param.is_floating_point() for param in module.parameters(recurse=False))
        if owns and dtype is not None and dtype is not getattr(torch, compute):
            raise ValueError(
                f"the policy has {name!r} compute in {compute}, but FSDP gathers the weights of {unit!r} in {dtype}: "
                "shard with the policies that Policy.fsdp(...) yields, or give the module a rule"
            )
