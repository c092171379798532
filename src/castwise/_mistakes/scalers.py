"""Scalers that have no effect, or that lose their scale."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from castwise._mistakes.corrected_code import disabled_scaler, made_once, scaler_for
from castwise._mistakes.finder import Finder
from castwise._mistakes.mistake import Place, caller
from castwise.amp._schedules import Guard, Static

_BF16_ITERATIONS = 2  # bf16-only iterations until the report


class Scalers(Finder):
    """Finds scalers that disabled themselves, that scale for bf16, or that are created again during training."""

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._made: WeakKeyDictionary[Any, Place | None] = WeakKeyDictionary()
        self._loaded: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        # The values are weak too, because a scaler may refer to a monitor, and a monitor to the optimizer.
        self._scaler_of: WeakKeyDictionary[torch.optim.Optimizer, ref[Any]] = WeakKeyDictionary()
        self._dtypes: set[torch.dtype] = set()
        self._bf16_iterations = 0

    def scaler_created(self, scaler: Any, *, wanted: bool) -> None:
        """Record the calling line. Report a scaler that is disabled although `enabled=True` was requested."""
        self._made[scaler] = place = caller()
        if wanted and not scaler.is_enabled():
            self.watch.report(
                "scaler-without-cuda",
                'this GradScaler is for "cuda" and there is no CUDA, so it has disabled itself: losses are not scaled',
                partial(scaler_for, device="cpu"),
                place,
            )

    def loaded(self, scaler: Any) -> None:
        """Record that the scaler continues from another one's state."""
        self._loaded[scaler] = True

    def entered(self, region: Any) -> None:
        """Record the dtype that the region casts to."""
        if region._enabled and region._policy is None and torch.is_grad_enabled():
            self._dtypes.add(region.fast_dtype)

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Report a scaler that replaces another one for this optimizer."""
        if not scaler.is_enabled():
            return
        before = self._scaler_of.get(optimizer)
        self._scaler_of[optimizer] = ref(scaler)
        if before is not None and before() is not scaler and scaler not in self._loaded:
            self.watch.report(
                "scaler-rebuilt",
                "this GradScaler replaces another one during training: the scale is reset, and the first steps with "
                "the new scaler may be skipped again",
                made_once,
                self._made.get(scaler) or caller(),
            )

    def updating(self, scaler: Any, *, is_set: bool) -> None:
        """Report a scaler that is used with bf16 only."""
        dtypes, self._dtypes = self._dtypes, set()
        # These two schedules skip steps and do not adapt a scale.
        if isinstance(scaler.schedule, (Guard, Static)):
            return
        self._bf16_iterations = self._bf16_iterations + 1 if dtypes == {torch.bfloat16} else 0
        if self._bf16_iterations == _BF16_ITERATIONS:
            self.watch.report(
                "scaler-for-bf16",
                "this GradScaler scales for bf16, which has the range of fp32: scaling does not help bf16 gradients, "
                "and costs a pass over all of them",
                disabled_scaler,
                self._made.get(scaler) or caller(),
            )
