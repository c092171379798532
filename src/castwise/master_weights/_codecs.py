"""Codecs that split fp32 weights into 16-bit weights and extra bits, and join them again; all tensors are flat.

A bfloat16 weight is the rounded upper half of an fp32 number. The residue is the lower half, read as a signed 16-bit
number. Together they are the fp32 number, with one exception: 65,537 fp32 numbers round to a bfloat16 number whose last
bit is even, including a tie on either side, and 16 bits distinguish only 65,536. The codec therefore also records which
ties were rounded down.
"""

from __future__ import annotations

import functools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from castwise.master_weights import _kernels
from castwise.master_weights._kernels import (
    FIXED_POINT,
    FLOATING_FROM,
    GOLDEN,
    LARGEST_HALF,
    POOL,
    Kernel,
    can_compile,
    is_aligned,
    numbers_of_all_kinds,
)

_ROW = 512  # ties are searched in rows: one number in 65,536 is a tie, so most rows have none
_TIE = -(1 << 15)

# Multipliers and masks that move one bit of a byte into each of 8 bytes, and back.
_EACH_BYTE = 0x0101010101010101
_BIT_OF_EACH_BYTE = -0x7FBFDFEFF7FBFDFF  # 0x8040201008040201 as a signed number
_GATHER_BITS = 0x0102040810204080
_LOW_BITS = 0x7F7F7F7F7F7F7F7F


