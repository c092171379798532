"""`ShardedGradScaler`: a `GradScaler` with a process group, at torch's path and with torch's order of arguments."""

from __future__ import annotations

import logging
from typing import Any

import torch

if not torch.distributed.is_available():
    raise ImportError("ShardedGradScaler needs a build of torch that has torch.distributed")

# This import loads all of FSDP, so this module is imported only on demand.
from torch.distributed import ProcessGroup as ProcessGroup  # torch has it here
from torch.distributed.fsdp import sharded_grad_scaler as torchs

from castwise.amp import _torch_words as torch_words
from castwise.amp._agreement import Agreement, Ranks
from castwise.amp._devices import custom_backend
from castwise.amp._schedules import Schedule
from castwise.amp.grad_scaler import (
    BACKOFF_FACTOR,
    GROWTH_FACTOR,
    GROWTH_INTERVAL,
    INIT_SCALE,
    GradScaler,
    OptState,
    _MultiDeviceReplicator,
    _refresh_per_optimizer_state,
)

__all__ = ["GradScaler", "OptState", "ShardedGradScaler", "_refresh_per_optimizer_state"]

logger = logging.getLogger(__name__)

_TYPES = ("cuda", "xla", "cpu", "hpu", "mtia", "xpu")


def _is_supported_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type in (*_TYPES, custom_backend())


_ReplicatorInTorch: Any = getattr(torchs, "_GeneralMultiDeviceReplicator", object)  # for `isinstance`


class _GeneralMultiDeviceReplicator(_MultiDeviceReplicator, _ReplicatorInTorch):  # type: ignore[misc]  # a class, if torch has it
    def __init__(self, master_tensor: torch.Tensor) -> None:
        if not _is_supported_device(master_tensor):
            ours = ValueError(
                f"a tensor can be copied from {', '.join(_TYPES)} or a custom backend, got {master_tensor.device}"
            )
            raise torch_words.error(ours, lambda: torchs._GeneralMultiDeviceReplicator(master_tensor))
        super().__init__(master_tensor)


class ShardedGradScaler(GradScaler, torchs.ShardedGradScaler):
    """A `GradScaler` for models that are sharded or replicated over ranks, which all take and skip the same steps.

    It works as `GradScaler(..., allow_fp16_gradients=True, process_group=...)`, except that scaled losses keep their
    dtype, which FSDP needs for losses in fp16 or bf16.

    Args:
        device: As for `GradScaler`.
        init_scale: As for `GradScaler`.
        backoff_factor: As for `GradScaler`, but before `growth_factor`, as in torch.
        growth_factor: As for `GradScaler`.
        growth_interval: As for `GradScaler`.
        enabled: As for `GradScaler`.
        schedule: As for `GradScaler`.
        process_group: A group or a `DeviceMesh`; None means all ranks that exist when a step is taken.
        pipeline_stages: As for `GradScaler`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range.
        RuntimeError: In a step or clipping, on all ranks, if they no longer use their scalers in the same way, or one
            of them cannot be reached. No rank has stepped then.
    """

    _keeps_loss_dtype = True  # FSDP needs it for losses in half precision

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = INIT_SCALE,
        backoff_factor: float = BACKOFF_FACTOR,
        growth_factor: float = GROWTH_FACTOR,
        growth_interval: int = GROWTH_INTERVAL,
        enabled: bool = True,
        process_group: Ranks | None = None,
        *,
        schedule: Schedule | None = None,
        pipeline_stages: int = 1,
    ) -> None:
        GradScaler.__init__(
            self,
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            schedule=schedule,
            allow_fp16_gradients=True,
        )
        self._set_agreement(Agreement(process_group, self._device, pipeline_stages))

    @property
    def process_group(self) -> Ranks | None:  # type: ignore[override]  # torch's is a variable and takes no mesh
        """The group or mesh whose ranks decide together; all ranks if none was given."""
        assert self._agreement is not None
        return self._agreement.ranks or torch.distributed.group.WORLD

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        return GradScaler._unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16)

    def _amp_update_scale_cpu_(self, found_inf: torch.Tensor) -> None:
        scale, growth_tracker = self._check_scale_growth_tracker("_amp_update_scale_cpu_")
        self._refresh_schedule().advance_(
            scale, {"growth_tracker": growth_tracker, **self._trackers}, self._iteration_facts(found_inf)
        )
