"""`LOSS_CODE`: what a script computes between its models' outputs and `backward`, and where that goes wrong."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from castwise._mistakes.bounded_ops import line_with_bound
from castwise._mistakes.mistake import Place, is_passed_over
from castwise._mistakes.script_line import ScriptLine
from castwise._torch_private import graph_nodes_made, number_of_node, version
from castwise.amp._devices import is_capturing
from castwise.diagnosis._diagnosis import Diagnosis
from castwise.diagnosis._lone_values import find_lone_value
from castwise.diagnosis._loss_function import LossFunction, ModelEdge, is_parameter
from castwise.diagnosis._loss_graph import LossFault, first_fault, first_fault_of_backward, frozen, nodes_of, saved_by
from castwise.diagnosis._op_remedies import UNKNOWN, advice_on_op
from castwise.diagnosis._ranges import Range, range_of
from castwise.diagnosis._remedies import Help, loss_in_float32

_LINES_FROM = 2
"""The number of backwards at the start whose loss code is read for its lines."""
_FORWARDS = 8  # whose outputs are kept
_MOST_NODES = 200  # of a loss whose saved tensors are kept
_MOST_BYTES, _MOST_BYTES_OF_TARGETS = 64 << 20, 1 << 20

_Key = TypeVar("_Key")
_Structure = tuple[tuple[str, tuple[int, ...]], ...]


class _Seen(NamedTuple):
    """A value, and the version that it had if it is a tensor."""

    value: Any
    version: int

    @staticmethod
    def of(value: Any) -> _Seen:
        """Return what is seen now; of a tensor without its graph, unless it is a parameter."""
        if not isinstance(value, torch.Tensor):
            return _Seen(value, 0)
        return _Seen(value if is_parameter(value) else value.detach(), version(value))

    def is_unchanged(self) -> bool:
        """Return False for a tensor that was written to since."""
        return not isinstance(self.value, torch.Tensor) or version(self.value) == self.version


class _Kept(NamedTuple):
    """A loss and its code, over the backward; without nodes if the loss is an output of a model."""

    loss: torch.Tensor
    edge: ModelEdge
    nodes: list[Any]
    saved: list[dict[str, _Seen]]
    is_complete: bool
    """Whether all that was saved is kept, and not only what repeats the loss."""


class LossesOfStep:
    """The losses of a step and what their code has saved, to find a fault in once it is known that there is one.

    On an accelerator that is after the step, so tensors that were written to since, such as weights, are unknown then.

    Args:
        code: The loss code.
        kept: The losses.
        outputs: The models' outputs.
        known: The origin of a loss that was known not to be finite before its backward.
        is_between: Whether that is in code between two models, so that the later one was given what is not finite.
    """

    def __init__(
        self,
        code: LossCode,
        kept: list[_Kept],
        outputs: Mapping[ModelEdge, torch.Tensor],
        known: Diagnosis | None,
        *,
        is_between: bool,
    ) -> None:
        self._code, self._all, self._known, self.is_between = code, kept, known, is_between
        self._kept = [each for each in kept if each.nodes and each.is_complete]
        self._outputs = {edge: _Seen.of(tensor) for edge, tensor in outputs.items()}

    def fault(self, *, of_model: bool) -> Diagnosis | None:
        """Return the origin of the first loss that is not finite. Waits for an accelerator.

        Args:
            of_model: Whether to return a fault that the loss reads from a model's output as well.
        """
        if self._known is not None:
            return self._known
        for loss, _, nodes, saved, _ in self._kept:
            if not loss.isfinite().all():
                fault = first_fault(loss, nodes, _unchanged(self._outputs), list(map(_unchanged, saved)))
                if fault is not None and (of_model or fault.reads != "model"):
                    return self._code.diagnosis(loss, nodes, fault)
        return None

    def fault_of_backward(self) -> Diagnosis | None:
        """Return the origin of gradients of finite losses that are not finite. Waits for an accelerator."""
        for loss, _, nodes, saved, _ in self._kept:
            fault = first_fault_of_backward(loss, nodes, _unchanged(self._outputs), list(map(_unchanged, saved)))
            if fault is not None:
                return self._code.diagnosis(loss, nodes, fault, is_of_backward=True)
        return None

    def as_functions(self) -> list[LossFunction]:
        """Return the losses, with `LossCode.repeats` set, as functions of models' outputs.

        Raises:
            UnknownLossError: They cannot be repeated.
        """
        outputs = _unchanged(self._outputs)
        return [
            LossFunction(each.loss, each.edge, each.nodes, list(map(_repeatable, each.saved)), outputs)
            for each in self._all
        ]


class LossCode:
    """Follows the code between models and `backward`.

    The lines of its ops come from torch's anomaly mode without its check for NaN, which is on between the forward of a
    model and the backward in the first two steps, and changes no result. Later a line is looked up by the structure of
    the graph.
    """

    def __init__(self) -> None:
        self._intervals: deque[tuple[int, int]] = deque(maxlen=64)
        self._outputs: deque[dict[ModelEdge, torch.Tensor]] = deque(maxlen=_FORWARDS)
        self._kept: deque[_Kept] = deque(maxlen=_FORWARDS)
        self._lines: dict[_Structure, list[Place | None]] = {}
        self._backwards = 0
        self._has_models = False
        self._between: Diagnosis | None = None
        """The last fault that was in code between two models."""
        self._anomaly: tuple[bool, bool] | None = None
        """The script's own anomaly mode, while lines are read."""
        self.repeats = 0
        """The number of monitors that may repeat losses."""

    def forget(self) -> None:
        """Forget all, and stop reading lines."""
        self._stop_reading_lines()
        self._intervals.clear()
        self._outputs.clear()
        self._kept.clear()
        self._lines.clear()
        self._backwards, self._has_models, self._between = 0, False, None

    def forward_begins(self) -> int:
        """Note that a model is called; return the number to give to `forward_ends`."""
        self._stop_reading_lines()
        return graph_nodes_made()

    def forward_ends(self, began: int, outputs: list[torch.Tensor]) -> None:
        """Note what a model has returned."""
        self._has_models = True
        self._intervals.append((began, graph_nodes_made()))
        tensors = [tensor for tensor in outputs if tensor.grad_fn is not None and not tensor.is_meta]
        if sum(tensor.nbytes for tensor in tensors) <= _MOST_BYTES // _FORWARDS:
            self._outputs.append({(number_of_node(t.grad_fn), t.output_nr): t.detach() for t in tensors})
        self.read_lines()

    def read_lines(self) -> None:
        """Read the lines of the code that follows, if this is one of the first steps."""
        if self._backwards < _LINES_FROM and self._anomaly is None:
            self._anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
            torch.set_anomaly_enabled(True, self._anomaly[0] and self._anomaly[1])

    def backward_begins(self, loss: torch.Tensor, *, is_finite: bool) -> Diagnosis | None:
        """Note that the backward of a loss begins. Return the origin of a loss that is known not to be finite."""
        has_lines = self._anomaly is not None
        self._stop_reading_lines()
        self._backwards += 1
        is_dtensor = hasattr(loss, "to_local")  # whose ops may wait for other ranks
        if loss.grad_fn is None or loss.is_meta or is_dtensor or is_capturing(loss):
            return None
        nodes = nodes_of(loss, self._is_of_model)
        if has_lines:
            self._note_lines(nodes)
            if len(self._intervals) > 1:
                self._note_lines(nodes_of(loss, self._is_of_model, through_models=True))
        if is_finite:
            self._keep(loss, nodes)
            return None
        if (between := self._fault_between_models(loss, nodes)) is not None:
            return between
        if not nodes:  # the loss is an output of a model
            return None
        fault = first_fault(loss, nodes, self._known_outputs(), [saved_by(node) for node in nodes])
        return None if fault is None else self.diagnosis(loss, nodes, fault)

    def _fault_between_models(self, loss: torch.Tensor, after: list[Any]) -> Diagnosis | None:
        """Return the origin of a non-finite loss if it is in code before `after`, whose result a model has read."""
        if len(self._intervals) < 2:
            return None
        nodes = nodes_of(loss, self._is_of_model, through_models=True)
        fault = first_fault(loss, nodes, self._known_outputs(), [saved_by(node) for node in nodes])
        if fault is None or fault.reads or fault.has_unknown_inputs or nodes[fault.place] in after:
            return None
        self._between = self.diagnosis(loss, nodes, fault)
        return self._between

    def _note_lines(self, nodes: list[Any]) -> None:
        self._lines[_structure(nodes)] = [_line_of(node) for node in nodes]

    def take(self, known: Diagnosis | None) -> LossesOfStep:
        """Return the losses of a step, and forget them; for `known`, see `LossesOfStep`."""
        is_between = known is not None and known is self._between
        losses = LossesOfStep(self, list(self._kept), self._known_outputs(), known, is_between=is_between)
        self._kept.clear()
        self._outputs.clear()
        return losses

    def _keep(self, loss: torch.Tensor, nodes: list[Any]) -> None:
        """Keep what the loss code has saved over its backward, which frees it, if that is little."""
        if not (nodes or self.repeats) or len(nodes) > _MOST_NODES:
            return
        saved: list[dict[str, _Seen]] = []
        nbytes = 0
        for node in nodes:
            seen = saved_by(node)
            for name, value in seen.items():
                seen[name] = _Seen.of(value)
                nbytes += getattr(value, "nbytes", 0)
            saved.append(seen)
        is_small = nbytes <= _MOST_BYTES // _FORWARDS
        if not is_small:  # what ops have made is not needed to repeat them
            saved = [{name: seen for name, seen in of_node.items() if not _is_large(seen.value)} for of_node in saved]
        if is_small or self.repeats:
            edge = number_of_node(loss.grad_fn), loss.output_nr
            nodes = frozen(nodes, with_results=self.repeats > 0)
            self._kept.append(_Kept(loss.detach(), edge, nodes, saved, is_small))

    def _known_outputs(self) -> dict[ModelEdge, torch.Tensor]:
        return {edge: tensor for kept in self._outputs for edge, tensor in kept.items()}

    def step_ends(self) -> None:
        """Forget the forwards of a step. Without models, all code up to the next backward is that of the loss."""
        self._intervals.clear()
        self._outputs.clear()
        self._kept.clear()
        if not self._has_models:
            self.read_lines()

    def _stop_reading_lines(self) -> None:
        if self._anomaly is not None:
            torch.set_anomaly_enabled(*self._anomaly)
            self._anomaly = None

    def _is_of_model(self, number: int) -> bool:
        for first, end in self._intervals:  # noqa: SIM110  # for each node at each step, and faster than `any`
            if first <= number < end:
                return True
        return False

    def diagnosis(
        self, loss: torch.Tensor, nodes: list[Any], fault: LossFault, *, is_of_backward: bool = False
    ) -> Diagnosis:
        """Return the diagnosis of a fault in the code of a loss."""
        inputs = tuple(filter(None, map(range_of, fault.inputs)))
        place = self._line(nodes, fault.place)
        if fault.reads == "argument" and place and (of_one := _of_lone_value(loss, inputs, place)) is not None:
            return of_one
        output = None if fault.output is None else range_of(fault.output)
        help_ = _help(fault, inputs, output, is_of_backward, self._has_models, ScriptLine(place), loss.device.type)
        is_nan = bool(loss.isnan()) if output is None else bool(output.nan)
        return Diagnosis(
            found=True,
            phase="loss",
            in_loss=True,
            op=fault.name,
            gradient_of=fault.name if is_of_backward else "",
            inputs=inputs,
            outputs=() if output is None or fault.reads else (output,),
            value="nan" if is_nan else "inf",
            loss=float(loss.detach()),
            remedy=help_.remedy,
            advice=help_.advice,
            code=help_.code,
            line="" if place is None else str(place),
            source="" if place is None else place.source,
            samples=fault.samples,
        )

    def _line(self, nodes: list[Any], index: int) -> Place | None:
        """Return the line of a node: of the same structure, or the only one that such a node has ever had."""
        known = self._lines.get(_structure(nodes))
        if known is not None:
            return known[index]
        name = nodes[index].name()
        lines = {
            line
            for structure, places in self._lines.items()
            for (other, _), line in zip(structure, places, strict=True)
            if other == name
        }
        return lines.pop() if len(lines) == 1 else None


