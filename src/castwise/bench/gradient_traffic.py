"""How much of the gradients' memory a step touches before its optimizer runs: counted, so the same on every machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from castwise._torch_private import TorchDispatchMode, schema_of


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts the bytes of gradients that ops read and write, and the bytes that they allocate.

    An op that writes to a gradient is taken to read it as well, which holds for all that are used here. Fused
    optimizers do nothing in here; of others `step` has to be replaced for the while.

    Args:
        gradients: Whose bytes count.

    Attributes:
        read: Bytes.
        written: Bytes.
        allocated: Bytes of results that are neither gradients nor any argument.
    """

    def __init__(self, gradients: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._gradients = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        self.read = self.written = self.allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and count."""
        kwargs = kwargs or {}
        if func.overloadpacket.__name__.startswith("_fused_"):
            return None
        result = func(*args, **kwargs)
        schema = schema_of(func)
        if any(out.alias_info is not None and not out.alias_info.is_write for out in schema.returns):
            return result  # a view touches nothing
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
