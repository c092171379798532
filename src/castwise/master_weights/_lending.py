"""Lend fp32 weights, gradients and state to an optimizer for one call of its step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from castwise.amp._gradients import is_plain
from castwise.master_weights._buckets import BucketViews, Loan, as_dtensor, is_dtensor, laid_out_as, local

Created = dict[torch.Tensor, dict[Any, Any]]
"""State that an optimizer creates in this step for weights that are cut, by parameter and name.

It is kept apart until the last part is stepped: what an optimizer does with a part depends on the state that it finds,
so each part must find what the first one found.
"""


@dataclass(slots=True)
class LowState:
    """State that is stored in 16 bits and lent in fp32."""

    dtypes: dict[str, torch.dtype]
    """By state name."""
    nearest: set[str]
    """Names of state that is rounded to nearest instead of stochastically."""
    round: Callable[[torch.Tensor, torch.dtype, str], torch.Tensor]
    """Rounds fp32 numbers to a dtype stochastically; takes a unique name for each tensor."""

    def stored(self, of_param: Mapping[Any, Any], param: torch.Tensor) -> dict[Any, Any]:
        """Return the state of a 16-bit weight in its storage dtypes, with the strides of the weight."""
        return {name: self._stored(name, value, param) for name, value in of_param.items()}

    def _stored(self, name: object, value: Any, param: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.dim():
            return value
        if value.shape != param.shape:
            return value.float() if value.dtype.itemsize < 4 else value
        stored = value.to(self.dtypes.get(str(name), torch.float32))
        return stored if is_dtensor(param) else laid_out_as(stored, local(param))


def loans_of(
    views: BucketViews, residue_of: Callable[[torch.Tensor], torch.Tensor | None] | None, *, all_: bool
) -> list[Loan]:
    """Return the loans of a bucket's segments that have a gradient, and set their gradients.

    Args:
        views: The views of the decoded bucket.
        residue_of: Returns what to add to the bits of a parameter's gradient in fp32, as int16.
        all_: Whether to include segments without a gradient.
    """
    loans, copied_to, copied = [], [], []
    for loan in views.loans:
        param = loan.segment.weight.param
        of_param = param.grad
        loan.grad = None
        if of_param is not None:
            loan.grad = grad = _part_of(loan, of_param)
            if grad.dtype is torch.float32:
                fp32_grad = grad
            else:
                fp32_grad = loan.fp32_grad
                copied_to.append(fp32_grad)
                copied.append(grad)
            loan.stand_in.grad = fp32_grad if is_plain(of_param) else as_dtensor(fp32_grad, of_param)
            loans.append(loan)
        elif all_:
            loans.append(loan)
    if copied:
        torch._foreach_copy_(copied_to, copied)
    if residue_of is None:
        return loans
    for loan in loans:
        residue = residue_of(loan.segment.weight.param)
        if residue is not None:
            loan.fp32_grad.view(torch.int32).add_(_part_of(loan, residue))
    return loans


def _part_of(loan: Loan, of_param: torch.Tensor) -> torch.Tensor:
    """Return a loan's part of a gradient, or of a tensor beside it, with the strides of the loan."""
    weight = loan.segment.weight
    here = of_param if is_plain(of_param) else local(of_param)
    if here.stride() != weight.layout.stride or here.is_neg():
        here = laid_out_as(here, local(weight.param))
    return loan.segment.view_of(here) if loan.is_part else here


@contextmanager
def lent(
    optimizer: torch.optim.Optimizer,
    members: dict[int, list[Loan | torch.Tensor]],
    low_state: LowState,
    created: Created,
    *,
    all_: bool,
) -> Iterator[None]:
    """Give an optimizer loans instead of parameters, and store its state if the body ends without an error.

    Args:
        optimizer: The optimizer, whose `param_groups` and `state` are replaced inside the body.
        members: By group index, the members of the group: loans, and parameters that are used directly.
        low_state: Which state is stored in 16 bits.
        created: Filled with the state that parts of cut weights create, until their last part is stepped.
        all_: Whether `members` are all parameters, so that state that belongs to no parameter is included.

    Raises:
        RuntimeError: The optimizer has created state for a tensor that it was not given.
    """
    groups, state = optimizer.param_groups, optimizer.state
    params_before = {index: groups[index]["params"] for index in members}
    borrowed: defaultdict[Any, Any] = defaultdict(dict)
    loans = []
    for of_group in members.values():
        for member in of_group:
            if isinstance(member, Loan):
                loans.append(member)
                param = member.segment.weight.param
                if (of_param := state.get(param)) is not None:
                    borrowed[member.stand_in] = _lent_state(of_param, member, low_state)
            elif member in state:
                borrowed[member] = state[member]
    if all_:
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
        for index, params in params_before.items():
            groups[index]["params"] = params
        for loan in loans:  # the next bucket reuses the memory
            loan.grad = loan.stand_in.grad = None
    for loan in loans:
        if (of_stand_in := borrowed.pop(loan.stand_in, None)) is not None:
            _take_over(state, of_stand_in, loan, low_state, created)
    if borrowed:
        known = {param for group in groups for param in group["params"]}
        if any(isinstance(key, torch.Tensor) and key not in known for key in borrowed):
            raise RuntimeError(
                f"{type(optimizer).__name__} keeps state for tensors that it was not given, as optimizers that wrap "
                "another one do: give MasterWeights the innermost optimizer"
            )
        state.update(borrowed)


def _lent_state(of_param: dict[Any, Any], loan: Loan, low_state: LowState) -> dict[Any, Any]:
    param, is_part = loan.segment.weight.param, loan.is_part
    if not is_part and not low_state.dtypes:
        return of_param
    lent_state = {}
    for name, value in of_param.items():
        if _is_of_weight(value, param):
            part = loan.segment.view_of(value) if is_part else value
            lent_state[name] = part.float() if part.dtype.itemsize < 4 else part
        else:  # such as the step count, which each part increments
            lent_state[name] = value.clone() if is_part and isinstance(value, torch.Tensor) else value
    return lent_state


def _take_over(state: Any, of_stand_in: dict[Any, Any], loan: Loan, low_state: LowState, created: Created) -> None:
    """Store the state of a stand-in as that of its parameter; `created` has the one that later parts must not find."""
    param, segment, is_part = loan.segment.weight.param, loan.segment, loan.is_part
    if not is_part and not low_state.dtypes:
        state[param] = of_stand_in
        return
    of_param = state.get(param, {}) if is_part else state[param]
    is_last = not is_part or segment.is_last
    new = created.setdefault(param, {}) if is_part else {}
    for name, value in of_stand_in.items():
        if not _is_of_weight(value, loan.stand_in):
            new[name] = value  # of a cut weight, that of the last part
            continue
        low = low_state.dtypes.get(str(name))
        stored = of_param.get(name)
        if not _is_of_weight(stored, param):
            stored = new.get(name)
            if not _is_of_weight(stored, param):
                stored = new[name] = torch.empty_like(param.detach(), dtype=low or value.dtype)
        here = local(stored)
        here = segment.view_of(here) if is_part else here
        values = local(value)
        if low is not None and low.itemsize < 4 and str(name) not in low_state.nearest:
            values = low_state.round(values, low, f"{name} of {segment.weight.name} from {segment.start}")
        if here.data_ptr() != values.data_ptr():
            here.copy_(values)
    if is_last:
        state[param].update(created.pop(param, new))


def _is_of_weight(value: Any, weight: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.shape == weight.shape
        and value.is_floating_point()
        and value.dim() > 0
    )
