"""What an op would have returned in fp32, for which its low precision was too narrow."""

from __future__ import annotations

from typing import Any

import torch

from castwise._torch_private import tree_map
from castwise.diagnosis.op_facts import is_random, tensors_of, written_and_read
from castwise.diagnosis.ranges import Range, range_of

_NARROW = (torch.float16, torch.bfloat16)


def involves_low_precision(func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> bool:
    """Return True if an op is given or returns values in fp16 or bf16."""
    return any(tensor.dtype in _NARROW for tensor in [*tensors_of([args, kwargs]), *outputs])


def ranges_in_float32(func: Any, args: Any, kwargs: Any) -> tuple[Range, ...] | None:
    """Compute an op again on arguments cast to fp32; None if it cannot be, or draws random numbers."""
    written, read = written_and_read(func, args, kwargs)
    if is_random(func) or (written and func is not torch.ops.aten.copy_.default):
        return None
    try:
        with torch.no_grad():
            again = read[0].float() if written else func(*tree_map(_widened, args), **tree_map(_widened, kwargs))
    except (RuntimeError, TypeError):  # out of memory, or an op that knows one precision only
        return None
    return tuple(found for tensor in tensors_of(again) if (found := range_of(tensor)) is not None)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _NARROW else value
    return torch.float32 if isinstance(value, torch.dtype) and value in _NARROW else value
