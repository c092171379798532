"""The device that the demo trains on, and what it computes natively."""

from __future__ import annotations

import os

import torch

from castwise._user_error import UserError
from castwise.amp._emulation import is_native_here

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str | None) -> torch.device:
    """Return the named device, or by default a GPU if there is one, else the CPU.

    Raises:
        UserError: The name is neither cpu nor cuda, or there is no GPU.
    """
    if name not in {None, "cpu", "cuda"}:
        raise UserError(f"--device must be cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device; use --device cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def make_deterministic(device: torch.device) -> None:
    """Make results bit-reproducible; by default, a GPU sums gradients in the order in which its blocks finish."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic torch raises without it
        torch.use_deterministic_algorithms(True)
        # Deterministic mode also fills every new tensor, which would be part of the measured time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # made at run time


def emulated_precisions(device: torch.device) -> list[str]:
    """Return the low precisions that a device is not known to compute natively: a step may take 30 times as long."""
    if device.type != "cpu":
        return []
    return [name for name, dtype in PRECISIONS.items() if dtype is not torch.float32 and not is_native_here(dtype)]


def synchronize(device: torch.device) -> None:
    """Wait for a GPU to finish, so that timings measure the work and not its submission."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
