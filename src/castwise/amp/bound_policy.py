"""`BoundPolicy`: a policy with its names looked up in a model, and what holds while the modules of the model run.

Rules of modules are forward hooks. They do nothing unless the thread is in a region of their policy, and autocast's
native state is as the policy has set it: a region within, ours or torch's, that sets another state suspends the policy.

Activation checkpointing runs a forward again, within a backward and outside of any region; torch puts back the native
state, and hooks find out whether the first forward had the policy by the sequence number that autograd has given to
the node of the graph whose turn it is: a region notes which numbers were given while it lasted.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from castwise._torch_private import fsdp_mixed_precision, graph_node_running, graph_nodes_made
from castwise.amp import op_rules
from castwise.amp.casting import cast_arguments, cast_floats, native_state_of, switch, switch_back
from castwise.amp.in_force import THREAD, State
from castwise.amp.module_rules import Decision, decide

if TYPE_CHECKING:
    from castwise.amp.policy import Policy

_LOW_PRECISION = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_REMEMBERED = 4096  # regions whose forwards may still be run again


class _Forwards(NamedTuple):
    """The graph nodes made in one region."""

    start: int
    stop: int
    state: State


class BoundPolicy:
    """A policy for one model: what `castwise.autocast(..., policy=...)` takes. Made by `Policy.bind`.

    Args:
        policy: The policy.
        model: The model; only weakly referenced.
    """

    def __init__(self, policy: Policy, model: nn.Module) -> None:
        self.policy = policy
        self.op_rules = op_rules.rules_of(policy)
        self.inplace_flags = op_rules.inplace_flags(self.op_rules)
        self.dtype = _LOW_PRECISION.get(policy.compute)
        names = {policy.compute, *policy.modules.values(), *policy.ops.values()}
        self.dtypes = [dtype for name, dtype in _LOW_PRECISION.items() if name in names]
        self.output = None if policy.output is None else getattr(torch, policy.output)
        decisions = decide(policy, model)
        _check_what_fsdp_gathers(decisions)
        self._forwards: deque[_Forwards] = deque(maxlen=_REMEMBERED)
        self._hooks: list[Any] = []
        hooked: set[int] = set()
        for decision in decisions:
            module = decision.module
            rule = decision.value if decision.value not in {None, "inherit"} else None
            output = self.output if decision.name == "" else None
            # Where checkpointing runs a forward again, hooks are what puts op rules in force.
            may_call = bool(self.op_rules) and not op_rules.calls_no_rule(module, self.op_rules)
            if id(module) in hooked or not (rule or output or may_call):
                continue
            hooked.add(id(module))
            hook = _ModuleRule(self, rule, output)
            self._hooks += [
                module.register_forward_pre_hook(hook.enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(hook.leave, always_call=True),
            ]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.policy!r})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a bound policy cannot be pickled or copied: do so with the policy and the model, and bind again"
        )

    def unbind(self) -> None:
        """Take the hooks off the model, so that it can be pickled for where castwise is not installed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for of_model in list(_BOUND.values()):
            if of_model.get(self.policy, (None,))[0] is self:
                del of_model[self.policy]

    def enter(self, device: str, enabled: bool, dtype: torch.dtype, cache: bool) -> Any:
        """Put the policy in force in this thread, and return what `leave` takes."""
        outer = THREAD.state, THREAD.modules
        THREAD.state = state = State(self, device, enabled, dtype, cache, True, True)
        THREAD.modules = None
        mode = op_rules.OpRules(self) if self.op_rules else None
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]
        return outer, mode, state, None if is_dynamo_compiling() else graph_nodes_made()

    def leave(self, entered: Any) -> None:
        """Put in force what was before."""
        outer, mode, state, start = entered
        if mode is not None:
            mode.__exit__(None, None, None)
        if start is not None and start != (stop := graph_nodes_made()):
            self._forwards.append(_Forwards(start, stop, state))
        THREAD.state, THREAD.modules = outer

    def state_of_forward(self) -> State | None:
        """Return the state of the region in which the forward that a backward runs again ran first, if any."""
        node = graph_node_running()
        if node is None:
            return None
        for forwards in reversed(self._forwards):
            if forwards.start <= node < forwards.stop:
                return forwards.state
        return None


