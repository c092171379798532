"""What the machine can do, found out by trying: a CPU's flags say little about torch's kernels for it."""

from __future__ import annotations

import os
import time

import torch

from castwise._user_error import UserError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# With units for it a low precision is at worst a little slower than fp32; emulated, about 30 times.
_EMULATED_FROM = 5.0


def choose_device(name: str | None) -> torch.device:
    """The device of that name; without one, a GPU where there is one, else the CPU.

    Raises:
        UserError: The name is no device, not one that the demo knows, or not one of this machine.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device must be cpu, cuda or cuda:<number>, got {name!r}") from error
    if device.type not in {"cpu", "cuda"}:
        raise UserError(f"--device must be cpu, cuda or cuda:<number>, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return device


def make_deterministic(device: torch.device) -> None:
    """Let equal inputs give equal bits: a GPU else adds gradients up in whatever order its blocks finish."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses to continue without it
        torch.use_deterministic_algorithms(True)
        # It also fills every new tensor, in case one is read before it is written; we would time that.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # made at run time


def emulated_precisions(device: torch.device) -> list[str]:
    """The precisions in which a small matrix product is many times slower than in fp32."""
    if device.type != "cpu":
        return []
    fp32 = _matmul_seconds(torch.float32)
    others = {name: dtype for name, dtype in PRECISIONS.items() if dtype is not torch.float32}
    return [name for name, dtype in others.items() if _matmul_seconds(dtype) > _EMULATED_FROM * fp32]


def _matmul_seconds(dtype: torch.dtype) -> float:
    """The best of a few products, as in the backward of a Linear; the first also builds kernels.

    By one thread: a second one that has to be woken up beside another busy process takes longer than the product.
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
    """Wait for a GPU's queue, so that a clock read next measures the work and not its submission."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
