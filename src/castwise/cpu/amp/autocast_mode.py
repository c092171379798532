"""`autocast`, at the path of `torch.cpu.amp.autocast_mode`."""

from __future__ import annotations

import warnings

import torch
from torch.cpu.amp import autocast_mode as torchs

from castwise import amp
from castwise._deprecation import deprecated
from castwise._torch_private import only_inlined, scripted_as

__all__ = ["autocast"]


with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # torch's class warns when a subclass is defined

    @deprecated("use castwise.autocast('cpu', ...)", category=FutureWarning)
    @scripted_as(torchs.autocast)
    class autocast(amp.autocast, torchs.autocast):  # type: ignore[no-untyped-call]  # noqa: N801  # as torch has it
        """Deprecated: `castwise.autocast("cpu", ...)`.

        Args:
            enabled: As for `castwise.autocast`.
            dtype: As for `castwise.autocast`.
            cache_enabled: As for `castwise.autocast`.

        Warns:
            FutureWarning: Always.
        """

        __new__ = object.__new__  # type: ignore[assignment]  # torch has one that breaks compiled graphs

        @only_inlined
        def __init__(
            self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True
        ) -> None:
            super().__init__("cpu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)
