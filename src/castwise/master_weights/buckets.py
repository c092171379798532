"""Buckets: stretches of 16-bit parameters that are decoded, stepped and encoded together, in a CPU's cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from castwise._torch_private import version
from castwise.master_weights.codecs import Codec

_ALIGNED = 8  # elements: 32 bytes of fp32
_PIECE, _ODD = 1 << 20, 0x9E3779B97F4A7C15 - (1 << 64)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: all, unless it is a DTensor. Writes reach the tensor."""
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor.detach()
    with torch.no_grad():
        return to_local().detach()


def write_count(param: torch.Tensor) -> int:
    """Return how many writes torch has counted: of a DTensor, itself and what this rank holds count apart."""
    here = local(param)
    return version(here) + (version(param) if hasattr(param, "to_local") else 0)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order they have in memory, which they share."""
    return tensor.as_strided((tensor.numel(),), (1,))


def laid_out_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the strides of another one: itself, or a copy."""
    if tensor.stride() == like.stride() and not tensor.is_neg():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


@dataclass(slots=True, eq=False)
class Weight:
    """A parameter in 16 bits."""

    param: torch.Tensor
    name: str
    shape: torch.Size
    stretches: list[Stretch] = field(default_factory=list)
    stride: tuple[int, ...] = ()
    """Of what this rank holds."""
    version: int = 0
    """Of the parameter when its fp32 weight was last known."""
    bits: int | None = None
    """Digest of the 16 bits that belong to what is kept, before the first step and after a checkpoint was loaded:
    frameworks write weights that are there already (DDP broadcasts them), and checkpoints of models come later."""
    awaits_weights: bool = False
    """Whether a checkpoint without a digest was loaded: the next write is that of the model."""

    def is_cut(self) -> bool:
        """Return True if it is in several buckets."""
        return len(self.stretches) > 1

    def device(self) -> torch.device:
        """Return the device of what is kept beside it."""
        return self.stretches[0].bucket.device

    def digest(self) -> int:
        """Return a number that other bits, or the same in another order, hardly have. Syncs."""
        here = flat(local(self.param)).view(torch.int16)
        total = 0
        for start in range(0, here.numel(), _PIECE):
            piece = here[start : start + _PIECE].to(torch.int64)
            places = torch.arange(start + 1, start + 1 + len(piece), device=piece.device)
            total += int((piece * (places * _ODD)).sum().item())
        return total % (1 << 62)

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
        return flat(tensor)[self.start : self.start + self.length]

    def in_bucket(self, values: torch.Tensor) -> torch.Tensor:
        """Return this part of a bucket's values; flat."""
        return values[self.offset : self.offset + self.length]

    def saved(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint has of it; flat."""
        return self.bucket.codec.saved(self.offset, self.offset + self.length)

    def load(self, saved: dict[str, torch.Tensor]) -> None:
        """Take over what a checkpoint has of it; flat."""
        self.bucket.codec.load(self.offset, self.offset + self.length, saved)


class Workspace:
    """Memory that buckets use one after another: new memory would cost more than the arithmetic in it."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def get(self, use: str, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a use, shape (length,), with anything in it."""
        tensor = self._tensors.get((use, dtype, device))
        if tensor is None or len(tensor) < length:
            tensor = self._tensors[use, dtype, device] = torch.empty(length, dtype=dtype, device=device)
        return tensor[:length]


@dataclass(slots=True, eq=False)
class Bucket:
    """Stretches whose fp32 weights are lent together."""

    device: torch.device
    dtype: torch.dtype
    stretches: list[Stretch] = field(default_factory=list)
    length: int = 0
    sum: int | None = None
    """Of the 16-bit weights, read as whole numbers, when they were last written; on a CPU."""
    codec: Codec = field(init=False)

    def add(self, weight: Weight, start: int, length: int) -> None:
        """Add a stretch of a weight."""
        stretch = Stretch(weight, start, length, self, math.ceil(self.length / _ALIGNED) * _ALIGNED)
        weight.stretches.append(stretch)
        self.stretches.append(stretch)
        self.length = stretch.offset + length

    def has_grads(self) -> bool:
        """Return True if there is a gradient of a weight."""
        return any(stretch.weight.param.grad is not None for stretch in self.stretches)

    def decode(self, workspace: Workspace) -> torch.Tensor:
        """Return the fp32 weights, shape (length,)."""
        weights = self._gathered(workspace)
        return self.codec.decode(weights, workspace.get("values", self.length, torch.float32, self.device))

    def is_changed(self, workspace: Workspace) -> bool:
        """Return True if weights are others than those last written, as far as is known: on accelerators it is not."""
        return self.sum is not None and self.sum != _sum(self._gathered(workspace))

    def _gathered(self, workspace: Workspace) -> torch.Tensor:
        weights = self._weights(workspace)
        if len(self.stretches) > 1:
            weights.zero_()  # between stretches too, which are aligned
            torch._foreach_copy_([each.in_bucket(weights) for each in self.stretches], self._params(self.stretches))
        return weights

    def _weights(self, workspace: Workspace) -> torch.Tensor:
        """Return the memory of the 16-bit weights, or if they are several memory for copies."""
        if len(self.stretches) == 1:
            return self.stretches[0].of(local(self.stretches[0].weight.param))
        return workspace.get("weights", self.length, self.dtype, self.device)

    def encode(self, values: torch.Tensor, stepped: list[Stretch], workspace: Workspace) -> None:
        """Take over fp32 weights of some stretches, and write their 16-bit ones."""
        others = [] if len(stepped) == len(self.stretches) else [each for each in self.stretches if each not in stepped]
        kept = [{name: tensor.clone() for name, tensor in other.saved().items()} for other in others]
        weights = self._weights(workspace)
        self.codec.encode(values, weights)
        for other, saved in zip(others, kept, strict=True):
            other.load(saved)
        if len(self.stretches) > 1:
            torch._foreach_copy_(self._params(stepped), [each.in_bucket(weights) for each in stepped])
        if self.device.type == "cpu":
            self.sum = _sum(weights if not others else self._gathered(workspace))

    @staticmethod
    def _params(stretches: list[Stretch]) -> list[torch.Tensor]:
        return [stretch.of(local(stretch.weight.param)) for stretch in stretches]


def _sum(weights: torch.Tensor) -> int:
    whole = weights.view(torch.int16)
    if whole.numel() % 4 == 0 and whole.storage_offset() % 4 == 0:
        whole = whole.view(torch.int64)  # eight bytes at a time
    return int(whole.sum(dtype=torch.int64).item())


def fill(weights: list[Weight], size: int, dtype: torch.dtype, *, cuts: bool) -> list[Bucket]:
    """Put weights into buckets, in their order.

    Args:
        weights: Which.
        size: Elements that a bucket has at most.
        dtype: Of the weights.
        cuts: Whether a larger weight is cut, unless it is a DTensor; else it gets a bucket of its own.
    """
    buckets: list[Bucket] = []
    open_: dict[torch.device, Bucket] = {}
    for weight in weights:
        here = local(weight.param)
        if cuts and here.numel() > size and not hasattr(weight.param, "to_local"):
            for start in range(0, here.numel(), size):
                buckets.append(Bucket(here.device, dtype))
                buckets[-1].add(weight, start, min(size, here.numel() - start))
            continue
        bucket = open_.get(here.device)
        if bucket is None or bucket.length + here.numel() > size:
            bucket = open_[here.device] = Bucket(here.device, dtype)
            buckets.append(bucket)
        bucket.add(weight, 0, here.numel())
    return buckets
