"""castwise in Accelerate: `prepare(accelerator)` makes its scaler, its autocast and its clipping castwise's.

Only the accelerator that is given is changed, and what it prepares afterwards. `report(accelerator, folder)` records
the training run, and writes its report in `accelerator.end_training()`.

Accelerate ends an iteration of the scaler with every step of every optimizer. If the backwards of several come before
the first of their steps, the scale may move, and all that was unscaled is forgotten, before the last of them: that one
divides by a scale that its gradients were not made with, or twice. Here an iteration ends with the step of the last
optimizer that has gradients, and otherwise before the next loss is scaled.

Needs the extra `castwise[accelerate]`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from castwise._warnings import warn
from castwise.amp.autocast_mode import autocast
from castwise.amp.grad_scaler import GradScaler
from castwise.amp.gradients import params_of
from castwise.amp.schedules import Schedule
from castwise.monitor.monitor import Monitor
from castwise.report.summary import end_and_say

try:
    import accelerate.accelerator as of_accelerate  # type: ignore[import-untyped]  # it has no types
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
    from accelerate.utils import (  # type: ignore[import-untyped]
        AutocastKwargs,
        DistributedType,
        get_mixed_precision_context_manager,
    )
except ImportError as error:
    raise ImportError(
        "castwise.integrations.accelerate needs Accelerate: pip install 'castwise[accelerate]'"
    ) from error

__all__ = ["prepare", "report", "unwrapped"]

_Parameters: TypeAlias = torch.Tensor | Iterable[torch.Tensor]

_PAGE = "report.html"
_LEFT_ALONE = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def prepare(accelerator: Accelerator, *, schedule: Schedule | None = None) -> Accelerator:
    """Let an accelerator autocast, scale, step and clip with castwise: called once, before its own `prepare`.

    Where Accelerate has a scaler (fp16) it becomes castwise's, with the numbers of `GradScalerKwargs`: a
    `ShardedGradScaler` under FSDP, and a `GradScaler` that asks all ranks under FSDP2 and with a `ParallelismConfig`.
    `accelerator.autocast()` and the region around the forward of prepared models become castwise's, with what
    `AutocastKwargs` says. `accelerator.clip_grad_norm_` and `clip_grad_value_` are those of the scaler if they are
    given the parameters of one prepared optimizer, and otherwise do what Accelerate does. `step_was_skipped` of a
    prepared optimizer is right for fused optimizers and closures as well; of a fused one it waits for the device.

    Args:
        accelerator: One that has prepared nothing yet. In fp16, bf16 or full precision; Accelerate computes in full
            precision if it is asked for fp16 on a CPU.
        schedule: How the scale moves, instead of `GradScalerKwargs`. With a schedule there is a scaler in every
            precision: `schedules.Guard()` skips steps that are not finite in bf16.

    Returns:
        The same accelerator.

    Raises:
        TypeError: `accelerator` is not one, or `schedule` none of castwise's.
        RuntimeError: It has prepared something already, or is castwise's already.
        ValueError: It leaves mixed precision to DeepSpeed, Megatron-LM, XLA or an fp8 library, or there are both a
            schedule and numbers in `GradScalerKwargs`.

    Warns:
        UserWarning: It is asked for fp16 on a CPU.

    Example:
        >>> from accelerate import Accelerator  # doctest: +SKIP
        >>> accelerator = prepare(Accelerator(mixed_precision="fp16"))  # doctest: +SKIP
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
    """
    _refuse_what_cannot_be_prepared(accelerator)
    if accelerator.mixed_precision == "fp16" and not accelerator.native_amp:
        warn("Accelerate does not autocast to fp16 on a CPU: it computes in fp32 there", UserWarning, 2)
    if accelerator.scaler is not None or schedule is not None:
        accelerator.scaler = _scaler_for(accelerator, schedule)
    ours = _Ours(accelerator)
    accelerator.autocast = ours.autocast
    accelerator.prepare_model = ours.prepare_model
    accelerator.prepare_optimizer = ours.prepare_optimizer
    accelerator.unscale_gradients = ours.unscale_gradients
    accelerator.clip_grad_norm_ = ours.clip_grad_norm_
    accelerator.clip_grad_value_ = ours.clip_grad_value_
    return accelerator


def _refuse_what_cannot_be_prepared(accelerator: Any) -> None:
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator must be an accelerate.Accelerator, got {type(accelerator).__name__}")
    if isinstance(getattr(accelerator.autocast, "__self__", None), _Ours):
        raise RuntimeError("this accelerator is castwise's already: prepare it once")
    prepared = [*accelerator._models, *accelerator._optimizers]
    if prepared:
        names = ", ".join(type(getattr(each, "optimizer", each)).__name__ for each in prepared)
        raise RuntimeError(
            f"this accelerator has prepared {names} already, which would keep Accelerate's own scaler and autocast: "
            "call castwise.integrations.accelerate.prepare(accelerator) before accelerator.prepare(...)"
        )
    if accelerator.mixed_precision == "fp8" or accelerator.distributed_type in _LEFT_ALONE:
        given = f"{accelerator.distributed_type} and mixed_precision={accelerator.mixed_precision!r}"
        raise ValueError(
            f"with {given} another library does the mixed precision, and castwise does not replace it: leave out "
            "prepare()"
        )


def _scaler_for(accelerator: Accelerator, schedule: Schedule | None) -> GradScaler:
    handler, device = accelerator.scaler_handler, accelerator.device.type
    settings = {} if handler is None else handler.to_kwargs()
    scaler: _Scaler
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        scaler = _sharded()(device, schedule=schedule, **settings)
    else:
        # Of parameters that are split each rank looks at its part alone; under DDP all of them see the same.
        is_split = accelerator.is_fsdp2 or accelerator.parallelism_config is not None
        group = torch.distributed.group.WORLD if is_split else None
        scaler = _Scaler(device, schedule=schedule, process_group=group, **settings)
    scaler.prepared = lambda: [unwrapped(optimizer) for optimizer in accelerator._optimizers]
    return scaler


def report(
    accelerator: Accelerator,
    folder: str | os.PathLike[str],
    every: int = 100,
    *,
    on_skip: Literal["diagnose"] | None = None,
) -> Monitor:
    """Record what happens to the numbers of a training run, and write `report.html` when it ends.

    Called once, on all processes, after `accelerator.prepare` has prepared the model and its optimizers. The run ends
    with `accelerator.end_training()`, which also prints what the report comes down to. A script that fails before
    leaves its record, for `castwise report folder`.

    Args:
        accelerator: Changed by `prepare`; without a scaler (bf16, fp32) also another.
        folder: Where the records (`monitor.jsonl`) and the report go.
        every: Steps from one sample to the next, >= 1.
        on_skip: `"diagnose"` replays the batch of a skipped step; see `Monitor`.

    Returns:
        The monitor, for example to set its `step`: Accelerate does not count steps.

    Raises:
        RuntimeError: The accelerator has not prepared one model and its optimizers.
        TypeError: Its scaler is torch's.
        ValueError: See `Monitor`.

    Example:
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
        >>> report(accelerator, "runs/x")  # doctest: +SKIP
        >>> accelerator.end_training()  # doctest: +SKIP
    """
    models, optimizers = accelerator._models, accelerator._optimizers
    if len(models) != 1 or not optimizers:
        raise RuntimeError(
            f"this accelerator has prepared {len(models)} models and {len(optimizers)} optimizers: call report after "
            "accelerator.prepare(model, optimizer), and with several models make a castwise.Monitor for each"
        )
    monitor = Monitor(models[0], optimizers, accelerator.scaler, every=every, sinks=[folder], on_skip=on_skip).attach()
    theirs = accelerator.end_training

    def end_training() -> None:
        accelerator.end_training = theirs
        monitor.detach()  # on all processes, while they can still reach each other
        if accelerator.is_main_process:
            end_and_say([folder], Path(folder) / _PAGE)
        theirs()

    accelerator.end_training = end_training
    return monitor


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that Accelerate has wrapped.

    Args:
        optimizer: A prepared one; one that is not is returned as it is.
    """
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    inner: torch.optim.Optimizer = optimizer
    return inner


