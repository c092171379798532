"""`first_fault`: find the op of the loss code that made the first inf or NaN, from the graph of the loss.

Nothing runs while the script computes its loss. Only if the loss is not finite, before its backward, the graph is
walked from the loss to the outputs of models. What each op returned is known if it or an op after it has saved it for
the backward; otherwise the op is run again if all of its arguments are known.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from castwise._torch_private import SAVED, SAVED_RAW, SAVED_SHAPE, number_of_node, results_of_node, schema_of
from castwise.diagnosis._op_facts import is_random, name_of
from castwise.diagnosis._ranges import memory_of

LEAF = 2**63
"""Leaves are numbered above it."""
_MOST_NODES = 5_000
_RESULTS = ("result", "output", "result0", "output0")
# Ops whose forward has another name than their node.
_FORWARDS = {
    "nll_loss": "nll_loss_forward",
    "nll_loss2_d": "nll_loss2d_forward",
    "to_copy": "_to_copy",
    "log1_p": "log1p",
}
# Ops that return what they read.
_PASSING = {f"aten.{name}" for name in ("to", "view", "reshape", "transpose", "t", "squeeze", "unsqueeze", "slice")}
_SUMS = ("aten.add", "aten.sub")
# Of ops that save their result and not their input.
_INVERSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aten.exp": torch.log,
    "aten.expm1": torch.log1p,
    "aten.sqrt": torch.square,
    "aten.rsqrt": lambda result: result**-2,
    "aten.reciprocal": torch.reciprocal,
    "aten.sigmoid": torch.logit,
    "aten.tanh": torch.atanh,
    "aten.softmax": torch.log,
    "aten.log_softmax": torch.clone,
}
# Saved for the backward, and no argument of the forward.
_DERIVED = re.compile(r"(.*_)?(sym_\w+|sizes?|numel|total_weight|scalar_type|options|dim_size)$")

Edge = tuple[Any, int]


@dataclass
class Node:
    """An op of the loss code.

    Args:
        node: Its node in the graph.
        saved: What it has saved, by name.
        name: Name such as "aten.log".
    """

    node: Any
    saved: dict[str, Any]
    name: str
    inputs: list[torch.Tensor] = field(default_factory=list)
    """The floating-point inputs that are known."""
    has_unknown_inputs: bool = False
    output: torch.Tensor | None = None


@dataclass(frozen=True)
class LossFault:
    """The origin of a loss, or of a gradient of the loss, that is not finite.

    Args:
        place: Index of the node among `nodes_of`.
        name: Name of the op.
        inputs: Its floating-point inputs, as far as they are known.
        output: Its result, or the gradient of an input; None if it is not known.
        reads: Where the first non-finite input comes from: "" if all known inputs are finite, so that the op itself is
            the origin; "model" or "argument".
        has_unknown_inputs: Whether an input is not known.
        samples: Positions in the batch of the samples whose row of an argument is not finite; empty if that are all, or
            if it does not have a row for each row of a model's output.
    """

    place: int
    name: str
    inputs: list[torch.Tensor]
    output: torch.Tensor | None
    reads: str
    has_unknown_inputs: bool
    samples: tuple[int, ...] = ()


def saved_by(node: Any) -> dict[str, Any]:
    """Return what an autograd node has saved for its backward, by name.

    What can no longer be read is left out, and so is what hooks have packed: to unpack a tensor of a checkpointed
    function is to call that again. Torch documents these attributes in its notes on the mechanics of autograd, under
    "Saved tensors".
    """
    saved, kind = {}, cast(Any, type(node))
    for name, attribute, holder in _saved_attributes(kind):
        try:
            held = () if holder is None else getattr(node, holder)
            for each in held if isinstance(held, (tuple, list)) else (held,):
                if getattr(each, "unpack_hook", None) is not None:
                    break
            else:
                saved[name] = getattr(node, attribute)
        except RuntimeError:
            continue
    return saved


@functools.cache
def _saved_attributes(kind: Any) -> list[tuple[str, str, str | None]]:
    """Return names, the attributes that have them, and those of their holders; None for what is not a tensor."""
    names = [name.removeprefix(SAVED) for name in dir(kind) if name.startswith(SAVED)]
    return [(name, SAVED + name, SAVED_RAW + name if hasattr(kind, SAVED_RAW + name) else None) for name in names]


class FrozenNode:
    """What an autograd node says of itself, without the graph that it keeps alive; see also `results_of_node`."""

    def __init__(
        self, node: Any, next_functions: Sequence[tuple[Any, int]], results: Sequence[tuple[torch.Size, torch.dtype]]
    ) -> None:
        self._name, self._number, self.next_functions = node.name(), number_of_node(node), next_functions
        self.results = results

    def name(self) -> str:
        """Return the node's name."""
        return str(self._name)

    def _sequence_nr(self) -> int:
        return self._number


