"""Sketches of tensors: a few numbers that differ whenever the tensors do, by about as much."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

BUCKETS = 128
"""Signed sums while a sketch is computed."""
KEPT = 8
"""Signed sums that are kept."""
_CHUNK = 2**16  # with their signs, these fit into the cache of a CPU
_JOINED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # which `torch.cat` joins without rounding
_SMALL, _TOGETHER = 2**12, 32  # elements of tensors that are sketched together, and how many of these


class Sketch(NamedTuple):
    """A tensor in few numbers, all computed in float64.

    Args:
        buckets: Sums of the elements with fixed random signs; an element's position decides its bucket and its sign.
            The sketch of a difference is the difference of the sketches, and its norm estimates the tensor's.
        norm: The Euclidean norm.
        sum: The sum.
    """

    buckets: tuple[float, ...]
    norm: float
    sum: float

    def folded(self, count: int) -> tuple[float, ...]:
        """Return the buckets, added up to a smaller number of them."""
        if count == len(self.buckets):
            return self.buckets
        width = len(self.buckets) // count
        return tuple(math.fsum(self.buckets[i * width : (i + 1) * width]) for i in range(count))


@functools.lru_cache(maxsize=4)
def _signs(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20_260_723)
    bits = torch.randint(0, 2, (_CHUNK,), generator=generator, dtype=torch.int8)
    return (bits * 2 - 1).to(device, torch.float64 if device.type != "mps" else torch.float32)


def sketch_of(tensor: torch.Tensor) -> Sketch:
    """Return the sketch of a tensor of any dtype and layout, without a copy of all of it in float64."""
    flat = _flat(tensor)
    signs = _signs(flat.device)
    parts = []
    for number, start in enumerate(range(0, flat.numel(), _CHUNK)):
        values = flat[start : start + _CHUNK].to(signs.dtype)
        signed = values * signs[: values.numel()]
        even = values.numel() - values.numel() % BUCKETS
        buckets = signed[:even].view(-1, BUCKETS).sum(0)
        if even < values.numel():
            buckets[: values.numel() - even] += signed[even:]
        if number:  # chunks share their signs, so each is rotated by its number
            buckets = buckets.roll(number) * (-1 if (number * 2654435761 >> 16) & 1 else 1)
        parts.append(torch.cat([buckets.view(KEPT, -1).sum(1), values.dot(values).view(1), values.sum().view(1)]))
    if not parts:
        return Sketch((0.0,) * KEPT, 0.0, 0.0)
    *sums, square, of_all = (parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)).tolist()
    return Sketch(tuple(sums), math.sqrt(square) if square >= 0 else math.nan, of_all)


def sketches_of(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Sketch]]:
    """Yield names and sketches of tensors. Those of small ones are computed together, with few calls of torch."""
    small: list[tuple[str, torch.Tensor]] = []
    for name, tensor in named:
        flat = _flat(tensor)
        is_small = 0 < flat.numel() <= _SMALL
        if small and (not is_small or flat.device != small[0][1].device or len(small) == _TOGETHER):
            yield from _together(small)
            small.clear()
        if is_small:
            small.append((name, flat if flat.dtype in _JOINED else flat.to(_signs(flat.device).dtype)))
        else:
            yield name, sketch_of(tensor)
    if small:
        yield from _together(small)


@functools.lru_cache(maxsize=16)
def _layout(device: torch.device, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tensor, the kept sum and the sign of each element of tensors one after another."""
    counts = torch.tensor(sizes, device=device)
    owners = torch.arange(len(sizes), device=device).repeat_interleave(counts)
    places = torch.cat([torch.arange(size, device=device) for size in sizes])
    buckets = owners * KEPT + places % BUCKETS // (BUCKETS // KEPT)
    return owners, buckets, _signs(device)[places]


def _together(named: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Sketch]]:
    tensors, count = [tensor for _, tensor in named], len(named)
    owners, buckets, signs = _layout(tensors[0].device, tuple(tensor.numel() for tensor in tensors))
    values = torch.cat(tensors).to(signs.dtype)
    sums = values.new_zeros(count * KEPT).index_add_(0, buckets, values * signs)
    totals = [values.new_zeros(count).index_add_(0, owners, part) for part in (values * values, values)]
    rows = torch.cat([sums.view(count, KEPT), torch.stack(totals, 1)], 1).tolist()
    for (name, _), (*kept, square, total) in zip(named, rows, strict=True):
        yield name, Sketch(tuple(kept), math.sqrt(square) if square >= 0 else math.nan, total)


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of the bits of tensors, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        flat = _flat(tensor)
        flat = flat if flat.is_cpu else flat.cpu()
        digest.update(_described(flat.dtype, tensor.shape))
        if flat.numel():
            digest.update((ctypes.c_char * (flat.numel() * flat.element_size())).from_address(flat.data_ptr()))
    return digest.hexdigest()


@functools.lru_cache(maxsize=1024)
def _described(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return f"{dtype} {tuple(shape)}".encode()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):  # a DTensor
        tensor = tensor.full_tensor()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)


def relative_error(sketch: Sketch, reference: Sketch, smallest: float = 0.0) -> float:
    """Return how far a tensor is from a reference, relative to the reference's norm.

    Args:
        sketch: The tensor.
        reference: The reference; it may have fewer buckets.
        smallest: A norm below which a reference counts as zero; errors are then relative to this one.
    """
    values = (*sketch.buckets, sketch.norm, *reference.buckets, reference.norm)
    if not all(map(math.isfinite, values)):
        return 0.0 if math.isnan(sketch.norm) and math.isnan(reference.norm) else math.inf
    count = min(len(sketch.buckets), len(reference.buckets))
    pairs = zip(sketch.folded(count), reference.folded(count), strict=True)
    difference = max(math.hypot(*(a - b for a, b in pairs)), abs(sketch.norm - reference.norm))
    if difference == 0:
        return 0.0
    size = max(reference.norm, smallest)
    return difference / size if size > 0 else math.inf
