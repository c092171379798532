"""Every call of a model's modules in a run of the reference, and each module called again by itself.

While a model is watched, the `forward` of each module is a `Tap`, which tells the run in progress of each call. (Hooks
would not do: where a module has some, torch leaves the fused path of `nn.TransformerEncoderLayer`.) A module that is
called again gets the reference's inputs, and the calls that its code makes to other modules are answered with what
these returned in the reference. So each module answers for its own ops alone, and all modules together cost one more
forward. What its own ops make are the tensors that it returns and those that it passes to other modules: its *sites*.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from castwise._torch_private import is_backward_running, tree_leaves, tree_map, version
from castwise.comparison.kept_values import Kept, tensors_in
from castwise.comparison.precisions import Region
from castwise.diagnosis.forward_state import RandomState
from castwise.policy.module_rules import named_modules

Key = tuple["Tap", int]
Site = tuple[Literal["output", "passed"], int]
"""A tensor that a call returns, by its place, or that it passes on, by its place in `Call.passed`."""

Written = dict[Key, tuple[frozenset[int], frozenset[int]]]
_ONLY_CALLS_CHILDREN = {nn.Sequential.forward}


class Run(Protocol):
    """What is told of the calls of modules."""

    def call(self, tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the call returns, of `tap.forward` or from elsewhere."""


class Tap:
    """The `forward` of a module while it is watched.

    Args:
        name: Of the module, without wrappers.
        module: The module, of which this becomes an attribute.
        watch: Knows the run in progress.
    """

    def __init__(self, name: str, module: nn.Module, watch: Watch) -> None:
        self.name, self.module = name, module
        self.forward: Callable[..., Any] = module.forward
        self._before, self._watch = vars(module).get("forward"), watch
        self.params = [param for param in module.parameters() if param.requires_grad]
        self.has_own_ops = type(module).forward not in _ONLY_CALLS_CHILDREN

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward of the module: `inspect.signature` asks for it."""
        return self.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, or let the run in progress do so."""
        self._watch.on_call()
        run = self._watch.run
        return self.forward(*args, **kwargs) if run is None else run.call(self, args, kwargs)

    def put_on(self) -> None:
        """Become the module's forward."""
        vars(self.module)["forward"] = self

    def take_off(self) -> None:
        """Give the module back what it had."""
        if self._before is None:
            vars(self.module).pop("forward", None)
        else:
            vars(self.module)["forward"] = self._before


class Watch:
    """Taps on all modules of a model, on from `with` on.

    Args:
        model: The model, unwrapped.
        on_call: Is called before each module; may raise.
    """

    def __init__(self, model: nn.Module, on_call: Callable[[], None] = lambda: None) -> None:
        self.run: Run | None = None
        self.on_call = on_call
        named = {module: name for name, module in reversed(list(named_modules(model)))}
        self.taps = [
            Tap(name, module, self)
            for module, name in reversed(named.items())
            if not isinstance(module, torch.jit.ScriptModule)
        ]

    def __enter__(self) -> Watch:
        for tap in self.taps:
            tap.put_on()
        return self

    def __exit__(self, *_: object) -> None:
        for tap in self.taps:
            tap.take_off()

    @contextmanager
    def telling(self, run: Run | None) -> Iterator[None]:
        """Tell a run of calls for a while, or none."""
        before, self.run = self.run, run
        try:
            yield
        finally:
            self.run = before


class Call:
    """One call of a module in the reference."""

    __slots__ = (
        *("tap", "number", "region", "arguments", "attributes", "shapes", "output", "parent", "children"),
        *("passed", "sites", "random_before", "random_after", "writes_arguments", "writes_buffers"),
        "__weakref__",
    )

    def __init__(self, tap: Tap, number: int, region: Region, arguments: Kept, random: RandomState) -> None:
        self.tap, self.number, self.region, self.arguments = tap, number, region, arguments
        self.attributes = attributes_of(tap.module)
        self.shapes: list[torch.Size] = []
        self.output: Kept | None = None
        self.parent: weakref.ref[Call] | None = None  # weak, so that what no gradient is waited for is freed at once
        self.children: list[Call] = []
        self.passed: list[Passed] = []
        self.sites: set[Site] = set()  # those that are to get a gradient
        self.random_before = self.random_after = random
        self.writes_arguments = bool(arguments.written)
        self.writes_buffers = False

    @property
    def draws(self) -> bool:
        """Whether random numbers were drawn in it."""
        return self.random_before is not self.random_after

    def release(self) -> None:
        """Forget what its own ops need: they will not run again."""
        self.arguments, self.children, self.passed = Kept(()), [], []

    def tensor(self, site: Site) -> torch.Tensor:
        """Return a tensor that it made in the reference."""
        kind, place = site
        if kind == "passed":
            passed = self.passed[place]
            return _direct(passed.arguments)[passed.place]
        return self.outputs()[place]

    def outputs(self) -> list[torch.Tensor]:
        """Return the tensors that it returned in the reference."""
        return [] if self.output is None else returned_tensors(self.output.made_of(self.output.tensors))


