"""How an operand of a matrix product is quantized: to which numbers, and which elements share a scale.

An operand has two dimensions, of which the product contracts the second. Scales are computed from the operand as it is
("dynamic scaling"); amax, scale and quotient are fp32. The arithmetic is that of the project a recipe comes from, up to
the order of roundings, so that results are its bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

_LARGEST_E4M3 = 448.0
_LARGEST_E2M1 = 6.0


class Quantized(NamedTuple):
    """A quantized operand.

    Args:
        values: Of the operand's shape, in a dtype of 8 bits. That of e2m1 numbers is e4m3, which holds them all.
        scale: fp32, of a shape that `Scaling.dequantize` knows.
    """

    values: torch.Tensor
    scale: torch.Tensor


class Scaling(Protocol):
    """A way to quantize an operand."""

    def quantize(self, operand: torch.Tensor) -> Quantized:
        """Quantize an operand of two dimensions and of any floating-point dtype; NaNs stay NaN."""

    def dequantize(self, quantized: Quantized) -> torch.Tensor:
        """Return in fp32 the numbers that a quantized operand stands for."""

    @property
    def numbers(self) -> str:
        """The format of the values, by the name of its bits."""

    @property
    def largest(self) -> float:
        """The largest of the values: what is larger is saturated."""


@dataclass(frozen=True)
class Float8:
    """A format of 8 bits, with fp32 scales by which operands are multiplied.

    ::

        scale = largest / max(amax, 1e-12), in fp64, then fp32; rounded down to a power of two if asked
        values = round(saturate(operand * scale))

    As in torchao 0.18 (`torchao.float8`, and `prototype.blockwise_fp8_training` for blocks).

    Args:
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        block: Rows and columns that share a scale, as DeepSeek-V3 has it (arXiv 2412.19437, section 3.3.2); None for
            all of them.
        power_of_2: Whether scales are powers of two, so that dividing by them again is exact.
    """

    dtype: torch.dtype
    block: tuple[int | None, int | None]
    power_of_2: bool = False

    @property
    def numbers(self) -> str:
        """The format: "e4m3" or "e5m2"."""
        return "e4m3" if self.dtype is torch.float8_e4m3fn else "e5m2"

    @property
    def largest(self) -> float:
        """The largest number of the format."""
        return torch.finfo(self.dtype).max

    def quantize(self, operand: torch.Tensor) -> Quantized:
        """Quantize an operand; scales have the shape (), (rows, 1), or that of blocks, (a, 1, b, 1)."""
        grouped, dims = self._grouped(operand)
        amax = torch.linalg.vector_norm(grouped, float("inf"), dims, self.block[0] is not None, dtype=torch.float32)
        scale = (self.largest / amax.double().clamp(min=1e-12)).float()
        if self.power_of_2:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        # Before torch 2.12 the cast does not saturate.
        values = (grouped.float() * scale).clamp_(-self.largest, self.largest).to(self.dtype)
        return Quantized(values.view(operand.shape) if grouped is not operand else values, scale)

    def dequantize(self, quantized: Quantized) -> torch.Tensor:
        """Return `values / scale`."""
        grouped, _ = self._grouped(quantized.values)
        numbers = grouped.float().div_(quantized.scale)
        return numbers.view(quantized.values.shape) if grouped is not quantized.values else numbers

    def _grouped(self, operand: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Return an operand in a shape, and the dimensions in which elements share a scale."""
        rows, columns = self.block
        if columns is None:
            return operand, ((0, 1) if rows is None else (1,))
        assert rows is not None
        return operand.reshape(operand.shape[0] // rows, rows, operand.shape[1] // columns, columns), (1, 3)


@dataclass(frozen=True)
class Mxfp8:
    """MXFP8: e4m3 numbers in blocks of 32 along the contraction, each with a power of two as scale (E8M0).

    ::

        scale = 2 ** clamp(ceil(log2(amax / 448)), -127, 127)
        values = round(saturate(operand / scale))

    The format is that of the OCP Microscaling Formats specification v1.0. The scale is rounded up, which NVIDIA found
    necessary in training (arXiv 2506.08027) and torchao calls RCEIL: rounded down, as in section 6.3 of the
    specification, it would saturate the largest numbers of some blocks.
    """

    @property
    def numbers(self) -> str:
        """The format."""
        return "e4m3"

    @property
    def largest(self) -> float:
        """The largest e4m3 number."""
        return _LARGEST_E4M3

    def quantize(self, operand: torch.Tensor) -> Quantized:
        """Quantize an operand whose second dimension 32 divides; scales have the shape (rows, blocks, 1)."""
        grouped = operand.reshape(operand.shape[0], -1, 32).float()
        amax = torch.linalg.vector_norm(grouped, float("inf"), -1, keepdim=True)
        exponent = torch.ceil(torch.log2(amax / _LARGEST_E4M3)).clamp_(-127, 127)
        values = (grouped * torch.exp2(-exponent)).clamp_(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
        return Quantized(values.view(operand.shape), torch.exp2(exponent))

    def dequantize(self, quantized: Quantized) -> torch.Tensor:
        """Return `values * scale`."""
        values = quantized.values
        return values.view(values.shape[0], -1, 32).float().mul_(quantized.scale).view(values.shape)


@dataclass(frozen=True)
class Nvfp4:
    """NVFP4: e2m1 numbers in blocks of 16 along the contraction, each with an e4m3 scale, and an fp32 scale of all.

    ::

        scale of all = amax / (448 * 6)
        scale of a block = round(clamp(amax of the block / 6 / scale of all, 2**-6, 448)) in e4m3
        values = round(saturate(operand / scale of all / scale of the block))

    The format is NVIDIA's (arXiv 2509.25149), the arithmetic that of torchao's `NVFP4Tensor`. Every operand is rounded
    to nearest even. NVIDIA's own recipe for training does more: it rotates operands (random Hadamard transform), rounds
    gradients stochastically, and scales weights in squares of 16 x 16.
    """

    @property
    def numbers(self) -> str:
        """The format."""
        return "e2m1"

    @property
    def largest(self) -> float:
        """The largest e2m1 number."""
        return _LARGEST_E2M1

    def quantize(self, operand: torch.Tensor) -> Quantized:
        """Quantize an operand whose second dimension 16 divides.

        Scales have the shape (rows, blocks, 1), and are products of both.
        """
        grouped = operand.reshape(operand.shape[0], -1, 16).float()
        amax = torch.linalg.vector_norm(grouped, float("inf"), -1, keepdim=True)
        # The bound keeps the reciprocal finite where all is zero.
        of_all = (amax.amax() / (_LARGEST_E4M3 * _LARGEST_E2M1)).clamp(min=2.0**-100)
        of_block = (amax / _LARGEST_E2M1 / of_all).clamp_(2.0**-6, _LARGEST_E4M3).to(torch.float8_e4m3fn).float()
        numbers = (grouped * (1.0 / of_all / of_block)).clamp_(-_LARGEST_E2M1, _LARGEST_E2M1)
        return Quantized(_rounded_to_e2m1(numbers).to(torch.float8_e4m3fn).view(operand.shape), of_all * of_block)

    def dequantize(self, quantized: Quantized) -> torch.Tensor:
        """Return `values * scale`."""
        values = quantized.values
        return values.view(values.shape[0], -1, 16).float().mul_(quantized.scale).view(values.shape)


def _rounded_to_e2m1(numbers: torch.Tensor) -> torch.Tensor:
    """Round fp32 numbers from -6 to 6 to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, ties to the even one."""
    size = numbers.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(numbers / step) * step
