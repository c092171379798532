"""The hooks that modules and optimizers of torch have, which torch lets one register and remove, but not list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle

Hooks = Mapping[int, Callable[..., Any]]


def hooks_of(register: Callable[..., RemovableHandle]) -> Hooks:
    """Return the live table of the hooks that a method such as `module.register_forward_hook` has registered.

    Args:
        register: The method, bound to its object. A hook is registered with it, and removed at once.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1)
        >>> handle = layer.register_forward_hook(print)
        >>> list(hooks_of(layer.register_forward_hook).values())
        [<built-in function print>]
    """
    handle = register(lambda *_, **__: None)
    handle.remove()
    table: Hooks | None = handle.hooks_dict_ref()
    return {} if table is None else table


@contextmanager
def without(tables: Iterable[MutableMapping[Any, Any]]) -> Iterator[None]:
    """Empty tables of hooks during the block. They are not replaced, because torch keeps references to them."""
    hooks = [(table, dict(table)) for table in tables]
    try:
        for table, _ in hooks:
            table.clear()
        yield
    finally:
        for table, before in hooks:
            table.update(before)
