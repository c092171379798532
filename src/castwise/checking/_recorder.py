"""`Recorder`: sketches of what a program computes, from hooks that the program does not see."""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from castwise._live_objects import instances_of
from castwise._torch_private import (
    are_functorch_transforms_active,
    buffers_in,
    compiled_methods,
    counted_version,
    is_backward_running,
    is_compiler_loaded,
    never_traced,
    tree_leaves,
    tree_map,
    without_dispatch_modes,
    wraps_compiled,
)
from castwise.amp import GradScaler, autocast
from castwise.checking._names import Names, unwrapped
from castwise.checking._ops import OpCall
from castwise.checking._promotion import exact_arithmetic, widen
from castwise.checking._sketches import Sketch, digest_of, sketch_of, sketches_of

Kind = Literal["param", "in", "forward", "backward", "arrived", "loss", "gradient", "update", "buffer", "value"]
DECIDING = ("param", "loss", "gradient", "update", "buffer", "value")
"""Kinds that do not depend on how the program is divided into modules. All others only name what differs."""
_OF_MODULES = ("in", "forward", "backward")  # one module's output is often another one's input
_IMPLEMENTATION = {"params", "foreach", "fused", "capturable", "differentiable", "param_names"}


class ProbeKey(NamedTuple):
    """Where a sketch was taken.

    Args:
        step: The optimizer step, from 0.
        kind: What was sketched.
        name: The module, the parameter, the buffer or the value.
        call: Which call in this step, from 0.
        position: Which tensor of that call.
    """

    step: int
    kind: str
    name: str
    call: int = 0
    position: int = 0


@dataclass
class Measurement:
    """What one run of a program has shown.

    Args:
        probes: The sketches, in the order in which the program computed the values.
        callers: For inputs of a module, the module whose code called it; None if the program did.
        digests: Hashes of gradients, weights and buffers after each step.
        losses: Hashes of the losses, without the scale of a gradient scaler, before each step; "" for none.
        settings: Settings of each optimizer at each step.
        local: Relative errors of modules against float64 on their own inputs.
        dtypes: Names of the floating-point dtypes that ops returned; only of runs with random rounding.
        ops: The ops that ran, in order; only if they were asked for.
        is_compiled: Whether a model has parts that `torch.compile` compiles.
        about: Versions, device and threads.
        steps: Optimizer steps taken.
        skipped: Steps that a gradient scaler skipped.
    """

    probes: dict[ProbeKey, Sketch] = field(default_factory=dict)
    callers: dict[ProbeKey, str | None] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    settings: list[list[dict[str, Any]]] = field(default_factory=list)
    local: dict[str, float] = field(default_factory=dict)
    dtypes: list[str] = field(default_factory=list)
    ops: list[OpCall] = field(default_factory=list)
    is_compiled: bool = False
    about: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    skipped: int = 0


class EndOfRun(BaseException):
    """Ends a program after its last step; not an Exception, so that programs do not catch it."""


