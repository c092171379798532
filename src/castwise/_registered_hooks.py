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
def without(
    tables: Iterable[MutableMapping[Any, Any]], is_left_out: Callable[[Any], bool] = lambda hook: True
) -> Iterator[None]:
    """Take hooks out of tables during the block. Tables are not replaced, because torch keeps references to them."""
    hooks = [(table, dict(table)) for table in tables]
    try:
        for table, before in hooks:
            for key in [key for key, hook in before.items() if is_left_out(hook)]:
                del table[key]
        yield
    finally:
        for table, before in hooks:
            new = {key: hook for key, hook in table.items() if key not in before}
            table.clear()
            table.update(before | new)
