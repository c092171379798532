"""Schedules of the scale: frozen settings, and one step on device tensors.

A schedule never reads a tensor of an accelerator on the host, so a whole training step can stay asynchronous and be
captured in a CUDA graph. `trackers` names its state between steps. The scaler keeps this state in tensors next to the
scale and saves it in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import torch

from castwise.amp import _measure as measure
from castwise.amp._checks import MAX_SCALE, MIN_SCALE, at_least, check_scale, count, one_of, real_number

_SLACK = 2.0**-10
_ROUNDED_DOWN = 1.0 - 2.0**-22  # more than fp32 rounding takes away


class IterationFacts(NamedTuple):
    """The results of one iteration; tensors of one element on the scale's device.

    There is one for each `update` for which gradients were checked, also if no optimizer was stepped. Those of several
    optimizers are combined.
    """

    found_inf: torch.Tensor
    """fp32, nonzero if a gradient was not finite."""
    loss_is_nonfinite: torch.Tensor | None = None
    """fp32, nonzero if a loss was not finite; for schedules that need it."""
    largest: torch.Tensor | None = None
    """fp32, the largest magnitude among the unscaled gradients; for schedules that need it."""


_SMALLEST = 2.0**-149  # of fp32


@dataclass(frozen=True)
class Schedule:
    """The base class of schedules.

    Args:
        init_scale: The first scale, in [2**-126, 3.4e38], the largest fp32 number.
        patience: Number of skipped steps in a row after which the user is warned, >= 1; a scale below 1 also warns.
        on_exhausted: "warn" once, or "raise" `ScaleExhausted` in `update`.

    Raises:
        TypeError: An argument is not a number, or not an integer where one is needed.
        ValueError: An argument is out of its range.
    """

    init_scale: float = 2.0**16
    patience: int = field(default=20, kw_only=True)
    on_exhausted: Literal["warn", "raise"] = field(default="warn", kw_only=True)

    def __post_init__(self) -> None:
        self._set(init_scale=check_scale("init_scale", self.init_scale), patience=count("patience", self.patience, 1))
        one_of("on_exhausted", self.on_exhausted, ("warn", "raise"))

    def _set(self, **plain: float) -> None:
        # Always plain numbers, because checkpoints that contain them must load with torch.load(weights_only=True).
        for name, number in plain.items():
            object.__setattr__(self, name, number)

    needs_loss: ClassVar[bool] = False
    """Whether the schedule needs to know if the loss was finite."""
    needs_largest: ClassVar[bool] = False
    """Whether the schedule needs the largest gradient, which costs one more read of all gradients."""

    def trackers(self) -> dict[str, float]:
        """Return the initial state that is kept between steps: ints as int32, floats as fp32."""
        return {}

    def adopt(self, scale: float) -> float:
        """Return the scale to begin with after another schedule ended at `scale`."""
        return scale

    def advance_(self, scale: torch.Tensor, trackers: Mapping[str, torch.Tensor], facts: IterationFacts) -> None:
        """Move the scale after the steps of an iteration, in place and without a sync.

        Args:
            scale: fp32, shape ().
            trackers: Those of `trackers()`, shape (), and `growth_tracker`, int32, shape ().
            facts: The results of the steps.
        """
        raise TypeError(
            f"{type(self).__name__} does not define how the scale moves: override advance_(), or use one of "
            "castwise.schedules"
        )

    def lowest_after(self, scale: float, is_finite: bool) -> float:
        """Return the lowest scale that `advance_` may move this one to; 0.0, the default, if that is not known.

        While the host knows that the scale is at least 1, `unscale_` on an accelerator reads gradients once and not
        twice, because dividing by the scale cannot make a finite gradient infinite.

        Args:
            scale: A scale, or a number that is at most the scale.
            is_finite: Whether all gradients are known to be finite.
        """
        return 0.0


@dataclass(frozen=True)
class Dynamic(Schedule):
    """Grow the scale after a run of finite steps, back off after a non-finite one.

    With t finite steps since the last change (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2)::

        non-finite:               scale = scale * backoff_factor,  t = 0
        finite, t + 1 = interval: scale = scale * growth_factor,   t = 0
        finite otherwise:                                          t = t + 1

    kept within [min_scale, max_scale]. Apart from the bounds, this is the rule of `torch.amp.GradScaler`. Large-model
    trainers add `hysteresis`, of which h are left, and `cooldown`, of which c are left (Megatron-LM backs off from the
    second non-finite step on, which is hysteresis 2)::

        non-finite, c > 0:        t = 0,  c = c - 1
        non-finite, c = 0:        t = 0,  h = max(h - 1, 0);  if h = 0: scale = scale * backoff_factor,  c = cooldown
        finite:                   as above,  c = max(c - 1, 0);  when the scale grows: h = hysteresis

    Args:
        init_scale: The first scale, in [2**-126, 3.4e38], the largest fp32 number.
        growth_factor: Finite, > 1.
        backoff_factor: In [2**-149, 1), nonzero in fp32.
        growth_interval: Finite steps before the scale grows, >= 1.
        hysteresis: The scale backs off from this non-finite step on, counted since it last grew; >= 1.
        cooldown: Steps after a back-off without another one, >= 0, so that a burst of non-finite steps costs one
            factor and not one each.
        min_scale: In [2**-126, max_scale].
        max_scale: In [min_scale, 3.4e38].
        on_nonfinite_loss: The effect of a step whose loss was not finite, which is not the fault of the scale. With
            "hold" it is skipped and nothing moves; with "backoff" it counts as any non-finite step, as in torch. With
            a process group, "hold" needs one more collective of 64 bytes in `update`.
        patience: As for `Schedule`.
        on_exhausted: As for `Schedule`.

    Raises:
        TypeError: An argument is not a number, or not an integer where one is needed.
        ValueError: An argument is out of its range, or `init_scale` is not within the bounds.
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = field(default=1, kw_only=True)
    cooldown: int = field(default=0, kw_only=True)
    min_scale: float = field(default=MIN_SCALE, kw_only=True)
    max_scale: float = field(default=MAX_SCALE, kw_only=True)
    on_nonfinite_loss: Literal["backoff", "hold"] = field(default="backoff", kw_only=True)

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        growth_factor = real_number("growth_factor", self.growth_factor)
        if not 1.0 < growth_factor < math.inf:
            raise ValueError(f"growth_factor must be a finite number > 1, got {self.growth_factor!r}")
        backoff_factor = real_number("backoff_factor", self.backoff_factor)
        if not _SMALLEST <= backoff_factor < 1.0:  # smaller ones are 0 in fp32, and the scale would be too
            raise ValueError(f"backoff_factor must be in [2**-149, 1), got {self.backoff_factor!r}")
        self._set(
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=count("growth_interval", self.growth_interval, 1, bits=63),  # for a native op
            hysteresis=count("hysteresis", self.hysteresis, 1),
            cooldown=count("cooldown", self.cooldown, 0),
            min_scale=check_scale("min_scale", self.min_scale),
            max_scale=check_scale("max_scale", self.max_scale),
        )
        _check_bounds(self.init_scale, self.min_scale, self.max_scale)
        one_of("on_nonfinite_loss", self.on_nonfinite_loss, ("backoff", "hold"))

    @property
    def needs_loss(self) -> bool:  # type: ignore[override]  # depends on an option here
        """Whether the schedule needs to know if the loss was finite."""
        return self.on_nonfinite_loss == "hold"

    def trackers(self) -> dict[str, float]:
        """Return the initial h and c of the class's rule; empty if the rule is torch's."""
        return {} if self._is_torchs else {"hysteresis_left": self.hysteresis, "cooldown_left": 0}

    @cached_property
    def _is_torchs(self) -> bool:
        return self.hysteresis == 1 and self.cooldown == 0 and self.on_nonfinite_loss == "backoff"

    def adopt(self, scale: float) -> float:
        """Return the scale to begin with after another schedule ended at `scale`."""
        return min(max(scale, self.min_scale), self.max_scale)

    def advance_(self, scale: torch.Tensor, trackers: Mapping[str, torch.Tensor], facts: IterationFacts) -> None:
        """Move the scale after the steps of an iteration, in place and without a sync; arguments as in `Schedule`."""
        t, found_inf = trackers["growth_tracker"], facts.found_inf
        if self._is_torchs:
            torch._amp_update_scale_(scale, t, found_inf, self.growth_factor, self.backoff_factor, self.growth_interval)
        else:
            self._advance_with_options_(scale, trackers, facts)
        # The native op lets a scale reach 0, after which every gradient is 0/0. On a CPU, a check is cheaper.
        if not scale.is_cpu or not self.min_scale <= scale.item() <= self.max_scale:
            scale.clamp_(self.min_scale, self.max_scale)

    def lowest_after(self, scale: float, is_finite: bool) -> float:
        """Return the lowest scale that `advance_` may move this one to; arguments as in `Schedule`."""
        lowest = scale if is_finite else max(scale * self.backoff_factor * _ROUNDED_DOWN, self.min_scale)
        return min(lowest, self.max_scale)

    def _advance_with_options_(
        self, scale: torch.Tensor, trackers: Mapping[str, torch.Tensor], facts: IterationFacts
    ) -> None:
        t, h, c = trackers["growth_tracker"], trackers["hysteresis_left"], trackers["cooldown_left"]
        nonfinite, finite = facts.found_inf.reshape(()) != 0, facts.found_inf.reshape(()) == 0
        if self.needs_loss and facts.loss_is_nonfinite is not None:
            nonfinite = nonfinite & (facts.loss_is_nonfinite.reshape(()) == 0)
        counts = nonfinite & (c == 0)
        h.sub_((counts & (h > 0)).to(h.dtype))
        backs_off = counts & (h == 0)
        c.sub_(((finite | nonfinite) & (c > 0)).to(c.dtype)).masked_fill_(backs_off, self.cooldown)
        t.add_(finite.to(t.dtype))
        grows = finite & (t >= self.growth_interval)
        t.masked_fill_(nonfinite | grows, 0)
        h.masked_fill_(grows, self.hysteresis)
        torch.where(grows, _times(scale, self.growth_factor), scale, out=scale)
        torch.where(backs_off, _times(scale, self.backoff_factor), scale, out=scale)


