"""The table that `Policy.explain` prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from castwise._recipes.recipe import RECIPES, labelled
from castwise._shown import ShownText, Table
from castwise.policy import _fsdp_units as fsdp_units
from castwise.policy import _op_rules as op_rules
from castwise.policy._module_rules import Decision, decide

if TYPE_CHECKING:
    from castwise.policy._policy import Policy


def table(policy: Policy, model: nn.Module, units: Iterable[Any] | None) -> ShownText:
    """Return a table of the effective dtypes of a model's modules, followed by those of ops and outputs."""
    decisions = decide(policy, model)
    op_rules.rules_of(policy)
    header = ["module", "type", "parameters", "computes in", "decided by"]
    rows = [
        [
            decision.name or "(root)",
            type(decision.module).__name__,
            f"{sum(param.numel() for param in decision.module.parameters(recurse=False)):,}",
            _computes_in(policy, decision),
            _reason(decision),
        ]
        for decision in decisions
    ]
    if units is not None:
        header.insert(4, "gathered in")
        gathered = fsdp_units.gathered(policy, decisions, units)
        for row, decision in zip(rows, decisions, strict=True):
            row.insert(4, gathered[decision.name])
    lines = []
    if policy.ops:
        lines.append("ops: " + ", ".join(f"{op} in {dtype}" for op, dtype in policy.ops.items()))
    if policy.in_place == "cast":
        lines.append("in-place writes: the source is cast to the destination's dtype")
    if policy.output is not None:
        lines.append(f"outputs: {policy.output}")
    return ShownText.of(Table([header, *rows], right={2}), *lines, between="\n")


def _computes_in(policy: Policy, decision: Decision) -> str:
    if decision.recipe:
        return labelled(RECIPES[decision.recipe], policy.backend, decision.device_of_weight)
    return decision.compute + (" (autocast off)" if decision.value == "exclude" else "")


def _reason(decision: Decision) -> str:
    if decision.without_recipe is not None:
        reason = _reason(decision._replace(without_recipe=None))
        return f"{reason}; {decision.without_recipe}"
    if decision.key is None:
        return "compute"
    key = decision.key or "(root)"
    return key if decision.around is None else f"{key} (of {decision.around or '(root)'})"
