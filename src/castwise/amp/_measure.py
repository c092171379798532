"""Arithmetic on gradients: find infs, compute norms, unscale and clip; tensors in, tensors out.

On a CPU the host may read results, so a cheap way that is nearly always right comes first, and an exact way follows if
there is doubt. On an accelerator the host must not read results, so the only way has to be exact.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from castwise._torch_private import stored_values
from castwise.amp._checks import real_number
from castwise.amp._gradients import Group, is_plain

# By device: fp32, one element, not 0 if a gradient there is not finite.
FoundInfs: TypeAlias = dict[torch.device, torch.Tensor]
# Parameters and the norm of each one's gradient, shape ().
Norms: TypeAlias = list[tuple[list[torch.Tensor], list[torch.Tensor]]]

# Sets its second argument to 1 if the first ones are not finite, and multiplies them by the third, in fp32 or wider.
native_check_ = torch._amp_foreach_non_finite_check_and_unscale_

# From torch 2.14 on, DTensors take the dtype of `_foreach_norm` for dimensions, and raise.
_DTENSORS_MISREAD_DTYPE = torch.__version__ >= "2.14"

# Gradients with fewer elements stay in a CPU's cache, where multiplying them by 1 takes half the time of their norms.
_SMALL = 1 << 22
# Tensors with this many elements or more are worth a separate call.
_LARGE = 1 << 15

# In scaled fp32 norms below this, squares may have underflowed.
_LOST_SQUARES = 1e-15

# torch adds this to a norm before it divides by it; rounded to fp32.
_EPSILON = ctypes.c_float(1e-6).value


def wide(device: torch.device) -> torch.dtype:
    """Return the widest dtype that a device computes in."""
    return torch.float32 if device.type == "mps" else torch.float64


def sums_in_fp64(device: torch.device) -> bool:
    """Return True if a device adds up squares in fp64 about as fast as it reads fp32 numbers."""
    return _has_fast_fp64(device.index) if device.type == "cuda" else device.type != "mps"


@functools.cache
def _has_fast_fp64(index: int) -> bool:
    if not torch.cuda.is_available():
        return True  # fake tensors
    # Chips of data centres; AMD's are 9.x. All others have at most 1/32 as many units for fp64 as for fp32 (CUDA C++
    # Programming Guide, throughput of native arithmetic instructions).
    return torch.cuda.get_device_capability(index) in {(6, 0), (7, 0), (8, 0), (9, 0), (9, 4), (9, 5), (10, 0)}


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale, fp32, rounded once: fp32 division may be approximate on accelerators."""
    if scale.is_cpu:
        return scale.reciprocal()
    return scale.to(wide(scale.device)).reciprocal().float()


def found_inf_on(found: FoundInfs, device: torch.device, like: torch.Tensor) -> torch.Tensor:
    """Return a device's found_inf; if there is none yet, add zeros like `like`, which is on that device."""
    if device not in found:
        found[device] = torch.zeros_like(like)
    return found[device]


