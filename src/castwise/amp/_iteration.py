"""A `GradScaler`'s state between two calls of `update()`, and its permanent record of each optimizer."""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, TypeAlias

import torch
from torch.amp.grad_scaler import OptState
from torch.compiler import is_dynamo_compiling
from typing_extensions import Self

from castwise.amp import _torch_words as torch_words
from castwise.amp._after_step import LastStep
from castwise.amp._fp32_steps import steps_in_fp32
from castwise.amp._gradients import params_and_grads, params_of, versions_of
from castwise.amp._shared_params import SharedParams


class OptimizerInfo:
    """Facts about an optimizer that are determined once.

    Args:
        optimizer: The optimizer.
        number: How many optimizers came before it. Ranks identify an optimizer by this number.
        shared: Which gradients of the scaler's optimizers are already unscaled.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, number: int, shared: SharedParams) -> None:
        self.optimizer = reference_to(optimizer)
        self.number, self.shared = number, shared
        self.last_step: LastStep | None = None
        # Before there was `grad_scale`, optimizers took the scaler itself as an argument of `step`.
        self.wants_scaler = "grad_scaler" in inspect.signature(optimizer.step).parameters
        self.steps_in_fp32 = steps_in_fp32(optimizer)


def reference_to(optimizer: Any) -> Callable[[], Any]:
    """Return a weak reference, or a strong one if the optimizer's class allows no other, as with `__slots__`."""
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer


class KnownOptimizers:
    """The optimizers that a scaler has seen. They are found by `id`, because a class with `__eq__` has no hash."""

    def __init__(self) -> None:
        self._infos: dict[int, OptimizerInfo] = {}
        self._count = 0
        self.shared = SharedParams()

    def register(self, optimizer: torch.optim.Optimizer, *, is_scaled: bool = True) -> OptimizerInfo:
        """Return the facts about an optimizer; hooks watch the gradients of a new one, if they are scaled."""
        info = self._infos.get(id(optimizer))
        if info is None or info.optimizer() is not optimizer:
            self._infos = {key: known for key, known in self._infos.items() if known.optimizer() is not None}
            if is_scaled:
                others = [other for known in self._infos.values() if (other := known.optimizer()) is not None]
                self.shared.add(params_of(optimizer), map(params_of, others))
            info = self._infos[id(optimizer)] = OptimizerInfo(optimizer, self._count, self.shared)
            self._count += 1
        return info

    def forget_last_steps(self) -> None:
        """Forget the last step of every optimizer."""
        for info in self._infos.values():
            info.last_step = None


class Snapshot:
    """Gradients at one moment, with their versions. They are kept alive, so that no other tensor can get their ids."""

    def __init__(self, grads: list[torch.Tensor]) -> None:
        self._grads, self._versions = grads, versions_of(grads)

    def matches(self, grads: list[torch.Tensor]) -> bool:
        """Return True if the gradients are the same, neither replaced nor written to since."""
        if len(grads) != len(self._grads) or any(a is not b for a, b in zip(grads, self._grads, strict=True)):
            return False
        return versions_of(grads) == self._versions

    def changed(self, grads: list[torch.Tensor]) -> tuple[list[int], list[int]]:
        """Return the positions of gradients that were written to since, and of those that are new."""
        then = {id(grad): version for grad, version in zip(self._grads, self._versions, strict=True)}
        now = list(enumerate(zip(grads, versions_of(grads), strict=True)))
        # A new gradient counts as new, not as written.
        written = [index for index, (grad, version) in now if then.get(id(grad), version) != version]
        return written, [index for index, (grad, _) in now if id(grad) not in then]


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """The gradients are as the backward left them: scaled."""

    stage: ClassVar[OptState] = OptState.READY
    awaits_unscaling: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, eq=False)
class ClipPending:
    """The gradients are still scaled: a fused step will unscale and clip them while it reads them."""

    stage: ClassVar[OptState] = OptState.READY  # torch has no such state, and its tools may still unscale
    awaits_unscaling: ClassVar[bool] = True
    divisor: torch.Tensor
    """Unscales and clips: fp32, shape ()."""
    factor: torch.Tensor | None
    """The same for an optimizer that multiplies instead (`MasterWeights`): fp32, shape ()."""
    grads: Snapshot
    """The gradients that were measured."""


