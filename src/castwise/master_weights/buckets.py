"""Buckets: stretches of 16-bit parameters that are decoded, stepped and encoded together, in a CPU's cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from castwise._torch_private import version
from castwise.amp.gradients import is_plain
from castwise.master_weights.codecs import Codec

_ALIGNED = 8  # elements: 32 bytes of fp32
_PIECE, _ODD = 1 << 20, 0x9E3779B97F4A7C15 - (1 << 64)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return True if each rank holds a part of a tensor."""
    return not is_plain(tensor) and hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: all, unless it is a DTensor. Writes reach the tensor."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()  # type: ignore[attr-defined,no-any-return]  # a DTensor's


def as_dtensor(values: torch.Tensor, like: Any) -> torch.Tensor:
    """Return what this rank holds as a DTensor, if `like` is one."""
    if not is_dtensor(like):
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def write_count(param: torch.Tensor) -> int:
    """Return how many writes torch has counted: of a DTensor, itself and what this rank holds count apart."""
    return version(param) if is_plain(param) else version(param) + version(local(param))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order they have in memory, which they share."""
    return tensor.as_strided((tensor.numel(),), (1,))


def laid_out_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the strides of another one: itself, or a copy."""
    if tensor.stride() == like.stride() and not tensor.is_neg():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


