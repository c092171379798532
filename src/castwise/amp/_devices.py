"""Which devices support mixed precision."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch.amp import is_autocast_available as is_available_in_torch

from castwise._torch_private import run_while_tracing
from castwise._warnings import warn
from castwise.amp import _torch_words as torch_words

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def is_autocast_available(device_type: str) -> bool:
    """Return True if torch can autocast on a type of device.

    Args:
        device_type: A device type as in `torch.device(...).type`, for example `"cuda"` or `"cpu"`.

    Raises:
        RuntimeError: torch does not know the device type.
    """
    return is_available_in_torch(device_type)


def amp_definitely_not_available() -> bool:
    """Return True if there is neither CUDA nor XLA, so that mixed precision for `"cuda"` has to be disabled."""
    return not (torch.cuda.is_available() or _has_torch_xla())


@functools.cache
def _has_torch_xla() -> bool:
    # A failed search walks sys.path (~0.1 ms), and regions are created often, so the result is cached.
    return find_spec("torch_xla") is not None


@run_while_tracing  # before torch 2.13, Dynamo cannot trace the function of torch that this calls
def has_autocast(device_type: str) -> bool:
    """Return True if torch can autocast on a type of device; False if the string does not name one."""
    try:
        return is_available_in_torch(device_type)
    except RuntimeError:  # torch cannot parse it as a device
        return False


def can_autocast_to(device_type: str, dtype: torch.dtype) -> bool:
    """Return True if a region can cast to a dtype; warn if it cannot, as torch does, and raise where torch would."""
    if device_type == "cuda":
        if amp_definitely_not_available():
            warn(torch_words.warning_of_region("The CPU has autocast('cpu')", device_type, dtype), UserWarning)
            return False
        if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            ours = RuntimeError("this CUDA device does not support torch.bfloat16: use dtype=torch.float16")
            raise torch_words.error(ours, lambda: torch_words.region(device_type, dtype))
        return True
    custom = device_type != "cpu" and device_type == custom_backend()  # which takes as long as entering the region
    supported = _dtypes_of_backend(device_type) if custom else _LOW_PRECISION
    if dtype not in supported:
        names = ", ".join(map(str, supported))
        hint = f"autocast on {device_type!r} supports {names}, got {dtype}"
        warn(torch_words.warning_of_region(hint, device_type, dtype), UserWarning)
        return False
    return True


def custom_backend() -> str:
    """Return the type of torch's custom device, under the name that its backend has given it."""
    return torch.device("privateuseone").type


def _dtypes_of_backend(device_type: str) -> Iterable[torch.dtype]:
    backend = getattr(torch, device_type, None)
    supported = getattr(backend, "get_amp_supported_dtype", None)
    if supported is None:
        ours = RuntimeError(
            f"backend {device_type!r} does not list the dtypes that it can autocast to: register a module for it with "
            "torch._register_device_module that has a function get_amp_supported_dtype() -> list[torch.dtype]"
        )
        raise torch_words.error(ours, lambda: torch_words.region(device_type))
    dtypes: Iterable[torch.dtype] = supported()
    return dtypes


def device_type(device: Any) -> Any:
    """Return the type of a `torch.device` or of a device given by name.

    Other objects and names are returned unchanged, because torch's scaler accepts them. They equal no device type.
    """
    if not isinstance(device, (str, torch.device)):
        return device
    try:
        return torch.device(device).type
    except RuntimeError:
        return device


@functools.cache
def copies_asynchronously(device_type: str) -> bool:
    """Return True if a type of device has events and pinned memory, so that the host can wait for a copy later."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device_type:
        return False
    try:
        torch.accelerator.current_stream(torch.device(device_type)).record_event()
        return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
    except RuntimeError:  # also NotImplementedError, which derives from it
        return False


def is_capturing(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's stream is being captured in a CUDA graph, so that the host cannot read values."""
    if tensor.device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        return False
    return torch.cuda.is_current_stream_capturing()


def free_bytes(device_type: str) -> float | None:
    """Return the free bytes of the current device's memory; None if they are not known."""
    if device_type == "cpu":
        names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
        known = "SC_AVPHYS_PAGES" in names and "SC_PAGE_SIZE" in names
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) if known else None
    ask = getattr(torch.get_device_module(device_type), "mem_get_info", None)
    return None if ask is None else float(ask()[0])
