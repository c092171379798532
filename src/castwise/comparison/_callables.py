"""Callables beside policies: a compiled model as it runs, and each of its modules compiled by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from castwise._torch_private import compiler_of, tree_leaves
from castwise.comparison._errors import FP32_EPS, Errors, ErrorSums
from castwise.comparison._objective import Objective, Progress, first_line, fresh, is_out_of_memory
from castwise.comparison._precisions import Precision
from castwise.comparison._starting_point import StartingPoint
from castwise.comparison._watched_calls import Tap, Watch
from castwise.tracing._op_by_op import with_compiler

EAGER = "eager"
"""The name of the row of the model itself."""


@dataclass(frozen=True)
class ModuleAlone:
    """A module that was compiled by itself, with its submodules, and run on inputs of the eager model.

    Args:
        name: Qualified name without wrappers.
        type: Type of the module.
        compiled: Errors of its outputs against float64; None if it cannot be compiled, or returns no numbers.
        eager: The same of the eager module.
        problem: Why there are no errors; "" if there are.
    """

    name: str
    type: str
    compiled: Errors | None
    eager: Errors | None
    problem: str = ""


class _Call(NamedTuple):
    """The arguments of the first call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def fresh(self, precision: Precision) -> _Call:
        """Return copies, in a precision."""
        return _Call(*fresh((self.args, self.kwargs), precision.cast))


def modules_alone(
    compiled: Any, objective: Objective, batch: Any, device: str, watch: Watch, progress: Progress | None
) -> tuple[ModuleAlone, ...]:
    """Compile each module by itself as a compiled model was, and compare it with float64; () for other callables.

    Args:
        compiled: The callable.
        objective: Computes the loss of the eager model.
        batch: The batch whose inputs of modules are used.
        device: The type of the model's device.
        watch: Passes calls of modules on.
        progress: Called with the name of the phase, the number of modules done, and their total.
    """
    compiler = compiler_of(compiled)
    if compiler is None:
        return ()
    start = StartingPoint(objective.model)
    calls = _first_calls(objective, batch, watch)
    found = []
    for number, (tap, call) in enumerate(calls.items()):
        if progress is not None:
            progress("modules", number, len(calls))
        watch.on_call()
        start.restore()
        found.append(_alone(tap, call, compiler, device, start))
    start.restore()
    return tuple(found)


def _first_calls(objective: Objective, batch: Any, watch: Watch) -> dict[Tap, _Call]:
    calls: dict[Tap, _Call] = {}
    as_it_is = Precision("cpu")

    def keeping(tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if tap.name and tap not in calls:
            calls[tap] = _Call(args, kwargs).fresh(as_it_is)
        return tap.forward(*args, **kwargs)

    with watch, watch.handling(keeping), torch.no_grad():
        objective(fresh(batch, as_it_is.cast))
    return calls


def _alone(tap: Tap, call: _Call, compiler: Callable[[Any], Any], device: str, start: StartingPoint) -> ModuleAlone:
    as_it_is, reference = Precision(device), Precision(device, dtype=torch.float64)
    kind = type(tap.module).__name__

    def outputs(module: Callable[..., Any], precision: Precision) -> list[torch.Tensor]:
        start.restore()
        args, kwargs = call.fresh(precision)
        with precision.weights(tap.module), precision.region(), torch.no_grad(), as_it_runs(module):
            return [leaf for leaf in tree_leaves(module(*args, **kwargs)) if is_compared(leaf)]

    try:
        expected = outputs(tap.module, reference)
        eager, compiled = (
            _errors(expected, outputs(module, as_it_is))
            for module in (tap.module, compiler(_of_its_own(tap.module, tap.name)))
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return ModuleAlone(tap.name, kind, None, None, first_line(error))
    return ModuleAlone(tap.name, kind, compiled, eager, "" if compiled is not None else "returns no numbers")


def as_it_runs(call: object) -> AbstractContextManager[Any]:
    """Return a context in which a callable runs as it does by itself, and a module without what is compiled in it."""
    return nullcontext() if isinstance(call, nn.Module) and compiler_of(call) is None else with_compiler()


def _of_its_own(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return a function that calls a module, with code of its own, because compiled code is limited for each code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    code = call.__code__.replace(co_name=f"call_{name}")
    return FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


def is_compared(leaf: Any) -> bool:
    """Return True for a tensor of numbers in memory, whose errors can be computed."""
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided


def _errors(expected: list[torch.Tensor], values: list[torch.Tensor]) -> Errors | None:
    sums = ErrorSums()
    for reference, value in zip(expected, values, strict=True):
        sums.add(reference, value)
    return sums.errors()


def which_is_closer(name: str, own: Errors | None, eager: Errors | None) -> Iterator[str]:
    """Yield which gradients are closer to the reference's, if both are known."""
    if own is None or eager is None or own.nonfinite or not eager.relative_rms:
        return
    ratio = own.relative_rms / eager.relative_rms
    if 0.8 < ratio < 1.25 or max(own.relative_rms, eager.relative_rms) < FP32_EPS:
        yield f"{name}: its gradients are as close to the reference as those of the eager model"
        return
    which = f"{'closer to' if ratio < 1.0 else 'farther from'} the reference than"
    yield f"{name}: its gradients are {which} those of the eager model (their error is {ratio:.3g} times as large)"