def combine(found_infs: Iterable[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the largest flag, shape (), on `like`'s device; a single flag that is already there is not copied."""
    flags = list(found_infs)
    if len(flags) == 1 and flags[0].device == like.device and not flags[0].dim():
        return flags[0]
    if not flags:
        return torch.zeros_like(like)
    return torch.stack([flag.to(like.device, non_blocking=True).reshape(()) for flag in flags]).amax()


# -- unscaling --------------------------------------------------------------------------------------------------------


def multiply_(groups: Iterable[Group], factor: torch.Tensor, found: FoundInfs) -> None:
    """Multiply gradients in place, in fp32 or wider; set `found` where one was not finite *before*.

    Args:
        groups: The gradients.
        factor: fp32, one element, on any device.
        found: Updated in place.
    """
    for group in groups:
        here = factor if factor.device == group.device else factor.to(group.device, non_blocking=True)
        if is_plain(group.tensors[0]):
            found_inf = found_inf_on(found, group.device, here)
            native_check_(group.tensors, found_inf, here)
        else:
            # Of a DTensor, the native op would check only this rank's part.
            found_inf = nonfinite(_norms(group, math.inf))
            found[group.device] = torch.maximum(found_inf_on(found, group.device, here), found_inf)
            native_check_(group.tensors, torch.zeros_like(found_inf), here)


def find_new_infs(groups: Iterable[Group], factor: torch.Tensor, found: FoundInfs) -> None:
    """Set `found` where multiplying by `factor` has made a gradient infinite, which only a factor above 1 can do.

    torch checks only before it multiplies, and then steps on -inf. On an accelerator this reads the gradients.
    """
    if factor.is_cpu and factor.item() <= 1.0:
        return
    for group in groups:
        of_group = nonfinite(_norms(group, math.inf))
        found[group.device] = torch.maximum(found_inf_on(found, group.device, of_group), of_group)


# -- finding infs before a fused step ---------------------------------------------------------------------------------


def check(groups: Iterable[Group], divisor: torch.Tensor) -> tuple[FoundInfs, Norms]:
    """Check whether gradients stay finite when a fused optimizer, which computes in fp32 or wider, divides them.

    The gradients keep their values. They are read once; small ones on a CPU are multiplied by 1, as in torch.

    Args:
        groups: The gradients.
        divisor: fp32, one element.

    Returns:
        found_inf by device, and the norms that were computed, which are not finite where a quotient is not.
    """
    found: FoundInfs = {}
    norms: Norms = []
    for group in groups:
        here = divisor if divisor.device == group.device else divisor.to(group.device, non_blocking=True)
        found_inf = found_inf_on(found, group.device, here)
        if group.device.type == "cpu" and is_plain(group.tensors[0]):  # parameters are checked only after a skip
            may_grow = here.item() < 1.0
            if not may_grow and sum(map(torch.Tensor.numel, group.tensors)) < _SMALL:
                native_check_(group.tensors, found_inf, torch.ones_like(here))
                continue
            if (may_grow or not _proves_finite(group)) and not are_finite(group.tensors, here).all():
                found_inf.fill_(1.0)  # never 0.0: another dtype of the same device may have set it
        else:
            found_norms = _norms(group, math.inf)
            torch._foreach_div_(found_norms, here)
            native_check_(found_norms, found_inf, here)
            norms.append((group.params, found_norms))
    return found, norms


def _proves_finite(group: Group) -> bool:
    """Return True if norms or sums of squares prove that gradients on a CPU are finite; False proves nothing."""
    if group.dtype is torch.float32:
        # A CPU's dot product takes half the time of a norm.
        large = [tensor for tensor in group.tensors if tensor.numel() >= _LARGE and tensor.is_contiguous()]
        rest = [tensor for tensor in group.tensors if tensor.numel() < _LARGE or not tensor.is_contiguous()]
        squares = [torch.dot(flat, flat) for flat in (tensor.view(-1) for tensor in large)]
        proofs = [*squares, *(torch._foreach_norm(rest) if rest else ())]
    else:
        proofs = list(torch._foreach_norm(group.tensors))
    overflowed = torch.zeros(1, device="cpu")
    native_check_(proofs, overflowed, torch.ones_like(overflowed))
    return not overflowed.item()


def are_finite(tensors: Sequence[torch.Tensor], divisor: torch.Tensor | None = None) -> torch.Tensor:
    """Return for each tensor whether it is finite once divided in fp32 or wider: bool, shape (len(tensors),)."""
    if divisor is not None:
        tensors = [tensor.float() / divisor if tensor.dtype.itemsize < 4 else tensor / divisor for tensor in tensors]
    return torch.stack([tensor.isfinite().all() for tensor in tensors])


def local_flags(
    params: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], divisor: torch.Tensor | None = None
) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """Return which tensors are finite (of DTensors, this rank's part). No collective, so one rank alone may call it.

    Args:
        params: The parameters that the tensors belong to.
        tensors: Gradients or weights; those that are not dense or COO-sparse numbers are left out.
        divisor: fp32, one element: the divisor that is still to be applied.

    Returns:
        For each device, the parameters and a bool for each.
    """
    by_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    with torch.no_grad():
        for param, tensor in zip(params, tensors, strict=True):
            local = getattr(tensor, "to_local", lambda tensor=tensor: tensor)().detach()
            if local.layout is torch.sparse_coo:
                local = stored_values(local)
            if local.layout is torch.strided and (local.is_floating_point() or local.is_complex()):
                of_device = by_device.setdefault(local.device, ([], []))
                of_device[0].append(param)
                of_device[1].append(local)
        return [
            (of_device, are_finite(local, None if divisor is None else divisor.to(device)))
            for device, (of_device, local) in by_device.items()
        ]


# -- norms and clipping -----------------------------------------------------------------------------------------------


def check_bound(name: str, value: object) -> float:
    """Return the bound as a float; raise unless it is a number >= 0 (inf clips nothing)."""
    bound = real_number(name, value)
    if not bound >= 0.0:
        raise ValueError(f"{name} must be a number >= 0, got {value!r}")
    return bound


def check_norm_type(value: object) -> float:
    """Return p as a float; raise unless it is a number > 0, or inf."""
    norm_type = math.inf if value == "inf" else real_number("norm_type", value)
    if not norm_type > 0.0:
        raise ValueError(f"norm_type must be a number > 0 or inf, got {value!r}")
    return norm_type


def norm_of(
    groups: Sequence[Group], norm_type: float, scale: torch.Tensor, max_norm: float
) -> tuple[torch.Tensor, Norms]:
    """Return the p-norm of all gradients together, still scaled, shape (), on `scale`'s device; and the norm of each.

    On a CPU it is computed as in torch, in the dtype of the gradients, or in fp64 if fp32 cannot hold the squares. On
    an accelerator, sums are computed in fp64, but those of fp32 gradients in fp32 if the device is slow in fp64: such
    gradients have to be unscaled before, as in torch.

    Args:
        groups: The gradients.
        norm_type: p > 0, or inf.
        scale: The factor that the gradients contain.
        max_norm: The bound that the norm will be compared with.
    """
    norms = [_norms(group, norm_type) for group in groups]
    total = _total(groups, norms, norm_type, scale)
    if total.is_cpu:
        known = total.item()
        may_be_lost = known < _LOST_SQUARES and (max_norm < _LOST_SQUARES or scale.item() < 1.0)
        if norm_type != math.inf and (may_be_lost or not math.isfinite(known)):
            norms = [_norms(group, norm_type, torch.float64) for group in groups]
            total = _total(groups, norms, norm_type, scale)
    return total, [(group.params, of_group) for group, of_group in zip(groups, norms, strict=True)]


def needs_unscaling(group: Group) -> bool:
    """Return True if a group's squares are added up in fp32, which may not hold those of scaled gradients."""
    if group.device.type == "cpu":  # it reads the norm, and adds up again in fp64 where fp32 is too small
        return False
    is_fp32 = group.dtype is torch.float32 and not group.has_half  # unscaling would round 16-bit gradients
    return is_fp32 and not sums_in_fp64(group.device)


def _norms(group: Group, norm_type: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return the norm of each tensor; norms of DTensors are the same on all ranks of their mesh."""
    tensors = group.tensors
    on_accelerator = group.device.type != "cpu"
    if dtype is None and (on_accelerator or group.dtype is torch.float16):
        # The largest value fits into fp32; sums may need more.
        in_fp64 = on_accelerator and norm_type != math.inf and not needs_unscaling(group)
        dtype = wide(group.device) if in_fp64 else _at_least_fp32(group.dtype)
    elif dtype is None and group.has_half:
        dtype = torch.float32
    if group.is_complex and norm_type != 2.0:
        tensors = [torch.linalg.vector_norm(tensor, dim=-1, dtype=wide(group.device)) for tensor in tensors]
    if norm_type == math.inf and not all(map(torch.Tensor.numel, tensors)):
        tensors = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    norms = foreach_norm(tensors, norm_type, dtype)
    if group.unrounded is not None:
        for index, param in enumerate(group.params):  # one at a time, to need memory for one only
            if (unrounded := group.unrounded(param)) is not None:
                norms[index] = foreach_norm([unrounded], norm_type, dtype)[0]
    if is_plain(group.tensors[0]):
        return norms
    stacked = torch.stack(norms)
    full_tensor = getattr(stacked, "full_tensor", None)  # DTensors have it; it reduces over their mesh
    return list((stacked.as_subclass(torch.Tensor) if full_tensor is None else full_tensor()).unbind())


def foreach_norm(tensors: list[torch.Tensor], norm_type: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Return the norm of each tensor as `torch._foreach_norm` does, also of DTensors for which it raises."""
    if _DTENSORS_MISREAD_DTYPE and dtype is not None and not all(map(is_plain, tensors)):
        return [torch.linalg.vector_norm(tensor, norm_type, dtype=dtype) for tensor in tensors]
    return list(torch._foreach_norm(tensors, norm_type, dtype=dtype))


def _total(
    groups: Sequence[Group], norms: Sequence[Sequence[torch.Tensor]], norm_type: float, like: torch.Tensor
) -> torch.Tensor:
    parts = []
    for group, of_group in zip(groups, norms, strict=True):
        part = torch.stack(list(of_group))
        if group.shares is not None and norm_type != math.inf:
            shares = torch.tensor(group.shares, dtype=torch.float64, device="cpu").pow(1.0 / norm_type)
            part = part * shares.to(part.device, part.dtype, non_blocking=True)
        parts.append(part if part.device == like.device else part.to(like.device, non_blocking=True))
    if not parts:
        return torch.zeros_like(like)
    if len(parts) > 1:
        dtype = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
        parts = [torch.cat([part.to(_at_least_fp32(dtype)) for part in parts])]
    total: torch.Tensor = torch.linalg.vector_norm(parts[0], norm_type, dtype=_at_least_fp32(parts[0].dtype))
    return total


class Clip(NamedTuple):
    """The numbers that clip gradients; each a tensor of shape ()."""

    norm: torch.Tensor
    """The norm of the unscaled gradients, fp32 or fp64."""
    coefficient: torch.Tensor
    """The factor that clips unscaled gradients: within [0, 1], fp32."""
    divisor: torch.Tensor
    """scale / coefficient, which a fused optimizer divides by to unscale and clip at once: fp32."""
    found_inf: torch.Tensor
    """1 if the norm is not finite, or the divisor is not because the scale is too large; else 0: fp32."""

    def factor(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the factor that unscales and clips, or only unscales if `found_inf` is set: fp32, shape ()."""
        if scale.is_cpu:
            return reciprocal(scale) if self.found_inf.item() else self.coefficient / scale
        return torch.fmax(self.coefficient, self.found_inf) / scale  # fmax also replaces a NaN


def clip(scaled_norm: torch.Tensor, scale: torch.Tensor, max_norm: float, dtype: torch.dtype = torch.float32) -> Clip:
    """Compute the numbers that clip, with the coefficient of `torch.nn.utils.clip_grad_norm_`, rounded as there::

        coefficient = min(1, max_norm / (norm + 1e-6))    with norm = scaled_norm / scale

    Args:
        scaled_norm: The norm of the scaled gradients, fp32 or fp64, shape ().
        scale: fp32, shape ().
        max_norm: >= 0.
        dtype: The dtype of the norm: fp64 if a gradient is, as in torch.
    """
    if scale.is_cpu:  # on the host, rounded as in torch, which multiplies by the reciprocal
        norm = (scaled_norm / scale).to(dtype)
        fp32, known = ctypes.c_float, norm.item()
        if dtype is torch.float32:
            inverse = fp32(1.0 / fp32(known + _EPSILON).value).value
            coefficient = min(fp32(inverse * fp32(max_norm).value).value, 1.0)
        else:
            coefficient = min(1.0 / (known + 1e-6) * max_norm, 1.0)
        divisor = fp32(scale.item() / coefficient).value if coefficient else math.inf
        found_inf = not math.isfinite(divisor if max_norm else known)
        numbers = (coefficient, divisor, float(found_inf))
        return Clip(norm, *[torch.full((), number, dtype=torch.float32, device="cpu") for number in numbers])
    # `out` makes this one launch: it divides in the wider dtype and rounds.
    norm = torch.div(scaled_norm, scale, out=scaled_norm.new_empty((), dtype=dtype))
    of_norm = norm.add(1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)
    divisor_here = (scale / of_norm).float()
    return Clip(norm, of_norm.float(), divisor_here, nonfinite([divisor_here if max_norm else norm]))


def fp16_overflows(groups: Iterable[Group], divisor: torch.Tensor) -> list[torch.Tensor]:
    """Return, per group of fp16 gradients, 1 if dividing one of them makes it infinite, else 0: fp32, shape ()."""
    flags = []
    for group in groups:
        if group.dtype is torch.float16:
            parts = group._replace(is_complex=False)  # each part becomes infinite by itself
            largest = torch.stack(_norms(parts, math.inf)).amax()
            # Halfway to the number after the largest one, from where fp16 rounds to inf.
            flags.append((largest * reciprocal(divisor).to(largest.device) >= 65_520.0).float())
    return flags


def nonfinite(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return 1 if any norm is not finite in fp32, else 0: fp32, shape ()."""
    if len(norms) == 1:
        return (norms[0].float() * 0.0).nan_to_num_(nan=1.0)
    return (torch.stack([norm.float() for norm in norms]) * 0.0).sum().nan_to_num_(nan=1.0)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
