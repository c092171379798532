"""How the next step clips gradients, in fp32: the values that `MasterWeights` keeps between clipping and its step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from castwise.amp._iteration import Snapshot
from castwise.amp._measure import foreach_norm
from castwise.master_weights._buckets import local


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """One clipping, by norm or by value."""

    factor: torch.Tensor | None = None
    """Multiplies gradients: fp32, shape (). None if they are clipped by value."""
    bound: float = 0.0
    """The largest magnitude of an element, if they are clipped by value."""
    params: frozenset[torch.Tensor] | None = None
    """The parameters whose gradients are clipped; None for all."""

    def apply_(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Clip gradients in place.

        Args:
            pairs: Parameters and the gradients to clip.
        """
        grads = [grad for param, grad in pairs if self.params is None or param in self.params]
        if not grads:
            return
        if self.factor is not None:
            multiply_(grads, self.factor)
        elif self.bound <= torch.finfo(torch.float32).max:
            by_dtype = defaultdict(list)
            for grad in grads:
                by_dtype[grad.device, grad.dtype].append(local(grad))
            for tensors in by_dtype.values():
                torch._foreach_clamp_min_(tensors, -self.bound)
                torch._foreach_clamp_max_(tensors, self.bound)


@dataclass(frozen=True, slots=True, eq=False)
class Clipping:
    """All clippings of the current gradients."""

    grads: Snapshot
    clips: tuple[Clip, ...]
    is_once_unscaled: bool = False
    """Whether a scaler has asked for them: it unscales the gradients later, here or in place."""
    is_by_parameters: bool = False
    """Whether they were asked for by parameters, as of torch's functions, which may be called before a backward too."""

    def has_written(self, grads: list[torch.Tensor]) -> bool:
        """Return True if gradients were written to since."""
        return bool(self.grads.changed(grads)[0])

    def clips_of(self, grads: list[torch.Tensor]) -> tuple[Clip, ...]:
        """Return the clippings if these are the gradients that were clipped, else none.

        Raises:
            RuntimeError: Gradients were written to since.
        """
        written, new = self.grads.changed(grads)
        if self.is_once_unscaled:
            return () if new else self.clips
        if written:
            raise RuntimeError("a backward has added to gradients after clip_grad_norm_(): clip once, before step()")
        return self.clips if self.grads.matches(grads) else ()


def grads_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of parameters that have one."""
    return [param.grad for param in params if param.grad is not None]


def norm_and_factor(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    fp32_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of gradients and the factor that clips them, with the bits of torch's functions for fp32 ones.

    Args:
        pairs: At least one parameter with its gradient, in the order in which the norms are added.
        max_norm: The largest allowed norm.
        norm_type: p of the p-norm.
        error_if_nonfinite: Raise a RuntimeError if the norm is not finite. Syncs.
        fp32_of: Returns the fp32 gradient to measure for a parameter and its gradient; None for the gradient itself.
    """
    copied = {}
    for param, grad in pairs:
        if (in_fp32 := fp32_of(param, grad)) is not None:
            copied[param] = _norms([in_fp32], norm_type)[0]  # one at a time, to need memory for one only
    others = iter(_norms([grad for param, grad in pairs if param not in copied], norm_type))
    norms = [copied[param] if param in copied else next(others) for param, _ in pairs]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]), norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {norm.item()}, so they were not clipped")
    return norm, clipping_factor(norm, max_norm)


def clipping_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return what `torch.nn.utils.clip_grad_norm_` multiplies gradients of a norm by, with the same bits."""
    return (max_norm / (norm + 1e-6)).clamp_(max=1.0)


def _norms(grads: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Return the norm of each gradient: fp32, or in the gradient's own precision if that is higher."""
    norms: dict[int, torch.Tensor] = {}
    for is_low in (True, False):
        here = {index: grad for index, grad in enumerate(grads) if (grad.dtype.itemsize < 4) is is_low}
        if here:
            dtype = torch.float32 if is_low else None
            norms.update(zip(here, foreach_norm([*here.values()], norm_type, dtype), strict=True))
    return [norms[index] for index in range(len(grads))]


def multiply_(grads: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients by a factor in place."""
    by_device = defaultdict(list)
    for grad in grads:
        by_device[grad.device].append(grad)
    for device, here in by_device.items():
        torch._foreach_mul_(here, factor.to(device))
