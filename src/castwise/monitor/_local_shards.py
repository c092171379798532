"""This rank's part of a tensor that is split over ranks."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from castwise._torch_private import is_fsdp_flattened


class LocalShard(NamedTuple):
    """This rank's part of a tensor."""

    local: torch.Tensor
    distinct: int | None
    """Number of distinct parts; more ranks than that hold copies. None: one per rank."""


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a DTensor."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def is_split_over_ranks(model: nn.Module) -> bool:
    """Return True if one rank cannot run a model without the others: FSDP, tensor parallelism, SyncBatchNorm."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    if fully_sharded(model):  # whose parameters are whole while they are gathered
        return True
    return any(is_dtensor(parameter) or is_fsdp_flattened(parameter) for parameter in model.parameters()) or any(
        isinstance(module, nn.SyncBatchNorm) for module in model.modules()
    )


def fully_sharded(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was applied to."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # a program that shards a module has imported it
    kind = getattr(fsdp, "FSDPModule", ())
    return [module for module in model.modules() if isinstance(module, kind)]


def is_partial(tensor: Any) -> bool:
    """Return True if a tensor is a DTensor of partial sums, which no rank knows without the others."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)


def local_shard(tensor: Any, parameter: torch.Tensor | None = None) -> LocalShard:
    """Return this rank's part of a tensor.

    Args:
        tensor: A DTensor without partial sums, or a tensor that is the same on all ranks (DDP).
        parameter: The parameter, if the tensor is its gradient. With FSDP1 each rank has its own part of gradients of
            flattened parameters.
    """
    if not is_dtensor(tensor):
        of_this_rank = parameter is not None and is_fsdp_flattened(parameter)
        return LocalShard(tensor, None if of_this_rank else 1)
    split = [dimension for dimension, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return LocalShard(tensor.to_local(), math.prod(tensor.device_mesh.size(dimension) for dimension in split))
