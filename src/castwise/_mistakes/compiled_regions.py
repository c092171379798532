"""Disabled regions inside compiled functions, whose backwards run in low precision anyway."""

from __future__ import annotations

from typing import Any

import torch

from castwise._mistakes.corrected_code import cast_before_compiling
from castwise._mistakes.finder import Finder
from castwise._mistakes.mistake import Place
from castwise._torch_private import backwards_have_state_around, lines_traced
from castwise.amp import autocast_mode


class CompiledRegions(Finder):
    """Finds regions that disable autocast inside a function compiled in an enabled region."""

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._around: list[tuple[str, bool]] = []

    def entered(self, region: Any) -> None:
        """Record the region, in which a compiled function may be called."""
        self._around.append((region.device, region._enabled))

    def left(self, region: Any) -> None:
        """Forget the region."""
        if self._around:
            self._around.pop()

    def compiled(self, device_type: str, enabled: bool) -> None:
        """Report a disabled region whose backward is compiled with the autocast state around the function."""
        around = next((outer for device, outer in reversed(self._around) if device == device_type), False)
        if enabled or not around or not backwards_have_state_around() or not torch.is_grad_enabled():
            return
        users = lines_traced()[:-2]  # the innermost two are the region's own
        if not users or users[-1][0] == autocast_mode.__file__:  # custom_fwd, whose backward has its own state
            return
        self.watch.report(
            "disabled-inside-compiled",
            "this region disables autocast inside a compiled function that is called in an enabled region: its forward "
            "runs in fp32, but its backward runs in low precision, where gradients may overflow that eager code keeps "
            "in fp32 (pytorch#179804)",
            cast_before_compiling,
            Place(*users[-1]),
        )