class Layout(NamedTuple):
    """What must not change of a parameter."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    """Of what this rank holds."""
    device: torch.device

    @classmethod
    def of(cls, param: torch.Tensor) -> Layout:
        """Return that of a parameter."""
        here = param if is_plain(param) else local(param)
        return cls(param.dtype, param.shape, here.stride(), here.device)


@dataclass(slots=True, eq=False)
class Weight:
    """A parameter in 16 bits."""

    param: torch.Tensor
    name: str
    layout: Layout
    stretches: list[Stretch] = field(default_factory=list)
    version: int | None = 0
    """Of the parameter when its fp32 weight was last known. None: it is that of `bits`, which is to be looked at."""
    bits: int | None = None
    """Digest of the 16 bits that belong to what is kept, before the first step and after a checkpoint was loaded:
    frameworks write weights that are there already (DDP broadcasts them), and checkpoints of models come later."""
    awaits_weights: bool = False
    """Whether a checkpoint without a digest was loaded: the next write is that of the model."""

    def is_cut(self) -> bool:
        """Return True if it is in several buckets."""
        return len(self.stretches) > 1

    def digest(self) -> int:
        """Return a number that other bits, or the same in another order, hardly have. Syncs."""
        here = flat(local(self.param)).view(torch.int16)
        total = 0
        for start in range(0, here.numel(), _PIECE):
            piece = here[start : start + _PIECE].to(torch.int64)
            places = torch.arange(start + 1, start + 1 + len(piece), device=piece.device)
            total += int((piece * (places * _ODD)).sum().item())
        return total % (1 << 62)

    def expects_these(self) -> bool:
        """Return True if the weights that are there now, and were written, belong to what is kept. Syncs."""
        return self.awaits_weights if self.bits is None else self.bits == self.digest()

    def note_written(self) -> None:
        """Note that the parameter is what the fp32 weight rounds to."""
        self.version = write_count(self.param)
        self.bits, self.awaits_weights = None, False


@dataclass(slots=True, eq=False)
class Stretch:
    """A part of a weight's memory in a bucket, or all of it."""

    weight: Weight
    start: int
    length: int
    bucket: Bucket
    offset: int
    """Where it is in the bucket."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of a tensor that is laid out as the weight; flat."""
        return tensor.as_strided((self.length,), (1,), tensor.storage_offset() + self.start)

    def of_param(self) -> torch.Tensor:
        """Return this part of what this rank holds of the parameter: flat if the weight is cut, or else as it is."""
        param = self.weight.param
        here = param if is_plain(param) else local(param)
        return self.of(here) if self.length < here.numel() else here

    def in_bucket(self, values: torch.Tensor) -> torch.Tensor:
        """Return this part of a bucket's values; flat."""
        return values[self.offset : self.offset + self.length]

    def saved(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint has of it; flat."""
        return self.bucket.codec.saved(self.offset, self.offset + self.length)

    def load(self, saved: dict[str, torch.Tensor]) -> None:
        """Take over what a checkpoint has of it; flat."""
        self.bucket.codec.load(self.offset, self.offset + self.length, saved)


@dataclass(slots=True, eq=False)
class Loan:
    """What stands for a stretch in the optimizer, in the memory of a workspace."""

    stretch: Stretch
    stand_in: torch.Tensor
    """The fp32 weight: laid out as the parameter, or flat if that is cut."""
    fp32_grad: torch.Tensor
    """Memory for a gradient, laid out alike."""
    low: torch.Tensor
    """Memory for the 16-bit weight, laid out alike."""
    is_part: bool
    """Whether other parts of the weight are lent by themselves."""
    grad: torch.Tensor | None = None
    """What this rank holds of the parameter's gradient in this step, in its dtype, laid out alike."""


class Desk:
    """Where a bucket is in a workspace: views that each step needs again.

    Args:
        bucket: Which.
        workspace: Whose memory.
    """

    __slots__ = ("loans", "values", "weights")

    def __init__(self, bucket: Bucket, workspace: Workspace) -> None:
        self.values = workspace.get("values", torch.float32, bucket)
        self.weights = workspace.get("weights", bucket.dtype, bucket)
        """Copies of the 16-bit weights, where they are several."""
        grads = workspace.get("grads", torch.float32, bucket)
        self.loans = []
        for stretch in bucket.stretches:
            like = stretch.of_param()
            stand_in, grad, low = (
                stretch.in_bucket(memory).as_strided(like.shape, like.stride())
                for memory in (self.values, grads, self.weights)
            )
            weight = stretch.weight
            self.loans.append(Loan(stretch, as_dtensor(stand_in, weight.param), grad, low, weight.is_cut()))

    def take_values_back(self) -> None:
        """Copy fp32 weights that an optimizer has put elsewhere, by an assignment to `.data`."""
        for loan in self.loans:
            here, there = loan.stretch.in_bucket(self.values), local(loan.stand_in)
            if here.data_ptr() != there.data_ptr():
                here.as_strided(there.shape, loan.fp32_grad.stride()).copy_(there)


class Workspace:
    """Memory that buckets use one after another: new memory would cost more than the arithmetic in it.

    Args:
        length: Elements of the largest bucket.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._tensors: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self._desks: dict[Bucket, Desk] = {}

    def desk(self, bucket: Bucket) -> Desk:
        """Return the bucket's place."""
        desk = self._desks.get(bucket)
        if desk is None:
            desk = self._desks[bucket] = Desk(bucket, self)
        return desk

    def get(self, use: str, dtype: torch.dtype, bucket: Bucket) -> torch.Tensor:
        """Return memory for a use, shape (bucket.length,), with anything in it."""
        key = use, dtype, bucket.device
        if key not in self._tensors:
            self._tensors[key] = torch.empty(self.length, dtype=dtype, device=bucket.device)
        return self._tensors[key][: bucket.length]


@dataclass(slots=True, eq=False)
class Bucket:
    """Stretches whose fp32 weights are lent together."""

    device: torch.device
    dtype: torch.dtype
    stretches: list[Stretch] = field(default_factory=list)
    length: int = 0
    has_gaps: bool = False
    """Whether there is memory between stretches, which are aligned."""
    sum: int | None = None
    """Of the 16-bit weights, read as whole numbers, when they were last written; on a CPU."""
    codec: Codec = field(init=False)

    def add(self, weight: Weight, start: int, length: int) -> None:
        """Add a stretch of a weight."""
        stretch = Stretch(weight, start, length, self, math.ceil(self.length / _ALIGNED) * _ALIGNED)
        weight.stretches.append(stretch)
        self.stretches.append(stretch)
        self.has_gaps |= stretch.offset > self.length
        self.length = stretch.offset + length

    def has_grads(self) -> bool:
        """Return True if there is a gradient of a weight."""
        return any(stretch.weight.param.grad is not None for stretch in self.stretches)

    def decode(self, desk: Desk) -> list[Stretch]:
        """Put the fp32 weights into `desk.values`.

        Returns:
            Stretches of weights that were written unnoticed, as through `.data`, as far as is known: on accelerators it
            is not. Their fp32 weights are then the 16-bit ones, and what is kept beside those is to be encoded anew.
        """
        weights = self._weights(desk)
        if len(self.stretches) > 1:
            if self.has_gaps:
                weights.zero_()
            torch._foreach_copy_([loan.low for loan in desk.loans], [each.of_param() for each in self.stretches])
        self.codec.decode(weights, desk.values)
        if self.sum is None or self.sum == _sum(weights):
            return []
        written = [
            each for each in self.stretches if each.weight.bits is None or each.weight.bits != each.weight.digest()
        ]
        for stretch in written:
            stretch.in_bucket(desk.values).copy_(stretch.in_bucket(weights))
        return written

    def encode(self, desk: Desk, stepped: list[Stretch]) -> None:
        """Take over the fp32 weights of some stretches from `desk.values`, and write their 16-bit ones."""
        others = set() if len(stepped) == len(self.stretches) else {*self.stretches} - {*stepped}
        kept = [{name: tensor.clone() for name, tensor in other.saved().items()} for other in others]
        weights = self._weights(desk)
        self.codec.encode(desk.values, weights)
        for other, saved in zip(others, kept, strict=True):
            other.load(saved)
        if len(self.stretches) > 1:
            for other in others:  # which rounding by chance has made others
                other.in_bucket(weights).copy_(flat(other.of_param()))
            loans = [loan for loan in desk.loans if loan.stretch not in others]
            torch._foreach_copy_([loan.stretch.of_param() for loan in loans], [loan.low for loan in loans])
        if self.device.type == "cpu" and not self.codec.is_empty():
            self.sum = _sum(weights)
        for stretch in stepped:
            stretch.weight.note_written()

    def _weights(self, desk: Desk) -> torch.Tensor:
        """Return the memory of the 16-bit weights, or if they are several memory for copies."""
        return desk.weights if len(self.stretches) > 1 else flat(self.stretches[0].of_param())


def _sum(weights: torch.Tensor) -> int:
    if weights.storage_offset() % 4:
        return int(weights.view(torch.int16).sum(dtype=torch.int64).item())
    rest = weights.numel() % 4  # eight bytes at a time take an eighth of the time
    if rest:
        return _sum(weights[:-rest]) + int(weights[-rest:].view(torch.int16).sum(dtype=torch.int64).item())
    return int(weights.view(torch.int64).sum().item())


def fill(weights: list[Weight], size: int, *, cuts: bool) -> list[Bucket]:
    """Put weights into buckets.

    Args:
        weights: Which.
        size: Elements that a bucket has at most.
        cuts: Whether a larger weight is cut, unless it is a DTensor; else it gets a bucket of its own.

    Returns:
        Buckets, in which the stretches of each weight are in their order.
    """
    full: list[Bucket] = []
    shared: list[Bucket] = []  # come last, as last stretches do, which are shorter
    open_: dict[torch.device, Bucket] = {}
    for weight in weights:
        device, dtype = weight.layout.device, weight.layout.dtype
        length = local(weight.param).numel()
        longest = size if cuts and not is_dtensor(weight.param) else length
        for start in range(0, length, longest) if length else (0,):
            part = min(longest, length - start)
            if part >= size:
                full.append(Bucket(device, dtype))
                full[-1].add(weight, start, part)
                continue
            if device not in open_ or open_[device].length + part > size:
                open_[device] = Bucket(device, dtype)
                shared.append(open_[device])
            open_[device].add(weight, start, part)
    return full + shared