@dataclass(frozen=True)
class Static(Schedule):
    """Keep the scale constant, and skip steps that are not finite::

        scale = init_scale

    (Micikevicius et al. 2018, section 3.2, "a constant scaling factor".)

    Args:
        init_scale: The scale, in [2**-126, 3.4e38], the largest fp32 number.
        patience: As for `Schedule`.
        on_exhausted: As for `Schedule`.

    Raises:
        TypeError: An argument is not a number, or not an integer where one is needed.
        ValueError: An argument is out of its range.
    """

    def adopt(self, scale: float) -> float:
        """Return `init_scale`, whatever the scale of the other schedule."""
        return self.init_scale

    def advance_(self, scale: torch.Tensor, trackers: Mapping[str, torch.Tensor], facts: IterationFacts) -> None:
        """Do nothing, because the scale is constant."""

    def lowest_after(self, scale: float, is_finite: bool) -> float:
        """Return the scale, which is constant."""
        return scale


@dataclass(frozen=True)
class Guard(Static):
    """Keep the scale at 1, and skip (and explain) steps that are not finite; for bf16 and fp32::

        scale = 1

    bf16 has fp32's range, so nothing needs scaling, but one NaN still ends a training run (DeepSpeed#8415).

    Args:
        patience: As for `Schedule`.
        on_exhausted: As for `Schedule`.

    Raises:
        TypeError: `patience` is not an integer.
        ValueError: An argument is out of its range.
    """

    init_scale: float = field(default=1.0, init=False)


