"""`checksums_of`: a number for the result of each op of a forward and a backward, to compare two machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from castwise._torch_private import TorchDispatchMode
from castwise.diagnosis import _op_facts as op_facts
from castwise.diagnosis._fault_search import Case, named_parameters, replaying, without_autocast
from castwise.diagnosis._ranges import stored
from castwise.diagnosis._replay import gradients_of
from castwise.tracing._module_of_op import ModuleOfOp
from castwise.tracing._op_by_op import call_op

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OpChecksum(NamedTuple):
    """The sum of the bits of an op's results, as integers."""

    where: str
    """The op and its module, such as "aten.mm in layers.0"."""
    total: int


def checksums_of(case: Case, scale: float) -> list[OpChecksum]:
    """Replay a case, and return a number for each op. All state is restored.

    Raises:
        Exception: Whatever the model raises.
    """
    with replaying(case) as (copies, module_of_op):
        ops = _Checksums(module_of_op, copies.before_write)
        with case.region(), ops:
            ends = case.ends(case.model(*case.args, **case.kwargs))
        roots = case.roots(ends, scale)
        trained = [param for _, _, param in named_parameters(case.model) if param.requires_grad]
        if roots and trained:
            module_of_op.begin_backward()
            with without_autocast(case.model, ends), ops:
                gradients_of(roots, trained)
    return ops.checksums


class _Checksums(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    supports_higher_order_operators = True

    def __init__(self, module_of_op: ModuleOfOp, before_write: Callable[[list[torch.Tensor]], None]) -> None:
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]  # torch's
        self._module_of_op, self._before_write = module_of_op, before_write
        self.checksums: list[OpChecksum] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written, _ = op_facts.written_and_read(func, args, kwargs)
        if written:
            self._before_write(written)
        result = call_op(func, args, kwargs)
        if not (op_facts.leaves_memory_unwritten(func) or op_facts.returns_a_view(func)):
            module = self._module_of_op.name()
            where = "the model" if module == "" else module or "the loss"
            total = sum(map(_checksum, op_facts.tensors_of([result, written])))
            self.checksums.append(OpChecksum(f"{op_facts.name_of(func)} in {where}", total % 2**63))
        return result


def _checksum(tensor: torch.Tensor) -> int:
    values = stored(tensor.detach())
    if values is None or not values.numel():
        return 0
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return int(values.contiguous().view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64))
