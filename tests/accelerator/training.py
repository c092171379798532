"""A small training run, with torch.amp or castwise, on a CPU or on an accelerator."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator.availability import DEVICE, IS_SIMULATED
from tests.forked import Python
from torch import nn

import castwise

if IS_SIMULATED:
    from tests.accelerator.device import Counted
else:
    from tests.accelerator.gpu import Counted  # type: ignore[assignment]

__all__ = ["Counted"]

KINDS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}
CLIPPING = ("none", "clip_grad_norm_", "unscale_ and torch's")
MAX_NORM = 0.05


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def batches(count: int, device: str = DEVICE, spoilt: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Return batches on a device; those in `spoilt` contain an inf."""
    torch.manual_seed(1)
    made = [torch.randn(4, 8) for _ in range(count)]
    for index in spoilt:
        made[index][1, 2] = math.inf
    return [batch.to(device) for batch in made]


def bits(tensors: Any) -> list[list[float]]:
    """Return tensors as numbers on the host, all of which are finite."""
    return [tensor.detach().cpu().double().flatten().tolist() for tensor in tensors]


def as_on_a_cpu(ours: list[list[float]], cpus: list[list[float]]) -> bool:
    """Compare tensors as numbers with those of a CPU: bit for bit, or as closely as kernels of a GPU compute them."""
    if IS_SIMULATED:
        return ours == cpus
    return all(mine == pytest.approx(other, rel=1e-3, abs=1e-5) for mine, other in zip(ours, cpus, strict=True))


class Training:
    """A model, an optimizer and a scaler.

    Args:
        library: `torch.amp` or `castwise`.
        kind: One of `KINDS`.
        clipping: One of `CLIPPING`; torch.amp unscales and clips for "clip_grad_norm_" too.
        device: The device.
        low: Whether the forward runs under autocast; its lists differ between devices.
        **options: Arguments of the scaler.
    """

    def __init__(
        self,
        library: Any,
        kind: str = "fused",
        clipping: str = "none",
        device: str = DEVICE,
        *,
        low: bool = True,
        **options: Any,
    ) -> None:
        self.library, self.clipping, self.device = library, clipping, torch.device(device).type
        self.low = low
        self.model = net().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **KINDS[kind])
        options = {"init_scale": 2.0**10, "growth_interval": 3} | options
        if "schedule" in options:
            del options["init_scale"], options["growth_interval"]
        self.scaler = library.GradScaler(self.device, **options)

    def step(self, batch: torch.Tensor) -> None:
        self.backward(batch)
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def backward(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        with self.library.autocast(self.device, dtype=torch.float16, enabled=self.low):
            loss = self.model(batch).square().mean()
        self.scaler.scale(loss).backward()

    def clip(self) -> None:
        if self.clipping == "clip_grad_norm_" and self.library is castwise:
            self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM)
        elif self.clipping != "none":
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def run(self, data: list[torch.Tensor]) -> list[list[float]]:
        """Train on batches; return the weights, the optimizer's state and the scale."""
        for batch in data:
            self.step(batch)
        return self.state()

    def state(self) -> list[list[float]]:
        states = [
            value
            for of_param in self.optimizer.state.values()
            for value in of_param.values()
            if isinstance(value, torch.Tensor)
        ]
        return [*bits(self.model.parameters()), *bits(states), [self.scaler.get_scale()]]


def counted_step(training: Any, *, warm: int = 4) -> Counted:
    """Return the counts of one iteration after some warm ones."""
    *first, last = batches(warm + 1)
    for batch in first:
        training.step(batch)
    with Counted() as counted:
        training.step(last)
    return counted


def castwise_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `castwise` in a process of its own."""
    process = Python(["-m", "castwise", *arguments], cwd, COLUMNS=120)
    printed, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(arguments, process.returncode, printed, errors)
