"""This rank's part of gradients that are sharded or replicated over ranks."""

from __future__ import annotations

from typing import Any

import torch

from castwise._torch_private import is_fsdp_flattened


def local(
    params: list[torch.Tensor], grads: list[torch.Tensor], ranks: int, copies: int
) -> tuple[list[torch.Tensor], list[float]]:
    """Replace DTensors with this rank's part, and return what share of each gradient this rank counts.

    A DTensor with partial sums is summed first, also in `.grad`, because its elements and norm are not known before. A
    plain gradient counts as the same on all ranks (DDP), or as this rank's own if FSDP1 flattened its parameter.

    Args:
        params: The parameters.
        grads: Their gradients, of any kind.
        ranks: The number of ranks that share the parameters, all of which decide together.
        copies: How many of them hold the same part of a parameter that FSDP1 flattened.

    Returns:
        This rank's tensors, and a share for each: 1 / n if n of the ranks hold the same elements.
    """
    whole: list[Any] = [_summed(param, grad) for param, grad in zip(params, grads, strict=True)]
    shares = [_share(param, grad, ranks, copies) for param, grad in zip(params, whole, strict=True)]
    return [grad.to_local() if _is_dtensor(grad) else grad for grad in whole], shares


def _summed(param: torch.Tensor, grad: Any) -> Any:
    if not _is_dtensor(grad) or not any(placement.is_partial() for placement in grad.placements):
        return grad
    of_param: Any = param
    param.grad = grad.redistribute(placements=of_param.placements)
    return param.grad


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "placements")


def _share(param: torch.Tensor, grad: Any, ranks: int, copies: int) -> float:
    if not _is_dtensor(grad):
        return 1.0 / copies if is_fsdp_flattened(param) else 1.0 / ranks
    shards = 1
    for dimension, placement in enumerate(grad.placements):
        if not placement.is_replicate():
            shards *= grad.device_mesh.size(dimension)
    return shards / ranks
