"""`autocast`, `custom_fwd`, `custom_bwd` and `_cast`, at the path of `torch.cuda.amp.autocast_mode`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.cuda.amp import autocast_mode as torchs

from castwise import amp
from castwise._deprecation import deprecated
from castwise._torch_private import only_inlined, scripted_as
from castwise.amp import autocast_mode

__all__ = ["autocast", "custom_bwd", "custom_fwd"]


with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # torch's class warns when a subclass is defined

    @deprecated("use castwise.autocast('cuda', ...)", category=FutureWarning)
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
            super().__init__("cuda", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


@deprecated("use castwise.amp.autocast_mode._cast(value, 'cuda', dtype)", category=FutureWarning)
def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Deprecated: `castwise.amp.autocast_mode._cast(value, "cuda", dtype)`."""
    return autocast_mode._cast(value, "cuda", dtype)


@deprecated("use castwise.custom_fwd(..., device_type='cuda')", category=FutureWarning)
def custom_fwd(fwd: Any = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """Deprecated: `castwise.custom_fwd(..., device_type="cuda")`.

    Args:
        fwd: As for `castwise.custom_fwd`.
        cast_inputs: As for `castwise.custom_fwd`.

    Warns:
        FutureWarning: Always.
    """
    return amp.custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


@deprecated("use castwise.custom_bwd(..., device_type='cuda')", category=FutureWarning)
def custom_bwd(bwd: Any) -> Any:
    """Deprecated: `castwise.custom_bwd(..., device_type="cuda")`.

    Args:
        bwd: As for `castwise.custom_bwd`.

    Warns:
        FutureWarning: Always.
    """
    return amp.custom_bwd(bwd, device_type="cuda")