class _Scaler(GradScaler):
    """A scaler for callers that call `update` after each of several optimizers."""

    prepared: Callable[[], list[torch.optim.Optimizer]] = staticmethod(list)
    """All optimizers that it steps."""
    _stepped: tuple[torch.optim.Optimizer, ...] = ()
    _is_update_due = False

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self.has_stepped(optimizer):
            self._update_if_due()
        returned = super().step(optimizer, *args, **kwargs)
        self._stepped = (*self._stepped, optimizer)
        return returned

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if new_scale is None and self._do_others_wait():
            self._is_update_due = True
        else:
            self._stepped, self._is_update_due = (), False
            super().update(new_scale)

    def has_stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if an optimizer was stepped in the iteration under way."""
        return any(optimizer is each for each in self._stepped)

    def _do_others_wait(self) -> bool:
        others = [optimizer for optimizer in self.prepared() if not self.has_stepped(optimizer)]
        return any(param.grad is not None for optimizer in others for param in params_of(optimizer))

    def _update_if_due(self) -> None:
        if self._is_update_due:
            self._stepped, self._is_update_due = (), False
            super().update()

    def scale(self, outputs: Any) -> Any:
        self._update_if_due()
        return super().scale(outputs)

    def synchronize(self) -> None:
        self._update_if_due()
        super().synchronize()

    def load_state_dict(self, state_dict: Any) -> None:
        self._update_if_due()
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self._update_if_due()
        return {name: value for name, value in super().__getstate__().items() if name != "prepared"}


@functools.cache
def _sharded() -> type[_Scaler]:
    from castwise.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # loads all of FSDP

    return type("_ShardedScaler", (_Scaler, ShardedGradScaler), {})


class _Optimizer(AcceleratedOptimizer):  # type: ignore[misc]  # Accelerate has no types
    """A prepared optimizer that also knows of skips which are decided within the optimizer's own step."""

    _skipped: torch.Tensor | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        super().step(closure)
        is_decided_within = closure is not None or getattr(self.optimizer, "_step_supports_amp_scaling", False)
        self._skipped = self.scaler.step_skipped if is_decided_within else None

    @property
    def step_was_skipped(self) -> bool:
        was_skipped = super().step_was_skipped if self._skipped is None else self._skipped
        return bool(was_skipped)


