"""`BoundPolicy`: a policy whose names have been looked up in a model.

Each module that a rule changes gets a `RuledForward` as its `forward` attribute.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from castwise._recipes.recipe import RECIPES, warn_if_emulated
from castwise._torch_private import backwards_without_autocast, fsdp_mixed_precision, graph_nodes_made, only_inlined
from castwise.amp._thread_state import THREAD
from castwise.policy import _op_rules as op_rules
from castwise.policy._casting import cast_floats
from castwise.policy._module_rules import Decision, decide, is_never_called
from castwise.policy._policy_state import NodeRanges, RerunContext, State, exit_if_entered
from castwise.policy._ruled_forward import LOW_PRECISION, Rule, RuledForward, other_forward

if TYPE_CHECKING:
    from castwise.policy._policy import Policy

# Modules that in inference may run as one fused op, unless a TorchFunctionMode is active.
_WITH_FAST_PATH = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
_numbers = itertools.count()


class BoundPolicy:
    """A policy for one model, to pass to `castwise.autocast(..., policy=...)`. Created by `Policy.bind`.

    Args:
        policy: The policy.
        model: The model. Its modules get new `forward` attributes; no reference to the model is kept.
    """

    def __init__(self, policy: Policy, model: nn.Module) -> None:
        self.policy = policy
        self.op_rules = op_rules.rules_of(policy)
        self.dtype = LOW_PRECISION.get(policy.compute)
        names = {policy.compute, *policy.modules.values(), *policy.ops.values()}
        self.low_precisions = [dtype for name, dtype in LOW_PRECISION.items() if name in names]
        self.output = None if policy.output is None else getattr(torch, policy.output)
        decisions = decide(policy, model)
        _check_what_fsdp_gathers(decisions)
        self.recipes = list(dict.fromkeys(decision.recipe for decision in decisions if decision.recipe))
        self.key = f"policy {next(_numbers)}"
        self.is_bound = True
        self._has_rules = bool(policy.modules or self.op_rules)
        self.node_ranges = NodeRanges()
        self._ruled: list[RuledForward] = []
        rules = list(self._rules(decisions))  # first, so that a backend error leaves the model unchanged
        for decision in decisions:
            if decision.recipe:
                warn_if_emulated(RECIPES[decision.recipe], policy.backend, decision.device_of_weight)
        for decision, rule in rules:
            if rule.recipe is not None and (whose := other_forward(decision.module)):
                self.unbind()  # undoes what earlier turns of this loop have set
                raise ValueError(
                    f"`forward` of {decision.name!r} is overridden on the instance (by {whose}), and "
                    f"{decision.recipe} would bypass it: bind the policy first, or give the module another rule"
                )
            if not isinstance(decision.module, torch.jit.ScriptModule):
                forward = vars(decision.module).get("forward")
                if not isinstance(forward, RuledForward):
                    forward = vars(decision.module)["forward"] = RuledForward(decision.module, forward)
                forward.rules[self.key] = rule
                forward.note_dtypes()
                self._ruled.append(forward)
            elif rule.precision or rule.output or rule.recipe:
                self.unbind()
                raise ValueError(f"{decision.name!r} is a ScriptModule, whose forward is fixed: remove its rule")

    def _rules(self, decisions: list[Decision]) -> Iterator[tuple[Decision, Rule]]:
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
                rule = Rule(self, precision, output, fast_path, recipe)
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
            forward for module in model.modules() if isinstance(forward := vars(module).get("forward"), RuledForward)
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
        return nullcontext(), RerunContext(state if state is not None and state.bound is self else None)

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
            # backwards_without_autocast() returns None once the setting is no longer the default: it was entered.
            if backwards is not None and backwards_without_autocast() is None:
                backwards.__exit__(None, None, None)
            if mode is not None:
                exit_if_entered(mode)
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
        self.node_ranges.add(start, state.device, (state.enabled, state.dtype), state)
        THREAD.state = None  # the region puts back the state of an outer one


_Modules = list[tuple[str, "weakref.ref[nn.Module]", type]]
# By model and policy, each with the modules that the model had then, by name, including wrapped ones.
_BOUND: weakref.WeakKeyDictionary[nn.Module, dict[Policy, tuple[BoundPolicy, _Modules]]] = weakref.WeakKeyDictionary()


def bind(policy: Policy, model: nn.Module) -> BoundPolicy:
    """Bind a policy to a model, or return the result of an earlier call if the model has not changed."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    bound = find_bound(policy, model)
    if bound is not None:
        return bound
    new = BoundPolicy(policy, model)
    modules = [(name, weakref.ref(module), type(module)) for name, module in _named(model)]
    bound_to_model = _BOUND.setdefault(model, {})
    if policy in bound_to_model:
        bound_to_model[policy][0].unbind()
    bound_to_model[policy] = (new, modules)
    return new


def find_bound(policy: Policy, model: nn.Module) -> BoundPolicy | None:
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
