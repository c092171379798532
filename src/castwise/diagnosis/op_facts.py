"""What is known of an op that a dispatch mode sees, before it runs: its name, what it writes, what it is given."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from castwise._torch_private import schema_of, tree_leaves

# What they return holds whatever was in memory.
_UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
# What they write to, they do not read.
_OVERWRITE = {
    *("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_"),
    *("geometric_", "cauchy_"),
}
# They turn infinities into finite numbers, as long as there is a finite number beside them.
_SOFTMAX = {"softmax", "safe_softmax", "log_softmax", "logsumexp", "scaled_dot_product_attention"}
# They add up products, and some begin with their first argument.
_PRODUCTS = {"bmm", "convolution", "dot", "linear", "mm", "mv"}
_PRODUCTS_ADDED = {"addmm", "addmv", "baddbmm"}
_USUAL_NAMES = {"to_copy": "to", "unsafe_view": "view", "unsafe_index": "index"}


@functools.cache
def name_of(func: Any) -> str:
    """Return an op's name as users know it: "aten.softmax" for what `torch.softmax` comes down to."""
    namespace, _, name = str(getattr(func, "overloadpacket", func)).rpartition(".")
    if namespace != "aten":
        return f"{namespace}.{name}" if namespace else name
    if name.lstrip("_").startswith("scaled_dot_product") and "backward" not in name:
        return "aten.scaled_dot_product_attention"
    for prefix in ("_native_", "native_", "_"):
        bare = name.removeprefix(prefix).removesuffix("_legit")
        bare = _USUAL_NAMES.get(bare, bare)
        if bare != name and hasattr(torch.ops.aten, bare):
            return f"aten.{bare}"
    return f"aten.{name}"


def is_random(func: Any) -> bool:
    """Return True if an op may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def leaves_memory_unwritten(func: Any) -> bool:
    """Return True if an op returns memory with whatever is in it."""
    return _name(func) in _UNINITIALISED


def is_softmax(func: Any) -> bool:
    """Return True if an op gives finite results for infinities, as softmax does where not all of a row is masked."""
    return name_of(func).removeprefix("aten.") in _SOFTMAX


def is_of_attention(func: Any) -> bool:
    """Return True if an op is softmax and has no infinite results, whatever is masked."""
    return is_softmax(func) and "log" not in _name(func)


def is_factor(tensor: torch.Tensor, func: Any, args: Any) -> bool:
    """Return True if an op multiplies a tensor and adds up: an infinity in it is no mask any more."""
    name = _name(func)
    return name in _PRODUCTS or (name in _PRODUCTS_ADDED and tensor is not args[0])


def tensors_of(value: Any) -> list[torch.Tensor]:
    """List the tensors in a value, each once."""
    return list(dict.fromkeys(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)))


def is_one_of(tensor: torch.Tensor, tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if a tensor is there, as the same object."""
    return any(tensor is one for one in tensors)


def written_and_read(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors among the arguments that an op writes to, and those whose values it reads."""
    writes = _writes(func)
    if not writes:
        return [], list(dict.fromkeys(_leaves([args, list(kwargs.values())])))
    written: dict[torch.Tensor, None] = {}
    read: dict[torch.Tensor, None] = {}
    names = dict.fromkeys(_names(func)[len(args) :])
    for name, value in [*zip(_names(func), args, strict=False), *((name, kwargs.get(name)) for name in names)]:
        tensors = dict.fromkeys(_leaves(value))
        if name in writes:
            written.update(tensors)
        if not writes.get(name, False):
            read.update(tensors)
    return list(written), list(read)


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an op's argument, in which nothing else than lists can hold some."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)


@functools.cache
def _names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in schema_of(func).arguments)


@functools.cache
def _writes(func: Any) -> dict[str, bool]:
    """Return which arguments an op writes to, and whether it overwrites them without reading."""
    schema = schema_of(func)
    if schema is None or not schema.is_mutable:
        return {}
    return {
        argument.name: argument.is_out or _name(func) in _OVERWRITE
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }


@functools.cache
def returns_a_view(func: Any) -> bool:
    """Return True if an op returns what it is given, seen another way, and computes nothing."""
    schema = schema_of(func)
    if schema is None or schema.is_mutable or not schema.returns:
        return False
    return all(returned.alias_info is not None for returned in schema.returns)


def takes_a_literal(func: Any) -> bool:
    """Return True if an op brings a tensor that Python code has written out, as `torch.tensor([1.0])` does."""
    return _name(func) == "lift_fresh"


def asks_for(args: Any, kwargs: Any, *, nan: bool) -> bool:
    """Return True if the code asks for NaN, or else for infinities: by a number, or in a tensor of numbers alone."""
    wanted = math.isnan if nan else math.isinf
    leaves = tree_leaves([args, kwargs])
    if any(isinstance(leaf, float) and wanted(leaf) for leaf in leaves):
        return True
    return not any(isinstance(leaf, torch.Tensor) for leaf in leaves)


@functools.cache
def _name(func: Any) -> str:
    return str(getattr(func, "overloadpacket", func)).rpartition(".")[2]
