"""Which low precisions this CPU computes natively, and a one-time warning about a region in one that it emulates.

If a CPU has no units for a format, torch converts to fp32 and back, vectorised at best and number by number at worst.
`castwise doctor` measures the effect on matrix products (docs/integrations/doctor.md): both formats are then slower
than fp32, so both warn. The warning uses only the CPU's capabilities, so that no region waits for a measurement.
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
# Values of the limit with which oneDNN leaves a CPU's units unused. It ignores values that it does not know.
_LEAVE_OUT = {torch.bfloat16: _BEFORE_BF16, torch.float16: {*_BEFORE_BF16, "avx512_core_bf16"}}

SETTLED: set[torch.dtype] = set()
"""Formats that were already checked, so they do not warn again."""


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
    """Return whether the CPU has units that compute matrix products in a format; None if that is not known.

    Args:
        dtype: `torch.bfloat16` or `torch.float16`.
        capabilities: See `torch.cpu.get_capabilities`.
        limit: The newest instruction set that oneDNN, whose kernels torch calls, may use; None for no limit.

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
    # oneDNN has kernels that convert with this instruction; their speed was not measured.
    return None if capabilities.get("avx_ne_convert") else False


def limit_of_onednn() -> tuple[str, str] | None:
    """Return the name and value of the environment variable that limits oneDNN's instruction sets; None if unset."""
    return next(((name, os.environ[name]) for name in LIMITS if os.environ.get(name)), None)


@functools.cache
def is_native_here(dtype: torch.dtype) -> bool | None:
    """Return `has_native` for this CPU. The result is cached, because oneDNN also reads its limit only once.

    Args:
        dtype: `torch.bfloat16` or `torch.float16`.
    """
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's, without types
    if not has_onednn:  # as in torch for macOS, which uses other kernels
        return None
    limit = limit_of_onednn()
    return has_native(dtype, get_capabilities(), None if limit is None else limit[1])


@run_while_tracing
def warn_if_emulated(dtype: torch.dtype) -> None:
    """Warn once per process and format that this CPU emulates a region's format, at the line of the caller's caller.

    Args:
        dtype: `torch.bfloat16` or `torch.float16`.

    Warns:
        UserWarning: The CPU has no units for the format, or oneDNN may not use them.
    """
    if dtype in SETTLED:
        return
    SETTLED.add(dtype)
    if is_native_here(dtype) is False:
        with suppress(UserWarning):  # where warnings are errors, torch's region does not fail either
            warn(_message(dtype), UserWarning)


def _message(dtype: torch.dtype) -> str:
    limit = limit_of_onednn()
    if limit is not None and units(dtype, get_capabilities()):
        cause = f"torch does not use this CPU's units for {dtype}, because of {'='.join(limit)}"
    else:
        cause = f"this CPU has no units for {dtype}"
    others = [other for other in UNITS if is_native_here(other)]
    slower = "often ten or more times slower" if dtype is torch.float16 else "two to ten or more times slower"
    instead = f"use {others[0]}" if others else "use torch.float32"
    return f"{cause}: its ops are emulated, {slower} than in torch.float32; {instead}, or see `castwise doctor`"
