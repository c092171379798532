"""A run of a model under a policy, compared with a reference run whose tensors are still in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from castwise._full_fp32 import is_reduced
from castwise._torch_private import is_backward_running
from castwise.comparison._call_again import call_again
from castwise.comparison._errors import EffectSums, ErrorSums, is_rounded, real
from castwise.comparison._kept_values import attributes_of, returned_tensors, tensors_in
from castwise.comparison._objective import first_line, is_out_of_memory
from castwise.comparison._precisions import ParamGradients, Precision, Region, scaled
from castwise.comparison._reference_run import Call, Gradients, Key, ReferenceRun, Site
from castwise.comparison._watched_calls import Tap, Watch

_NO_GRAD = "runs under torch.no_grad(), so its effect is unknown"
_NONFINITE = "gets a non-finite gradient in the reference, so its effect is unknown"
_NOT_REACHED = "gets no gradient because its output is detached or unused, so its effect is unknown"

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor in the reference, and the corresponding one under a policy."""


class Note(NamedTuple):
    """How a module was called under the policy.

    Args:
        region: The region of the call.
        inputs: Dtypes of the tensors in its arguments.
        outputs: Dtypes of the tensors in its output.
        attributes: See `attributes_of`.
    """

    region: Region
    inputs: list[torch.dtype]
    outputs: list[torch.dtype]
    attributes: dict[str, torch.Tensor]


@dataclass
class ModuleSums:
    """The accumulated figures of one module under one policy.

    Args:
        problem: Why its errors are unknown.
        lacks_gradient: Why only its effect is unknown.
        returned: The dtypes of the numbers in its outputs.
        is_split: Whether errors of its parameters' gradients can be split into introduced and carried ones.
    """

    calls: int = 0
    total: ErrorSums = field(default_factory=ErrorSums)
    introduced: ErrorSums = field(default_factory=ErrorSums)
    carried: ErrorSums = field(default_factory=ErrorSums)
    gradients: ErrorSums = field(default_factory=ErrorSums)
    introduced_gradients: ErrorSums = field(default_factory=ErrorSums)
    carried_gradients: ErrorSums = field(default_factory=ErrorSums)
    effect: EffectSums = field(default_factory=EffectSums)
    problem: str = ""
    lacks_gradient: str = ""
    returned: dict[torch.dtype, None] = field(default_factory=dict)
    is_split: bool = True