@dataclass(frozen=True)
class Headroom(Schedule):
    """Choose the scale from the largest recent gradient with some bits to spare, so that it moves before an overflow.

    With g the largest magnitude of this step's unscaled gradients, over all parameters and ranks, and p a running
    maximum of g that halves every `half_life` steps::

        finite:      p = max(g, p * 2**(-1 / half_life)),  t = t + 1
                     target = largest_number * 2**-(headroom_bits + margin) / p
                     scale = 2**min(floor(log2(target) + 2**-10), floor(log2(scale)) + 1)
                     if t = relax_interval:  margin = max(margin - 1, 0),  t = 0
        non-finite:  scale = 2**(floor(log2(scale)) - ceil(max(headroom_bits, 1)))
                     margin = max(log2(largest_number / (scale * p)) - headroom_bits, 0),  t = 0

    kept within [min_scale, max_scale]. Gradients of activations often overflow first, but are not measured: a step in
    which they overflow sets the margin to the number of bits by which they are larger. A step whose loss was not finite
    moves nothing. The rule is castwise's own; the idea to derive the scale from the largest gradient is from
    Micikevicius et al. 2018, section 3.2 ("choose a value so that its product with the maximum absolute gradient value
    is below 65,504").

    It costs one more read of the gradients and, with a process group, one more collective of 64 bytes in `update`.

    Args:
        init_scale: The first scale, used until there is a gradient.
        headroom_bits: Powers of two by which the largest gradient may grow from one step to the next, >= 0.
        half_life: Steps after which a large gradient counts half as much, > 0.
        relax_interval: Finite steps after which the margin shrinks by one bit, >= 1.
        largest_number: The largest number of the format that gradients are computed in: 65504 for fp16.
        min_scale: In [2**-126, max_scale].
        max_scale: In [min_scale, 3.4e38].
        patience: As for `Schedule`.
        on_exhausted: As for `Schedule`.

    Raises:
        TypeError: An argument is not a number, or not an integer where one is needed.
        ValueError: An argument is out of its range, or `init_scale` is not within the bounds.
    """

    headroom_bits: float = field(default=2.0, kw_only=True)
    half_life: float = field(default=50.0, kw_only=True)
    relax_interval: int = field(default=2000, kw_only=True)
    largest_number: float = field(default=65504.0, kw_only=True)
    min_scale: float = field(default=MIN_SCALE, kw_only=True)
    max_scale: float = field(default=2.0**24, kw_only=True)

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        half_life = real_number("half_life", self.half_life)
        if not 0.0 < half_life < math.inf:
            raise ValueError(f"half_life must be a finite number > 0, got {self.half_life!r}")
        self._set(
            headroom_bits=at_least("headroom_bits", self.headroom_bits, 0.0),
            half_life=half_life,
            relax_interval=count("relax_interval", self.relax_interval, 1),
            largest_number=check_scale("largest_number", self.largest_number),
            min_scale=check_scale("min_scale", self.min_scale),
            max_scale=check_scale("max_scale", self.max_scale),
        )
        _check_bounds(self.init_scale, self.min_scale, self.max_scale)

    needs_loss = True
    needs_largest = True

    def trackers(self) -> dict[str, float]:
        """Return the initial p and margin of the class's rule."""
        return {"peak": 0.0, "margin": 0.0}

    def adopt(self, scale: float) -> float:
        """Return the scale to begin with after another schedule ended at `scale`."""
        return min(max(scale, self.min_scale), self.max_scale)

    def advance_(self, scale: torch.Tensor, trackers: Mapping[str, torch.Tensor], facts: IterationFacts) -> None:
        """Move the scale after the steps of an iteration, in place and without a sync; arguments as in `Schedule`."""
        assert facts.largest is not None
        t, peak, margin = trackers["growth_tracker"], trackers["peak"], trackers["margin"]
        nonfinite, finite = facts.found_inf.reshape(()) != 0, facts.found_inf.reshape(()) == 0
        if facts.loss_is_nonfinite is not None:
            nonfinite = nonfinite & (facts.loss_is_nonfinite.reshape(()) == 0)
        decayed = peak * 2.0 ** (-1.0 / self.half_life)
        torch.where(finite, torch.maximum(facts.largest.reshape(()).to(peak.dtype), decayed), peak, out=peak)
        # Computed with exponents, which do not overflow. If all gradients are 0, any scale would do.
        exponent, seen = torch.frexp(scale).exponent - 1, peak > 0
        free = math.log2(self.largest_number) - self.headroom_bits - torch.where(seen, peak, 1.0).log2()
        # log2 is slightly inexact in fp32, and a target computed from a scale must give that scale.
        raised = torch.where(seen, torch.minimum((free - margin + _SLACK).floor(), exponent + 1), exponent)
        lowered = exponent - math.ceil(max(self.headroom_bits, 1.0))
        torch.where(nonfinite & seen, (free - lowered).clamp(min=0.0), margin, out=margin)
        t.add_(finite.to(t.dtype))
        relaxes = finite & (t >= self.relax_interval)
        t.masked_fill_(nonfinite | relaxes, 0)
        torch.where(relaxes, (margin - 1.0).clamp(min=0.0), margin, out=margin)
        chosen = torch.ldexp(torch.ones_like(scale), torch.where(finite, raised, lowered).to(torch.int32))
        torch.where(finite | nonfinite, chosen, scale, out=scale).clamp_(self.min_scale, self.max_scale)


def on_device(trackers: Mapping[str, float], device: torch.device) -> dict[str, torch.Tensor]:
    """Return a schedule's trackers as tensors of shape (): int32 for integers, else fp32."""
    return {
        name: torch.full((), value, dtype=torch.int32 if isinstance(value, int) else torch.float32, device=device)
        for name, value in trackers.items()
    }


def _times(scale: torch.Tensor, factor: float) -> torch.Tensor:
    return scale.to(measure.wide(scale.device)).mul(factor).float()


def _check_bounds(init_scale: float, min_scale: float, max_scale: float) -> None:
    if min_scale > max_scale:
        raise ValueError(f"min_scale must not be above max_scale, got {min_scale!r} and {max_scale!r}")
    if not min_scale <= init_scale <= max_scale:
        raise ValueError(
            f"init_scale must be within [min_scale, max_scale] = [{min_scale!r}, {max_scale!r}], got {init_scale!r}"
        )
