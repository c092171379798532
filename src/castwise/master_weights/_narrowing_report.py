"""Which modules compute other numbers with 16-bit weights than with fp32 ones: two forwards, compared bit by bit."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from castwise._torch_private import tree_leaves, tree_map
from castwise.master_weights._buckets import hashed

Bits = list[tuple[torch.dtype, torch.Size, torch.Tensor]]


class NarrowingDifference(NamedTuple):
    """A module whose own code computes other numbers with 16-bit weights."""

    module: str
    """Its name; "" is the model."""
    reaches: str | None
    """The first module that it calls with other inputs because of that; None if there is none."""


@dataclass(frozen=True, slots=True)
class NarrowingReport:
    """Result of `MasterWeights.narrowing_report`."""

    differences: tuple[NarrowingDifference, ...]
    """Where differences begin, in the order of calls: modules that return other numbers for the same inputs, and call
    no module of which that is true."""
    affected: tuple[str, ...]
    """All modules that return other numbers, in the order of calls."""

    @property
    def is_same(self) -> bool:
        """Whether every module returned the same bits."""
        return not self.affected

    def __str__(self) -> str:
        if self.is_same:
            return "All modules compute the same bits with 16-bit weights as with fp32 weights."
        lines = [f"{len(self.affected)} modules compute other numbers with 16-bit weights. The first differences:"]
        for module, reaches in self.differences:
            name = repr(module) if module else "the model itself"
            lines.append(f"  {name}" + ("" if reaches is None else f", before it calls {reaches!r}"))
        lines.append(
            "Their code may read a weight or its dtype. Keep that layer in fp32: give narrow= a bound policy in which "
            "it computes in float32."
        )
        return "\n".join(lines)


@dataclass(slots=True)
class _Call:
    """A call of a module in a forward."""

    name: str
    caller: int | None
    """Index of the call in which it happened."""
    inputs: Bits
    outputs: Bits | None = None


class _Recorder:
    """Records the bits of the inputs and outputs of a model's modules.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[_Call] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._open: list[int] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record in the block, with hooks for all modules, which leave those of each module alone."""
        handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: nn.Module, args: Any) -> None:
        if module in self._names:
            caller = self._open[-1] if self._open else None
            self._open.append(len(self.calls))
            self.calls.append(_Call(self._names[module], caller, _bits(args)))

    def _after(self, module: nn.Module, args: Any, *others: Any) -> None:
        if module in self._names:
            *kwargs, output = others  # torch leaves the keyword arguments out if the forward has raised
            call = self.calls[self._open.pop()]
            call.inputs += _bits(kwargs)
            call.outputs = _bits(output)


def _bits(values: Any) -> Bits:
    leaves = [leaf for value in tree_leaves(values) for leaf in tree_leaves(_contents(value))]
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [(tensor.dtype, tensor.shape, hashed(tensor)) for tensor in tensors if tensor.layout is torch.strided]


def _contents(value: Any) -> Any:
    """Return what an object holds that torch's pytree does not open, such as a dataclass; other values unchanged."""
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    if isinstance(value, (torch.Tensor, nn.Module, type)) or not hasattr(value, "__dict__"):
        return value
    return dict(vars(value))


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, because a forward may write to its inputs; another value unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _differ(a: Bits | None, b: Bits | None) -> bool:
    if a is None or b is None or len(a) != len(b):
        return a is not b
    pairs = zip(a, b, strict=True)
    return any(x[:2] != y[:2] or not torch.equal(x[2], y[2]) for x, y in pairs)


def compare_forwards(
    model: nn.Module, fp32: Mapping[torch.Tensor, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NarrowingReport:
    """Run a model as it is and with fp32 weights, and compare what its modules compute.

    Args:
        model: The model. Its buffers, the attributes of its modules, and the random states of torch, Python and NumPy
            are as before each forward afterwards.
        fp32: The fp32 weight of each parameter that has one.
        args: Arguments of the model, which gets copies of the tensors.
        kwargs: Keyword arguments of the model, likewise.
    """
    calls = []
    accelerators = [param.device for param in model.parameters() if param.device.type != "cpu"]
    kind = accelerators[0].type if accelerators else "cuda"
    devices = sorted({device.index or 0 for device in accelerators})
    for weights in ({}, fp32):
        recorder = _Recorder(model)
        buffers = {buffer: buffer.clone() for buffer in model.buffers()}
        with torch.random.fork_rng(devices, device_type=kind), _as_before(model), recorder.recording():
            of_call = tree_map(_copied, args), tree_map(_copied, kwargs)
            # `tie_weights=True` replaces the tensors of a module with two names twice, and then puts replacements back.
            by_name = _by_name(model, {**buffers, **weights})
            torch.func.functional_call(model, by_name, *of_call, tie_weights=False)
        calls.append(recorder.calls)
    return _compared(*calls)


def _by_name(model: nn.Module, values: Mapping[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the values for a model's tensors by name, with one name for each attribute of each module."""
    return {
        f"{prefix}.{name}" if prefix else name: values[tensor]
        for prefix, module in model.named_modules()
        for tensors in (module.named_parameters, module.named_buffers)
        for name, tensor in tensors(recurse=False, remove_duplicate=False)
        if tensor in values
    }


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Put back the random states of Python and NumPy, and the attributes of all modules, such as counters."""
    numpy: Any = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        for now, before in attributes:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)


def _compared(narrow: list[_Call], fp32: list[_Call]) -> NarrowingReport:
    same_order: Callable[[int], bool] = lambda index: (  # noqa: E731
        (narrow[index].name, narrow[index].caller) == (fp32[index].name, fp32[index].caller)
    )
    shorter = min(len(narrow), len(fp32))
    common = next((index for index in range(shorter) if not same_order(index)), shorter)
    inputs = [_differ(narrow[index].inputs, fp32[index].inputs) for index in range(common)]
    outputs = [_differ(narrow[index].outputs, fp32[index].outputs) for index in range(common)]
    for longer in (narrow, fp32):  # a forward that calls other modules from here on
        caller = longer[common].caller if common < len(longer) else None
        if caller is not None:
            outputs[caller] = True
    explained, reached = [False] * common, dict[int, str]()
    differences: list[tuple[int, NarrowingDifference]] = []
    for index in reversed(range(common)):  # a call comes before those in it
        caller = narrow[index].caller
        if outputs[index] and not inputs[index] and not explained[index]:
            differences.append((index, NarrowingDifference(narrow[index].name, reached.get(index))))
            explained[index] = True
        if caller is not None:
            explained[caller] |= explained[index]
            if inputs[index]:
                reached[caller] = narrow[index].name
    affected = dict.fromkeys(call.name for call, differs in zip(narrow, outputs, strict=False) if differs)
    return NarrowingReport(tuple(difference for _, difference in reversed(differences)), tuple(affected))
