"""Measure how far an optimizer's step moves the weights, and how much of that bf16 weights would lose."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from castwise.amp._gradients import params_and_grads
from castwise.amp._measure import wide
from castwise.monitor._exponents import piece_size
from castwise.monitor._local_shards import is_partial, local_shard
from castwise.monitor._records import Update


@torch.no_grad()
def compare(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Compare weights before and after a step. Read the result with `update_of`. Does not sync with an accelerator.

    Args:
        before: w, a plain tensor, floating-point or complex. Real and imaginary parts count as separate elements.
        after: w + dw, like `before`.

    Returns:
        fp64 (fp32 where a device has no fp64), shape (4,): the sums of squares of dw and of w, the number of elements
        with dw != 0, and the number of those with bf16(bf16(w) + dw) == bf16(w). The last is NaN for 16-bit weights,
        whose dw no longer includes lost updates.
    """
    found = torch.zeros(4, dtype=wide(after.device), device=after.device)
    size = piece_size(after.device)
    for old, new in zip(torch.split(_flat(before), size), torch.split(_flat(after), size), strict=True):
        # No dot products, because a CPU splits even short ones among threads.
        found += torch.stack([number.sum().to(found.dtype) for number in _numbers(old, new)])
    if before.dtype.itemsize < 4:
        found[3] = math.nan
    return found


def _numbers(old: torch.Tensor, new: torch.Tensor) -> list[torch.Tensor]:
    """Return for each element what `compare` adds up."""
    exact, summed = torch.promote_types(old.dtype, torch.float32), wide(old.device)
    old = old.to(exact)
    change = new.to(exact) - old
    rounded = old.bfloat16()
    changed = change != 0
    lost = changed & ((rounded.to(exact) + change).bfloat16() == rounded)
    return [change.to(summed, copy=True).square_(), old.to(summed, copy=True).square_(), changed, lost]


@torch.no_grad()
def compare_together(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Return a result of `compare` for each pair. Small pairs share ops, on an accelerator launches."""
    found: list[torch.Tensor | None] = [None] * len(pairs)
    batches: dict[tuple[torch.device, torch.dtype, torch.dtype], list[list[int]]] = {}
    for index, (before, after) in enumerate(pairs):
        limit = piece_size(after.device)
        if not 0 < after.numel() <= limit // 2:
            found[index] = compare(before, after)
            continue
        of_kind = batches.setdefault((after.device, before.dtype, after.dtype), [[]])
        if sum(pairs[other][1].numel() for other in of_kind[-1]) + after.numel() > limit // 2:
            of_kind.append([])
        of_kind[-1].append(index)
    for batch in (batch for of_kind in batches.values() for batch in of_kind if batch):
        old, new = ([_flat(pairs[index][place]) for index in batch] for place in (0, 1))
        lengths = [len(part) for part in old]
        numbers = _numbers(torch.cat(old), torch.cat(new))
        sums = [torch._foreach_norm(torch.split(number.to(wide(number.device)), lengths), 1) for number in numbers]
        rows = torch.stack([one for of_number in sums for one in of_number]).view(4, -1).T
        if pairs[batch[0]][0].dtype.itemsize < 4:
            rows = torch.cat([rows[:, :3], torch.full_like(rows[:, :1], math.nan)], 1)
        for index, row in zip(batch, rows.unbind(), strict=True):
            found[index] = row
    return [one for one in found if one is not None]


def update_of(numbers: list[float]) -> Update:
    """Return the record of a parameter's update.

    Args:
        numbers: A result of `compare`, or the sum of its results over parts of the parameter.

    Returns:
        update_to_weight: ||dw||2 / ||w||2, where w are the weights before the step; inf if they were all zero.
        lost_in_bf16: Among elements with dw != 0, the share with bf16(bf16(w) + dw) == bf16(w), with the sum computed
            in fp32. The step would not change these elements if the weights were bf16 without an fp32 copy. NaN for
            16-bit weights.
    """
    of_change, of_weight, changed, lost = numbers
    from_nothing = math.inf if of_change else 0.0
    return Update(
        update_to_weight=math.sqrt(of_change) / math.sqrt(of_weight) if of_weight else from_nothing,
        lost_in_bf16=lost / changed if changed else lost,
    )


class Updates:
    """Keeps copies of the weights with gradients during the steps of optimizers."""

    def __init__(self) -> None:
        self._before: dict[torch.optim.Optimizer, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @torch.no_grad()
    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the weights that an optimizer is about to change."""
        kept = [
            parameter
            for parameter in params_and_grads(optimizer)[0]
            if (parameter.is_floating_point() or parameter.is_complex()) and not is_partial(parameter)
        ]
        weights = [local_shard(parameter.detach()).local for parameter in kept]
        copies = [torch.empty_like(weight) for weight in weights]
        if copies:
            torch._foreach_copy_(copies, weights)
        self._before[optimizer] = list(zip(kept, copies, strict=True))

    def forget(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Drop the copies for an optimizer that does not step, or all copies."""
        for forgotten in list(self._before) if optimizer is None else [optimizer]:
            self._before.pop(forgotten, None)

    def compare(self, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, torch.Tensor]:
        """Return a result of `compare` for each parameter, and drop the copies."""
        kept = self._before.pop(optimizer, ())
        pairs = [(before, local_shard(parameter.detach()).local) for parameter, before in kept]
        return dict(zip((parameter for parameter, _ in kept), compare_together(pairs), strict=True))


def _flat(weights: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(weights.resolve_conj()) if weights.is_complex() else weights).reshape(-1)
