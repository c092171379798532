"""How an optimizer may be called: parameters in parts, one by one, or all at once."""

from __future__ import annotations

import copy
from collections import defaultdict
from enum import Enum

import torch
from torch import optim


class Reach(Enum):
    """What an optimizer must see at once."""

    ELEMENT = "element"
    """Each element is stepped by itself: a parameter may be cut."""
    PARAMETER = "parameter"
    """Each parameter is stepped by itself."""
    ALL = "all"
    """Anything may depend on anything, as where state is kept in a group: one call for all."""


# Tested in tests/master_weights/test_master_weights.py, each against one call for all.
_BY_ELEMENT = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
)
_BY_PARAMETER = tuple(
    getattr(optim, name)
    for name in ("Adafactor", "Muon")
    if hasattr(optim, name)  # Muon came with torch 2.9
)


def reach_of(optimizer: optim.Optimizer) -> Reach:
    """Return how an optimizer may be called. A subclass may do anything."""
    if type(optimizer) in _BY_ELEMENT:
        return Reach.ELEMENT
    return Reach.PARAMETER if type(optimizer) in _BY_PARAMETER else Reach.ALL


def check(optimizer: object) -> None:
    """Raise a TypeError or ValueError unless an optimizer can be lent weights."""
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(f"MasterWeights wraps a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, optim.LBFGS):
        raise TypeError("MasterWeights cannot wrap LBFGS: its closure computes with the weights while it steps")
    if isinstance(optimizer, optim.SparseAdam):
        raise TypeError("MasterWeights cannot wrap SparseAdam: sparse gradients keep fp32 weights; step it beside")
    inside = [name for name, value in vars(optimizer).items() if isinstance(value, optim.Optimizer)]
    if inside:
        raise TypeError(
            f"{type(optimizer).__name__} steps the optimizer that it keeps in {inside[0]!r}, which has the parameters: "
            "give MasterWeights that one"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("MasterWeights cannot wrap a differentiable optimizer: autograd does not see lent weights")


def step_without_hooks(optimizer: optim.Optimizer) -> object:
    """Call an optimizer's `step` without its hooks, which are called once around all calls."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]  # torch wraps it with functools.wraps
    returned: object = step(optimizer)
    return returned


def note_stepped(optimizer: optim.Optimizer) -> None:
    """Tell learning-rate schedulers made for an optimizer before it was wrapped that it was stepped."""
    if "step" in vars(optimizer):  # they have put their own around it, which is not called
        optimizer._opt_called = True  # type: ignore[attr-defined]  # theirs


def state_names(optimizer: optim.Optimizer) -> set[str] | None:
    """Return the names of state that has the shape of its weight, found by one step on a weight made for it.

    None if it cannot step now, as schedule-free optimizers cannot before `train()`.
    """
    probe = copy.copy(optimizer)
    device = next((param.device for group in optimizer.param_groups for param in group["params"]), None)
    weight = torch.zeros(2, 3, device=device)
    weight.grad = torch.zeros(2, 3, device=device)
    probe.state = defaultdict(dict)
    probe.param_groups = [
        {**group, "params": [weight] if index == 0 else []} for index, group in enumerate(optimizer.param_groups)
    ]
    try:
        with torch.no_grad():
            step_without_hooks(probe)
    except Exception:  # of any optimizer
        return None
    return {
        str(name)
        for name, value in probe.state[weight].items()
        if isinstance(value, torch.Tensor) and value.shape == weight.shape
    }
