"""Ranks that decide alike: what each has found, reduced to what all of them know, in one small collective."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Ranks: TypeAlias = "ProcessGroup | DeviceMesh"


class Agreement:
    """A process group or a device mesh whose ranks must take and skip the same steps.

    Args:
        ranks: The group, the mesh, or None for all ranks there are when it is used first.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        if not torch.distributed.is_available():
            raise RuntimeError("this build of torch has no torch.distributed, so there are no ranks to agree with")
        is_mesh = hasattr(ranks, "get_all_groups")
        if ranks is not None and not is_mesh and not isinstance(ranks, torch.distributed.ProcessGroup):
            raise TypeError(f"process_group must be a ProcessGroup or a DeviceMesh, got {type(ranks).__name__}")
        self.ranks = ranks

    def _groups(self) -> list[Any]:
        if self.ranks is None:
            if not torch.distributed.is_initialized():
                raise RuntimeError("ranks cannot agree yet: call torch.distributed.init_process_group() first")
            return [torch.distributed.group.WORLD]
        groups: list[Any] = self.ranks.get_all_groups() if hasattr(self.ranks, "get_all_groups") else [self.ranks]
        return groups

    def size(self) -> int:
        """Return the number of ranks."""
        size = 1
        for group in self._groups():
            size *= torch.distributed.get_world_size(group)
        return size

    def any_(self, flag: torch.Tensor) -> torch.Tensor:
        """Set a flag (fp32, one element) to 1 on all ranks if it is 1 on one, and return it."""
        return self._reduce_(flag, torch.distributed.ReduceOp.MAX)

    def norm(self, found_inf: torch.Tensor, norm: torch.Tensor, norm_type: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the found_inf (fp32, shape ()) and the p-norm (fp64, shape ()) of all ranks' gradients together."""
        if norm_type == math.inf:
            facts = torch.stack([found_inf.double(), norm.double()])
            found, largest = self._reduce_(facts, torch.distributed.ReduceOp.MAX)
            return found.float(), largest
        facts = torch.stack([found_inf.double(), norm.double() ** norm_type])
        found, total = self._reduce_(facts, torch.distributed.ReduceOp.SUM)
        return (found > 0).float(), total ** (1.0 / norm_type)

    def _reduce_(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        # Along the dimensions of a mesh one after the other. On an accelerator the stream waits, and the host does not.
        for group in self._groups():
            try:
                torch.distributed.all_reduce(tensor, op, group)
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank {torch.distributed.get_rank()} could not agree with the others of the process group "
                    f"{group.group_name!r} (ranks {torch.distributed.get_process_group_ranks(group)}) on whether to "
                    f"take this step, so it has not stepped: has one of them ended? {error}"
                ) from error
        return tensor
