"""Code around `optimizer.step`: closures, whose evaluations all count or none, and attributes for fused steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from castwise.amp._gradients import params_of


class NonFiniteEvaluationError(Exception):
    """Raised in a closure to end its step."""


def closure_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return the closure from the arguments of `optimizer.step`, of which it is the first, or None."""
    closure = kwargs.get("closure", args[0] if args else None)
    return closure if callable(closure) else None


def with_closure(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], closure: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `optimizer.step` with the closure replaced."""
    return (args, {**kwargs, "closure": closure}) if "closure" in kwargs else ((closure, *args[1:]), dict(kwargs))


def is_finite(loss: object) -> bool:
    """Return False if the loss that a closure returned is inf or NaN."""
    if isinstance(loss, torch.Tensor):
        return bool(loss.isfinite().all())
    return not isinstance(loss, float) or math.isfinite(loss)


@contextmanager
def put_back_on_error(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore an optimizer's parameters, state and settings if the block raises.

    This needs memory for a copy of the parameters and the state.
    """
    params = params_of(optimizer)
    values = [param.detach().clone() for param in params]
    state = {param: copy.deepcopy(of_param) for param, of_param in optimizer.state.items()}
    settings = [dict(group) for group in optimizer.param_groups]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for param, value in zip(params, values, strict=True):
                param.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.update(before)
        raise


@contextmanager
def temporary_attributes(optimizer: torch.optim.Optimizer, **attributes: torch.Tensor | None) -> Iterator[None]:
    """Set attributes of an optimizer for its step and remove them afterwards; if it raises, restore the old values."""
    before = {name: getattr(optimizer, name) for name in attributes if hasattr(optimizer, name)}
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    try:
        yield
    except BaseException:
        for name in attributes:
            delattr(optimizer, name)
        for name, value in before.items():
            setattr(optimizer, name, value)
        raise
    for name in attributes:  # as in torch, the step uses up a grad_scale that the user has set
        delattr(optimizer, name)


@contextmanager
def no_momentum_of_a_skipped_step(optimizer: torch.optim.SGD, found_inf: torch.Tensor) -> Iterator[None]:
    """Work around torch 2.13: if the first step of a fused SGD is skipped, later steps use uninitialised momentum.

    On a CPU, call this only if the step is skipped.
    """
    params = [param for param in params_of(optimizer) if optimizer.state.get(param, {}).get("momentum_buffer") is None]
    yield
    for param in params:
        made = optimizer.state.get(param, {}).get("momentum_buffer")
        if made is None:
            continue
        if found_inf.device.type == "cpu":
            del optimizer.state[param]["momentum_buffer"]
        else:
            made.masked_fill_(found_inf.to(made.device, non_blocking=True) != 0, 0.0)
