"""Replace torch's mixed-precision names with castwise's, and restore them."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import warnings
from contextlib import suppress
from enum import Enum
from typing import Any

import torch

from castwise._guard import ErrorBoundary
from castwise._installation.settings import Settings
from castwise._layered_functions import CHECKPOINT, CLIP_GRAD_NORM, CLIP_GRAD_VALUE
from castwise._mistakes.mistake import Place, caller
from castwise._mistakes.watch import WATCH
from castwise._torch_private import load_compiler
from castwise.amp._observers import OBSERVERS
from castwise.amp.autocast_mode import autocast
from castwise.amp.grad_scaler import GradScaler
from castwise.diagnosis._forward_state import RandomState
from castwise.master_weights import _parameter_clipping as parameter_clipping
from castwise.master_weights._master_weights import has_owners
from castwise.master_weights._parameter_clipping import listed

# Names in torch's modules; castwise has the same names in the same submodules.
_NAMES = {
    "": ("autocast", "GradScaler"),
    "amp": ("autocast", "custom_fwd", "custom_bwd", "is_autocast_available", "GradScaler"),
    "amp.autocast_mode": ("autocast", "custom_fwd", "custom_bwd", "is_autocast_available"),
    "amp.grad_scaler": ("GradScaler", "OptState"),
    "cuda.amp": ("autocast", "custom_fwd", "custom_bwd", "GradScaler"),
    "cuda.amp.autocast_mode": ("autocast", "custom_fwd", "custom_bwd"),
    "cuda.amp.grad_scaler": ("GradScaler", "OptState"),
    "cpu.amp": ("autocast", "GradScaler"),
    "cpu.amp.autocast_mode": ("autocast",),
    "cpu.amp.grad_scaler": ("GradScaler",),
    "distributed.fsdp.sharded_grad_scaler": ("ShardedGradScaler", "OptState"),
}
_NAMED = 8


class Replacement:
    """One replacement, which can be undone.

    Args:
        settings: Settings for the new classes.
    """

    def __init__(self, settings: Settings) -> None:
        load_compiler()
        self._places: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._new: dict[int, Any] = {}
        self._old: list[Any] = []  # kept alive so that ids stay unique
        for module, names in _NAMES.items():
            if module.startswith("distributed") and not torch.distributed.is_available():
                continue
            torchs = importlib.import_module(".".join(filter(None, ["torch", module])))
            castwises = importlib.import_module(".".join(filter(None, ["castwise", module])))
            for name in names:
                old = getattr(torchs, name)
                if id(old) not in self._new:
                    self._old.append(old)
                    self._new[id(old)] = settings.applied_to(getattr(castwises, name))
                self._places.append((vars(torchs), name, old, self._new[id(old)]))
        for name, observed in (("save", _observed_save), ("load", _observed_load)):
            old = getattr(torch, name)
            self._old.append(old)
            self._new[id(old)] = observed(old)
            for module_of_files in (torch, torch.serialization):
                self._places.append((vars(module_of_files), name, old, self._new[id(old)]))
        self._settings = settings
        self._step = torch.optim.lr_scheduler.LRScheduler.step
        self._load_state_dict = torch.optim.Optimizer.load_state_dict

    def put_in_place(self) -> None:
        """Replace the names in torch, and in all modules that imported them."""
        for function, layer in _LAYERS:
            function.add(layer)
            self._old.append(function.original)
            self._new[id(function.original)] = function.function
        for name, module in list(sys.modules.items()):
            if _is_of(name, "torch") or _is_of(name, "castwise") or not hasattr(module, "__dict__"):
                continue
            namespace = vars(module)
            if self._new.keys().isdisjoint(map(id, list(namespace.values()))):  # true of nearly all of thousands
                continue
            for key, value in list(namespace.items()):
                if id(value) in self._new:
                    self._places.append((namespace, key, value, self._new[id(value)]))
        for namespace, key, _, new in self._places:
            namespace[key] = new
        torch.optim.lr_scheduler.LRScheduler.step = _Observed(self._step)  # type: ignore[method-assign,assignment]  # on purpose
        torch.optim.Optimizer.load_state_dict = _observed_load_state_dict(self._load_state_dict)  # type: ignore[method-assign]  # on purpose

    def undo(self) -> None:
        """Restore the old values, except where a name was changed since."""
        torch.optim.lr_scheduler.LRScheduler.step = self._step  # type: ignore[method-assign]  # on purpose
        torch.optim.Optimizer.load_state_dict = self._load_state_dict  # type: ignore[method-assign]  # on purpose
        for namespace, key, old, new in reversed(self._places):
            if namespace.get(key) is new:
                namespace[key] = old
        for function, layer in _LAYERS:
            function.remove(layer)
        self._settings.forget()

    def warn_about_unreplaced(self) -> None:
        """Warn about existing subclasses and objects of torch's classes."""
        classes = tuple(old for old in self._old if isinstance(old, type) and not issubclass(old, Enum))
        made = set(map(type, gc.get_objects()))
        subclasses = {f"the class {_full_name(cls)}" for cls in _subclasses(classes) if cls not in classes}
        objects = {f"an object of {_full_name(cls)}" for cls in made if _is_torchs(cls, classes)}
        left = sorted(subclasses) + sorted(objects)
        if left:
            more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
            place = caller() or Place("<unknown>", 0)
            text = (
                f"not replaced by castwise, because they already existed: {', '.join(left[:_NAMED])}{more}. "
                "Install castwise before importing the modules that create them"
            )
            with suppress(UserWarning):  # where warnings are errors
                warnings.warn_explicit(text, UserWarning, place.file, place.line)


