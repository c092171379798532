"""`Range`: the smallest and largest finite value of a tensor, and its counts of NaN and inf."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from castwise._torch_private import stored_values, waited
from castwise.amp._gradients import is_plain

Value = Literal["nan", "inf", "-inf"]

_MEASURED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(frozen=True)
class Range:
    """The range of one tensor's values. Real and imaginary parts of complex numbers count separately.

    Args:
        dtype: Name of the dtype, without "torch.".
        shape: Shape of the tensor, or of a DTensor's part on this rank.
        lowest: Smallest finite value; None if there is none.
        highest: Largest finite value; None if there is none.
        nan: Number of NaNs.
        inf: Number of infinities, of either sign.
    """

    dtype: str
    shape: tuple[int, ...]
    lowest: float | None
    highest: float | None
    nan: int
    inf: int

    @property
    def largest(self) -> float | None:
        """The largest finite magnitude."""
        return None if self.lowest is None or self.highest is None else max(-self.lowest, self.highest)

    @property
    def nonfinite(self) -> int:
        """The number of non-finite values."""
        return self.nan + self.inf

    def __str__(self) -> str:
        between = "no finite values" if self.lowest is None else f"{self.lowest:.5g} .. {self.highest:.5g}"
        counts = [f"{count} {name}" for count, name in ((self.nan, "nan"), (self.inf, "inf")) if count]
        return ", ".join([f"{self.dtype} {self.shape}", between, *counts])


def stored(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the plain tensor that holds a tensor's elements; None if there is none.

    For a sparse tensor it holds the stored elements, for a DTensor the elements on this rank.
    """
    if tensor.is_meta or tensor.is_quantized:
        return None
    if tensor.layout is torch.sparse_coo:
        return stored_values(tensor)
    if tensor.layout in _COMPRESSED or tensor.is_nested:
        return stored(tensor.values())
    if tensor.layout is not torch.strided:
        return None
    if not is_plain(tensor):
        inner = tensor.to_local() if hasattr(tensor, "to_local") else waited(tensor)
        return None if inner is tensor else stored(inner)
    return tensor


def memory_of(tensor: torch.Tensor) -> int | None:
    """Return the address of the storage that a tensor is a view of; None if it has none."""
    elements = stored(tensor)
    return None if elements is None else elements.untyped_storage().data_ptr() or None


def is_all_of_its_memory(tensor: torch.Tensor) -> bool:
    """Return True if a tensor covers its whole storage."""
    elements = stored(tensor)
    return elements is not None and elements.nbytes >= elements.untyped_storage().nbytes()


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view of a tensor's floating-point values, of complex ones as real; None if it has none."""
    elements = stored(tensor) if tensor.is_floating_point() or tensor.is_complex() else None
    if elements is not None and elements.is_complex():
        return torch.view_as_real(elements.resolve_conj())
    return elements


@torch.no_grad()
def range_of(tensor: torch.Tensor) -> Range | None:
    """Return the range of a tensor, None if it has no floating-point values. Syncs with the host.

    Reads the tensor once if all values are finite.
    """
    values = values_of(tensor)
    if values is None:
        return None
    measured = _measured(values)
    lowest, highest = _ends(measured)
    nan = inf = 0
    if lowest is None or highest is None or not (math.isfinite(lowest) and math.isfinite(highest)):
        finite = measured[measured.isfinite()]
        lowest, highest = _ends(finite)
        nan = int(measured.isnan().count_nonzero())
        inf = measured.numel() - finite.numel() - nan
    shape = tensor.shape if is_plain(tensor) else values.shape
    return Range(str(tensor.dtype).removeprefix("torch."), tuple(shape), lowest, highest, nan, inf)


def has_only_minus_inf(tensor: torch.Tensor) -> bool:
    """Return True if all non-finite values of a tensor are -inf, as in an additive attention mask."""
    values = values_of(tensor)
    if values is None:
        return False
    measured = _measured(values)
    return bool((measured.isfinite() | (measured == -math.inf)).all())


@torch.no_grad()
def first_not_finite(tensor: torch.Tensor) -> tuple[tuple[int, ...], Value] | None:
    """Return the index and kind of a tensor's first non-finite value; None if all are finite."""
    values = values_of(tensor)
    if values is None or (measured := _measured(values)).isfinite().all():
        return None
    index = tuple(measured.isfinite().logical_not().nonzero()[0].tolist())
    number = measured[index].item()
    value: Value = "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
    return (index[:-1] if tensor.is_complex() else index), value


def _ends(measured: torch.Tensor) -> tuple[float | None, float | None]:
    if not measured.numel():
        return None, None
    lowest, highest = torch.stack(torch.aminmax(measured)).tolist()
    return lowest, highest


def _measured(values: torch.Tensor) -> torch.Tensor:
    """Return values in a dtype that comparison ops support; fp8 has none."""
    return values.detach() if values.dtype in _MEASURED else values.detach().float()
