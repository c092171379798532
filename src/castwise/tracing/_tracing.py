"""`trace`: every op and every cast of one forward and backward of a model, and which casts are redundant.

A `TorchDispatchMode` sees ops after autocast has inserted its casts. It costs several times as much as a small op, so
do not train under it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from castwise._recipes.listeners import LISTENERS, LayerEvent
from castwise._recipes.scalings import E2M1, Quantized, Scaling
from castwise._torch_private import (
    TO_COPY,
    TorchDispatchMode,
    buffers_in,
    schema_of,
    stored_values,
    tree_leaves,
    version,
)
from castwise.amp.autocast_mode import autocast
from castwise.policy._bound_policy import BoundPolicy, find_bound
from castwise.policy._policy import Policy
from castwise.tracing._batches import Batch, arguments_of
from castwise.tracing._module_of_op import ModuleOfOp
from castwise.tracing._op_by_op import call_op, without_compiler
from castwise.tracing._trace_result import AGAIN, BACK, Cast, Op, Trace
from castwise.weights._weight_cache import WeightCache

_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def trace(
    model: nn.Module,
    batch: Batch,
    *,
    policy: Policy | BoundPolicy | None = None,
    weight_cache: WeightCache | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
) -> Trace:
    """Run one forward and backward of a model, and return the ops with their dtypes, and all casts.

    Gradients (including those of `batch`), buffers, hooks and random number generators are restored; side effects of
    the model's hooks are not. All tensors that are cast stay in memory until the end.

    Args:
        model: The model.
        batch: The model's inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        policy: Policy of the forward; without one, the forward runs in the caller's region, if any.
        weight_cache: Weight cache of that policy's region.
        loss_fn: Computes the loss from the model's output, in the same region; by default the sum of the output's
            floating-point tensors. The backward runs outside any region, and only if the loss requires a gradient.

    Raises:
        TypeError: `model` is not a module, `batch` is not a valid batch, or `weight_cache` is given without a policy.
        ValueError: As for `Policy.bind`.

    Example:
        >>> import castwise
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> seen = castwise.trace(model, torch.ones(3, 4), policy=castwise.policies.bf16)
        >>> print(seen.summary())
        9 casts, 768 bytes
        4 of weights, 348 bytes: a WeightCache keeps these
        0 redundant, 0 bytes
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if policy is None and weight_cache is not None:
        raise TypeError("weight_cache needs a policy, whose region uses it: give policy=")
    device = next((param.device.type for param in model.parameters()), "cpu")
    args, kwargs = arguments_of(batch)
    module_of_op = ModuleOfOp(model)
    watch = _Watch(model, module_of_op)
    given = [*args, *kwargs.values()]
    with _bound(policy, model) as bound, _put_back(model, given), without_compiler(), module_of_op:
        LISTENERS.add(watch)
        try:
            with watch, nullcontext() if bound is None else autocast(device, policy=bound, weight_cache=weight_cache):
                output = model(*args, **kwargs)
                loss = _sum(output) if loss_fn is None else loss_fn(output)
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                watch.phase = "backward"
                module_of_op.begin_backward()
                with watch, autocast(device, enabled=False):
                    loss.backward()  # type: ignore[no-untyped-call]  # torch's
        finally:
            LISTENERS.discard(watch)
    return watch.result()


@contextmanager
def _bound(policy: Policy | BoundPolicy | None, model: nn.Module) -> Iterator[BoundPolicy | None]:
    if not isinstance(policy, Policy):
        yield policy
        return
    was_bound = find_bound(policy, model) is not None
    bound = policy.bind(model)
    try:
        yield bound
    finally:
        if not was_bound:
            bound.unbind()


def _sum(output: Any) -> torch.Tensor | None:
    floats = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return sum((leaf.sum() for leaf in floats[1:]), floats[0].sum()) if floats else None


