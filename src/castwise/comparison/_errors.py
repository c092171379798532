"""How far tensors are from those of a reference: sums over elements, and the figures computed from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Elements processed at once, so that fp64 temporaries are small compared with the tensors.
_CHUNK = 2**17
# Sums of squares below this may have lost small terms to underflow in fp32.
_SMALL = 1e-30
FP32_EPS = 2.0**-23
"""Relative errors below it are those of any number in fp32."""


@dataclass(frozen=True)
class Errors:
    """How far values are from the reference's.

    Elements that are not finite in the reference are ignored. Elements that are not finite in the values count only in
    `nonfinite`.

    Args:
        relative_rms: Root mean square of the errors over that of the reference; inf if the reference is all zeros.
        bias: Mean of the errors over the root mean square of the reference.
        cosine: Cosine of the angle between the values and the reference.
        largest: Magnitude of the largest error, in the units of the values.
        nonfinite: Share of elements that are not finite where the reference is.
    """

    relative_rms: float
    bias: float
    cosine: float
    largest: float
    nonfinite: float


class ErrorSums:
    """Accumulates errors over the elements of any number of tensors and their references.

    Example:
        >>> sums = ErrorSums()
        >>> _ = sums.add(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
        >>> round(sums.errors().relative_rms, 6), sums.errors().largest
        (0.1, 0.5)
    """

    __slots__ = ("cross", "elements", "error", "largest", "nonfinite", "reference_squares", "squares")

    def __init__(self) -> None:
        self.elements = self.nonfinite = 0
        self.error = self.squares = self.reference_squares = self.cross = self.largest = 0.0

    def add(self, reference: torch.Tensor, value: torch.Tensor) -> bool:
        """Add a tensor and its reference of the same shape. Syncs.

        Returns:
            Whether they differ at all.
        """
        differ = False
        for expected, got in _chunks(reference, value):
            wide = _wide(expected, got)
            differ |= self._add(expected.to(wide), got.to(wide))
        return differ

    def add_rest(
        self, reference: torch.Tensor, value: torch.Tensor, own_reference: torch.Tensor, own: torch.Tensor
    ) -> None:
        """Add a tensor, minus the errors that another tensor `own` has against its own reference."""
        for expected, got, without, with_error in _chunks(reference, value, own_reference, own):
            wide = _wide(expected, got, without, with_error)
            self._add(expected.to(wide), got.to(wide) - (with_error.to(wide) - without.to(wide)))

    def _add(self, reference: torch.Tensor, value: torch.Tensor) -> bool:
        sums, lost = _sums(reference, value), 0
        self.elements += reference.numel()
        lost_small = reference.dtype is torch.float32 and sums[-1] > 0 and sums[1] < _SMALL
        if lost_small or not all(map(math.isfinite, sums)):
            reference, value = reference.double(), value.double()
            counts = reference.isfinite()
            finite = counts & value.isfinite()
            self.elements -= int((~counts).sum())
            lost = int((counts & ~finite).sum())
            self.nonfinite += lost
            sums = _sums(reference[finite], value[finite])
        error, squares, reference_squares, cross, largest = sums
        self.error += error
        self.squares += squares
        self.reference_squares += reference_squares
        self.cross += cross
        self.largest = max(self.largest, largest)
        return largest > 0 or lost > 0

    def errors(self) -> Errors | None:
        """Return the figures for everything added; None if there were no elements."""
        finite = self.elements - self.nonfinite
        if not self.elements:
            return None
        if not finite:
            return Errors(math.nan, math.nan, math.nan, math.nan, 1.0)
        return Errors(
            relative_rms=_over(math.sqrt(self.squares), math.sqrt(self.reference_squares)),
            bias=_over(self.error / finite, math.sqrt(self.reference_squares / finite)),
            cosine=self.cosine(),
            largest=self.largest,
            nonfinite=self.nonfinite / self.elements,
        )

    def cosine(self) -> float:
        """Return the cosine of the angle between values and reference; 1 if both are all zeros.

        NaN if only one is all zeros, or if no element is finite in both.
        """
        if self.elements == self.nonfinite:
            return math.nan
        value_squares = self.value_squares()
        if not self.reference_squares or not value_squares:
            return 1.0 if self.reference_squares == value_squares else math.nan
        product = math.sqrt(self.reference_squares) * math.sqrt(value_squares)
        return max(-1.0, min(1.0, (self.reference_squares + self.cross) / product))

    def norm_ratio(self) -> float:
        """Return the norm of the values over that of the reference; NaN if no element is finite in both."""
        if self.elements == self.nonfinite:
            return math.nan
        return _over(math.sqrt(self.value_squares()), math.sqrt(self.reference_squares), 1.0)

    def value_squares(self) -> float:
        """Return the sum of the squares of the values."""
        return max(0.0, self.reference_squares + 2 * self.cross + self.squares)


class EffectSums:
    """Accumulates the effect of a module: gradients of the loss with respect to its outputs, times the errors in them.

    `lacks_gradient` is True if a gradient was not finite where there was an error. The effect is then unknown.
    """

    __slots__ = ("elements", "lacks_gradient", "squares")

    def __init__(self) -> None:
        self.elements, self.squares, self.lacks_gradient = 0, 0.0, False

    def add(self, gradient: torch.Tensor, reference: torch.Tensor, value: torch.Tensor) -> None:
        """Add an output, unless it has no error. A non-finite element makes the effect infinite."""
        if torch.equal(reference, value):
            return
        for part, expected, got in _chunks(gradient, reference, value):
            # An element that is also non-finite in the reference, such as in a mask, is not an error.
            has_error = expected.isfinite() & (got != expected)
            error = torch.where(has_error, got.double() - expected.double(), 0.0)
            shift = torch.where(has_error, part.double() * error, 0.0)
            squares = float(torch.dot(shift, shift))
            if not math.isfinite(squares):
                squares = math.inf
                self.lacks_gradient = self.lacks_gradient or bool((has_error & ~part.isfinite()).any())
            self.squares += squares
        self.elements += real(gradient).numel()

    def rms(self) -> float:
        """Return the root mean square."""
        return math.sqrt(self.squares / self.elements) if self.elements else 0.0

    def root(self) -> float:
        """Return the root of the sum of the squares."""
        return math.sqrt(self.squares)


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    flat = [real(local(tensor.detach())).reshape(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), _CHUNK):
        yield tuple(tensor[start : start + _CHUNK] for tensor in flat)


def _wide(*tensors: torch.Tensor) -> torch.dtype:
    return torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; other tensors are returned unchanged."""
    on_this_rank = getattr(tensor, "to_local", None)
    return tensor if on_this_rank is None else on_this_rank()


def is_rounded(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is floating-point or complex, so that a precision rounds it."""
    return tensor.is_floating_point() or tensor.is_complex()


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as real, with a last dimension of 2; other tensors are returned unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _sums(reference: torch.Tensor, value: torch.Tensor) -> list[float]:
    if not reference.numel():
        return [0.0] * 5
    error = value - reference
    sums: list[float] = torch.stack(
        [
            error.sum(),
            torch.dot(error, error),
            torch.dot(reference, reference),
            torch.dot(reference, error),
            error.abs().max(),
        ]
    ).tolist()
    return sums


def _over(a: float, b: float, if_both_are_zero: float = 0.0) -> float:
    if b:
        return a / b
    return math.inf if a else if_both_are_zero
