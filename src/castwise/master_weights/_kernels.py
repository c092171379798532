"""The codecs in one kernel each, compiled where Triton is; the ops in `_codecs` launch a dozen.

Compiled code is used only if it gives the bits of those ops for every kind of number, so it changes no result. It is
compiled for any length when a `MasterWeights` is created, and not during a step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from castwise._warnings import warn_or_print

WORTH_COMPILING = 1 << 25
"""Weights on a device from which the step repays the seconds that compiling takes."""
POOL = 1 << 16
"""Random words that all streams of `Chance` share; they stay in a CPU's cache."""
GOLDEN = 0x9E3779B9 - (1 << 32)
"""2^32 times the golden ratio, as a signed number."""
LARGEST_HALF = 65504.0
FLOATING_FROM, FIXED_POINT = 2.0**-16, 2.0**40
"""From the first number up, 16 bits distinguish the fp32 numbers that round to one fp16 number; below, residues are
fixed-point numbers, multiplied by the second."""
_COMPILED_DEVICES = ("cuda", "xpu")
_LOWER_HALVES = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xABCD)


def join(weights: torch.Tensor, residue: torch.Tensor, ties: torch.Tensor, out: torch.Tensor) -> None:
    """Write the fp32 numbers that a codec keeps to `out`.

    Args:
        weights: bfloat16, shape (rows, 8).
        residue: int16, of the same shape: the lower halves of the numbers.
        ties: uint8, shape (rows,): which ties were rounded down, as one bit for each weight.
        out: fp32, of the shape of the weights.
    """
    position = torch.arange(8, dtype=torch.int32, device=ties.device)
    rounded_down = ties.unsqueeze(1).to(torch.int32).bitwise_right_shift(position).bitwise_and(1)
    bits = weights.float().view(torch.int32) + residue + rounded_down.bitwise_left_shift(16)
    out.copy_(bits.view(torch.float32))


def split(values: torch.Tensor, weights: torch.Tensor, residue: torch.Tensor, ties: torch.Tensor) -> None:
    """Write what `join` joins.

    Args:
        values: fp32, shape (rows, 8); the others are as in `join`.
        weights: bfloat16.
        residue: int16.
        ties: uint8.
    """
    bits = values.view(torch.int32)
    weights.copy_(values)
    residue.copy_(bits)
    position = torch.arange(8, dtype=torch.int32, device=values.device)
    rounded_down = bits.bitwise_and(0x1FFFF).eq(1 << 15).to(torch.int32)
    # In rows of eight, this sum has the shape of what is written above, so one kernel reads the numbers for all three.
    ties.copy_(rounded_down.bitwise_left_shift(position).sum(1, dtype=torch.int32))


def join_half(weights: torch.Tensor, residue: torch.Tensor, out: torch.Tensor) -> None:
    """Write the fp32 numbers that a codec of float16 weights keeps to `out`.

    Args:
        weights: float16; like all tensors flat and dense.
        residue: int16, of the same length: as fixed-point numbers below `FLOATING_FROM`, else what to add to the bits.
        out: fp32.
    """
    rounded = weights.float()
    fixed = rounded + residue.float() / FIXED_POINT
    floating = (rounded.view(torch.int32) + residue).view(torch.float32)
    out.copy_(torch.where(rounded.abs() < FLOATING_FROM, fixed, floating))


def split_half(values: torch.Tensor, weights: torch.Tensor, residue: torch.Tensor) -> None:
    """Write what `join_half` joins. The residue of NaN is 0.

    Args:
        values: fp32; the others are as in `join_half`.
        weights: float16.
        residue: int16.
    """
    limited = torch.where(values.isinf(), values, values.clamp(-LARGEST_HALF, LARGEST_HALF))
    bits = limited.view(torch.int32)
    # Rounded by hand: Inductor may leave out a conversion to float16 and back.
    upper = (bits + 0xFFF + bits.bitwise_right_shift(13).bitwise_and(1)).bitwise_and(-(1 << 13)).view(torch.float32)
    rounded = torch.where(limited.abs() < 2.0**-14, (limited * 2.0**24).round() * 2.0**-24, upper)
    weights.copy_(torch.where(values == values, rounded, values))
    floating = values.view(torch.int32) - rounded.view(torch.int32)
    is_fixed = rounded.abs() < FLOATING_FROM
    fixed = (torch.where(is_fixed, values - rounded, 0.0) * FIXED_POINT).round().to(torch.int32)
    kept = torch.where(is_fixed, fixed, floating).clamp(-(1 << 15), (1 << 15) - 1)
    residue.copy_(torch.where(values == values, kept, 0))


def round_by_chance(
    values: torch.Tensor, pool: torch.Tensor, starts: torch.Tensor, taken: torch.Tensor, out: torch.Tensor
) -> None:
    """Write numbers that are rounded stochastically to `out`, with the random bits of `Chance`.

    Args:
        values: fp32, more than `POOL`.
        pool: int32, `POOL` random words.
        starts: int32, shape (rows, 1): a random word for each `POOL` of the numbers.
        taken: int32, shape (): the number of steps taken.
        out: bfloat16.
    """
    index = torch.arange(len(values), dtype=torch.int32, device=values.device)
    words = pool[index & (POOL - 1)] + (starts.view(-1) + taken * GOLDEN)[index >> POOL.bit_length() - 1]
    bits = (words.bitwise_right_shift(16).bitwise_and(0xFFFF) + values.view(torch.int32)).bitwise_and(-(1 << 16))
    out.copy_(torch.where(values == values, bits.view(torch.float32), values))


class Kernel:
    """A function of tensors that is compiled. It may fail, with one warning, and is then of no use.

    Args:
        function: Writes to its last arguments, and to none that it reads.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._compiled = torch.compile(function, fullgraph=True, dynamic=True)
        self._has_failed = False

    def __call__(self, *tensors: torch.Tensor) -> bool:
        """Call the function; return False if it has failed, and what it writes has to be written by torch's ops."""
        if not self._has_failed:
            try:
                self._compiled(*tensors)
            except Exception as error:  # a compiler may raise anything
                self.give_up(f"{type(error).__name__}: {error}")
        return not self._has_failed

    def give_up(self, reason: str) -> None:
        """Fail from now on, and warn."""
        self._has_failed = True
        first_line = reason.partition("\n")[0]
        warn_or_print(
            f"a codec of MasterWeights is not compiled, so steps launch more kernels ({first_line})", RuntimeWarning
        )

    def try_(self, arguments: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
        """Give up unless the function writes the expected bits, but for those of NaN."""
        written = tuple(torch.zeros_like(each) for each in expected)
        if self(*arguments, *written) and not all(map(_are_equal, written, expected)):
            self.give_up("compiled code does not give the same bits")


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    return bool(((a.view(integers) == b.view(integers)) | ((a != a) & (b != b))).all())


def can_compile(device: torch.device) -> bool:
    """Return True if Inductor writes Triton kernels for a device."""
    if device.type not in _COMPILED_DEVICES or importlib.util.find_spec("triton") is None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (7, 0)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return True if compiled code reads and writes a tensor where it is, instead of a copy."""
    return tensor.data_ptr() % 16 == 0


def numbers_of_all_kinds(device: torch.device) -> torch.Tensor:
    """Return fp32 numbers with all upper halves and the lower halves around a tie, NaN and inf among them."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device=device)[:, None] << 16
    lower = torch.tensor(_LOWER_HALVES, dtype=torch.int32, device=device)
    return (upper | lower).view(torch.float32).view(-1).clone()  # Dynamo would compile for this view
