"""Whether gradients are finite, how long they are, and their multiplication: each in one pass over memory.

Facts that shaped the code. On a CPU a dot product of a tensor with itself is the fastest read there is; a finite one
proves that nothing in the tensor is inf or NaN, a non-finite one proves nothing when values are huge, so only then is
the slower exact look needed. How far an fp32 one is off depends on the processor, and torch's norm of 33 million fp32
numbers is off by 0.2% on a CPU: so norms are those of short rows, which is as fast, added up in fp64. Half precision is
widened piece by piece into one buffer that stays in the cache. On an accelerator the `_foreach` forms are the fast
ones, and there the host must not look at a result. The native op that unscales looks for inf *before* it multiplies,
so a finite gradient can leave it infinite when the scale is below 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from castwise.amp.gradients import are_real_on_cpu, is_plain

# Up to so many elements it takes less time to copy tensors of one shape, and take their norms by one call, than a call
# each.
_SMALL = 2**15
# The same for a look at whether they are finite, for which one norm of all is enough.
_TINY_TENSOR = 2**11
# Up to so many elements a list of norms takes less time than dot products, which are split among threads.
_LISTED = 2**16
# So many elements of which an fp32 norm is right to 2e-7, also if all are equal and their errors have a common sign.
_ROW = 2**8
# So many elements of which a copy stays in the cache.
_PIECE = 2**18
# So many elements of small tensors are copied at once; the copy stays in the cache as well.
_COPIED = 2**18
# Of these dtypes a CPU takes dot products as fast as it can read; of half precision a hundred times slower.
_DOTTED = (torch.float32, torch.float64)
# A sum of n squares below n times this may have lost squares that fp32 cannot hold.
_TINY = 2.0**-100


def unscale_(tensors: list[torch.Tensor], factor: torch.Tensor, found_inf: torch.Tensor) -> torch.Tensor | None:
    """Multiply by `factor` in place, in fp32 or wider; set `found_inf` to 1 if values are not finite before or after.

    Args:
        tensors: Values of gradients.
        factor: fp32, one element, on the tensors' device.
        found_inf: fp32, one element, on the tensors' device; left alone if all is finite.

    Returns:
        Which tensors are finite, bool, shape (len(tensors),), where that is known anyway: not on a CPU.
    """
    dtype = tensors[0].dtype
    on_cpu = tensors[0].device.type == "cpu"
    flags = None
    if not on_cpu:  # whether the factor is above 1 cannot be asked there
        flags = are_finite(tensors, factor.reciprocal(), dtype)
        found_inf.masked_fill_(flags.all().logical_not(), 1.0)
    multiply_(tensors, factor, found_inf)
    if on_cpu and not factor.item() <= 1.0:
        found_inf.masked_fill_(are_finite(tensors, torch.ones_like(factor), dtype).all().logical_not(), 1.0)
    return flags


def multiply_(tensors: list[torch.Tensor], factor: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Do as `unscale_` does, but look at values only before the multiplication."""
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, factor)


