"""Detect a machine's capabilities by measuring, because CPU flags say little about torch's kernels."""

from __future__ import annotations

import os
import time

import torch

from castwise._user_error import UserError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# In hardware, a low precision is at worst slightly slower than fp32; emulated, about 30 times slower.
_EMULATED_FROM = 5.0


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
    """Return the precisions in which a small matrix product is many times slower than in fp32."""
    if device.type != "cpu":
        return []
    fp32 = _matmul_seconds(torch.float32)
    others = {name: dtype for name, dtype in PRECISIONS.items() if dtype is not torch.float32}
    return [name for name, dtype in others.items() if _matmul_seconds(dtype) > _EMULATED_FROM * fp32]


def _matmul_seconds(dtype: torch.dtype) -> float:
    """Return the best time of a few products, as in the backward of a Linear; the first one also builds kernels.

    It uses one thread, because waking a second one beside a busy process takes longer than the product.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = torch.ones(256, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype)
        seconds = []
        for _ in range(8):
            start = time.perf_counter()
            a @ b
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return min(seconds)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU to finish, so that timings measure the work and not its submission."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
