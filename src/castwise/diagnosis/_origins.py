"""`Origins`: trace where the non-finite values in a replay come from.

A dispatch mode checks the results of every op. An op that returns a NaN or an infinity without having received one is
a *birth*. Each piece of memory with non-finite values maps to the births they came from, so a NaN in the loss can be
traced to its birth. Models are full of births that reach nothing: -inf in masks, the logarithm of a zero that is
masked afterwards, uninitialised memory.

NaNs and infinities are traced separately: a NaN in attention scores did not come from the -inf of the mask added to
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from castwise._mistakes.mistake import Place, line_of_model
from castwise._torch_private import (
    TorchDispatchMode,
    graph_node_running,
    graph_nodes_made,
    is_backward_running,
)
from castwise.diagnosis import _op_facts as op_facts
from castwise.diagnosis._fp32_rerun import involves_low_precision, ranges_in_float32
from castwise.diagnosis._ranges import Range, has_only_minus_inf, is_all_of_its_memory, memory_of, range_of
from castwise.diagnosis._replay import refuse_collective
from castwise.tracing._module_of_op import ModuleOfOp
from castwise.tracing._op_by_op import call_op

Phase = Literal["", "weight", "input", "forward", "loss", "backward"]
Kind = Literal["weight", "input", "op", "constant", "outside", "uninitialised"]


@dataclass(frozen=True, eq=False)
class Birth:
    """The point where non-finite values entered a replay.

    Args:
        kind: "weight" or "input" if the tensor was non-finite before the replay; "constant" for an infinity or NaN
            that the code asks for; "outside" for a tensor that no op of the replay made; "uninitialised" for memory
            that was never written; "op" for any other op.
        order: Sequence number of the op.
        phase: Phase of the replay.
        module: Qualified name of the innermost module; None outside the model.
        op: Name as in `op_facts.name_of`; for "outside", the op that reads the tensor.
        inputs: Ranges of the op's floating-point inputs, before it ran.
        outputs: Ranges of its floating-point results.
        in_float32: Ranges of the results in fp32, if the op ran in low precision and can be rerun.
        name: Name of the weight or input.
        tensor: The weight or input.
        is_mask: Whether all non-finite values are -inf and the code or the caller put them there.
        place: The line of the model's or the loss's code that called the op, or in a backward the op whose gradient it
            computes; None if it is not known.
        gradient_of: Name of the op of the forward whose gradient a backward computes; "" outside a backward.
    """

    kind: Kind
    order: int
    phase: Phase
    module: str | None = None
    op: str = ""
    inputs: tuple[Range, ...] = ()
    outputs: tuple[Range, ...] = ()
    in_float32: tuple[Range, ...] | None = None
    name: str = ""
    tensor: torch.Tensor | None = None
    is_mask: bool = False
    place: Place | None = None
    gradient_of: str = ""

    def without_mask(self) -> Birth:
        """Return this birth with `is_mask` False."""
        return replace(self, is_mask=False) if self.is_mask else self

    @property
    def is_finite_in_float32(self) -> bool:
        """Whether the op's result is known to be finite in fp32."""
        return self.in_float32 is not None and not any(found.nonfinite for found in self.in_float32)

    @property
    def is_weak(self) -> bool:
        """Whether to blame this birth only if there is no other."""
        return self.is_mask or self.kind == "uninitialised"


_Births = frozenset[Birth]


class _Origin(NamedTuple):
    """The births of a tensor's NaNs and of its infinities."""

    nan: _Births = frozenset()
    inf: _Births = frozenset()


class _Measured(NamedTuple):
    """A tensor and its range."""

    tensor: torch.Tensor
    range: Range


class _ForwardOp(NamedTuple):
    """An op that has made an autograd node."""

    name: str
    place: Place | None


class Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Traces non-finite values through the ops of a replay.

    Args:
        module_of_op: Tracks the module that each op belongs to.
        before_write: Called with the tensors that an op is about to write to.
    """

    supports_higher_order_operators = True

    def __init__(self, module_of_op: ModuleOfOp, before_write: Callable[[list[torch.Tensor]], None]) -> None:
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]  # torch's
        self.phase: Phase = "forward"
        self.has_collectives = False
        self._module_of_op, self._before_write = module_of_op, before_write
        self._order = 0
        self._origins: dict[int, _Origin] = {}  # by address of the memory
        self._unwritten: dict[int, Birth] = {}
        self._born: list[Birth] = []  # births of ops in the forward
        self._by_node: dict[int, _ForwardOp] = {}  # by the number of the autograd node
        self._nodes = graph_nodes_made()

    def expect(self, kind: Kind, name: str, module: str | None, tensor: torch.Tensor) -> None:
        """Record a weight or input of the replay if it is not finite. Of several, the first gets the blame."""
        self._order += 1
        found = range_of(tensor)
        if found is not None and found.nonfinite and (memory := memory_of(tensor)) is not None:
            birth = Birth(
                kind=kind,
                order=self._order,
                phase="weight" if kind == "weight" else "input",
                module=module,
                outputs=(found,),
                name=name,
                tensor=tensor,
                is_mask=has_only_minus_inf(tensor),
            )
            before, new = self._origins.get(memory, _Origin()), {birth}
            self._origins[memory] = _Origin(before.nan | new, before.inf | new)

    def blamed(self, tensors: Iterable[torch.Tensor]) -> Birth | None:
        """Return the first birth whose values reached any of these tensors."""
        reached = self._reached(tensors)
        strong = [birth for birth in reached if not birth.is_weak]
        return min(strong or reached, key=lambda birth: birth.order, default=None)

    def others(self, tensors: Iterable[torch.Tensor], blamed: Birth | None) -> list[Birth]:
        """Return the other births in the forward, one per module and op.

        An op that received infinities and whose values reached `tensors` is left out, because its result is a
        consequence.

        Args:
            tensors: The non-finite tensors; empty if there is no fault.
            blamed: The birth to blame for them, which is left out.
        """
        reached = self._reached(tensors)
        births = {
            (birth.module, birth.op): birth
            for birth in reversed(self._born)
            if birth not in reached or not any(found.inf for found in birth.inputs)
        }
        if blamed is not None:
            births.pop((blamed.module, blamed.op), None)
        return sorted(births.values(), key=lambda birth: birth.order)

    def _reached(self, tensors: Iterable[torch.Tensor]) -> _Births:
        """Return the births whose values are in these tensors."""
        reached: _Births = frozenset()
        for tensor in tensors:
            found = range_of(tensor)
            origin = self._origin_of(tensor)
            if found is not None:
                reached |= origin.nan if found.nan else frozenset()
                reached |= origin.inf if found.inf else frozenset()
        return reached

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._order += 1
        self._note_node(func)
        refuse_collective(func, types)
        self.has_collectives = self.has_collectives or op_facts.is_collective(func)
        written, read = op_facts.written_and_read(func, args, kwargs)
        if written:
            self._before_write(written)
        changed = _measured([tensor for tensor in read if op_facts.is_one_of(tensor, written)])
        result = call_op(func, args, kwargs)
        outputs = op_facts.tensors_of([result, written])
        if op_facts.leaves_memory_unwritten(func):
            self._note_unwritten(func, outputs)
        elif op_facts.takes_a_literal(func):
            self._note_literal(func, outputs)
        elif not op_facts.returns_a_view(func):
            after = _measured(outputs)
            for tensor, found in after:
                if not found.nonfinite:
                    self._forget(tensor)
            if any(found.nonfinite for _, found in after):
                unchanged = [tensor for tensor in read if not op_facts.is_one_of(tensor, written)]
                self._note(after, self._origin(func, args, kwargs, changed + _measured(unchanged), after))
        return result

    def _origin(self, func: Any, args: Any, kwargs: Any, given: list[_Measured], after: list[_Measured]) -> _Origin:
        """Return the births of the non-finite values in an op's results."""
        nan, inf = self._sources(func, args, given)
        has_nan, has_inf = any(found.nan for _, found in given), any(found.inf for _, found in given)
        unmasked = frozenset(source for source in inf if not source.is_mask)
        if has_nan:
            nan_from, is_nan_born = nan, False
        elif has_inf and not op_facts.is_softmax(func):  # inf - inf: a consequence of the infinities
            nan_from, is_nan_born = inf, False
        else:  # softmax absorbs a mask, unless the whole row is masked
            nan_from, is_nan_born = unmasked, True
        if not has_inf:
            inf_from, is_inf_born = nan, True
        elif op_facts.is_of_attention(func):
            inf_from, is_inf_born = unmasked, True
        else:
            inf_from, is_inf_born = inf, False
        if is_nan_born and any(found.nan for _, found in after):
            nan_from |= {self._birth(func, args, kwargs, given, after, op_facts.asks_for(args, kwargs, nan=True))}
        if is_inf_born and any(found.inf for _, found in after):
            inf_from |= {self._birth(func, args, kwargs, given, after, op_facts.asks_for(args, kwargs, nan=False))}
        return _Origin(nan_from, inf_from)

    def _sources(self, func: Any, args: Any, given: list[_Measured]) -> _Origin:
        """Return the births of the non-finite values in an op's inputs."""
        nan: _Births = frozenset()
        inf: _Births = frozenset()
        for tensor, found in given:
            if not found.nonfinite:
                continue
            origin = self._origin_of(tensor)
            if (found.nan and not origin.nan) or (found.inf and not origin.inf):
                new = frozenset([self._unseen(func, tensor, found)])
                origin = _Origin(origin.nan or new, origin.inf or new)
                self._note([_Measured(tensor, found)], origin)
            nan |= origin.nan if found.nan else frozenset()
            if found.inf:
                is_factor = op_facts.is_factor(tensor, func, args)
                inf |= {source.without_mask() if is_factor else source for source in origin.inf}
        return _Origin(nan, inf)

    def _unseen(self, func: Any, tensor: torch.Tensor, found: Range) -> Birth:
        """Return a birth for non-finite values that no traced op made."""
        memory = memory_of(tensor)
        if memory in self._unwritten:
            return self._unwritten[memory]
        place, is_mask = line_of_model(__file__), has_only_minus_inf(tensor)
        return Birth("outside", *self._place(func), inputs=(found,), is_mask=is_mask, place=place)

    def _birth(
        self, func: Any, args: Any, kwargs: Any, given: list[_Measured], after: list[_Measured], is_constant: bool
    ) -> Birth:
        outputs = [tensor for tensor, _ in after]
        is_narrow = not is_constant and involves_low_precision(func, args, kwargs, outputs)
        is_like_a_mask = all(map(has_only_minus_inf, outputs))
        forward_op = self._forward_op()
        birth = Birth(
            "constant" if is_constant else "op",
            *self._place(func),
            inputs=tuple(found for _, found in given),
            outputs=tuple(found for _, found in after),
            in_float32=ranges_in_float32(func, args, kwargs) if is_narrow else None,
            is_mask=is_constant and is_like_a_mask,
            place=line_of_model(__file__) or forward_op.place,
            gradient_of=forward_op.name,
        )
        # The logarithm of a zero is intended, an overflow in low precision is not.
        is_meant = is_constant or (is_like_a_mask and not birth.is_finite_in_float32)
        if birth.phase in {"forward", "loss"} and not is_meant:
            self._born.append(birth)
        return birth

    def _note_node(self, func: Any) -> None:
        """Record the op and its line for the node that autograd has made just before it runs the op."""
        nodes = graph_nodes_made()
        if nodes != self._nodes and not is_backward_running():
            self._by_node[nodes - 1] = _ForwardOp(op_facts.name_of(func), line_of_model(__file__))
        self._nodes = nodes

    def _forward_op(self) -> _ForwardOp:
        """Return the op whose gradient is being computed."""
        node = graph_node_running()
        known = None if node is None else self._by_node.get(node)
        return known or _ForwardOp("", None)

    def _place(self, func: Any) -> tuple[int, Phase, str | None, str]:
        phase = "forward" if self._module_of_op.is_forward_running() else self.phase
        return self._order, phase, self._module_of_op.name(), op_facts.name_of(func)

    def _note_unwritten(self, func: Any, outputs: list[torch.Tensor]) -> None:
        for tensor in outputs:
            memory = memory_of(tensor)
            if memory is not None:
                self._origins.pop(memory, None)
                self._unwritten[memory] = Birth("uninitialised", *self._place(func))

    def _note_literal(self, func: Any, outputs: list[torch.Tensor]) -> None:
        for tensor, found in _measured(outputs):
            if found.nonfinite:
                place, line, is_mask = self._place(func), line_of_model(__file__), has_only_minus_inf(tensor)
                birth = frozenset([Birth("constant", *place, outputs=(found,), is_mask=is_mask, place=line)])
                self._note([_Measured(tensor, found)], _Origin(birth, birth))

    def _note(self, after: list[_Measured], origin: _Origin) -> None:
        """Record the births of non-finite tensors. Births of a partly overwritten piece of memory are kept."""
        for tensor, found in after:
            memory = memory_of(tensor)
            if found.nonfinite and memory is not None:
                self._forget(tensor)
                before = self._origin_of(tensor)
                self._origins[memory] = _Origin(
                    before.nan | origin.nan if found.nan else before.nan,
                    before.inf | origin.inf if found.inf else before.inf,
                )

    def _forget(self, tensor: torch.Tensor) -> None:
        """Forget the births in a tensor's memory if the tensor covers all of it."""
        memory = memory_of(tensor)
        if memory is not None and is_all_of_its_memory(tensor):
            self._origins.pop(memory, None)
            self._unwritten.pop(memory, None)

    def _origin_of(self, tensor: torch.Tensor) -> _Origin:
        memory = memory_of(tensor)
        return _Origin() if memory is None else self._origins.get(memory, _Origin())


def _measured(tensors: list[torch.Tensor]) -> list[_Measured]:
    return [_Measured(tensor, found) for tensor in tensors if (found := range_of(tensor)) is not None]
