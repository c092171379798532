"""Notice gradients that were clipped in 16 bits, by torch's functions, before a `MasterWeights` stepped them.

Torch's functions know no optimizer, so this compares a sample of one gradient after the backward and before the step,
in the first steps and ever more rarely. A gradient that was not written to in between costs nothing. One that was, as
clipping does also where the norm is small, is compared in each step, except on an accelerator, where that waits.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import ref

import torch

from castwise._guard import ErrorBoundary
from castwise._torch_private import never_traced
from castwise.amp._devices import is_capturing
from castwise.amp._gradients import versions_of
from castwise.master_weights._buckets import local

_SAMPLED = 64  # elements
_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class _Found(NamedTuple):
    grad_is_cpu: bool
    how: str | None
    """In words; None if what was written was not clipping, or not rounded."""


class RoundedClipping:
    """Looks at the gradient of one parameter.

    Args:
        param: A 16-bit parameter that is trained.
    """

    def __init__(self, param: torch.Tensor) -> None:
        self._param = ref(param)
        self._steps = 0
        self._before: tuple[torch.Tensor, int, torch.Tensor] | None = None
        self._guard = ErrorBoundary(
            "castwise no longer checks how gradients of MasterWeights are clipped", is_final=True
        )
        self._handle: Any = None
        self._look()

    def _look(self) -> None:
        """Sample the gradient after the next backwards, until the next step."""
        param, itself = self._param(), ref(self)
        if self._handle is not None or param is None or not param.requires_grad:  # it may be frozen by now
            return

        def sample(param: torch.Tensor) -> None:
            if (check := itself()) is not None:
                check._guard.call(check._sample, param)

        register: Any = param.register_post_accumulate_grad_hook
        self._handle = register(never_traced(sample))

    def _sample(self, param: torch.Tensor) -> None:
        grad = param.grad
        if grad is not None and grad.dtype in _ROUNDING and not is_capturing(grad):
            self._before = grad, versions_of([grad])[0], _sample_of(grad).clone()

    def step(self) -> str | None:
        """Return how the gradient was clipped since the last backward, in words; None if it was not."""
        self._steps += 1
        before, self._before = self._before, None
        found: _Found | None = None if before is None else self._guard.call(self._compare, *before)
        if self._steps < 3 or self._steps.bit_count() == 1 or (found is not None and found.grad_is_cpu):
            self._look()
        else:
            self.stop()
        return None if found is None else found.how

    def _compare(self, grad: torch.Tensor, version: int, before: torch.Tensor) -> _Found | None:
        """Return how the gradient was clipped; None if it was not written to since the backward."""
        param = self._param()
        if param is None or param.grad is not grad or versions_of([grad])[0] == version or is_capturing(grad):
            return None
        return _Found(grad.is_cpu, _how_clipped(before.double(), _sample_of(grad).double(), _ROUNDING[grad.dtype]))

    def stop(self) -> None:
        """Stop looking."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _sample_of(grad: torch.Tensor) -> torch.Tensor:
    flat = local(grad).flatten()
    return flat[:: flat.numel() // _SAMPLED | 1]


def _how_clipped(before: torch.Tensor, after: torch.Tensor, rounding: float) -> str | None:
    """Return by what numbers were clipped, in words; None if they were not, or without rounding."""
    has_changed = before != after
    if has_changed.sum() < 2 or not (before.isfinite() & after.isfinite()).all():
        return None
    largest = after.abs().max()
    if (after[has_changed].abs() == largest).all() and (before[has_changed].abs() > largest).all():
        return f"limited to {largest.item():.3g}"
    is_counted = before.abs() > before.abs().max() * 1e-3  # of smaller ones, 16 bits may keep too little
    ratios = (after / before)[is_counted]
    factor = ratios.median()
    if not 0.0 < factor < 1.0 or (ratios - factor).abs().max() > 2 * rounding * factor:
        return None
    return None if factor.log2() % 1 == 0 and (ratios == factor).all() else f"multiplied by {factor.item():.3g}"
