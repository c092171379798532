"""How an optimizer may be called: with parts of parameters, single parameters, or all at once."""

from __future__ import annotations

import copy
import importlib.util
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import optim

MOMENTS = "exp_avg", "exp_avg_sq"
"""Names of Adam's state with the shape of its weights."""


class Reach(Enum):
    """What an optimizer must get in one call."""

    ELEMENT = "element"
    """Steps each element independently, so a parameter may be split."""
    PARAMETER = "parameter"
    """Steps each parameter independently."""
    ALL = "all"
    """May combine parameters, for example with state in a group, so it needs one call for all."""


# Each is tested in tests/master_weights/test_master_weights.py against one call for all.
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
    """Return how an optimizer may be called; ALL for subclasses, which may do anything."""
    if type(optimizer) in _BY_ELEMENT:
        return Reach.ELEMENT
    return Reach.PARAMETER if type(optimizer) in _BY_PARAMETER else Reach.ALL


def check(optimizer: object) -> None:
    """Raise a TypeError or ValueError if `MasterWeights` cannot wrap an optimizer."""
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(f"MasterWeights wraps a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, optim.LBFGS):
        raise TypeError("MasterWeights cannot wrap LBFGS: its closure runs the model in the middle of a step")
    if isinstance(optimizer, optim.SparseAdam):
        raise TypeError("MasterWeights cannot wrap SparseAdam: sparse gradients need fp32 weights; step it separately")
    inside = [name for name, value in vars(optimizer).items() if isinstance(value, optim.Optimizer)]
    if inside:
        raise TypeError(
            f"{type(optimizer).__name__} wraps the optimizer in its attribute {inside[0]!r}: give MasterWeights the "
            "inner optimizer"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("MasterWeights cannot wrap a differentiable optimizer: autograd does not see its fp32 weights")


def check_can_compile(
    optimizer: optim.Optimizer, dtype: torch.dtype, method: str, state_dtypes: Mapping[str, object], devices: set[str]
) -> None:
    """Raise a ValueError or ModuleNotFoundError unless `_compiled_step` can step an optimizer.

    Args:
        optimizer: The inner optimizer.
        dtype: Dtype of the 16-bit weights.
        method: Of `MasterWeights`.
        state_dtypes: Storage dtypes of state that is rounded stochastically, and anything else for other state.
        devices: Types of the devices of all parameters.
    """
    kinds = {state_dtypes.get(name, torch.float32) for name in MOMENTS}
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    given = ""
    if type(optimizer) not in (optim.AdamW, optim.Adam) or not is_fused:
        given = f"{type(optimizer).__name__}(fused={optimizer.defaults.get('fused')})"
    elif dtype is not torch.bfloat16 or method != "split":
        given = f'dtype={dtype}, method="{method}"'
    elif kinds not in ({torch.float32}, {torch.bfloat16}):
        given = f"state_dtype={dict(state_dtypes)}"
    elif devices != {"cpu"}:
        given = f"parameters on {', '.join(sorted(devices))}, where kernels are compiled without this argument"
    if given:
        raise ValueError(
            "compiled=True is for torch.optim.AdamW and Adam with fused=True on CPUs, with bfloat16 weights that are "
            f"split, and both moments in fp32, or both in bfloat16 rounded stochastically; got {given}"
        )
    if importlib.util.find_spec("numba") is None:
        raise ModuleNotFoundError("compiled=True needs numba: pip install 'castwise[compiled]'", name="numba")


def step_without_hooks(optimizer: optim.Optimizer) -> object:
    """Call an optimizer's `step` without its hooks, which run once around all calls."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]  # torch wraps it with functools.wraps
    returned: object = step(optimizer)
    return returned


def state_after_step(
    optimizer: optim.Optimizer, groups: Sequence[Mapping[str, Any]], *, largest: float = 0.0
) -> dict[Any, Any] | None:
    """Return the state that an optimizer creates for a weight of shape (2, 3) in one step.

    None if the optimizer cannot step now, like schedule-free optimizers before `train()`.

    Args:
        optimizer: The optimizer, which is not changed.
        groups: Settings of its groups. The weight is in the first.
        largest: The gradients range from minus this number to this number.
    """
    probe = copy.copy(optimizer)
    device = next((param.device for group in optimizer.param_groups for param in group["params"]), None)
    weight = torch.zeros(2, 3, device=device)
    weight.grad = torch.linspace(-largest, largest, 6, device=device).view(2, 3)
    probe.state = defaultdict(dict)
    probe.param_groups = [{**group, "params": [weight] if index == 0 else []} for index, group in enumerate(groups)]
    try:
        with torch.no_grad():
            step_without_hooks(probe)
    except Exception:  # an optimizer may raise anything
        return None
    state: dict[Any, Any] = probe.state[weight]
    return state


def state_names(optimizer: optim.Optimizer) -> set[str] | None:
    """Return the names of state with the shape of its weight; None if they are unknown, see `state_after_step`."""
    state = state_after_step(optimizer, optimizer.param_groups)
    if state is None:
        return None
    return {str(name) for name, value in state.items() if isinstance(value, torch.Tensor) and value.shape == (2, 3)}


def nonnegative_state(optimizer: optim.Optimizer) -> set[str]:
    """Return the names of state that gradients of either sign leave at 0 or above, such as second moments."""
    state = state_after_step(optimizer, optimizer.param_groups, largest=1.0) or {}
    tensors = {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name for name, value in tensors.items() if value.shape == (2, 3) and bool((value >= 0).all())}
