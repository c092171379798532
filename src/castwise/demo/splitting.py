"""Splitting a model between processes; imported only when needed, because it takes half a second."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from castwise._user_error import UserError
from castwise.demo.gpt import GPT, Block

_WHOLE = StateDictOptions(full_state_dict=True)


def split(model: GPT, strategy: str, mesh: DeviceMesh) -> nn.Module:
    """Wrap or split a model, which is identical on all ranks, for the ranks of a mesh.

    Raises:
        UserError: The attention heads cannot be split evenly between the ranks.
    """
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if strategy == "fsdp":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device(mesh.device_type))
    if strategy == "fsdp2":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    return _split_layers(model, mesh)


def _split_layers(model: GPT, mesh: DeviceMesh) -> GPT:
    """Split attention by heads, MLPs by features, and embeddings and head (Megatron-LM, Shoeybi et al. 2019)."""
    plan: dict[str, ParallelStyle] = {
        "token": RowwiseParallel(input_layouts=Replicate()),
        "position": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        heads = block.qkv.out_features // (3 * block.head_width)
        if heads % mesh.size():
            raise UserError(f"{heads} attention heads cannot be split evenly between {mesh.size()} processes")
        for name, style in {
            "qkv": ColwiseParallel(),
            "projection": RowwiseParallel(),
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(),
        }.items():
            plan[f"blocks.{index}.{name}"] = style
    parallelize_module(model, mesh, plan)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            distribute_module(module, mesh, input_fn=_replicated, output_fn=_local)
    return model


def _replicated(module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
    return tuple(DTensor.from_local(value, mesh, [Replicate()], run_check=False) for value in inputs)


def _local(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    return output.to_local()


def clip_grad_norm_(model: nn.Module, max_norm: float) -> None:
    """Clip gradients with torch's method for a split model."""
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(max_norm)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def weights(model: nn.Module) -> dict[str, Any]:
    """Return the full weights by their unsplit names, on every rank."""
    return get_model_state_dict(model, options=_WHOLE)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's full state, on every rank."""
    return get_optimizer_state_dict(model, optimizer, options=_WHOLE)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, whole: dict[str, Any], state: dict[str, Any]) -> None:
    """Load results of `weights` and `optimizer_state`."""
    # These calls replace full tensors with this rank's parts.
    set_model_state_dict(model, dict(whole), options=_WHOLE)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=_WHOLE)
