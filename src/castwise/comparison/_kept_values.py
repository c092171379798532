"""Keep the arguments and outputs of modules, so that a module can be rerun with them, and list their tensors."""

from __future__ import annotations

import dataclasses
import io
import pickle
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from castwise._registered_hooks import hooks_of
from castwise._torch_private import tree_leaves, tree_map, version

# Types that no module changes, or that are the same object in every call.
_PASSED_ON = (
    *(int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.Generator, nn.Module, type),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)


class Kept:
    """A snapshot of a value, with references to its tensors.

    Lists, tuples, dicts and types registered with torch's pytree are traversed. Any other object, such as a KV cache,
    is copied without its tensors, because a module may write to it in each call. An object that cannot be copied is
    kept as it is.

    Args:
        value: Arguments or outputs.
        written: Places of tensors, in the order of `tensors`, to copy because they are overwritten later.

    Example:
        >>> kept = Kept((torch.ones(2), [3, None]))
        >>> kept.with_tensors([tensor + 1 for tensor in kept.tensors])
        (tensor([2., 2.]), [3, None])
    """

    __slots__ = ("_structure", "_versions", "tensors", "written")

    def __init__(self, value: Any, written: frozenset[int] = frozenset()) -> None:
        self.tensors: list[torch.Tensor] = []
        self._structure = tree_map(self._keep, value)
        self._versions = [version(tensor) for tensor in self.tensors]
        self.written = written
        for position in written:
            if position < len(self.tensors):
                self.tensors[position] = self.tensors[position].clone()

    def overwritten(self) -> frozenset[int]:
        """Return the places of tensors that have been written to since."""
        pairs = zip(self.tensors, self._versions, strict=True)
        return frozenset(position for position, (tensor, before) in enumerate(pairs) if version(tensor) != before)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value with its tensors replaced by others."""

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
        inside = [value for value in opened[1] if isinstance(value, torch.Tensor)]
        self.tensors += [tensor.detach() for tensor in inside]
        return _PickledObject(*opened, first)


@dataclasses.dataclass(frozen=True, slots=True)
class _TensorPlace:
    """The place of a tensor in a kept value; not a tuple, which torch's pytree would traverse."""

    place: int


class _PickledObject:
    """A snapshot of an object that torch's pytree does not traverse.

    Args:
        pickled: The pickled object, without the objects in `shared`.
        shared: Objects that the pickle refers to by number: tensors, modules, functions.
        first: Place of the object's first tensor.
    """

    def __init__(self, pickled: bytes, shared: list[Any], first: int) -> None:
        self._pickled, self._shared, self._first = pickled, shared, first

    def copy_with(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return a copy of the object with its tensors replaced; `tensors` are those of the whole kept value."""
        following = iter(tensors[self._first :])
        shared = [next(following) if isinstance(value, torch.Tensor) else value for value in self._shared]
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
    """Return a pickled object and the objects that the pickle refers to; None if it cannot be pickled."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except Exception:  # the object's own methods may raise anything
        return None
    return file.getvalue(), pickler.shared


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value in the order of `Kept.tensors`."""
    tensors: list[torch.Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif leaf is not None and not isinstance(leaf, _PASSED_ON):
            tensors += [value for value in (_opened(leaf) or (b"", []))[1] if isinstance(value, torch.Tensor)]
    return tensors


def direct_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value, except those inside objects that torch's pytree does not traverse."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def returned_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a module's output, including those in dataclass fields."""
    tensors: list[torch.Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, nn.Module)):
            tensors += direct_tensors([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])
    return tensors


def attributes_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's tensors that are plain attributes, which a hook may compute before each forward.

    Torch's older weight norm, spectral norm and pruning keep weights this way.
    """
    attributes = {name: value.detach() for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    return attributes if attributes and hooks_of(module.register_forward_pre_hook) else {}
