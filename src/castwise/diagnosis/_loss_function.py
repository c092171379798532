"""`LossFunction`: the loss code of a step as a function of the models' outputs, from the graph of the loss."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from castwise._torch_private import number_of_node, version
from castwise.diagnosis._loss_graph import LEAF, Edge, Overload, Values, is_freed, overloads_of, signed, takes_tensors

ModelEdge = tuple[int, int]
"""The number of a model's node, and the index of a tensor among its outputs."""

# Ops that pass on a constant that was added to their input, if what else they read is constant.
_LINEAR = {
    *("Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "Mul", "Div", "Where", "MaskedFill", "ToCopy", "Clone", "Alias"),
    *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Expand", "T", "Transpose", "Permute"),
    *("Select", "Slice", "Split", "SplitWithSizes", "Unbind", "Index", "Gather", "Cat", "Stack"),
}


class UnknownLossError(Exception):
    """The code of a loss cannot be repeated; the text says why."""


class _Result(NamedTuple):
    """An argument that is a result of an earlier call, or an output of a model."""

    source: int | ModelEdge
    output: int = 0


class _Call(NamedTuple):
    op: Any
    arguments: dict[str, Any]
    versions: list[tuple[torch.Tensor, int]]


class LossFunction:
    """The loss code as a function, of which the constants, such as targets, are kept without copies.

    Args:
        loss: The loss.
        edge: Its edge.
        nodes: The nodes of the loss code, frozen with their results, in the order in which they were made.
        saved: What each of them has saved.
        outputs: The models' outputs, as far as they are kept: what is added to them is found from the sum.

    Raises:
        UnknownLossError: An argument of an op is not known.
    """

    def __init__(
        self,
        loss: torch.Tensor,
        edge: ModelEdge,
        nodes: Sequence[Any],
        saved: Sequence[dict[str, Any]],
        outputs: Mapping[ModelEdge, torch.Tensor],
    ) -> None:
        self.loss, self._edge = loss, edge
        places = {node: place for place, node in enumerate(nodes)}
        self._calls: list[_Call] = []
        self._constant: torch.Tensor | None = None
        values: Values | None = None
        incomplete: dict[Any, str] = {}  # nodes whose results are without a constant, and the op that adds it
        for place, (node, of_node) in enumerate(zip(nodes, saved, strict=True)):
            call = _call(node, of_node, places)
            if call is None:
                values = values or _evaluated(loss, nodes, saved, outputs)
                call = _sum(node, of_node, places, values, loss if place + 1 == len(nodes) else values.on((node, 0)))
            if call is None:
                call, incomplete[node] = _without_constant(node, of_node, places), _name_of(node)
            adds = next((incomplete[source] for source, _ in node.next_functions if source in incomplete), None)
            if adds is not None:
                if not _passes_on_constants(node):
                    raise UnknownLossError(f"not all arguments of {adds} are known")
                incomplete[node] = adds
            self._calls.append(call)
        if incomplete:  # what is missing was in the loss, too
            with torch.no_grad():
                self._constant = loss - self._computed(outputs)

    @property
    def reads(self) -> set[ModelEdge]:
        """The outputs of models that it reads."""
        given = [value for call in self._calls for value in call.arguments.values()]
        flat = [one for value in given for one in (value if isinstance(value, list) else [value])]
        edges = {one.source for one in flat if isinstance(one, _Result) and isinstance(one.source, tuple)}
        return edges if self._calls else {self._edge}

    @torch.no_grad()
    def __call__(self, outputs: Mapping[ModelEdge, torch.Tensor]) -> float:
        """Return the loss that outputs of the models give. Waits for an accelerator.

        Raises:
            UnknownLossError: An output is missing, or a target was written to since.
            Exception: Whatever an op raises.
        """
        loss = self._computed(outputs)
        return float(loss if self._constant is None else loss + self._constant)

    def _computed(self, outputs: Mapping[ModelEdge, torch.Tensor]) -> torch.Tensor:
        results: list[Any] = []

        def value(given: Any) -> Any:
            if isinstance(given, list):
                return [value(one) for one in given]
            if not isinstance(given, _Result):
                return given
            if isinstance(given.source, tuple):
                if given.source not in outputs:
                    raise UnknownLossError("it reads the output of a forward that was not kept")
                return outputs[given.source]
            of_call = results[given.source]
            return of_call[given.output] if isinstance(of_call, (tuple, list)) else of_call

        for call in self._calls:
            if any(version(tensor) != counted or is_freed(tensor) for tensor, counted in call.versions):
                raise UnknownLossError("what it reads was written to or freed since")
            results.append(call.op(**{name: value(given) for name, given in call.arguments.items()}))
        loss: torch.Tensor = value(_Result(len(results) - 1) if results else _Result(self._edge))
        return loss


def _call(node: Any, saved: Mapping[str, Any], places: Mapping[Any, int]) -> _Call | None:
    for overload in overloads_of(node.name()):
        arguments = _arguments(overload, node, saved, places)
        if arguments is not None:
            tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
            tensors = [tensor for tensor in tensors if not is_parameter(tensor)]  # which have the values of their step
            return _Call(overload.op, arguments, [(tensor, version(tensor)) for tensor in tensors])
    return None


def _evaluated(
    loss: torch.Tensor,
    nodes: Sequence[Any],
    saved: Sequence[dict[str, Any]],
    outputs: Mapping[ModelEdge, torch.Tensor],
) -> Values:
    values = Values(nodes, outputs, saved)
    for node in nodes:
        values.evaluate(node, loss if node is nodes[-1] else None)
    return values


def _sum(
    node: Any, saved: Mapping[str, Any], places: Mapping[Any, int], values: Values, result: torch.Tensor | None
) -> _Call | None:
    """Return the call of a sum with a constant, which is not saved and follows from the result; None if it does not."""
    sources = [(place, edge) for place, edge in enumerate(node.next_functions) if edge[0] is not None]
    if _name_of(node) not in {"Add", "Sub", "Rsub"} or len(sources) != 1 or result is None:
        return None
    place, edge = sources[0]
    known, given = values.on(edge), _of_edge(edge, places)
    if known is None or given is None:
        return None
    factor = _factor(node, saved, place)
    constant = result.detach() - factor * known
    return _Call(lambda given: constant + factor * given, {"given": given}, [])


def _factor(node: Any, saved: Mapping[str, Any], place: int) -> float:
    """Return the factor of a summand in a sum or a difference."""
    name = _name_of(node)
    return (-1.0 if (name == "Sub") == (place == 1) and name != "Add" else 1.0) * (saved["alpha"] if place else 1.0)


def _without_constant(node: Any, saved: Mapping[str, Any], places: Mapping[Any, int]) -> _Call:
    """Return the call of an op with 0 instead of what it adds to one input, or chooses instead of it by a mask."""
    sources = [(place, edge) for place, edge in enumerate(node.next_functions) if edge[0] is not None]
    given = _of_edge(sources[0][1], places) if len(sources) == 1 else None
    if given is not None and _name_of(node) in {"Add", "Sub", "Rsub"}:
        factor = _factor(node, saved, sources[0][0])
        return _Call(lambda given: factor * given, {"given": given}, [])
    condition = saved.get("condition")
    if given is not None and _name_of(node) == "Where" and isinstance(condition, torch.Tensor):
        is_taken = condition if sources[0][0] == 0 else ~condition
        versions = [(condition, version(condition))]
        return _Call(lambda given: torch.where(is_taken, given, 0.0), {"given": given}, versions)
    raise UnknownLossError(f"not all arguments of {_name_of(node)} are known")


def _passes_on_constants(node: Any) -> bool:
    """Return True if a constant that is added to an op's input is only added, moved or scaled in its result."""
    name, edges = _name_of(node), node.next_functions
    if name == "Mul":
        return sum(source is not None for source, _ in edges) == 1
    return name in _LINEAR and (name != "Div" or all(source is None for source, _ in edges[1:]))


def _name_of(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", node.name())


def _arguments(
    overload: Overload, node: Any, saved: Mapping[str, Any], places: Mapping[Any, int]
) -> dict[str, Any] | None:
    """Return the arguments of an op by name; None if they are not all known."""
    names, sources = overload.tensors, node.next_functions
    edges = dict(zip(names, sources, strict=True)) if len(names) == len(sources) else overload.edges(node, saved)
    takes_list = any(map(takes_tensors, overload.schema.arguments))
    if not overload.takes_all(saved) or not (takes_list or len(edges) == len(sources)):
        return None
    shape, dtype = node.results[0] if node.results else (None, None)
    # What a mask fills in is not saved. It is 0 in torch's losses, and a loss is repeated only if that gives it again.
    unsaved = {"size": None if shape is None else list(shape), "dtype": dtype, "value": 0.0}
    arguments: dict[str, Any] = {}
    for argument in overload.schema.arguments:
        name, kind = argument.name, str(argument.type)
        given: Any
        if isinstance(saved.get(name), (list, tuple)) and "Tensor" in kind:  # indices
            given = list(saved[name])
        elif takes_tensors(argument):
            given = [_of_edge(edge, places) for edge in node.next_functions]
            if any(value is None for value in given):
                return None
        elif "Tensor" in kind:
            given = _of_edge(edges.get(name, (None, 0)), places)
            given = saved.get(name) if given is None else given
            if not isinstance(given, (_Result, torch.Tensor)) and not (given is None and "Optional" in kind):
                return None
        elif name in saved:
            given = signed(saved[name])
        elif unsaved.get(name) is not None:
            given = unsaved[name]
        elif argument.has_default_value():
            given = argument.default_value
        else:
            return None
        arguments[name] = given
    return arguments


def is_parameter(value: Any) -> bool:
    """Return True for a leaf that may be trained: its values change by each step, and a replay has those it needs."""
    return isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad


def _of_edge(edge: Edge, places: Mapping[Any, int]) -> _Result | None:
    """Return what an edge of the graph brings; None if that is a constant, or a parameter."""
    node, index = edge
    if node is None or number_of_node(node) >= LEAF:
        return None
    return _Result(places[node], index) if node in places else _Result((number_of_node(node), index))
