"""How a model is split between processes. Half a second to import, so only a run that splits one does."""

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
    """Give each rank of a mesh its part of a model that all of them have built alike.

    Raises:
        UserError: There are more ranks than attention heads to split between them, or they do not come out even.
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
    """Split attention by heads, MLPs by features and the rest as it comes (Shoeybi et al. 2019, "Megatron-LM")."""
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
    """Clip gradients as torch does it for such a model."""
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(max_norm)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def weights(model: nn.Module) -> dict[str, Any]:
    """All weights, whole, by the names they have when the model is not split; on every rank."""
    return get_model_state_dict(model, options=_WHOLE)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All of an optimizer's state, whole, on every rank."""
    return get_optimizer_state_dict(model, optimizer, options=_WHOLE)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, whole: dict[str, Any], state: dict[str, Any]) -> None:
    """Take over what `weights` and `optimizer_state` gave."""
    # They put parts instead of what is whole.
    set_model_state_dict(model, dict(whole), options=_WHOLE)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=_WHOLE)
