"""Buckets: stretches of 16-bit parameters that are decoded, stepped and encoded together, in a CPU's cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from castwise._torch_private import version
from castwise.master_weights.codecs import Codec

_ALIGNED = 8  # elements: 32 bytes of fp32


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: all, unless it is a DTensor. Writes reach the tensor."""
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor.detach()
    with torch.no_grad():
        return to_local().detach()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order they have in memory, which they share."""
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if elements fill a stretch of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return tensor.numel() == 0
            expected *= size
    return True


@dataclass(slots=True, eq=False)
class Weight:
    """A parameter in 16 bits."""

    param: torch.Tensor
    name: str
    shape: torch.Size
    stretches: list[Stretch] = field(default_factory=list)
    version: int = 0
    """Of the parameter when its fp32 weight was last known."""
    checksum: int | None = None
    """Of its bits, until the first step: frameworks write the weights that are there already (DDP broadcasts them)."""
    had_state: bool = False
    """Whether the optimizer had state of it before the step under way."""
    awaits_weights: bool = False
    """Whether a checkpoint was loaded, and that of the model may be yet to come."""

    def is_cut(self) -> bool:
        """Return True if it is in several buckets."""
        return len(self.stretches) > 1

    def device(self) -> torch.device:
        """Return the device of what is kept beside it."""
        return self.stretches[0].bucket.device

    def note_written(self) -> None:
        """Note that the parameter is what the fp32 weight rounds to."""
        self.version = version(local(self.param))
        self.checksum, self.awaits_weights = None, False


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
        weights = self._weights(workspace)
        if len(self.stretches) > 1:
            torch._foreach_copy_([each.in_bucket(weights) for each in self.stretches], self._params(self.stretches))
        return self.codec.decode(weights, workspace.get("values", self.length, torch.float32, self.device))

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

    @staticmethod
    def _params(stretches: list[Stretch]) -> list[torch.Tensor]:
        return [stretch.of(local(stretch.weight.param)) for stretch in stretches]


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
