"""`LOADED_BATCHES`: which samples of a dataset the batches of a `DataLoader` consist of."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader

from castwise._guard import ErrorBoundary
from castwise._layered_functions import LayeredFunction
from castwise._torch_private import NEXT_INDEX, DataLoaderIterator
from castwise.diagnosis._op_facts import tensors_of

_RECENT = 3  # batches kept; Accelerate loads one ahead
_MOST_BYTES = 2**26  # of a batch, which is kept until the next ones are loaded


class LoadedBatch(NamedTuple):
    """A batch of a map-style dataset.

    Args:
        indices: What the sampler drew: the index of each sample.
        tensors: The tensors of the batch that have a row for each sample.
    """

    indices: list[Any]
    tensors: list[torch.Tensor]

    def index_of(self, row: torch.Tensor, position: int) -> int | None:
        """Return the position of the sample whose values are those of a row, None if no or several samples have them.

        Args:
            row: Values of a sample, as the model got them: on any device, in any dtype and shape.
            position: Where it is in the model's batch, which decides between samples with equal values.
        """
        wanted = row.detach().reshape(-1)
        for tensor in self.tensors:
            rows = tensor.detach().reshape(len(tensor), -1)
            if not wanted.numel() or rows.shape[1] != wanted.numel():
                continue
            rows = rows.to(wanted.device, wanted.dtype)
            same = ((rows == wanted) | (rows.isnan() & wanted.isnan())).all(1).nonzero().flatten().tolist()
            if len(same) == 1 or position in same:
                return position if position in same else int(same[0])
        return None


class LoadedBatches:
    """Follows `DataLoader`s: the indices they draw, and the batches they yield. Nothing that they do is changed.

    Of loaders that yield batches out of order, of iterable datasets, and of a `collate_fn` that drops samples, nothing
    is known.
    """

    def __init__(self) -> None:
        self._followers = 0
        self._guard = ErrorBoundary()
        self._recent: deque[LoadedBatch] = deque(maxlen=_RECENT)
        self._drawn: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()
        self._starting: list[tuple[DataLoader[Any], set[Any]]] = []
        self._layers = (
            (LayeredFunction("__iter__", DataLoader), self._iter),
            (LayeredFunction(NEXT_INDEX, DataLoaderIterator), self._next_index),
            (LayeredFunction("__next__", DataLoaderIterator), self._next),
        )

    def follow(self) -> None:
        """Start to follow loaders that begin from now on."""
        self._followers += 1
        if self._followers == 1 and hasattr(DataLoaderIterator, NEXT_INDEX):
            for function, layer in self._layers:
                function.add(layer)

    def leave(self) -> None:
        """Undo one `follow`."""
        self._followers -= 1
        if not self._followers:
            for function, layer in self._layers:
                function.remove(layer)
            self._recent.clear()
            self._drawn.clear()

    @property
    def recent(self) -> tuple[LoadedBatch, ...]:
        """The batches that were loaded last, the latest first."""
        return tuple(reversed(self._recent))

    def _iter(self, begin: Any, loader: DataLoader[Any]) -> Any:
        # Workers are given their first indices in here. An iterator with persistent workers still has those of an epoch
        # that was left early.
        self._starting.append((loader, set()))
        try:
            iterator = begin(loader)
        finally:
            self._starting.pop()
        self._guard.call(self._begun, loader, iterator)
        return iterator

    def _begun(self, loader: DataLoader[Any], iterator: Any) -> None:
        if getattr(loader, "in_order", True) and isinstance(iterator, DataLoaderIterator):
            self._drawn.setdefault(iterator, deque())
        else:
            self._drawn.pop(iterator, None)

    def _next_index(self, draw: Any, iterator: Any) -> Any:
        drawn = draw(iterator)
        self._guard.call(self._note, iterator, drawn)
        return drawn

    def _note(self, iterator: Any, drawn: Any) -> None:
        if self._starting and iterator not in self._starting[-1][1]:
            self._starting[-1][1].add(iterator)
            self._drawn[iterator] = deque()
        if iterator in self._drawn:
            self._drawn[iterator].append(drawn)

    def _next(self, load: Any, iterator: Any) -> Any:
        batch = load(iterator)
        self._guard.call(self._loaded, iterator, batch)
        return batch

    def _loaded(self, iterator: Any, batch: Any) -> None:
        drawn = self._drawn.get(iterator)
        indices = drawn.popleft() if drawn else None
        if not isinstance(indices, (list, tuple)) or None in indices:
            return
        tensors = [tensor for tensor in _tensors(batch) if tensor.dim() and len(tensor) == len(indices)]
        if sum(tensor.nbytes for tensor in tensors) <= _MOST_BYTES:
            self._recent.append(LoadedBatch(list(indices), tensors))


def _tensors(batch: Any) -> list[torch.Tensor]:
    """Return the tensors in a batch; torch's walk takes several times as long for simple ones."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    items = batch if type(batch) in (list, tuple) else batch.values() if type(batch) is dict else None
    if items is not None and all(isinstance(item, torch.Tensor) for item in items):
        return list(items)
    return tensors_of(batch)


LOADED_BATCHES = LoadedBatches()
"""The batches in this process."""
