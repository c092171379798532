"""Keep failures in monitoring code from ending a training run.

A door is a function of castwise's that torch, a scaler or the script calls while it trains. Each door is guarded once,
where it is defined (`guarded`) or registered (`ErrorBoundary.door`); what it calls may raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar, cast

from castwise._torch_private import (
    is_in_dispatch_mode,
    is_torch_function_mode_enabled,
    never_traced,
    without_modes,
)
from castwise._warnings import warn_or_print

_Function = TypeVar("_Function", bound=Callable[..., Any])

MOST_IN_A_ROW = 10
"""Failures of a door in a row until it is closed, so that a fault in every step does not slow the run."""


class ErrorBoundary:
    """Suppress exceptions in monitoring code, and warn of the first one.

    As a context manager it guards a part of a door, so that the rest still runs.

    Args:
        text: The warning, without the error.
        is_final: Whether the first failure closes all doors at once, as for checks, which would report mistakes that
            are none if they had missed an event. Otherwise each door is closed after `MOST_IN_A_ROW` failures.
        on_closed: Called when that happens.

    Attributes:
        is_closed: Whether all doors are closed.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     with ErrorBoundary():
        ...         raise OSError("no such device")
        >>> str(caught[0].message)
        'the monitor skipped a measurement that failed: OSError: no such device'
    """

    def __init__(
        self,
        text: str = "the monitor skipped a measurement that failed",
        *,
        is_final: bool = False,
        on_closed: Callable[[], object] | None = None,
    ) -> None:
        self._text, self._is_final, self._on_closed = text, is_final, on_closed
        self._has_warned = self.is_closed = False
        self._failures: dict[str, int] = {}  # in a row, by door

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._warn(error)
        return True

    def call(self, door: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a door outside the script's modes, and return its result; None if it fails or is closed."""
        if self.is_closed or (self._failures and self._failures.get(_name(door), 0) >= MOST_IN_A_ROW):
            return None
        try:
            if is_in_dispatch_mode() or is_torch_function_mode_enabled():
                with without_modes():
                    result = door(*args, **kwargs)
            else:
                result = door(*args, **kwargs)
        except Exception as error:
            self.failed(door, error)
            return None
        if self._failures:
            self._failures.pop(_name(door), None)
        return result

    def door(self, function: _Function) -> _Function:
        """Return a function to register with torch or a scaler, which calls `function` under this guard."""

        def enter(*args: Any, **kwargs: Any) -> Any:
            return self.call(function, *args, **kwargs)

        return cast(_Function, never_traced(enter))

    def failed(self, function: Callable[..., Any], error: Exception) -> None:
        """Warn of an error, and count it; for parts of a door that are called without `call`."""
        self._warn(error)
        door = _name(function)
        self._failures[door] = self._failures.get(door, 0) + 1
        if self._is_final:
            self.is_closed = True
            if self._on_closed is not None:
                with suppress(Exception):
                    self._on_closed()
        elif self._failures[door] == MOST_IN_A_ROW:
            warn_or_print(f"{self._text}: {MOST_IN_A_ROW} times in a row, and is not tried again", RuntimeWarning)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_or_print(f"{self._text}: {type(error).__name__}: {error}", RuntimeWarning)


def guarded(method: _Function) -> _Function:
    """Guard a method that is a door with the `_guard` of its object.

    Dynamo does not trace it: a hook of an optimizer or a scaler may be called inside compiled code.
    """

    @functools.wraps(method)
    def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._guard.call(method, self, *args, **kwargs)

    return cast(_Function, never_traced(enter))


def _name(door: Callable[..., Any]) -> str:
    return getattr(door, "__qualname__", type(door).__qualname__)
