"""Settings that `install` applies to all regions and scalers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from castwise._installation.models import Models, model_with
from castwise._torch_private import never_traced
from castwise._warnings import warn
from castwise.amp._schedules import Schedule
from castwise.amp.autocast_mode import autocast
from castwise.amp.grad_scaler import GradScaler
from castwise.policy._bound_policy import BoundPolicy
from castwise.policy._policy import Policy
from castwise.weights._weight_cache import WeightCache


class Settings:
    """A policy, a schedule and a weight cache.

    Args:
        policy: Policy of all regions.
        schedule: Schedule of all scalers.
        weight_cache: Whether all regions use a weight cache.

    Raises:
        TypeError: The policy or the schedule has the wrong type.
    """

    def __init__(self, policy: Policy | None, schedule: Schedule | None, weight_cache: bool) -> None:
        if policy is not None and not isinstance(policy, Policy):
            raise TypeError(f"policy must be a castwise.Policy or None, got {type(policy).__name__}")
        if schedule is not None and (not isinstance(schedule, Schedule) or type(schedule) is Schedule):
            raise TypeError(f"schedule must be one of castwise.schedules or None, got {schedule!r}")
        self.policy, self.schedule, self.weight_cache = policy, schedule, weight_cache
        self._model: nn.Module | None = None
        self._bound: BoundPolicy | None = None
        self._cache: WeightCache | None = None
        self._is_bound = False
        self._has_scheduled = False
        self._instead: dict[type[Any], type[Any]] = {}  # of castwise's classes for all devices
        if policy is not None or weight_cache:
            self._instead[autocast] = _region(self)
        if schedule is not None:
            self._instead[GradScaler] = _scaler(schedule, self._note_scheduled)

    @property
    def notes(self) -> list[str]:
        """Messages about settings that had no effect."""
        if self.schedule is None or self._has_scheduled:
            return []
        return [f"the schedule {self.schedule} had no effect: the script created no enabled torch GradScaler"]

    def applied_to(self, new: Any) -> Any:
        """Return the replacement for a class or function of torch: `new`, or a subclass that applies the settings."""
        if not isinstance(new, type):
            return new
        for base, derived in self._instead.items():
            if issubclass(new, base):  # as with torch, classes for one device are derived from those for all
                return derived if new is base else _derived(new, {}, derived)
        return new

    def _note_scheduled(self) -> None:
        self._has_scheduled = True

    @never_traced  # in a region around a compiled function
    def apply(self, region: Any) -> None:
        """Apply the policy and the weight cache to a region before it is entered, if it is enabled."""
        if not region._enabled or region._policy is not None:
            return
        if not self._is_bound:
            self._bind()
        of_region = next(iter(region._extensions), None)  # a weight cache, because the region has no policy
        region._extend(self._bound, of_region if self._cache is None else self._cache)

    def _bind(self) -> None:
        self._is_bound = True
        self._model = model_with()
        if self._model is not None and self.policy is not None:
            if isinstance(self._model, Models) and self.policy.output is not None:
                warn(
                    "the policy's output has no effect, because there are several models and none contains the others",
                    UserWarning,
                )
            self._bound = self.policy.bind(self._model)
        if self._model is not None and self.weight_cache:
            self._cache = WeightCache(self._model)

    def forget(self) -> None:
        """Unbind the policy and drop the weight cache."""
        if self._bound is not None:
            self._bound.unbind()
        self._bound = self._cache = self._model = None
        self._is_bound = False


def _region(settings: Settings) -> type[autocast]:
    enter_base: Callable[[Any], Any] = autocast.__enter__  # looked up here: Dynamo of torch 2.11 finds `enter` instead

    def enter(self: Any) -> Any:
        if is_dynamo_compiling():  # which cannot trace `Settings`, not even as a variable of this function
            warn("the policy and the weight cache do not apply to regions inside compiled code", UserWarning)
        else:
            self._settings.apply(self)
        return enter_base(self)

    region: type[autocast] = _derived(autocast, {"__enter__": enter, "_settings": settings})
    return region


def _scaler(schedule: Schedule, note_scheduled: Callable[[], None]) -> type[GradScaler]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        GradScaler.__init__(self, *args, **kwargs)
        if self.is_enabled():
            self._adopt(schedule)
            note_scheduled()
            if self._agreement is not None:
                self._set_agreement(self._agreement)

    scaler: type[GradScaler] = _derived(GradScaler, {"__init__": init})
    return scaler


def _derived(base: Any, namespace: dict[str, Any], *more: type[Any]) -> Any:
    """Return a class derived from `base`, and from `more`, whose objects are pickled as objects of `base`."""

    def reduce(self: Any, protocol: int) -> Any:
        _, _, *state = base.__reduce_ex__(self, protocol)
        return _unpickled, (base,), *state

    names = {"__module__": base.__module__, "__doc__": base.__doc__, "__reduce_ex__": reduce}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's deprecated classes warn when a subclass is defined
        return type(base.__name__, (base, *more), names | namespace)


def _unpickled(base: Any) -> Any:
    """Return an object of the class that torch's name has now, which may be derived from `base`."""
    torchs = getattr(sys.modules.get("torch" + base.__module__.removeprefix("castwise")), base.__name__, base)
    cls = torchs if issubclass(torchs, base) else base
    return cls.__new__(cls)
