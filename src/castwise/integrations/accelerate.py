"""Accelerate: `prepare(accelerator)` replaces its scaler, autocast and clipping with castwise's.

This changes only the given accelerator, and models and optimizers that it prepares afterwards.
`report(accelerator, folder)` records the training run and writes its report in `accelerator.end_training()`.

Accelerate ends an iteration of the scaler with every step of every optimizer. If the backwards of several optimizers
come before their steps, the scale may change between the steps, and the record of which gradients are unscaled is lost:
later steps divide by the wrong scale, or twice. Here an iteration ends with the step of the last optimizer that has
gradients, and otherwise before the next loss is scaled.

Requires the extra `castwise[accelerate]`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

from castwise._live_objects import instances_of
from castwise._torch_private import UNSCALES_IN_STEP
from castwise._warnings import warn
from castwise.amp._gradients import params_of
from castwise.amp._schedules import Schedule
from castwise.amp.autocast_mode import autocast
from castwise.amp.grad_scaler import GradScaler
from castwise.master_weights import _parameter_clipping as parameter_clipping
from castwise.master_weights._master_weights import MasterWeights, owner_of, sum_over_ranks
from castwise.master_weights._parameter_clipping import listed
from castwise.monitor._monitor import Monitor
from castwise.monitor._sinks import JSONL
from castwise.report._summary import end_and_summarize

try:
    import accelerate.accelerator as of_accelerate  # type: ignore[import-untyped]  # has no types
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
_UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def prepare(accelerator: Accelerator, *, schedule: Schedule | None = None) -> Accelerator:
    """Use castwise for an accelerator's autocast, scaling, steps and clipping. Call once, before its own `prepare`.

    If Accelerate uses a scaler (fp16), it is replaced with a castwise scaler with the settings of `GradScalerKwargs`: a
    `ShardedGradScaler` under FSDP, and a `GradScaler` that synchronizes all ranks under FSDP2 and with a
    `ParallelismConfig`. `accelerator.autocast()` and the region around the forward of prepared models become castwise
    regions with the settings of `AutocastKwargs`. `accelerator.clip_grad_norm_` and `clip_grad_value_` use the scaler
    if called with the parameters of one prepared optimizer. Otherwise a `MasterWeights` clips in fp32 in its step, and
    other optimizers do what Accelerate does. `sum_over_ranks` of a `MasterWeights(accumulate="compensated")` is called
    for models in DDP that have no other communication hook. `step_was_skipped` of a prepared optimizer is also correct
    for fused optimizers and closures; for a fused optimizer it syncs.

    Args:
        accelerator: An accelerator in fp16, bf16 or full precision that has not prepared anything yet. With fp16 on a
            CPU, Accelerate computes in full precision.
        schedule: Schedule of the scale, instead of `GradScalerKwargs`. With a schedule there is a scaler in every
            precision: `schedules.Guard()` skips non-finite steps in bf16.

    Returns:
        The same accelerator.

    Raises:
        TypeError: `accelerator` is not an Accelerator, or `schedule` is not a castwise schedule.
        RuntimeError: The accelerator has already prepared something, or already uses castwise.
        ValueError: The accelerator leaves mixed precision to DeepSpeed, Megatron-LM, XLA or an fp8 library, or both
            `schedule` and settings in `GradScalerKwargs` are given.

    Warns:
        UserWarning: The accelerator is set to fp16 on a CPU.

    Example:
        >>> from accelerate import Accelerator  # doctest: +SKIP
        >>> accelerator = prepare(Accelerator(mixed_precision="fp16"))  # doctest: +SKIP
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
    """
    _check_preparable(accelerator)
    if accelerator.mixed_precision == "fp16" and not accelerator.native_amp:
        warn("Accelerate does not autocast to fp16 on a CPU: it computes in fp32 there", UserWarning)
    if accelerator.scaler is not None or schedule is not None:
        accelerator.scaler = _scaler_for(accelerator, schedule)
    ours = _CastwiseMethods(accelerator)
    accelerator.autocast = ours.autocast
    accelerator.prepare_model = ours.prepare_model
    accelerator.prepare_optimizer = ours.prepare_optimizer
    accelerator.unscale_gradients = ours.unscale_gradients
    ours.clip_from(accelerator)
    return accelerator


def clip_in_step(optimizer: Any) -> None:
    """Have the accelerator that has prepared an optimizer clip a `MasterWeights` in fp32, as after `prepare`.

    Accelerate's own methods would have torch clip its 16-bit gradients. DDP averages in fp32 then, as after `prepare`
    too. Nothing else of the accelerator changes.

    Args:
        optimizer: A prepared optimizer. If it is no `MasterWeights`, or Accelerate scales with torch's scaler, nothing
            changes.
    """
    master = unwrapped(optimizer)
    if not isinstance(master, MasterWeights):
        return
    for accelerator in instances_of(Accelerator):
        is_its = any(prepared is optimizer for prepared in getattr(accelerator, "_optimizers", ()))
        if is_its and isinstance(accelerator.scaler, (GradScaler, type(None))):
            _CastwiseMethods(accelerator).clip_from(accelerator)
    for model in instances_of(DistributedDataParallel):
        if any(owner_of(param) is master for param in model.parameters()):  # Accelerate keeps the model inside it
            sum_over_ranks(model)


def _check_preparable(accelerator: Any) -> None:
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator must be an accelerate.Accelerator, got {type(accelerator).__name__}")
    if isinstance(getattr(accelerator.autocast, "__self__", None), _CastwiseMethods):
        raise RuntimeError("this accelerator already uses castwise: call prepare() only once")
    prepared = [*accelerator._models, *accelerator._optimizers]
    if prepared:
        names = ", ".join(type(getattr(each, "optimizer", each)).__name__ for each in prepared)
        raise RuntimeError(
            f"this accelerator has already prepared {names}, which would keep Accelerate's own scaler and autocast: "
            "call castwise.integrations.accelerate.prepare(accelerator) before accelerator.prepare(...)"
        )
    if accelerator.mixed_precision == "fp8" or accelerator.distributed_type in _UNSUPPORTED:
        given = f"{accelerator.distributed_type} and mixed_precision={accelerator.mixed_precision!r}"
        raise ValueError(
            f"with {given} another library handles mixed precision, which castwise does not replace: remove the call "
            "to castwise's prepare()"
        )


def _scaler_for(accelerator: Accelerator, schedule: Schedule | None) -> GradScaler:
    handler, device = accelerator.scaler_handler, accelerator.device.type
    settings = {} if handler is None else handler.to_kwargs()
    scaler: _Scaler
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        scaler = _sharded()(device, schedule=schedule, **settings)
    else:
        # Each rank checks only its part of split parameters; under DDP all ranks check the same gradients.
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
    on_nonfinite: Literal["diagnose"] | None = None,
    snapshots: bool = False,
) -> Monitor:
    """Record the numerics of a training run, and write `report.html` when it ends.

    Call once, on all processes, after `accelerator.prepare` has prepared the model and its optimizers. The run ends
    with `accelerator.end_training()`, which also prints a summary of the report. If the script fails earlier, its
    records remain, for `castwise report folder`.

    Args:
        accelerator: An accelerator set up with `prepare`; without a scaler (bf16, fp32), any accelerator.
        folder: Folder for the records (`monitor.jsonl.gz`) and the report.
        every: Steps between two samples, >= 1.
        on_nonfinite: `"diagnose"` replays the batch of a step with an inf or NaN; see `Monitor`.
        snapshots: Whether to keep weights of earlier steps for that, which in bf16 on an accelerator needs them.

    Returns:
        The monitor, for example to set its `step`, because Accelerate does not count steps.

    Raises:
        FileExistsError: See `Monitor`.
        RuntimeError: The accelerator has not prepared exactly one model and its optimizers.
        TypeError: The accelerator's scaler is torch's.
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
            "accelerator.prepare(model, optimizer), and with several models create a castwise.Monitor for each"
        )
    sink = JSONL(folder)
    monitor = Monitor(
        models[0],
        optimizers,
        accelerator.scaler,
        every=every,
        sinks=[sink],
        on_nonfinite=on_nonfinite,
        snapshots=snapshots,
    ).attach()
    theirs = accelerator.end_training

    def end_training() -> None:
        accelerator.end_training = theirs
        monitor.detach()  # on all processes, before the process group is destroyed
        if accelerator.is_main_process:
            end_and_summarize([sink.path], sink.path.parent / _PAGE)  # beside the folder if another run records there
        theirs()

    accelerator.end_training = end_training
    return monitor


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside Accelerate's wrapper.

    Args:
        optimizer: A prepared optimizer. Any other is returned unchanged.
    """
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    inner: torch.optim.Optimizer = optimizer
    return inner


class _Scaler(GradScaler):
    """A scaler for callers that call `update` after each of several optimizers."""

    prepared: Callable[[], list[torch.optim.Optimizer]] = staticmethod(list)
    """Returns all optimizers that the scaler steps."""
    _stepped: tuple[torch.optim.Optimizer, ...] = ()
    _is_update_due = False

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self.has_stepped(optimizer):
            self._update_if_due()
        returned = super().step(optimizer, *args, **kwargs)
        self._stepped = (*self._stepped, optimizer)
        return returned

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if new_scale is None and self._others_have_gradients():
            self._is_update_due = True
        else:
            self._stepped, self._is_update_due = (), False
            super().update(new_scale)

    def has_stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if an optimizer has stepped in the current iteration."""
        return any(optimizer is each for each in self._stepped)

    def _others_have_gradients(self) -> bool:
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
    from castwise.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # imports all of FSDP

    return type("_ShardedScaler", (_Scaler, ShardedGradScaler), {})


