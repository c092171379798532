"""What is done with the gradients of an optimizer, of whatever kinds and on whatever devices, before its step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import torch

from castwise._torch_private import stored_values
from castwise.amp import measuring
from castwise.amp.devices import MultiDeviceReplicator
from castwise.amp.gradients import Gradients, Values, regroup

# Gradients in groups, each with what it has to be multiplied with: fp32, one element.
Factors: TypeAlias = list[tuple[torch.Tensor, Gradients]]


_LOOKED_AT = (torch.strided, torch.sparse_coo)


class Facts(NamedTuple):
    """What one read found out of some parameters' gradients."""

    params: list[torch.Tensor]
    are_finite: torch.Tensor
    """bool, shape (len(params),), on their device; once they are unscaled."""


def unscale_(factors: Factors, found_inf: torch.Tensor) -> tuple[dict[torch.device, torch.Tensor], list[Facts]]:
    """Multiply gradients in place, each by its factor, and look for what is not finite.

    Returns:
        Per device a copy of `found_inf` (fp32, one element) that is 1 if a gradient is not finite, before or after;
        and the facts that were found out on the way.
    """
    found_infs, facts = MultiDeviceReplicator(found_inf), []
    with torch.no_grad():
        for factor, grads in factors:
            copies = MultiDeviceReplicator(factor)
            for values in grads.values():
                flags = measuring.unscale_(values.tensors, copies.get(values.device), found_infs.get(values.device))
                if flags is not None:
                    facts.append(Facts(values.params, flags))
    return found_infs.copies, facts


def multiply_(factors: Factors) -> None:
    """Multiply gradients in place, each by its factor, when it is known already which are finite."""
    with torch.no_grad():
        for factor, grads in factors:
            copies = MultiDeviceReplicator(factor)
            for values in grads.values():
                copy = copies.get(values.device)
                measuring.multiply_(values.tensors, copy, torch.zeros_like(copy))


def check(grads: Gradients, divisor: torch.Tensor) -> list[Facts]:
    """Find out whether a fused optimizer, which computes in fp32 or wider, can divide its gradients; write nothing."""
    divisors = MultiDeviceReplicator(divisor)
    with torch.no_grad():
        return [
            Facts(
                values.params,
                measuring.are_finite(values.tensors, divisors.get(values.device), _at_least_fp32(values.tensors)),
            )
            for values in grads.values()
        ]


def check_local(params: list[torch.Tensor], tensors: list[torch.Tensor]) -> list[Facts]:
    """Find out which tensors hold no inf or NaN, of DTensors in this rank's part: no collective, whoever asks.

    Args:
        params: What the tensors belong to.
        tensors: Gradients or weights; those that are not dense or COO-sparse numbers are left out.
    """
    with torch.no_grad():
        local = [getattr(tensor, "to_local", lambda tensor=tensor: tensor)().detach() for tensor in tensors]
        chosen = [i for i, tensor in enumerate(local) if tensor.layout in _LOOKED_AT and not _is_exact(tensor.dtype)]
        values = [stored_values(local[i]) if local[i].layout is torch.sparse_coo else local[i] for i in chosen]
        values = [torch.view_as_real(part.resolve_conj()) if part.is_complex() else part for part in values]
        facts = []
        for group in regroup(values).values():
            parts = [values[index] for index in group]
            one = torch.ones((), device=parts[0].device)
            flags = measuring.are_finite(parts, one, _at_least_fp32(parts))
            facts.append(Facts([params[chosen[index]] for index in group], flags))
    return facts


def _is_exact(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def all_finite(params: list[torch.Tensor]) -> list[Facts]:
    """Return the facts of parameters whose gradients are known to be finite."""
    return [Facts(params, torch.ones(len(params), dtype=torch.bool, device="cpu"))]


def measure(
    factors: Factors, norm_type: float, *, in_fp32: bool
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[Facts]]:
    """Find the norms of gradients and whether they are finite once they are multiplied; write nothing.

    Args:
        factors: Gradients and what they have to be multiplied with, > 0.
        norm_type: p > 0, or inf.
        in_fp32: Whether the products are for a fused optimizer, which computes in fp32 or wider.

    Returns:
        Per group of gradients its factor and the norms before the multiplication, shape (n,); and the facts.
    """
    measured, facts = [], []
    with torch.no_grad():
        for factor, grads in factors:
            divisors = MultiDeviceReplicator(factor.reciprocal())
            for values in grads.values():
                norms = measuring.norms(_magnitudes(values) if norm_type != 2.0 else values.tensors, norm_type)
                dtype = _at_least_fp32(values.tensors) if in_fp32 else values.tensors[0].dtype
                flags = measuring.fit(norms, values.tensors, divisors.get(values.device), dtype)
                if values.shares is not None and norm_type != math.inf:
                    shares = torch.tensor(values.shares, dtype=norms.dtype, device="cpu")
                    norms = norms * shares.pow(1.0 / norm_type).to(norms.device, non_blocking=True)
                measured.append((factor, norms))
                facts.append(Facts(values.params, flags))
    return measured, facts


def total_norm(
    measured: Iterable[tuple[torch.Tensor, torch.Tensor]], norm_type: float, like: torch.Tensor
) -> torch.Tensor:
    """Return the norm of all gradients once they are multiplied, shape (), fp64 if possible, on `like`'s device."""
    dtype = measuring.wide(like.device)
    parts = [norms.to(device=like.device, dtype=dtype) * factor.to(dtype) for factor, norms in measured]
    if not parts:
        return torch.zeros_like(like, dtype=dtype)
    norms = torch.cat(parts)
    # The largest one is taken out of the sum: powers of it may be too large for any dtype.
    peak = norms.amax()
    unit = torch.where(peak.isfinite() & (peak > 0), peak, torch.ones_like(peak))
    total: torch.Tensor = unit * torch.linalg.vector_norm(norms / unit, norm_type)
    return total


def found_infs(facts: Iterable[Facts]) -> dict[torch.device, torch.Tensor]:
    """Return per device the found_inf of its gradients: fp32, shape (), 1 if one is not finite and 0 otherwise."""
    found: dict[torch.device, torch.Tensor] = {}
    for _, are_finite in facts:
        found_inf = are_finite.all().logical_not().float()
        before = found.get(found_inf.device)
        found[found_inf.device] = found_inf if before is None else torch.maximum(before, found_inf)
    return found


def combine(found_infs: Iterable[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return one found_inf, shape (), on `like`'s device, 1 if any is not 0: fused kernels compare with exactly 1."""
    flags = list(found_infs)
    if len(flags) == 1 and flags[0].device == like.device and not flags[0].dim():
        return flags[0]
    return torch.stack([flag.to(like.device, non_blocking=True).reshape(()) for flag in flags]).amax()


def like_gradients(norm: torch.Tensor, grads: Gradients) -> torch.Tensor:
    """Return a norm on the device of the first gradient, in fp64 if one of them is and in fp32 otherwise."""
    if not grads.tensors:
        return norm.float()
    double = any(dtype in (torch.float64, torch.complex128) for dtype, _, _, _ in grads.groups)
    return norm.to(device=grads.tensors[0].device, dtype=torch.float64 if double else torch.float32)


def _magnitudes(values: Values) -> list[torch.Tensor]:
    """Return what counts in a norm: of complex numbers their magnitudes, unless these are squared anyway."""
    if not values.are_complex:
        return values.tensors
    dtype = measuring.wide(values.device)
    return [torch.linalg.vector_norm(tensor, dim=-1, dtype=dtype) for tensor in values.tensors]


def _at_least_fp32(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.promote_types(tensors[0].dtype, torch.float32)
