"""Steps that evaluate the loss several times: every evaluation counts, or none."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from castwise.amp.gradients import params_of


class NonFiniteEvaluationError(Exception):
    """Ends a step from inside its closure."""


def closure_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among the arguments of `optimizer.step`, its first one, if there is one."""
    closure = kwargs.get("closure", args[0] if args else None)
    return closure if callable(closure) else None


def with_closure(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], closure: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `optimizer.step` with another closure in the place of theirs."""
    return (args, {**kwargs, "closure": closure}) if "closure" in kwargs else ((closure, *args[1:]), dict(kwargs))


def is_finite(loss: object) -> bool:
    """Say whether what a closure returned may be a loss: false for inf and NaN alone."""
    if isinstance(loss, torch.Tensor):
        return bool(loss.isfinite().all())
    return not isinstance(loss, float) or math.isfinite(loss)


@contextmanager
def put_back_on_error(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put an optimizer's parameters, state and settings back to what they were if the body raises.

    Takes the memory of a copy of the parameters and the state.
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
