"""How a scale moves: frozen numbers and one step on device tensors.

A schedule never reads a tensor on the host, so a whole training step can stay asynchronous.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import torch

# Between these the scale and its reciprocal are both finite normal fp32 numbers.
MIN_SCALE = 2.0**-126
MAX_SCALE = 2.0**126


@dataclass(frozen=True)
class Dynamic:
    """Grow the scale after a run of finite steps, back off at once after a non-finite one.

    With t finite steps since the last change (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2)::

        non-finite:               scale = scale * backoff_factor,  t = 0
        finite, t + 1 = interval: scale = scale * growth_factor,   t = 0
        finite otherwise:                                          t = t + 1

    kept within [2**-126, 2**126].

    Args:
        init_scale: The first scale, in [2**-126, 2**126].
        growth_factor: Finite, > 1.
        backoff_factor: In (0, 1).
        growth_interval: Finite steps before the scale grows, >= 1.

    Raises:
        TypeError: An argument is not a number, or `growth_interval` not an integer.
        ValueError: An argument is out of its range.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        growth_factor = real_number("growth_factor", self.growth_factor)
        if not 1.0 < growth_factor < math.inf:
            raise ValueError(f"growth_factor must be a finite number > 1, got {self.growth_factor!r}")
        backoff_factor = real_number("backoff_factor", self.backoff_factor)
        if not 0.0 < backoff_factor < 1.0:
            raise ValueError(f"backoff_factor must be in (0, 1), got {self.backoff_factor!r}")
        growth_interval = integer("growth_interval", self.growth_interval)
        if not 1 <= growth_interval < 2**63:  # a native op takes it
            raise ValueError(f"growth_interval must be an integer in [1, 2**63), got {self.growth_interval!r}")
        # Plain numbers, whatever was given: they end in checkpoints that torch.load(weights_only=True) reads.
        object.__setattr__(self, "init_scale", check_scale("init_scale", self.init_scale))
        object.__setattr__(self, "growth_factor", growth_factor)
        object.__setattr__(self, "backoff_factor", backoff_factor)
        object.__setattr__(self, "growth_interval", growth_interval)

    def advance_(self, scale: torch.Tensor, growth_tracker: torch.Tensor, found_inf: torch.Tensor) -> None:
        """Move the scale after a step, in place and without a sync.

        Args:
            scale: fp32, shape ().
            growth_tracker: int32, shape (): finite steps since the scale last moved.
            found_inf: fp32, one element on the same device, non-zero after a non-finite step.
        """
        torch._amp_update_scale_(
            scale, growth_tracker, found_inf, self.growth_factor, self.backoff_factor, self.growth_interval
        )
        # The native op lets a scale reach 0, after which every gradient is 0/0.
        scale.clamp_(MIN_SCALE, MAX_SCALE)


def check_scale(name: str, value: object) -> float:
    """Return `value` as a float; raise unless it and its reciprocal are finite normal fp32 numbers."""
    scale = real_number(name, value)
    if not MIN_SCALE <= scale <= MAX_SCALE:
        raise ValueError(f"{name} must be a finite number > 0, within [2**-126, 2**126], got {value!r}")
    return scale


def real_number(name: str, value: object) -> float:
    """Return `value` as a float; raise a TypeError unless it is a real number (a bool is none)."""
    if type(value) is float:  # nearly always, and the abstract base class is slow to ask
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def integer(name: str, value: object) -> int:
    """Return `value` as an int; raise a TypeError unless it is an integer (a bool is none)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    return int(value)