def frozen(nodes: Sequence[Any], *, with_results: bool) -> list[Any]:
    """Return nodes that keep no graph alive, in the same order, also with shapes and dtypes of results if asked to."""
    copies: dict[Any, FrozenNode | None] = {None: None}
    for node in nodes:
        sources: list[tuple[FrozenNode | None, int]] = []
        for source, index in node.next_functions:
            if source not in copies:
                copies[source] = FrozenNode(source, (), ())
            sources.append((copies[source], index))
        copies[node] = FrozenNode(node, sources, results_of_node(node) if with_results else ())
    return [copies[node] for node in nodes]


def nodes_of(loss: torch.Tensor, is_of_model: Callable[[int], bool], *, through_models: bool = False) -> list[Any]:
    """Return the nodes between a loss and the models' outputs, in the order in which they were made.

    Args:
        loss: The loss.
        is_of_model: Returns True for the number of a node that a model's forward has made.
        through_models: Whether to return the nodes before and between models, too.
    """
    reached: dict[Any, int] = {}
    of_models: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting and len(reached) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in reached or node in of_models:
            continue
        number = number_of_node(node)
        if number >= LEAF:
            continue
        if not is_of_model(number):
            reached[node] = number
        elif through_models:
            of_models.add(node)
        else:
            continue
        for source, _ in node.next_functions:
            waiting.append(source)
    return sorted(reached, key=reached.__getitem__)


def first_fault(
    loss: torch.Tensor,
    nodes: Sequence[Any],
    outputs: Mapping[tuple[int, int], torch.Tensor],
    saved: Sequence[dict[str, Any]],
) -> LossFault | None:
    """Return the first op of the loss code whose result is known and not finite; None if there is none.

    Args:
        loss: The loss.
        nodes: See `nodes_of`.
        outputs: The models' outputs, by the number of their node and their index among its outputs.
        saved: What each node has saved for the backward.
    """
    values = Values(nodes, outputs, saved)
    for place, node in enumerate(nodes):
        op = values.evaluate(node, loss if node is nodes[-1] else None)
        if op.output is None or _is_finite(op.output):
            continue
        bad = [tensor for tensor in op.inputs if not _is_finite(tensor)]
        reads = "" if not bad else "model" if values.come_from_models(bad) else "argument"
        if reads == "model" and op.name in _PASSING:
            values.note_of_models(op.output)
            continue
        samples = _samples_of(bad, outputs.values()) if reads == "argument" else ()
        found = LossFault(place, op.name, op.inputs, op.output, reads, op.has_unknown_inputs, samples)
        is_unknown = op.has_unknown_inputs and not reads
        return (values.division_by_zero(nodes[:place]) if is_unknown else None) or found
    return None


def _samples_of(bad: Sequence[torch.Tensor], outputs: Iterable[torch.Tensor]) -> tuple[int, ...]:
    counts = {len(output) for output in outputs if output.dim()}
    rows = next(
        (tensor.isfinite().reshape(len(tensor), -1) for tensor in bad if tensor.dim() and len(tensor) in counts), None
    )
    at_fault = [] if rows is None else (~rows.all(1)).nonzero().flatten().tolist()
    return () if rows is None or len(at_fault) == len(rows) else tuple(at_fault)