class _ModuleRule:
    """The forward hooks of one module."""

    def __init__(self, policy: BoundPolicy | None, rule: str | None, output: torch.dtype | None) -> None:
        self._policy, self._rule, self._output = policy, rule, output

    def __deepcopy__(self, memo: Any) -> _ModuleRule:
        return self  # a copy of the model follows the policy as well

    def __reduce__(self) -> Any:
        return _ModuleRule, (None, None, None)  # one that never does anything

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward: set the native state that the rule says, and cast the arguments if it says so."""
        outer, mode = THREAD.state, None
        if outer is None and not is_dynamo_compiling():
            outer, mode = self._run_again()
        if outer is None or outer.policy is not self._policy or not outer.is_native():
            return None
        rule = self._rule
        if rule is None and self._output is None and mode is None:
            return None
        native = native_state_of(outer.device)
        if rule is None:
            state = outer
        elif rule in _LOW_PRECISION:
            dtype = _LOW_PRECISION[rule]
            # Torch keeps one cast of a weight, whatever its dtype: only those of the region's dtype are to be kept.
            of_region = self._policy.policy.compute == rule
            state = State(outer.policy, outer.device, True, dtype, outer.cache, True, True)
            switch(outer.device, True, dtype, outer.cache and of_region)
        else:
            state = State(outer.policy, outer.device, False, outer.dtype, outer.cache, False, rule != "exclude")
            switch(outer.device, False, native[1], native[2])
        THREAD.modules = (self, THREAD.state, outer, native, mode, THREAD.modules)
        THREAD.state = state
        if mode is not None:
            mode.__enter__()
        if rule in {"float32", "exclude"}:
            return cast_arguments(args, kwargs, outer.device, torch.float32)
        return None

    def leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        """After the forward, also one that raised: put back what was, and cast the results if the policy says so."""
        entered = THREAD.modules
        if entered is None or entered[0] is not self:
            return None
        _, THREAD.state, outer, native, mode, THREAD.modules = entered
        if mode is not None:
            mode.__exit__(None, None, None)
        if self._rule is not None:
            switch_back(outer.device, *native)
        output = self._output
        if output is None and self._rule in _LOW_PRECISION and not outer.enabled:
            output = torch.float32  # what runs without autocast could not use anything else
        return result if output is None else cast_floats(result, outer.device, output)

    def _run_again(self) -> tuple[State | None, Any]:
        """Return what to put in force, and which mode to enter, if this forward is run again within a backward."""
        state = None if self._policy is None else self._policy.state_of_forward()
        if state is None or self._policy is None:
            return None, None
        enabled, dtype, _ = native_state_of(state.device)
        if enabled != state.enabled or (enabled and dtype is not state.dtype):
            # Within another module's rule, or in a region in which the policy was suspended.
            rules = set(self._policy.policy.modules.values())
            if not rules & ({str(dtype).removeprefix("torch.")} if enabled else {"float32", "exclude"}):
                return None, None
            state = state._replace(enabled=enabled, dtype=dtype if enabled else state.dtype, ops=enabled)
        return state, op_rules.OpRules(self._policy) if self._policy.op_rules else None


# By model and policy; with each the modules that there were.
_BOUND: weakref.WeakKeyDictionary[nn.Module, dict[Policy, tuple[BoundPolicy, list[int]]]] = weakref.WeakKeyDictionary()


def bind(policy: Policy, model: nn.Module) -> BoundPolicy:
    """Bind a policy to a model, or return what an earlier call has bound."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    modules = [id(module) for module in model.modules()]
    of_model = _BOUND.setdefault(model, {})
    bound, bound_modules = of_model.get(policy, (None, None))
    if bound is not None and bound_modules == modules:
        return bound
    new = BoundPolicy(policy, model)
    if bound is not None:
        bound.unbind()
    _BOUND.setdefault(model, {})[policy] = (new, modules)
    return new


def _check_what_fsdp_gathers(decisions: list[Decision]) -> None:
    """Refuse a module that would not get its weights in the dtype it computes in."""
    units: dict[str, tuple[str, torch.dtype | None]] = {}
    for name, module, _, compute, _, _ in decisions:
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