class _Observed:
    """`LRScheduler.step` that notifies the watch when it is looked up.

    The lookup returns torch's own method, so the call adds no frame and warnings point to the same line as without
    castwise.
    """

    def __init__(self, step: Any) -> None:
        self._step = step

    def __get__(self, scheduler: Any, owner: type) -> Any:
        if scheduler is None:
            return self._step
        if isinstance(getattr(scheduler, "optimizer", None), torch.optim.Optimizer):
            WATCH.advanced(scheduler.optimizer)
        return self._step.__get__(scheduler, owner)


def _observed_save(save: Any) -> Any:
    """Return a `torch.save` that notifies the observers."""

    @functools.wraps(save)
    def observed(*args: Any, **kwargs: Any) -> Any:
        saved, path = args[0] if args else kwargs.get("obj"), args[1] if len(args) > 1 else kwargs.get("f")
        for observer in tuple(OBSERVERS):
            observer.file_saved(saved)
        result = save(*args, **kwargs)
        for observer in tuple(OBSERVERS):
            observer.file_written(saved, path)
        return result

    return observed


def _observed_load(load: Any) -> Any:
    """Return a `torch.load` that notifies the observers."""

    @functools.wraps(load)
    def observed(*args: Any, **kwargs: Any) -> Any:
        for observer in tuple(OBSERVERS):
            observer.file_read(args[0] if args else kwargs.get("f"))
        return load(*args, **kwargs)

    return observed


def _observed_load_state_dict(load_state_dict: Any) -> Any:
    """Return an `Optimizer.load_state_dict` that notifies the watch."""

    @functools.wraps(load_state_dict)
    def observed(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        load_state_dict(optimizer, state_dict)
        for observer in tuple(OBSERVERS):
            observer.state_loaded(optimizer, state_dict)

    return observed


def _clip_grad_norm_in_step(
    clip_grad_norm_: Any,
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Leave clipping to `MasterWeights`, if the parameters are of one."""
    norm: torch.Tensor | None = None
    if has_owners():
        parameters = listed(parameters)
        norm = parameter_clipping.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    if norm is None:
        norm = clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    return norm


def _clip_grad_value_in_step(
    clip_grad_value_: Any, parameters: Any, clip_value: float, foreach: bool | None = None
) -> None:
    """Leave clipping to `MasterWeights`, if the parameters are of one."""
    if has_owners():
        parameters = listed(parameters)
        if parameter_clipping.clip_grad_value_(parameters, clip_value):
            return
    clip_grad_value_(parameters, clip_value, foreach)


def _observed_checkpoint(checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
    """Notify the watch of a forward that has drawn random numbers, and will draw others when it is computed again."""
    is_left_out = kwargs.get("preserve_rng_state", True) or "context_fn" in kwargs or not torch.is_grad_enabled()
    before = None if is_left_out or not WATCH.is_looking else _GUARD.call(RandomState, outside_torch=False)
    result = checkpoint(*args, **kwargs)
    if before is not None and _GUARD.call(before.is_current) is False:
        WATCH.will_draw_again()
    return result


_GUARD = ErrorBoundary()
_LAYERS = (
    (CHECKPOINT, _observed_checkpoint),
    (CLIP_GRAD_NORM, _clip_grad_norm_in_step),
    (CLIP_GRAD_VALUE, _clip_grad_value_in_step),
)


def _is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_torchs(cls: type, classes: tuple[type, ...]) -> bool:
    return issubclass(cls, classes) and not issubclass(cls, (autocast, GradScaler))


def _subclasses(classes: tuple[type, ...]) -> set[type]:
    found: set[type] = set()
    waiting: list[type] = list(classes)
    while waiting:
        derived: list[type] = type.__subclasses__(waiting.pop())
        for cls in derived:
            if cls not in found and not _is_of(cls.__module__, "castwise"):
                found.add(cls)
                waiting.append(cls)
    return {cls for cls in found if not _is_of(cls.__module__, "torch") and _is_torchs(cls, classes)}
