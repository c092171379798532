"""Which ranks train one model, as wrappers and DTensors show, and how they sum gradients."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from castwise._invariants.invariant import Violation
from castwise._invariants.torch_calls import TORCH_CALLS
from castwise._live_objects import instances_of
from castwise._torch_private import fsdp_mixed_precision

_HALF = (torch.bfloat16, torch.float16)
_MOST_RANKS = 64  # of which gradients may be summed in 16 bits
_HALF_HOOKS = {"bf16_compress_hook": torch.bfloat16, "fp16_compress_hook": torch.float16}
_AVERAGERS = "torch.distributed.algorithms.model_averaging.averagers"


@dataclass(frozen=True)
class DataParallel:
    """Ranks that train one model, on different batches as far as is known.

    Args:
        ranks: Their global ranks, in ascending order.
        replicas: Parameters that each of them holds whole, by name.
        reduced: Those of them whose gradients are summed before each step, by name.
        wrappers: The wrappers of which the forward must be called.
        may_share_batches: Whether they may work on one batch, as under tensor parallelism.
    """

    ranks: tuple[int, ...]
    replicas: Mapping[str, torch.Tensor] = field(default_factory=dict)
    reduced: Mapping[str, torch.Tensor] = field(default_factory=dict)
    wrappers: tuple[nn.Module, ...] = ()
    may_share_batches: bool = False


def data_parallel(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> DataParallel | None:
    """Return which ranks train a model together with this one, None if nothing shows that any do.

    Args:
        model: The model, or its wrapper.
        parameters: Its parameters by name.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    found = _under_ddp(model, parameters) or _replicated(parameters) or _under_fsdp2(model)
    return found if found is not None and len(found.ranks) > 1 and dist.get_rank() in found.ranks else None


def summed_in_16_bits(model: nn.Module) -> Iterator[Violation]:
    """Yield that the gradients of many ranks are summed in 16 bits, if they are."""
    for wrapper in _ddps(model):
        hook = getattr(TORCH_CALLS.communication_hook(wrapper), "__name__", "")
        params = [param for param in wrapper.parameters() if param.requires_grad]
        own = next((param.dtype for param in params if param.dtype in _HALF), None) if not hook else None
        dtype, size = _HALF_HOOKS.get(hook, own), dist.get_world_size(wrapper.process_group)
        if dtype is not None and size > _MOST_RANKS:
            how = f"the hook {hook} of DistributedDataParallel" if hook else "DistributedDataParallel"
            yield _broken(how, dtype, size, "fp32: without that hook, or with fp32 weights under autocast.")
            return
    for module in model.modules():
        policy = fsdp_mixed_precision(module)
        dtype = None if policy is None else policy.reduce_dtype or policy.param_dtype
        meshes = [_mesh_of(param) for param in module.parameters()] if dtype in _HALF else []
        size = max((mesh.size() for mesh in meshes if mesh is not None), default=0)
        if size > _MOST_RANKS:
            yield _broken("FSDP2", dtype, size, "fp32: MixedPrecisionPolicy(reduce_dtype=torch.float32).")
            return


def _broken(how: str, dtype: Any, ranks: int, instead: str) -> Violation:
    short, bits = str(dtype).removeprefix("torch."), -math.log2(torch.finfo(dtype).eps)
    text = f"{how} sums the gradients of {ranks} ranks in {short}, which keeps {bits + 1:.0f} bits"
    return Violation("reduced-in-16-bits", f"{text}: small ones get lost.", f"Sum in {instead}")


def _under_ddp(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> DataParallel | None:
    wrappers = _ddps(model)
    if not wrappers:
        return None
    ranks = _ranks_of(wrappers[0])
    wrappers = [wrapper for wrapper in wrappers if _ranks_of(wrapper) == ranks]
    if any(_averages_weights(wrapper) for wrapper in wrappers) or _has_averager():
        return DataParallel(ranks, wrappers=tuple(wrappers))  # they are equal only after each averaging
    whole = {id(param) for wrapper in wrappers for param in _params_of(wrapper)}
    replicas = {name: param for name, param in parameters.items() if id(param) in whole}
    return DataParallel(ranks, replicas, replicas, tuple(wrappers))


def _replicated(parameters: Mapping[str, torch.Tensor]) -> DataParallel | None:
    found: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
    is_any_split = False
    for name, param in parameters.items():
        mesh, placements = _mesh_of(param), getattr(param, "placements", ())
        is_whole = all(placement.is_replicate() for placement in placements)
        is_any_split = is_any_split or not is_whole
        if mesh is not None and param.requires_grad and is_whole:
            found.setdefault(tuple(sorted(mesh.mesh.flatten().tolist())), {})[name] = param
    if not found:
        return None
    ranks, replicas = max(found.items(), key=lambda each: len(each[1]))
    return DataParallel(ranks, replicas, may_share_batches=is_any_split)


def _under_fsdp2(model: nn.Module) -> DataParallel | None:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if isinstance(model, getattr(fsdp, "FSDPModule", ())):
        mesh = next((_mesh_of(param) for param in model.parameters() if _mesh_of(param) is not None), None)
        if mesh is not None and mesh.ndim == 1:  # ranks along other dimensions may work on one batch
            return DataParallel(tuple(sorted(mesh.mesh.tolist())))
    return None


def _ddps(model: nn.Module) -> list[DistributedDataParallel]:
    inside = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if inside:
        return inside
    own = set(map(id, model.modules()))
    found = instances_of(DistributedDataParallel)
    return [wrapper for wrapper in found if id(vars(wrapper)["_modules"].get("module")) in own]


def _params_of(wrapper: DistributedDataParallel) -> Iterator[torch.Tensor]:
    for name, param in wrapper.module.named_parameters():
        if param.requires_grad and name not in wrapper.parameters_to_ignore and _mesh_of(param) is None:
            yield param


def _ranks_of(wrapper: DistributedDataParallel) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(wrapper.process_group)))


def _averages_weights(wrapper: DistributedDataParallel) -> bool:
    return "localsgd" in getattr(TORCH_CALLS.communication_hook(wrapper), "__name__", "").lower()


def _has_averager() -> bool:
    kind: Any = getattr(sys.modules.get(_AVERAGERS), "ModelAverager", None)  # a script that has one has imported it
    return kind is not None and bool(instances_of(kind))


def _mesh_of(param: torch.Tensor) -> Any:
    return getattr(param, "device_mesh", None)
