"""Scalers that do nothing, or that forget what they have learnt."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from castwise.amp.schedules import Guard, Static
from castwise.mistakes.finder import Finder
from castwise.mistakes.mistake import Place, caller

_IN_VAIN = 2  # iterations in bf16 alone, before it is said


class Scalers(Finder):
    """Finds scalers that disabled themselves, that scale for bf16, and that are made anew again and again."""

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._made: WeakKeyDictionary[Any, Place | None] = WeakKeyDictionary()
        self._loaded: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        # Weak values as well: a scaler may lead to a monitor, and that to the optimizer.
        self._scaler_of: WeakKeyDictionary[torch.optim.Optimizer, ref[Any]] = WeakKeyDictionary()
        self._dtypes: set[torch.dtype] = set()
        self._in_vain = 0

    def scaler_made(self, scaler: Any, *, wanted: bool) -> None:
        """Remember where; report it if the scaler is disabled although it was to be enabled."""
        self._made[scaler] = place = caller()
        if wanted and not scaler.is_enabled():
            self.watch.say(
                "scaler-without-cuda",
                'this GradScaler is for "cuda", there is no CUDA, and so it has disabled itself: losses are not scaled',
                "GradScaler(device.type)  # the device of the model, here 'cpu'",
                place,
            )

    def loaded(self, scaler: Any) -> None:
        """It continues from another one."""
        self._loaded[scaler] = True

    def entered(self, region: Any) -> None:
        """Remember what dtypes regions cast to."""
        if region._enabled and region._policy is None and torch.is_grad_enabled():
            self._dtypes.add(region.fast_dtype)

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Report it if another scaler has stepped the optimizer before."""
        if not scaler.is_enabled():
            return
        before = self._scaler_of.get(optimizer)
        self._scaler_of[optimizer] = ref(scaler)
        if before is not None and before() is not scaler and scaler not in self._loaded:
            self.watch.say(
                "scaler-rebuilt",
                "this GradScaler takes the place of another one in the middle of training: the scale that was found "
                "is forgotten, and the first steps with the new one may be skipped again",
                "make the scaler once, before the loop over epochs",
                self._made.get(scaler) or caller(),
            )

    def updating(self, scaler: Any, *, is_set: bool) -> None:
        """Report it if there is nothing but bf16 to scale for."""
        dtypes, self._dtypes = self._dtypes, set()
        # These two are there to skip steps, and do not scale.
        if isinstance(scaler.schedule, (Guard, Static)):
            return
        self._in_vain = self._in_vain + 1 if dtypes == {torch.bfloat16} else 0
        if self._in_vain == _IN_VAIN:
            self.watch.say(
                "scaler-for-bf16",
                "this GradScaler scales for bf16, which has the range of fp32: scaling saves no gradient there, and "
                "costs a pass over all of them",
                "GradScaler(device, enabled=dtype is torch.float16)\n"
                "# or castwise.GradScaler(device, schedule=castwise.schedules.Guard()), to skip non-finite steps only",
                self._made.get(scaler) or caller(),
            )