def first_fault_of_backward(
    loss: torch.Tensor,
    nodes: Sequence[Any],
    outputs: Mapping[tuple[int, int], torch.Tensor],
    saved: Sequence[dict[str, Any]],
) -> LossFault | None:
    """Return the first op of the loss code with a gradient that is not finite, although the one that it gets is.

    If an infinity in the forward is the reason, the op that made it is returned. Each op is run again, and its backward
    by itself, from what was saved before the backward of the loss.

    Args:
        loss: The loss, which is finite.
        nodes: See `nodes_of`.
        outputs: See `first_fault`.
        saved: What each node has saved.
    """
    values = Values(nodes, outputs, saved)
    for node in nodes:
        values.evaluate(node, loss if node is nodes[-1] else None)
    gradients: dict[Edge, torch.Tensor] = {(nodes[-1], 0): torch.ones_like(loss.detach())}
    for place, node in reversed([*enumerate(nodes)]):
        gradient = gradients.get((node, 0))
        if gradient is None:
            continue
        for edge, of_input in values.backward_of(node, gradient):
            if not _is_finite(of_input):
                op = values.evaluate(node, None)
                if not all(map(_is_finite, op.inputs)):
                    return first_fault(loss, nodes, outputs, saved)
                return LossFault(place, op.name, op.inputs, of_input, "", op.has_unknown_inputs)
            gradients[edge] = gradients[edge] + of_input if edge in gradients else of_input
    return None


