"""`call_again`: a module called by itself with the values of the reference."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from castwise.comparison.kept_values import Kept, direct_tensors, returned_tensors
from castwise.comparison.precisions import Region
from castwise.comparison.reference_run import Call, Site
from castwise.comparison.watch import Tap, Watch
from castwise.diagnosis.forward_state import RandomState


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
        watch: Of the model.
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
    answers = _Answers(watch, call, shown, resized)
    args, kwargs = _shown(call.arguments, functools.partial(shown, None))
    random = RandomState() if call.draws else None
    own = list(call.tap.module.buffers(recurse=False)) if call.writes_buffers else []
    buffers = [(buffer, buffer.clone()) for buffer in own]
    if random is not None:
        call.random_before.restore()
    try:
        with (
            watch.telling(answers.call),
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
        return outputs | answers.passed
    finally:
        if random is not None:
            random.restore()
        for buffer, before in buffers:
            buffer.data.copy_(before)


class _Answers:
    """Answers the calls that a module makes to others with what these have returned in the reference.

    Where the code takes another path than in the reference, as when experts get other tokens, modules run.

    Args:
        watch, call, shown, resized: See `call_again`.
    """

    def __init__(
        self,
        watch: Watch,
        call: Call,
        shown: Callable[[Call | None, int, torch.Tensor], torch.Tensor],
        resized: Callable[[torch.Size], torch.Size],
    ) -> None:
        self.passed: dict[Site, torch.Tensor] = {}
        self._watch, self._shown, self._resized = watch, shown, resized
        self._sites: dict[Call, list[tuple[Site, int]]] = {}
        for number, passed in enumerate(call.passed):
            self._sites.setdefault(passed.child, []).append((("passed", number), passed.place))
        self._left: dict[Tap, deque[Call]] = {}
        for child in call.children:
            self._left.setdefault(child.tap, deque()).append(child)

    def call(self, tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the module has returned in the reference, and note what it is passed."""
        left = self._left.get(tap)
        given = direct_tensors((args, kwargs))
        if not left or [self._resized(shape) for shape in left[0].shapes] != [tensor.shape for tensor in given]:
            with self._watch.telling(None):
                return tap.forward(*args, **kwargs)
        child = left.popleft()
        for site, place in self._sites.get(child, ()):
            self.passed[site] = given[place].clone() if child.writes_arguments else given[place]
        if child.draws:
            child.random_after.restore()
        if child.output is None:
            raise RuntimeError(f"{tap.name!r} has returned nothing in the reference")
        return _shown(child.output, functools.partial(self._shown, child))


def _shown(kept: Kept, shown: Callable[[int, torch.Tensor], torch.Tensor]) -> Any:
    """Return a kept value with what is shown of its tensors; those that the code is going to overwrite are copied."""
    tensors = [shown(place, tensor) for place, tensor in enumerate(kept.tensors)]
    for place in kept.written:
        if tensors[place] is kept.tensors[place]:
            tensors[place] = tensors[place].clone()
    return kept.made_of(tensors)


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


def forgetting_graph() -> saved_tensors_hooks:
    """Return a context in which forwards run as in training, but keep nothing for a backward."""
    return saved_tensors_hooks(_drop, _nothing_to_unpack)


def _drop(tensor: torch.Tensor) -> None:
    return None


class GraphForgottenError(RuntimeError):
    """A forward runs a backward, though it keeps nothing for one."""


def _nothing_to_unpack(_: object) -> torch.Tensor:
    raise GraphForgottenError("this forward computes gradients, but has kept nothing for a backward")