@contextmanager
def _put_back(model: nn.Module, inputs: list[Any]) -> Iterator[None]:
    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.is_leaf]
    gradients = [(tensor, tensor.grad) for tensor in (*model.parameters(), *given)]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in buffers_in(module).items()
    ]
    for tensor, _ in gradients:
        tensor.grad = None
    devices = {param.device.index or 0 for param in model.parameters() if param.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for tensor, gradient in gradients:
            tensor.grad = gradient
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                buffers_in(module)[name] = buffer
                if buffer is not None and before is not None and not torch.equal(buffer, before):
                    buffer.copy_(before)


class _Origin(NamedTuple):
    """The source of values that a cast has written."""

    source: str
    kept: torch.Tensor  # keeps the address from being reused


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts ops and casts."""

    sees_copies = True  # a WeightCache is in use while this watches

    def __init__(self, model: nn.Module, module_of_op: ModuleOfOp) -> None:
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]  # torch's
        self.phase = "forward"
        self._module_of_op = module_of_op
        self._modules = set(model.modules())
        self._ops: Counter[tuple[str, str, str, str]] = Counter()
        self._casts: dict[tuple[str, str, str, str, str, str], list[int]] = {}
        self._weights: dict[Any, str] = {}
        for name, param in model.named_parameters():
            self._weights[_place(param)] = name
            self._weights.setdefault(_memory(param), name)
        self._cast: dict[tuple[Any, ...], torch.Tensor] = {}  # casts so far
        self._origins: dict[Any, _Origin] = {}  # by the memory that a cast has written
        self._is_quantizing = self._has_computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_quantizing:
            self._has_computed = True
            return call_op(func, args, kwargs)
        source = _source(func, args)
        of = None if source is None else self._of(source)
        result = call_op(func, args, kwargs)
        if source is not None and of is not None and _is_cast(source, result):
            self._note_cast(source, result, of)
            return result
        inputs, outputs = _dtypes([*args, *kwargs.values()]), _dtypes(result)
        if inputs or outputs:
            name = str(func.overloadpacket)
            self._ops[name, inputs, outputs, self.phase] += 1
        self._forget_origins(func, args, kwargs)
        return result

    @contextmanager
    def products(self, telling: LayerEvent, phase: str, operands: tuple[torch.Tensor, ...]) -> Iterator[None]:
        """Count the products of a layer with a recipe as one op, in the current phase."""
        if telling.layer not in self._modules:  # of a model that another thread runs
            yield
            return
        self._ops[telling.label, _dtypes(operands), _name(operands[0].dtype), self.phase] += 1
        self._is_quantizing = True
        try:
            yield
        finally:
            self._is_quantizing = False

    def quantized(self, telling: LayerEvent, operand: str, tensor: torch.Tensor, by: Scaling, to: Quantized) -> None:
        """Count the quantization of an operand as a cast, unless it came from a `WeightCache`."""
        if self._has_computed and telling.layer in self._modules:
            self._has_computed = False
            of = self._of(tensor) if "weight" in operand else "gradient" if "grad" in operand else "activation"
            kind = (self._module_of_op.name() or "", self.phase, of, _name(tensor.dtype), by.numbers.name, "")
            total = self._casts.setdefault(kind, [0, 0])
            total[0] += 1
            total[1] += _nbytes(tensor) + tensor.numel() * (4 if by.numbers is E2M1 else 8) // 8

    def _forget_origins(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget the origin of memory that an op writes to."""
        schema = schema_of(func)
        if schema is None or not schema.is_mutable:
            return
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in tree_leaves(args[position] if position < len(args) else kwargs.get(argument.name)):
                    if isinstance(leaf, torch.Tensor):
                        self._origins.pop(_memory(leaf), None)

    def _of(self, source: torch.Tensor) -> str:
        for place in (_place(source), _memory(source)):  # a view of a weight counts as the weight
            if (name := self._weights.get(place)) is not None:
                return name
        return "activation" if self.phase == "forward" or self._module_of_op.is_forward_running() else "gradient"

    def _note_cast(self, source: torch.Tensor, result: torch.Tensor, of: str) -> None:
        key = (*_place(source), version(source), source.dtype, result.dtype)
        origin = self._origins.get(_memory(source))
        if key in self._cast:
            redundant = AGAIN
        elif origin is not None and origin.source == _name(result.dtype):
            redundant = BACK
        else:
            redundant = ""
        self._cast[key] = source
        if _nbytes(result) == _bytes_of_memory(result):
            self._origins[_memory(result)] = _Origin(_name(source.dtype), result)
        else:  # a part of a larger tensor
            self._origins.pop(_memory(result), None)
        kind = (self._module_of_op.name() or "", self.phase, of, _name(source.dtype), _name(result.dtype), redundant)
        total = self._casts.setdefault(kind, [0, 0])
        total[0] += 1
        total[1] += _nbytes(source) + _nbytes(result)

    def result(self) -> Trace:
        phases: dict[tuple[str, str, str], dict[str, int]] = {}
        for (op, inputs, output, phase), count in self._ops.items():
            phases.setdefault((op, inputs, output), {})[phase] = count
        ops = [Op(*kind, counts.get("forward", 0), counts.get("backward", 0)) for kind, counts in phases.items()]
        casts = [Cast(*kind, calls, nbytes) for kind, (calls, nbytes) in self._casts.items()]
        return Trace(tuple(sorted(ops, key=lambda op: (op.op, op.inputs, op.output))), tuple(casts))


def _source(func: Any, args: Any) -> torch.Tensor | None:
    """Return the tensor that an op may cast; None if the op is not a cast."""
    if func is TO_COPY:
        source = args[0]
    elif func is torch.ops.aten.copy_.default:
        source = args[1]
    else:
        return None
    return source if isinstance(source, torch.Tensor) else None


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has its own memory; sparse and nested tensors and DTensors only hold other tensors."""
    return tensor.layout is torch.strided and not tensor.is_nested and type(tensor) in {torch.Tensor, nn.Parameter}


def _memory(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage().data_ptr() if _has_memory(tensor) else id(tensor)


def _bytes_of_memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() if _has_memory(tensor) else _nbytes(tensor)


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        return stored_values(tensor).nbytes
    return tensor.values().nbytes if tensor.layout in _COMPRESSED else tensor.nbytes


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    if not _has_memory(tensor):
        return (id(tensor),)
    return _memory(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _is_cast(source: torch.Tensor, result: torch.Tensor) -> bool:
    return source.is_floating_point() and result.is_floating_point() and source.dtype != result.dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtypes(value: Any) -> str:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return ", ".join(dict.fromkeys(_name(tensor.dtype) for tensor in tensors))
