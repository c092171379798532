"""`autocast`, `custom_fwd`, `custom_bwd` and `_cast`, at the path of `torch.cuda.amp.autocast_mode`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.cuda.amp import autocast_mode as torchs

from castwise import amp
from castwise._torch_private import only_inlined, scripted_as
from castwise._warnings import warn
from castwise.amp import autocast_mode

__all__ = ["autocast", "custom_bwd", "custom_fwd"]


with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # torch's class warns when a subclass is defined

    @scripted_as(torchs.autocast)
    class autocast(amp.autocast, torchs.autocast):  # type: ignore[no-untyped-call]  # noqa: N801  # as torch has it
        """Deprecated: `castwise.autocast("cuda", ...)`.

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
            self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
        ) -> None:
            _warn("autocast(...)", "castwise.autocast('cuda', ...)")
            super().__init__("cuda", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Deprecated: `castwise.amp.autocast_mode._cast(value, "cuda", dtype)`."""
    _warn("autocast_mode._cast(value, dtype)", "castwise.amp.autocast_mode._cast(value, 'cuda', dtype)")
    return autocast_mode._cast(value, "cuda", dtype)


def custom_fwd(fwd: Any = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """Deprecated: `castwise.custom_fwd(..., device_type="cuda")`.

    Args:
        fwd: As for `castwise.custom_fwd`.
        cast_inputs: As for `castwise.custom_fwd`.

    Warns:
        FutureWarning: Always.
    """
    _warn("custom_fwd(...)", "castwise.custom_fwd(..., device_type='cuda')")
    return amp.custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


def custom_bwd(bwd: Any) -> Any:
    """Deprecated: `castwise.custom_bwd(..., device_type="cuda")`.

    Args:
        bwd: As for `castwise.custom_bwd`.

    Warns:
        FutureWarning: Always.
    """
    _warn("custom_bwd(...)", "castwise.custom_bwd(..., device_type='cuda')")
    return amp.custom_bwd(bwd, device_type="cuda")


def _warn(old: str, new: str) -> None:
    warn(f"castwise.cuda.amp.{old}, like torch.cuda.amp's, is deprecated: use {new}", FutureWarning)
