"""What this rank holds of gradients that are split or repeated over ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from castwise._torch_private import is_fsdp_flattened
from castwise.amp.gradients import Gradients, is_plain, regroup


def local(grads: Gradients, ranks: int, copies: int) -> Gradients:
    """Replace DTensors by what this rank holds of them, and say how much of each gradient is its own to count.

    A DTensor that is a partial sum has no finite elements or norm yet: it is summed first, in `.grad` as well.

    A plain gradient is taken to be the same on all ranks (DDP), or the rank's own if it is of a parameter that FSDP
    has flattened.

    Args:
        grads: Of any kind.
        ranks: How many of those that decide together share the parameters.
        copies: How many of them hold the same part of what FSDP has flattened.
    """
    if all(is_plain(grads.tensors[group[0]]) for group in grads.groups.values()):
        shares = [1.0 / copies if is_fsdp_flattened(param) else 1.0 / ranks for param in grads.params]
        return dataclasses.replace(grads, shares=shares)
    whole: list[Any] = [_summed(param, tensor) for param, tensor in zip(grads.params, grads.tensors, strict=True)]
    tensors = [tensor.to_local() if _is_dtensor(tensor) else tensor for tensor in whole]
    shares = [_share(param, tensor, ranks, copies) for param, tensor in zip(grads.params, whole, strict=True)]
    return dataclasses.replace(grads, tensors=tensors, groups=regroup(tensors), shares=shares)


def _summed(param: torch.Tensor, tensor: Any) -> Any:
    if not _is_dtensor(tensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    of_param: Any = param
    param.grad = tensor.redistribute(placements=of_param.placements)
    return param.grad


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "placements")


def _share(param: torch.Tensor, tensor: Any, ranks: int, copies: int) -> float:
    """Return 1 / n if n of the ranks hold the same elements."""
    if not _is_dtensor(tensor):
        return 1.0 / copies if is_fsdp_flattened(param) else 1.0 / ranks
    shards = 1
    for dimension, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            shards *= tensor.device_mesh.size(dimension)
    return shards / ranks
