"""Handle Ctrl-C as a request to stop at the next step boundary, where the state can be saved."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

from typing_extensions import Self


class StopOnInterrupt:
    """A context in which the first Ctrl-C sets `requested` and the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
