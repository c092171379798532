"""Lend fp32 weights, gradients and state to an optimizer for one call of its step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from castwise.master_weights.buckets import Bucket, Stretch, Workspace, laid_out_as, local


@dataclass(slots=True)
class LowState:
    """State that is stored in 16 bits and lent in fp32."""

    dtypes: dict[str, torch.dtype]
    """By name of the state."""
    nearest: set[str]
    """Names of state that is rounded to nearest, not by chance."""
    round: Callable[[torch.Tensor, torch.dtype, str], torch.Tensor]
    """Rounds fp32 numbers to a dtype by chance; given a name of its own for each tensor."""


@dataclass(slots=True, eq=False)
class Loan:
    """A stretch of a weight in fp32, with its gradient: what stands for the parameter in the optimizer."""

    stretch: Stretch
    stand_in: torch.Tensor
    grad: torch.Tensor | None
    """In the dtype of the parameter's gradient, laid out as the stand-in."""

    def is_part(self) -> bool:
        """Return True if other parts of the weight are lent by themselves."""
        return self.stretch.weight.is_cut()


def loans_of(bucket: Bucket, values: torch.Tensor, workspace: Workspace, *, all_: bool = False) -> list[Loan]:
    """Return loans of the stretches of which there is a gradient.

    Args:
        bucket: Whose.
        values: The fp32 weights, shape (bucket.length,).
        workspace: Has memory for fp32 gradients.
        all_: Also those without a gradient.
    """
    loans, copied_to, copied = [], [], []
    fp32_grads = workspace.get("grads", bucket.length, torch.float32, bucket.device)
    for stretch in bucket.stretches:
        param = stretch.weight.param
        like = stretch.of(local(param)) if stretch.weight.is_cut() else local(param)
        if param.grad is None:
            if all_:
                loans.append(Loan(stretch, as_dtensor(_shaped(stretch.in_bucket(values), like), param), None))
            continue
        grad = laid_out_as(local(param.grad), local(param))
        if stretch.weight.is_cut():
            grad = stretch.of(grad)
        if grad.dtype is not torch.float32:
            fp32_grad = _shaped(stretch.in_bucket(fp32_grads), like)
            copied_to.append(fp32_grad)
            copied.append(grad)
        else:
            fp32_grad = grad
        stand_in = as_dtensor(_shaped(stretch.in_bucket(values), like), param)
        stand_in.grad = as_dtensor(fp32_grad, param.grad)
        loans.append(Loan(stretch, stand_in, grad))
    if copied:
        torch._foreach_copy_(copied_to, copied)
    return loans


def _shaped(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.as_strided(like.shape, like.stride())


def as_dtensor(values: torch.Tensor, like: Any) -> torch.Tensor:
    """Return what this rank holds as a DTensor, if `like` is one."""
    if not hasattr(like, "device_mesh"):
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@contextmanager
def lent(
    optimizer: torch.optim.Optimizer,
    members: dict[int, list[Loan | torch.Tensor]],
    low_state: LowState | None,
    new: set[torch.Tensor],
) -> Iterator[None]:
    """Let an optimizer have loans instead of parameters; take its state over when the body ends without an error.

    Args:
        optimizer: Whose `param_groups` and `state` are exchanged meanwhile.
        members: By index of the group what is in it: loans, and parameters that are as they are.
        low_state: Which state is stored in 16 bits.
        new: Parameters without state before this step: each part of one makes its own.

    Raises:
        RuntimeError: The optimizer has kept state of a tensor that it does not have.
    """
    groups, state = optimizer.param_groups, optimizer.state
    params_before = [group["params"] for group in groups]
    borrowed: defaultdict[Any, Any] = defaultdict(dict)
    loans = []
    for of_group in members.values():
        for member in of_group:
            if isinstance(member, Loan):
                loans.append(member)
                param = member.stretch.weight.param
                if param not in new and (of_param := state.get(param)) is not None:
                    borrowed[member.stand_in] = _lent_state(of_param, member, low_state)
            elif member in state:
                borrowed[member] = state[member]
    borrowed.update({key: value for key, value in state.items() if not isinstance(key, torch.Tensor)})
    try:
        for index, of_group in members.items():
            groups[index]["params"] = [member.stand_in if isinstance(member, Loan) else member for member in of_group]
        optimizer.param_groups = [groups[index] for index in members]
        optimizer.state = borrowed
        yield
        borrowed = optimizer.state  # which an optimizer may replace
    finally:
        optimizer.param_groups, optimizer.state = groups, state
        for group, params in zip(groups, params_before, strict=True):
            group["params"] = params
    for loan in loans:
        if (of_stand_in := borrowed.pop(loan.stand_in, None)) is not None:
            _take_over(state, of_stand_in, loan, low_state)
    known = {param for group in groups for param in group["params"]}
    if any(isinstance(key, torch.Tensor) and key not in known for key in borrowed):
        raise RuntimeError(
            f"{type(optimizer).__name__} keeps state of tensors that it was not given, as optimizers made of another "
            "one do: give MasterWeights the innermost one"
        )
    state.update(borrowed)


def _lent_state(of_param: dict[Any, Any], loan: Loan, low_state: LowState | None) -> dict[Any, Any]:
    param = loan.stretch.weight.param
    if not loan.is_part() and low_state is None:
        return of_param
    lent_state = {}
    for name, value in of_param.items():
        if _is_of_weight(value, param):
            part = loan.stretch.of(value) if loan.is_part() else value
            lent_state[name] = part.float() if part.dtype.itemsize < 4 else part
        else:  # such as the count of steps, which each part moves
            lent_state[name] = value.clone() if loan.is_part() and isinstance(value, torch.Tensor) else value
    return lent_state


def _take_over(state: Any, of_stand_in: dict[Any, Any], loan: Loan, low_state: LowState | None) -> None:
    param, stretch = loan.stretch.weight.param, loan.stretch
    if not loan.is_part() and low_state is None:
        state[param] = of_stand_in
        return
    of_param = state[param]
    for name, value in of_stand_in.items():
        if not _is_of_weight(value, loan.stand_in):
            if not loan.is_part() or stretch is stretch.weight.stretches[-1]:  # else parts to come need the old one
                of_param[name] = value
            continue
        dtype = torch.float32 if low_state is None else low_state.dtypes.get(str(name), value.dtype)
        if not _is_of_weight(of_param.get(name), param):
            of_param[name] = torch.empty_like(param.detach(), dtype=dtype)
        stored = local(of_param[name])
        stored = stretch.of(stored) if loan.is_part() else stored
        new = local(value)
        if dtype.itemsize < 4:
            assert low_state is not None
            if str(name) in low_state.nearest:
                stored.copy_(new)
                continue
            new = low_state.round(new, dtype, f"{name} of {stretch.weight.name} from {stretch.start}")
        if stored.data_ptr() != new.data_ptr():
            stored.copy_(new)


def _is_of_weight(value: Any, weight: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.shape == weight.shape
        and value.is_floating_point()
        and value.dim() > 0
    )