class Values:
    """The known tensors on the edges of a graph."""

    def __init__(
        self, nodes: Sequence[Any], outputs: Mapping[tuple[int, int], torch.Tensor], saved: Sequence[dict[str, Any]]
    ) -> None:
        self._saved = {node: _readable(by_node) for node, by_node in zip(nodes, saved, strict=True)}
        self._outputs = {edge: output for edge, output in outputs.items() if not hasattr(output, "to_local")}
        self._passed: list[torch.Tensor] = []
        self._by_edge: dict[Edge, torch.Tensor] = {}
        for node in nodes:
            self._note_saved_inputs(node)

    def evaluate(self, node: Any, output: torch.Tensor | None) -> Node:
        """Find out what an op has read and returned."""
        op = Node(node, self._saved[node], _op_name(node))
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        known = [self.on(edge) for edge in edges]
        op.has_unknown_inputs = any(value is None for value in known)
        op.inputs = _distinct([*(value for value in known if value is not None), *_saved_inputs(op.saved)])
        saved = next((op.saved[name] for name in _RESULTS if isinstance(op.saved.get(name), torch.Tensor)), None)
        op.output = saved if output is None else output.detach()
        if op.output is None:
            op.output = self._by_edge.get((node, 0))
        if op.output is None:
            op.output = self._run_again(node)
        if op.output is not None:
            self._by_edge[node, 0] = op.output
        return op

    def backward_of(self, node: Any, gradient: torch.Tensor) -> Iterator[tuple[Edge, torch.Tensor]]:
        """Yield the gradients of an op's inputs, given that of its result; nothing if the op cannot be run again."""
        for overload in overloads_of(node.name()):
            bound = self._bound(overload, node, self._saved[node], unknown=self._input_from_result(node, gradient))
            if bound is None:
                continue
            edges = overload.edges(node, self._saved[node])
            inputs = {
                name: bound[name].detach().requires_grad_()
                for name, edge in edges.items()
                if edge[0] is not None and _is_float(bound[name])
            }
            try:
                with torch.enable_grad():
                    result = overload.op(**{**bound, **inputs})
                    result = result[0] if isinstance(result, (tuple, list)) else result
                    seed = gradient.to(result.dtype).expand(result.shape)
                    of_inputs = torch.autograd.grad(result, list(inputs.values()), seed, allow_unused=True)
            except (RuntimeError, TypeError, IndexError):
                continue
            for name, of_input in zip(inputs, of_inputs, strict=True):
                if of_input is not None:
                    yield edges[name], of_input
            return
        if _op_name(node) in _SUMS and len(node.next_functions) == 1:  # of a number, which is not saved
            yield node.next_functions[0], gradient

    def division_by_zero(self, nodes: Sequence[Any]) -> LossFault | None:
        """Return the first division by exactly 0 whose result is not known, because what it divides is not."""
        for place, node in enumerate(nodes):
            divisor = self._saved[node].get("other") if _op_name(node) == "aten.div" else None
            if isinstance(divisor, torch.Tensor) and (node, 0) not in self._by_edge and (divisor == 0).any():
                return LossFault(place, "aten.div", [divisor.detach()], None, "", has_unknown_inputs=True)
        return None

    def _input_from_result(self, node: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the input of an op whose backward reads its result instead, and 0 for all others."""
        inverse, saved = _INVERSES.get(_op_name(node)), self._saved[node]
        result = next((saved[name] for name in _RESULTS if isinstance(saved.get(name), torch.Tensor)), None)
        return torch.zeros_like(gradient) if inverse is None or result is None else inverse(result.detach())

    def come_from_models(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if any of the tensors is, or shares memory with, an output of a model."""
        memory = {memory_of(output) for output in [*self._outputs.values(), *self._passed]} - {None}
        return any(memory_of(tensor) in memory for tensor in tensors)

    def note_of_models(self, tensor: torch.Tensor) -> None:
        """Note that a tensor has the values of an output of a model."""
        self._passed.append(tensor)

    def on(self, edge: Edge) -> torch.Tensor | None:
        """Return the tensor on an edge; None if it is not known."""
        known = self._by_edge.get(edge)
        return self._outputs.get((number_of_node(edge[0]), edge[1])) if known is None else known

    def _note_saved_inputs(self, node: Any) -> None:
        """Note what the ops before it have returned, from what an op has saved of its inputs."""
        for overload in overloads_of(node.name()):
            if _saved_names(self._saved[node]) <= set(overload.tensors):
                for name, edge in overload.edges(node, self._saved[node]).items():
                    value = self._saved[node].get(name)
                    if isinstance(value, torch.Tensor) and edge[0] is not None:
                        self._by_edge.setdefault(edge, value.detach())
                return

    def _run_again(self, node: Any) -> torch.Tensor | None:
        saved = self._saved[node]
        for overload in overloads_of(node.name()):
            bound = self._bound(overload, node, saved)
            if bound is None:
                continue
            try:
                with torch.no_grad():
                    result = overload.op(**bound)
            except (RuntimeError, TypeError, IndexError):
                continue
            result = result[0] if isinstance(result, (tuple, list)) else result
            return result if isinstance(result, torch.Tensor) else None
        return None

    def _bound(
        self, overload: Overload, node: Any, saved: Mapping[str, Any], unknown: torch.Tensor | None = None
    ) -> dict[str, Any] | None:
        """Return the arguments of an op by name; None if they are not all known.

        Args:
            overload: The op.
            node: Its node.
            saved: What the node has saved.
            unknown: A tensor instead of those that are not known. A backward does not depend on what is not saved.
        """
        if not overload.may_have_made(node, saved):
            return None
        if not overload.takes_all(saved):
            return None
        edges = overload.edges(node, saved)
        bound: dict[str, Any] = {}
        for argument in overload.schema.arguments:
            given = saved.get(argument.name)
            if takes_tensors(argument):
                known = [self.on(edge) if edge[0] is not None else None for edge in node.next_functions]
                given = [unknown if value is None else value for value in known]
                if any(value is None for value in given):
                    return None
            elif _is_tensor(argument):
                edge = edges.get(argument.name, (None, 0))
                if given is None:
                    value = None if edge[0] is None else self.on(edge)
                    given = _of_saved_shape(unknown, saved.get(argument.name + SAVED_SHAPE)) if value is None else value
                is_missing = given is None and "Optional" not in str(argument.type)
                if is_missing or not isinstance(given, (torch.Tensor, type(None))):
                    return None
            elif argument.name not in saved:
                if not argument.has_default_value():
                    return None
                given = argument.default_value
            bound[argument.name] = signed(given)
        return bound


@dataclass(frozen=True)
class Overload:
    op: Any
    schema: Any

    @property
    def tensors(self) -> list[str]:
        """Names of the arguments that are tensors."""
        return [argument.name for argument in self.schema.arguments if _is_tensor(argument)]

    def may_have_made(self, node: Any, saved: Mapping[str, Any]) -> bool:
        """Return True if the op has as many tensors that may have a gradient as the node has edges."""
        is_of_list = any(map(takes_tensors, self.schema.arguments))
        return is_of_list or len(self.edges(node, saved)) == len(node.next_functions)

    def takes_all(self, saved: Mapping[str, Any]) -> bool:
        """Return True if what was saved are arguments, results, or what follows from these."""
        names = {argument.name for argument in self.schema.arguments}
        return all(name in names or name in _RESULTS or _DERIVED.match(name) for name in saved)

    def edges(self, node: Any, saved: Mapping[str, Any]) -> dict[str, Edge]:
        """Return the edge of each tensor that may have a gradient; masks and indices have no edge."""
        names = [
            name for name in self.tensors if not isinstance(saved.get(name), torch.Tensor) or _is_float(saved[name])
        ]
        return dict(zip(names, node.next_functions, strict=False))


@functools.cache
def overloads_of(node_name: str) -> list[Overload]:
    """Return the ops that may have made a node of this name, such as "LogSoftmaxBackward0"."""
    bare = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"Backward\d*$", "", node_name)).lower()
    for name in filter(None, (_FORWARDS.get(bare), bare, f"_{bare}", f"native_{bare}")):
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            ops = [getattr(packet, overload) for overload in packet.overloads()]
            known = [Overload(op, schema_of(op)) for op in ops if not is_random(op)]
            return [overload for overload in known if overload.schema is not None and not overload.schema.is_mutable]
    return []


