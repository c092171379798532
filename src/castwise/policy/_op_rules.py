"""Op rules of a policy: the names of ops, and the `TorchFunctionMode` that applies the rules.

The mode looks up each call of a torch function in a dictionary. Ops without a rule are left to autocast's native lists.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, get_overridable_functions

from castwise._suggestions import nearest
from castwise._torch_private import function_modes, only_inlined, schema_of
from castwise.amp._thread_state import THREAD
from castwise.policy._casting import Casts, cast_floats, in_native_state
from castwise.policy._policy_state import ActivePolicy

if TYPE_CHECKING:
    from castwise.policy._policy import Policy

_Function = Callable[..., Any]

# Ops that autocast runs in low precision on every type of device, under all their names.
_LOW_PRECISION_NAMES = ("mm", "bmm", "matmul", "addmm", "baddbmm", "prelu")
LOW_PRECISION_OPS = frozenset(
    [
        nn.functional.linear,
        *(getattr(torch, f"conv{transposed}{n}d") for transposed in ("", "_transpose") for n in (1, 2, 3)),
        *(getattr(torch, name) for name in _LOW_PRECISION_NAMES),
        *(getattr(torch.Tensor, name) for name in (*_LOW_PRECISION_NAMES, "__matmul__", "__rmatmul__")),
    ]
)

_NAMESPACES = ("linalg", "special", "fft")
_OPERATORS = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    **{f"r{name}": name for name in ("matmul", "add", "mul", "sub", "pow")},
    "rdiv": "div",
    "rtruediv": "div",
    "rfloordiv": "floor_divide",
    "rmod": "remainder",
}
# Functions that write to their arguments although their names do not end in "_".
_WRITING = re.compile(
    r"__(set|del)(item)?__|(native|cudnn|miopen|quantized)_batch_norm|batch_norm_.*|fused_moving_avg.*"
)
# The source argument of ops that write in place: its position (the destination is 0) and its name.
_SOURCES = {
    "index_put_": (2, "values"),
    "index_copy_": (3, "source"),
    "index_add_": (3, "source"),
    "index_reduce_": (3, "source"),
    "scatter_": (3, "src"),
    "scatter_add_": (3, "src"),
    "scatter_reduce_": (3, "src"),
    "masked_scatter_": (2, "source"),
    "put_": (2, "source"),
    "__setitem__": (2, "value"),
}


# The ops that the forwards of some modules call, not counting those of their submodules.
_OPS_OF_MODULES: dict[type[nn.Module], tuple[str, ...]] = {
    **dict.fromkeys((nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity), ()),
    **{
        getattr(nn, f"Conv{way}{n}d"): (f"conv{way and '_transpose'}{n}d",)
        for way in ("", "Transpose")
        for n in (1, 2, 3)
    },
    nn.Linear: ("linear",),
    nn.Embedding: ("embedding",),
    nn.Dropout: ("dropout",),
    nn.LayerNorm: ("layer_norm",),
    nn.GELU: ("gelu",),
    nn.ReLU: ("relu",),
    nn.SiLU: ("silu",),
    nn.modules.linear.NonDynamicallyQuantizableLinear: (),  # the out_proj of nn.MultiheadAttention, never called
    nn.MultiheadAttention: ("multi_head_attention_forward",),
    nn.TransformerEncoderLayer: ("add", "relu", "gelu"),
    nn.TransformerEncoder: (),
}


class Rule(NamedTuple):
    """How calls of a function are changed.

    Args:
        dtype: The dtype to cast arguments to.
        source: Position and name of the source of an in-place write, which is cast to the destination's dtype.
        flags: Parameters, with their positions, that make the function write to its arguments; if one is set, nothing
            is cast.
        has_statistics: Whether the function updates running statistics; if so, only its input is cast.
    """

    dtype: torch.dtype | None = None
    source: tuple[int, str] | None = None
    flags: tuple[tuple[str, int], ...] = ()
    has_statistics: bool = False


@functools.cache
def op_names() -> dict[str, list[_Function]]:
    """Return the functions that call each op, by op name, without in-place variants."""
    names: dict[str, list[_Function]] = {}
    for functions in get_overridable_functions().values():
        for function in functions:
            name = _op_of(function)
            if name is not None and _computes(name, function) and function not in names.setdefault(name, []):
                names[name].append(function)
    for name, functions in names.items():  # torch.special has its own ops, and aliases of others
        names[name] = functions + [twin for twin in names.get(f"special_{name}", ()) if twin not in functions]
    return names


def _computes(name: str, function: _Function) -> bool:
    """Return True if a function creates new tensors: views and queries compute nothing."""
    if getattr(function, "__module__", None) in {"torch.nn.functional", "torch.functional"}:
        return True
    op = getattr(torch.ops.aten, name, None)
    return op is not None and any(
        schema.returns and all(value.alias_info is None and "Tensor" in str(value.type) for value in schema.returns)
        for schema in (schema_of(op, overload) for overload in op.overloads())
        if schema is not None
    )


def _op_of(function: _Function) -> str | None:
    name = function.__name__
    if _WRITING.fullmatch(name):
        return None
    if name.startswith("__"):
        bare = name.strip("_")
        return _OPERATORS.get(bare, bare)
    if function is nn.functional.threshold:  # whose own name begins with "_"
        return "threshold"
    return None if name.startswith("_") else name


def canonical(name: str) -> str:
    """Return the canonical name for any spelling of an op, without checking that the op exists."""
    bare = name.replace("::", ".").removeprefix("torch.").removeprefix("ops.")
    if bare.startswith("aten."):
        return bare.split(".")[1]
    for prefix in ("nn.functional.", "functional.", "F.", "Tensor."):
        bare = bare.removeprefix(prefix)
    namespace, _, rest = bare.partition(".")
    return f"{namespace}_{rest}" if namespace in _NAMESPACES and rest else bare


def rules_of(policy: Policy) -> dict[_Function, Rule]:
    """Return a policy's rules by function.

    Raises:
        ValueError: An op is unknown, or has two names whose rules differ.
    """
    known = op_names()
    spelling: dict[str, str] = {}
    for name, dtype in policy.ops.items():
        op = canonical(name)
        if op not in known:
            raise ValueError(f"ops[{name!r}] is not an op of this torch version{nearest(op, known)}")
        other = spelling.setdefault(op, name)
        if policy.ops[other] != dtype:
            raise ValueError(f"ops[{name!r}] = {dtype!r} contradicts ops[{other!r}] = {policy.ops[other]!r}")
    rules = {
        function: Rule(
            getattr(torch, policy.ops[name]), None, _flags_of(function), op in {"batch_norm", "instance_norm"}
        )
        for op, name in spelling.items()
        for function in known[op]
    }
    if policy.in_place == "cast":
        for name, source in _SOURCES.items():
            for owner in (torch, torch.Tensor):
                if hasattr(owner, name):
                    rules[getattr(owner, name)] = Rule(source=source)
    return rules


def calls_no_rule(module: nn.Module, rules: Mapping[_Function, Rule]) -> bool:
    """Return True if a module's own forward is known to call no function that has a rule."""
    ops = _OPS_OF_MODULES.get(type(module))
    if getattr(module, "padding_mode", "zeros") != "zeros" or getattr(module, "max_norm", None) is not None:
        return False  # calls another op
    if isinstance(module, nn.TransformerEncoderLayer) and not module.activation_relu_or_gelu:
        return False
    return ops is not None and not any(function in rules for op in ops for function in op_names()[op])


