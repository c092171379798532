"""Clipping by parameters, as torch's functions do it, for parameters that a `MasterWeights` steps.

Frameworks and scripts clip `model.parameters()`, without an optimizer. These functions find the optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from castwise._torch_private import is_fsdp_flattened
from castwise.master_weights._clipping import Clip, grads_of, multiply_, norm_and_factor
from castwise.master_weights._master_weights import MasterWeights, owner_of

_Params = torch.Tensor | Iterable[torch.Tensor]


def listed(parameters: _Params) -> list[torch.Tensor]:
    """Return the argument of a clipping function as a list."""
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def clip_grad_norm_(
    parameters: list[torch.Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor | None:
    """Clip gradients by their total norm, as `torch.nn.utils.clip_grad_norm_` does for fp32 weights.

    Gradients of parameters that a `MasterWeights` steps are clipped in its next step, the others now.

    Args:
        parameters: The parameters, which may be those of several optimizers or some of those of one.
        max_norm: The largest allowed norm.
        norm_type: p of the p-norm.
        error_if_nonfinite: Raise if the norm is not finite. Syncs.

    Returns:
        The norm, as a DTensor if all gradients are, as torch's function returns it. None if no `MasterWeights` steps
        any of the parameters, or if FSDP1 has flattened them; nothing has been clipped then.

    Raises:
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set, or a backward has added to gradients after
            a method of the optimizer has clipped them.
    """
    stepped_by = _owners(parameters)
    if not stepped_by:
        return None
    clips = {owner: owner._clips() for owner in {*stepped_by.values()}}
    pairs = [(param, param.grad) for param in parameters if param.grad is not None]
    with torch.no_grad():
        norm, factor = norm_and_factor(
            *(pairs, float(max_norm), float(norm_type), error_if_nonfinite),
            lambda param, grad: (
                (owner := stepped_by[param])._fp32_grad(param, grad, clips[owner]) if param in stepped_by else None
            ),
        )
        _clip(parameters, stepped_by, factor=factor)
        multiply_(grads_of(param for param in parameters if param not in stepped_by), factor)
    return on_mesh_of(norm, [grad for _, grad in pairs])


def is_in_step(parameters: list[torch.Tensor]) -> bool:
    """Return True if a `MasterWeights` would clip gradients of some of the parameters in its step."""
    return bool(_owners(parameters))


def on_mesh_of(norm: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of gradients as torch's function does: as a DTensor if all of them are, of one mesh."""
    meshes: list[Any] = [getattr(grad, "device_mesh", None) for grad in grads]
    if not meshes or None in meshes or any(mesh != meshes[0] for mesh in meshes):
        return norm
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(norm, meshes[0], [Replicate()] * meshes[0].ndim, run_check=False)


def clip_grad_value_(parameters: list[torch.Tensor], clip_value: float) -> bool:
    """Clip each element of gradients, as `torch.nn.utils.clip_grad_value_` does for fp32 weights.

    Args:
        parameters: As in `clip_grad_norm_`.
        clip_value: The largest allowed magnitude.

    Returns:
        False if no `MasterWeights` steps any of the parameters; nothing has been clipped then.
    """
    stepped_by = _owners(parameters)
    if not stepped_by:
        return False
    _clip(parameters, stepped_by, bound=float(clip_value))
    others = [param for param in parameters if param not in stepped_by]
    if grads_of(others):
        torch.nn.utils.clip_grad.clip_grad_value_(others, clip_value)
    return True


def _owners(parameters: list[torch.Tensor]) -> dict[torch.Tensor, MasterWeights]:
    """Return the `MasterWeights` that steps each parameter with a gradient; empty if none can clip."""
    owners = {owner for param in parameters if isinstance(owner := owner_of(param), MasterWeights)}
    of_param = {param: owner for owner in owners for group in owner.param_groups for param in group["params"]}
    stepped_by = {param: of_param[param] for param in parameters if param.grad is not None and param in of_param}
    return {} if any(map(is_fsdp_flattened, stepped_by)) else stepped_by


def _clip(
    parameters: list[torch.Tensor],
    stepped_by: dict[torch.Tensor, MasterWeights],
    factor: torch.Tensor | None = None,
    bound: float = 0.0,
) -> None:
    for owner in dict.fromkeys(stepped_by.values()):
        own = frozenset(param for param in parameters if stepped_by.get(param) is owner)
        with_grads = {param for group in owner.param_groups for param in group["params"] if param.grad is not None}
        owner._add_clip(Clip(factor, bound, None if own == with_grads else own), is_by_parameters=True)
