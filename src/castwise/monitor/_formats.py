"""Floating-point formats and their ranges.

Sources: IEEE 754-2019 (fp16, fp32); Micikevicius et al., "FP8 Formats for Deep Learning", 2022, table 1 (e4m3, e5m2).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with a sign, an exponent and a mantissa.

    Args:
        name: Name in records and reports.
        exponent_bits: Number of exponent bits; the bias is `2**(exponent_bits - 1) - 1`.
        mantissa_bits: Number of stored mantissa bits, without the implicit leading one.
        has_infinity: Whether the largest exponent is reserved for inf and NaN. If not, only all ones is NaN.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True

    @property
    def bias(self) -> int:
        """The bias added to an exponent before it is stored."""
        return int(2 ** (self.exponent_bits - 1) - 1)

    @property
    def smallest_normal_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def smallest_subnormal_exponent(self) -> int:
        """The exponent of the smallest positive number."""
        return self.smallest_normal_exponent - self.mantissa_bits

    @property
    def largest(self) -> float:
        """The largest finite number."""
        if self.has_infinity:
            return float((2 - 2.0**-self.mantissa_bits) * 2.0**self.bias)
        return float((2 - 2.0 ** (1 - self.mantissa_bits)) * 2.0 ** (self.bias + 1))

    @property
    def smallest_normal(self) -> float:
        """The smallest number with full precision."""
        return float(2.0**self.smallest_normal_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number. Magnitudes below half of it round to zero."""
        return float(2.0**self.smallest_subnormal_exponent)


FP32 = Format("fp32", exponent_bits=8, mantissa_bits=23)
"""IEEE 754 binary32: the full precision of PyTorch."""
FP16 = Format("fp16", exponent_bits=5, mantissa_bits=10)
"""IEEE 754 binary16: 11 bits of precision, numbers from 6e-8 to 65,504."""
BF16 = Format("bf16", exponent_bits=8, mantissa_bits=7)
"""bfloat16: the range of fp32, with 8 bits of precision."""
E4M3 = Format("e4m3", exponent_bits=4, mantissa_bits=3, has_infinity=False)
"""8 bits with 3 stored mantissa bits: no infinities, the largest number is 448."""
E5M2 = Format("e5m2", exponent_bits=5, mantissa_bits=2)
"""8 bits with 2 stored mantissa bits: the range of fp16."""

# The formats that a monitor evaluates, by name in records.
LOW_PRECISION = {format_.name: format_ for format_ in (FP16, BF16, E4M3, E5M2)}