class _Optimizer(AcceleratedOptimizer):  # type: ignore[misc]  # Accelerate has no types
    """A prepared optimizer that also reports skips decided inside the optimizer's own step."""

    _skipped: torch.Tensor | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        super().step(closure)
        is_decided_within = closure is not None or getattr(self.optimizer, UNSCALES_IN_STEP, False)
        self._skipped = self.scaler.step_skipped if is_decided_within else None

    @property
    def step_was_skipped(self) -> bool:
        was_skipped = super().step_was_skipped if self._skipped is None else self._skipped
        return bool(was_skipped)


class _CastwiseMethods:
    """Replacements for an accelerator's methods of the same names. The originals are on its class."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._theirs = accelerator, type(accelerator)

    def clip_from(self, accelerator: Accelerator) -> None:
        accelerator.clip_grad_norm_, accelerator.clip_grad_value_ = self.clip_grad_norm_, self.clip_grad_value_

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Any:
        handler = self._accelerator.autocast_handler if autocast_handler is None else autocast_handler
        region = _region(self._accelerator.native_amp, handler)
        return region if isinstance(region, autocast) else self._theirs.autocast(self._accelerator, autocast_handler)

    def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
        with _castwise_regions():
            prepared = self._theirs.prepare_model(self._accelerator, *args, **kwargs)
        sum_over_ranks(prepared)
        return prepared

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
        parameters = listed(parameters)
        optimizer = self._owner_of(parameters)
        if optimizer is not None:
            return self._accelerator.scaler.clip_grad_norm_(optimizer, max_norm, norm_type)
        self._unscale_for_step(parameters)
        norm = parameter_clipping.clip_grad_norm_(parameters, max_norm, norm_type)
        if norm is None:
            norm = self._theirs.clip_grad_norm_(self._accelerator, parameters, max_norm, norm_type)
        return norm

    def clip_grad_value_(self, parameters: _Parameters, clip_value: float) -> None:
        parameters = listed(parameters)
        optimizer = self._owner_of(parameters)
        if optimizer is not None:
            self._accelerator.scaler.clip_grad_value_(optimizer, clip_value)
            return
        self._unscale_for_step(parameters)
        if not parameter_clipping.clip_grad_value_(parameters, clip_value):
            self._theirs.clip_grad_value_(self._accelerator, parameters, clip_value)

    def _unscale_for_step(self, parameters: list[torch.Tensor]) -> None:
        """Unscale gradients, as Accelerate does before clipping, if a `MasterWeights` clips some of these."""
        if self._has_scaler() and parameter_clipping.is_in_step(parameters):
            self.unscale_gradients()

    def _has_scaler(self) -> bool:
        scaler = self._accelerator.scaler
        return scaler is not None and scaler.is_enabled()

    def _owner_of(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer | None:
        """Return the optimizer that has exactly these gradients, if there is an enabled scaler."""
        if not self._has_scaler():
            return None
        wanted = _with_gradients(parameters)
        return next((each for each in self._prepared() if _with_gradients(params_of(each)) == wanted), None)

    def _prepared(self) -> list[torch.optim.Optimizer]:
        return [unwrapped(optimizer) for optimizer in self._accelerator._optimizers]


def _with_gradients(parameters: Iterable[torch.Tensor]) -> set[int]:
    return {id(param) for param in parameters if param.grad is not None}


def _region(native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None) -> Any:
    """Return a castwise region instead of Accelerate's, if that is an autocast region."""
    theirs = get_mixed_precision_context_manager(native_amp, autocast_kwargs)
    if not isinstance(theirs, torch.autocast):
        return theirs
    settings = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    return autocast(theirs.device, theirs.fast_dtype, **settings)


@contextmanager
def _castwise_regions() -> Iterator[None]:
    """Make Accelerate wrap a model's forward in a castwise region, by replacing the function that returns one."""
    of_accelerate.get_mixed_precision_context_manager = _region
    try:
        yield
    finally:
        of_accelerate.get_mixed_precision_context_manager = get_mixed_precision_context_manager