def are_finite(tensors: list[torch.Tensor], divisor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Say of each tensor whether, divided, it is finite in a dtype. One read; syncs with no accelerator.

    Args:
        tensors: Values of gradients.
        divisor: fp32, one element, on the tensors' device, > 0.
        dtype: That of the arithmetic the quotients are for.

    Returns:
        bool, shape (len(tensors),).
    """
    if not is_plain(tensors[0]) or tensors[0].device.type != "cpu":
        return _fit(norms(tensors, math.inf), divisor, dtype)
    if Probe().proves_finite(tensors, divisor, dtype):
        return torch.ones(len(tensors), dtype=torch.bool, device="cpu")
    return _fit(_norms_on_cpu(tensors, math.inf), divisor, dtype)


def fit(norms: torch.Tensor, tensors: list[torch.Tensor], divisor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Say the same as `are_finite` of tensors whose norms are known, without reading them again.

    On an accelerator a tensor whose *norm* does not fit counts as not finite. Only finite ones larger than 1e38 differ.
    """
    flags = _fit(norms, divisor, dtype)
    if norms.device.type == "cpu" and is_plain(tensors[0]) and not flags.all():
        return _fit(_norms_on_cpu(tensors, math.inf), divisor, dtype)
    return flags


def _fit(norms: torch.Tensor, divisor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (norms / divisor.to(norms.dtype)).to(dtype).isfinite()


def norms(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the p-norm of each tensor, finite exactly if all of the tensor is. One read for p = 1, 2 and inf.

    Args:
        tensors: Values of gradients.
        norm_type: p > 0, or inf.

    Returns:
        fp64 (fp32 on a device without it), shape (len(tensors),), on the tensors' device; a plain tensor also for
        DTensors, the same on all ranks of their mesh.
    """
    first = tensors[0]
    if first.device.type == "cpu" and is_plain(first):
        return _norms_on_cpu(tensors, norm_type)
    if norm_type == math.inf:
        tensors = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    stacked = torch.stack(torch._foreach_norm(tensors, norm_type, dtype=wide(first.device)))
    return stacked if is_plain(stacked) else _whole(stacked)


def _whole(stacked: torch.Tensor) -> torch.Tensor:
    """Return the values of a subclass as a plain tensor, reduced over the mesh if it is a DTensor."""
    full_tensor = getattr(stacked, "full_tensor", None)
    return stacked.as_subclass(torch.Tensor) if full_tensor is None else full_tensor()


def wide(device: torch.device) -> torch.dtype:
    """Return the widest dtype that a device computes in."""
    return torch.float32 if device.type == "mps" else torch.float64


# -- on a CPU ---------------------------------------------------------------------------------------------------------


class Probe:
    """Proves that gradients on a CPU are finite in as few calls as it can, and remembers which have the same shape.

    Tiny tensors of one shape are copied and read together. If they no longer have one shape, dtype, device or layout
    the call fails or tells, so none of these has to be asked of each gradient. Small ones are read by one call, and
    large ones by one each.
    """

    def __init__(self) -> None:
        self._count = -1
        self._is_hopeless = False
        self._together: list[list[int]] = []
        self._others: list[int] = []

    def proves_finite(self, grads: list[torch.Tensor], divisor: torch.Tensor, dtype: torch.dtype) -> bool:
        """Say whether all gradients, divided, are surely finite in a dtype; anything else says False.

        Args:
            grads: Of any kind.
            divisor: fp32, one element.
            dtype: That of the arithmetic the quotients are for.
        """
        if len(grads) != self._count:
            self._look_at(grads)
        if self._is_hopeless or divisor.device.type != "cpu":
            return False
        try:
            bound = self._bound(grads)
        except (RuntimeError, TypeError):  # they are not what they were
            bound = math.nan
        if math.isnan(bound):
            self._count = -1
            return False
        return math.isfinite(bound) and bound <= torch.finfo(dtype).max * divisor.item() / 2

    def _look_at(self, grads: list[torch.Tensor]) -> None:
        groups = _by_shape(grads)
        self._count = len(grads)
        self._is_hopeless = not are_real_on_cpu(grads)
        self._together = [
            part
            for shape, group in groups.items()
            if shape.numel() <= _TINY_TENSOR and len(group) > 1
            for part in _stackable(shape, group)
        ]
        together = {index for group in self._together for index in group}
        self._others = [index for index in range(len(grads)) if index not in together]

    def _bound(self, grads: list[torch.Tensor]) -> float:
        """Return what no magnitude is above: not finite if one may be, NaN if the gradients are not what they were."""
        tensors = [torch.stack([grads[index] for index in group]) for group in self._together]
        tensors += [grads[index] for index in self._others]
        if not are_real_on_cpu(tensors):
            return math.nan
        total, listed = 1e-18, []  # fp32 may lose squares of less than that
        for tensor in tensors:
            if tensor.dtype not in _DOTTED:
                total += _peak(tensor)
            elif tensor.numel() <= _LISTED or not tensor.is_contiguous():
                listed.append(tensor)
            else:
                total += _not_below(math.sqrt(torch.dot(tensor.view(-1), tensor.view(-1)).item()))
        if listed:
            norms = torch._foreach_norm(listed)
            total += _not_below(torch.stack(norms).sum().item())
        return total


def _not_below(norm: float) -> float:
    """Return what no magnitude is above: fp32 norms are not off by so much."""
    return norm * 2.0


def _norms_on_cpu(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    if norm_type not in (1.0, 2.0):
        return torch.tensor([_norm_by_peak(tensor, norm_type) for tensor in tensors], dtype=torch.float64, device="cpu")
    found = _norms_by_sums(tensors, norm_type)
    squares_may_be_lost = norm_type == 2.0 and found.square().sum() <= _TINY * sum(map(torch.numel, tensors))
    doubtful = torch.ones_like(found) if squares_may_be_lost else found.isfinite().logical_not()
    for index in doubtful.nonzero().flatten().tolist():
        found[index] = _norm_by_peak(tensors[index], norm_type)
    return found


def _norms_by_sums(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    found = [0.0] * len(tensors)
    large = []
    for shape, group in _by_shape(tensors).items():
        if shape.numel() > _SMALL:
            large += group
        elif shape.numel():
            for part in _stackable(shape, group):
                rows = torch.stack([tensors[index] for index in part]).reshape(len(part), -1)
                for index, norm in zip(part, _norms_of(rows, norm_type).tolist(), strict=True):
                    found[index] = norm
    listed = [index for index in large if norm_type == 2.0 and _is_flat_fp32(tensors[index])]
    if listed:
        norms = _norms_of_large([tensors[index].view(-1) for index in listed])
        for index, norm in zip(listed, norms, strict=True):
            found[index] = norm
    for index in set(large).difference(listed):
        found[index] = _power_sum(tensors[index], norm_type) ** (1.0 / norm_type)
    return torch.tensor(found, dtype=torch.float64, device="cpu")


def _is_flat_fp32(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_contiguous()


def _norms_of_large(flats: list[torch.Tensor]) -> list[float]:
    """Return 2-norms of fp32 tensors of shape (n,): those of short rows and of the rest, joined in fp64 by one call."""
    ends = [flat.numel() // _ROW * _ROW for flat in flats]
    parts = [torch.linalg.vector_norm(flat[:end].view(-1, _ROW), dim=1) for flat, end in zip(flats, ends, strict=True)]
    parts += [flat[end:] for flat, end in zip(flats, ends, strict=True)]
    norms = [norm.item() for norm in torch._foreach_norm(parts, 2.0, dtype=torch.float64)]
    return [math.hypot(rows, rest) for rows, rest in zip(norms[: len(flats)], norms[len(flats) :], strict=True)]


def _norms_of(rows: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm of each row in fp64; of long ones and p = 2 that of shorter ones, as `_sum_of_squares` does."""
    in_short = rows.shape[1] // _ROW * _ROW
    if norm_type != 2.0 or not in_short or rows.dtype is torch.float64:
        whole: torch.Tensor = torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=torch.float64)
        return whole
    if rows.dtype not in _DOTTED:
        rows = rows.float()
    short = torch.linalg.vector_norm(rows[:, :in_short].reshape(len(rows), -1, _ROW), dim=2).double()
    rest = torch.linalg.vector_norm(rows[:, in_short:], dim=1, keepdim=True, dtype=torch.float64)
    norms: torch.Tensor = torch.linalg.vector_norm(torch.cat([short, rest], 1), dim=1)
    return norms


def _stackable(shape: torch.Size, group: list[int]) -> list[list[int]]:
    """Split a group of tensors of one shape into ones of which a copy takes little memory."""
    count = _COPIED // max(shape.numel(), 1)
    return [group[start : start + count] for start in range(0, len(group), count)]


def _by_shape(tensors: list[torch.Tensor]) -> dict[torch.Size, list[int]]:
    groups: dict[torch.Size, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.shape, []).append(index)
    return groups


def _power_sum(tensor: torch.Tensor, norm_type: float) -> float:
    """Return the sum of magnitudes (p = 1) or of squares (p = 2), in fp32 within a few elements and in fp64 beyond."""
    if norm_type == 2.0:
        return _sum(map(_sum_of_squares, _widened(tensor)))
    return _sum(piece.abs().sum().item() for part in _widened(tensor) for piece in _pieces(part))


def _sum(numbers: Iterable[float]) -> float:
    try:
        return math.fsum(numbers)
    except OverflowError:
        return math.inf


def _sum_of_squares(flat: torch.Tensor) -> float:
    if flat.dtype is torch.float64:
        return torch.dot(flat, flat).item()
    (norm,) = _norms_of_large([flat])
    return norm * norm


def _norm_by_peak(tensor: torch.Tensor, norm_type: float) -> float:
    """Return a norm that neither overflows nor underflows on the way, in two reads."""
    peak = _peak(tensor)
    if norm_type == math.inf or peak == 0.0 or not math.isfinite(peak):
        return peak
    ratios = ((piece.double() / peak).abs() for part in _widened(tensor) for piece in _pieces(part))
    total = _sum(ratio.pow_(norm_type).sum().item() for ratio in ratios)
    try:
        return min(peak * math.pow(total, 1.0 / norm_type), torch.finfo(torch.float64).max)
    except OverflowError:
        return torch.finfo(torch.float64).max


def _peak(tensor: torch.Tensor) -> float:
    if not tensor.numel():
        return 0.0
    lowest, highest = torch.aminmax(tensor)
    # max() may drop a NaN that is not its first argument, but both are NaN if one is.
    return max(-lowest.item(), highest.item())


def _widened(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield all elements in fp32 or fp64, in one part of shape (n,) or in copied ones that overwrite each other."""
    if tensor.dtype in _DOTTED:
        yield _flat(tensor)
        return
    buffer = torch.empty(min(_PIECE, tensor.numel()), dtype=torch.float32, device="cpu")
    for piece in _pieces(_flat(tensor)):
        yield buffer[: piece.numel()].copy_(piece)


def _pieces(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    pieces: tuple[torch.Tensor, ...] = flat.split(_PIECE)  # type: ignore[no-untyped-call]  # torch's
    return pieces


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor.view(-1)
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):  # channels_last or transposed: in the order of memory
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)
