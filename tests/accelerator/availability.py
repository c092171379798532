"""The accelerator of the tests in this folder: a simulated one, unless `CASTWISE_ACCELERATOR=cuda` asks for a GPU."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

DEVICE = os.environ.get("CASTWISE_ACCELERATOR", "sim")
IS_SIMULATED = DEVICE == "sim"

simulated = pytest.mark.skipif(not IS_SIMULATED, reason="compares bits with a CPU, or counts launches")

TORCH = "2.13"
"""The version of torch that device.cpp is written for: the C++ interface of devices changes between versions."""


def why_unavailable() -> str | None:
    """Return why there is no accelerator, or None."""
    if DEVICE == "cuda":
        return None if torch.cuda.is_available() else "torch finds no CUDA device"
    if not torch.__version__.startswith(TORCH + "."):
        return f"device.cpp is written for torch {TORCH}, and this is torch {torch.__version__}"
    absent = [name for name in ("g++", "ninja") if shutil.which(name) is None]
    return f"there is no {' and no '.join(absent)}" if absent else None
