"""Sums of bf16 gradients over micro-batches that lose nothing: what rounding a sum to 16 bits drops is kept beside it.

The sum is computed in fp32. Its upper 16 bits, rounded, are `.grad`; the lower 16 bits are a residue, which the step
and clipping add again. Together they are the fp32 sum, with the bits of fp32 accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, ref

import torch

from castwise._torch_private import never_traced
from castwise.amp._gradients import versions_of
from castwise.master_weights._buckets import Weight, digest_of

_HALF = 0x8000  # half of the last bit of a bf16 number, in the bits of an fp32 one
_LARGEST = 0x7FFF0000  # the NaN with the largest bits whose upper half does not overflow when it is rounded


@dataclass(slots=True)
class _Residue:
    grad: torch.Tensor
    """The gradient that the residue belongs to."""
    version: int
    """Its version counter when the sum was complete."""
    bits: torch.Tensor
    """What to add to the bits of the gradient in fp32: int16, with the strides of the gradient."""


@dataclass(slots=True)
class _Reduced:
    """The residue of a sum over ranks, before DDP has written that to the gradient."""

    digest: torch.Tensor
    bits: torch.Tensor


class Accumulation:
    """The residues of one optimizer's gradients. Needs memory from the second micro-batch until the step."""

    def __init__(self) -> None:
        self._residues: dict[torch.Tensor, _Residue] = {}
        self._reduced: dict[torch.Tensor, _Reduced] = {}
        self.reduces = WeakSet[torch.nn.Module]()
        """The DDP modules that call `all_reduce`."""

    def watch(self, weight: Weight) -> None:
        """Keep what is lost when a backward adds to a parameter's gradient."""
        param, itself = weight.param, ref(self)
        if not param.is_leaf:
            return
        of_param = ref(param)

        def add(grad: torch.Tensor) -> torch.Tensor | None:
            accumulation, param = itself(), of_param()
            return None if accumulation is None or param is None else accumulation._add(param, grad)

        hooked: Any = param
        is_trained = param.requires_grad
        param.requires_grad_(True)  # else torch refuses the hook of a parameter that is to be trained later
        hooked.register_hook(never_traced(add))
        param.requires_grad_(is_trained)

    def _add(self, param: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        """Add to a gradient, before autograd does; return a zero for autograd to add, or None to let it add."""
        grad = param.grad
        if grad is None or torch.is_grad_enabled() or {grad.layout, new.layout} != {torch.strided}:
            return None
        if not grad.dtype is new.dtype is torch.bfloat16 or grad.shape != new.shape:
            return None
        bits = self.residue_of(param)
        total = grad.float()
        if bits is None:
            bits = torch.empty_like(grad, dtype=torch.int16)
        else:
            total.view(torch.int32).add_(bits)
        _split(total.add_(new), grad, bits)
        self._residues[param] = _Residue(grad, versions_of([grad])[0] + 1, bits)  # autograd is going to add in place
        return torch.full((), -0.0, dtype=grad.dtype, device=grad.device).expand_as(grad)  # 0.0 would change -0.0

    def residue_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return what to add to the bits of a gradient in fp32; None if it was written to since, or is no sum."""
        if (reduced := self._reduced.pop(param, None)) is not None and (grad := param.grad) is not None:
            # Without a sync: if the gradient was changed after DDP has written it, nothing is added to it.
            is_same = digest_of(grad) == reduced.digest
            self._residues[param] = _Residue(grad, versions_of([grad])[0], reduced.bits.mul_(is_same))
        residue = self._residues.get(param)
        if residue is None or residue.grad is not param.grad or versions_of([residue.grad])[0] != residue.version:
            return None
        return residue.bits

    def residues(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return what to add to the bits of gradients in fp32, by parameter, before a step writes to them."""
        residues = {param: self.residue_of(param) for param in {*self._residues, *self._reduced}}
        return {param: bits for param, bits in residues.items() if bits is not None}

    def all_reduce(self, group: Any, bucket: Any) -> Any:
        """Communication hook of DDP: average a bucket of gradients over ranks in fp32, and keep what bf16 cannot hold.

        Args:
            group: The process group.
            bucket: A `torch.distributed.GradBucket`.

        Returns:
            A future of the bucket's buffer.
        """
        buffer: torch.Tensor = bucket.buffer()
        params, views = bucket.parameters(), bucket.gradients()
        total = buffer.float() if buffer.dtype is torch.bfloat16 else buffer
        starts = [view.storage_offset() - buffer.storage_offset() for view in views]
        for param, view, start in zip(params, views, starts, strict=True):
            residue = self.residue_of(param) if total is not buffer else None
            if residue is not None:
                total.view(torch.int32).as_strided(view.shape, view.stride(), start).add_(residue)
        total.mul_(1.0 / torch.distributed.get_world_size(group))  # before the sum, as DDP does, for the same bits
        future = torch.distributed.all_reduce(total, group=group, async_op=True).get_future()
        if total is buffer:
            return future.then(lambda done: done.value()[0])

        def divide(done: Any) -> torch.Tensor:
            bits = torch.empty_like(buffer, dtype=torch.int16)
            _split(done.value()[0], buffer, bits)
            for param, view, start in zip(params, views, starts, strict=True):
                of_param = bits.as_strided(view.shape, view.stride(), start)
                self._reduced[param] = _Reduced(digest_of(view), of_param)
            return buffer

        return future.then(divide)

    def clear(self) -> None:
        """Free the residues."""
        self._residues.clear()
        self._reduced.clear()

    def nbytes(self) -> int:
        """Return the memory of the residues, in bytes."""
        kept = [residue.bits for residue in self._residues.values()]
        return sum(bits.nbytes for bits in (*kept, *(reduced.bits for reduced in self._reduced.values())))


def _split(total: torch.Tensor, grad: torch.Tensor, bits: torch.Tensor) -> None:
    """Write the rounded upper halves of fp32 numbers to `grad`, and the lower halves to `bits`. Changes `total`."""
    of_total = total.view(torch.int32).clamp_(max=_LARGEST)
    bits.copy_(of_total)  # the conversion to int16 keeps the lower 16 bits
    grad.view(torch.int16).copy_(of_total.add_(_HALF).bitwise_right_shift_(16))