def _op_name(node: Any) -> str:
    overloads = overloads_of(node.name())
    return name_of(overloads[0].op) if overloads else str(node.name()).removesuffix("Backward")


def _saved_names(saved: Mapping[str, Any]) -> set[str]:
    return {name for name, value in saved.items() if isinstance(value, torch.Tensor) and name not in _RESULTS} - {
        "total_weight"
    }


def _saved_inputs(saved: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for name in _saved_names(saved):
        if saved[name].is_floating_point():
            yield saved[name].detach()


def _readable(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what FSDP has freed, as it does gathered weights: to read that ends the process.

    Also DTensors: an op on them may wait for ranks that do not run it.
    """
    return {name: value for name, value in saved.items() if not (hasattr(value, "to_local") or is_freed(value))}


def is_freed(value: Any) -> bool:
    """Return True for a tensor whose memory is gone, and for a list with one."""
    if isinstance(value, (tuple, list)):
        return any(map(is_freed, value))
    here = value.to_local() if hasattr(value, "to_local") else value  # of a DTensor
    is_strided = isinstance(here, torch.Tensor) and here.layout is torch.strided and here.numel() > 0
    return is_strided and here.untyped_storage().nbytes() == 0


def _distinct(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    by_memory = {(tensor.data_ptr(), tensor.shape, tensor.dtype): tensor for tensor in tensors}
    return list(by_memory.values())


def takes_tensors(argument: Any) -> bool:
    """Return True for an argument that is a list of tensors."""
    return str(argument.type) in {"List[Tensor]", "Tensor[]"}


def _is_tensor(argument: Any) -> bool:
    return "Tensor" in str(argument.type)


def _of_saved_shape(unknown: torch.Tensor | None, shape: Any) -> torch.Tensor | None:
    return unknown if unknown is None or shape is None else unknown.new_zeros(tuple(shape))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def signed(value: Any) -> Any:
    """Return a saved dimension as it was given: negative ones are saved as unsigned 64-bit integers."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= LEAF:
        return value - 2 * LEAF
    return [signed(item) for item in value] if isinstance(value, (tuple, list)) else value
