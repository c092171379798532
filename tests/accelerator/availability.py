"""Whether the simulated accelerator can be built here."""

from __future__ import annotations

import shutil

import torch

TORCH = "2.13"
"""The version of torch that device.cpp is written for: the C++ interface of devices changes between versions."""


def why_unavailable() -> str | None:
    """Return why the device cannot be built, or None."""
    if not torch.__version__.startswith(TORCH + "."):
        return f"device.cpp is written for torch {TORCH}, and this is torch {torch.__version__}"
    absent = [name for name in ("g++", "ninja") if shutil.which(name) is None]
    return f"there is no {' and no '.join(absent)}" if absent else None
