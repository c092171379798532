"""Which gradients an optimizer has, whether they are finite, and their unscaling.

Three facts shaped the code. The native op that checks and unscales looks for inf *before* it multiplies, so a
finite gradient can leave it infinite when the scale is below 1: such results are checked again. A finite sum (or
dot product with itself) proves that a tensor holds no inf or NaN, at the speed of memory, while a non-finite one
proves nothing, so only then is the slower exact check needed. And one tensor may be the gradient of a parameter
that two optimizers own, or be listed twice: whatever the route, it is unscaled once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable

import torch

_HALF = (torch.float16, torch.complex32)
# Below this many elements a call costs more than its arithmetic, so small tensors are measured by one call.
_SMALL = 2**16


def gradients_of(optimizer: torch.optim.Optimizer, *, allow_fp16: bool) -> list[torch.Tensor]:
    """List the gradients of an optimizer's parameters, each tensor once, in the order of the parameters.

    Args:
        optimizer: Anything with torch's `param_groups`.
        allow_fp16: Whether fp16 gradients are acceptable. If so, sparse ones are coalesced, in `.grad` as well:
            their duplicates may overflow when they are summed, and that has to be seen.

    Raises:
        TypeError: `optimizer` has no `param_groups`, or something other than a tensor in them.
        ValueError: There are fp16 gradients and they are not allowed.
    """
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise TypeError(f"expected an optimizer with param_groups, got {type(optimizer).__name__}")
    found: dict[int, torch.Tensor] = {}
    fp16: list[str] = []
    for group_index, group in enumerate(groups):
        for index, param in enumerate(group["params"]):
            if not isinstance(param, torch.Tensor):
                raise TypeError(f"an optimizer's parameters are tensors, got {type(param).__name__}")
            grad = param.grad
            if grad is None:
                continue
            if grad.dtype in _HALF:
                if not allow_fp16:
                    fp16.append(_name(group, group_index, index, param))
                elif grad.is_sparse:
                    grad = param.grad = grad.coalesce()
            if not (grad.is_sparse or grad.is_contiguous()) and 0 in grad.stride():
                grad = param.grad = grad.clone()  # an expanded tensor cannot be written to
            found[id(grad)] = grad
    if fp16:
        raise ValueError(
            "Attempting to unscale FP16 gradients, which fp16 cannot hold unscaled: keep the parameters in fp32 "
            f"and let autocast choose fp16 op by op. fp16 gradients: {', '.join(fp16)}"
        )
    return list(found.values())


def _name(group: dict[str, object], group_index: int, index: int, param: torch.Tensor) -> str:
    names = group.get("param_names")
    if isinstance(names, list) and index < len(names):
        return str(names[index])
    return f"param_groups[{group_index}]['params'][{index}] of shape {tuple(param.shape)}"


def by_device(grads: Iterable[torch.Tensor]) -> dict[torch.device, list[list[torch.Tensor]]]:
    """Group the values of gradients into lists that one native call can take.

    Returns:
        Per device, lists of tensors of one real dtype that share memory with the gradients: of a sparse gradient
        its stored values, of a complex one its real view of shape (..., 2). DTensors are listed apart from plain
        tensors.
    """
    lists: dict[tuple[torch.device, torch.dtype, type], list[torch.Tensor]] = {}
    for grad in grads:
        values: torch.Tensor = grad._values() if grad.is_sparse else grad
        dtype = values.dtype
        if dtype.is_complex:
            values = torch.view_as_real(values.conj() if values.is_conj() else values)
            dtype = values.dtype
        lists.setdefault((values.device, dtype, type(values)), []).append(values)
    devices: dict[torch.device, list[list[torch.Tensor]]] = {}
    for (device, _, _), values_of_a_kind in lists.items():
        devices.setdefault(device, []).append(values_of_a_kind)
    return devices


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter


def unscale_(values: list[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Multiply by `inv_scale` in place; set `found_inf` to 1 where values were not finite or are not any more.

    Args:
        values: A list from `by_device`.
        inv_scale: fp32, one element, on the values' device.
        found_inf: fp32, one element, on the values' device; left alone if all is finite.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(values, found_inf, inv_scale)
    if _may_exceed(inv_scale, 1.0):
        _check_finite(values, found_inf)


def check(values: list[torch.Tensor], divisor: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Set `found_inf` to 1 if `values / divisor` is not finite in the optimizer's arithmetic; write no value.

    Args:
        values: A list from `by_device`.
        divisor: fp32, one element, on the values' device: what a fused optimizer will divide by.
        found_inf: fp32, one element, on the values' device; left alone if all is finite.
    """
    if not _may_exceed(divisor.reciprocal(), 1.0):
        _check_finite(values, found_inf)
    elif _is_plain(values[0]):
        _check_peaks(values, found_inf, divisor)
    else:
        _check_finite([tensor / divisor for tensor in values], found_inf)


