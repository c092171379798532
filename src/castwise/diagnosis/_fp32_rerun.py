"""Rerun an op in fp32 to see whether its low precision was the cause."""

from __future__ import annotations

from typing import Any

import torch

from castwise._full_fp32 import full_fp32
from castwise._torch_private import tree_map
from castwise.diagnosis._op_facts import is_random, tensors_of, written_and_read
from castwise.diagnosis._ranges import Range, range_of

_NARROW = (torch.float16, torch.bfloat16)


def involves_low_precision(func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> bool:
    """Return True if an input or output of an op is fp16 or bf16."""
    return any(tensor.dtype in _NARROW for tensor in [*tensors_of([args, kwargs]), *outputs])


def ranges_in_float32(func: Any, args: Any, kwargs: Any) -> tuple[Range, ...] | None:
    """Rerun an op on arguments cast to fp32. Return None if that fails or the op is random."""
    written, read = written_and_read(func, args, kwargs)
    if is_random(func) or (written and func is not torch.ops.aten.copy_.default):
        return None
    try:
        with torch.no_grad(), full_fp32():
            again = read[0].float() if written else func(*tree_map(_widened, args), **tree_map(_widened, kwargs))
    except (RuntimeError, TypeError):  # out of memory, or an op without an fp32 version
        return None
    return tuple(found for tensor in tensors_of(again) if (found := range_of(tensor)) is not None)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _NARROW else value
    return torch.float32 if isinstance(value, torch.dtype) and value in _NARROW else value