@functools.cache
def _flags_of(function: _Function) -> tuple[tuple[str, int], ...]:
    """Return the parameters that make a function write to its arguments, each with its position."""
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:  # written in C++
        return ()
    # An embedding with max_norm rescales rows of its weight in place.
    return tuple((name, names.index(name)) for name in ("inplace", "max_norm") if name in names)


class OpRuleMode(TorchFunctionMode):
    """Applies a policy's op rules while the policy is active."""

    def __init__(self, bound: ActivePolicy) -> None:
        TorchFunctionMode.__init__(self)
        self.bound, self._rules = bound, bound.op_rules

    def leaves_alone(self, kind: type[nn.Module]) -> bool:
        """Return True if there is no rule for the ops that a module of type `kind` calls."""
        names = _OPS_OF_MODULES[kind]
        return not any(function in self._rules for name in names for function in op_names()[name])

    @only_inlined
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = self._rules.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        state = THREAD.state
        if state is None or state.key != self.bound.key or not state.is_native():
            return func(*args, **kwargs)
        if rule.source is not None and state.writes:
            args, kwargs = _with_source_cast(args, kwargs, *rule.source)
        dtype = rule.dtype
        if dtype is None or not state.ops or kwargs.get("out") is not None or _writes_to_arguments(rule, args, kwargs):
            return func(*args, **kwargs)
        if dtype is not torch.float32 and func in LOW_PRECISION_OPS:  # autocast casts, and caches the casts
            if state.enabled and dtype is state.dtype:
                return func(*args, **kwargs)
            native = in_native_state(state.device, True, dtype, False)
        else:
            native = in_native_state(state.device, False, state.dtype, state.cache)
            args, kwargs = _cast(rule, args, kwargs, state.device, dtype)
        with native:
            result = func(*args, **kwargs)
        return result if state.enabled else cast_floats(result, state.device, torch.float32)


@only_inlined
def innermost_mode(bound: ActivePolicy) -> OpRuleMode | None:
    """Return the op-rule mode of a policy if it is the innermost mode, so that it can be exited for a while."""
    innermost = function_modes()[-1:]
    if not innermost or not isinstance(innermost[0], OpRuleMode) or innermost[0].bound is not bound:
        return None
    return innermost[0]


@only_inlined
def _cast(rule: Rule, args: Any, kwargs: Any, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    casts = Casts(device, dtype)
    if not rule.has_statistics:
        return tuple([casts.cast(arg) for arg in args]), {name: casts.cast(arg) for name, arg in kwargs.items()}
    # A normalisation writes to its running statistics. It accepts fp32 statistics and weights with any input dtype.
    if args:
        return (casts.cast(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "input": casts.cast(kwargs.get("input"))}


@only_inlined
def _writes_to_arguments(rule: Rule, args: Any, kwargs: Any) -> bool:
    return any(
        bool(kwargs[name] if name in kwargs else args[position] if len(args) > position else None)
        for name, position in rule.flags
    )


@only_inlined
def _with_source_cast(args: Any, kwargs: Any, position: int, name: str) -> tuple[Any, Any]:
    """Cast the source of an in-place write to the destination's dtype, if both are floating-point."""
    destination = args[0] if args else kwargs.get("input", kwargs.get("self"))
    source = args[position] if len(args) > position else kwargs.get(name)
    if not isinstance(destination, torch.Tensor) or not isinstance(source, torch.Tensor):
        return args, kwargs
    if not (destination.is_floating_point() and source.is_floating_point()) or destination.dtype == source.dtype:
        return args, kwargs
    source = source.to(destination.dtype)
    if len(args) > position:
        return (*args[:position], source, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: source}
