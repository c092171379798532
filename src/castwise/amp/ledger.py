"""Which gradients are unscaled already, so that a parameter that two optimizers own is unscaled once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch

from castwise._torch_private import at_the_end_of_this_backward, graph_nodes_made, version
from castwise.amp.gradients import Gradients, params_of

# What a gradient is before a backward: which tensor, and how often it was written to.
_Before: TypeAlias = tuple[Callable[[], torch.Tensor | None], int]


class _Entry(NamedTuple):
    params: list[torch.Tensor]
    unless: torch.Tensor | None
    are_unscaled: bool


class Ledger:
    """The parameters whose gradients were unscaled, or clipped in a way that is yet to come, since the last `update()`.

    Their gradients stay so, also when they are changed or replaced by hand, until a backward of a scaled loss adds to
    them. So they are looked at when such a backward starts and when it ends, and what has changed is scaled again.
    Where the end cannot be seen (of a loss scaled by hand) it counts as lasting until the next look; where the start
    cannot be seen either (of a loss scaled in compiled code), as having lasted from the last `record` on.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._forgotten: dict[int, torch.Tensor] = {}
        self._before: dict[int, _Before] | None = None
        self._nodes_before: int | None = None
        self._when_recorded: dict[int, _Before] = {}
        self._had_hidden_backward = False
        self._may_have_hidden_backwards = False

    def __bool__(self) -> bool:
        return any(entry.are_unscaled for entry in self._entries)

    def record(
        self, params: list[torch.Tensor], unless: torch.Tensor | None = None, *, are_unscaled: bool = True
    ) -> None:
        """Note that gradients are unscaled, or (`unless`, fp32, one element) that they are if it is zero.

        With `are_unscaled=False` note only that something was made of them as they are now.
        """
        self.backward_ends()
        self._entries.append(_Entry(params, unless, are_unscaled))
        self._remember(params)
        if self._may_have_hidden_backwards:
            self._when_recorded = self._look()

    def _remember(self, params: list[torch.Tensor]) -> None:
        if self._forgotten:
            for param in params:
                self._forgotten.pop(id(param), None)

    def clear(self) -> None:
        """Forget everything: the next gradients are scaled ones."""
        self._entries.clear()
        self._forgotten.clear()
        self._before = None
        self._when_recorded = {}

    def backward_is_hidden(self) -> None:
        """Note that there is one now or soon which nobody can watch. Traced by Dynamo: it may only set attributes."""
        self._may_have_hidden_backwards = True
        self._had_hidden_backward = True

    def backward_starts(self) -> None:
        """From now on a gradient that changes is a scaled one."""
        if self._entries:
            self.backward_ends()
            self._before = self._look()

    def backward_may_start(self) -> None:
        """From now on a gradient that changes is a scaled one, if a forward comes first."""
        self.backward_starts()
        self._nodes_before = graph_nodes_made()

    def backward_ends(self) -> None:
        """Forget the gradients that changed since `backward_starts`."""
        if self._had_hidden_backward:
            self._had_hidden_backward = False
            self._keep_what_is_as(self._when_recorded)
        before, self._before = self._before, None
        nodes_before, self._nodes_before = self._nodes_before, None
        if before is not None and nodes_before != graph_nodes_made():
            self._keep_what_is_as(before)

    @contextmanager
    def closure(self) -> Iterator[None]:
        """Take all gradients that the body changes for scaled ones, however it does so, unless it records others."""
        self.backward_ends()
        before, count = self._look(), len(self._entries)
        yield
        self.backward_ends()
        self._keep_what_is_as(before, count)
        for entry in self._entries[count:]:
            self._remember(entry.params)

    def forgotten(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return an optimizer's parameters whose gradients were on record and are now those of a later backward."""
        self.backward_ends()
        if not self._forgotten:
            return []
        return [param for param in params_of(optimizer) if id(param) in self._forgotten and param.grad is not None]

    def _look(self) -> dict[int, _Before]:
        return {id(param): _now(param) for entry in self._entries for param in entry.params}

    def _keep_what_is_as(self, before: dict[int, _Before], count: int | None = None) -> None:
        """Forget the changed gradients of all entries, or of the first ones."""
        for index, entry in enumerate(self._entries[:count]):
            kept = [param for param in entry.params if id(param) in before and _is_as(param, before[id(param)])]
            if len(kept) < len(entry.params):
                self._entries[index] = entry._replace(params=kept)
                of_entry = {id(param): param for param in entry.params}
                for param in kept:
                    del of_entry[id(param)]
                self._forgotten.update(of_entry)

    def watch(self, scaled: torch.Tensor) -> None:
        """Look out for each backward that starts from a scaled loss."""
        scaled.register_hook(self._on_backward)  # type: ignore[no-untyped-call]  # torch's

    def _on_backward(self, _: torch.Tensor) -> None:
        if self._entries:
            self.backward_starts()
            at_the_end_of_this_backward(self.backward_ends)

    def knows_any(self, grads: Gradients) -> bool:
        """Say whether some of these gradients are, or may be, unscaled already."""
        return bool(self) and not self._conditions().keys().isdisjoint(id(param.grad) for param in grads.params)

    def factors(self, grads: Gradients, inv_scale: torch.Tensor) -> list[tuple[torch.Tensor, Gradients]]:
        """Group gradients by what unscales them: `inv_scale`, or 1 where that was done before."""
        if not self:
            return [(inv_scale, grads)]
        conditions = self._conditions()
        groups: dict[int, tuple[torch.Tensor, list[int]]] = {}
        for index, param in enumerate(grads.params):
            if id(param.grad) not in conditions:
                key, factor = 0, inv_scale
            else:
                unless = conditions[id(param.grad)]
                key, factor = id(unless), _inv_scale_if(unless, inv_scale)
            groups.setdefault(key, (factor, []))[1].append(index)
        return [(factor, grads.part(indices)) for factor, indices in groups.values()]

    def _conditions(self) -> dict[int, torch.Tensor | None]:
        self.backward_ends()
        return {
            id(param.grad): entry.unless
            for entry in self._entries
            if entry.are_unscaled
            for param in entry.params
            if param.grad is not None
        }


def _inv_scale_if(condition: torch.Tensor | None, inv_scale: torch.Tensor) -> torch.Tensor:
    """Return `inv_scale` if there is a condition and it is not zero, 1 otherwise."""
    one = torch.ones_like(inv_scale)
    return one if condition is None else torch.where(condition.to(inv_scale.device) != 0, inv_scale, one)


def _now(param: torch.Tensor) -> _Before:
    grad = param.grad
    return (_nothing, 0) if grad is None else (weakref.ref(grad), version(grad))


def _is_as(param: torch.Tensor, before: _Before) -> bool:
    grad = param.grad
    return grad is before[0]() and (grad is None or version(grad) == before[1])


def _nothing() -> None:
    return None
