"""`Interrupts`: Ctrl-C at points where everything can be put back."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Holds back Ctrl-C while it is entered, until `let_through` is called or it is left.

    Python runs the handler of a signal between any two instructions, also where a context has just been entered or is
    about to put something back. Held back are only signals to the main thread that run a handler of Python. A second
    Ctrl-C while one is held back gets through at once, so that code that hangs can be stopped.

    Example:
        >>> before = signal.signal(signal.SIGINT, signal.default_int_handler)  # some programs are started without it
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
        """Handle a Ctrl-C that was held back: KeyboardInterrupt, unless the program has another handler."""
        if self._is_pending:
            self._is_pending = False
            self._handler(signal.SIGINT, sys._getframe())

    def _hold_back(self, number: int, frame: FrameType | None) -> None:
        self._is_pending = not self._is_pending
        if not self._is_pending:
            self._handler(number, frame)
