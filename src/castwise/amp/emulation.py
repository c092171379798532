"""Which low precisions this CPU computes, and the one warning about a region in one that it emulates.

Where a CPU has no units for a format, torch converts to fp32 and back, with vectors at best and number by number at
worst. `castwise doctor` has measured what that does to matrix products (docs/integrations/doctor.md): either format is
slower than fp32 then. So the warning is for both, whenever there are no units. It says what is known of the CPU: no
region waits for a measurement.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch.cpu import get_capabilities

from castwise._torch_private import run_while_tracing
from castwise._warnings import warn

# Instruction sets that multiply in the format, by their names in `torch.cpu.get_capabilities`.
UNITS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_BEFORE_BF16 = {"sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni"}
# oneDNN's values of such a limit that leave units of a CPU unused; it ignores ones that it does not know.
_LEAVE_OUT = {torch.bfloat16: _BEFORE_BF16, torch.float16: {*_BEFORE_BF16, "avx512_core_bf16"}}

SETTLED: set[torch.dtype] = set()
"""Formats that need no warning any more."""


def units(dtype: torch.dtype, capabilities: Mapping[str, object]) -> list[str]:
    """Return the instruction sets of a CPU that multiply in a format.

    Args:
        dtype: `torch.bfloat16` or `torch.float16`.
        capabilities: See `torch.cpu.get_capabilities`.

    Example:
        >>> units(torch.bfloat16, {"avx512_bf16": True, "amx_bf16": False})
        ['avx512_bf16']
    """
    return [name for name in UNITS[dtype] if capabilities.get(name)]


def has_native(dtype: torch.dtype, capabilities: Mapping[str, object], limit: str | None = None) -> bool | None:
    """Return whether matrix products in a format are computed by units for it; None where that is not known.

    Args:
        dtype: `torch.bfloat16` or `torch.float16`.
        capabilities: See `torch.cpu.get_capabilities`.
        limit: The newest instruction set that oneDNN, whose kernels torch calls, may use; None if any.

    Example:
        >>> has_native(torch.float16, {"avx512_fp16": False, "amx_fp16": False})
        False
        >>> has_native(torch.float16, {"avx512_fp16": True}, limit="AVX2")
        False
    """
    if not any(name in capabilities for name in UNITS[dtype]):
        return None
    if units(dtype, capabilities):
        return limit is None or limit.lower() not in _LEAVE_OUT[dtype]
    # oneDNN has kernels that convert by this instruction; their speed is not measured here.
    return None if capabilities.get("avx_ne_convert") else False


def limit_of_onednn() -> tuple[str, str] | None:
    """Return the environment's variable that limits what oneDNN uses of the CPU, and its value; None without one."""
    return next(((name, os.environ[name]) for name in LIMITS if os.environ.get(name)), None)


@functools.cache
def is_native_here(dtype: torch.dtype) -> bool | None:
    """Say what `has_native` says of this CPU, once: oneDNN, too, asks for its limit only once.

    Args:
        dtype: `torch.bfloat16` or `torch.float16`.
    """
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's, without types
    if not has_onednn:  # as in torch for macOS, which has other kernels
        return None
    limit = limit_of_onednn()
    return has_native(dtype, get_capabilities(), None if limit is None else limit[1])


@run_while_tracing
def warn_if_emulated(dtype: torch.dtype) -> None:
    """Warn the caller's caller, once a process and format, that this CPU emulates what a region computes in.

    Args:
        dtype: `torch.bfloat16` or `torch.float16`.

    Warns:
        UserWarning: There are no units for it, or oneDNN may not use them.
    """
    if dtype in SETTLED:
        return
    SETTLED.add(dtype)
    if is_native_here(dtype) is False:
        with suppress(UserWarning):  # torch's region does not fail where warnings are errors
            warn(_message(dtype), UserWarning, 3)


def _message(dtype: torch.dtype) -> str:
    limit = limit_of_onednn()
    if limit is not None and units(dtype, get_capabilities()):
        cause = f"torch does not use this CPU's units for {dtype}, because of {'='.join(limit)}"
    else:
        cause = f"this CPU has no units for {dtype}"
    others = [other for other in UNITS if is_native_here(other)]
    slower = "often ten times and more slower" if dtype is torch.float16 else "two to ten times and more slower"
    instead = f"use {others[0]}" if others else "stay in torch.float32"
    return f"{cause}: its ops are emulated, {slower} than in torch.float32; {instead}, or see `castwise doctor`"
