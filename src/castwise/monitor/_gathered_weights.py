"""Gather the weights of a model that is split over ranks, and run it without collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from castwise._registered_hooks import hooks_of, without
from castwise._torch_private import fsdp_mixed_precision, is_fsdp_flattened, parameters_in
from castwise.monitor._local_shards import fully_sharded, is_dtensor, is_partial, is_split_over_ranks
from castwise.policy._casting import cast_floats

_FSDP, _TENSOR_PARALLEL = "torch.distributed.fsdp", "torch.distributed.tensor"
_TRANSFORMERS = "transformers.distributed"  # replaces the forwards of modules instead


def can_be_replayed(model: nn.Module) -> bool:
    """Return True if each rank can replay a batch of the model, alone or with the weights of all ranks gathered.

    A replay may raise in the forward, which leaves hooks of FSDP half done, also on a single rank.
    """
    is_of_fsdp = bool(fully_sharded(model)) or any(map(is_fsdp_flattened, model.parameters()))
    return can_be_gathered(model) or not (is_of_fsdp or is_split_over_ranks(model))


def can_be_gathered(model: nn.Module) -> bool:
    """Return True if a model is split over ranks, maybe a single one, by `fully_shard`, `parallelize_module` or both.

    Not with FSDP1 or SyncBatchNorm, nor with split buffers, nor where `register_fsdp_forward_method` has wrapped other
    methods than `forward`.
    """
    units, params = fully_sharded(model), list(model.parameters())
    return (
        (bool(units) or any(map(is_dtensor, params)))
        and not any(is_partial(param) or is_fsdp_flattened(param) for param in params)
        and not any(map(is_dtensor, model.buffers()))
        and not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        and not any(_is_wrapped_by_fsdp(value) for unit in units for value in vars(unit).values())
    )


def _is_wrapped_by_fsdp(value: Any) -> bool:
    function = getattr(value, "__func__", None)  # whose `__module__` is that of the method inside
    return str(getattr(function, "__globals__", {}).get("__name__", "")).startswith(_FSDP)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Give the modules all of their weights within the context, in which a forward runs without collectives.

    All ranks enter it at once, and may leave it at different times. Gradients of the weights belong to tensors that the
    modules have only within the context.
    """
    units = fully_sharded(model)
    split = [unit for unit in units if any(is_dtensor(param) for param in _own_parameters(unit))]
    try:
        for unit in split:
            unit.unshard()
        with ExitStack() as stack:
            for unit in units:
                stack.enter_context(_casting_without_its_hooks(unit))
            # Also after `fully_shard` has gathered its part of them: the parts of tensor parallelism are left.
            stack.enter_context(_without_tensor_parallelism(model))
            yield
    finally:
        for unit in split:
            unit.reshard()


def _own_parameters(unit: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters of a module that belong to no unit inside it."""
    inner = {id(param) for other in fully_sharded(unit) if other is not unit for param in other.parameters()}
    return (param for param in unit.parameters() if id(param) not in inner)


@contextmanager
def _without_tensor_parallelism(model: nn.Module) -> Iterator[None]:
    """Give the modules plain tensors instead of DTensors, and take off what splits inputs and sums outputs."""
    split: list[Any] = [param for param in model.parameters() if is_dtensor(param)]
    if not split:
        yield
        return
    with torch.no_grad():
        whole = {id(param): nn.Parameter(param.full_tensor(), param.requires_grad) for param in split}
    for param in split:
        vars(whole[id(param)]).update(vars(param))  # a model may have attributes there
    tables = [(table, dict(table)) for table in map(parameters_in, model.modules())]
    replaced = [module for module in model.modules() if _is_of(_TRANSFORMERS, vars(module).get("forward"))]
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(_without_hooks(module, _TENSOR_PARALLEL))
        forwards = [(module, vars(module).pop("forward")) for module in replaced]
        try:
            for table, before in tables:
                table.update((name, whole[id(param)]) for name, param in before.items() if id(param) in whole)
            yield
        finally:
            for table, before in tables:
                table.update(before)
            for module, forward in forwards:
                module.forward = forward


@contextmanager
def _casting_without_its_hooks(unit: nn.Module) -> Iterator[None]:
    """Take off the hooks with which FSDP2 gathers weights and reduces gradients, and cast as they do."""
    policy, handles = fsdp_mixed_precision(unit), []
    with _without_hooks(unit, _FSDP):
        kind = next((param.device.type for param in unit.parameters()), "cpu")
        if policy is not None and policy.param_dtype is not None and policy.cast_forward_inputs:
            handles.append(
                unit.register_forward_pre_hook(
                    lambda _, args, kwargs: (
                        cast_floats(args, kind, policy.param_dtype),
                        cast_floats(kwargs, kind, policy.param_dtype),
                    ),
                    with_kwargs=True,
                )
            )
        if policy is not None and policy.output_dtype is not None:
            handles.append(unit.register_forward_hook(lambda _, args, out: cast_floats(out, kind, policy.output_dtype)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _without_hooks(module: nn.Module, package: str) -> AbstractContextManager[None]:
    """Take off the hooks around a module's forward that are functions of a package."""
    tables: list[Any] = [hooks_of(on) for on in (module.register_forward_pre_hook, module.register_forward_hook)]
    return without(tables, partial(_is_of, package))


def _is_of(package: str, function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith(package)