@dataclass(frozen=True, slots=True, eq=False)
class Unscaled:
    """The gradients are unscaled."""

    stage: ClassVar[OptState] = OptState.UNSCALED
    awaits_unscaling: ClassVar[bool] = False
    allows_unscale_call: bool = False
    """Whether `unscale_` may still be called, because clipping has unscaled and not the user."""
    is_clipped: bool = False
    """Whether they are clipped by their norm, too."""


@dataclass(frozen=True, slots=True, eq=False)
class Stepped:
    """The optimizer was stepped; the step may have been skipped because of an inf or NaN."""

    stage: ClassVar[OptState] = OptState.STEPPED
    awaits_unscaling: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, eq=False)
class SkipCalled:
    """`GradScaler.skip` was called, which does not count as a step."""

    stage: ClassVar[OptState] = OptState.STEPPED
    awaits_unscaling: ClassVar[bool] = False


State: TypeAlias = Ready | ClipPending | Unscaled | Stepped | SkipCalled


class TorchStateMapping(MutableMapping[str, Any]):
    """An optimizer's state as a mapping that is copied as torch's dictionary is."""

    __slots__ = ()

    def copy(self) -> dict[str, Any]:
        """Return a dictionary with what the state is now."""
        return dict(self)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self) | dict(other)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def state_of(stage: object) -> State:
    """Return the state that matches a stage of torch's scaler; raise a ValueError if it is none."""
    for state in (Ready, Unscaled, Stepped):
        if state.stage is stage:
            return state()
    raise ValueError(f"stage must be one of {', '.join(map(str, OptState))}, got {stage!r}")


@dataclass(slots=True, eq=False)
class OptimizerRecord(TorchStateMapping):
    """An optimizer in one iteration; as a mapping, its state in torch: `stage` and `found_inf_per_device`."""

    optimizer: torch.optim.Optimizer
    info: OptimizerInfo
    takes_scaler: bool = False
    """Whether the optimizer wants the scaler as an argument of its step (deprecated)."""
    takes_grad_scale: bool = False
    """Whether the optimizer unscales and skips in its own step, as a fused one does."""
    state: State = Ready()
    """What was done with the gradients so far."""
    found_inf_per_device: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    """fp32, one element each: not 0 if a gradient on the device is not finite. Tools may replace or write to them."""
    is_reduced: bool = True
    """Whether `found_inf_per_device` is already reduced over all ranks; True also while there is nothing to reduce."""
    grads_before_later_loss: Snapshot | None = None
    """If a loss was scaled after clipping: the gradients at that moment, to which its backward must not add."""
    step_taken: bool | None = None
    """Whether the step was taken; None if the host does not know."""
    hooks_ran: bool = False
    """Whether the gradients hooks were called."""
    norm: torch.Tensor | None = None
    """The norm that clipping found."""
    largest: torch.Tensor | None = None
    """The largest magnitude of the unscaled gradients, if the schedule needs it: fp32, shape ()."""
    nonfinite_markers: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=list)
    """Parameters and a norm (or 0 or NaN) for each: shows the host later which gradients were not finite."""

    def __getitem__(self, name: str) -> Any:
        if name == "stage":
            return self.state.stage
        if name == "found_inf_per_device":
            return self.found_inf_per_device
        raise KeyError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "found_inf_per_device":
            self.found_inf_per_device = value
        elif self[name] is not value:  # raises for other names
            self.state = state_of(value)
            if value is OptState.READY:  # as in torch, the gradients are to be unscaled, also those that were before
                self.info.shared.forget(params_of(self.optimizer))
                self.largest, self.grads_before_later_loss = None, None

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"{name} cannot be deleted from an optimizer's state: set it instead")

    def __iter__(self) -> Iterator[str]:
        return iter(("stage", "found_inf_per_device"))

    def __len__(self) -> int:
        return 2

    def has_begun(self) -> bool:
        """Return True if the optimizer was unscaled, clipped, stepped or skipped."""
        # Clipping leaves the stage at READY but sets found_inf.
        return self.state.stage is not OptState.READY or bool(self.found_inf_per_device)

    def note_nonfinite(self, flags: list[tuple[list[torch.Tensor], torch.Tensor]]) -> None:
        """Record for each parameter whether its gradient is finite."""
        self.nonfinite_markers = [
            (params, list(torch.where(are_finite, 0.0, math.nan).unbind())) for params, are_finite in flags
        ]

    def refuse(self, call: str) -> NoReturn:
        """Raise a RuntimeError for a call that comes after the optimizer was stepped or skipped."""
        if isinstance(self.state, SkipCalled):
            raise RuntimeError(
                f"{call}() is being called after skip() of the same optimizer: call scaler.update() first"
            )
        torch_scaler = torch_words.scaler(stage=OptState.STEPPED)
        nothing: Any = None  # torch looks at the stage first
        if call == "step":
            ours = RuntimeError("Call scaler.update() once per iteration, after the last step()")
            raise torch_words.error(ours, lambda: torch_scaler.step(nothing))
        # After torch's words this is a sentence, "Call it ..."; alone it follows a colon.
        hint = "all it before step(), or call scaler.update() first to begin a new iteration"
        if call == "unscale_":
            raise torch_words.error(RuntimeError(f"C{hint}"), lambda: torch_scaler.unscale_(nothing))
        raise RuntimeError(f"{call}() is being called after step() of the same optimizer: c{hint}")


