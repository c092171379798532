"""The first record of a run: versions, device and settings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, SupportsFloat

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from castwise._version import __version__
from castwise.monitor import _module_names as names
from castwise.monitor._gathered_weights import can_be_gathered
from castwise.monitor._local_shards import fully_sharded, is_split_over_ranks
from castwise.monitor._records import FORMAT, LAST_SECOND, RunRecord


def run_record(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], scaler: Any, every: int, ranks: int
) -> RunRecord:
    """Return the first record of a run. Does not read tensors on an accelerator."""
    parameters = list(model.parameters())
    is_scaled = scaler is not None and scaler.is_enabled()
    return RunRecord(
        format=FORMAT,
        time=min(max(0.0, time.time()), LAST_SECOND - 1.0),  # some clocks were never set
        castwise=__version__,
        torch=str(torch.__version__),
        device=_device_name(parameters[0].device if parameters else torch.device("cpu")),
        settings={
            "model": type(names.modules(model)[""]).__name__,
            "parameters": sum(parameter.numel() for parameter in parameters if not is_lazy(parameter)),
            "optimizer": ", ".join(type(optimizer).__name__ for optimizer in optimizers),
            "learning rate": _learning_rate(optimizers[0].param_groups[0].get("lr")),
            "schedule": str(scaler.schedule) if is_scaled else "no scaling",
            "every": every,
            "ranks": ranks,
            **_split(model, parameters),
        },
    )


def _split(model: nn.Module, parameters: Sequence[nn.Parameter]) -> dict[str, str]:
    if can_be_gathered(model):
        return {"parameters split over ranks": "by fully_shard" if fully_sharded(model) else "by parallelize_module"}
    is_dtensor = is_split_over_ranks(nn.ParameterList(parameters))
    return {"parameters split over ranks": "in other ways"} if is_dtensor else {}


def _learning_rate(lr: Any) -> float | str:
    if isinstance(lr, torch.Tensor):
        return float(lr) if lr.device.type == "cpu" and lr.numel() == 1 else f"a tensor on {lr.device}"
    return float(lr) if isinstance(lr, SupportsFloat) else "unknown"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