class Recorder:
    """Records what a program computes until it has taken a number of steps, and then ends it.

    Args:
        steps: The number of steps of each optimizer.
        ends_late: Whether the program runs on after its last step, until its next backward.
        names_modules: Whether to name models in the order in which they are called, and not only those that an
            optimizer has, in the order of the steps.
        watches_modules: Whether to sketch inputs, outputs and gradients of modules.
        reruns: Whether to run each module that is called in the first step again in float64 on its own inputs.
        until: Names of modules. The program ends when all of them have run again; not at all because of none.
        compiles: Whether compiled code runs as it is: of it, only what was compiled can be watched.
        sketches: Whether to sketch what does not depend on modules: gradients, weights and buffers.
        others: Whether to look for weights that no optimizer has, in models made while the program is watched.
        hashes: Whether to hash losses, gradients, weights and buffers after each step.
        after_step: Called with the weights after each step.
    """

    def __init__(
        self,
        steps: int,
        *,
        ends_late: bool = False,
        names_modules: bool = False,
        watches_modules: bool = False,
        reruns: bool = False,
        until: frozenset[str] = frozenset(),
        compiles: bool = False,
        sketches: bool = True,
        others: bool = True,
        hashes: bool = True,
        after_step: Callable[[list[torch.Tensor]], None] | None = None,
    ) -> None:
        self.measurement = Measurement()
        self._steps, self._ends_late, self._after_step = steps, ends_late, after_step
        self._watches_modules, self._reruns, self._until = watches_modules, reruns, until
        self._names_modules = names_modules or watches_modules or reruns
        self._compiles, self._takes_sketches, self._looks_for_others, self._hashes = compiles, sketches, others, hashes
        self.names = Names()
        self._places: dict[ProbeKey, float] = {}
        self._place = itertools.count()
        self._calls: dict[tuple[str, str], int] = {}
        self._stack: list[tuple[str, int, int, Any]] = []
        self._counts: dict[int, int] = {}
        self._optimizers: list[Optimizer] = []
        self._made: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # while the program is watched
        self._older: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._others: dict[str, tuple[torch.Tensor, Sketch]] = {}  # weights that no optimizer has, at the first step
        self._before: dict[torch.Tensor, torch.Tensor] = {}
        self._nested = 0
        self._loss_call: int | None = None  # of the losses since an optimizer has stepped
        self._losses: list[torch.Tensor] = []  # the same, of which the bits are hashed
        self._scale = 1.0
        self._values: list[torch.Tensor] = []
        self._sketches: Any = WeakTensorKeyDictionary()  # of tensors of modules, with the tensors' versions
        self._is_off = False
        self._watched: Any = WeakTensorKeyDictionary()  # parameters, with the hooks on their gradients

    def __call__(self, name: str, value: torch.Tensor) -> None:
        """Record a value of the program's own, such as logits. It counts like a weight: a difference decides.

        Args:
            name: Its name.
            value: A tensor of any shape and dtype.

        Raises:
            TypeError: The value is not a tensor.
        """
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"probe({name!r}, value) takes a tensor, got a {type(value).__name__}")
        self._values.append(value.detach())
        self._put("value", name, [value])

    # What the program does

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the program in the block, which ends after the last step."""
        self._older.update(instances_of(nn.Module))
        with ExitStack() as undo:
            handles = [
                optimizer_hooks.register_optimizer_step_pre_hook(self.stepping),
                optimizer_hooks.register_optimizer_step_post_hook(self.stepped),
            ]
            if self._names_modules:
                handles.append(module_hooks.register_module_forward_pre_hook(self._calling))
            if self._watches_modules or self._reruns:
                handles.append(
                    module_hooks.register_module_forward_hook(self._called, with_kwargs=True, always_call=True)
                )
            for handle in handles:
                undo.callback(handle.remove)
            undo.callback(self._unwatch_gradients)
            undo.enter_context(_replaced(torch.autograd, "backward", self._backward))
            undo.enter_context(_replaced(Optimizer, "__init__", self._making))
            if self._compiles:
                undo.enter_context(_replaced(nn.Module, "compile", self._compiling))
            for scaler in (torch.amp.GradScaler, GradScaler):
                undo.enter_context(_replaced(scaler, "scale", self._scaling))
                undo.enter_context(_replaced(scaler, "step", self._scaler_step))
            with suppress(EndOfRun):
                yield
        self.finish()

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_backward_running():
            if self.has_ended():
                raise EndOfRun
            losses = [tensor for tensor in tree_leaves(tensors) if isinstance(tensor, torch.Tensor)]
            self._add_loss(losses)
        return original(tensors, *args, **kwargs)

    def _making(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._made.add(optimizer)

    def _scaling(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        with without_dispatch_modes():
            self._scale = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
        return result

    def _scaler_step(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        before = sum(self._counts.values())
        result = original(scaler, *args, **kwargs)
        self.measurement.skipped += sum(self._counts.values()) == before
        return result

    def _sees(self, module: nn.Module) -> bool:
        """Return True unless a call is in compiled code, a backward or `torch.vmap`, or of a mere wrapper."""
        if torch.compiler.is_compiling() or self._is_off or is_backward_running() or not torch.is_grad_enabled():
            return False
        if are_functorch_transforms_active():  # whose tensors have no values yet
            return False
        return self._compiles or not wraps_compiled(module)

    def _name(self, module: nn.Module) -> str:
        return self.names.module(unwrapped(module) if self._compiles else module)

    def _calling(self, module: nn.Module, args: Any) -> None:
        if not self._sees(module):
            return
        name = self._name(module)  # all runs in float64 name models in the order of their calls
        if not (self._watches_modules or self._reruns):
            return
        call, place = self._next_call("forward", name), next(self._place)
        caller = self._stack[-1][0] if self._stack else None
        state = torch.get_rng_state() if self._wants_rerun(module, call) else None
        if self._watches_modules:
            self._watch_gradients(module)
        self._stack.append((name, call, place, (caller, state)))
        self._put_inputs(name, call, place, caller, args, 0)

    def _compiling(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Watch calls of a module that is compiled in place, whose hooks become part of the compiled code."""
        original(module, *args, **kwargs)
        for name in compiled_methods(module):
            vars(module)[name] = functools.partial(self._call_compiled, module, vars(module)[name])

    def _call_compiled(self, module: nn.Module, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._calling(module, args)
        output = compiled(*args, **kwargs)
        self._called(module, args, kwargs, output)
        return output

    def _put_inputs(self, name: str, call: int, place: float, caller: str | None, args: Any, first: int) -> None:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        for index, tensor in enumerate(tensors, first):
            key = ProbeKey(self._step, "in", name, call, index)
            if self._watches_modules and self._store(key, tensor, place):
                self.measurement.callers[key] = caller

    def _called(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if not self._sees(module):
            return
        name = self._name(module)
        while self._stack and self._stack[-1][0] != name:  # calls that raised
            self._stack.pop()
        if not self._stack:
            return
        _, call, place, (caller, state) = self._stack.pop()
        if len(rest) < 2:  # the module raised: torch then leaves out the keyword arguments
            return
        kwargs, output = rest
        if state is not None:
            self._rerun(module, name, args, kwargs, output, state)
            if self._until and self._until <= self.measurement.local.keys():
                raise EndOfRun
        if self._watches_modules:
            self._put_inputs(name, call, place + 0.5, caller, kwargs, len(tree_leaves(args)))
            for index, tensor in enumerate(leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)):
                self._store(ProbeKey(self._step, "forward", name, call, index), tensor)
                if tensor.requires_grad:
                    key = ProbeKey(self._step, "backward", name, call, index)
                    tensor.register_hook(functools.partial(self._gradient_came, key))  # type: ignore[no-untyped-call]

    def _gradient_came(self, key: ProbeKey, grad: torch.Tensor | None) -> None:
        # An unused one of a node's outputs has no gradient.
        if grad is not None and key not in self.measurement.probes:
            self._store(key, grad, scale=self._scale)

    def _watch_gradients(self, module: nn.Module) -> None:
        """Note gradients as the backward leaves them, which tells what is done to them before the step."""
        for param in module.parameters(recurse=False):
            if param not in self._watched and param.requires_grad and param.is_leaf and self.names.knows(param):
                register: Any = param.register_post_accumulate_grad_hook
                self._watched[param] = register(self._gradient_arrived)

    def _unwatch_gradients(self) -> None:
        for handle in self._watched.values():
            handle.remove()

    def _gradient_arrived(self, param: torch.Tensor) -> None:
        if param.grad is not None:
            key = ProbeKey(self._step, "arrived", self.names.param(param))
            self._store(key, param.grad, scale=self._scale)

    @never_traced  # an optimizer's step may be compiled
    def stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Record gradients and settings before a step. Raises EndOfRun if the optimizer has taken its last."""
        self._nested += 1
        if self._nested > 1:  # an optimizer that calls another one
            return
        if self._counts.get(id(optimizer), 0) >= self._steps:
            self._nested = 0
            raise EndOfRun
        params = _params_of(optimizer)
        self.names.find_params(params)
        if id(optimizer) not in self._counts:
            self._optimizers = self._optimizers or self._of_this_program()
            if self._looks_for_others and not self._counts:
                self._find_others()
            self._counts[id(optimizer)] = 0
            self._store_all(0, "param", ((self.names.param(param), param) for param in params), place=-1.0)
        self._note_settings(optimizer)
        step, given = self._counts[id(optimizer)], getattr(optimizer, "grad_scale", None)
        with torch.no_grad(), without_dispatch_modes():
            scale = 1.0 if given is None else float(given)
            grads = ((self.names.param(param), param.grad) for param in params if param.grad is not None)
            unscaled = ((name, grad if scale == 1.0 else grad.double() / scale) for name, grad in grads)
            self._store_all(step, "gradient", unscaled)
            self._before = {param: param.detach().clone() for param in params}

    def _of_this_program(self) -> list[Optimizer]:
        """Return the optimizers that the program has made, and others of models that have been named.

        Other programs of this process may have more.
        """
        return [
            found
            for found in instances_of(Optimizer)
            if found in self._made or any(self.names.knows(param) for param in _params_of(found))
        ]

    def _find_others(self) -> None:
        params = (param for optimizer in self._optimizers for param in _params_of(optimizer))
        optimized = [param for param in params if param.requires_grad]
        found = self.names.others(optimized, self._older)
        with torch.no_grad(), without_dispatch_modes():
            self._others = {name: (found[name], sketch) for name, sketch in sketches_of(found.items())}

    def _changed_others(self) -> list[tuple[str, torch.Tensor]]:
        """Return weights that no optimizer has, and that the program has changed since the first step."""
        now = sketches_of((name, param) for name, (param, _) in self._others.items())
        return [(name, self._others[name][0]) for name, sketch in now if sketch != self._others[name][1]]

    def _note_settings(self, optimizer: Optimizer) -> None:
        settings, step = self.measurement.settings, self._counts[id(optimizer)]
        while len(settings) <= step:
            settings.append([])
        for number, group in enumerate(optimizer.param_groups):
            values = {name: _plain(x) for name, x in group.items() if name not in _IMPLEMENTATION}
            names = [self.names.param(param) for param in group["params"]] if step == 0 else []
            settings[step].append(
                {"optimizer": type(optimizer).__name__, "group": number, "values": values, "params": names}
            )

    @never_traced
    def stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Record updates and buffers after a step. Raises EndOfRun after the last, unless it ends late."""
        self._nested -= 1
        if self._nested > 0:
            return
        params = _params_of(optimizer)
        grads = [param.grad for param in params if param.grad is not None]
        with torch.no_grad(), without_dispatch_modes():
            if self._after_step is not None:
                self._after_step(params)
            step, buffers = self._counts[id(optimizer)], [*self.names.buffers(), *self._changed_others()]
            pairs = ((self.names.param(param), param.detach(), self._before.pop(param)) for param in params)
            self._store_all(step, "update", ((name, widen(after) - widen(before)) for name, after, before in pairs))
            self._store_all(step, "buffer", buffers)
            if self._hashes:
                self.measurement.digests.append(digest_of([*grads, *params, *(x for _, x in buffers), *self._values]))
                self.measurement.losses.append(digest_of(self._losses) if self._losses else "")
        self._values.clear()
        self._losses.clear()
        self._loss_call = None
        self._counts[id(optimizer)] += 1
        if self._counts[id(optimizer)] > self.measurement.steps:
            self.measurement.steps += 1
            self._calls.clear()
        if self.has_ended() and not self._ends_late:
            raise EndOfRun

    def has_ended(self) -> bool:
        """Return True if all optimizers have taken their last step."""
        counts = [self._counts.get(id(optimizer), 0) for optimizer in self._optimizers]
        return bool(counts) and min(counts) >= self._steps

    def finish(self) -> None:
        """Complete `measurement`."""
        if self._values and self._hashes:
            self.measurement.digests.append(digest_of(self._values))
        self.measurement.is_compiled = self.names.is_compiled
        probes = self.measurement.probes
        order = sorted(probes, key=lambda key: self._places[key])
        self.measurement.probes = {key: probes[key] for key in order}

    # Storing

    @property
    def _step(self) -> int:
        return self.measurement.steps

    def _next_call(self, kind: str, name: str) -> int:
        call = self._calls.get((kind, name), -1) + 1
        self._calls[kind, name] = call
        return call

    def _add_loss(self, losses: list[torch.Tensor]) -> None:
        """Add losses to those of this step, so that a batch in two halves has the loss of the whole."""
        if self._step >= self._steps:
            return
        if self._loss_call is None:
            self._loss_call = self._next_call("loss", "loss")
        with torch.no_grad(), without_dispatch_modes():
            for index, loss in enumerate(losses):
                key = ProbeKey(self._step, "loss", "loss", self._loss_call, index)
                unscaled = loss.detach().double() / self._scale
                self._losses.append(unscaled)
                sketch = sketch_of(unscaled)
                before = self.measurement.probes.get(key)
                if before is not None:
                    buckets = tuple(a + b for a, b in zip(before.buckets, sketch.buckets, strict=True))
                    total = before.sum + sketch.sum
                    norm = abs(total) if loss.numel() == 1 else math.hypot(before.norm, sketch.norm)
                    sketch = Sketch(buckets, norm, total)
                self.measurement.probes[key] = sketch
                self._places.setdefault(key, next(self._place))  # that of the first micro-batch

    def _put(self, kind: Kind, name: str, tensors: list[torch.Tensor]) -> None:
        call = self._next_call(kind, name)
        for index, tensor in enumerate(tensors):
            self._store(ProbeKey(self._step, kind, name, call, index), tensor)

    def _store_all(
        self, step: int, kind: Kind, named: Iterable[tuple[str, torch.Tensor]], place: float | None = None
    ) -> None:
        """Store values at the end of a step; they may be computed one by one, while they are stored."""
        if not self._takes_sketches:
            return
        with torch.no_grad(), without_dispatch_modes():
            for name, sketch in sketches_of(named):
                key = ProbeKey(step, kind, name)
                self.measurement.probes[key] = sketch
                self._places[key] = next(self._place) if place is None else place

    def _store(self, key: ProbeKey, tensor: torch.Tensor, place: float | None = None, scale: float = 1.0) -> bool:
        if key.step >= self._steps and key.kind != "value":
            return False
        is_of_module = key.kind in _OF_MODULES and not tensor.is_inference()
        version = counted_version(tensor) if is_of_module else 0
        known = self._sketches.get(tensor) if is_of_module else None
        if known is not None and known[:2] == (version, scale):
            sketch: Sketch = known[2]
        else:
            with torch.no_grad(), without_dispatch_modes():
                sketch = sketch_of(tensor if scale == 1.0 else tensor.double() / scale)
            if is_of_module:
                self._sketches[tensor] = version, scale, sketch
        self.measurement.probes[key] = sketch
        self._places[key] = next(self._place) if place is None else place
        return True

    # Modules again in float64

    def _wants_rerun(self, module: nn.Module, call: int) -> bool:
        if not self._reruns or self._step > 0 or call > 0 or _has_sharded_parts(module):
            return False
        # A `Sequential` inside a model computes nothing beyond its modules, unless it is compiled as one.
        return self._compiles or not self._stack or type(module).forward is not nn.Sequential.forward

    def _rerun(self, module: nn.Module, name: str, args: Any, kwargs: Any, output: Any, state: torch.Tensor) -> None:
        """Compare a module's output with that of the same code in float64 on the same inputs."""
        self._is_off = True
        # Writing to the buffers would spoil what the backward of a batch normalization has saved.
        buffers = [(table, dict(table)) for table in map(buffers_in, module.modules())]
        weights = [(param, param.data) for param in module.parameters()]
        after = torch.get_rng_state()
        try:
            for table, before in buffers:
                table.update({each: None if buffer is None else buffer.clone() for each, buffer in before.items()})
            eagerly = without_compiler() if self._compiles else nullcontext()  # otherwise the whole run is eager
            with torch.no_grad(), without_dispatch_modes(), _no_autocast(), eagerly:
                torch.set_rng_state(state)
                args, kwargs = tree_map(_widened, (args, kwargs))
                with exact_arithmetic():
                    exact = module.forward(*args, **kwargs)
                self.measurement.local[name] = _error(output, exact)
        except Exception:
            pass  # a module that cannot run on its own has no local error
        finally:
            torch.set_rng_state(after)
            for table, before in buffers:
                table.update(before)
            for param, data in weights:
                if param.dtype != data.dtype or param.data_ptr() != data.data_ptr():  # the module has set other data
                    param.data = data
            self._is_off = False


def _has_sharded_parts(module: nn.Module) -> bool:
    """Return True if `fully_shard` was applied to a module inside, whose weights a rerun would gather too early."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return any(isinstance(inner, sharded) for inner in module.modules() if inner is not module)


def _error(output: Any, exact: Any) -> float:
    """Return the relative error of a module's outputs, all together; inf if one overflows that is finite in float64."""
    pairs = zip(tree_leaves(output), tree_leaves(exact), strict=True)
    difference = size = 0.0
    for value, reference in pairs:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value, reference = value.detach().double(), reference.double()
            norm = float(torch.linalg.vector_norm(reference))
            if not math.isfinite(norm):  # such as a mask of -inf, of which the finite part has an error
                is_finite = reference.isfinite()
                value, reference = value[is_finite], reference[is_finite]
                norm = float(torch.linalg.vector_norm(reference))
            difference = math.hypot(difference, float(torch.linalg.vector_norm(value - reference)))
            size = math.hypot(size, norm)
    if math.isnan(difference):
        return math.inf
    return difference / size if size > 0 else 0.0


def _widened(value: Any) -> Any:
    return widen(value.detach()) if isinstance(value, torch.Tensor) else value


@contextmanager
def without_compiler() -> Iterator[None]:
    """Run compiled code eagerly: neither modules nor ops of compiled code can be watched."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # for a compiler that the program loads
    try:
        with torch.compiler.set_stance("force_eager") if is_compiler_loaded() else nullcontext():
            yield
    finally:
        if before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = before


@contextmanager
def _no_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(autocast(device, enabled=False))
        yield


def _params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _plain(value: Any) -> Any:
    """Return a setting as JSON has it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(type(value).__name__)


@contextmanager
def _replaced(owner: Any, name: str, instead: Callable[..., Any]) -> Iterator[None]:
    """Replace a function by one that gets it as its first argument."""
    original = getattr(owner, name)

    @never_traced
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return instead(original, *args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)
