"""Count a tensor's elements by binary exponent, in one read. Other statistics follow from these counts.

Measurements behind the implementation, with 2**20 fp32 numbers on a CPU: extracting the exponent bits and
`torch.bincount` take 1.1 ms, `torch.histc` 3 ms, `torch.frexp` alone 1.6 ms, `torch.histogram` with powers of two as
edges 17 ms. On an accelerator `bincount` syncs, because it needs the largest number; `histc` with given bounds does
not.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from castwise._torch_private import stored_values
from castwise.amp._measure import wide
from castwise.monitor._tally import Tally

# torch does not split this few elements among threads. On a busy machine every split waits for a thread that is not
# running: counting 2**20 numbers on two cores with four busy processes takes 3 ms in these pieces, and 20 to 90 ms in
# larger ones. On an idle machine it takes 2.5 ms in these pieces, 1.2 ms in larger ones.
_PIECE_ON_CPU = 2**15
# Larger pieces need fewer kernel launches. `histc` counts in fp32, which represents integers exactly up to 2**24.
_PIECE_ON_ACCELERATORS = 2**22


def piece_size(device: torch.device) -> int:
    """Return the number of elements to process at once on a device, to limit memory."""
    return _PIECE_ON_CPU if device.type == "cpu" else _PIECE_ON_ACCELERATORS


@dataclass(frozen=True)
class _Encoding:
    """The storage layout of an IEEE format, and the meaning of the bins.

    Bin 0 counts zeros, bins 1 to `mantissa_bits` subnormals, and the last bin inf and NaN. The bins between count
    normal numbers: bin b holds 2**(b - offset) <= |v| < 2**(b - offset + 1).
    """

    floats: torch.dtype
    integers: torch.dtype
    packing: tuple[str, str]
    exponent_bits: int
    mantissa_bits: int

    @cached_property
    def infinity(self) -> int:
        """The bits of inf as an integer; those of a NaN's magnitude are larger."""
        return int((2**self.exponent_bits - 1) << self.mantissa_bits)

    @cached_property
    def magnitude(self) -> int:
        """The mask of all bits except the sign."""
        return int(2 ** (self.exponent_bits + self.mantissa_bits) - 1)

    @cached_property
    def offset(self) -> int:
        """The difference between a bin's index and its exponent."""
        return int(2 ** (self.exponent_bits - 1) - 1 + self.mantissa_bits)

    @cached_property
    def bins(self) -> int:
        """The number of bins."""
        return int(2**self.exponent_bits + self.mantissa_bits)

    def number(self, bits: int) -> float:
        """Return the number with these bits."""
        as_integer, as_float = self.packing
        number: float = struct.unpack(as_float, struct.pack(as_integer, bits))[0]
        return number


_FP32 = _Encoding(torch.float32, torch.int32, ("<i", "<f"), exponent_bits=8, mantissa_bits=23)
_FP64 = _Encoding(torch.float64, torch.int64, ("<q", "<d"), exponent_bits=11, mantissa_bits=52)


@torch.no_grad()
def count(tensor: torch.Tensor, divisor: torch.Tensor | None = None) -> torch.Tensor:
    """Count a tensor's elements by exponent. Read the result with `tally`. Does not sync with an accelerator.

    The tensor is read once, in pieces, so the memory needed does not grow with its size. Formats of 32 bits or less are
    counted in fp32, which represents all of their numbers.

    Args:
        tensor: A plain tensor of any floating-point or complex dtype, strides and device. Of a sparse tensor the stored
            values are counted. Real and imaginary parts of complex numbers count as separate elements.
        divisor: Divide the elements by this first, shape ().

    Returns:
        int64, on the tensor's device: the number of elements in each bin, then the bits of the largest finite
        magnitude, then the bits of the smallest non-zero magnitude minus 1.

    Raises:
        TypeError: The elements are integers or booleans.
    """
    values = _values(tensor)
    encoding = _FP64 if values.dtype is torch.float64 else _FP32
    found = torch.zeros(encoding.bins + 2, dtype=torch.int64, device=values.device)
    bins, largest, below_smallest = torch.split(found, [encoding.bins, 1, 1])
    below_smallest.fill_(encoding.magnitude)
    add = _add_on_cpu if values.device.type == "cpu" else _add_without_a_sync
    for piece in _pieces(values, piece_size(values.device)):
        piece = piece.to(encoding.floats)
        piece = piece if divisor is None else piece / divisor
        add(piece.view(encoding.integers).bitwise_and(encoding.magnitude), encoding, bins, largest, below_smallest)
    return found


