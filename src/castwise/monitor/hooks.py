"""Hooks on modules that stay behind when the module is copied or saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class Hook:
    """Calls a function as a hook of a module; a copy of the module has one in its place that does nothing.

    So has one that is unpickled, also where castwise is not installed.

    Args:
        function: Takes what hooks of its kind take.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self._function(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # which takes any arguments, and returns None
