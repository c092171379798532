"""The dtypes in which FSDP2 must gather the parameters of modules to agree with a policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from castwise.policy._module_rules import Decision, decide, matches, spelled
from castwise.policy._op_rules import canonical

# Modules whose weights autocast casts, and their ops. Other modules use weights in their own dtype.
_WEIGHTS_CAST = (
    nn.Linear,
    *(getattr(nn, f"Conv{way}{n}d") for way in ("", "Transpose") for n in (1, 2, 3)),
    nn.PReLU,
)
_OPS_WITH_WEIGHTS = {"linear", "prelu", *(f"conv{way}{n}d" for way in ("", "_transpose") for n in (1, 2, 3))}

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from castwise.policy._policy import Policy


def policies(
    policy: Policy, model: nn.Module, units: Iterable[Any], reduce_dtype: torch.dtype
) -> Iterator[tuple[nn.Module, MixedPrecisionPolicy]]:
    """Return an iterator over the modules to shard, inner ones first, each with its mixed-precision policy."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not isinstance(reduce_dtype, torch.dtype):
        raise TypeError(f"reduce_dtype must be a torch.dtype, got {reduce_dtype!r}")
    decisions = decide(policy, model)
    dtypes = _dtypes(policy, decisions, units)
    modules = {decision.name: decision.module for decision in decisions}
    return iter(
        [
            (
                modules[name],
                MixedPrecisionPolicy(
                    param_dtype=dtype,
                    reduce_dtype=reduce_dtype,
                    output_dtype=getattr(torch, policy.output) if name == "" and policy.output else None,
                    cast_forward_inputs=False,
                ),
            )
            for name, dtype in sorted(dtypes.items(), key=lambda item: -len(item[0].split(".")) if item[0] else 0)
        ]
    )


def gathered(policy: Policy, decisions: list[Decision], units: Iterable[Any]) -> dict[str, str]:
    """Return a text for each module name: the dtype and the unit in which its parameters are gathered."""
    dtypes, first = _dtypes(policy, decisions, units), _first_names(decisions)
    described = {}
    for decision in decisions:
        unit = _unit_of(first[id(decision.module)], dtypes)
        dtype = dtypes[unit]
        described[decision.name] = (
            f"{str(dtype).removeprefix('torch.') if dtype else 'own dtype'} with {unit or '(root)'}"
        )
    return described


def _dtypes(policy: Policy, decisions: list[Decision], units: Iterable[Any]) -> dict[str, torch.dtype | None]:
    """Return for each unit the low precision in which all its parameters are used; None if they differ or use fp32."""
    op_dtypes = {dtype for op, dtype in policy.ops.items() if canonical(op) in _OPS_WITH_WEIGHTS}
    if isinstance(units, str):
        raise TypeError(f"units must be a list of keys, as in [{units!r}]")
    named = [(decision.name, decision.module) for decision in decisions]
    first = _first_names(decisions)
    modules = dict(named)
    names = {first[id(modules[name])] for key in units for name in matches(spelled(key), named, "units")} | {""}
    used: dict[str, set[str]] = {name: set() for name in names}
    for decision in decisions:
        if next(decision.module.parameters(recurse=False), None) is not None:
            is_cast = isinstance(decision.module, _WEIGHTS_CAST) and not decision.recipe
            cast = {decision.compute, *op_dtypes} if is_cast else {"float32"}
            used[_unit_of(first[id(decision.module)], names)] |= cast
    return {
        name: getattr(torch, next(iter(dtypes))) if len(dtypes) == 1 and dtypes != {"float32"} else None
        for name, dtypes in used.items()
    }


def _first_names(decisions: list[Decision]) -> dict[int, str]:
    """Return the first name of each module, by its id: fully_shard accepts each module once."""
    return {id(decision.module): decision.name for decision in reversed(decisions)}


def _unit_of(name: str, units: Iterable[Any]) -> str:
    while name not in units:
        name = name.rpartition(".")[0]
    return name