@torch.no_grad()
def sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squared magnitudes of a tensor's elements. Does not sync with an accelerator.

    Args:
        tensor: A tensor as for `count`.

    Returns:
        fp64 (fp32 where a device has no fp64), shape (1,), on the tensor's device.
    """
    values = _values(tensor)
    found = torch.zeros(1, dtype=wide(values.device), device=values.device)
    for piece in _pieces(values, piece_size(values.device)):
        found += piece.to(found.dtype, copy=True).square_().sum()
    return found


class Counter:
    """Counts the exponents of many tensors with few ops, on an accelerator launches, however many there are.

    A tensor is copied when it is added, in one op, and the copies are counted together. On CPUs only small ones are.

    Args:
        with_squares: Whether to add up the squares too, as `sum_of_squares` does.
    """

    def __init__(self, *, with_squares: bool = False) -> None:
        self._with_squares = with_squares
        self._batches: dict[tuple[torch.device, torch.dtype], _Batch] = {}
        self._pieces: list[list[_Piece]] = []

    @torch.no_grad()
    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor as `count` does."""
        values = _values(tensor)
        is_large = values.device.type == "cpu" and values.numel() > _PIECE_ON_CPU // 2
        if is_large or not values.numel():
            squares = sum_of_squares(tensor) if self._with_squares else None
            self._pieces.append([_Piece(count(tensor), squares)])
            return
        encoding = _FP64 if values.dtype is torch.float64 else _FP32
        key = values.device, encoding.floats
        if key not in self._batches:
            self._batches[key] = _Batch(values.device, encoding, self._with_squares)
        batch = self._batches[key]
        self._pieces.append([batch.add(piece) for piece in _pieces(values, piece_size(values.device))])

    @torch.no_grad()
    def results(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return a result of `count` for each tensor, and its sum of squares if wanted, in the order of `add`."""
        for batch in self._batches.values():
            batch.count()
        return [_together(pieces) for pieces in self._pieces]


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of a tensor, once it is counted."""

    counts: torch.Tensor | None = None
    squares: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class _Batch:
    """Copies of pieces on one device that are counted together."""

    device: torch.device
    encoding: _Encoding
    with_squares: bool
    memory: torch.Tensor = field(init=False)
    pieces: list[_Piece] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = torch.empty(piece_size(self.device), dtype=self.encoding.floats, device=self.device)

    def add(self, values: torch.Tensor) -> _Piece:
        """Copy flat values of at most `piece_size` elements."""
        used = sum(self.lengths)
        # `histc` finds bins in fp32, which is exact to an eighth of a bin up to this many.
        if used + len(values) > len(self.memory) or (len(self.pieces) + 1) * self.encoding.bins > 2**20:
            self.count()
            used = 0
        self.memory[used : used + len(values)].copy_(values)
        self.pieces.append(_Piece())
        self.lengths.append(len(values))
        return self.pieces[-1]

    def count(self) -> None:
        """Count the pieces that were added since the last call."""
        if not self.pieces:
            return
        encoding, rows = self.encoding, len(self.pieces)
        values = self.memory[: sum(self.lengths)]
        if self.with_squares:
            squares = torch.split(values.to(wide(self.device), copy=True).square_(), self.lengths)
            for piece, of_piece in zip(self.pieces, torch._foreach_norm(squares, 1), strict=True):
                piece.squares = of_piece.reshape(1)
        bits = values.view(encoding.integers).bitwise_and_(encoding.magnitude)
        counts = torch.empty(rows, encoding.bins + 2, dtype=torch.int64, device=self.device)
        bins = _bins_of(bits, encoding)
        torch._foreach_add_(torch.split(bins, self.lengths), [encoding.bins * row for row in range(rows)])
        flat_counts = torch.zeros(rows * encoding.bins, dtype=torch.int64, device=self.device)
        _add_bins(bins, flat_counts)
        counts[:, :-2] = flat_counts.view(rows, encoding.bins)
        counts[:, -2] = torch.stack(torch._foreach_max(torch.split(_finite_or_zero(bits, encoding), self.lengths)))
        above = torch.split(encoding.magnitude - _less_one(bits, encoding), self.lengths)
        counts[:, -1] = encoding.magnitude - torch.stack(torch._foreach_max(above))
        for piece, of_piece in zip(self.pieces, counts.unbind(), strict=True):
            piece.counts = of_piece
        self.pieces, self.lengths = [], []


def _together(pieces: list[_Piece]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the counts and the sum of squares of a tensor's pieces."""
    if len(pieces) == 1:
        assert pieces[0].counts is not None
        return pieces[0].counts, pieces[0].squares
    squares = [piece.squares for piece in pieces if piece.squares is not None]
    counts = torch.stack([piece.counts for piece in pieces if piece.counts is not None])
    numbers = [counts[:, :-2].sum(0), counts[:, -2:-1].amax(0), counts[:, -1:].amin(0)]
    return torch.cat(numbers), torch.stack(squares).sum(0) if squares else None


def tally(found: torch.Tensor) -> Tally:
    """Convert a result of `count` that is on the host."""
    encoding = _FP32 if len(found) == _FP32.bins + 2 else _FP64
    *bins, largest, below_smallest = found.tolist()
    smallest, offset = below_smallest + 1, encoding.offset
    return Tally(
        numel=sum(bins),
        zero=bins[0],
        nonfinite=bins[-1],
        largest=encoding.number(largest),
        smallest=encoding.number(smallest) if smallest < encoding.infinity else float("inf"),
        counts={index - offset: n for index, n in enumerate(bins[1:-1], start=1) if n},
    )


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a real, dense tensor of the elements to count, sharing memory where possible."""
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = stored_values(values)
    elif values.layout is not torch.strided:
        values = values.values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point():
        raise TypeError(f"tensor must be floating-point or complex, got {tensor.dtype}")
    return values.resolve_neg()


def _pieces(values: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yield a tensor in flat pieces of at most `size` elements. Copies at most one piece at a time."""
    if values.numel() <= size:
        if values.numel():
            yield values.reshape(-1)
    elif values.is_contiguous():
        yield from torch.split(values.view(-1), size)
    else:
        longest = max(range(values.dim()), key=values.size)
        for half in values.chunk(2, longest):
            yield from _pieces(half, size)


def _add_on_cpu(
    bits: torch.Tensor,
    encoding: _Encoding,
    bins: torch.Tensor,
    largest: torch.Tensor,
    below_smallest: torch.Tensor,
) -> None:
    """Add a piece to the counts. Reading on the host is free on a CPU, so rare cases are branched on."""
    low, high = map(int, bits.aminmax())
    if low == 0:
        low = int(_less_one(bits, encoding).amin()) + 1
    if high >= encoding.infinity:
        high = int(_finite_or_zero(bits, encoding).amax())
    if low >> encoding.mantissa_bits == 0:
        bins += torch.bincount(_bins_of(bits, encoding), minlength=encoding.bins)
    else:  # no subnormals, so exponent field 0 counts only zeros
        exponents = bits >> encoding.mantissa_bits
        if encoding is _FP32:
            exponents = exponents.to(torch.uint8)  # bincount is a third faster with these
        counts = torch.bincount(exponents, minlength=2**encoding.exponent_bits)
        bins[0] += counts[0]
        bins[encoding.mantissa_bits + 1 :] += counts[1:]
    largest.clamp_(min=high)
    below_smallest.clamp_(max=low - 1)


def _add_without_a_sync(
    bits: torch.Tensor,
    encoding: _Encoding,
    bins: torch.Tensor,
    largest: torch.Tensor,
    below_smallest: torch.Tensor,
) -> None:
    _add_bins(_bins_of(bits, encoding), bins)
    torch.maximum(largest, _finite_or_zero(bits, encoding).amax(), out=largest)
    torch.minimum(below_smallest, _less_one(bits, encoding).amin(), out=below_smallest)


def _add_bins(of_each: torch.Tensor, bins: torch.Tensor) -> None:
    """Add to each bin the number of elements in it, without a sync with an accelerator."""
    if bins.device.type == "cpu":
        bins += torch.bincount(of_each, minlength=len(bins))
    elif (
        torch.are_deterministic_algorithms_enabled()
    ):  # histc raises then, although sums of ones do not depend on order
        of_each = of_each.long()
        bins.scatter_add_(0, of_each, torch.ones_like(of_each))
    else:
        # Half a bin away from the edges, so that rounding cannot move a number to another bin.
        bins += torch.histc(of_each.float().add_(0.5), len(bins), 0, len(bins)).long()


def _finite_or_zero(bits: torch.Tensor, encoding: _Encoding) -> torch.Tensor:
    return torch.where(bits < encoding.infinity, bits, 0)


def _less_one(bits: torch.Tensor, encoding: _Encoding) -> torch.Tensor:
    """Return the bits minus 1. Zero wraps around to the largest value, so it never is the minimum."""
    return (bits - 1).bitwise_and_(encoding.magnitude)


def _bins_of(bits: torch.Tensor, encoding: _Encoding) -> torch.Tensor:
    """Return the bin of each element. For a subnormal, use the exponent of its stored integer converted to float."""
    exponents = bits >> encoding.mantissa_bits
    as_floats = bits.to(encoding.floats).view(encoding.integers) >> encoding.mantissa_bits
    bias = encoding.offset - encoding.mantissa_bits
    low = (as_floats - (bias - 1)).clamp_(min=0)
    return torch.where(exponents == 0, low, exponents + encoding.mantissa_bits)
