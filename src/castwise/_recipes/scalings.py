"""How operands of matrix products are quantized: to which numbers, and which elements share a scale.

An operand has two dimensions, of which the product contracts the second. Scales are computed from the current operand
("dynamic scaling"); amax, scale and quotient are fp32. The arithmetic follows the project that a recipe comes from, in
the same order of roundings, so results match it bit for bit.

8-bit and 4-bit numbers are rounded in fp32 and kept as fp32 or bf16, which hold all of them: CPUs take several times as
long to convert torch's 8-bit dtypes, and torch does not convert to its 4-bit dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional


class Numbers(NamedTuple):
    """The finite numbers of a format.

    Args:
        name: Its bits: "e4m3" has four of exponent and three of mantissa.
        mantissa_bits: How many bits follow the leading one.
        smallest_normal: The smallest number with full precision.
        largest: The largest number.
        dtype: The dtype for torch's kernels; None if they are not used.
    """

    name: str
    mantissa_bits: int
    smallest_normal: float
    largest: float
    dtype: torch.dtype | None = None

    def round_(self, values: torch.Tensor) -> torch.Tensor:
        """Round fp32 values in place to the nearest number of the format, ties to even; saturate larger ones."""
        values.clamp_(-self.largest, self.largest)
        # 1.5 * 2**23 times the local spacing of the format's numbers: a sum with that has no bits left below the
        # spacing.
        exponent = (values.view(torch.int32) & 0x7F800000).view(torch.float32)
        magic = exponent.clamp_(min=self.smallest_normal).mul_(1.5 * 2.0 ** (23 - self.mantissa_bits))
        return values.add_(magic).sub_(magic)


# Table 1 of arXiv 2209.05433 (fp8), table 5 of the OCP Microscaling Formats specification v1.0 (e2m1).
E4M3 = Numbers("e4m3", 3, 2.0**-6, 448.0, torch.float8_e4m3fn)
E5M2 = Numbers("e5m2", 2, 2.0**-14, 57344.0, torch.float8_e5m2)
E2M1 = Numbers("e2m1", 1, 1.0, 6.0)


class Quantized(NamedTuple):
    """A quantized operand.

    Args:
        values: Numbers of the format, in the operand's shape, as fp32 or bf16.
        scale: fp32, in the shape that `Scaling.dequantize_` expects.
    """

    values: torch.Tensor
    scale: torch.Tensor


class Scaling(Protocol):
    """A way to quantize an operand."""

    @property
    def numbers(self) -> Numbers:
        """The format of the values."""

    @property
    def fits_bf16(self) -> bool:
        """Whether bf16 holds all numbers of a dequantized operand."""

    def quantize(self, operand: torch.Tensor) -> Quantized:
        """Quantize a two-dimensional operand of any floating-point dtype; NaNs stay NaN."""

    def dequantize_(self, quantized: Quantized) -> torch.Tensor:
        """Return the dequantized operand in fp32; overwrites the quantized values if they are fp32."""


@dataclass(frozen=True)
class Float8:
    """An 8-bit format, with fp32 scales by which operands are multiplied.

    ::

        scale = largest / max(amax, 1e-12), in fp64, then fp32; rounded down to a power of two if asked
        values = round(saturate(operand * scale))

    As in torchao 0.18 (`torchao.float8`, and `prototype.blockwise_fp8_training` for blocks).

    Args:
        numbers: `E4M3` or `E5M2`.
        block: Rows and columns that share a scale, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2); None for all.
        power_of_2: Whether scales are powers of two, so that dividing by them is exact.
    """

    numbers: Numbers
    block: tuple[int | None, int | None]
    power_of_2: bool = False
    fits_bf16: bool = False  # with power-of-two scales it could, but torchao's emulation uses fp32 there too

    def quantize(self, operand: torch.Tensor) -> Quantized:
        """Quantize an operand; scales have the shape (), (rows, 1), or for blocks (a, 1, b, 1)."""
        grouped, dims = self._grouped(operand)
        amax = grouped.abs()
        for dim in dims:  # one by one is faster
            amax = amax.amax(dim, keepdim=True)
        if self.block[0] is None:
            amax = amax.view(())
        scale = (self.numbers.largest / amax.double().clamp(min=1e-12)).float()
        if self.power_of_2:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        return Quantized(self.numbers.round_(grouped.float() * scale).reshape(operand.shape), scale)

    def dequantize_(self, quantized: Quantized) -> torch.Tensor:
        """Return `values / scale`."""
        grouped, _ = self._grouped(quantized.values)
        return grouped.float().div_(quantized.scale).reshape(quantized.values.shape)

    def _grouped(self, operand: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Return the operand reshaped into blocks, and the dimensions along which elements share a scale."""
        rows, columns = self.block
        if columns is None:
            return operand, ((1, 0) if rows is None else (1,))
        assert rows is not None
        operand = operand.float().contiguous()  # amax over blocks takes four times as long if transposed
        return operand.view(operand.shape[0] // rows, rows, operand.shape[1] // columns, columns), (3, 1)


@dataclass(frozen=True)
class Mxfp8:
    """MXFP8: e4m3 numbers in blocks of 32 along the contraction, each with a power-of-two scale (E8M0).

    ::

        scale = 2 ** clamp(ceil(log2(amax / 448)), -127, 127)
        values = round(saturate(operand / scale))

    The format is that of the OCP Microscaling Formats specification v1.0. The scale is rounded up, which NVIDIA found
    necessary in training (arXiv 2506.08027) and torchao calls RCEIL: rounded down, as in section 6.3 of the
    specification, it would saturate the largest numbers of some blocks.
    """

    numbers: Numbers = E4M3
    fits_bf16: bool = True

    def quantize(self, operand: torch.Tensor) -> Quantized:
        """Quantize an operand whose second dimension is a multiple of 32; scales have the shape (rows, blocks, 1)."""
        grouped = operand.float().contiguous().view(operand.shape[0], -1, 32)
        amax = grouped.abs().amax(-1, keepdim=True)
        exponent = torch.ceil(torch.log2(amax / self.numbers.largest)).clamp_(-127, 127)
        values = self.numbers.round_(grouped * torch.exp2(-exponent))
        return Quantized(values.view(operand.shape), torch.exp2(exponent))

    def dequantize_(self, quantized: Quantized) -> torch.Tensor:
        """Return `values * scale`."""
        values = quantized.values
        return values.view(values.shape[0], -1, 32).float().mul_(quantized.scale).view(values.shape)


@dataclass(frozen=True)
class Nvfp4:
    """NVFP4: e2m1 numbers in blocks of 16 along the contraction, each with an e4m3 scale, and one fp32 scale for all.

    ::

        scale of all = amax / (448 * 6)
        scale of a block = round(clamp(amax of the block / 6 / scale of all, 2**-6, 448)) in e4m3
        values = round(saturate(operand / scale of all / scale of the block))

    The format is NVIDIA's (arXiv 2509.25149), the arithmetic that of torchao's `NVFP4Tensor`. Every operand is rounded
    to nearest even. NVIDIA's own recipe for training does more: it rotates operands (random Hadamard transform), rounds
    gradients stochastically, and scales weights in squares of 16 x 16.
    """

    numbers: Numbers = E2M1
    fits_bf16: bool = False

    def quantize(self, operand: torch.Tensor) -> Quantized:
        """Quantize an operand whose second dimension is a multiple of 16.

        Scales have the shape (rows, blocks, 1); each is the product of both scales.
        """
        grouped = operand.float().contiguous().view(operand.shape[0], -1, 16)
        # For so few elements, pooling takes a third of the time of `amax`.
        amax = functional.max_pool1d(grouped.abs().view(operand.shape), 16).unsqueeze(-1)
        # The bound keeps the reciprocal finite if all elements are zero.
        tensor_scale = (amax.amax() / (E4M3.largest * E2M1.largest)).clamp(min=2.0**-100)
        block_scales = E4M3.round_((amax / E2M1.largest / tensor_scale).clamp_(min=E4M3.smallest_normal))
        values = self.numbers.round_(grouped * (1.0 / tensor_scale / block_scales))
        return Quantized(values.view(operand.shape), tensor_scale * block_scales)

    def dequantize_(self, quantized: Quantized) -> torch.Tensor:
        """Return `values * scale`."""
        values = quantized.values
        return values.view(values.shape[0], -1, 16).float().mul_(quantized.scale).view(values.shape)
