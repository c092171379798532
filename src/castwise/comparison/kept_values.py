"""What modules are given and return, kept so that a module can be called again with it, and the tensors in that."""

from __future__ import annotations

import dataclasses
import io
import pickle
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from castwise._torch_private import tree_leaves, tree_map, version

# What no module changes, or what is the same object for every call.
_PASSED_ON = (
    *(int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.Generator, nn.Module, type),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)


class Kept:
    """A value as it was when it was kept, with references to its tensors.

    Lists, tuples, dicts and what is registered with torch's pytree are looked into. Any other object, such as a cache
    of keys and values, is copied without its tensors: a module may write to it each time it is called. An object that
    cannot be copied is passed on as it is.

    Args:
        value: Arguments or outputs.
        written: Places of tensors, in the order of `tensors`, that are overwritten later, and are copied therefore.

    Example:
        >>> kept = Kept((torch.ones(2), [3, None]))
        >>> kept.made_of([tensor + 1 for tensor in kept.tensors])
        (tensor([2., 2.]), [3, None])
    """

    __slots__ = ("_structure", "_versions", "tensors", "written")

    def __init__(self, value: Any, written: frozenset[int] = frozenset()) -> None:
        self.tensors: list[torch.Tensor] = []
        self._structure = tree_map(self._keep, value)
        self._versions = [version(tensor) for tensor in self.tensors]
        self.written = written
        for place in written:
            if place < len(self.tensors):
                self.tensors[place] = self.tensors[place].clone()

    def overwritten(self) -> frozenset[int]:
        """Return the places of tensors that were written to since."""
        pairs = zip(self.tensors, self._versions, strict=True)
        return frozenset(place for place, (tensor, before) in enumerate(pairs) if version(tensor) != before)

    def made_of(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value with other tensors in the places of its own."""

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, _TensorPlace):
                return tensors[leaf.place]
            return leaf.copy_with(tensors) if isinstance(leaf, _PickledObject) else leaf

        return tree_map(filled, self._structure)

    def _keep(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            self.tensors.append(leaf.detach())
            return _TensorPlace(len(self.tensors) - 1)
        if leaf is None or isinstance(leaf, _PASSED_ON):
            return leaf
        opened = _opened(leaf)
        if opened is None:
            return leaf
        first = len(self.tensors)
        found = [each for each in opened[1] if isinstance(each, torch.Tensor)]
        self.tensors += [tensor.detach() for tensor in found]
        return _PickledObject(*opened, first)


@dataclasses.dataclass(frozen=True, slots=True)
class _TensorPlace:
    """Where a tensor belongs in a kept value; no tuple, which torch's pytree would look into."""

    place: int


class _PickledObject:
    """An object that torch's pytree does not know, as it was when it was kept.

    Args:
        pickled: It, without what is in `shared`.
        shared: What the pickle refers to by number: tensors, modules, functions.
        first: Place of the first of its tensors.
    """

    def __init__(self, pickled: bytes, shared: list[Any], first: int) -> None:
        self._pickled, self._shared, self._first = pickled, shared, first

    def copy_with(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return a copy of the object with other tensors, given those of the whole kept value."""
        following = iter(tensors[self._first :])
        shared = [next(following) if isinstance(each, torch.Tensor) else each for each in self._shared]
        return _Unpickler(io.BytesIO(self._pickled), shared).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.shared: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, (torch.Tensor, nn.Module, torch.Generator, types.FunctionType, types.MethodType)):
            return None
        for number, known in enumerate(self.shared):
            if known is obj:
                return number
        self.shared.append(obj)
        return len(self.shared) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: Any) -> Any:
        return self._shared[pid]


def _opened(value: Any) -> tuple[bytes, list[Any]] | None:
    """Return an object pickled, and what the pickle refers to; None if it cannot be pickled."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except Exception:  # whatever its own methods raise
        return None
    return file.getvalue(), pickler.shared


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors of a value in the order in which `Kept` has them."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif leaf is not None and not isinstance(leaf, _PASSED_ON):
            found += [each for each in (_opened(leaf) or (b"", []))[1] if isinstance(each, torch.Tensor)]
    return found


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


def attributes_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a module has as plain attributes and that a hook may compute before each forward.

    Such as the weights of torch's older weight norm and spectral norm, and of pruning.
    """
    if not module._forward_pre_hooks:
        return {}
    return {name: value.detach() for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
