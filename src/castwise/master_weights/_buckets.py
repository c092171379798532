"""Buckets: segments of 16-bit parameters that are decoded, stepped and encoded together, while in a CPU's cache."""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from castwise._digests import digest_of_words, multipliers
from castwise._torch_private import version
from castwise.amp._gradients import is_plain
from castwise.master_weights._codecs import Codec

ALIGNED = 8
"""Elements by which segments are aligned in buckets: 32 bytes of fp32."""
# Bytes of fp32 weights in a bucket. On a CPU, a bucket stays in the cache between the passes over it.
_BUCKET_BYTES = 4 << 20
# On an accelerator, each bucket costs eight launches or more, and its memory 8 bytes a weight. So there are seven:
# fewer of small models, and more of large ones, for which the size is limited.
_SHARE_ON_ACCELERATORS, _BUCKET_BYTES_ON_ACCELERATORS = 0.15, 96 << 20
_PIECE = 1 << 20  # elements that a digest converts at once
NO_DIGEST = -1
"""Stands for an unknown digest."""


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a DTensor, of which each rank holds a part."""
    return not is_plain(tensor) and hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or any other tensor whole; it shares memory with the tensor."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()  # type: ignore[attr-defined,no-any-return]  # a DTensor's


def as_dtensor(values: torch.Tensor, like: Any) -> torch.Tensor:
    """Return this rank's values as a DTensor if `like` is one, else unchanged."""
    if not is_dtensor(like):
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def write_count(param: torch.Tensor) -> int:
    """Return the version counter of a parameter; for a DTensor, plus that of this rank's part."""
    return version(param) if is_plain(param) else version(param) + version(local(param))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a dense tensor, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def laid_out_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the strides of `like`: the tensor itself or a copy."""
    if tensor.stride() == like.stride() and not tensor.is_neg():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


class Layout(NamedTuple):
    """The properties of a parameter that must not change."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    """Strides of this rank's part."""
    device: torch.device

    @classmethod
    def of(cls, param: torch.Tensor) -> Layout:
        """Return the layout of a parameter."""
        here = param if is_plain(param) else local(param)
        return cls(param.dtype, param.shape, here.stride(), here.device)


@dataclass(slots=True, eq=False)
class Weight:
    """A parameter in 16 bits.

    It does not refer to its segments, which refer to it: a cycle would keep parameters alive until Python's garbage
    collector runs.
    """

    param: torch.Tensor
    name: str
    layout: Layout
    is_cut: bool = False
    """Whether the weight is split over several buckets."""
    version: int | None = 0
    """Version counter of the parameter when its fp32 weight was last known. None: compare digests even if nothing has
    been written since, because a checkpoint was loaded whose model may have been loaded before."""
    kept_digests: torch.Tensor | None = None
    """`digest()` or `row_digests()` of the 16-bit weights to which the kept bits belong; `NO_DIGEST` if these are
    unknown, as after loading a checkpoint of castwise 0.2. A write of such weights is no change: DDP broadcasts
    them, and a model may be loaded after its optimizer. None after a step, when every write is a change."""

    copies: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Copies of state that is not elementwise, by name, for the parts of a cut weight that are yet to be stepped."""

    def digest(self) -> torch.Tensor:
        """Return a hash of the 16-bit weights on this rank, in memory order: int32, shape (). Does not sync."""
        return digest_of(local(self.param))

    def row_digests(self) -> torch.Tensor:
        """Return a hash of each row on this rank, a slice along the first dimension: int32. Does not sync.

        Unlike `digest`, it depends neither on strides nor on how a DTensor's rows are distributed over ranks.
        """
        here = local(self.param)
        rows = here.shape[0] if here.dim() else 1
        return _row_digests(here.reshape(rows, math.prod(here.shape[1:]))).view(here.shape[:1])

    def matches_kept(self) -> bool:
        """Return True if the weights that were written match the kept data. Syncs."""
        if self.kept_digests is None:
            return False
        now = self.row_digests() if self.kept_digests.dim() else self.digest()
        return bool(((now == self.kept_digests) | (self.kept_digests == NO_DIGEST)).all())

    def note_rewritten(self) -> None:
        """Record that the parameter holds the weights to which the kept bits belong, after a write of them."""
        self.version, self.kept_digests = write_count(self.param), self.digest()

    def note_written(self) -> None:
        """Record that the parameter now holds the rounded fp32 weight."""
        self.version, self.kept_digests = write_count(self.param), None


@dataclass(slots=True, eq=False)
class Segment:
    """A part or all of a weight's memory, in a bucket."""

    weight: Weight
    start: int
    length: int
    offset: int
    """Start position in the bucket."""
    is_last: bool
    """Whether it is the last segment of its weight."""

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of a tensor with the strides of the weight; flat."""
        return tensor.as_strided((self.length,), (1,), tensor.storage_offset() + self.start)

    def param_view(self) -> torch.Tensor:
        """Return this part of the parameter on this rank: flat if the weight is split, else in its shape."""
        param = self.weight.param
        here = param if is_plain(param) else local(param)
        return self.view_of(here) if self.length < here.numel() else here

    def bucket_view(self, values: torch.Tensor) -> torch.Tensor:
        """Return this part of a bucket's values; flat."""
        return values[self.offset : self.offset + self.length]


