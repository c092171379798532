"""Losses of a `GradScaler`: the scale, what they are multiplied by, and how it is asked for and set.

Under `torch.compile` only `scale` is traced; all else of a scaler looks at optimizers and gradients as they are, and
runs eagerly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, overload

import torch
from torch.compiler import is_dynamo_compiling

from castwise._torch_private import are_functorch_transforms_active, never_traced
from castwise.amp import measuring
from castwise.amp.agreement import Agreement
from castwise.amp.checks import check_scale
from castwise.amp.devices import MultiDeviceReplicator
from castwise.amp.ledger import Ledger
from castwise.amp.observers import OBSERVERS
from castwise.amp.outcomes import Outcomes
from castwise.amp.schedules import Dynamic, Schedule, on_device


class ScaledLosses(torch.amp.GradScaler):
    """What a scaler multiplies losses by. The constructor is `GradScaler`'s."""

    _agreement: Agreement | None
    _rule: Schedule
    _init_trackers: dict[str, float]

    def _forget_device_state(self) -> None:
        self._scale: torch.Tensor | None = None
        self._growth_tracker: torch.Tensor | None = None
        self._trackers: dict[str, torch.Tensor] = {}
        self._unscaled = Ledger()
        self._outcomes = Outcomes()

    def _take(self, schedule: Schedule, trackers: Mapping[str, float] | None = None) -> None:
        self._rule = schedule
        self._init_scale = schedule.init_scale
        self._init_trackers = schedule.trackers() if trackers is None else dict(trackers)
        if isinstance(schedule, Dynamic):
            self._growth_factor = schedule.growth_factor
            self._backoff_factor = schedule.backoff_factor
            self._growth_interval = schedule.growth_interval

    def _schedule(self) -> Schedule:
        """Return the schedule, with the numbers that subclasses and frameworks may have set on the scaler."""
        rule = self._rule
        if isinstance(rule, Dynamic):
            now = (self._growth_factor, self._backoff_factor, self._growth_interval)
            if now != (rule.growth_factor, rule.backoff_factor, rule.growth_interval):
                growth_factor, backoff_factor, growth_interval = now
                self._rule = rule = dataclasses.replace(
                    rule, growth_factor=growth_factor, backoff_factor=backoff_factor, growth_interval=growth_interval
                )
        return rule

    @property
    def schedule(self) -> Schedule:
        """How the scale moves: what was given, or `schedules.Dynamic`."""
        return self._schedule()

    @property
    def agrees(self) -> bool:
        """Whether all ranks take and skip the same steps; False for a process group that leaves some of them out."""
        return self._agreement is not None and self._agreement.is_of_all_ranks()

    @property
    def iteration(self) -> int:
        """The number of the iteration under way: from 1, one more after each `update`, and anew in each process."""
        return self._outcomes.updates + 1

    @overload
    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...
    @overload
    def scale(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]: ...
    @overload
    def scale(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]: ...
    @overload
    def scale(self, outputs: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]: ...
    def scale(self, outputs: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor | Iterable[torch.Tensor]:
        """Multiply losses by the scale, on their own devices and without a sync.

        Args:
            outputs: A tensor of any shape, or an iterable of such (nested as you like).

        Returns:
            The products: lists, tuples and named tuples come back as what they were, other iterables as a generator.

        Raises:
            ValueError: There is something in `outputs` that is not a tensor.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            scale = self._scale_for(outputs)
            return self._watched(outputs, self._times(outputs, scale.to(device=outputs.device, non_blocking=True)))
        _refuse_what_is_no_loss(outputs)
        scaled: Iterable[torch.Tensor] = self._scale_all(outputs, [])
        return scaled

    def _scale_all(self, outputs: Any, copies: list[MultiDeviceReplicator]) -> Any:
        if isinstance(outputs, torch.Tensor):
            if not copies:
                copies.append(MultiDeviceReplicator(self._scale_for(outputs)))
            return self._watched(outputs, self._times(outputs, copies[0].get(outputs.device)))
        _refuse_what_is_no_loss(outputs)  # an iterator's outputs come to light only now
        scaled = (self._scale_all(output, copies) for output in outputs)
        if isinstance(outputs, tuple) and hasattr(outputs, "_make"):
            return outputs._make(scaled)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def _times(self, output: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return output * scale

    def _watched(self, loss: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
        """Let the ledger know of each backward that starts from a scaled loss, before it adds to any gradient."""
        if is_dynamo_compiling():
            self._unscaled.backward_is_hidden()
        elif are_functorch_transforms_active():
            self._unscaled.backward_starts()  # no hooks there; the backward comes after this call, at least
            return scaled
        elif scaled.requires_grad:
            self._unscaled.watch(scaled)
        self._outcomes.note_loss(loss)
        if not is_dynamo_compiling():
            for observer in OBSERVERS:
                observer.scaled(self, loss, scaled)
        return scaled

    def _scale_for(self, output: torch.Tensor) -> torch.Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        return self._made_scale()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise RuntimeError("the growth tracker exists already and the scale does not: set both or neither")
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)
        self._trackers = on_device(self._init_trackers, dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None and self._agreement is not None:
            # Of the stages of a pipeline only the last has a loss to scale.
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        if self._scale is None or self._growth_tracker is None:
            raise RuntimeError(
                f"{funcname}() needs a scale, which the first scale() makes: "
                "call scaler.scale(loss).backward() earlier in the iteration"
            )
        return self._scale, self._growth_tracker

    def _made_scale(self) -> torch.Tensor:
        """Return the scale where a public method has made sure that there is one."""
        assert self._scale is not None
        return self._scale

    def _inv_scale(self) -> torch.Tensor:
        scale = self._made_scale()
        # fp32 division may be approximate on some devices; mps has no fp64.
        return scale.to(measuring.wide(scale.device)).reciprocal().float()

    def _number(self, new_scale: float | torch.Tensor) -> float:
        if not isinstance(new_scale, torch.Tensor):
            return check_scale("new_scale", new_scale)
        if new_scale.numel() != 1 or new_scale.requires_grad or new_scale.device.type != self._device:
            raise TypeError(
                f"new_scale must be a number or a one-element tensor on {self._device} without requires_grad, "
                f"got {tuple(new_scale.shape)} on {new_scale.device.type}, requires_grad={new_scale.requires_grad}"
            )
        return check_scale("new_scale", new_scale.item())

    def _get_scale_async(self) -> torch.Tensor | None:
        return self._scale

    @never_traced
    def get_scale(self) -> float:
        """Return the scale as a Python number, which syncs with the device; 1.0 when disabled."""
        if not self._enabled:
            return 1.0
        self._unscaled.backward_may_start()  # of a loss that is scaled by hand with it
        for observer in OBSERVERS:
            observer.asked(self)
        scale = self._get_scale_async()
        return self._init_scale if scale is None else float(scale.item())

    def get_growth_factor(self) -> float:
        """Return what the scale is multiplied by when it grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by when it grows.

        Args:
            new_factor: Finite, > 1.

        Raises:
            TypeError: It is not a number.
            ValueError: It is out of its range.
            RuntimeError: The schedule has no such factor.
        """
        self._refuse_without("growth_factor")
        self._growth_factor = Dynamic(growth_factor=new_factor).growth_factor

    def get_backoff_factor(self) -> float:
        """Return what the scale is multiplied by after a skipped step."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by after a skipped step.

        Args:
            new_factor: In (0, 1).

        Raises:
            TypeError: It is not a number.
            ValueError: It is out of its range.
            RuntimeError: The schedule has no such factor.
        """
        self._refuse_without("backoff_factor")
        self._backoff_factor = Dynamic(backoff_factor=new_factor).backoff_factor

    def get_growth_interval(self) -> int:
        """Return the number of finite steps after which the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of finite steps after which the scale grows.

        Args:
            new_interval: Steps, >= 1.

        Raises:
            TypeError: It is not a whole number.
            ValueError: It is out of its range.
            RuntimeError: The schedule has no such interval.
        """
        self._refuse_without("growth_interval")
        self._growth_interval = Dynamic(growth_interval=new_interval).growth_interval

    def _refuse_without(self, name: str) -> None:
        if not hasattr(self._rule, name):
            raise RuntimeError(f"{self._rule} has no {name}: it would have no effect")

    @never_traced
    def _get_growth_tracker(self) -> int:
        if not self._enabled:
            return 0
        return self._init_growth_tracker if self._growth_tracker is None else int(self._growth_tracker.item())

    def _get_trackers(self) -> dict[str, float]:
        return {name: tracker.item() for name, tracker in self._trackers.items()} or dict(self._init_trackers)

    def is_enabled(self) -> bool:
        """Say whether this scaler scales; False also if it was made for CUDA where there is none."""
        return self._enabled


def _refuse_what_is_no_loss(outputs: object) -> None:
    if isinstance(outputs, torch.Tensor):
        return
    if not isinstance(outputs, Iterable) or isinstance(outputs, (str, bytes, Mapping)):
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, got {outputs!r}")
    if isinstance(outputs, (list, tuple)):
        for output in outputs:
            _refuse_what_is_no_loss(output)
