"""A run of a model under a policy, beside a run of the reference whose tensors are still there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from castwise._torch_private import is_backward_running
from castwise.comparison.call_again import call_again
from castwise.comparison.errors import EffectSums, ErrorSums
from castwise.comparison.kept_values import attributes_of, returned_tensors, tensors_in
from castwise.comparison.objective import first_line, is_of_memory
from castwise.comparison.precisions import Precision, Region, scaled
from castwise.comparison.reference_run import Call, Gradients, Key, ReferenceRun, Site
from castwise.comparison.watch import Tap, Watch

_NO_GRAD = "runs under torch.no_grad(), so its effect is not known"
_NOT_REACHED = "gets no gradient, as what it returns is detached or not used, so its effect is not known"

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor in the reference, and the same one under a policy."""


class Note(NamedTuple):
    """How a module was called under the policy.

    Args:
        region: What held there.
        inputs: Dtypes of the tensors in its arguments.
        outputs: Dtypes of the tensors that it returned.
        attributes: See `attributes_of`.
    """

    region: Region
    inputs: list[torch.dtype]
    outputs: list[torch.dtype]
    attributes: dict[str, torch.Tensor]


@dataclass
class ModuleSums:
    """What is added up of one module under one policy.

    Args:
        problem: Why its errors are not known.
        lacks_gradient: Why its effect alone is not known.
        is_split: Whether it is known which errors of the gradients of its parameters it introduces.
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
    is_split: bool = True


class PolicyRun:
    """Compares what each module returns with the reference, and notes in which precision it was called.

    Args:
        watch: Knows the run in progress.
        reference: The run of the reference.
        precisions: That of the reference, and that of this run.
        device: The `type` of the model's device.
        sums: By module, to which errors are added.
        introduced_gradients: By parameter, to which errors in gradients are added that modules introduce; None if they
            are not wanted.
        selection: Which samples of the reference's batch this run is given, and how many the batch has; None if the
            same.
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
    ) -> None:
        self._watch, self._reference, self._device, self._sums = watch, reference, device, sums
        self._expected, self._precision = precisions
        # In the backward of the reference the model has the weights of the reference.
        same = self._precision is self._expected
        self._weights = self._precision.weights if same else self._expected.own_weights
        self._introduced_gradients, self._selection = introduced_gradients, selection
        self._notes: dict[Key, Note] = {}
        self._numbers: Counter[Tap] = Counter()
        self._exact: set[Key] = set()
        self._reading_weights: set[Key] = set()

    def call(self, tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module, and compare what it returns."""
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
        call = self._reference.calls.get((tap, number))
        if call is None:
            sums.problem = "is called more often than in the reference"
        else:
            self._compare(call, note, returned_tensors(output), sums)
        return output

    def add_effect(self, call: Call, gradients: Gradients) -> None:
        """Add gradients of the loss by what a module's own ops make, times the errors that they introduce."""
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

    def note_missing_gradients(self) -> None:
        """Note which calls no gradient has reached, unless they introduce no errors."""
        without_gradient = self._reference.without_gradient()
        for key in self._notes.keys() - self._exact - self._reference.reached:
            if key[0].has_own_ops:
                self._sums[key[0]].lacks_gradient = _NO_GRAD if key in without_gradient else _NOT_REACHED

    def _compare(self, call: Call, note: Note, found: list[torch.Tensor], sums: ModuleSums) -> None:
        expected = call.outputs()
        pairs = [(self._of_reference(each), value) for each, value in zip(expected, found, strict=False)]
        if len(expected) != len(found) or not all(map(_are_comparable, pairs)):
            sums.problem = "returns tensors of other shapes than in the reference"
            self._exact.add(call.key)
            return
        introduced = self._introduced(call, note, sums)
        is_exact = True
        for site, (without, with_error) in introduced.items():
            before = sums.introduced.squares, sums.introduced.nonfinite
            if site[0] == "output" or not torch.equal(without, with_error):
                sums.introduced.add(without, with_error)
            is_exact = is_exact and before == (sums.introduced.squares, sums.introduced.nonfinite)
        if is_exact:
            self._exact.add(call.key)
        for place, (reference, value) in enumerate(pairs):
            if not reference.is_floating_point():
                continue
            sums.total.add(reference, value)
            own = introduced.get(("output", place))
            if own is None:
                sums.introduced.add(reference, reference)
                sums.carried.add(reference, value)
            else:
                sums.carried.add_rest(reference, value, *own)

    def _introduced(
        self, call: Call, note: Note, sums: ModuleSums, gradients: Gradients | None = None
    ) -> dict[Site, Pair]:
        """Return what a module's own ops make of the reference's values, there and here; nothing if it is the same.

        Args:
            call, note, sums: Of the module.
            gradients: Of what they make. If given, errors that they introduce into gradients of weights are added.
        """
        keeps_graph = gradients is not None
        if not call.tap.has_own_ops or call.output is None or self._is_the_same(call, note):
            return {}

        def rounded(child: Call | None, place: int, tensor: torch.Tensor) -> torch.Tensor:
            if child is None:
                dtypes = note.inputs
            else:
                child_note = self._notes.get(child.key)
                dtypes = [] if child_note is None else child_note.outputs
            tensor = self._of_reference(tensor)
            return tensor.to(dtypes[place]) if place < len(dtypes) and tensor.is_floating_point() else tensor

        def rounded_and_back(child: Call | None, place: int, tensor: torch.Tensor) -> torch.Tensor:
            return rounded(child, place, tensor).to(tensor.dtype)

        try:
            values = call_again(
                *(self._watch, call, self._device, self._weights, note.region, note.attributes, rounded, self._resized),
                keeps_graph=keeps_graph,
            )
            if any(value.requires_grad for value in values.values()):
                self._reading_weights.add(call.key)
            if keeps_graph or self._rounds(call, note):
                weights, attributes = self._expected.weights, call.attributes
                expected = call_again(
                    *(self._watch, call, self._device, weights, call.region, attributes, rounded_and_back),
                    keeps_graph=keeps_graph,
                )
            else:
                expected = {site: self._of_reference(call.made(site)) for site in values}
        except Exception as error:
            if is_of_memory(error):
                raise
            sums.problem = f"cannot be run by itself: {first_line(error)}"
            return {}
        pairs = {site: (expected[site], value) for site, value in values.items() if site in expected}
        if gradients is not None:
            self._add_gradients(call, note, pairs, gradients, sums)
        pairs = {site: (without.detach(), with_error.detach()) for site, (without, with_error) in pairs.items()}
        if not all(map(_are_comparable, pairs.values())):
            sums.problem = "takes another path by itself"
            return {}
        return {site: pair for site, pair in pairs.items() if pair[0].is_floating_point()}

    def _add_gradients(
        self, call: Call, note: Note, pairs: dict[Site, Pair], gradients: Gradients, sums: ModuleSums
    ) -> None:
        """Add what the backward of a module's own ops makes of gradients here, less what it makes of them there.

        Both get the gradients as they are handed over here.
        """
        added = self._introduced_gradients
        sites = [site for site, pair in pairs.items() if site in gradients and all(each.requires_grad for each in pair)]
        if added is None or not sites:
            return
        if note.attributes:  # weights that a hook has computed from the parameters
            sums.is_split = False
            return

        def of_params(place: int, params: list[torch.Tensor], scale: float) -> list[torch.Tensor | None]:
            given = [(gradients[site] * scale).to(pairs[site][1].dtype).to(pairs[site][place].dtype) for site in sites]
            made = [pairs[site][place] for site in sites]
            return list(torch.autograd.grad(made, params, given, retain_graph=True, allow_unused=True))

        params = call.tap.params
        try:
            with self._watch.telling(None):
                with self._weights(call.tap.module):
                    found, scale = scaled(lambda scale: of_params(1, list(params), scale), self._precision.loss_scale)
                with self._expected.weights(call.tap.module):
                    expected = of_params(0, [self._expected.weight(param) for param in params], scale)
        except Exception as error:
            if is_of_memory(error):
                raise
            sums.is_split = False
            return
        for param, without, with_error in zip(params, expected, found, strict=True):
            if without is None or with_error is None or without.layout is not torch.strided:
                continue
            wide = torch.float64 if without.dtype is torch.float64 else torch.float32
            introduced = (with_error.to(wide) - without.to(wide)) / scale
            added[param] = added[param].add_(introduced) if param in added else introduced

    def _is_the_same(self, call: Call, note: Note) -> bool:
        """Return True if its own ops are those of the reference, on tensors of the same dtypes."""
        both_plain = note.region.is_plain(call.tap.forward) and call.region.is_plain(call.tap.forward)
        return (
            (both_plain or note.region[:2] == call.region[:2])
            and self._selection is None
            and self._expected.dtype is self._precision.dtype is None
            and not self._rounds(call, note)
        )

    def _rounds(self, call: Call, note: Note) -> bool:
        """Return True if anything that the module is given has another dtype here than in the reference."""
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

    def _resized(self, shape: torch.Size) -> torch.Size:
        if self._selection is None or not shape or shape[0] != self._selection[1]:
            return shape
        return torch.Size([len(self._selection[0]), *shape[1:]])


def _are_comparable(pair: Pair) -> bool:
    reference, value = pair
    return reference.shape == value.shape and reference.is_floating_point() == value.is_floating_point()


def _dtypes(value: Any) -> list[torch.dtype]:
    """List the dtypes of a value's tensors, in the order in which `Kept` has them."""
    return [tensor.dtype for tensor in tensors_in(value)]
