"""`ReferenceRun`: the inputs and outputs of each module in the reference, and the gradients of its sites.

The *sites* of a module are the tensors that its own ops create: those that it returns, and those that it passes to
other modules.
"""

from __future__ import annotations

import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from castwise._torch_private import is_backward_running, tree_map, version
from castwise.comparison._errors import is_rounded
from castwise.comparison._kept_values import Kept, attributes_of, direct_tensors, returned_tensors, tensors_in
from castwise.comparison._precisions import Region
from castwise.comparison._watched_calls import Tap
from castwise.diagnosis._forward_state import RandomState

Key = tuple[Tap, int]
"""A call: the module, and the number of its earlier calls in the same run."""

Site = tuple[Literal["output", "passed"], int]
"""A tensor that a call returns, by its place in the output, or passes on, by its place in `Call.passed`."""

Gradients = dict[Site, torch.Tensor]
Written = dict[Key, tuple[frozenset[int], frozenset[int]]]


class Call:
    """One call of a module in the reference, with everything needed to repeat it with the same values.

    Args:
        key: The module and the number of the call.
        arguments: The arguments.
        given: The tensors in the arguments.
        region: The region of the call.
        random: The random state at its start.
    """

    __slots__ = (
        *("key", "arguments", "region", "attributes", "shapes", "random_before", "random_after", "writes_arguments"),
        *("writes_buffers", "output", "parent", "children", "passed", "known", "sites", "__weakref__"),
    )

    def __init__(
        self, key: Key, arguments: Kept, given: list[torch.Tensor], region: Region, random: RandomState
    ) -> None:
        self.key, self.arguments, self.region = key, arguments, region
        self.attributes = attributes_of(key[0].module)
        self.shapes = [tensor.shape for tensor in given]
        self.random_before = self.random_after = random
        self.writes_arguments = bool(arguments.written)
        self.writes_buffers = False
        self.output: Kept | None = None
        self.parent: weakref.ref[Call] | None = None  # weak, so that a call that awaits no gradient is freed at once
        self.children: list[Call] = []
        self.passed: list[Passed] = []
        # Until the call returns: tensors that its own ops did not create, and its sites. They are kept alive so that
        # their ids are not reused.
        self.known = {id(tensor): tensor for tensor in given}
        self.sites: set[Site] = set()  # those that await a gradient

    @property
    def tap(self) -> Tap:
        """The module."""
        return self.key[0]

    @property
    def draws(self) -> bool:
        """Whether random numbers were drawn in the call."""
        return self.random_before is not self.random_after

    def add_known(self, tensors: list[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        """Record tensors, and return the new floating-point ones, each with its place."""
        new = []
        for position, tensor in enumerate(tensors):
            if id(tensor) not in self.known:
                self.known[id(tensor)] = tensor
                if is_rounded(tensor):
                    new.append((position, tensor))
        return new

    def outputs(self) -> list[torch.Tensor]:
        """Return the tensors in the output."""
        return [] if self.output is None else returned_tensors(self.output.with_tensors(self.output.tensors))

    def made(self, site: Site) -> torch.Tensor:
        """Return the tensor of a site."""
        kind, position = site
        if kind == "output":
            return self.outputs()[position]
        passed = self.passed[position]
        return direct_tensors(passed.arguments.with_tensors(passed.arguments.tensors))[passed.place]

    def release(self) -> None:
        """Free the inputs of its own ops, which will not run again."""
        self.arguments, self.children, self.passed = Kept(()), [], []


class Passed(NamedTuple):
    """A tensor that a module passes to another one.

    Args:
        child: The call that receives the tensor.
        arguments: The arguments of that call, which may release them first.
        place: The place of the tensor in them.
    """

    child: Call
    arguments: Kept
    place: int


class ReferenceRun:
    """Keeps the calls of a forward, and passes on the gradients of their sites in the backward.

    Args:
        device: The `type` of the model's device.
        written: Tensors that the model overwrites in place, found by an earlier run; they are copied.
        adds_gradients: Whether outputs that do not depend on a trained weight also get a gradient.
    """

    def __init__(self, device: str, written: Written, adds_gradients: bool = True) -> None:
        self.calls: dict[Key, Call] = {}
        self.sources: list[torch.Tensor] = []
        self.on_gradients: Callable[[Call, Gradients], None] | None = None
        self.reached: set[Key] = set()
        self.is_over = False
        self.runs_backwards = False  # in its forward, as force-field models do
        self._device, self._written, self._adds_gradients = device, written, adds_gradients
        self._numbers: Counter[Tap] = Counter()
        self._running: list[Call] = []
        self._without_gradient: dict[Tap, list[Call]] = {}
        self._random = RandomState()
        # Gradients that wait for the other ones of their call, and the limit on their bytes.
        self._arrived: dict[Call, Gradients] = {}
        self._bytes, self._most_bytes = 0, 0

    # The forward.

    def call(self, tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module, and keep its arguments and output."""
        if is_backward_running():
            return self._call_in_checkpoint(tap, args, kwargs)
        key = tap, self._numbers[tap]
        self._numbers[tap] += 1
        writes_arguments, writes_output = self._written.get(key, (frozenset(), frozenset()))
        arguments, given = Kept((args, kwargs), writes_arguments), direct_tensors((args, kwargs))
        call = Call(key, arguments, given, Region.here(self._device), self._random_now())
        parent = self._running[-1] if self._running else None
        if parent is not None:
            self._add_child(parent, call, given)
        output = self._run(call, args, kwargs)
        if torch.is_grad_enabled():
            if self._adds_gradients and any(map(_lacks_gradient, direct_tensors(output))):
                output = tree_map(self._with_gradient, output)
        else:
            self._without_gradient.setdefault(tap, []).append(call)
        call.output = Kept(output, writes_output)
        self.calls[key] = call
        self._listen_to_outputs(call, output)
        if parent is not None:
            parent.add_known(direct_tensors(output))
        return output

    def _add_child(self, parent: Call, call: Call, given: list[torch.Tensor]) -> None:
        parent.children.append(call)
        call.parent = weakref.ref(parent)
        for position, tensor in parent.add_known(given):
            self._listen(parent, ("passed", len(parent.passed)), tensor)
            parent.passed.append(Passed(call, call.arguments, position))

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module, and record its side effects."""
        module = call.tap.module
        versions = [version(buffer) for buffer in module.buffers(recurse=False)]
        self._running.append(call)
        try:
            output = call.tap.forward(*args, **kwargs)
        finally:
            self._running.pop()
            call.known = {}
        if isinstance(output, (types.GeneratorType, types.AsyncGeneratorType)):
            raise TypeError(
                f"module {call.tap.name or '(root)'!r} returns a generator, which can be read only once: compare a "
                "model whose modules return tensors, or tuples, lists and dicts of them"
            )
        call.random_after = self._random_now()
        call.writes_buffers = versions != [version(buffer) for buffer in module.buffers(recurse=False)]
        return output

    def _with_gradient(self, leaf: Any) -> Any:
        """Give a tensor that depends on no trained weight, such as a frozen embedding's output, a gradient."""
        if not isinstance(leaf, torch.Tensor) or not _lacks_gradient(leaf):
            return leaf
        source = leaf.detach().requires_grad_()
        self.sources.append(source)
        return source.clone()  # a leaf could not be written to in place

    def _random_now(self) -> RandomState:
        if not self._random.is_current():
            self._random = RandomState()
        return self._random

    def overwritten(self) -> Written:
        """Return the tensors that the model has overwritten in place, which another run must copy."""
        overwritten = {}
        for key, call in self.calls.items():
            places = call.arguments.overwritten(), frozenset() if call.output is None else call.output.overwritten()
            if places[0] or places[1]:
                overwritten[key] = places
        return overwritten

    def drawing(self) -> list[str]:
        """Return the names of the modules whose own ops draw random numbers."""
        calls = [call for call in self.calls.values() if call.draws and not any(child.draws for child in call.children)]
        return list(dict.fromkeys(call.tap.name for call in calls))

    # The backward.

    def _listen_to_outputs(self, call: Call, output: Any) -> None:
        for position, leaf in enumerate(returned_tensors(output)):
            self._listen(call, ("output", position), leaf)

    def _listen(self, call: Call, site: Site, tensor: torch.Tensor) -> None:
        if not call.tap.has_own_ops:
            return
        if not torch.is_grad_enabled():
            if site[0] == "passed":
                call.sites.add(site)  # reentrant checkpointing may create it again, with a gradient
            return
        # A leaf, such as a weight that it returns or passes on, does not come from its own ops.
        if tensor.is_leaf:
            return
        call.sites.add(site)
        self._most_bytes = max(self._most_bytes, tensor.nbytes)

        def arrived(gradient: torch.Tensor) -> None:
            if not self.is_over:
                self.runs_backwards = True
                return
            self._arrived.setdefault(call, {})[site] = gradient
            self._bytes += gradient.nbytes
            if len(self._arrived[call]) == len(call.sites):
                self._hand_over(call)
                call.release()
            while self._bytes > self._most_bytes:
                self._hand_over(next(iter(self._arrived)))

        tensor.register_hook(arrived)  # type: ignore[no-untyped-call]  # torch's

    def _hand_over(self, call: Call) -> None:
        gradients = self._arrived.pop(call)
        self._bytes -= sum(gradient.nbytes for gradient in gradients.values())
        call.sites.difference_update(gradients)
        self.reached.add(call.key)
        if self.on_gradients is not None:
            self.on_gradients(call, gradients)

    def end_backward(self) -> None:
        """Pass on the remaining gradients, whose calls wait for others that will not arrive."""
        while self._arrived:
            self._hand_over(next(iter(self._arrived)))

    def without_gradient(self) -> set[Key]:
        """Return the calls that ran without gradients and were not rerun with gradients in the backward."""
        return {call.key for calls in self._without_gradient.values() for call in calls}

    def _call_in_checkpoint(self, tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module that activation checkpointing reruns.

        Reentrant checkpointing first runs it without gradients; the tensors of the second run get them.
        """
        call = self._first_call(tap, (args, kwargs)) if torch.is_grad_enabled() else None
        parent = None if call is None or call.parent is None else call.parent()
        if parent is not None:
            given = direct_tensors((args, kwargs))
            for number, passed in enumerate(parent.passed):
                if passed.child is call:
                    self._listen(parent, ("passed", number), given[passed.place])
        output = tap.forward(*args, **kwargs)
        if call is not None:
            self._listen_to_outputs(call, output)
        return output

    def _first_call(self, tap: Tap, arguments: Any) -> Call | None:
        """Return the call without gradients that had the same arguments, and remove it from the list."""
        given, waiting = tensors_in(arguments), self._without_gradient.get(tap, [])
        for call in reversed(waiting):
            kept = call.arguments.tensors
            if len(kept) == len(given) and all(map(torch.equal, kept, given)):
                waiting.remove(call)
                return call
        return None


def _lacks_gradient(tensor: torch.Tensor) -> bool:
    return is_rounded(tensor) and not tensor.requires_grad and not tensor.is_inference()
