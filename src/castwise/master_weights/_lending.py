"""Lend fp32 weights, gradients and state to an optimizer for one call of its step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from castwise.amp._gradients import is_plain
from castwise.master_weights._buckets import Bucket, BucketViews, Loan, Segment, as_dtensor, laid_out_as, local
from castwise.master_weights._low_state import Blockwise, Created, LowState, is_of_weight


def loans_of(views: BucketViews, residues: Mapping[torch.Tensor, torch.Tensor], *, all_: bool) -> list[Loan]:
    """Return the loans of a bucket's segments that have a gradient, and set their gradients.

    Args:
        views: The views of the decoded bucket.
        residues: By parameter, what to add to the bits of its gradient in fp32, as int16.
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
    for loan in loans if residues else ():
        if (residue := residues.get(loan.segment.weight.param)) is not None:
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
    views_of: Mapping[Bucket, BucketViews],
    low_state: LowState,
    created: Created,
    *,
    all_: bool,
) -> Iterator[None]:
    """Give an optimizer loans instead of parameters, and store its state if the body ends without an error.

    Args:
        optimizer: The optimizer, whose `param_groups` and `state` are replaced inside the body.
        members: By group index, the members of the group: loans, and parameters that are used directly.
        views_of: The views of the buckets whose loans are members.
        low_state: Which state is stored in 8 or 16 bits.
        created: Filled with the state that parts of cut weights create, until their last part is stepped.
        all_: Whether `members` are all parameters, so that state that belongs to no parameter is included.

    Raises:
        RuntimeError: The optimizer has created state for a tensor that it was not given.
    """
    groups, state = optimizer.param_groups, optimizer.state
    params_before = {index: groups[index]["params"] for index in members}
    borrowed: defaultdict[Any, Any] = defaultdict(dict)
    loans = [member for of_group in members.values() for member in of_group if isinstance(member, Loan)]
    lent_in = {bucket: _among(views.loans, loans) for bucket, views in views_of.items()}
    for bucket, views in views_of.items():
        low_state.lend(views, lent_in[bucket], state)
    for of_group in members.values():
        for member in of_group:
            if isinstance(member, Loan):
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
    for bucket, views in views_of.items():
        given: dict[str, list[tuple[Loan, Any, Any]]] = defaultdict(list)
        for loan in lent_in[bucket]:
            if (of_stand_in := borrowed.pop(loan.stand_in, None)) is not None:
                _take_over(state, of_stand_in, loan, low_state, created, given)
        low_state.store(bucket, views, given)
    if borrowed:
        known = {param for group in groups for param in group["params"]}
        if any(isinstance(key, torch.Tensor) and key not in known for key in borrowed):
            raise RuntimeError(
                f"{type(optimizer).__name__} keeps state for tensors that it was not given, as optimizers that wrap "
                "another one do: give MasterWeights the innermost optimizer"
            )
        state.update(borrowed)


def _among(loans: list[Loan], lent_loans: list[Loan]) -> list[Loan]:
    known = {id(loan) for loan in lent_loans}
    return [loan for loan in loans if id(loan) in known]


def _lent_state(of_param: dict[Any, Any], loan: Loan, low_state: LowState) -> dict[Any, Any]:
    param, is_part = loan.segment.weight.param, loan.is_part
    if not is_part and not low_state.dtypes:
        return of_param
    lent_state = {}
    for name, value in of_param.items():
        if str(name) in loan.low_states and low_state.is_stored(value, param):
            lent_state[name] = as_dtensor(loan.low_states[str(name)], param)
        elif is_of_weight(value, param):
            lent_state[name] = loan.segment.view_of(value) if is_part else value
        elif is_part and isinstance(value, torch.Tensor):  # such as the step count, which each part increments
            lent_state[name] = _of_part(loan.segment, str(name), value)
        else:
            lent_state[name] = value
    return lent_state


def _of_part(segment: Segment, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a cut weight's state that is not elementwise: for its last part itself, for each part before a copy.

    The last part is stepped last. A CUDA graph then finds the state where it has left it.
    """
    if segment.is_last:
        return value
    copies = segment.weight.copies
    if segment.start == 0:  # for all parts at once, in one launch
        number = -(-local(segment.weight.param).numel() // segment.length) - 1
        copies[name] = [*value.expand(number, *value.shape).clone()]
    return copies[name].pop()


def _take_over(
    state: Any,
    of_stand_in: dict[Any, Any],
    loan: Loan,
    low_state: LowState,
    created: Created,
    given: dict[str, list[tuple[Loan, Any, Any]]],
) -> None:
    """Store the state of a stand-in as that of its parameter.

    Args:
        state: The state of the optimizer, by parameter.
        of_stand_in: The state that it has for the stand-in.
        loan: The loan of the stand-in.
        low_state: Which state is stored in 8 or 16 bits.
        created: Filled with state that later parts of a cut weight must not find.
        given: Filled with state that is yet to be stored in 8 or 16 bits, for `LowState.store`.
    """
    param, segment, is_part = loan.segment.weight.param, loan.segment, loan.is_part
    if not is_part and not low_state.dtypes:
        state[param] = of_stand_in
        return
    of_param = state.get(param, {}) if is_part else state[param]
    is_last = not is_part or segment.is_last
    new = created.setdefault(param, {}) if is_part else {}
    for name, value in of_stand_in.items():
        if not is_of_weight(value, loan.stand_in):
            new[name] = value  # of a cut weight, that of the last part
            continue
        stored = next((it for it in (of_param.get(name), new.get(name)) if _is_elementwise(it, param)), None)
        if stored is None:
            stored = new[name] = low_state.empty(str(name), loan, value)
        if str(name) in loan.low_states:
            given[str(name)].append((loan, value, stored))
            continue
        here = segment.view_of(local(stored)) if is_part else local(stored)
        if here.data_ptr() != local(value).data_ptr():
            here.copy_(local(value))
    if is_last:
        state[param].update(created.pop(param, new))


def _is_elementwise(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, Blockwise) or is_of_weight(value, param)
