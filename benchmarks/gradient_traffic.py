"""The gradient memory that a step touches before its optimizer runs: counted, so identical on every machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from castwise._torch_private import TorchDispatchMode, schema_of


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Count the bytes of gradients that ops read and write, and the bytes that ops allocate.

    An op that writes to a gradient counts as reading it too, which is true of all ops used here. Fused optimizers are
    skipped in this mode; for other optimizers, replace `step` while counting.

    Args:
        gradients: The gradients to count.

    Attributes:
        read: Bytes read.
        written: Bytes written.
        allocated: Bytes of results that are neither gradients nor arguments.
    """

    def __init__(self, gradients: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._gradients = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        self.read = self.written = self.allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and count its bytes."""
        kwargs = kwargs or {}
        if func.overloadpacket.__name__.startswith("_fused_"):
            return None
        result = func(*args, **kwargs)
        schema = schema_of(func)
        if any(out.alias_info is not None and not out.alias_info.is_write for out in schema.returns):
            return result  # a view accesses no memory
        touched: dict[tuple[int, int], bool] = {}
        for argument, value in zip(schema.arguments, args, strict=False):
            for tensor in _tensors(value):
                if _storage(tensor) in self._gradients:
                    touched[tensor.data_ptr(), tensor.nbytes] = argument.alias_info is not None
        self.read += sum(nbytes for _, nbytes in touched)
        self.written += sum(nbytes for (_, nbytes), is_written in touched.items() if is_written)
        known = self._gradients | {_storage(tensor) for value in args for tensor in _tensors(value)}
        self.allocated += sum(tensor.nbytes for tensor in _tensors(result) if _storage(tensor) not in known)
        return result


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]


def _storage(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else None
