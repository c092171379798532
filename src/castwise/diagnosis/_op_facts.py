"""Facts about an op that a dispatch mode intercepts: its name, the tensors it reads and writes, its kind."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from castwise._torch_private import schema_of, tree_leaves

# Ops that return uninitialised memory.
_UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
# Ops that overwrite a tensor without reading it.
_OVERWRITE = {
    *("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_"),
    *("geometric_", "cauchy_"),
}
# Ops that turn infinities into finite numbers if at least one input in the row is finite.
_SOFTMAX = {"softmax", "safe_softmax", "log_softmax", "logsumexp", "scaled_dot_product_attention"}
# Ops that sum products; the second set adds its first argument to the sum.
_PRODUCTS = {"bmm", "convolution", "dot", "linear", "mm", "mv"}
_PRODUCTS_ADDED = {"addmm", "addmv", "baddbmm"}
_USUAL_NAMES = {"to_copy": "to", "unsafe_view": "view", "unsafe_index": "index"}


@functools.cache
def name_of(func: Any) -> str:
    """Return an op's name as users know it, such as "aten.softmax" for `aten._softmax`."""
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


def is_collective(func: Any) -> bool:
    """Return True if an op exchanges tensors with other ranks."""
    return name_of(func).lstrip("_").startswith(("c10d.", "c10d_functional."))


def leaves_memory_unwritten(func: Any) -> bool:
    """Return True if an op returns uninitialised memory."""
    return _name(func) in _UNINITIALISED


def is_softmax(func: Any) -> bool:
    """Return True if an op is a softmax or similar, with finite results unless a whole row is infinite."""
    return name_of(func).removeprefix("aten.") in _SOFTMAX


def is_of_attention(func: Any) -> bool:
    """Return True if an op is a softmax whose results are never infinite, even in a fully masked row."""
    return is_softmax(func) and "log" not in _name(func)


def is_factor(tensor: torch.Tensor, func: Any, args: Any) -> bool:
    """Return True if a tensor is a factor in an op that sums products, where an infinity no longer acts as a mask."""
    name = _name(func)
    return name in _PRODUCTS or (name in _PRODUCTS_ADDED and tensor is not args[0])


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested value, each once."""
    return list(dict.fromkeys(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)))


def is_one_of(tensor: torch.Tensor, tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if this tensor object is among the given ones."""
    return any(tensor is one for one in tensors)


def written_and_read(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an op writes to and those whose values it reads."""
    writes = _writes(func)
    if _has_running_statistics(func):
        return _of_batch_norm(func, args, kwargs)
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


def _of_batch_norm(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what a batch norm writes to and reads: in training it writes running statistics and does not read them.

    The schemas of most such ops do not say that they write. Nothing reads what those leave there.
    """
    given = {**dict(zip(_names(func), args, strict=False)), **kwargs}
    is_training = given.get("training", given.get("train", True))
    running = [given.get(name) for name in ("running_mean", "running_var")]
    written = [tensor for tensor in running if isinstance(tensor, torch.Tensor)]
    read = [tensor for tensor in dict.fromkeys(_leaves(list(given.values()))) if not is_one_of(tensor, written)]
    if not is_training:
        return [], read + written
    return written if _writes(func) else [], read


@functools.cache
def _has_running_statistics(func: Any) -> bool:
    return "batch_norm" in _name(func) and "running_mean" in _names(func)


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an op's argument; only lists and tuples can nest them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)


@functools.cache
def _names(func: Any) -> tuple[str, ...]:
    schema = schema_of(func)
    return () if schema is None else tuple(argument.name for argument in schema.arguments)


@functools.cache
def _writes(func: Any) -> dict[str, bool]:
    """Return the names of the arguments that an op writes to, and whether it overwrites them without reading."""
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
    """Return True if an op computes nothing and returns views of its inputs."""
    schema = schema_of(func)
    if schema is None or schema.is_mutable or not schema.returns:
        return False
    return all(returned.alias_info is not None for returned in schema.returns)


def takes_a_literal(func: Any) -> bool:
    """Return True if an op introduces a tensor of Python literals, as `torch.tensor([1.0])` does."""
    return _name(func) == "lift_fresh"


def asks_for(args: Any, kwargs: Any, *, nan: bool) -> bool:
    """Return True if the code asks for a NaN or infinity: a literal among the arguments, or no tensor arguments.

    Args:
        args: Positional arguments of the op.
        kwargs: Keyword arguments of the op.
        nan: Check for NaN if True, for infinities if False.
    """
    wanted = math.isnan if nan else math.isinf
    leaves = tree_leaves([args, kwargs])
    if any(isinstance(leaf, float) and wanted(leaf) for leaf in leaves):
        return True
    return not any(isinstance(leaf, torch.Tensor) for leaf in leaves)


@functools.cache
def _name(func: Any) -> str:
    return str(getattr(func, "overloadpacket", func)).rpartition(".")[2]
