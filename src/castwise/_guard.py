"""Keep failures in monitoring code from ending a training run."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

from castwise._warnings import warn


class Guard:
    """Suppress exceptions in a block of monitoring code, and warn of the first one.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     with Guard():
        ...         raise OSError("no such device")
        >>> str(caught[0].message)
        'the monitor skipped a measurement that failed: OSError: no such device'
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
            text = f"the monitor skipped a measurement that failed: {type(error).__name__}: {error}"
            with suppress(RuntimeWarning):  # raised where warnings are errors
                warn(text, RuntimeWarning)
        return True
