"""Which parameters become 16-bit, and how a model is converted.

By default these are the parameters that autocast casts anyway: those of linear and convolution layers that no other
module shares. A run under autocast then gives the same results, bit for bit, as with fp32 weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from castwise._live_objects import instances_of
from castwise._patches import OPS, parts_of
from castwise._torch_private import convert_tensors, is_fsdp_flattened
from castwise._warnings import warn
from castwise.policy._bound_policy import BoundPolicy
from castwise.policy._module_rules import decide
from castwise.policy._policy import Policy
from castwise.policy._ruled_forward import note_dtypes


class Rules(NamedTuple):
    """What a copied `MasterWeights` keeps of a bound policy, which belongs to the first model."""

    policy: Policy


def without_model(narrow: object) -> object:
    """Return a `narrow` argument for a copy of the model."""
    return Rules(narrow.policy) if isinstance(narrow, BoundPolicy) else narrow


def choose(model: nn.Module, narrow: object, dtype: torch.dtype, params: Iterable[torch.Tensor]) -> set[torch.Tensor]:
    """Return the parameters of an optimizer that should become 16-bit.

    Args:
        model: The model that owns the parameters.
        narrow: None, "all", or a bound policy.
        dtype: bfloat16 or float16.
        params: The parameters of the optimizer.

    Raises:
        TypeError: `narrow` is something else.

    Warns:
        UserWarning: With "all", some parameters are complex or fp64 and cannot become 16-bit.
    """
    of_optimizer = set(params)
    if narrow == "all":
        strange = [param for param in of_optimizer if param.dtype not in (torch.float32, torch.float16, torch.bfloat16)]
        if strange:
            names = names_of(model)
            listed = ", ".join(sorted({f"{names.get(param, 'a parameter')} ({param.dtype})" for param in strange}))
            warn(f"MasterWeights leaves these parameters unchanged: {listed}", UserWarning)
        return of_optimizer.difference(strange)
    if isinstance(narrow, (BoundPolicy, Rules)):
        wanted = str(dtype).removeprefix("torch.")
        computes = {decision.module: decision.compute == wanted for decision in decide(narrow.policy, model)}
    elif narrow is None:
        computes = dict.fromkeys(model.modules(), True)
    else:
        raise TypeError(f'narrow must be None, "all" or a bound policy (Policy.bind(model)), got {narrow!r}')
    chosen: set[torch.Tensor] = set()
    others: set[torch.Tensor] = set()
    for module in model.modules():
        is_cast = computes.get(module, False) and _casts_its_weights(module)
        for name, param in module.named_parameters(recurse=False):
            (chosen if is_cast and name in ("weight", "bias") else others).add(param)
    is_fp32 = {param for param in chosen if param.dtype is torch.float32}
    return (is_fp32 - others) & of_optimizer


def _casts_its_weights(module: nn.Module) -> bool:
    """Return True for a layer that passes its weights only to its op; a custom forward may do more."""
    kind = next((kind for kind in OPS if isinstance(module, kind)), None)
    forward = vars(module).get("forward")
    return (
        kind is not None
        and all(getattr(type(module), part.name) is part.code for part in parts_of(kind) if part.owner is kind)
        and (forward is None or type(forward).__module__.startswith("castwise."))
    )


def names_of(model: nn.Module) -> dict[torch.Tensor, str]:
    """Return the name of each parameter of a model."""
    return {param: name for name, param in model.named_parameters()}


def owner_of(params: set[torch.Tensor], others: set[torch.Tensor]) -> nn.Module | None:
    """Search memory for the module that has some parameters; None if there is none.

    Args:
        params: Parameters that the module must have.
        others: Of several such modules, one with most of these is returned, and of those the smallest.
    """
    best, best_key = None, (0, 0)
    for module in instances_of(nn.Module):
        own = set(module.parameters()) if params else set[torch.Tensor]()
        key = len(own & others), -len(own)
        if params and params <= own and (best is None or key > best_key):
            best, best_key = module, key
    return best


def narrow_(model: nn.Module, chosen: set[torch.Tensor], dtype: torch.dtype) -> None:
    """Make parameters 16-bit in place, as `nn.Module.to` does, so that they stay the same objects."""
    chosen = {param for param in chosen if param.dtype is not dtype}
    if not chosen:
        return
    grads = {id(param.grad) for param in chosen if param.grad is not None}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor in chosen or id(tensor) in grads else tensor

    convert_tensors(model, convert)
    note_dtypes(model)
    for param in chosen:  # parameters outside the model, such as a loss function's
        if param.dtype is not dtype:
            param.data = param.data.to(dtype)


def check_is_possible(model: nn.Module, chosen: set[torch.Tensor], dtype: torch.dtype) -> None:
    """Raise a ValueError if a wrapper of the model keeps parameters from becoming 16-bit.

    Args:
        model: The model, wrapped or not.
        chosen: The parameters that should be 16-bit, including those that already are.
        dtype: The 16-bit dtype.
    """
    names = names_of(model)
    new = {param for param in chosen if param.dtype is not dtype}
    if new and torch.distributed.is_available() and torch.distributed.is_initialized():
        for wrapper in instances_of(nn.parallel.DistributedDataParallel):
            for wrapped in filter(new.__contains__, wrapper.parameters()):
                raise ValueError(
                    f"{names.get(wrapped)!r} is in DistributedDataParallel, whose buckets are for fp32 "
                    "gradients: create MasterWeights, or call MasterWeights.narrow_(model), before wrapping the model"
                )
    for param in new:
        if is_fsdp_flattened(param):
            raise ValueError(
                f"{names.get(param)!r} is flattened by FSDP1 in {param.dtype}: make the model {dtype} before wrapping "
                "it, or use FSDP2 (fully_shard)"
            )
    if not new:
        return
    for unit, params in _fsdp_units(model).items():
        dtypes = {param: dtype if param in chosen else param.dtype for param in params}
        if len(set(dtypes.values())) > 1:
            kept = ", ".join(repr(names[param]) for param, its in dtypes.items() if its is not dtype)
            raise ValueError(
                f"FSDP2 gathers the weights of {repr(unit) if unit else 'the model'} in one dtype, and {kept} would "
                f'stay in fp32 beside {dtype} ones: put these in a separate unit (fully_shard), or use narrow="all"'
            )


def _fsdp_units(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Return the parameters that each FSDP2 unit gathers, by unit name."""
    if not torch.distributed.is_available():
        return {}
    from torch.distributed.fsdp import FSDPModule

    units: dict[str, list[torch.Tensor]] = {}
    unit_of = {"": ""}
    for name, module in model.named_modules():
        unit_of[name] = name if isinstance(module, FSDPModule) else unit_of[name.rpartition(".")[0]]
        if isinstance(model.get_submodule(unit_of[name]), FSDPModule):
            units.setdefault(unit_of[name], []).extend(param for _, param in module.named_parameters(recurse=False))
    return units
