"""Find the parameters that a backward will reach."""

from __future__ import annotations

from typing import Any

import torch


def leaves_of(output: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors whose `.grad` a backward from an output will add to."""
    leaves: dict[int, torch.Tensor] = {}
    waiting: list[Any] = [output.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of nodes that accumulate gradients
        if isinstance(variable, torch.Tensor):
            leaves[id(variable)] = variable
        waiting += [before for before, _ in node.next_functions]
    return list(leaves.values())