class PolicyRun:
    """Compares each module's output with the reference, and records the precision of each call.

    Args:
        watch: The watch on the model.
        reference: The reference run.
        precisions: The precision of the reference, and that of this run.
        device: The `type` of the model's device.
        sums: Figures by module; errors are added to them.
        introduced_gradients: Errors that modules introduce into gradients, by parameter; errors are added to them. None
            to skip these.
        selection: The indices of the samples of the reference's batch in this run, and the batch size; None for all.
        reference_scale: The loss scale that a backward of the reference needs; 1 unless it computes in fp16.
    """

    def __init__(
        self,
        watch: Watch,
        reference: ReferenceRun,
        precisions: tuple[Precision, Precision],
        device: str,
        sums: dict[Tap, ModuleSums],
        introduced_gradients: dict[torch.Tensor, torch.Tensor] | None = None,
        selection: tuple[torch.Tensor, int] | None = None,
        reference_scale: float = 1.0,
    ) -> None:
        self._watch, self._reference, self._device, self._sums = watch, reference, device, sums
        self._expected, self._precision = precisions
        # During the backward of the reference, the model has the weights of the reference.
        same = self._precision is self._expected
        self._weights = self._precision.weights if same else self._expected.own_weights
        # With TF32, modules in fp32 differ from those of the reference, which runs without it.
        self._is_reduced = self._expected.bound is None and not same and is_reduced(device)
        self._introduced_gradients, self._selection = introduced_gradients, selection
        self._loss_scale = reference_scale if reference_scale > 1.0 else self._precision.loss_scale
        self._notes: dict[Key, Note] = {}
        self._numbers: Counter[Tap] = Counter()
        self._exact: set[Key] = set()
        self._reading_weights: set[Key] = set()

    def call(self, tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module, and compare its output."""
        if is_backward_running():
            return tap.forward(*args, **kwargs)
        number = self._numbers[tap]
        self._numbers[tap] += 1
        inputs = _dtypes((args, kwargs))
        region = Region.here(self._device)
        attributes = attributes_of(tap.module)
        output = tap.forward(*args, **kwargs)
        note = self._notes[tap, number] = Note(region, inputs, _dtypes(output), attributes)
        sums = self._sums[tap]
        sums.calls += 1
        sums.returned.update(dict.fromkeys(dtype for dtype in note.outputs if dtype.is_floating_point))
        call = self._reference.calls.get((tap, number))
        if call is None:
            sums.problem = "is called more often than in the reference"
        else:
            self._compare(call, note, returned_tensors(output), sums)
        return output

    def add_effect(self, call: Call, gradients: Gradients) -> None:
        """Add the gradients by a call's sites, times the errors introduced there, to the module's effect."""
        key = call.key
        note = self._notes.get(key)
        has_gradients = self._introduced_gradients is not None and key in self._reading_weights
        if note is None or (key in self._exact and not has_gradients):
            return
        sums = self._sums[call.tap]
        introduced = self._introduced(call, note, sums, gradients if has_gradients else None)
        for site, gradient in gradients.items():
            if site in introduced:
                sums.effect.add(self._of_reference(gradient), *introduced[site])
        if sums.effect.lacks_gradient:
            sums.lacks_gradient = _NONFINITE

    def note_missing_gradients(self) -> None:
        """Record the modules with errors that no gradient has reached."""
        without_gradient = self._reference.without_gradient()
        for key in self._notes.keys() - self._exact - self._reference.reached:
            if key[0].has_own_ops:
                self._sums[key[0]].lacks_gradient = _NO_GRAD if key in without_gradient else _NOT_REACHED

    def _compare(self, call: Call, note: Note, values: list[torch.Tensor], sums: ModuleSums) -> None:
        expected = call.outputs()
        if self._selection is not None and _are_equal(expected, values):  # does not depend on the samples
            for value in filter(is_rounded, values):
                for errors in (sums.total, sums.introduced, sums.carried):
                    errors.add(value, value)
            self._exact.add(call.key)
            return
        pairs = [(self._of_reference(tensor), value) for tensor, value in zip(expected, values, strict=False)]
        if len(expected) != len(values) or not all(map(_are_comparable, pairs)):
            sums.problem = "returns tensors with other shapes than in the reference"
            self._exact.add(call.key)
            return
        if not all(map(self._has_samples_first, expected)):
            sums.problem = "returns tensors whose first dimension is not the samples, so its noise is unknown"
            self._exact.add(call.key)
            return
        introduced = self._introduced(call, note, sums)
        is_exact = True
        for site, (without, with_error) in introduced.items():
            if site[0] == "output" or not torch.equal(without, with_error):
                differ = sums.introduced.add(without, with_error)
                is_exact = is_exact and not differ
        if is_exact:
            self._exact.add(call.key)
        for position, (reference, value) in enumerate(pairs):
            if not is_rounded(reference):
                continue
            sums.total.add(reference, value)
            own = introduced.get(("output", position))
            if own is None:
                sums.introduced.add(reference, reference)
                sums.carried.add(reference, value)
            else:
                sums.carried.add_rest(reference, value, *own)

    def _introduced(
        self, call: Call, note: Note, sums: ModuleSums, gradients: Gradients | None = None
    ) -> dict[Site, Pair]:
        """Run a module's own ops on the reference's values in both precisions, and return their results.

        Empty if both precisions run the same ops.

        Args:
            call, note, sums: The records of the module.
            gradients: Gradients of the loss by the results. If given, the errors introduced into the gradients of
                weights are added, too.
        """
        if not call.tap.has_own_ops or call.output is None or self._is_the_same(call, note):
            return {}

        def rounded(child: Call | None, position: int, tensor: torch.Tensor) -> torch.Tensor:
            if child is None:
                dtypes = note.inputs
            else:
                child_note = self._notes.get(child.key)
                dtypes = [] if child_note is None else child_note.outputs
            tensor = self._of_reference(tensor)
            return tensor.to(dtypes[position]) if position < len(dtypes) and is_rounded(tensor) else tensor

        def rounded_and_back(child: Call | None, position: int, tensor: torch.Tensor) -> torch.Tensor:
            return rounded(child, position, tensor).to(tensor.dtype)

        backward = None
        if gradients is not None:
            backward = _Backward(call, gradients, self._loss_scale, self._expected.weight)
        try:
            values = self._in_isolation(
                *(call, self._weights, note.region, note.attributes, rounded),
                None if backward is None else backward.here,
            )
            if backward is not None or self._rounds(call, note):
                expected = self._in_isolation(
                    *(call, self._expected.weights, call.region, call.attributes, rounded_and_back),
                    None if backward is None else backward.there,
                )
            else:
                expected = {site: self._of_reference(call.made(site)) for site in values}
        except Exception as error:
            if is_out_of_memory(error):
                raise
            sums.problem = f"cannot be run in isolation: {first_line(error)}"
            return {}
        pairs = {site: (expected[site], value) for site, value in values.items() if site in expected}
        if not all(map(_are_comparable, pairs.values())):
            sums.problem = "takes another path when run in isolation"
            return {}
        if backward is not None and self._introduced_gradients is not None:
            # Weights that a hook has computed hide the parameters from which it computed them.
            sums.is_split = sums.is_split and not backward.failed and not note.attributes
            backward.add_errors(self._introduced_gradients)
        return {site: pair for site, pair in pairs.items() if is_rounded(pair[0])}

    def _in_isolation(
        self,
        call: Call,
        weights: Callable[[nn.Module], AbstractContextManager[None]],
        region: Region,
        attributes: dict[str, torch.Tensor],
        shown: Callable[[Call | None, int, torch.Tensor], torch.Tensor],
        backward: Callable[[dict[Site, torch.Tensor]], None] | None,
    ) -> dict[Site, torch.Tensor]:
        """Run a module's own ops in isolation, and their backward if given; return detached results."""
        values = call_again(
            *(self._watch, call, self._device, weights, region, attributes, shown, self._resized),
            keeps_graph=backward is not None,
        )
        if any(value.requires_grad for value in values.values()):
            self._reading_weights.add(call.key)
        if backward is not None:
            with self._watch.handling(None), weights(call.tap.module):
                backward(values)
        return {site: value.detach() for site, value in values.items()}

    def _is_the_same(self, call: Call, note: Note) -> bool:
        """Return True if the module runs the same ops as in the reference, on tensors of the same dtypes."""
        both_plain = note.region.is_plain(call.tap.forward) and call.region.is_plain(call.tap.forward)
        return (
            (both_plain or note.region[:2] == call.region[:2])
            and self._selection is None
            and self._expected.dtype is self._precision.dtype is None
            and not self._is_reduced
            and not self._rounds(call, note)
        )

    def _rounds(self, call: Call, note: Note) -> bool:
        """Return True if any input of the module has another dtype here than in the reference."""
        if self._selection is not None:
            return False
        if [tensor.dtype for tensor in call.arguments.tensors] != note.inputs or self._expected.dtype is not None:
            return True
        return any(
            child.output is not None
            and (child_note := self._notes.get(child.key)) is not None
            and [tensor.dtype for tensor in child.output.tensors] != child_note.outputs
            for child in call.children
        )

    def _of_reference(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._selection is None:
            return tensor
        samples, size = self._selection
        is_of_samples = tensor.ndim > 0 and tensor.shape[0] == size
        return tensor.index_select(0, samples.to(tensor.device)) if is_of_samples else tensor

    def _has_samples_first(self, tensor: torch.Tensor) -> bool:
        """Return True if the samples of this run can be selected from an output of the reference."""
        return self._selection is None or not tensor.ndim or tensor.shape[0] == self._selection[1]

    def _resized(self, shape: torch.Size) -> torch.Size:
        if self._selection is None or not shape or shape[0] != self._selection[1]:
            return shape
        return torch.Size([len(self._selection[0]), *shape[1:]])


class _Backward:
    """Backwards of a module's own ops under the policy and in the reference, from the same gradients.

    Args:
        call: The call of the module in the reference.
        gradients: Gradients of the loss by the tensors that its own ops create, in the reference.
        loss_scale: The initial loss scale.
        weight: Maps a parameter to its counterpart in the reference.
    """

    def __init__(
        self, call: Call, gradients: Gradients, loss_scale: float, weight: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.failed = False
        self._params, self._gradients, self._scale, self._weight = call.tap.params, gradients, loss_scale, weight
        self._handed_over: dict[Site, torch.dtype] = {}
        self._found: ParamGradients = []
        self._expected: ParamGradients = []

    def here(self, made: dict[Site, torch.Tensor]) -> None:
        """Run the backward of the results under the policy."""
        self._handed_over = {
            site: made[site].dtype for site in self._gradients if site in made and made[site].requires_grad
        }
        self._found, self._scale = scaled(lambda scale: self._of_params(made, self._params, scale), self._scale)

    def there(self, made: dict[Site, torch.Tensor]) -> None:
        """Run the backward of the results in the reference."""
        self._expected = self._of_params(made, [self._weight(param) for param in self._params], self._scale)

    def add_errors(self, added: dict[torch.Tensor, torch.Tensor]) -> None:
        """Add the errors of the policy's gradients, by parameter."""
        if self.failed:
            return
        for param, gradient, expected in zip(self._params, self._found, self._expected, strict=True):
            if gradient is not None and expected is not None and expected.layout is torch.strided:
                gradient, expected = real(gradient), real(expected)
                wide = torch.float64 if expected.dtype is torch.float64 else torch.float32
                error = (gradient.to(wide) - expected.to(wide)) / self._scale
                added[param] = added[param].add_(error) if param in added else error

    def _of_params(
        self, made: dict[Site, torch.Tensor], params: Sequence[torch.Tensor], scale: float
    ) -> ParamGradients:
        outputs = [made[site] for site in self._handed_over]
        if self.failed or not outputs:
            return [None] * len(params)
        given = [
            (self._gradients[site] * scale).to(handed_over).to(made[site].dtype)
            for site, handed_over in self._handed_over.items()
        ]
        try:
            return list(torch.autograd.grad(outputs, params, given, retain_graph=True, allow_unused=True))
        except Exception as error:  # for example, an op without a backward in the policy's dtype
            if is_out_of_memory(error):
                raise
            self.failed = True
            return [None] * len(params)


def _are_equal(expected: list[torch.Tensor], values: list[torch.Tensor]) -> bool:
    return len(expected) == len(values) and all(map(torch.equal, expected, values))


def _are_comparable(pair: Pair) -> bool:
    reference, value = pair
    kinds = [(tensor.is_floating_point(), tensor.is_complex()) for tensor in pair]
    return reference.shape == value.shape and kinds[0] == kinds[1]


def _dtypes(value: Any) -> list[torch.dtype]:
    """Return the dtypes of a value's tensors, in the order of `Kept.tensors`."""
    return [tensor.dtype for tensor in tensors_in(value)]