@dataclass(slots=True, eq=False)
class ScalerIteration:
    """The state since the last `update()`, which replaces it as a whole."""

    records: dict[int, OptimizerRecord] = field(default_factory=dict)
    """By `id(optimizer)`; a record keeps its optimizer alive."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """The losses that were given to `scale`, detached; fp32, shape ()."""
    unclaimed: dict[int, UnclaimedState] = field(default_factory=dict)
    """States that tools have written for optimizers without a record, by `id(optimizer)`."""
    compiled_loss: torch.Tensor | None = None
    """The sum of the losses from compiled code: Dynamo would recompile for each length of a list."""

    def has_begun(self) -> bool:
        """Return True if an optimizer was unscaled, clipped, stepped or skipped."""
        written = any(state != UnclaimedState() for state in self.unclaimed.values())  # to read one is no beginning
        return written or any(record.has_begun() for record in self.records.values())

    def has_only_skip_calls(self) -> bool:
        """Return True if optimizers were used, but only in `GradScaler.skip`."""
        begun = [record for record in self.records.values() if record.has_begun()]
        return bool(begun) and all(isinstance(record.state, SkipCalled) for record in begun)

    def note_loss(self, loss: torch.Tensor) -> None:
        """Record a loss, to find the cause of a skipped step. Traced by Dynamo."""
        if not loss.is_floating_point() or type(loss) not in (torch.Tensor, torch.nn.Parameter):
            return
        loss = loss.detach()
        if loss.dim() or loss.dtype is not torch.float32:
            loss = loss.sum(dtype=torch.float32)
        if not is_dynamo_compiling():
            self.losses.append(loss)
        elif self.compiled_loss is None:
            self.compiled_loss = loss
        else:
            self.compiled_loss = self.compiled_loss + loss.to(self.compiled_loss.device, non_blocking=True)

    def seen_losses(self) -> list[torch.Tensor]:
        """Return the losses, with the sum of those from compiled code."""
        return self.losses if self.compiled_loss is None else [*self.losses, self.compiled_loss]

    def loss(self, device: torch.device) -> torch.Tensor | None:
        """Return the sum of the losses on a device, shape (); None if there are none."""
        losses = [loss.to(device, non_blocking=True) for loss in self.seen_losses()]
        if len(losses) <= 1:
            return losses[0] if losses else None
        return torch.stack(losses).sum()

    def loss_is_nonfinite(self, like: torch.Tensor) -> torch.Tensor:
        """Return 1 if the sum of the losses is not finite, else 0: fp32, shape (), on `like`'s device."""
        loss = self.loss(like.device)
        if loss is None:
            return torch.zeros_like(like, dtype=torch.float32)
        return loss.isfinite().logical_not().float()

    def expect_later_backward(self) -> None:
        """Take a snapshot of the clipped gradients, now that the backward of another scaled loss may add to them."""
        for record in self.records.values():
            if record.grads_before_later_loss is not None:
                continue  # the gradients to compare with are those before the first later loss
            state = record.state
            if isinstance(state, ClipPending) or (isinstance(state, Unscaled) and state.is_clipped):
                record.grads_before_later_loss = Snapshot(params_and_grads(record.optimizer)[1])


