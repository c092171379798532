"""`call_again`: rerun one module in isolation with the values of the reference."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from castwise.comparison._kept_values import Kept, direct_tensors, returned_tensors
from castwise.comparison._precisions import Region
from castwise.comparison._reference_run import Call, Site
from castwise.comparison._watched_calls import Tap, Watch
from castwise.diagnosis._forward_state import RandomState


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
    """Rerun a module's own ops, and return the tensors that they create, which may require a gradient.

    Args:
        watch: The model's watch.
        call: The call of the module in the reference.
        device: The `type` of the model's device.
        weights: Returns a context in which a module has the weights for this run.
        region: The region to run in.
        attributes: Tensors that hooks have computed for the module, see `attributes_of`.
        shown: Maps a tensor of the reference to the one that the module gets. Called with the call that returned the
            tensor (None for arguments), the place of the tensor in it, and the tensor.
        resized: Maps the shape of a reference tensor to the shape after `shown`.
        keeps_graph: Whether a backward will follow.
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
            watch.handling(answers.call),
            weights(call.tap.module),
            _with_attributes(call.tap.module, attributes),
            region.again(device),
            torch.enable_grad(),  # without gradients torch may choose other kernels
            nullcontext() if keeps_graph else forgetting_graph(),
        ):
            output = call.tap.forward(*args, **kwargs)
        outputs: dict[Site, torch.Tensor] = {
            ("output", position): tensor for position, tensor in enumerate(returned_tensors(output))
        }
        return outputs | answers.passed
    finally:
        if random is not None:
            random.restore()
        for buffer, before in buffers:
            buffer.data.copy_(before)


class _Answers:
    """Answers a module's calls to other modules with the outputs that these had in the reference.

    If the code takes another path than in the reference, for example if experts get other tokens, the modules run.

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
        """Return the module's output in the reference, and record the tensors passed to it."""
        left = self._left.get(tap)
        given = direct_tensors((args, kwargs))
        if not left or [self._resized(shape) for shape in left[0].shapes] != [tensor.shape for tensor in given]:
            with self._watch.handling(None):
                return tap.forward(*args, **kwargs)
        child = left.popleft()
        for site, position in self._sites.get(child, ()):
            self.passed[site] = given[position].clone() if child.writes_arguments else given[position]
        if child.draws:
            child.random_after.restore()
        if child.output is None:
            raise RuntimeError(f"{tap.name!r} returned nothing in the reference")
        return _shown(child.output, functools.partial(self._shown, child))


def _shown(kept: Kept, shown: Callable[[int, torch.Tensor], torch.Tensor]) -> Any:
    """Return a kept value with its tensors mapped by `shown`, and copies of those that the code will overwrite."""
    tensors = [shown(position, tensor) for position, tensor in enumerate(kept.tensors)]
    for position in kept.written:
        if tensors[position] is kept.tensors[position]:
            tensors[position] = tensors[position].clone()
    return kept.with_tensors(tensors)


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
    """Return a context in which forwards run as in training, but save no tensors for a backward."""
    return saved_tensors_hooks(_drop, _nothing_to_unpack)


def _drop(tensor: torch.Tensor) -> None:
    return None


class GraphForgottenError(RuntimeError):
    """A forward runs a backward inside `forgetting_graph`, where no tensors are saved for it."""


def _nothing_to_unpack(_: object) -> torch.Tensor:
    raise GraphForgottenError("this forward computes gradients, but no tensors were saved for a backward")
