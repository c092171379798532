"""torch's own words for a mistake, which programs match: the beginning of a warning or error, and its class.

They are asked of torch when the mistake is already known, so that they are those of the installed release: torch's code
is given the same arguments, or an object of torch's in the same state. That changes nothing of the caller's, and warns
of nothing. Where torch sees no mistake, castwise's words stand alone.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.autocast_mode import autocast_decorator
from torch.amp.grad_scaler import OptState

from castwise._torch_private import run_while_tracing, unscales_in_step

# `castwise.install` replaces the names in torch, so torch's classes are kept here.
_REGION, _SCALER = torch.autocast, torch.amp.GradScaler

_DECORATED: Any = autocast_decorator(None, len)  # type: ignore[no-untyped-call]  # torch's
MARKS = {name: value for name, value in vars(_DECORATED).items() if name != "__wrapped__"}
"""The attributes of a function that a region decorates: TorchScript looks for one, and raises its value."""


def error(ours: Exception, judge: Callable[[], object]) -> Exception:
    """Return castwise's error with torch's words before its own, which handlers of torch's class also catch.

    Args:
        ours: The error without torch's words.
        judge: Calls torch, which should raise.
    """
    try:
        judge()
    except Exception as torchs:
        return _class_of_both(type(ours), type(torchs))(_joined(str(torchs), str(ours)))
    return ours


def region(*arguments: Any) -> torch.autocast:
    """Return a region of torch's own, without the warnings of its constructor; without arguments, an empty one."""
    made = object.__new__(_REGION)
    if arguments:
        _with_warnings_to([], _REGION.__init__)(made, *arguments)
    return made


def switch(setter: Callable[..., None], getter: Callable[..., Any], *arguments: Any) -> None:
    """Set a switch of the thread's autocast state with a function of torch's, which should raise; put it back."""
    before = getter(*arguments[:-1])
    try:
        setter(*arguments)
    finally:
        setter(*arguments[:-1], before)


def scaler(*numbers: Any, stage: OptState | None = None, **attributes: Any) -> torch.amp.GradScaler:
    """Return a scaler of torch's own on the CPU.

    Args:
        *numbers: The arguments of its constructor after the device.
        stage: If given, it has a scale, and every optimizer is at this stage.
        **attributes: Attributes to set.
    """
    made = _SCALER("cpu", *numbers)
    if stage is not None:
        made._lazy_init_scale_growth_tracker(torch.device("cpu"))
        made._per_optimizer_states = defaultdict(lambda: {"stage": stage, "found_inf_per_device": {}})
    vars(made).update(attributes)
    return made


def unscale(param: object) -> None:
    """Unscale one parameter with a scaler of torch's own, which should raise."""
    optimizer: Any = types.SimpleNamespace(param_groups=[{"params": [param]}])
    scaler()._unscale_grads_(optimizer, torch.ones(()), torch.zeros(()), False)


@run_while_tracing
def warning_of_region(ours: str, device_type: str, dtype: torch.dtype) -> str:
    """Return the warning of a region that is disabled, with torch's words before castwise's."""
    return _warning(ours, _REGION.__init__, region(), device_type, dtype)


def warning_of_scaler(ours: str, device: str) -> str:
    """Return the warning of a scaler that disables itself, with torch's words before castwise's."""
    return _warning(ours, _SCALER.__init__, object.__new__(_SCALER), device)


def warning_of_step(ours: str) -> str:
    """Return the warning of an optimizer that takes the scaler, with torch's words before castwise's."""
    return _warning(ours, _SCALER.step, scaler(stage=OptState.READY), _TakesScaler())


@unscales_in_step
class _TakesScaler:
    def step(self, grad_scaler: object = None) -> None:
        pass


def _warning(ours: str, function: Any, *arguments: Any) -> str:
    messages: list[str] = []
    _with_warnings_to(messages, function)(*arguments)
    return _joined(messages[0], ours) if messages else ours


def _with_warnings_to(messages: list[str], function: Any) -> Callable[..., object]:
    """Return a copy of torch's function that warns into a list; `catch_warnings` would reset those of all threads."""
    recorder = types.SimpleNamespace(warn=lambda message, *_, **__: messages.append(str(message)))
    names = {**function.__globals__, "warnings": recorder}
    return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def _joined(torchs: str, ours: str) -> str:
    between = "\n" if "\n" in torchs else " " if torchs.endswith(".") else ": "
    return f"{torchs}{between}{ours}"


def _class_of_both(ours: type[Exception], torchs: type[Exception]) -> type[Exception]:
    """Return castwise's class, or one that is also derived from torch's but has its name."""
    if issubclass(ours, torchs):
        return ours

    def reduce(self: Exception) -> Any:
        return _unpickled, (ours, torchs, *self.args)

    names = {"__module__": ours.__module__, "__reduce__": reduce, "__str__": ours.__str__}  # a KeyError's has quotes
    return type(ours.__name__, (ours, torchs), names)


def _unpickled(ours: type[Exception], torchs: type[Exception], *arguments: Any) -> Exception:
    return _class_of_both(ours, torchs)(*arguments)