class Codec(ABC):
    """Holds the bits of fp32 weights that a segment of 16-bit weights lacks.

    All tensors are flat and of the same length: `weights` in 16 bits, `values` and `out` in fp32.

    Args:
        **kept: The data held for each weight, by its name in checkpoints.
    """

    def __init__(self, **kept: torch.Tensor) -> None:
        self._kept = kept

    @abstractmethod
    def decode(self, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the fp32 weights to `out`, and return it."""

    @abstractmethod
    def encode(self, values: torch.Tensor, weights: torch.Tensor) -> None:
        """Store fp32 weights: write `weights`, and keep the other bits."""

    def entries(self) -> dict[str, torch.dtype]:
        """Return the names and dtypes of the checkpoint entries of each weight."""
        return {name: tensor.dtype for name, tensor in self._kept.items()}

    def saved(self, begin: int, end: int) -> dict[str, torch.Tensor]:
        """Return the entries of a checkpoint for weights `begin` to `end`; they may share memory with the codec."""
        return {name: tensor[begin:end] for name, tensor in self._kept.items()}

    def load(self, begin: int, end: int, saved: dict[str, torch.Tensor]) -> None:
        """Load the entries of a checkpoint for weights `begin` to `end`."""
        for name, tensor in self._kept.items():
            tensor[begin:end].copy_(saved[name])

    def is_empty(self) -> bool:
        """Return True if the codec holds no data."""
        return not self._kept

    def bytes(self) -> int:
        """Return the number of bytes that the codec holds."""
        return sum(tensor.nbytes for tensor in self._kept.values())


def codec_of(
    method: str,
    dtype: torch.dtype,
    length: int,
    device: torch.device,
    *,
    chance: Chance,
    stream: str,
    is_compiled: bool = False,
) -> Codec:
    """Return the codec of a method.

    Args:
        method: "split" or "stochastic".
        dtype: Dtype of the weights.
        length: Number of weights.
        device: Their device.
        chance: Source of random bits, for "stochastic".
        stream: Name of the random stream, unique for each codec.
        is_compiled: Whether to compile it, where that is possible.
    """
    if method == "stochastic":
        return _Stochastic(chance, stream)
    return split_codec(dtype, length, device, is_compiled=is_compiled)


def split_codec(dtype: torch.dtype, length: int, device: torch.device, *, is_compiled: bool = False) -> Codec:
    """Return a codec that keeps all bits of fp32 weights, or nearly all for float16."""
    if dtype is torch.float16:
        is_compiled = is_compiled and length > 1 and half_kernels(device) is not None
        return (_CompiledSplitHalf if is_compiled else _SplitHalf)(length, device)
    # The bits of eight ties are a byte. Dynamo would compile again for one byte.
    if is_compiled and length % 8 == 0 and length > 8 and codec_kernels(device) is not None:
        return _CompiledSplit(length, device)
    return Split(length, device)


class Split(Codec):
    """bfloat16 weights and 16-bit residues: restores every fp32 number bit for bit, except NaN payloads."""

    def __init__(self, length: int, device: torch.device) -> None:
        self._residue = torch.zeros(length, dtype=torch.int16, device=device)
        super().__init__(residue=self._residue)
        self._ties: _ListedTies | _PackedTies = (
            _ListedTies(length) if device.type == "cpu" else _PackedTies(length, device)
        )

    def decode(self, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.copy_(weights)
        bits = out.view(torch.int32).add_(self._residue)
        self._ties.add_to(bits)
        return out

    def encode(self, values: torch.Tensor, weights: torch.Tensor) -> None:
        bits = values.view(torch.int32)
        weights.copy_(values)
        self._residue.copy_(bits)  # the conversion to int16 keeps the lower 16 bits
        self._ties.find(bits, self._residue)

    @property
    def residue(self) -> torch.Tensor:
        """The lower halves of the fp32 weights: int16."""
        return self._residue

    def rounded_down(self) -> torch.Tensor:
        """Return the sorted positions of ties that were rounded down, on a CPU."""
        assert isinstance(self._ties, _ListedTies)
        return self._ties.rounded_down()

    def set_rounded_down(self, positions: torch.Tensor) -> None:
        """Set what `rounded_down` returns, once weights and residues have been written."""
        assert isinstance(self._ties, _ListedTies)
        self._ties.set_rounded_down(positions)

    def entries(self) -> dict[str, torch.dtype]:
        return {**super().entries(), "ties": torch.bool}

    def saved(self, begin: int, end: int) -> dict[str, torch.Tensor]:
        return {**super().saved(begin, end), "ties": self._ties.mask(begin, end)}

    def load(self, begin: int, end: int, saved: dict[str, torch.Tensor]) -> None:
        super().load(begin, end, saved)
        self._ties.load(begin, saved["ties"])

    def bytes(self) -> int:
        return super().bytes() + self._ties.bytes()


class _CompiledSplit(Split):
    """`Split` in compiled kernels."""

    def __init__(self, length: int, device: torch.device) -> None:
        super().__init__(length, device)
        self._ties: _PackedTies = _PackedTies(length, device)

    def decode(self, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        kernels = self._kernels(weights)
        if kernels is not None and kernels[0](*_in_rows(weights.detach(), self._residue, self._ties.bits, out)):
            return out
        return super().decode(weights, out)

    def encode(self, values: torch.Tensor, weights: torch.Tensor) -> None:
        kernels = self._kernels(weights)
        tensors = values, weights.detach(), self._residue, self._ties.bits
        if kernels is None or not kernels[1](*_in_rows(*tensors)):
            super().encode(values, weights)

    def _kernels(self, weights: torch.Tensor) -> tuple[Kernel, Kernel] | None:
        return codec_kernels(weights.device) if is_aligned(weights) else None


def _in_rows(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield tensors with a row for each byte of ties, which are a row themselves."""
    return (each if each.dtype is torch.uint8 else each.view(-1, 8) for each in tensors)


@functools.cache
def codec_kernels(device: torch.device) -> tuple[Kernel, Kernel] | None:
    """Return `_kernels.join` and `split`, compiled and tried; None without a compiler. Takes seconds once. Syncs."""
    if not can_compile(device):
        return None
    values = numbers_of_all_kinds(device)
    codec, weights = Split(len(values), device), torch.empty_like(values, dtype=torch.bfloat16)
    ties = codec._ties = _PackedTies(len(values), device)
    kernels = Kernel(_kernels.join), Kernel(_kernels.split)
    with torch.no_grad():
        codec.encode(values, weights)
        kept = (*_in_rows(weights, codec._residue, ties.bits),)
        kernels[1].try_((*_in_rows(values),), kept)
        kernels[0].try_(kept, (*_in_rows(codec.decode(weights, torch.empty_like(values))),))
    return kernels


@functools.cache
def half_kernels(device: torch.device) -> tuple[Kernel, Kernel] | None:
    """Return `_kernels.join_half` and `split_half`, compiled and tried, as `codec_kernels` does."""
    if not can_compile(device):
        return None
    values = numbers_of_all_kinds(device)
    values = torch.where(values == values, values, 1.0)  # the residues of NaN differ between devices
    codec, weights = _SplitHalf(len(values), device), torch.empty_like(values, dtype=torch.float16)
    kernels = Kernel(_kernels.join_half), Kernel(_kernels.split_half)
    with torch.no_grad():
        codec.encode(values, weights)
        kept = weights, codec._residue
        kernels[1].try_((values,), kept)
        kernels[0].try_(kept, (codec.decode(weights, torch.empty_like(values)),))
    return kernels


@functools.cache
def rounding_kernel(device: torch.device) -> Kernel | None:
    """Return `_kernels.round_by_chance`, compiled and tried, as `codec_kernels` does."""
    if not can_compile(device):
        return None
    values, chance, kernel = numbers_of_all_kinds(device), Chance(0), Kernel(_kernels.round_by_chance)
    with torch.no_grad():
        random = chance.random_of(len(values), device, "try")
        kernel.try_((values, *random), (chance.round(values, torch.bfloat16, "try").bfloat16(),))
    return kernel


class _ListedTies:
    """Which ties were rounded down, as a list of positions; for CPUs, where its length is known without a sync."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._positions = torch.zeros(0, dtype=torch.int64)
        self._added = torch.zeros(0, dtype=torch.int32)
        """The correction of the upper half at each position: 1 << 16, or 0 for a tie that was rounded up."""

    def find(self, bits: torch.Tensor, residue: torch.Tensor) -> None:
        in_rows = self._length // _ROW * _ROW
        rows = residue[:in_rows].view(-1, _ROW)
        found = (rows.amin(1) == _TIE).nonzero().view(-1)
        if len(found):
            row, column = (rows.index_select(0, found) == _TIE).nonzero().unbind(1)
            found = found.take(row).mul_(_ROW).add_(column)
        if in_rows < self._length:
            found = torch.cat([found, (residue[in_rows:] == _TIE).nonzero().view(-1).add_(in_rows)])
        self._positions = found
        if len(found):  # an even upper half means that the tie was rounded down
            self._added = bits.take(found).bitwise_and_(1 << 16).bitwise_xor_(1 << 16)
        else:
            self._added = self._added[:0]

    def add_to(self, bits: torch.Tensor) -> None:
        if len(self._positions):
            bits.index_add_(0, self._positions, self._added)

    def mask(self, begin: int, end: int) -> torch.Tensor:
        mask = torch.zeros(self._length, dtype=torch.bool)
        mask[self._positions] = self._added != 0
        return mask[begin:end].clone()

    def load(self, begin: int, mask: torch.Tensor) -> None:
        is_other = (self._positions < begin) | (self._positions >= begin + len(mask))
        loaded = mask.nonzero().view(-1) + begin
        self._positions = torch.cat([self._positions[is_other], loaded])
        self._added = torch.cat([self._added[is_other], torch.full(loaded.shape, 1 << 16, dtype=torch.int32)])

    def rounded_down(self) -> torch.Tensor:
        return self._positions[self._added != 0].sort().values if len(self._positions) else self._positions

    def set_rounded_down(self, positions: torch.Tensor) -> None:
        self._positions = positions
        self._added = torch.full(positions.shape, 1 << 16, dtype=torch.int32)

    def bytes(self) -> int:
        return self._positions.nbytes + self._added.nbytes


class _PackedTies:
    """Which ties were rounded down, as one bit per weight; for accelerators, where a list would need a sync."""

    def __init__(self, length: int, device: torch.device) -> None:
        self._length = length
        self.bits = torch.zeros(-(-length // 8), dtype=torch.uint8, device=device)

    def find(self, bits: torch.Tensor, residue: torch.Tensor) -> None:
        self._pack(bits.bitwise_and(0x1FFFF).eq(1 << 15).view(torch.uint8))

    def add_to(self, bits: torch.Tensor) -> None:
        bits.add_(self._unpacked(), alpha=1 << 16)

    def mask(self, begin: int, end: int) -> torch.Tensor:
        return self._unpacked()[begin:end].bool()

    def load(self, begin: int, mask: torch.Tensor) -> None:
        whole = self._unpacked()
        whole[begin : begin + len(mask)] = mask
        self._pack(whole)

    def _pack(self, mask: torch.Tensor) -> None:
        padded = torch.nn.functional.pad(mask, (0, -self._length % 8)) if self._length % 8 else mask
        self.bits.copy_((padded.view(torch.int64) * _GATHER_BITS).bitwise_right_shift_(56))

    def _unpacked(self) -> torch.Tensor:
        of_byte = (self.bits.to(torch.int64) * _EACH_BYTE).bitwise_and_(_BIT_OF_EACH_BYTE)
        is_set = of_byte.add_(_LOW_BITS).bitwise_right_shift_(7).bitwise_and_(_EACH_BYTE)
        return is_set.view(torch.uint8)[: self._length]

    def bytes(self) -> int:
        return self.bits.nbytes


class _SplitHalf(Codec):
    """float16 weights and 16-bit residues: restores fp32 numbers from 2**-16 to 65504 bit for bit.

    Smaller numbers are rounded to a multiple of 2**-40. Larger finite ones are limited to 65504 plus the largest
    residue, less than 128. Inf stays inf.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self._residue = torch.zeros(length, dtype=torch.int16, device=device)
        super().__init__(half_residue=self._residue)

    def decode(self, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.copy_(weights)
        is_small = out.abs() < FLOATING_FROM
        small = out + self._residue.float().div_(FIXED_POINT)
        out.view(torch.int32).add_(self._residue)
        return out.copy_(torch.where(is_small, small, out))

    def encode(self, values: torch.Tensor, weights: torch.Tensor) -> None:
        weights.copy_(torch.where(values.isinf(), values, values.clamp(-LARGEST_HALF, LARGEST_HALF)))
        rounded = weights.float()
        floating = values.view(torch.int32) - rounded.view(torch.int32)
        fixed = (values - rounded).mul_(FIXED_POINT).round_().nan_to_num_().to(torch.int32)
        residue = torch.where(rounded.abs() < FLOATING_FROM, fixed, floating)
        self._residue.copy_(residue.clamp_(-(1 << 15), (1 << 15) - 1))


class _CompiledSplitHalf(_SplitHalf):
    """`_SplitHalf` in compiled kernels."""

    def decode(self, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        kernels = half_kernels(weights.device) if is_aligned(weights) else None
        if kernels is not None and kernels[0](weights.detach(), self._residue, out):
            return out
        return super().decode(weights, out)

    def encode(self, values: torch.Tensor, weights: torch.Tensor) -> None:
        kernels = half_kernels(weights.device) if is_aligned(weights) else None
        if kernels is None or not kernels[1](values, weights.detach(), self._residue):
            super().encode(values, weights)


class _Stochastic(Codec):
    """Stochastic rounding: keeps no extra bits; weights are right on average."""

    def __init__(self, chance: Chance, stream: str) -> None:
        super().__init__()
        self._chance, self._stream = chance, stream

    def decode(self, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(weights)

    def encode(self, values: torch.Tensor, weights: torch.Tensor) -> None:
        rounded = self._chance.rounded(values, weights, self._stream)
        if rounded is not weights:
            weights.copy_(rounded)


class Chance:
    """Random bits that depend only on a seed, a stream, and the number of steps taken.

    Args:
        seed: Any integer.
    """

    def __init__(self, seed: int) -> None:
        self._is_compiled = False
        self.set(seed, 0)

    def compile_on(self, devices: set[torch.device]) -> None:
        """From now on, round to bfloat16 in a compiled kernel, on devices for which there is a compiler."""
        self._is_compiled = bool([*filter(None, map(rounding_kernel, devices))])

    def set(self, seed: int, taken: int) -> None:
        """Restore the state of a checkpoint."""
        self.seed, self.taken = seed, taken
        # Both stay on their devices, so that a step copies nothing to them and can be captured in a CUDA graph.
        self._taken_on: dict[torch.device, torch.Tensor] = {}  # steps that only a device has counted
        self._starts: dict[tuple[str, torch.device], torch.Tensor] = {}  # by stream; one for each 65,536 elements
        self._pools: dict[torch.device, torch.Tensor] = {}

    def count(self, device: torch.device, found_inf: torch.Tensor | None = None) -> None:
        """Count a step of weights on a device, unless `found_inf` is nonzero. Does not sync."""
        if found_inf is None and device.type == "cpu":
            self.taken += 1
        elif found_inf is not None and found_inf.is_cpu:
            self.taken += int(found_inf.item() == 0)
        else:
            counted_on = device if found_inf is None else found_inf.device
            if counted_on not in self._taken_on:
                self._taken_on[counted_on] = torch.zeros((), dtype=torch.int32, device=counted_on)
            self._taken_on[counted_on].add_(1 if found_inf is None else found_inf.reshape(()) == 0)

    def steps(self) -> int:
        """Return the number of steps taken. Syncs if a device counts them."""
        return self.taken + sum(int(taken.item()) for taken in self._taken_on.values())

    def round(self, values: torch.Tensor, dtype: torch.dtype, stream: str) -> torch.Tensor:
        """Round stochastically with `round_by_chance`, using the bits of a stream for this step."""
        flat = values.reshape(-1)
        random = self.words(len(flat), flat.device, stream).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
        return round_by_chance(flat, random, dtype).view(values.shape)

    def rounded(self, values: torch.Tensor, memory: torch.Tensor, stream: str) -> torch.Tensor:
        """Round like `round`, to the dtype of `memory`; return that if it was used, else new memory. All are flat."""
        device, length = values.device, len(values)
        if self._is_compiled and memory.dtype is torch.bfloat16 and length > POOL and is_aligned(memory):
            kernel = rounding_kernel(device)
            if kernel is not None and kernel(values, *self.random_of(length, device, stream), memory.detach()):
                return memory
        return self.round(values, memory.dtype, stream)

    def words(self, length: int, device: torch.device, stream: str) -> torch.Tensor:
        """Return 32 random bits per element of a stream for this step: int32, shape (length,). Does not sync.

        In each step, elements draw independently. Over steps, the numbers of an element grow by 2^32 times the golden
        ratio, modulo 2^32, from a random start. Any run of steps covers the range evenly, so rounding errors of numbers
        that change slowly cancel out, while those of independent draws grow with the square root of the steps.
        """
        pool, starts, taken = self.random_of(length, device, stream)
        here = pool if length >= POOL else pool[:length]
        return torch.add(here, starts + taken * GOLDEN).view(-1)[:length]

    def random_of(
        self, length: int, device: torch.device, stream: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what `words` are made of: the pool, a start for each of its rows, and the number of steps taken."""
        pool, starts = self._pools.get(device), self._starts.get((stream, device))
        rows = -(-length // POOL)
        if pool is None:
            pool = self._pools[device] = random_words(POOL, self._key("pool", device))
        if starts is None or len(starts) != rows:
            starts = self._starts[stream, device] = random_words(rows, self._key(stream, device)).view(rows, 1)
        return pool, starts, self._step(device)

    def _key(self, stream: str, device: torch.device) -> torch.Tensor:
        number = _signed(zlib.crc32(f"{self.seed} {stream}".encode()))
        return torch.full((), number, dtype=torch.int32, device=device)

    def _step(self, device: torch.device) -> torch.Tensor:
        step = torch.full((), _signed(self.taken), dtype=torch.int32, device=device)
        for taken in self._taken_on.values():
            step += taken.to(device)
        return step


def _signed(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def round_by_chance(values: torch.Tensor, random: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round stochastically: to one of the two neighbours in `dtype`, so that the result is right on average.

    Numbers that `dtype` can represent, inf and NaN are unchanged. For float16, numbers beyond 65504 become 65504.

    Args:
        values: fp32 tensor.
        random: int32 tensor of the same shape, with 16 random bits per element.
        dtype: bfloat16 or float16.

    Returns:
        fp32 tensor of numbers that `dtype` can represent.
    """
    if dtype is torch.bfloat16:
        rounded = (random + values.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
        return torch.where(values == values, rounded, values)  # the sum turns some NaNs into numbers; inf stays inf
    random = random.bitwise_and(0x1FFF)
    rounded = (random + values.view(torch.int32)).bitwise_and_(-(1 << 13)).view(torch.float32)
    # 13 bits, too: next to an integer below 2**10, fp32 holds no more. Below 2**-14 all steps are equal.
    steps = (values.abs() * 2.0**24 + random / 2.0**13).floor_().mul_(2.0**-24).copysign_(values)
    rounded = torch.where(values.abs() < 2.0**-14, steps, rounded).clamp_(-LARGEST_HALF, LARGEST_HALF)
    return torch.where(values.isfinite(), rounded, values)


def random_words(length: int, key: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits per element, which depend only on the key and the element's position.

    Source: the finalizer of MurmurHash3 with the multipliers of xxHash, applied twice.

    Args:
        length: Number of elements.
        key: int32, shape ().

    Returns:
        int32, shape (length,).
    """
    x = torch.arange(length, dtype=torch.int32, device=key.device).mul_(-0x61C8864F).add_(key)
    for _ in range(2):
        x.bitwise_xor_(x >> 15).mul_(-0x7A143589)
        x.bitwise_xor_(x >> 13).mul_(-0x3D4D51C3)
        x.bitwise_xor_(x >> 16)
    return x.mul_(-0x61C8864F)  # these shifts copy the sign, so an exclusive or always ends with the sign bit 0
