"""What observes a training run must not end it."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

from castwise._warnings import warn


class Guard:
    """A block in which measuring may fail: the first failure is a warning, and the training continues.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as told:
        ...     with Guard():
        ...         raise OSError("no such device")
        >>> str(told[0].message)
        'the monitor could not measure, and continues without: OSError: no such device'
    """

    def __init__(self) -> None:
        self._has_warned = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self._has_warned:
            self._has_warned = True
            text = f"the monitor could not measure, and continues without: {type(error).__name__}: {error}"
            with suppress(RuntimeWarning):  # where warnings are errors
                warn(text, RuntimeWarning, 2)
        return True