class _Ours:
    """What an accelerator has instead of its own methods of the same names, which are those of its class."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._theirs = accelerator, type(accelerator)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Any:
        handler = self._accelerator.autocast_handler if autocast_handler is None else autocast_handler
        region = _region(self._accelerator.native_amp, handler)
        return region if isinstance(region, autocast) else self._theirs.autocast(self._accelerator, autocast_handler)

    def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
        with _regions_of_ours():
            return self._theirs.prepare_model(self._accelerator, *args, **kwargs)

    def prepare_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        prepared = self._theirs.prepare_optimizer(self._accelerator, *args, **kwargs)
        if type(prepared) is AcceleratedOptimizer and prepared.scaler is not None:
            prepared.__class__ = _Optimizer
        return prepared

    def unscale_gradients(self, optimizer: Any = None) -> None:
        scaler = self._accelerator.scaler
        if scaler is None:
            return
        if optimizer is None:
            given = [each for each in self._prepared() if not scaler.has_stepped(each)]
        else:
            given = [unwrapped(each) for each in (optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])]
        for each in given:
            scaler.unscale_(each)

    def clip_grad_norm_(self, parameters: _Parameters, max_norm: float, norm_type: float = 2) -> Any:
        parameters = _listed(parameters)
        optimizer = self._owner_of(parameters)
        if optimizer is None:
            return self._theirs.clip_grad_norm_(self._accelerator, parameters, max_norm, norm_type)
        return self._accelerator.scaler.clip_grad_norm_(optimizer, max_norm, norm_type)

    def clip_grad_value_(self, parameters: _Parameters, clip_value: float) -> None:
        parameters = _listed(parameters)
        optimizer = self._owner_of(parameters)
        if optimizer is None:
            self._theirs.clip_grad_value_(self._accelerator, parameters, clip_value)
        else:
            self._accelerator.scaler.clip_grad_value_(optimizer, clip_value)

    def _owner_of(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer | None:
        """Return the optimizer that has these gradients and no others, if a scaler unscales them."""
        scaler = self._accelerator.scaler
        if scaler is None or not scaler.is_enabled():
            return None
        wanted = _with_gradients(parameters)
        return next((each for each in self._prepared() if _with_gradients(params_of(each)) == wanted), None)

    def _prepared(self) -> list[torch.optim.Optimizer]:
        return [unwrapped(optimizer) for optimizer in self._accelerator._optimizers]


def _listed(parameters: _Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _with_gradients(parameters: Iterable[torch.Tensor]) -> set[int]:
    return {id(param) for param in parameters if param.grad is not None}


def _region(native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None) -> Any:
    """Return castwise's region instead of the one that Accelerate would enter, if that is one."""
    theirs = get_mixed_precision_context_manager(native_amp, autocast_kwargs)
    if not isinstance(theirs, torch.autocast):
        return theirs
    settings = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    return autocast(theirs.device, theirs.fast_dtype, **settings)


@contextmanager
def _regions_of_ours() -> Iterator[None]:
    """Let Accelerate wrap a model's forward in castwise's region: it asks a function of its module for one."""
    of_accelerate.get_mixed_precision_context_manager = _region
    try:
        yield
    finally:
        of_accelerate.get_mixed_precision_context_manager = get_mixed_precision_context_manager
