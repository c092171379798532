"""What this rank holds of gradients that are split or repeated over ranks."""

from __future__ import annotations

from typing import Any

import torch

from castwise._torch_private import is_fsdp_flattened


def local(
    params: list[torch.Tensor], grads: list[torch.Tensor], ranks: int, copies: int
) -> tuple[list[torch.Tensor], list[float]]:
    """Replace DTensors by what this rank holds of them, and tell how much of each gradient is its own to count.

    A DTensor that is a partial sum has no finite elements or norm yet: it is summed first, in `.grad` as well. A plain
    gradient is taken to be the same on all ranks (DDP), or the rank's own if its parameter was flattened by FSDP1.

    Args:
        params: The parameters.
        grads: Their gradients, of any kind.
        ranks: How many of those that decide together share the parameters.
        copies: How many of them hold the same part of what FSDP1 has flattened.

    Returns:
        Tensors of this rank, and for each 1 / n if n of the ranks hold the same elements.
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