def _may_exceed(factor: torch.Tensor, bound: float) -> bool:
    """Say whether a factor may be above a bound; certain on the CPU, always yes where asking would be a sync."""
    return factor.device.type != "cpu" or not factor.item() <= bound


def _check_finite(values: list[torch.Tensor], found_inf: torch.Tensor) -> None:
    if not _is_plain(values[0]):
        # torch's op knows how to reduce over a DTensor's mesh.
        torch._amp_foreach_non_finite_check_and_unscale_(values, found_inf, torch.ones_like(found_inf))
    elif values[0].device.type == "cpu":
        if not _are_finite_on_cpu(values):
            found_inf.fill_(1.0)
    else:
        _check_peaks(values, found_inf)


def _check_peaks(values: list[torch.Tensor], found_inf: torch.Tensor, divisor: torch.Tensor | None = None) -> None:
    """Judge by the largest magnitudes: exact, a few launches for any number of tensors, slow only on a CPU."""
    values = [tensor for tensor in values if tensor.numel()]  # nothing has no largest magnitude
    if not values:
        return
    peaks = torch.stack(torch._foreach_norm(values, math.inf))
    if divisor is not None:
        # Fused kernels compute with fp16 and bf16 gradients in fp32.
        peaks = peaks.to(torch.promote_types(peaks.dtype, torch.float32)) / divisor
    found_inf.masked_fill_(peaks.isfinite().all().logical_not(), 1.0)


def _are_finite_on_cpu(values: list[torch.Tensor]) -> bool:
    small = [tensor for tensor in values if tensor.numel() < _SMALL]
    if small:
        norms = torch._foreach_norm(small, 2.0, dtype=torch.promote_types(small[0].dtype, torch.float32))
        if not torch.stack(norms).isfinite().all() and not all(map(_is_finite_exactly, small)):
            return False
    return all(_is_finite_on_cpu(tensor) for tensor in values if tensor.numel() >= _SMALL)


def _is_finite_on_cpu(values: torch.Tensor) -> bool:
    # For fp32 and fp64 a dot product is the fastest read there is; of half precision it is very slow.
    if values.is_contiguous() and values.dtype in (torch.float32, torch.float64):
        flat = values.view(-1)
        probe = torch.dot(flat, flat)
    else:
        probe = values.sum()
    return math.isfinite(probe.item()) or _is_finite_exactly(values)


def _is_finite_exactly(values: torch.Tensor) -> bool:
    if not values.numel():
        return True
    lowest, highest = torch.aminmax(values)
    return math.isfinite(lowest.item()) and math.isfinite(highest.item())


class Ledger:
    """The gradients unscaled since the last `update()`, so that a parameter of two optimizers is unscaled once.

    A gradient stays unscaled while it is the same tensor and no backward of a scaled loss has added to it since,
    which changes the tensor's version. Clipping changes the version as well, so versions are read again (`renew`)
    whenever such a backward starts.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor | None]] = {}
        self._scaled_since = False

    def __bool__(self) -> bool:
        return bool(self._entries)

    def record(self, grads: Iterable[torch.Tensor], unless: torch.Tensor | None = None) -> None:
        """Note that `grads` are unscaled, or (`unless`, fp32, one element) that they are if it is zero."""
        for grad in grads:
            self._entries[id(grad)] = (weakref.ref(grad), _version(grad), unless)

    def renew(self) -> None:
        """Take the present versions as those of unscaled gradients; fresh ones may be added from now on."""
        for key, (reference, version, unless) in list(self._entries.items()):
            grad = reference()
            if grad is None or (self._scaled_since and version != _version(grad)):
                del self._entries[key]
            else:
                self._entries[key] = (reference, _version(grad), unless)
        self._scaled_since = True

    def before_backward(self, _: torch.Tensor) -> None:
        """A hook on scaled losses: their backward is about to add to gradients."""
        if self._entries:
            self.renew()

    def clear(self) -> None:
        """Forget everything: the next gradients are scaled ones."""
        self._entries.clear()
        self._scaled_since = False

    def split(self, grads: list[torch.Tensor]) -> list[tuple[torch.Tensor | float | None, list[torch.Tensor]]]:
        """Group gradients by when they still have to be unscaled.

        Returns:
            Pairs (condition, gradients): condition None means yes, 0.0 no, and a tensor means if it is not zero.
        """
        if not self._entries:
            return [(None, grads)]
        groups: dict[int, tuple[torch.Tensor | float | None, list[torch.Tensor]]] = {}
        for grad in grads:
            condition = self._condition(grad)
            groups.setdefault(id(condition), (condition, []))[1].append(grad)
        return list(groups.values())

    def _condition(self, grad: torch.Tensor) -> torch.Tensor | float | None:
        reference, version, unless = self._entries.get(id(grad), (None, 0, None))
        if reference is None or reference() is not grad:
            return None
        if self._scaled_since and version != _version(grad):
            return None
        return 0.0 if unless is None else unless


def _version(grad: torch.Tensor) -> int:
    return 0 if grad.is_inference() else grad._version  # tensors of inference mode keep no count