def _refreshing(name: str) -> Any:
    """Return a method of `dict` that first looks up what the iteration's optimizers are at."""
    method = getattr(dict, name)

    @functools.wraps(method)
    def read(self: OptimizerStates, *arguments: Any) -> Any:
        self.refresh()
        return method(self, *arguments)

    return read


class OptimizerStates(defaultdict[int, Any]):
    """The states of an iteration's optimizers as in torch's class, by `id(optimizer)`. Items can be read and written.

    If an optimizer has no record yet, its state is kept until there is one, because an id does not lead to it. A state
    that was deleted stays as it was, for those who hold it, and can be put back.
    """

    iteration: ScalerIteration | None = None  # also after it has ended; None in a copy

    @staticmethod
    def of(iteration: ScalerIteration) -> OptimizerStates:
        """Return the states of an iteration."""
        states = OptimizerStates(UnclaimedState)
        states.iteration = iteration
        return states

    def refresh(self) -> None:
        """Take the optimizers that torch would list; `__missing__` finds the others."""
        if self.iteration is None:
            return
        for key, record in self.iteration.records.items():
            if record.has_begun():
                dict.__setitem__(self, key, record)
        dict.update(self, self.iteration.unclaimed)

    def __missing__(self, key: int) -> Any:
        if self.iteration is None:
            return defaultdict.__missing__(self, key)
        state = self.iteration.records.get(key) or self.iteration.unclaimed.setdefault(key, UnclaimedState())
        dict.__setitem__(self, key, state)
        return state

    def __setitem__(self, key: int, state: Any) -> None:
        if self.iteration is None:
            dict.__setitem__(self, key, state)
            return
        if isinstance(state, OptimizerRecord) and id(state.optimizer) == key:  # one that was deleted
            self.iteration.records[key] = state
            self.iteration.unclaimed.pop(key, None)
            if not state.state.awaits_unscaling:  # deleting it has marked the gradients as scaled
                state.info.shared.note_unscaled(params_of(state.optimizer))
            dict.__setitem__(self, key, state)
            return
        state_of(state.get("stage", OptState.READY))  # raises before anything is written
        for name in state:
            self[key][name] = state[name]

    def __delitem__(self, key: int) -> None:
        self.refresh()
        dict.__delitem__(self, key)
        if self.iteration is None:
            return
        self.iteration.unclaimed.pop(key, None)
        record = self.iteration.records.pop(key, None)
        if record is not None:  # as in torch, its gradients are to be unscaled
            record.info.shared.forget(params_of(record.optimizer))

    def __reduce__(self) -> Any:
        return dict, ({key: dict(state) for key, state in self.items()},)

    def __ior__(self, other: Any) -> Self:  # type: ignore[override, misc]  # `|` gives a plain dictionary
        self.update(other)
        return self

    __contains__, __len__, __iter__ = map(_refreshing, ("__contains__", "__len__", "__iter__"))
    __eq__, __ne__, __repr__ = map(_refreshing, ("__eq__", "__ne__", "__repr__"))
    __hash__ = None  # type: ignore[assignment]  # as a dictionary
    get, keys, values, items = map(_refreshing, ("get", "keys", "values", "items"))
    # The methods of `dict` would not call those above.
    pop, popitem, clear = MutableMapping.pop, MutableMapping.popitem, MutableMapping.clear
    update, setdefault = MutableMapping.update, MutableMapping.setdefault


class UnclaimedState(TorchStateMapping):
    """The state of an optimizer that has no record yet, or of its record once it has one."""

    def __init__(self) -> None:
        self._entries: MutableMapping[str, Any] = {"stage": OptState.READY, "found_inf_per_device": {}}

    def give_to(self, record: OptimizerRecord) -> None:
        """Write the stage to the optimizer's new record, and be its state from now on."""
        record["stage"] = self["stage"]
        self._entries = record

    def __getitem__(self, name: str) -> Any:
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name]  # raises for other names
        if name == "stage":
            state_of(value)
        self._entries[name] = value

    __delitem__ = OptimizerRecord.__delitem__

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
