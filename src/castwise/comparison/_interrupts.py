"""`Interrupts`: delays Ctrl-C to points where everything can be restored."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Holds back Ctrl-C inside a `with` block, until `let_through` is called or the block ends.

    Python may run a signal handler between any two instructions, including while a context is being entered or is
    restoring something. Only a SIGINT with a Python handler is held back, and only if the block runs in the main
    thread. A second Ctrl-C passes at once, so that hanging code can be stopped.

    Example:
        >>> before = signal.signal(signal.SIGINT, signal.default_int_handler)  # not set in every program
        >>> interrupts = Interrupts()
        >>> try:
        ...     with interrupts:
        ...         signal.raise_signal(signal.SIGINT)
        ...         print("goes on")
        ...         interrupts.let_through()
        ... except KeyboardInterrupt:
        ...     print("stopped")
        goes on
        stopped
        >>> _ = signal.signal(signal.SIGINT, before)
    """

    def __init__(self) -> None:
        self._depth = 0
        self._is_pending = False
        self._handler: Any = None

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._hold_back)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self.let_through()
            self._handler = None

    def let_through(self) -> None:
        """Handle a pending Ctrl-C: raise KeyboardInterrupt, unless the program has another handler."""
        if self._is_pending:
            self._is_pending = False
            self._handler(signal.SIGINT, sys._getframe())

    def _hold_back(self, number: int, frame: FrameType | None) -> None:
        self._is_pending = not self._is_pending
        if not self._is_pending:
            self._handler(number, frame)