class Passed(NamedTuple):
    """A tensor that a module passes to another one.

    Args:
        child: The call that it is passed to.
        arguments: Of that call, which forgets them earlier.
        place: Of the tensor in these.
    """

    child: Call
    arguments: Kept
    place: int


class _Running:
    """A call that has not returned.

    Args:
        call: The call.
        args: What it was given.
    """

    def __init__(self, call: Call, args: Any) -> None:
        self.call = call
        # Tensors that its own ops have not made, or that are noted. They are kept, as others could get their ids.
        self._known = {id(tensor): tensor for tensor in direct_tensors(args)}

    def add(self, value: Any) -> list[tuple[int, torch.Tensor]]:
        """Note a value; return its floating-point tensors that were not known, each with its place."""
        new = []
        for place, tensor in enumerate(direct_tensors(value)):
            if id(tensor) not in self._known:
                self._known[id(tensor)] = tensor
                if tensor.is_floating_point():
                    new.append((place, tensor))
        return new


class ReferenceRun:
    """Keeps references to what each module is given and returns, and hears of the gradients of what it made.

    Args:
        device: The `type` of the model's device.
        written: What the code of the model overwrites in place, as an earlier run has found: it is copied.
        adds_gradients: Whether outputs that do not depend on a trained weight get a gradient as well.
    """

    def __init__(self, device: str, written: Written, adds_gradients: bool = True) -> None:
        self.calls: dict[Key, Call] = {}
        self.sources: list[torch.Tensor] = []
        self.on_gradients: Callable[[Call, dict[Site, torch.Tensor]], None] | None = None
        self.reached: set[Key] = set()
        self._device, self._written, self._adds_gradients = device, written, adds_gradients
        self._numbers: Counter[Tap] = Counter()
        self._running: list[_Running] = []
        self._without_gradient: dict[Tap, list[Call]] = {}
        self._random = RandomState()
        # Gradients that wait for the others of their call, and how many bytes of them there may be.
        self._arrived: dict[Call, dict[Site, torch.Tensor]] = {}
        self._bytes, self._most_bytes = 0, 0

    def call(self, tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module, and keep what it was given and what it returns."""
        if is_backward_running():  # activation checkpointing
            return self._again(tap, args, kwargs)
        number = self._numbers[tap]
        self._numbers[tap] += 1
        written = self._written.get((tap, number), (frozenset(), frozenset()))
        call = Call(tap, number, Region.here(self._device), Kept((args, kwargs), written[0]), self._random_now())
        call.shapes = _shapes((args, kwargs))
        buffers = [version(buffer) for buffer in tap.module.buffers(recurse=False)]
        outer = self._running[-1] if self._running else None
        if outer is not None:
            outer.call.children.append(call)
            call.parent = weakref.ref(outer.call)
            for place, tensor in outer.add((args, kwargs)):
                self._listen(outer.call, ("passed", len(outer.call.passed)), tensor)
                outer.call.passed.append(Passed(call, call.arguments, place))
        self._running.append(_Running(call, (args, kwargs)))
        try:
            output = tap.forward(*args, **kwargs)
        finally:
            self._running.pop()
        if isinstance(output, (types.GeneratorType, types.AsyncGeneratorType)):
            raise TypeError(
                f"module {tap.name or '(root)'!r} returns a generator, which can be read only once: compare a model "
                "whose modules return tensors, or tuples, lists and dicts of them"
            )
        call.random_after = self._random_now()
        call.writes_buffers = buffers != [version(buffer) for buffer in tap.module.buffers(recurse=False)]
        if not torch.is_grad_enabled():
            self._without_gradient.setdefault(tap, []).append(call)
        elif self._adds_gradients and any(map(_lacks_gradient, direct_tensors(output))):
            output = tree_map(self._with_gradient, output)
        call.output = Kept(output, written[1])
        self.calls[tap, number] = call
        self._listen_to_outputs(call, output)
        if outer is not None:
            outer.add(output)
        return output

    def overwritten(self) -> Written:
        """Return what the code of the model has overwritten in place, to be copied by another run."""
        found = {}
        for key, call in self.calls.items():
            places = call.arguments.overwritten(), frozenset() if call.output is None else call.output.overwritten()
            if places[0] or places[1]:
                found[key] = places
        return found

    def without_gradient(self) -> set[Key]:
        """Return which calls ran without gradients, and were not run again with them in the backward."""
        return {(tap, call.number) for tap, calls in self._without_gradient.items() for call in calls}

    def drawing(self) -> list[str]:
        """Return the names of the modules whose own ops draw random numbers."""
        found = [call for call in self.calls.values() if call.draws and not any(each.draws for each in call.children)]
        return list(dict.fromkeys(call.tap.name for call in found))

    def end_backward(self) -> None:
        """Hand over the gradients whose calls wait for others in vain."""
        while self._arrived:
            self._hand_over(next(iter(self._arrived)))

    def _again(self, tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Reentrant checkpointing runs a module first without gradients, and what it makes the second time gets them.
        call = self._waiting(tap, (args, kwargs)) if torch.is_grad_enabled() else None
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

    def _waiting(self, tap: Tap, arguments: Any) -> Call | None:
        """Return, and take off the list, the call without gradients that is now made again."""
        given, waiting = tensors_in(arguments), self._without_gradient.get(tap, [])
        for call in reversed(waiting):
            kept = call.arguments.tensors
            if len(kept) == len(given) and all(map(torch.equal, kept, given)):
                waiting.remove(call)
                return call
        return None

    def _with_gradient(self, leaf: Any) -> Any:
        """Let what does not depend on a trained weight, such as the output of a frozen embedding, have a gradient."""
        if not isinstance(leaf, torch.Tensor) or not _lacks_gradient(leaf):
            return leaf
        source = leaf.detach().requires_grad_()
        self.sources.append(source)
        return source.clone()  # a leaf could not be written to in place

    def _listen_to_outputs(self, call: Call, output: Any) -> None:
        for place, leaf in enumerate(returned_tensors(output)):
            self._listen(call, ("output", place), leaf)

    def _listen(self, call: Call, site: Site, tensor: torch.Tensor) -> None:
        if not call.tap.has_own_ops:
            return
        if not torch.is_grad_enabled():
            if site[0] == "passed":
                call.sites.add(site)  # which reentrant checkpointing may make again, with a gradient
            return
        # Its own ops have not made a leaf, such as a weight that it returns or passes on.
        if tensor.is_leaf:
            return
        call.sites.add(site)
        self._most_bytes = max(self._most_bytes, tensor.nbytes)

        def arrived(gradient: torch.Tensor) -> None:
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
        self.reached.add((call.tap, call.number))
        if self.on_gradients is not None:
            self.on_gradients(call, gradients)

    def _random_now(self) -> RandomState:
        if not self._random.is_current():
            self._random = RandomState()
        return self._random


class Playback:
    """Answers the calls of a module to others with what these have returned in the reference.

    Where the code takes another path than in the reference, as when experts get other tokens, modules run.

    Args:
        watch: Knows this run.
        call: Of the module.
        output_of: Makes an output of a call of the reference.
        resized: Makes the shape in which a tensor of the reference is given here.
    """

    def __init__(
        self,
        watch: Watch,
        call: Call,
        output_of: Callable[[Call], Any],
        resized: Callable[[torch.Size], torch.Size],
    ) -> None:
        self._watch, self._output_of, self._resized = watch, output_of, resized
        self._places: dict[Call, list[int]] = {}
        for each in call.passed:
            self._places.setdefault(each.child, []).append(each.place)
        self._passed: dict[tuple[Call, int], torch.Tensor] = {}
        self._wanted = [(each.child, each.place) for each in call.passed]
        self._left: dict[Tap, deque[Call]] = {}
        for child in call.children:
            self._left.setdefault(child.tap, deque()).append(child)

    def call(self, tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the module has returned in the reference."""
        left = self._left.get(tap)
        if left and [self._resized(shape) for shape in left[0].shapes] == _shapes((args, kwargs)):
            child = left.popleft()
            given = direct_tensors((args, kwargs)) if child in self._places else []
            for place in self._places.get(child, ()):
                self._passed[child, place] = given[place].clone() if child.writes_arguments else given[place]
            if child.draws:
                child.random_after.restore()
            return self._output_of(child)
        with self._watch.telling(None):
            return tap.forward(*args, **kwargs)

    def passed(self) -> dict[Site, torch.Tensor]:
        """Return what the module has passed on, of what it passed on in the reference."""
        return {("passed", number): self._passed[key] for number, key in enumerate(self._wanted) if key in self._passed}


def call_again(
    watch: Watch,
    call: Call,
    device: str,
    weights: Callable[[nn.Module], AbstractContextManager[None]],
    region: Region,
    attributes: Mapping[str, torch.Tensor],
    shown: Callable[[Call | None, int, torch.Tensor], torch.Tensor],
    resized: Callable[[torch.Size], torch.Size] = lambda shape: shape,
    keeps_graph: bool = False,
) -> dict[Site, torch.Tensor]:
    """Run the own ops of a module again, and return the tensors that they make, which may require a gradient.

    Args:
        watch: Knows the run in progress.
        call: Of the module in the reference.
        device: The `type` of the model's device.
        weights: Makes a context in which a module has the weights that it is to be run with.
        region: In which to run it.
        attributes: Tensors that hooks have computed for the module, see `attributes_of`.
        shown: Makes what the module is given of a tensor of the reference: of its arguments (with None and the place of
            the tensor), or of the output of a module that it calls.
        resized: Makes the shape of what is shown of the reference's.
        keeps_graph: Whether a backward is to follow.
    """

    def output_of(child: Call) -> Any:
        kept = child.output
        if kept is None:
            raise RuntimeError(f"{child.tap.name!r} has returned nothing in the reference")
        return kept.made_of(_not_shared(kept, functools.partial(shown, child)))

    args, kwargs = call.arguments.made_of(_not_shared(call.arguments, functools.partial(shown, None)))
    random = RandomState() if call.draws else None
    own = list(call.tap.module.buffers(recurse=False)) if call.writes_buffers else []
    buffers = [(buffer, buffer.clone()) for buffer in own]
    if random is not None:
        call.random_before.restore()
    playback = Playback(watch, call, output_of, resized)
    try:
        with (
            watch.telling(playback),
            weights(call.tap.module),
            _with_attributes(call.tap.module, attributes),
            region.again(device),
            torch.enable_grad(),  # as without gradients torch may take other kernels
            nullcontext() if keeps_graph else forgetting_graph(),
        ):
            output = call.tap.forward(*args, **kwargs)
        outputs: dict[Site, torch.Tensor] = {
            ("output", place): tensor for place, tensor in enumerate(returned_tensors(output))
        }
        return outputs | playback.passed()
    finally:
        if random is not None:
            random.restore()
        for buffer, before in buffers:
            buffer.data.copy_(before)


def forgetting_graph() -> saved_tensors_hooks:
    """Return a context in which forwards run as in training, but keep nothing for a backward."""
    return saved_tensors_hooks(_drop, _nothing_to_unpack)


def attributes_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a module has as plain attributes and that a hook may compute before each forward.

    Such as the weights of torch's older weight norm and spectral norm, and of pruning.
    """
    if not module._forward_pre_hooks:
        return {}
    return {name: value.detach() for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


@contextmanager
def _with_attributes(module: nn.Module, attributes: Mapping[str, torch.Tensor]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def direct_tensors(value: Any) -> list[torch.Tensor]:
    """List the tensors of a value that are not inside of objects which torch's pytree does not know."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def returned_tensors(value: Any) -> list[torch.Tensor]:
    """List the tensors of what a module returns, also those in the fields of dataclasses."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, nn.Module)):
            found += direct_tensors([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])
    return found


def _direct(kept: Kept) -> list[torch.Tensor]:
    return direct_tensors(kept.made_of(kept.tensors))


def dtypes_in(value: Any) -> list[torch.dtype]:
    """List the dtypes of a value's tensors, in the order in which `Kept` has them."""
    return [tensor.dtype for tensor in tensors_in(value)]


def _not_shared(kept: Kept, shown: Callable[[int, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Return what is shown of kept tensors, and copies of those that the model's code is going to overwrite."""
    tensors = [shown(place, tensor) for place, tensor in enumerate(kept.tensors)]
    for place in kept.written:
        if tensors[place] is kept.tensors[place]:
            tensors[place] = tensors[place].clone()
    return tensors


def _lacks_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.requires_grad and not tensor.is_inference()


def _shapes(value: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in direct_tensors(value)]


def _drop(tensor: torch.Tensor) -> None:
    return None


def _nothing_to_unpack(_: object) -> torch.Tensor:
    raise RuntimeError("this forward has kept nothing for a backward")