def _of_lone_value(loss: torch.Tensor, inputs: tuple[Range, ...], place: Place) -> Diagnosis | None:
    """Return the diagnosis of an argument that is all NaN, if the same file has computed the std of a single value."""
    bad = next((given for given in inputs if given.nan and given.lowest is None and given.shape[:1] == (1,)), None)
    lone = None if bad is None else find_lone_value(place.file)
    if bad is None or lone is None:
        return None
    return Diagnosis(
        found=True,
        phase="loss",
        in_loss=True,
        op=lone.op,
        outputs=(bad,),
        value="nan",
        loss=float(loss.detach()),
        remedy="code",
        advice=f"an argument of the loss is NaN, and {advice_on_op(lone.op, '', ())}",
        line=str(lone.place),
        source=lone.place.source,
    )


def _help(
    fault: LossFault,
    inputs: tuple[Range, ...],
    output: Range | None,
    is_of_backward: bool,
    has_models: bool,
    line: ScriptLine,
    device: str,
) -> Help:
    """Return the remedy for a fault in the code of a loss."""
    if fault.reads == "model":
        return Help(
            "code",
            "the loss reads an inf or NaN from the model's output, such as -inf in masked logits: write a finite "
            "number there, such as -1e4, or leave these elements out of the loss",
        )
    if fault.reads == "argument":
        such_as = "the targets" if has_models else "the batch or the targets"
        return Help("input", f"an argument of the loss, such as {such_as}, is not finite: check where it comes from")
    outputs = () if output is None else (output,)
    advice = advice_on_op(fault.name, fault.name if is_of_backward else "", inputs, outputs)
    is_in_fp16 = {each.dtype for each in outputs or inputs} == {"float16"}
    if advice is UNKNOWN and is_in_fp16 and not fault.has_unknown_inputs:
        return loss_in_float32(line, device)
    code = line_with_bound(line, fault.name, advice, [given.dtype for given in inputs])
    if is_of_backward and advice is not UNKNOWN:
        return Help("code", advice, code)
    if advice is UNKNOWN:
        advice = "check the arguments of the loss"
    if fault.has_unknown_inputs:
        return Help("code", f"not all inputs of this op are known: {advice}", code)
    return Help("code", f"this op of the loss is not finite in fp32 either: {advice}", code)


def _structure(nodes: list[Any]) -> _Structure:
    places = {node: place for place, node in enumerate(nodes)}
    return tuple((node.name(), tuple(places.get(source, -1) for source, _ in node.next_functions)) for node in nodes)


def _unchanged(seen: Mapping[_Key, _Seen]) -> dict[_Key, Any]:
    return {key: one.value for key, one in seen.items() if one.is_unchanged()}


def _repeatable(seen: Mapping[_Key, _Seen]) -> dict[_Key, Any]:
    """Return what is unchanged, and parameters, which have the values of a step again when its loss is repeated."""
    return {key: one.value for key, one in seen.items() if one.is_unchanged() or is_parameter(one.value)}


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.nbytes > _MOST_BYTES_OF_TARGETS


def _line_of(node: Any) -> Place | None:
    """Return the innermost line of the script in the traceback that anomaly mode has stored with a node."""
    for frame in reversed(node.metadata.get("traceback_", [])):
        match = re.match(r'\s*File "(.+?)", line (\d+), in ', frame)
        if match and not is_passed_over(match[1]):
            return Place(match[1], int(match[2]))
    return None


LOSS_CODE = LossCode()
"""The loss code of this process."""
