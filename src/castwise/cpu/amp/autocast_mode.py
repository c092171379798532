"""`autocast`, at the path of `torch.cpu.amp.autocast_mode`."""

from __future__ import annotations

import torch

from castwise import amp
from castwise._torch_private import only_inlined
from castwise._warnings import warn

__all__ = ["autocast"]


class autocast(amp.autocast):  # noqa: N801  # torch's name
    """Deprecated: `castwise.autocast("cpu", ...)`.

    Args:
        enabled: As for `castwise.autocast`.
        dtype: As for `castwise.autocast`.
        cache_enabled: As for `castwise.autocast`.

    Warns:
        FutureWarning: Always.
    """

    @only_inlined
    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True) -> None:
        warn(
            "castwise.cpu.amp.autocast(...), like torch.cpu.amp.autocast, is deprecated: "
            "use castwise.autocast('cpu', ...)",
            FutureWarning,
        )
        super().__init__("cpu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)