@dataclass(slots=True, eq=False)
class Loan:
    """The stand-in for a segment that the optimizer steps, in the memory of a workspace."""

    segment: Segment
    stand_in: torch.Tensor
    """The fp32 weight: with the strides of the parameter, or flat if that is split."""
    fp32_grad: torch.Tensor
    """Memory for a gradient, with the same strides."""
    low: torch.Tensor
    """Memory for the 16-bit weight, with the same strides."""
    low_states: dict[str, torch.Tensor]
    """Memory for state that is stored in 8 or 16 bits, by name, with the same strides."""
    is_part: bool
    """Whether the weight is split and its other parts are lent separately."""
    grad: torch.Tensor | None = None
    """This rank's part of the parameter's gradient in this step, in its dtype, with the same strides."""


class BucketViews:
    """A bucket's views of a workspace, which each step reuses.

    Args:
        bucket: The bucket.
        workspace: The workspace that provides the memory.
    """

    __slots__ = ("codes", "loans", "low_states", "scales", "scratch", "values", "weights")

    def __init__(self, bucket: Bucket, workspace: Workspace) -> None:
        self.values = workspace.get("values", torch.float32, bucket)
        grads = workspace.get("grads", torch.float32, bucket)
        self.weights = grads.view(bucket.dtype)[: bucket.length]
        """Copies of the 16-bit weights, if the bucket has several segments; before and after the step, as they take the
        memory of the gradients."""
        blocks = workspace.get_blocks if bucket.aligned > ALIGNED else workspace.get
        self.low_states = {name: blocks(name, torch.float32, bucket) for name in workspace.low_states}
        """Memory for state that is stored in 8 or 16 bits, by name; in full blocks if any is stored in 8."""
        if bucket.aligned > ALIGNED:
            self.codes, self.scratch = blocks("codes", torch.uint8, bucket), blocks("scratch", torch.float32, bucket)
            self.scales = blocks("scales", torch.float32, bucket)[: len(self.codes) // bucket.aligned]
        self.loans = []
        for segment in bucket.segments:
            like = segment.param_view()
            stand_in, grad, low, *states = (
                segment.bucket_view(memory).as_strided(like.shape, like.stride())
                for memory in (self.values, grads, self.weights, *self.low_states.values())
            )
            weight, of_names = segment.weight, dict(zip(self.low_states, states, strict=True))
            self.loans.append(Loan(segment, as_dtensor(stand_in, weight.param), grad, low, of_names, weight.is_cut))

    def copy_values_back(self) -> None:
        """Copy back fp32 weights that an optimizer has moved to other memory by assigning to `.data`."""
        for loan in self.loans:
            here, there = loan.segment.bucket_view(self.values), local(loan.stand_in)
            if here.data_ptr() != there.data_ptr():
                here.as_strided(there.shape, loan.fp32_grad.stride()).copy_(there)


class Workspace:
    """Memory that buckets use one after another, because allocating it would cost more than the arithmetic.

    Args:
        length: Number of elements in the largest bucket.
        low_states: Names of state that needs memory because it is stored in 8 or 16 bits.
    """

    def __init__(self, length: int, low_states: Sequence[str]) -> None:
        self.length, self.low_states = length, low_states
        self._tensors: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self._views: dict[Bucket, BucketViews] = {}

    def views_of(self, bucket: Bucket) -> BucketViews:
        """Return a bucket's views."""
        views = self._views.get(bucket)
        if views is None:
            views = self._views[bucket] = BucketViews(bucket, self)
        return views

    def get(self, use: str, dtype: torch.dtype, bucket: Bucket) -> torch.Tensor:
        """Return uninitialised memory of shape (bucket.length,) for a use."""
        return self.get_blocks(use, dtype, bucket)[: bucket.length]

    def get_blocks(self, use: str, dtype: torch.dtype, bucket: Bucket) -> torch.Tensor:
        """Return memory like `get`, for the bucket's length rounded up to what its segments are aligned by."""
        key = use, dtype, bucket.device
        if key not in self._tensors:
            self._tensors[key] = torch.empty(self.length, dtype=dtype, device=bucket.device)
        return self._tensors[key][: rounded_up(bucket.length, bucket.aligned)]

    def bytes(self) -> int:
        """Return the number of bytes allocated so far."""
        return sum(tensor.nbytes for tensor in self._tensors.values())


@dataclass(slots=True, eq=False)
class Bucket:
    """Segments whose fp32 weights are lent together."""

    device: torch.device
    dtype: torch.dtype
    aligned: int
    """Elements by which the starts of segments are aligned."""
    segments: list[Segment] = field(default_factory=list)
    length: int = 0
    has_gaps: bool = False
    """Whether alignment leaves gaps between segments."""
    digest: int | tuple[bytes, ...] | None = None
    """`_digest_of` the 16-bit weights when they were last written. CPU only."""
    digests_of: Callable[[Bucket], tuple[bytes, ...] | None] | None = None
    """Returns digests of the segments' 16-bit weights, if compiled steps compute others than `_digest`."""
    codec: Codec = field(init=False)

    def add(self, weight: Weight, start: int, length: int) -> None:
        """Add a segment of a weight."""
        size = local(weight.param).numel()
        weight.is_cut |= length < size
        offset = rounded_up(self.length, self.aligned)
        segment = Segment(weight, start, length, offset, is_last=start + length == size)
        self.segments.append(segment)
        self.has_gaps |= segment.offset > self.length
        self.length = segment.offset + length

    def has_grads(self) -> bool:
        """Return True if any weight has a gradient."""
        return any(segment.weight.param.grad is not None for segment in self.segments)

    def saved(self, segment: Segment) -> dict[str, torch.Tensor]:
        """Return the checkpoint entries of a segment; flat."""
        return self.codec.saved(segment.offset, segment.offset + segment.length)

    def load(self, segment: Segment, saved: dict[str, torch.Tensor]) -> None:
        """Load the checkpoint entries of a segment; flat."""
        self.codec.load(segment.offset, segment.offset + segment.length, saved)

    def decode(self, views: BucketViews) -> list[Segment]:
        """Write the fp32 weights to `views.values`.

        Returns:
            Segments whose 16-bit weights were written without changing the version counter, as through `.data`. Their
            fp32 weights are now the 16-bit ones, and they must be encoded again. Always empty on accelerators, where
            this is not detected.
        """
        weights = self._weights(views)
        if len(self.segments) > 1:
            if self.has_gaps and self.device.type == "cpu":  # whose digest includes them
                weights.zero_()
            torch._foreach_copy_([loan.low for loan in views.loans], [each.param_view() for each in self.segments])
        self.codec.decode(weights, views.values)
        now = None if self.digest is None else self._digest_of(weights)
        if now in (None, self.digest):
            return []
        # Which segment differs is unknown, so all of them are, but for those whose own digests are known.
        written = [segment for segment in self.segments if not segment.weight.matches_kept()]
        for segment in written:
            segment.bucket_view(views.values).copy_(segment.bucket_view(weights))
        return written

    def encode(self, views: BucketViews, stepped: list[Segment]) -> None:
        """Encode the fp32 weights of some segments in `views.values`, and write their 16-bit weights."""
        others = set() if len(stepped) == len(self.segments) else {*self.segments} - {*stepped}
        kept = [{name: tensor.clone() for name, tensor in self.saved(other).items()} for other in others]
        weights = self._weights(views)
        self.codec.encode(views.values, weights)
        for other, saved in zip(others, kept, strict=True):
            self.load(other, saved)
        if len(self.segments) > 1:
            for other in others:  # restore those that stochastic rounding has changed
                other.bucket_view(weights).copy_(flat(other.param_view()))
            loans = [loan for loan in views.loans if loan.segment not in others]
            torch._foreach_copy_([loan.segment.param_view() for loan in loans], [loan.low for loan in loans])
        if self.device.type == "cpu" and not self.codec.is_empty():  # on accelerators, reading the digest would sync
            self.digest = self._digest_of(weights)
        for segment in stepped:
            segment.weight.note_written()

    def _digest_of(self, weights: torch.Tensor) -> int | tuple[bytes, ...] | None:
        """Return a digest of the 16-bit weights, of which `weights` is a copy if there are several segments."""
        return _digest(weights) if self.digests_of is None else self.digests_of(self)

    def _weights(self, views: BucketViews) -> torch.Tensor:
        """Return the memory of the 16-bit weights; with several segments, the memory for their copies."""
        return views.weights if len(self.segments) > 1 else flat(self.segments[0].param_view())


class Part(NamedTuple):
    """A segment and its bucket."""

    bucket: Bucket
    segment: Segment

    def saved(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint entries of the segment; flat."""
        return self.bucket.saved(self.segment)

    def load(self, saved: dict[str, torch.Tensor]) -> None:
        """Load the checkpoint entries of the segment; flat."""
        self.bucket.load(self.segment, saved)


def _digest(weights: torch.Tensor) -> int:
    """Return a hash of flat 16-bit weights on a CPU, in one pass over them.

    It is the same after a permutation only if no value moves but by a multiple of four times `_columns` elements.
    """
    if weights.storage_offset() % 4:
        weights = weights.clone()
    length = weights.numel() // 4 * 4
    words, rest = weights[:length].view(torch.int64), weights[length:].view(torch.int16)  # eight bytes are fastest
    total = int(digest_of_words(words, _columns(len(words))).item())
    return total if not len(rest) else hash((total, *rest.tolist()))


@functools.cache
def _columns(words: int) -> int:
    """Return the number of columns in which `_digest` arranges words: a prime, so that no row of a weight fits in."""
    columns = max(4096, words // 16)
    while any(columns % divisor == 0 for divisor in range(2, math.isqrt(columns) + 1)):
        columns += 1
    return columns


def hashed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of a strided tensor's bits in logical order: int32, shape (1,). Does not sync."""
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return _row_digests(values.resolve_neg().reshape(1, -1))


def digest_of(values: torch.Tensor) -> torch.Tensor:
    """Return a hash of dense 16-bit numbers, in memory order: int32, shape (). Does not sync."""
    return _row_digests(flat(values.detach())[None]).view(())


def _row_digests(rows: torch.Tensor) -> torch.Tensor:
    """Return a hash of the bits of each row of a matrix: int32, never `NO_DIGEST`."""
    height, width = rows.shape
    bits = rows.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.dtype.itemsize])
    digests = torch.zeros(height, dtype=torch.int64, device=rows.device)
    wide = max(1, min(width, _PIECE))
    tall = max(1, _PIECE // wide)
    for column in range(0, width, wide):
        of_columns = multipliers(column, min(column + wide, width), rows.device)
        for row in range(0, height, tall):
            digests[row : row + tall] += (bits[row : row + tall, column : column + wide] * of_columns).sum(1)
    folded = digests.bitwise_xor(digests >> 32).to(torch.int32)
    return folded.masked_fill_(folded == NO_DIGEST, 0)


def rounded_up(length: int, aligned: int) -> int:
    """Return the smallest multiple of `aligned` that is at least `length`."""
    return -(-length // aligned) * aligned


def fill(weights: list[Weight], *, cuts: bool, aligned: int) -> list[Bucket]:
    """Put weights into buckets.

    Args:
        weights: The weights.
        aligned: Elements by which segments are aligned, in their weights and in buckets.
        cuts: Whether to split larger weights, except DTensors. Otherwise each gets a separate bucket.

    Returns:
        Buckets, in which the segments of each weight are in order.
    """
    full: list[Bucket] = []
    shared: list[Bucket] = []  # come last, because they include weights' last, shorter segments
    open_ = defaultdict[torch.device, list[Bucket]](list)
    lengths = Counter[torch.device]()
    for weight in weights:
        lengths[weight.layout.device] += local(weight.param).numel()
    for weight in weights:
        device, dtype = weight.layout.device, weight.layout.dtype
        size = rounded_up(_bucket_size(device, lengths[device]), aligned)
        length = local(weight.param).numel()
        longest = size if cuts and not is_dtensor(weight.param) else length
        for start in range(0, length, longest) if length else (0,):
            part = min(longest, length - start)
            if part >= size:
                full.append(Bucket(device, dtype, aligned))
                full[-1].add(weight, start, part)
                continue
            # On CPUs only the last one, so that runs resumed from older checkpoints draw the same random bits.
            candidates = open_[device][-1:] if device.type == "cpu" else open_[device]
            bucket = next((bucket for bucket in candidates if bucket.length + part <= size), None)
            if bucket is None:
                bucket = Bucket(device, dtype, aligned)
                open_[device].append(bucket)
                shared.append(bucket)
            bucket.add(weight, start, part)
    for bucket in shared:
        if bucket.device.type != "cpu" and len(bucket.segments) > 1:
            bucket.length = rounded_up(bucket.length, aligned)  # compiled codecs take multiples
    return full + shared


def _bucket_size(device: torch.device, length: int) -> int:
    """Return the number of weights in a bucket, for weights of a total length on a device."""
    if device.type == "cpu":
        return _BUCKET_BYTES // 4
    share = max(math.ceil(_SHARE_ON_ACCELERATORS * length), _BUCKET_BYTES // 4)
    return min(share, _BUCKET_BYTES_ON_ACCELERATORS // 4)
