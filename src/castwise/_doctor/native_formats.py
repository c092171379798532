"""Formats of matrix products, and which of them a device computes in hardware."""

from __future__ import annotations

import torch

from castwise.amp._emulation import is_native_here

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
# First compute capability whose tensor cores support a format (CUDA C++ Programming Guide, "Compute Capabilities").
_TENSOR_CORES_SINCE = {"fp16": (7, 0), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}

Native = dict[str, bool | None]


def of_cuda(capability: tuple[int, int]) -> Native:
    """Return, by format, whether an NVIDIA GPU computes it in hardware.

    Args:
        capability: Compute capability, as returned by `torch.cuda.get_device_capability`.

    Example:
        >>> of_cuda((7, 5))
        {'fp32': True, 'tf32': False, 'bf16': False, 'fp16': True, 'fp8': False}
    """
    return {name: name == "fp32" or capability >= _TENSOR_CORES_SINCE[name] for name in DTYPES}


def of_cpu() -> Native:
    """Return, by format, whether this CPU computes it in hardware and torch uses that; None if unknown."""
    return {"fp32": True, **{name: is_native_here(DTYPES[name]) for name in ("bf16", "fp16")}}


def of_device(device: torch.device) -> Native:
    """Return, by format, whether a device computes it in hardware; None if torch does not report it.

    Args:
        device: A device of this machine.
    """
    if device.type == "cpu":
        return of_cpu()
    if device.type == "cuda" and torch.version.hip is None:  # AMD numbers capabilities differently
        return of_cuda(torch.cuda.get_device_capability(device))
    return {"fp32": True, "bf16": None, "fp16": None}


def to_try(native: Native) -> list[str]:
    """Return the formats to measure, including emulated ones but not unsupported ones.

    Example:
        >>> to_try(of_cuda((7, 5)))
        ['fp32', 'bf16', 'fp16']
    """
    return [name for name, is_native in native.items() if is_native or name in {"fp32", "bf16", "fp16"}]
